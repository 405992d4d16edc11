"""Exact attention on GPUs, and explanations of its speed.

    import warpwave
    out = warpwave.attention(q, k, v, causal=True)      # (batch, seqlen, num_heads, head_dim)
    print(warpwave.explain(q, k, v, causal=True))       # which kernel runs it, and why

All public names are listed here and loaded when they are first used, so importing warpwave does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warpwave.api import attention as attention
    from warpwave.api import attention_varlen as attention_varlen
    from warpwave.api import attention_with_kv_cache as attention_with_kv_cache
    from warpwave.api import warmup as warmup
    from warpwave.errors import InvalidInput as InvalidInput
    from warpwave.errors import InvalidType as InvalidType
    from warpwave.errors import OutOfPages as OutOfPages
    from warpwave.errors import UnsupportedProblem as UnsupportedProblem
    from warpwave.gpu import Gpu as Gpu
    from warpwave.kernels.quantize import Quantized as Quantized
    from warpwave.kernels.quantize import quantize as quantize
    from warpwave.kv_cache import CacheLayer as CacheLayer
    from warpwave.kv_cache import PagedKVCache as PagedKVCache
    from warpwave.kv_cache import Rotary as Rotary
    from warpwave.problem import AttentionProblem as AttentionProblem
    from warpwave.problem import Causal as Causal
    from warpwave.states import merge_states as merge_states
    from warpwave.workbench.explain.explanation import Explanation as Explanation
    from warpwave.workbench.explain.explanation import explain as explain

__version__ = "0.1.0"

_HOME = {
    "attention": "warpwave.api",
    "attention_varlen": "warpwave.api",
    "attention_with_kv_cache": "warpwave.api",
    "merge_states": "warpwave.states",
    "warmup": "warpwave.api",
    "quantize": "warpwave.kernels.quantize",
    "Quantized": "warpwave.kernels.quantize",
    "PagedKVCache": "warpwave.kv_cache",
    "CacheLayer": "warpwave.kv_cache",
    "Rotary": "warpwave.kv_cache",
    "explain": "warpwave.workbench.explain.explanation",
    "Explanation": "warpwave.workbench.explain.explanation",
    "AttentionProblem": "warpwave.problem",
    "Causal": "warpwave.problem",
    "Gpu": "warpwave.gpu",
    "InvalidInput": "warpwave.errors",
    "InvalidType": "warpwave.errors",
    "OutOfPages": "warpwave.errors",
    "UnsupportedProblem": "warpwave.errors",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'warpwave' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # the next access does not call this function
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
