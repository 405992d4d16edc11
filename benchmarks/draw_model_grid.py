"""Draws the grids that judge the predictions, each from its seed, and writes them as suites of bench.

    python -m benchmarks.draw_model_grid            writes benchmarks/suites/model_grid.toml, _2, ..., _5
    python -m benchmarks.draw_model_grid --check    exit code 1 if a suite is not what its seed draws

A grid is committed before it is measured. Once it has judged, it is used for fitting, and the next grid judges. The
first grid times every kernel on every case that it supports. In the second, each case names a few kernels, drawn so
that all kernels have similar numbers of points; it takes about a minute and a half:

    warpwave bench benchmarks/suites/model_grid_5.toml --peer none --rounds 5 --out grid.jsonl
    python -m benchmarks.calibrate_model --check --judge grid.jsonl

The seed of the third is the first eight digits of the commit before it, so nobody chose it. Nothing was fitted to its
sizes, it includes paged caches, and its cases are in a drawn order, so that a time limit leaves out no particular kind.
The fourth and fifth are drawn like the third, each from the commit before it.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

SUITES = Path(__file__).with_name("suites")
MOST_SCORES = 16 * 4096 * 4096  # limits the time of kernels that keep scores in memory
DESCRIPTION = (
    "the grid that predicted times are judged on, drawn by benchmarks/draw_model_grid.py before it was measured: "
    "plain, under-filled, GQA, packed, odd sizes, windows, causal, float16, float32, one query, "
    "wide and very wide heads"
)
KERNELS = (
    "hopper/flash_fwd",
    "flash_fwd",
    "split_kv",
    "large_head_dim",
    "three_kernel",
    "tiled",
    "naive",
    "eager",
)


@dataclass(frozen=True)
class Grid:
    """One grid.

    Attributes:
        name: name of its suite.
        seed: the seed.
        each: number of cases per kind.
        kernels: kernels of the suite.
        of_a_case: number of kernels that the first, second, ... case of a kind names; empty if all kernels run all.
        others: grids whose cases it must not repeat.
        kinds: kinds of its cases; empty for those of the first grids.
        most_scores: limit of scores per case, over all heads.
        shuffled: whether the cases come in a drawn order instead of by kind.
        description: of its suite; empty for `DESCRIPTION`.
        extra: what every case has beside what is drawn.
    """

    name: str
    seed: int
    each: int
    kernels: tuple[str, ...] = KERNELS
    of_a_case: tuple[int, ...] = ()
    others: tuple[Grid, ...] = ()
    kinds: tuple[Callable[[random.Random], Case], ...] = ()
    most_scores: int = MOST_SCORES
    shuffled: bool = False
    description: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return SUITES / f"{self.name}.toml"


FIRST = Grid("model_grid", 20261121, each=4)
SEED_OF_THIRD = 0xF6C9F18C  # of commit f6c9f18c2abc2f736446e2041008978162622b81
SEED_OF_FOURTH = 0x6161E227  # of commit 6161e227cadec783c9665e1b593174f4611b28ea
SEED_OF_FIFTH = 0xD14CCCCD  # of commit d14ccccd0bcbecabd9f9fab394b9ab1e6bc859e0
SECOND = Grid(
    "model_grid_2", 20261122, each=2, kernels=(*KERNELS, "hopper/large_head_dim"), of_a_case=(5, 4), others=(FIRST,)
)


def main(grids: Sequence[Grid], description: str | None) -> int:
    """Runs the command that writes or checks the suites of grids. Returns the exit code."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the suites that are there, write nothing")
    asked = parser.parse_args()
    code = 0
    for grid in grids:
        drawn = suite(grid)
        if not asked.check:
            grid.path.write_text(drawn, encoding="utf-8")
            print(f"{drawn.count('num_heads_q')} cases written to {grid.path}")
        elif not grid.path.is_file() or grid.path.read_text(encoding="utf-8") != drawn:
            print(f"{grid.path.name} is not what seed {grid.seed} draws")
            code = 1
    return code


def suite(grid: Grid) -> str:
    """Returns the suite as TOML."""
    points: Counter[str] = Counter()
    of_kinds = DESCRIPTION.replace("one query", "one query, pages") if grid.kinds else DESCRIPTION
    description = grid.description or of_kinds
    lines = [f'description = "{description}"', f"kernels = {_toml(grid.kernels)}", "cases = ["]
    # Kernels are drawn separately from cases, so that neither depends on the number of the other.
    beside = random.Random(f"kernels {grid.seed}")
    found = []
    for index, case in enumerate(cases(grid)):
        if grid.of_a_case:
            able = [name for name in grid.kernels if takes(name, case)]
            wanted = grid.of_a_case[index % grid.each]
            named = set(sorted(able, key=lambda name: (points[name], beside.random()))[:wanted])
            points.update(named)
            case = case | {"kernels": [name for name in grid.kernels if name in named]}
        found.append(toml_line({**case, **grid.extra}))
    if grid.shuffled:
        beside.shuffle(found)
    return "\n".join([*lines, *found, "]", ""])


