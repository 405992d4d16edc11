"""Compiles a kernel for each target and config, without a GPU, and collects the findings.

A finding has registers, spills, shared memory against the target's limit, resident blocks per multiprocessor, and the
instruction mix, in the groups that decide speed. Two inspections can be compared: two configs, or two files written by
`inspect --json`. The latter compares versions of Triton, each installed in its own environment.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import warpwave
from warpwave import dispatch
from warpwave.errors import InvalidInput, UnsupportedProblem
from warpwave.gpu import Gpu
from warpwave.problem import AttentionProblem
from warpwave.workbench.hardware.occupancy import Occupancy, occupancy
from warpwave.workbench.input_files import parse_json
from warpwave.workbench.inspect.compiled import CannotCompile, CompileFacts, compile_launches, toolchain
from warpwave.workbench.output_files import Kind, write_output
from warpwave.workbench.schema import Anything, Flag, Integer, ListOf, MapOf, Number, OneOf, OrNone, Table, Text, check
from warpwave.workbench.terminal import printable

SCHEMA_VERSION = 1

# Group -> a pattern for the beginning of its opcodes, NVIDIA's in capitals. The first group that matches counts.
_AMD_FLOAT = r"(\w*_)?f(16|32|64)"
GROUPS: dict[str, re.Pattern[str]] = {
    name: re.compile("|".join(patterns))
    for name, patterns in {
        "matrix": (r"[HIQDU]?G?MMA", r"UTC\wMMA", "v_mfma", "v_smfmac", "v_wmma", "v_swmmac"),
        "exponentials": (r"MUFU\.EX2", "v_exp_"),
        "other special functions": ("MUFU", "v_(log|rcp|rsq|sqrt|sin|cos|tanh)_"),
        "FMA": ("[FHD]FMA", "v_(dual_|pk_)?(fma|mad|mac)[ck]?_" + _AMD_FLOAT),
        "conversions": ("F2", "I2F", "v_cvt_"),
        "add, multiply, maximum": (
            "F(ADD|MUL|MNMX|SEL|SET|CHK)",
            "H(ADD|MUL|MNMX|SET)",
            r"v_(dual_|pk_)?(add|sub|subrev|mul|max|min|max3|maximum|minimum)\w*_" + _AMD_FLOAT,
            r"v_(cmpx?_\w+|div_\w+|ldexp)_" + _AMD_FLOAT,
        ),
        "TMA": ("UTMA", "UBLK", "tensor_(load|store)"),
        "barriers and waits": (
            *("BAR", r"\w*DEPBAR", "SYNCS", "WARP", "MEMBAR", "FENCE", "UTCBAR", "ERRBAR", "ARRIVES", "UCGABAR"),
            *("NANOSLEEP", "BSSY", "BSYNC", "s_barrier", "s_wait"),
        ),
        "copies global to shared": ("LDGSTS", r"(global|buffer)_load_(lds|async)"),
        "global loads": ("LDG", "(global|buffer|flat)_load"),
        "global stores": ("STG", "(global|buffer|flat)_store"),
        "shared loads": ("LDS", "ds_(read|load)"),
        "shared stores": ("STS", "ds_(write|store)"),
        "tensor memory": ("LDTM", "STTM", "UTCCP"),
        "spills": ("LDL", "STL", "scratch_(load|store)"),
        "shuffles": ("SHFL", "REDUX", "ds_(bpermute|permute|swizzle)", "v_permlane", r"v_mov_b32_dpp"),
        "atomics": ("ATOM", "RED", "(global|flat|buffer)_atomic", "ds_add"),
    }.items()
}
OTHER = "other"  # addresses, predicates, moves, branches


# The format that `Inspection.to_json` writes and `--diff` reads.
_WORD, _COUNT = Text(500), Integer(0, 1 << 53)
_FACTS = Table(
    required={
        "name": _WORD,
        "arch": _WORD,
        **dict.fromkeys(("registers", "accumulators", "spill_bytes", "smem_bytes", "num_warps"), _COUNT),
        "instructions": MapOf(_COUNT, 100_000),
        "compile_s": Number(0, 1e9),
        "cached": Flag(),
    }
)
_OCCUPANCY = Table(
    required={
        "unit": _WORD,
        "limit": _WORD,
        **dict.fromkeys(("blocks", "by_registers", "by_smem", "by_warps", "warps", "max_warps"), _COUNT),
    }
)
_FINDING = Table(
    required={
        "kernel": _WORD,
        "arch": _WORD,
        "config": MapOf(Anything()),
        "is_default": Flag(),
        "smem_limit_bytes": _COUNT,
        "register_limit": _COUNT,
        "facts": OrNone(_FACTS),
        "occupancy": OrNone(_OCCUPANCY),
        "groups": MapOf(_COUNT),
        "error": Text(100_000),
    }
)
INSPECTION = Table(
    required={
        "schema_version": OneOf((SCHEMA_VERSION,)),
        "kind": OneOf(("inspection",)),
        "problem": Text(10_000),
        "warpwave": _WORD,
        "tools": MapOf(MapOf(_WORD)),
        "findings": ListOf(_FINDING, 0, 100_000),
    }
)


@dataclass(frozen=True)
class Finding:
    """The result for one launch of one config on one target, or the reason why it did not compile.

    Args:
        kernel: the kernel's name.
        arch: the target.
        config: the config as plain data.
        is_default: whether this is the kernel's default config for the call.
        smem_limit_bytes, register_limit: the target's limits per block and per thread.
        facts: the compiled launch; None if it failed.
        occupancy: blocks per multiprocessor; None if unknown, or if nothing compiled.
        groups: number of instructions by purpose.
        error: the compiler's error message; empty if it succeeded.
    """

    kernel: str
    arch: str
    config: dict[str, Any]
    is_default: bool
    smem_limit_bytes: int
    register_limit: int
    facts: CompileFacts | None
    occupancy: Occupancy | None
    groups: dict[str, int]
    error: str = ""

    @property
    def fits(self) -> bool:
        """Whether the shared memory that a block needs is within the limit."""
        return self.facts is not None and self.facts.smem_bytes <= self.smem_limit_bytes


@dataclass(frozen=True)
class Inspection:
    """The findings of an inspection, with the call and the tools.

    Args:
        problem: the call, in one line.
        warpwave: version of this package.
        tools: versions of Triton and of the assembler, by arch.
        findings: one for each launch of each config and target, in the order of the request.
    """

    problem: str
    warpwave: str
    tools: dict[str, dict[str, str]]
    findings: tuple[Finding, ...]

    def to_json(self) -> str:
        """Returns the text of the file that `--diff` reads."""
        head = {"schema_version": SCHEMA_VERSION, "kind": "inspection"}
        own = {"problem": self.problem, "warpwave": self.warpwave, "tools": self.tools}
        return json.dumps(head | own | {"findings": [_finding_data(f) for f in self.findings]}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Inspection:
        """Returns the inspection that `to_json` wrote.

        Raises:
            Unreadable, Mismatch: the text is not the output of `to_json`; the message names the difference.
        """
        data = parse_json(text)
        check(INSPECTION, data)
        return cls(data["problem"], data["warpwave"], data["tools"], tuple(map(_finding, data["findings"])))


def _finding_data(f: Finding) -> dict[str, Any]:
    # asdict would turn a Counter into a Counter of its items.
    facts = None if f.facts is None else vars(f.facts) | {"instructions": dict(f.facts.instructions)}
    return asdict(replace(f, facts=None)) | {"facts": facts}


def _finding(data: dict[str, Any]) -> Finding:
    values = dict(data)
    if values["facts"] is not None:
        facts = values["facts"]
        values["facts"] = CompileFacts(**{**facts, "instructions": Counter(facts["instructions"])})
    if values["occupancy"] is not None:
        values["occupancy"] = Occupancy(**values["occupancy"])
    return Finding(**values)


# Inspecting -----------------------------------------------------------------------------------------------------------


def inspect(
    kernel: Any,
    problem: AttentionProblem,
    gpus: Sequence[Gpu],
    configs: Callable[[Gpu], Sequence[Any]],
    *,
    save: Path | None = None,
    on_done: Callable[[int, int], None] | None = None,
) -> Inspection:
    """Compiles a kernel for each target and config, with one thread per processor.

    Args:
        kernel: a kernel module.
        problem: the call.
        gpus: the targets.
        configs: returns the configs to compile for a target.
        save: folder for the compiler's stages, or None.
        on_done: called with the number of finished configs and their total.

    Raises:
        CannotCompile: nothing can be compiled here.
        UnsupportedProblem: the kernel refuses the problem on a target.
    """
    jobs: list[tuple[Gpu, Any, Any]] = []
    for gpu in gpus:
        forward = forward_of(kernel, problem, gpu)
        if reasons := kernel.why_not(forward, gpu):
            raise UnsupportedProblem(
                f"kernel {kernel.NAME!r} cannot run {problem.describe()} on {gpu.name}", {kernel.NAME: reasons}
            )
        default = kernel.configs(forward, gpu)[0]
        jobs += [(gpu, config, default) for config in configs(gpu)]
    findings: list[Finding] = []
    # The compiler releases the interpreter lock: two threads take half as long.
    with ThreadPoolExecutor(min(len(jobs), os.cpu_count() or 1)) as pool:
        results = pool.map(lambda job: _inspect_one(kernel, problem, job[0], job[1], job[2], save), jobs)
        for done, found in enumerate(results, start=1):
            findings += found
            if on_done is not None:
                on_done(done, len(jobs))
    tools = {gpu.arch: toolchain(gpu) for gpu in gpus}
    return Inspection(problem.describe(), warpwave.__version__, tools, tuple(findings))


def forward_of(kernel: Any, problem: AttentionProblem, gpu: Gpu) -> AttentionProblem:
    """Returns the problem of the forward, which is compiled: with gradients it may keep the log-sum-exp for them."""
    return dispatch.forward_of(problem, gpu, kernel.NAME)[0]


def _inspect_one(
    kernel: Any, problem: AttentionProblem, gpu: Gpu, config: Any, default: Any, save: Path | None
) -> list[Finding]:
    nothing = Finding(
        kernel.NAME,
        gpu.arch,
        asdict(config),
        config == default,
        gpu.smem_per_block_bytes,
        gpu.registers_per_thread,
        None,
        None,
        {},
    )
    try:
        launches = compile_launches(kernel, forward_of(kernel, problem, gpu), gpu, config)
    except CannotCompile:
        raise
    except Exception as error:  # the compiler raises many types; one failing config must not end the inspection
        return [replace(nothing, error=f"{type(error).__name__}: {reason_of(error)}")]
    findings = []
    for facts, texts in launches:
        fitting = occupancy(
            gpu,
            registers=facts.registers,
            accumulators=facts.accumulators,
            num_warps=facts.num_warps,
            smem_bytes=facts.smem_bytes,
        )
        findings.append(replace(nothing, facts=facts, occupancy=fitting, groups=group(facts.instructions)))
        if save is not None:
            name = "-".join([gpu.arch, kernel.NAME.replace("/", "-"), facts.name, config_name(asdict(config))])
            for stage, text in texts.items():
                write_output(save / f"{name}.{stage}", text, Kind(f"{stage} of the same text", _holds(text)))
    return findings


def reason_of(error: BaseException) -> str:
    """Returns the first line of the error that caused an error of the compiler, with control characters escaped.

    Triton raises one error for each function that is being compiled. Their texts begin with source code, and the
    innermost one has the reason.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(getattr(error, "error_message", None) or error).strip().splitlines() or [""]
    return printable(lines[0])


