"""Cases as data: a suite is a TOML file that lists attention problems, and this module reads it.

    description = "what the suite is for"
    cases = [
        { batch = [16, 4], seqlen_q = 1024, num_heads_q = 8, head_dim = 64, dtype = "float16", causal = [false, true] },
    ]

A list stands for one case for each of its values, and several lists for every combination. What a case leaves out
follows from the rest (`num_heads_kv` from `num_heads_q`, `seqlen_k` from `seqlen_q`, `head_dim_v` from `head_dim`,
`softmax_scale` from `head_dim`), or is off.
"""

from __future__ import annotations

import difflib
import itertools
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from warpwave.problem import PRECISIONS, AttentionProblem, Causal, Operands

SUITES = Path(__file__).parent / "suites"
REQUIRED = ("batch", "seqlen_q", "num_heads_q", "head_dim", "dtype")
SIZES = ("batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv", "head_dim", "head_dim_v")
KEYS = (*SIZES, "dtype", "softmax_scale", "causal", "precision")
DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
CAUSAL = {
    False: None,
    True: Causal(),
    "bottom_right": Causal("bottom_right"),
    "top_left": Causal("top_left"),
}


class SuiteError(ValueError):
    """A suite that does not exist, or a suite file that does not say what it must."""


@dataclass(frozen=True)
class Case:
    """One problem of a suite, under a name that is unique in it and made from the problem."""

    name: str
    problem: AttentionProblem


@dataclass(frozen=True)
class Suite:
    """Cases that are measured together."""

    name: str
    description: str
    cases: tuple[Case, ...]


def suite_names() -> list[str]:
    """The suites that come with the package."""
    return sorted(path.stem for path in SUITES.glob("*.toml"))


def load_suite(suite: str) -> Suite:
    """A suite by its name, or by the path of a TOML file.

    Raises:
        SuiteError: no such suite, or the first mistake in its file, with the file, the case and what is allowed.
    """
    path = Path(suite) if suite.endswith(".toml") else SUITES / f"{suite}.toml"
    if not path.is_file():
        known = ", ".join(suite_names())
        raise SuiteError(f"there is no suite {suite!r}; give one of {known}, or the path of a .toml file")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path.name} is not TOML: {error}") from error
    return parse_suite(path.stem, data, source=path.name)


def parse_suite(name: str, data: Mapping[str, Any], *, source: str) -> Suite:
    """A suite from parsed TOML; `source` is what errors call it."""
    _check_keys(data, ("description", "cases"), ("description", "cases"), source)
    if not isinstance(data["description"], str):
        raise SuiteError(f"{source}: description must be a string, got {data['description']!r}")
    if not isinstance(data["cases"], list) or not data["cases"]:
        raise SuiteError(f"{source}: cases must be a list of at least one table")
    cases: dict[str, Case] = {}
    for index, entry in enumerate(data["cases"]):
        where = f"{source}: cases[{index}]"
        for fields in _expand(entry, where):
            problem = _problem(fields, where)
            case = Case(case_name(problem), problem)
            if case.name in cases:
                raise SuiteError(f"{where}: the case {case.name!r} is there already")
            cases[case.name] = case
    return Suite(name, data["description"], tuple(cases.values()))


def case_name(problem: AttentionProblem) -> str:
    """Short, for tables and records: `d128 4x4096 h16 bf16 causal`."""

    def pair(a: int, b: int) -> str:
        return f"{a}" if a == b else f"{a}/{b}"

    parts = [
        f"d{pair(problem.head_dim, problem.head_dim_v)}",
        f"{problem.batch}x{pair(problem.seqlen_q, problem.seqlen_k)}",
        f"h{pair(problem.num_heads_q, problem.num_heads_kv)}",
        DTYPES[problem.dtype],
    ]
    if problem.causal is not None:
        parts.append("causal" if problem.causal.alignment == "bottom_right" else "causal-top-left")
    if problem.softmax_scale != default_scale(problem.head_dim):
        parts.append(f"scale{problem.softmax_scale:g}")
    if problem.precision != "default":
        parts.append(problem.precision)
    return " ".join(parts)


