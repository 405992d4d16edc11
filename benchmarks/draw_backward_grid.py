"""Draws the calls whose gradients the time model is fitted to and judged on, and writes them as suites.

    python -m benchmarks.draw_backward_grid            writes benchmarks/suites/backward_grid_*.toml
    python -m benchmarks.draw_backward_grid --check    exit code 1 if a suite is not what its seed draws

There are two pairs of grids, to fit and to judge: `backward_grid_fit` and `_judge` of all kernels, and `_fit_2` and
`_judge_2` of `three_kernel`'s gradients alone. The grids of a pair have the same kinds of calls. Their seeds are two
parts of the hash of a commit before them. No call is in both. `benchmarks.time_gradients` times the calls of both in
one run.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace

from benchmarks.draw_model_grid import Case, Grid, main

COMMIT, COMMIT_2 = "d2afe212f4f4130d30abccf9830ef2230b426376", "ffc4f37"
MOST_SCORES = 1 << 30  # over all heads: 3.5 ms in float16 and 40 ms in float32 at head_dim 64
LENGTHS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096)
GRADIENT_KERNELS = ("hopper/flash_bwd", "flash_bwd")
OWN_GRADIENTS = ("three_kernel", "eager")  # beyond the head sizes of the others


def _sized(draw: random.Random, width: int, dtype: str = "bfloat16") -> Case:
    """Returns a full call whose heads are 1,024 to 2,048 columns wide together."""
    return {
        "head_dim": width,
        "batch": draw.choice((1, 2, 4, 8)),
        "seqlen_q": draw.choice(LENGTHS),
        "num_heads_q": max(1, draw.choice((1024, 2048)) // width),
        "dtype": dtype,
        "kernels": list(GRADIENT_KERNELS),
    }


def _full(draw: random.Random) -> Case:
    return _sized(draw, draw.choice((64, 128)))


def _causal(draw: random.Random) -> Case:
    return _sized(draw, draw.choice((64, 128))) | {"causal": True}


def _long(draw: random.Random) -> Case:
    return _sized(draw, draw.choice((64, 128))) | {
        "batch": 1,
        "seqlen_q": draw.choice((8192, 12288, 16384)),
        "num_heads_q": draw.choice((3, 4, 8)),
        "causal": True,
    }


def _few_blocks(draw: random.Random) -> Case:
    return _sized(draw, draw.choice((64, 128))) | {
        "batch": 1,
        "seqlen_q": draw.choice((64, 128, 192, 320, 640)),
        "num_heads_q": draw.choice((1, 2, 4, 8)),
        "causal": draw.random() < 0.5,
    }


def _grouped(draw: random.Random) -> Case:
    kv = draw.choice((1, 2, 4))
    return _sized(draw, draw.choice((64, 128))) | {
        "num_heads_q": kv * draw.choice((2, 4, 8)),
        "num_heads_kv": kv,
        "causal": draw.random() < 0.5,
    }


def _other_widths(draw: random.Random) -> Case:
    return _sized(draw, draw.choice((8, 16, 32, 80, 96, 112))) | {
        "num_heads_q": draw.choice((8, 12, 16)),
        "causal": draw.random() < 0.5,
    }


def _wide(draw: random.Random) -> Case:
    return _sized(draw, draw.choice((160, 192, 256))) | {"causal": draw.random() < 0.5}


def _widest(draw: random.Random) -> Case:
    return _sized(draw, 256)


def _very_wide(draw: random.Random) -> Case:
    return _sized(draw, draw.choice((320, 512, 1024))) | {
        "batch": draw.choice((1, 2)),
        "num_heads_q": draw.choice((2, 4)),
        "causal": draw.random() < 0.5,
        "kernels": list(OWN_GRADIENTS),
    }


def _window(draw: random.Random) -> Case:
    sides = [draw.choice((128, 256, 512)), draw.choice((0, 64))]
    return _sized(draw, draw.choice((64, 128))) | {"window_size": sides}


def _packed(draw: random.Random) -> Case:
    return {
        "head_dim": draw.choice((64, 128)),
        "num_heads_q": draw.choice((8, 16)),
        "dtype": "bfloat16",
        "causal": draw.random() < 0.5,
        "lengths": [max(1, int(draw.lognormvariate(6.5, 0.8))) for _ in range(draw.choice((4, 8, 12)))],
        "kernels": list(GRADIENT_KERNELS),
    }


def _two_lengths(draw: random.Random) -> Case:
    return _sized(draw, draw.choice((64, 128))) | {
        "seqlen_q": draw.randint(100, 2999),
        "seqlen_k": draw.randint(100, 2999),
        "num_heads_q": draw.choice((8, 16)),
    }


def _bias(draw: random.Random) -> Case:
    return _sized(draw, draw.choice((64, 128)), "float16") | {
        "batch": draw.choice((1, 2)),
        "seqlen_q": draw.choice((512, 1024, 2048)),
        "num_heads_q": draw.choice((4, 8)),
        "bias": True,
    }


def _half(draw: random.Random) -> Case:
    return _sized(draw, draw.choice((64, 128)), "float16") | {"causal": draw.random() < 0.5}


def _float32(draw: random.Random) -> Case:
    return _sized(draw, draw.choice((64, 128)), "float32") | {
        "batch": draw.choice((1, 2)),
        "seqlen_q": draw.choice((512, 1024, 2048)),
        "num_heads_q": draw.choice((4, 8)),
        "causal": draw.random() < 0.5,
        "precision": draw.choice(("default", "ieee", "tf32")),
    }


def _by_operations(draw: random.Random) -> Case:
    return _sized(draw, 128) | {
        "batch": 1,
        "seqlen_q": draw.choice((2048, 4096)),
        "causal": draw.random() < 0.5,
        "kernels": ["eager"],
    }


def _of_products(draw: random.Random, width: int, dtype: str = "bfloat16") -> Case:
    """Returns a call for `three_kernel`'s gradients."""
    return _sized(draw, width, dtype) | {
        "batch": draw.choice((1, 2, 4)),
        "num_heads_q": draw.choice((1, 2, 4, 8)),
        "causal": draw.random() < 0.5,
        "kernels": ["three_kernel"],
    }


