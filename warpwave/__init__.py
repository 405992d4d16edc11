"""warpwave: exact attention on GPUs, and why it is as fast as it is.

    import warpwave
    out = warpwave.attention(q, k, v, causal=True)      # (batch, seqlen, num_heads, head_dim)
    print(warpwave.explain(q, k, v, causal=True))       # which kernel ran, and why

Everything a user may import is named here, and loaded when it is first used: importing warpwave imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warpwave.attention import attention as attention
    from warpwave.attention import attention_varlen as attention_varlen
    from warpwave.errors import InvalidInput as InvalidInput
    from warpwave.errors import InvalidType as InvalidType
    from warpwave.errors import UnsupportedProblem as UnsupportedProblem
    from warpwave.explain import Explanation as Explanation
    from warpwave.explain import explain as explain
    from warpwave.hardware.gpu import Gpu as Gpu
    from warpwave.problem import AttentionProblem as AttentionProblem
    from warpwave.problem import Causal as Causal

__version__ = "0.1.0"

_HOME = {
    "attention": "warpwave.attention",
    "attention_varlen": "warpwave.attention",
    "explain": "warpwave.explain",
    "Explanation": "warpwave.explain",
    "AttentionProblem": "warpwave.problem",
    "Causal": "warpwave.problem",
    "Gpu": "warpwave.hardware.gpu",
    "InvalidInput": "warpwave.errors",
    "InvalidType": "warpwave.errors",
    "UnsupportedProblem": "warpwave.errors",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'warpwave' has no attribute {name!r}")
    import importlib
    import sys

    value = getattr(importlib.import_module(_HOME[name]), name)
    # Set on the module for good: the submodule of the same name (warpwave.attention) must not shadow the function.
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
