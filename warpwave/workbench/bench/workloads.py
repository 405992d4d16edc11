"""Cases as data: a suite is a TOML file that lists attention problems, and this module reads it.

    description = "what the suite is for"
    modes = ["graph"]
    cases = [
        { batch = [16, 4], seqlen_q = 1024, num_heads_q = 8, head_dim = 64, dtype = "float16", causal = [false, true] },
        { lengths = [500, [1, 4096]], num_heads_q = 8, head_dim = 64, dtype = "float16" },
    ]

A list makes one case for each of its values, and several lists make every combination. Omitted sizes follow from the
others (`num_heads_kv` from `num_heads_q`, `seqlen_k` from `seqlen_q`, `head_dim_v` from `head_dim`, `softmax_scale`
from `head_dim`); omitted options are off. Apart from the sizes, a case may have these keys:

    causal          true or "bottom_right", "top_left", false
    window_size     [left, right], -1 for unlimited
    lengths         packed sequences, instead of batch and seqlen: a length, or [queries, keys] if the two differ
    softcap, softmax_scale, precision
    sinks, alibi, bias      true: one value per head, one slope per head, a full (num_heads_q, seqlen_q, seqlen_k)
    gradients       true: q, k and v require gradients, so calls keep what the backward needs; the forward is timed
    page_size       keys and values are in a paged cache, in shuffled pages of this many tokens (a power of two)
    cache           "float8_e4m3fn" or "int8" and what shares a factor, "head" or "token", as in "int8:token": the
                    numbers of the pages; omitted: those of dtype
    mask            "padding": keys beyond each sequence's own length are hidden; "random": every second pair is
    hot             true: one set of inputs, which stays in L2 if it fits; false: L2 is cold at every call;
                    omitted: hot if calls are so short that a graph is replayed, else cold
    goal            the speed to reach, relative to the best peer; or { over_launch_us = 2 }: at most this much slower
                    than an empty kernel
    kernels         our kernels to time on this case, instead of the suite's

`modes` are the timing modes and `kernels` our kernels, unless the command line names others.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from warpwave.errors import InvalidInput
from warpwave.problem import PRECISIONS, AttentionProblem, Causal
from warpwave.workbench.bench.goals import Goal
from warpwave.workbench.bench.meters import MODES
from warpwave.workbench.bench.record_schema import BUDGET, FACTOR, PAGE_SIZE, SCALE, WINDOW
from warpwave.workbench.input_files import Unreadable, read_toml
from warpwave.workbench.limits import MOST_TOKENS, check_size
from warpwave.workbench.schema import fits, quoted
from warpwave.workbench.terminal import columns, printable

SUITES = Path(__file__).parent / "suites"
REQUIRED = ("num_heads_q", "head_dim", "dtype")
DENSE = ("batch", "seqlen_q")
SIZES = ("batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv", "head_dim", "head_dim_v")
SWITCHES = ("sinks", "alibi", "bias", "gradients", "hot")
SCORES = ("causal", "window_size", "softcap", "softmax_scale", "precision", "mask")
OPTIONS = (*SCORES, "lengths", "page_size", "cache", *SWITCHES, "goal", "kernels")
KEYS = (*SIZES, "dtype", *OPTIONS)
DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
MASKS = ("padding", "random")
# Spelling of a cache -> dtype_kv and kv_factors.
CACHES = {f"{dtype}:{kind}": (dtype, kind) for dtype in ("float8_e4m3fn", "int8") for kind in ("head", "token")}
MOST_CASES = 10_000  # per suite: a week of measuring
CAUSAL = {
    False: None,
    True: Causal(),
    "bottom_right": Causal("bottom_right"),
    "top_left": Causal("top_left"),
}


class SuiteError(ValueError):
    """A suite does not exist, or its file is invalid."""


@dataclass(frozen=True)
class Case:
    """One problem of a suite.

    Attributes:
        name: made from the other fields; unique in the suite.
        problem: the call.
        hot: whether the inputs may stay in L2; None leaves it to the timing method.
        goal: the goal for the result, or None.
        kernels: our kernels to time on it; empty for the suite's.
    """

    name: str
    problem: AttentionProblem
    hot: bool | None = None
    goal: Goal | None = None
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suite:
    """A named list of cases."""

    name: str
    description: str
    cases: tuple[Case, ...]
    modes: tuple[str, ...] = ("auto",)
    kernels: tuple[str, ...] = ("auto",)


def suite_names() -> list[str]:
    """Returns the names of the suites that ship with the package."""
    return sorted(path.stem for path in SUITES.glob("*.toml"))


def suite_list() -> str:
    """Returns the suites that ship with the package and their descriptions, one per line."""
    rows = [(name, str(read_toml(SUITES / f"{name}.toml").get("description", ""))) for name in suite_names()]
    return "\n".join(["Name one of these suites, or the path of a .toml file:", *columns(rows, indent="  ")])


def load_suite(suite: str | Path, only: str = "") -> Suite:
    """Loads a suite by its name, or from the path of a TOML file.

    Args:
        suite: the name or the path.
        only: keep only the cases whose names contain this text.

    Raises:
        SuiteError: no such suite, no such case, or the first mistake in its file, with the file, the case and what is
            allowed.
    """
    suite = str(suite)
    if suite not in (known := suite_names()) and not suite.endswith(".toml"):
        raise SuiteError(
            f"there is no suite {quoted(suite)}; give one of {', '.join(known)}, or the path of a .toml file"
        )
    path = SUITES / f"{suite}.toml" if suite in known else Path(suite)
    if printable(path.stem) != path.stem:  # the name goes into records, which allow only printable text
        raise SuiteError(f"the file's name {quoted(path.stem)} has characters that cannot be shown; rename it")
    try:
        data = read_toml(path)
    except Unreadable as error:
        raise SuiteError(str(error)) from error
    return parse_suite(path.stem, data, source=path.name, only=only)


def parse_suite(name: str, data: Mapping[str, Any], *, source: str, only: str = "") -> Suite:
    """Makes a suite from parsed TOML; messages name `source` as its origin; `only` as in `load_suite`."""
    _check_keys(data, ("description", "cases"), ("description", "cases", "modes", "kernels"), source)
    if not isinstance(data["description"], str):
        raise SuiteError(f"{source}: description must be a string, got {quoted(data['description'])}")
    modes = data.get("modes", ["auto"])
    if not isinstance(modes, list) or not modes or any(mode not in MODES for mode in modes):
        raise SuiteError(f"{source}: modes must be a list of {', '.join(MODES)}, got {quoted(modes)}")
    kernels = _names(data.get("kernels", ["auto"]), source)
    if not isinstance(data["cases"], list) or not data["cases"]:
        raise SuiteError(f"{source}: cases must be a list of at least one table")
    axes = [_axes(entry, f"{source}: cases[{index}]") for index, entry in enumerate(data["cases"])]
    count = sum(math.prod(map(len, of_entry.values())) for of_entry in axes)
    if count > MOST_CASES:
        raise SuiteError(f"{source}: its lists stand for {count:,} cases; a suite can have {MOST_CASES:,} at most")
    return Suite(name, data["description"], matching(_cases(axes, source), only, name), tuple(modes), kernels)


def matching(cases: Iterable[Case], only: str, suite: str) -> tuple[Case, ...]:
    """Returns the cases whose names contain `only`.

    Raises:
        SuiteError: no case matches.
    """
    first, found = "", []
    for case in cases:
        first = first or case.name
        if only in case.name:
            found.append(case)
    if not found:
        raise SuiteError(f"no case of {suite} has {quoted(only)} in its name; the first is {first!r}")
    return tuple(found)


def case_name(problem: AttentionProblem, hot: bool | None = None) -> str:
    """Returns a short name for tables and records: `d128 4x4096 h16 bf16 causal`."""

    def pair(a: int, b: int) -> str:
        return f"{a}" if a == b else f"{a}/{b}"

    tokens = pair(problem.total_q, problem.total_k) if problem.packed else pair(problem.seqlen_q, problem.seqlen_k)
    parts = [
        f"d{pair(problem.head_dim, problem.head_dim_v)}",
        f"{problem.batch} packed {tokens}" if problem.packed else f"{problem.batch}x{tokens}",
        f"h{pair(problem.num_heads_q, problem.num_heads_kv)}",
        DTYPES[problem.dtype],
    ]
    if problem.causal is not None:
        parts.append("causal" if problem.causal.alignment == "bottom_right" else "causal-top-left")
    if problem.window_size != (-1, -1):
        parts.append("window{},{}".format(*problem.window_size))
    if problem.softcap:
        parts.append(f"softcap{problem.softcap:g}")
    if problem.has_sinks:
        parts.append("sinks")
    if problem.alibi_shape is not None:
        parts.append("alibi")
    if problem.mask_shape is not None:
        parts.append(f"{_mask_kind(problem)}-mask")
    if problem.bias_shape is not None:
        parts.append("bias")
    if problem.requires_grad:
        parts.append("gradients")
    if problem.page_size:
        parts.append(f"page{problem.page_size}")
    if problem.dtype_kv:
        parts.append(f"{problem.dtype_kv}:{problem.kv_factors}")
    if problem.softmax_scale != default_scale(problem.head_dim):
        parts.append(f"scale{problem.softmax_scale:g}")
    if problem.precision != "default":
        parts.append(problem.precision)
    if problem.error_budget is not None:
        parts.append(f"error{problem.error_budget:g}")
    if hot is not None:
        parts.append("hot" if hot else "cold")
    return " ".join(parts)


def default_scale(head_dim: int) -> float:
    """Returns the default `softmax_scale`."""
    return 1 / math.sqrt(head_dim)


def padded_length(problem: AttentionProblem, index: int) -> int:
    """Returns how many keys of a sequence the "padding" mask shows: all of the first's, half of the last's."""
    return problem.seqlen_k - (problem.seqlen_k // 2) * index // max(1, problem.batch - 1)


def _mask_kind(problem: AttentionProblem) -> str:
    assert problem.mask_shape is not None
    return "padding" if problem.mask_shape[2] == 1 else "random"


# Reading a case -------------------------------------------------------------------------------------------------------


def _axes(entry: Any, where: str) -> dict[str, list[Any]]:
    """Returns key -> its values; each value makes separate cases."""
    if not isinstance(entry, dict):
        raise SuiteError(f"{where} must be a table, got {quoted(entry)}")
    _check_keys(entry, REQUIRED if "lengths" in entry else (*DENSE, *REQUIRED), KEYS, where)
    axes = {key: _values(key, value) for key, value in entry.items()}
    for key, values in axes.items():
        if not values:
            raise SuiteError(f"{where}: {key} is an empty list; give at least one value, or leave it out")
    return axes


def _cases(axes: Iterable[dict[str, list[Any]]], source: str) -> Iterator[Case]:
    """Yields the cases of a suite, in order."""
    names: set[str] = set()
    for index, of_entry in enumerate(axes):
        where = f"{source}: cases[{index}]"
        for combination in itertools.product(*of_entry.values()):
            case = _case(dict(zip(of_entry, combination, strict=True)), where)
            if case.name in names:
                raise SuiteError(
                    f"{where}: the case {case.name!r} appears twice (a name has the sum of packed lengths and six "
                    "digits of a number); remove one, or put it in another suite"
                )
            names.add(case.name)
            yield case


def _values(key: str, value: Any) -> list[Any]:
    """Returns the values of a key. A window or a list of lengths is itself a list; several are a list of lists."""
    if not isinstance(value, list):
        return [value]
    if key == "kernels":
        return [value]
    if key == "window_size":
        return value if value and isinstance(value[0], list) else [value]
    if key == "lengths":
        several = bool(value) and isinstance(value[0], list) and any(isinstance(x, list) for x in value[0])
        return value if several else [value]
    return value


def _case(fields: dict[str, Any], where: str) -> Case:
    for key in SWITCHES:
        if not isinstance(fields.get(key, False), bool):
            raise SuiteError(f"{where}: {key} must be true or false, got {quoted(fields[key])}")
    problem = _problem(fields, where)
    hot = fields.get("hot")
    kernels = _names(fields["kernels"], where) if "kernels" in fields else ()
    return Case(case_name(problem, hot), problem, hot, _goal(fields.get("goal"), where), kernels)


def _names(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or any(not isinstance(name, str) for name in value):
        raise SuiteError(f"{where}: kernels must be a list of names, got {quoted(value)}")
    return tuple(value)


def _goal(value: Any, where: str) -> Goal | None:
    if value is None:
        return None
    table = value if isinstance(value, dict) else {"ratio": value}
    if list(table) not in (["ratio"], ["over_launch_us"]):
        raise SuiteError(
            f"{where}: goal must be a number above 0 or {{ over_launch_us = number }}, got {quoted(value)}"
        )
    figure = next(iter(table.values()))
    if not fits(FACTOR, figure):
        raise SuiteError(f"{where}: goal must be above 0, got {quoted(value)}; it is {FACTOR}")
    return Goal(**{name: float(figure) for name in table})


def _problem(fields: dict[str, Any], where: str) -> AttentionProblem:
    for key in SIZES:
        value = fields.get(key, 1)
        if type(value) is not int or value < 1:  # isinstance counts a bool as an int
            raise SuiteError(f"{where}: {key} must be a positive integer, got {quoted(value)}")
        if value > MOST_TOKENS:
            raise SuiteError(f"{where}: {key} must be at most {MOST_TOKENS:,}, got {quoted(value)}")
    lengths = _lengths(fields, where)
    if lengths is None:
        batch, seqlen_q, seqlen_k = fields["batch"], fields["seqlen_q"], fields.get("seqlen_k", fields["seqlen_q"])
    else:
        batch, seqlen_q, seqlen_k = len(lengths), max(q for q, _ in lengths), max(k for _, k in lengths)
    causal = fields.get("causal", False)
    if not isinstance(causal, bool | str) or causal not in CAUSAL:
        raise SuiteError(f"{where}: causal must be true, false, 'bottom_right' or 'top_left', got {quoted(causal)}")
    if not isinstance(fields["dtype"], str) or fields["dtype"] not in DTYPES:
        raise SuiteError(f"{where}: dtype must be one of {', '.join(DTYPES)}, got {quoted(fields['dtype'])}")
    window = fields.get("window_size", [-1, -1])
    if not fits(WINDOW, window):
        raise SuiteError(f"{where}: window_size must be [left, right], whole numbers from -1, got {quoted(window)}")
    scale = fields.get("softmax_scale", default_scale(fields["head_dim"]))
    softcap = fields.get("softcap", 0.0)
    for key, value in (("softmax_scale", scale), ("softcap", softcap)):
        if not fits(SCALE, value):
            raise SuiteError(f"{where}: {key} must be a finite number >= 0, got {quoted(value)}")
    precision = fields.get("precision", "default")
    budget = precision if fits(BUDGET, precision) and precision < 1 else None
    named = budget is None
    if (named and precision not in PRECISIONS) or (precision != "default" and fields["dtype"] != "float32"):
        raise SuiteError(
            f"{where}: precision must be one of {', '.join(PRECISIONS)}, or a relative error between 0 and 1, and is "
            f"for float32, got {quoted(precision)}"
        )
    heads_q = fields["num_heads_q"]
    heads_kv = fields.get("num_heads_kv", heads_q)
    if heads_q % heads_kv:
        raise SuiteError(f"{where}: num_heads_q must be a multiple of num_heads_kv, got {heads_q} and {heads_kv}")
    mask = fields.get("mask")
    if mask is not None and mask not in MASKS:
        raise SuiteError(f"{where}: mask must be one of {', '.join(MASKS)}, got {quoted(mask)}")
    if lengths is not None and (mask is not None or fields.get("bias", False)):
        raise SuiteError(f"{where}: packed sequences take no mask and no bias")
    page_size = fields.get("page_size", 0)
    if "page_size" in fields and (not fits(PAGE_SIZE, page_size) or page_size.bit_count() != 1):
        raise SuiteError(f"{where}: page_size must be a power of two, got {quoted(page_size)}")
    cache = fields.get("cache")
    known = isinstance(cache, str) and cache in CACHES
    if "cache" in fields and (not known or not page_size or fields["dtype"] == "float32"):
        raise SuiteError(
            f"{where}: cache must be one of {', '.join(CACHES)}, with a page_size and a dtype of 16 bits, got "
            f"{quoted(cache)}"
        )
    gradients = fields.get("gradients", False)
    if page_size and (mask is not None or fields.get("bias", False) or gradients):
        raise SuiteError(f"{where}: a paged cache takes no mask and no bias, and has no gradients")
    of_cache: dict[str, Any] = dict(zip(("dtype_kv", "kv_factors"), CACHES[cache], strict=True)) if cache else {}
    mask_shapes = {"padding": (batch, 1, 1, seqlen_k), "random": (1, 1, seqlen_q, seqlen_k), None: None}
    bias = fields.get("bias", False)
    problem = AttentionProblem(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads_q=heads_q,
        num_heads_kv=heads_kv,
        head_dim=fields["head_dim"],
        head_dim_v=fields.get("head_dim_v", fields["head_dim"]),
        dtype=fields["dtype"],
        softmax_scale=float(scale),
        causal=CAUSAL[causal],
        window_size=(window[0], window[1]),
        mask_shape=mask_shapes[mask],
        bias_shape=(1, heads_q, seqlen_q, seqlen_k) if bias else None,
        bias_dtype=fields["dtype"] if bias else None,
        alibi_shape=(heads_q,) if fields.get("alibi", False) else None,
        softcap=float(softcap),
        has_sinks=fields.get("sinks", False),
        precision=precision if named else "default",
        error_budget=budget,
        packed=lengths is not None,
        total_q=0 if lengths is None else sum(q for q, _ in lengths),
        total_k=0 if lengths is None else sum(k for _, k in lengths),
        lengths=lengths,
        requires_grad=gradients,
        page_size=page_size,
        **of_cache,
    )
    try:
        check_size(problem)
    except InvalidInput as error:
        raise SuiteError(f"{where}: {error}") from None
    return _with_padding_counted(problem) if mask == "padding" else problem


def _lengths(fields: dict[str, Any], where: str) -> tuple[tuple[int, int], ...] | None:
    if "lengths" not in fields:
        return None
    for key in ("batch", "seqlen_q", "seqlen_k"):
        if key in fields:
            raise SuiteError(f"{where}: {key} follows from lengths; leave it out")
    entries = fields["lengths"]
    if not isinstance(entries, list) or not entries:
        raise SuiteError(f"{where}: lengths must be a list of at least one length, got {quoted(entries)}")
    pairs = [entry if isinstance(entry, list) else [entry, entry] for entry in entries]
    for entry, pair in zip(entries, pairs, strict=True):
        if len(pair) != 2 or any(type(x) is not int or not 1 <= x <= MOST_TOKENS for x in pair):
            raise SuiteError(
                f"{where}: each of lengths must be a positive integer or [queries, keys] of such, got {quoted(entry)}"
            )
    return tuple((q, k) for q, k in pairs)


def _with_padding_counted(problem: AttentionProblem) -> AttentionProblem:
    """Counts the visible pairs: keys beyond a sequence's own length are hidden, and the band stays where it was."""
    band = problem.band(problem.seqlen_q, problem.seqlen_k)
    shown = sum(band.pairs(problem.seqlen_q, padded_length(problem, b)) for b in range(problem.batch))
    return replace(problem, mask_visible_pairs=shown * problem.num_heads_q)


def _check_keys(table: Mapping[str, Any], required: tuple[str, ...], allowed: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in allowed:
            close = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {close[0]}?" if close else f"allowed are {', '.join(allowed)}"
            raise SuiteError(f"{where}: unknown key {quoted(key)}; {hint}")
    missing = [key for key in required if key not in table]
    if missing:
        raise SuiteError(f"{where}: {', '.join(missing)} must be given")
