"""Draws the shapes that show whether the forward's speed holds beside the rows of its table, from a commit's hash.

    python -m benchmarks.draw_forward OUT.toml              40 shapes from the hash of HEAD
    python -m benchmarks.draw_forward OUT.toml --seed HASH  those of another commit
    warpwave bench OUT.toml --peer sdpa_cudnn --peer flash_attention_4 --out RECORD.jsonl

Nobody can know the shapes while the kernels are written, so no rule can be made for them. Their geometric mean over the
best peer is to be that of the suite `forward` within 5 %. Widths, masks and work are those of that suite; lengths,
batches and heads are any.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.draw_model_grid import toml_line

SHAPES = 40
LENGTHS = (1024, 16384)
WIDTH = (1024, 4096)  # heads * head_dim, 2048 in the suite `forward`
TOKENS = (8192, 32768)


def main() -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the suite to write")
    parser.add_argument("--seed", help="a commit's hash; default: HEAD's")
    asked = parser.parse_args()
    if asked.out.suffix != ".toml":
        parser.error(f"{asked.out} must end in .toml, or bench takes it for a suite's name")
    seed = asked.seed
    if seed is None:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
        if git.returncode:
            parser.error(f"this is no git checkout; give --seed. {git.stderr.strip()}")
        seed = git.stdout.strip()
    asked.out.write_text(suite(seed), encoding="utf-8")
    return 0


def suite(seed: str) -> str:
    """The suite as TOML."""
    draw = random.Random(seed)
    lines: list[str] = []
    while len(lines) < SHAPES:
        line = toml_line(_shape(draw))
        if line not in lines:
            lines.append(line)
    description = f"{SHAPES} shapes drawn from {seed} by benchmarks/draw_forward.py"
    return "\n".join([f'description = "{description}"', "cases = [", *lines, "]", ""])


def _shape(draw: random.Random) -> dict[str, Any]:
    head_dim = draw.choice((64, 128, 256))
    heads = _log_uniform(draw, WIDTH[0] // head_dim, WIDTH[1] // head_dim)
    seqlen = _log_uniform(draw, *LENGTHS)
    if draw.random() < 0.5:
        seqlen = -(-seqlen // 64) * 64
    return {
        "head_dim": head_dim,
        "batch": max(1, round(_log_uniform(draw, *TOKENS) / seqlen)),
        "seqlen_q": seqlen,
        "num_heads_q": heads,
        "dtype": draw.choice(("bfloat16", "float16")),
        "causal": draw.choice((False, True)),
    }


def _log_uniform(draw: random.Random, low: int, high: int) -> int:
    return round(low * (high / low) ** draw.random())


if __name__ == "__main__":
    sys.exit(main())