def takes(kernel: str, case: Case) -> bool:
    """Returns whether a kernel can be timed on a case. The rule is stated here, so that a grid stays the same when a
    kernel later supports more. `eager` reads packed lengths on the host, which a CUDA graph cannot capture."""
    width, float32 = case["head_dim"], case["dtype"] == "float32"
    if "page_size" in case:
        return kernel == "split_kv"
    if kernel in ("flash_fwd", "split_kv"):
        return width <= 256
    if kernel == "hopper/flash_fwd":
        return width <= 384 and case.get("precision") != "ieee"
    if kernel == "hopper/large_head_dim":
        return width <= 768 and not float32
    return kernel != "eager" or "lengths" not in case


def cases(grid: Grid) -> list[Case]:
    """Returns the cases of a grid, by kind."""
    draw = random.Random(grid.seed)
    found: list[Case] = []
    seen = {toml_line(case) for other in grid.others for case in cases(other)}
    for kind in grid.kinds or KINDS:
        taken = 0
        while taken < grid.each:
            case = kind(draw)
            if "lengths" in case:
                pairs = sum(length * length for length in case["lengths"])
                scores = case["num_heads_q"] * len(case["lengths"]) * max(case["lengths"]) ** 2
            else:
                pairs = case["batch"] * case["seqlen_q"] * case.get("seqlen_k", case["seqlen_q"])
                scores = pairs * case["num_heads_q"]
            line = toml_line(case)
            if scores > grid.most_scores or not pairs or line in seen:
                continue
            seen.add(line)
            found.append(case)
            taken += 1
    return found


def toml_line(case: Mapping[str, Any]) -> str:
    """Returns a case as a line of a suite's `cases`."""
    return f"    {{ {', '.join(f'{key} = {_toml(value)}' for key, value in case.items())} }},"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


Case = dict[str, Any]


def _plain(draw: random.Random) -> Case:
    heads, width = draw.choice(((32, 64), (16, 128), (8, 256)))
    return {
        "head_dim": width,
        "batch": draw.choice((1, 2, 4, 8)),
        "seqlen_q": draw.choice((512, 1024, 2048, 4096)),
        "num_heads_q": heads,
        "dtype": "bfloat16",
    }


def _under_filled(draw: random.Random) -> Case:
    return {
        "head_dim": draw.choice((64, 128)),
        "batch": 1,
        "seqlen_q": draw.choice((64, 128, 256, 512, 1024)),
        "num_heads_q": draw.choice((1, 2, 3, 5)),
        "dtype": draw.choice(("bfloat16", "float16")),
        "hot": True,
    }


def _grouped(draw: random.Random) -> Case:
    kv = draw.choice((1, 2, 4, 8))
    case = _plain(draw) | {
        "num_heads_q": kv * draw.choice((2, 4, 8)),
        "num_heads_kv": kv,
        "causal": draw.random() < 0.5,
    }
    return case


def _packed(draw: random.Random) -> Case:
    lengths = [max(1, int(draw.lognormvariate(6.0, 0.9))) for _ in range(draw.choice((4, 8, 16)))]
    return {
        "head_dim": draw.choice((64, 128)),
        "num_heads_q": draw.choice((4, 8, 16)),
        "dtype": "bfloat16",
        "causal": draw.random() < 0.5,
        "lengths": lengths,
    }


def _odd(draw: random.Random) -> Case:
    return {
        "head_dim": draw.choice((40, 72, 80, 96, 112, 160, 192)),
        "batch": draw.randint(1, 5),
        "seqlen_q": draw.randint(33, 2999),
        "seqlen_k": draw.randint(33, 2999),
        "num_heads_q": draw.randint(1, 19),
        "dtype": "bfloat16",
    }


def _window(draw: random.Random) -> Case:
    return _plain(draw) | {"window_size": [draw.choice((128, 256, 512)), draw.choice((0, 128))]}


def _causal(draw: random.Random) -> Case:
    return _plain(draw) | {"causal": True}


def _float16(draw: random.Random) -> Case:
    return _plain(draw) | {"dtype": "float16", "causal": draw.random() < 0.5}


def _float32(draw: random.Random) -> Case:
    return {
        "head_dim": draw.choice((64, 128)),
        "batch": draw.choice((1, 2)),
        "seqlen_q": draw.choice((512, 1024, 2048)),
        "num_heads_q": draw.choice((4, 16)),
        "dtype": "float32",
        "precision": draw.choice(("ieee", "tf32x3", "tf32")),
    }