def default_scale(head_dim: int) -> float:
    """What `softmax_scale` is where nobody gives one."""
    return 1 / math.sqrt(head_dim)


def make_operands(problem: AttentionProblem, device: torch.device | str, *, seed: int = 0) -> Operands:
    """Inputs from N(0, 1), the same for the same problem, seed and kind of device. Zeros would run faster than data."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, problem.dtype)

    def normal(seqlen: int, heads: int, head_dim: int) -> torch.Tensor:
        return torch.randn(problem.batch, seqlen, heads, head_dim, generator=generator, device=device, dtype=dtype)

    return Operands(
        q=normal(problem.seqlen_q, problem.num_heads_q, problem.head_dim),
        k=normal(problem.seqlen_k, problem.num_heads_kv, problem.head_dim),
        v=normal(problem.seqlen_k, problem.num_heads_kv, problem.head_dim_v),
    )


def _expand(entry: Any, where: str) -> Iterator[dict[str, Any]]:
    if not isinstance(entry, dict):
        raise SuiteError(f"{where} must be a table, got {entry!r}")
    _check_keys(entry, REQUIRED, KEYS, where)
    values = [value if isinstance(value, list) else [value] for value in entry.values()]
    for combination in itertools.product(*values):
        yield dict(zip(entry, combination, strict=True))


def _problem(fields: dict[str, Any], where: str) -> AttentionProblem:
    for key in SIZES:
        value = fields.get(key, 1)
        if type(value) is not int or value < 1:  # a bool is an int to isinstance
            raise SuiteError(f"{where}: {key} must be a positive integer, got {value!r}")
    causal = fields.get("causal", False)
    if not isinstance(causal, bool | str) or causal not in CAUSAL:
        raise SuiteError(f"{where}: causal must be true, false, 'bottom_right' or 'top_left', got {causal!r}")
    if not isinstance(fields["dtype"], str) or fields["dtype"] not in DTYPES:
        raise SuiteError(f"{where}: dtype must be one of {', '.join(DTYPES)}, got {fields['dtype']!r}")
    scale = fields.get("softmax_scale", default_scale(fields["head_dim"]))
    if type(scale) not in (int, float) or not (0 <= scale < math.inf):
        raise SuiteError(f"{where}: softmax_scale must be a finite number >= 0, got {scale!r}")
    precision = fields.get("precision", "default")
    if precision not in PRECISIONS or (precision != "default" and fields["dtype"] != "float32"):
        raise SuiteError(
            f"{where}: precision must be one of {', '.join(PRECISIONS)}, and is for float32, got {precision!r}"
        )
    heads_q = fields["num_heads_q"]
    heads_kv = fields.get("num_heads_kv", heads_q)
    if heads_q % heads_kv:
        raise SuiteError(f"{where}: num_heads_q must be a multiple of num_heads_kv, got {heads_q} and {heads_kv}")
    return AttentionProblem(
        batch=fields["batch"],
        seqlen_q=fields["seqlen_q"],
        seqlen_k=fields.get("seqlen_k", fields["seqlen_q"]),
        num_heads_q=heads_q,
        num_heads_kv=heads_kv,
        head_dim=fields["head_dim"],
        head_dim_v=fields.get("head_dim_v", fields["head_dim"]),
        dtype=fields["dtype"],
        softmax_scale=float(scale),
        causal=CAUSAL[causal],
        precision=precision,
    )


def _check_keys(table: Mapping[str, Any], required: tuple[str, ...], allowed: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in allowed:
            close = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {close[0]}?" if close else f"allowed are {', '.join(allowed)}"
            raise SuiteError(f"{where}: unknown key {key!r}; {hint}")
    missing = [key for key in required if key not in table]
    if missing:
        raise SuiteError(f"{where}: {', '.join(missing)} must be given")
