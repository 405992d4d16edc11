"""`warpwave inspect`: what a kernel compiles to for a target, config by config, without a GPU.

Registers, spills, shared memory against what the target has, how many blocks fit a multiprocessor, and the
instruction mix in the groups that decide speed. Two inspections can be set side by side: two configs, or two files
that `inspect --json` wrote, which is how versions of Triton (each in an environment of its own) are compared.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import warpwave
from warpwave import dispatch
from warpwave.bench.table import Table, plain, print_table
from warpwave.compiled import CannotCompile, CompileFacts, compile_launches, toolchain
from warpwave.errors import InvalidInput, UnsupportedProblem
from warpwave.hardware.gpu import Gpu
from warpwave.hardware.occupancy import Occupancy, occupancy
from warpwave.problem import AttentionProblem

SCHEMA_VERSION = 1

# Group -> the instructions in it, as a pattern of how they begin, NVIDIA's in capitals. The first that fits takes them.
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
SHOWN_OPCODES = 12  # of a difference


@dataclass(frozen=True)
class Finding:
    """One launch of one config on one target, or why it did not compile.

    Args:
        kernel: the kernel's name.
        arch: the target.
        config: the config as plain data.
        is_default: whether the kernel would choose this config itself.
        smem_limit_bytes, register_limit: what the target gives a block and a thread.
        facts: what the compiler made; None where it failed.
        occupancy: blocks a multiprocessor; None where it is not known, or nothing compiled.
        groups: instructions by what they are for.
        error: what the compiler said, empty where it succeeded.
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
        """Whether a block gets the shared memory that it needs."""
        return self.facts is not None and self.facts.smem_bytes <= self.smem_limit_bytes


