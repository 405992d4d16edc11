"""The peers by name, in the order of the tables: one small function each, one module per library."""

from __future__ import annotations

from functools import partial

from torch.nn.attention import SDPBackend

from warpwave.workbench.bench.peers import flash_attention_4, three_calls
from warpwave.workbench.bench.peers.ffpa import ffpa_cute, ffpa_triton
from warpwave.workbench.bench.peers.flex import flex_attention
from warpwave.workbench.bench.peers.peer import Peer, PeerUnavailable, Prepared
from warpwave.workbench.bench.peers.sdpa import MATH_SCORE_BYTES, sdpa, varlen

PEERS: dict[str, Peer] = {
    "sdpa_default": partial(sdpa, None),
    "sdpa_flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa_efficient": partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "sdpa_cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa_math": partial(sdpa, SDPBackend.MATH),
    "torch_varlen": varlen,
    "flex_attention": flex_attention,
    "flash_attention_4": flash_attention_4.prepare,
    "ffpa_cute": ffpa_cute,
    "ffpa_triton": ffpa_triton,
    "three_calls": three_calls.prepare,
}

__all__ = ["MATH_SCORE_BYTES", "PEERS", "Peer", "PeerUnavailable", "Prepared"]