def _holds(text: str) -> Callable[[Path], bool]:
    """Returns a function that returns whether a file already holds this text."""
    content = text.encode()
    return lambda path: path.stat().st_size == len(content) and path.read_bytes() == content


def group(instructions: Counter[str]) -> dict[str, int]:
    """Returns the number of instructions in each group of `GROUPS`, without empty groups."""
    counts: Counter[str] = Counter()
    for opcode, count in instructions.items():
        counts[next((name for name, pattern in GROUPS.items() if pattern.match(opcode)), OTHER)] += count
    return {name: counts[name] for name in (*GROUPS, OTHER) if counts[name]}


# Names of configs -----------------------------------------------------------------------------------------------------


def config_name(config: dict[str, Any]) -> str:
    """Returns a config's values in order, such as `128x64x8x3`, which `parse_config` reads. Trailing switches that are
    off are left out."""
    values = list(config.values())
    while values and values[-1] is False:
        values.pop()
    return "x".join(str(int(value) if isinstance(value, bool) else value) for value in values) or "default"


MOST = {"num_warps": 32, "num_stages": 32}  # CUDA's limit of warps per block; far more stages than fit
MOST_OF_A_TILE = 4096  # rows or columns
MOST_SCORES = 2**17  # of a tile: the most registers of a block on any GPU, 512 on each of 256 lanes of an AMD CDNA