def _products_in_16_bits(draw: random.Random) -> Case:
    return _of_products(draw, draw.choice((264, 320, 384, 512, 768, 1024, 2048)), draw.choice(("bfloat16", "float16")))


def _products_of_few(draw: random.Random) -> Case:
    return _products_in_16_bits(draw) | {"batch": 1, "seqlen_q": draw.choice((96, 128, 256, 512, 640))}


def _products_of_groups(draw: random.Random) -> Case:
    kv = draw.choice((1, 2))
    return _products_in_16_bits(draw) | {"num_heads_q": kv * draw.choice((2, 4)), "num_heads_kv": kv}


def _products_in_float32(draw: random.Random) -> Case:
    return _of_products(draw, draw.choice((96, 128, 192, 256, 512)), "float32") | {
        "seqlen_q": draw.choice((1024, 1536, 2048, 3072)),
        "precision": draw.choice(("default", "ieee", "tf32")),
    }


KINDS_2 = (_products_in_16_bits, _products_of_few, _products_of_groups, _products_in_float32)
KINDS: tuple[Callable[[random.Random], Case], ...] = (
    *(_full, _causal, _long, _few_blocks, _grouped, _other_widths, _wide, _widest, _very_wide, _window, _packed),
    *(_two_lengths, _bias, _half, _float32, _by_operations),
)
FIT = Grid(
    "backward_grid_fit",
    int(COMMIT[:8], 16),
    each=3,
    kernels=(*GRADIENT_KERNELS, *OWN_GRADIENTS),
    kinds=KINDS,
    most_scores=MOST_SCORES,
    shuffled=True,
    description="gradients that the time model is fitted to, drawn by benchmarks/draw_backward_grid.py",
    extra={"gradients": True},
)
JUDGE = replace(
    FIT, name="backward_grid_judge", seed=int(COMMIT[8:16], 16), others=(FIT,),
    description="gradients that the time model is judged on, drawn by benchmarks/draw_backward_grid.py",
)  # fmt: skip
FIT_2 = replace(
    FIT, name="backward_grid_fit_2", seed=int(COMMIT_2[:4], 16), each=6, kernels=("three_kernel",), kinds=KINDS_2
)
JUDGE_2 = replace(
    JUDGE, name="backward_grid_judge_2", seed=int(COMMIT_2[3:], 16), each=4, kernels=("three_kernel",), kinds=KINDS_2,
    others=(FIT_2,),
)  # fmt: skip
GRIDS = (FIT, JUDGE, FIT_2, JUDGE_2)

if __name__ == "__main__":
    sys.exit(main(GRIDS, __doc__))