@dataclass(frozen=True)
class Inspection:
    """What was asked, what compiled it, and what came out.

    Args:
        problem: the call, in one line.
        warpwave: version of this package.
        tools: arch -> versions of Triton and of the assembler.
        findings: one for each launch of each config and target, in the order asked.
    """

    problem: str
    warpwave: str
    tools: dict[str, dict[str, str]]
    findings: tuple[Finding, ...]

    def to_json(self) -> str:
        """The file that `--diff` reads."""
        head = {"schema_version": SCHEMA_VERSION, "kind": "inspection"}
        own = {"problem": self.problem, "warpwave": self.warpwave, "tools": self.tools}
        return json.dumps(head | own | {"findings": [_finding_data(f) for f in self.findings]}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Inspection:
        """The inverse of `to_json`.

        Raises:
            ValueError: the text is not what `to_json` writes; the message says how it differs.
        """
        try:
            data = json.loads(text)
            if data["kind"] != "inspection" or data["schema_version"] != SCHEMA_VERSION:
                raise ValueError(f"it holds {data['kind']!r}, version {data['schema_version']!r}")
            findings = tuple(_finding(item) for item in data["findings"])
            tools = {str(arch): dict(versions) for arch, versions in data["tools"].items()}
            return cls(str(data["problem"]), str(data["warpwave"]), tools, findings)
        except KeyError as error:
            raise ValueError(f"{error} is missing") from None
        except (TypeError, AttributeError) as error:
            raise ValueError(str(error)) from None


def _finding_data(f: Finding) -> dict[str, Any]:
    # asdict would make a Counter of a Counter's items.
    facts = None if f.facts is None else vars(f.facts) | {"instructions": dict(f.facts.instructions)}
    return asdict(replace(f, facts=None)) | {"facts": facts}


def _finding(data: dict[str, Any]) -> Finding:
    values = {field.name: data[field.name] for field in fields(Finding)}
    if values["facts"] is not None:
        facts = {field.name: values["facts"][field.name] for field in fields(CompileFacts)}
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
    """Compiles a kernel for each target and config, on as many threads as there are processors.

    Args:
        kernel: a kernel module.
        problem: the call.
        gpus: the targets.
        configs: the kernel's configs to compile for a target.
        save: folder for the compiler's stages, or None.
        on_done: called with how many configs are finished, and of how many.

    Raises:
        CannotCompile: nothing can be compiled here.
        UnsupportedProblem: the kernel refuses the problem on a target.
    """
    jobs: list[tuple[Gpu, Any, Any]] = []
    for gpu in gpus:
        if reasons := kernel.why_not(problem, gpu):
            raise UnsupportedProblem(
                f"kernel {kernel.NAME!r} cannot run {problem.describe()} on {gpu.name}", {kernel.NAME: reasons}
            )
        default = kernel.configs(problem, gpu)[0]
        jobs += [(gpu, config, default) for config in configs(gpu)]
    findings: list[Finding] = []
    # The compiler lets other threads run; two at a time take half as long.
    with ThreadPoolExecutor(min(len(jobs), os.cpu_count() or 1)) as pool:
        results = pool.map(lambda job: _inspect_one(kernel, problem, job[0], job[1], job[2], save), jobs)
        for done, found in enumerate(results, start=1):
            findings += found
            if on_done is not None:
                on_done(done, len(jobs))
    tools = {gpu.arch: toolchain(gpu) for gpu in gpus}
    return Inspection(problem.describe(), warpwave.__version__, tools, tuple(findings))


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
        launches = compile_launches(kernel, problem, gpu, config)
    except CannotCompile:
        raise
    except Exception as error:  # the compiler's own, of many types: one config must not end the inspection of others
        lines = str(error).strip().splitlines() or [""]
        return [replace(nothing, error=f"{type(error).__name__}: {lines[0]}")]
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
                (save / f"{name}.{stage}").write_text(text)
    return findings


def group(instructions: Counter[str]) -> dict[str, int]:
    """How many instructions each group of `GROUPS` has; groups without any are left out."""
    counts: Counter[str] = Counter()
    for opcode, count in instructions.items():
        counts[next((name for name, pattern in GROUPS.items() if pattern.match(opcode)), OTHER)] += count
    return {name: counts[name] for name in (*GROUPS, OTHER) if counts[name]}


# Names of configs -----------------------------------------------------------------------------------------------------


def config_name(config: dict[str, Any]) -> str:
    """A config in short: its values in order, `128x64x8x3`, which `parse_config` reads."""
    return "x".join(str(int(value) if isinstance(value, bool) else value) for value in config.values()) or "default"


def parse_config(text: str, default: Any) -> Any:
    """A config from text: every value in order (`128x64x8x3`), or some by name on top of the default (`num_stages=2`).

    Raises:
        InvalidInput: the text fits no config of this kernel; the message lists its fields.
    """
    names = [field.name for field in fields(default)]
    known = f"; its fields are {', '.join(names)}" if names else "; it has no fields"
    if "=" in text:
        given = dict(part.partition("=")[::2] for part in re.split(r"[,\s]+", text.strip()))
        for name in given:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                raise InvalidInput(f"config has no {name!r}" + (f"; did you mean {close[0]}?" if close else known))
    else:
        values = text.split("x")
        if len(values) != len(names):
            raise InvalidInput(f"config {text!r} has {len(values)} values and this kernel's has {len(names)}{known}")
        given = dict(zip(names, values, strict=True))
    try:
        return replace(default, **{name: _like(getattr(default, name), value) for name, value in given.items()})
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


# Text -----------------------------------------------------------------------------------------------------------------


def describe(finding: Finding) -> str:
    """One finding, a line for each resource."""
    facts = finding.facts
    config = " ".join(f"{name}={value}" for name, value in finding.config.items())
    title = f"{finding.kernel} for {finding.arch}, {config}{' (default)' if finding.is_default else ''}"
    if facts is None:
        return f"{title}\n  did not compile: {finding.error}"
    registers = f"{facts.registers} of {finding.register_limit} a thread"
    if facts.accumulators:
        registers += f", {facts.accumulators} accumulation registers among or beside them"
    share = facts.smem_bytes / max(1, finding.smem_limit_bytes)
    smem = f"{facts.smem_bytes:,} bytes of {finding.smem_limit_bytes:,} a block, {share:.0%}"
    lines = [
        f"{title}: {facts.name}",
        f"  registers      {registers}",
        f"  spills         {f'{facts.spill_bytes:,} bytes a thread' if facts.spill_bytes else 'none'}",
        f"  shared memory  {smem}" + ("" if finding.fits else ": DOES NOT FIT"),
    ]
    if (o := finding.occupancy) is not None:
        lines.append(
            f"  occupancy      {_blocks(o.blocks)} {_a(o.unit)}, limited by {o.limit} (registers allow "
            f"{o.by_registers}, shared memory {o.by_smem}, warps {o.by_warps}); {o.warps} of {o.max_warps} warps"
        )
    total = sum(finding.groups.values())
    lines.append(f"  instructions   {total:,} in the listing, loops not unrolled")
    for name, count in finding.groups.items():
        lines.append(f"    {name:<24}{count:>6}  {_opcodes_of(name, facts.instructions)}")
    lines.append(f"  compiled       in {facts.compile_s:.2f} s" + (" (from Triton's cache)" if facts.cached else ""))
    return "\n".join(lines)


def _blocks(count: int) -> str:
    return f"{count} block{'' if count == 1 else 's'}"


def _a(unit: str) -> str:
    return f"an {unit}" if unit.startswith("S") else f"a {unit}"


def _opcodes_of(name: str, instructions: Counter[str]) -> str:
    """The commonest opcodes of a group."""
    found = [(o, n) for o, n in instructions.most_common() if name in group(Counter({o: 1}))]
    shown = ", ".join(f"{opcode} {count}" for opcode, count in found[:3])
    return shown + (", ..." if len(found) > 3 else "")


def table(findings: Sequence[Finding]) -> Table:
    """Many findings, a line each, in the order given."""
    several = len({f.arch for f in findings}) > 1
    launches = len({f.facts.name for f in findings if f.facts is not None}) > 1
    where = (("arch",) if several else ()) + (("launch",) if launches else ())
    header = (*where, "config", "registers", "spills", "smem", "blocks", "limit", "warps")
    shown = ("matrix", "exponentials", "FMA", "conversions", "barriers and waits")
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    for f in findings:
        name = config_name(f.config) + (" (default)" if f.is_default else "")
        if f.facts is None:
            notes.append(f"{f.arch} {name}: did not compile: {f.error}")
            continue
        lead = ((f.arch,) if several else ()) + ((f.facts.name,) if launches else ())
        o = f.occupancy
        rows.append(
            (
                *lead,
                name,
                str(f.facts.registers),
                str(f.facts.spill_bytes),
                f"{f.facts.smem_bytes / 1024:.0f} KiB" + ("" if f.fits else " does not fit"),
                *(("", "", "") if o is None else (str(o.blocks), o.limit, f"{o.warps}/{o.max_warps}")),
                *(str(f.groups.get(part, 0)) for part in shown),
                f"{f.facts.compile_s:.2f}" + (" cached" if f.facts.cached else ""),
            )
        )
    if findings:
        names = list(findings[0].config)
        notes.append(f"a config is {' x '.join(names)}; spills are bytes a thread" if names else "no config to choose")
    title = f"{findings[0].kernel}, {len(findings)} compiled" if findings else "nothing compiled"
    return Table(title, (*header, *shown, "compile s"), rows, tuple(notes))


# Differences ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Two findings side by side.

    Args:
        title: what they are of.
        before, after: the two findings; None where one side has no counterpart.
        changed: name -> (before, after), of the figures that differ.
        opcodes: the same of instructions, those that moved most first.
    """

    title: str
    before: Finding | None
    after: Finding | None
    changed: dict[str, tuple[int | float | str, int | float | str]]
    opcodes: dict[str, tuple[int, int]]


def compare(before: Sequence[Finding], after: Sequence[Finding]) -> list[Difference]:
    """Pairs findings by kernel, target, config and launch; one alone on each side is paired whatever it is."""

    def key(f: Finding) -> tuple[str, ...]:
        return (f.kernel, f.arch, config_name(f.config), "" if f.facts is None else f.facts.name)

    if len(before) == len(after) == 1:
        return [_difference(before[0], after[0])]
    olds, news = {key(f): f for f in before}, {key(f): f for f in after}
    return [_difference(olds.get(k), news.get(k)) for k in dict.fromkeys((*olds, *news))]


def compare_configs(findings: Sequence[Finding], first: str, second: str) -> list[Difference]:
    """Pairs the findings of two configs, target by target and launch by launch."""
    by_config: dict[str, list[Finding]] = {first: [], second: []}
    for f in findings:
        by_config[config_name(f.config)].append(f)
    return [_difference(a, b) for a, b in zip(by_config[first], by_config[second], strict=False)]


def _difference(before: Finding | None, after: Finding | None) -> Difference:
    either = before or after
    assert either is not None  # a pair has at least one side
    sides = [
        f"{f.kernel} {f.arch} {config_name(f.config)}{'' if f.facts is None else f' {f.facts.name}'}"
        for f in (before, after)
        if f is not None
    ]
    title = " -> ".join(dict.fromkeys(sides))
    if before is None or after is None:
        return Difference(f"{title}: only in the {'second' if before is None else 'first'}", before, after, {}, {})
    a, b = _figures(before), _figures(after)
    changed = {
        name: (a.get(name, 0), b.get(name, 0)) for name in dict.fromkeys((*a, *b)) if a.get(name, 0) != b.get(name, 0)
    }
    opcodes: dict[str, tuple[int, int]] = {}
    if before.facts is not None and after.facts is not None:
        x, y = before.facts.instructions, after.facts.instructions
        moved = sorted({*x, *y}, key=lambda opcode: (-abs(y[opcode] - x[opcode]), opcode))
        opcodes = {opcode: (x[opcode], y[opcode]) for opcode in moved if x[opcode] != y[opcode]}
    return Difference(title, before, after, changed, opcodes)


def _figures(f: Finding) -> dict[str, int | float | str]:
    if f.facts is None:
        return {"error": f.error}
    found: dict[str, int | float | str] = {
        "registers": f.facts.registers,
        "accumulation registers": f.facts.accumulators,
        "spill bytes": f.facts.spill_bytes,
        "shared memory bytes": f.facts.smem_bytes,
        "warps a block": f.facts.num_warps,
    }
    if f.occupancy is not None:
        found |= {f"blocks {_a(f.occupancy.unit)}": f.occupancy.blocks, "limited by": f.occupancy.limit}
    return found | {"instructions": sum(f.groups.values())} | f.groups


def describe_difference(difference: Difference) -> str:
    """What changed, a line a figure."""
    if difference.before is None or difference.after is None:
        return difference.title
    if not difference.changed and not difference.opcodes:
        return f"{difference.title}: no difference"
    width = max(map(len, difference.changed), default=0)
    lines = [difference.title]
    for name, (a, b) in difference.changed.items():
        lines.append(f"  {name:<{width}}  {_shown(a)} -> {_shown(b)}{_delta(a, b)}")
    moved = list(difference.opcodes.items())
    if moved:
        shown = ", ".join(f"{opcode} {a} -> {b}" for opcode, (a, b) in moved[:SHOWN_OPCODES])
        lines.append(
            f"  opcodes: {shown}" + (f", and {len(moved) - SHOWN_OPCODES} more" * (len(moved) > SHOWN_OPCODES))
        )
    return "\n".join(lines)


def _shown(value: int | float | str) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _delta(a: int | float | str, b: int | float | str) -> str:
    if isinstance(a, str) or isinstance(b, str):
        return ""
    return f"  ({b - a:+,})"


def describe_tools(inspection: Inspection) -> str:
    """Versions of what compiled, once for all targets that share them."""
    by_versions: dict[str, list[str]] = {}
    for arch, versions in inspection.tools.items():
        by_versions.setdefault(", ".join(f"{name} {version}" for name, version in versions.items()), []).append(arch)
    return "; ".join(f"{versions} for {', '.join(archs)}" for versions, archs in by_versions.items())


# The command ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What the command line asks for; see `warpwave inspect --help`."""

    kernel: str | None
    archs: Sequence[str] = ()
    configs: Sequence[str] = ()
    all_configs: bool = False
    diff: tuple[str, str] | None = None
    save: Path | None = None
    as_json: bool = False


def run(problem: AttentionProblem, request: Request) -> int:
    """The whole command. Returns the exit code: 1 where a config did not compile or does not fit.

    Raises:
        InvalidInput: the request makes no sense; the message says what would.
        CannotCompile, UnsupportedProblem: it makes sense, and not here or not for this kernel.
    """
    if request.diff is not None and (files := _files(request.diff)) is not None:
        return _print_file_differences(*files, as_json=request.as_json)
    if request.kernel is None:
        raise InvalidInput(f"name a kernel to inspect: {', '.join(_compilable())}")
    kernel = _kernel(request.kernel)
    gpus = [_target(arch) for arch in request.archs] or [_this_gpu()]
    asked = list(request.diff or request.configs)
    if request.all_configs and asked:
        raise InvalidInput("give --all-configs or particular configs, not both")

    def configs(gpu: Gpu) -> Sequence[Any]:
        every = kernel.configs(problem, gpu)
        if request.all_configs:
            return list(every)
        return [every[0] if text == "default" else parse_config(text, every[0]) for text in asked] or [every[0]]

    if request.diff is not None:
        for gpu in gpus:
            _check_they_differ(configs(gpu))
    if request.save is not None:
        request.save.mkdir(parents=True, exist_ok=True)
    inspection = inspect(kernel, problem, gpus, configs, save=request.save, on_done=_progress())
    if request.diff is not None:
        differences = [d for gpu in gpus for d in _config_differences(inspection.findings, gpu, configs(gpu))]
        if request.as_json:
            print(_differences_json(differences))
        else:
            print(f"{inspection.problem}\n{describe_tools(inspection)}\n")
            print("\n\n".join(map(describe_difference, differences)))
    elif request.as_json:
        print(inspection.to_json())
    else:
        print(f"call  {inspection.problem}\nby    {describe_tools(inspection)}\n")
        if len(inspection.findings) <= 3:
            print("\n\n".join(map(describe, inspection.findings)))
        elif sys.stdout.isatty():
            print_table(table(inspection.findings))
        else:
            print(plain(table(inspection.findings)), end="")
        if request.save is not None:
            print(f"\nsaved to {request.save}")
    return 0 if all(f.fits for f in inspection.findings) else 1


def _config_differences(findings: Sequence[Finding], gpu: Gpu, configs: Sequence[Any]) -> list[Difference]:
    first, second = (config_name(asdict(config)) for config in configs)
    return compare_configs([f for f in findings if f.arch == gpu.arch], first, second)


def _check_they_differ(configs: Sequence[Any]) -> None:
    if configs[0] == configs[1]:
        raise InvalidInput(f"both configs are {config_name(asdict(configs[0]))}: there is nothing to compare")


def _files(names: tuple[str, str]) -> tuple[Path, Path] | None:
    """Both as files, where either looks like one."""
    paths = Path(names[0]), Path(names[1])
    if not any(path.suffix == ".json" or path.exists() for path in paths):
        return None
    for path in paths:
        if not path.is_file():
            raise InvalidInput(f"--diff: there is no file {path}; give two files of `inspect --json`, or two configs")
    return paths


def _print_file_differences(before: Path, after: Path, *, as_json: bool) -> int:
    loaded = []
    for path in (before, after):
        try:
            loaded.append(Inspection.from_json(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{path} is no file of `warpwave inspect --json`: {error}") from None
    old, new = loaded
    differences = compare(old.findings, new.findings)
    if as_json:
        print(_differences_json(differences))
        return 0
    for letter, inspection, path in (("A", old, before), ("B", new, after)):
        print(
            f"{letter}  {path}: warpwave {inspection.warpwave}, {describe_tools(inspection)}\n   {inspection.problem}"
        )
    if old.problem != new.problem:
        print("   the calls differ, so the code may for that reason alone")
    print()
    print("\n\n".join(map(describe_difference, differences)))
    return 0


def _differences_json(differences: Sequence[Difference]) -> str:
    return json.dumps([{"title": d.title, "changed": d.changed, "opcodes": d.opcodes} for d in differences], indent=1)


def _compilable() -> list[str]:
    return [kernel.NAME for kernel in dispatch.KERNELS if hasattr(kernel, "specify")]


def _kernel(name: str) -> Any:
    kernel = next((kernel for kernel in dispatch.KERNELS if name == kernel.NAME), None)
    if kernel is None:
        close = difflib.get_close_matches(name, _compilable(), n=1)
        hint = f"did you mean {close[0]}? There are" if close else "there are"
        raise InvalidInput(f"no kernel is called {name!r}; {hint} {', '.join(_compilable())}")
    if not hasattr(kernel, "specify"):
        raise CannotCompile(
            f"kernel {name!r} is made of torch's operations: there is no code of ours to compile; there is in "
            f"{', '.join(_compilable())}"
        )
    return kernel


def _target(arch: str) -> Gpu:
    from warpwave.hardware import catalog

    try:
        gpu = catalog.resolve(arch)
    except ValueError as error:
        raise InvalidInput(str(error)) from None
    if gpu.is_cpu:
        raise InvalidInput("nothing is compiled for a CPU; name a GPU architecture, --arch sm_90")
    return gpu


def _this_gpu() -> Gpu:
    import torch

    from warpwave.hardware.gpu import current_gpu

    if not torch.cuda.is_available():
        raise InvalidInput("torch sees no GPU here: name the target, --arch sm_90 or --arch gfx942")
    return current_gpu(torch.device("cuda"))


def _progress() -> Callable[[int, int], None] | None:
    """Says on standard error how far a long inspection is, on a terminal."""
    if not sys.stderr.isatty():
        return None
    started = time.monotonic()

    def say(done: int, of: int) -> None:
        if of > 3:
            end = "\r" if done < of else "\r\033[K"
            print(f"compiled {done} of {of}, {time.monotonic() - started:.0f} s", end=end, file=sys.stderr, flush=True)

    return say