def _one_query(draw: random.Random) -> Case:
    return {
        "head_dim": 128,
        "batch": draw.choice((1, 4, 16, 64)),
        "seqlen_q": 1,
        "seqlen_k": draw.choice((1024, 4096, 8192)),
        "num_heads_q": 32,
        "num_heads_kv": 8,
        "dtype": "bfloat16",
    }


def _wide(draw: random.Random) -> Case:
    return _plain(draw) | {"head_dim": draw.choice((192, 256)), "num_heads_q": draw.choice((4, 8)), "causal": True}


def _very_wide(draw: random.Random) -> Case:
    return _plain(draw) | {
        "head_dim": draw.choice((384, 512, 1024)),
        "num_heads_q": draw.choice((2, 4, 8)),
        "causal": draw.random() < 0.5,
    }


KINDS: tuple[Callable[[random.Random], Case], ...] = (
    _plain,
    _under_filled,
    _grouped,
    _packed,
    _odd,
    _window,
    _causal,
    _float16,
    _float32,
    _one_query,
    _wide,
    _very_wide,
)


# Of the third grid: other sizes than those of the first two, and pages ---------------------------------------------


def _sizes(draw: random.Random) -> Case:
    heads, width = draw.choice(((24, 64), (12, 128), (6, 256)))
    return {
        "head_dim": width,
        "batch": draw.choice((1, 2, 3, 4)),
        "seqlen_q": draw.choice((640, 896, 1280, 1792, 2304, 2816)),
        "num_heads_q": heads,
        "dtype": "bfloat16",
    }


def _few_blocks(draw: random.Random) -> Case:
    return _under_filled(draw) | {
        "seqlen_q": draw.choice((48, 96, 160, 320, 448, 704)),
        "num_heads_q": draw.randint(1, 6),
    }


def _shared_heads(draw: random.Random) -> Case:
    kv = draw.choice((1, 2, 4))
    return _sizes(draw) | {
        "num_heads_q": kv * draw.choice((2, 4, 6)),
        "num_heads_kv": kv,
        "causal": draw.random() < 0.5,
    }


def _band(draw: random.Random) -> Case:
    return _sizes(draw) | {"window_size": [draw.choice((96, 192, 384)), draw.choice((0, 64))]}


def _diagonal(draw: random.Random) -> Case:
    return _sizes(draw) | {"causal": True}


def _half(draw: random.Random) -> Case:
    return _sizes(draw) | {"dtype": "float16", "causal": draw.random() < 0.5}


def _single(draw: random.Random) -> Case:
    return _float32(draw) | {"seqlen_q": draw.choice((640, 896, 1280)), "num_heads_q": draw.choice((3, 6, 12))}


def _decode(draw: random.Random) -> Case:
    kv, group = draw.choice(((8, 4), (4, 4), (2, 8)))
    return {
        "head_dim": draw.choice((64, 128)),
        "batch": draw.choice((3, 6, 24, 48)),
        "seqlen_q": 1,
        "seqlen_k": draw.choice((1500, 3000, 5000, 7000)),
        "num_heads_q": kv * group,
        "num_heads_kv": kv,
        "dtype": "bfloat16",
    }


def _pages(draw: random.Random) -> Case:
    return _decode(draw) | {"page_size": draw.choice((16, 32, 64, 128))}


def _broad(draw: random.Random) -> Case:
    return _diagonal(draw) | {"head_dim": draw.choice((192, 256)), "num_heads_q": draw.choice((3, 6))}


def _very_broad(draw: random.Random) -> Case:
    width = draw.choice((384, 512, 1024))
    return _sizes(draw) | {"head_dim": width, "num_heads_q": draw.choice((3, 6)), "causal": draw.random() < 0.5}


THIRD = Grid(
    "model_grid_3",
    SEED_OF_THIRD,
    each=2,
    kernels=(*KERNELS, "hopper/large_head_dim"),
    of_a_case=(4, 3),
    others=(FIRST, SECOND),
    kinds=(
        _sizes,
        _few_blocks,
        _shared_heads,
        _packed,
        _odd,
        _band,
        _diagonal,
        _half,
        _single,
        _decode,
        _pages,
        _broad,
        _very_broad,
    ),
    most_scores=100_000_000,
    shuffled=True,
)
FOURTH = replace(THIRD, name="model_grid_4", seed=SEED_OF_FOURTH, others=(FIRST, SECOND, THIRD))
FIFTH = replace(THIRD, name="model_grid_5", seed=SEED_OF_FIFTH, others=(FIRST, SECOND, THIRD, FOURTH))
GRIDS = (FIRST, SECOND, THIRD, FOURTH, FIFTH)

if __name__ == "__main__":
    sys.exit(main(GRIDS, __doc__))