def parse_config(text: str, default: Any) -> Any:
    """Reads a config: every value in order (`128x64x8x3`; trailing values that have a default may be left out and take
    it), or some values by name (`num_stages=2`), which replace those of the kernel's choice.

    Raises:
        InvalidInput: the text is not a config of this kernel; the message lists its fields.
    """
    names = [field.name for field in fields(default)]
    known = f"; its fields are {', '.join(names)}" if names else "; it has no fields"
    if "=" in text:
        pairs = [part.partition("=")[::2] for part in re.split(r"[,\s]+", text.strip())]
        given = dict(pairs)
        if twice := [name for name in given if sum(name == other for other, _ in pairs) > 1]:
            raise InvalidInput(f"config {text!r}: {twice[0]} is given twice")
        for name in given:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                raise InvalidInput(f"config has no {name!r}" + (f"; did you mean {close[0]}?" if close else known))
    else:
        values, needed = text.split("x"), len(names)
        while needed and hasattr(type(default), names[needed - 1]):  # it has a default
            needed -= 1
        if not needed <= len(values) <= len(names):
            allowed = f"{needed}" if needed == len(names) else f"{needed} to {len(names)}"
            count = f"{len(values)} value{'s' * (len(values) != 1)}"
            raise InvalidInput(f"config {text!r} has {count}; this kernel's has {allowed}{known}")
        left_out = {name: str(int(getattr(type(default), name))) for name in names[needed:]}
        given = left_out | dict(zip(names, values, strict=False))
    try:
        wanted = {name: _like(getattr(default, name), value) for name, value in given.items()}
        for name, value in wanted.items():
            most = MOST_OF_A_TILE if name.startswith("block_") else MOST.get(name)
            if most is not None and value > most:  # no device could run it, and compiling it might never end
                raise ValueError(f"{name} is {value}; it can be {most:,} at most")
        config = replace(default, **wanted)
        if hasattr(config, "block_n") and (scores := config.block_m * config.block_n) > MOST_SCORES:
            raise ValueError(f"block_m * block_n is {scores:,}; it can be {MOST_SCORES:,} at most")
        return config
    except ValueError as error:
        raise InvalidInput(f"config {text!r}: {error}") from None


def _like(example: Any, text: str) -> Any:
    if isinstance(example, bool):
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in words:
            raise ValueError(f"{text!r} is neither true nor false")
        return words[text.lower()]
    if isinstance(example, int):
        if not re.fullmatch(r"-?\d+", text):
            raise ValueError(f"{text!r} is not a whole number")
        return int(text)
    return type(example)(text)
