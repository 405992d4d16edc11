"""The text of `warpwave inspect`: a single finding, a table of many, and the differences between two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from warpwave.workbench.bench.table import Table
from warpwave.workbench.inspect.inspection import Finding, Inspection, config_name, group
from warpwave.workbench.terminal import columns

SHOWN_OPCODES = 12  # per difference


def describe(finding: Finding) -> str:
    """Returns one finding, one line per resource."""
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
    groups = [(name, str(n), _opcodes_of(name, facts.instructions)) for name, n in finding.groups.items()]
    lines += columns(groups, right=(1,), indent="    ")
    lines.append(f"  compiled       in {facts.compile_s:.2f} s" + (" (from Triton's cache)" if facts.cached else ""))
    return "\n".join(lines)


def _blocks(count: int) -> str:
    return f"{count} block{'' if count == 1 else 's'}"


def _a(unit: str) -> str:
    return f"an {unit}" if unit.startswith("S") else f"a {unit}"


def _opcodes_of(name: str, instructions: Counter[str]) -> str:
    """Returns the most frequent opcodes of a group."""
    found = [(o, n) for o, n in instructions.most_common() if name in group(Counter({o: 1}))]
    shown = ", ".join(f"{opcode} {count}" for opcode, count in found[:3])
    return shown + (", ..." if len(found) > 3 else "")


def table(findings: Sequence[Finding]) -> Table:
    """Returns a table with one row per finding, in the order given."""
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
    """The difference between two findings.

    Args:
        title: kernel, target and config.
        before, after: the two findings; None if one side has no counterpart.
        changed: the figures that differ, name -> (before, after).
        opcodes: the instruction counts that differ, largest change first.
    """

    title: str
    before: Finding | None
    after: Finding | None
    changed: dict[str, tuple[int | float | str, int | float | str]]
    opcodes: dict[str, tuple[int, int]]


def compare(before: Sequence[Finding], after: Sequence[Finding]) -> list[Difference]:
    """Pairs findings by kernel, target, config and launch. If each side has a single finding, the two are paired."""

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
    assert either is not None  # every pair has at least one side
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
    """Returns the differences, one line per figure."""
    if difference.before is None or difference.after is None:
        return difference.title
    if not difference.changed and not difference.opcodes:
        return f"{difference.title}: no difference"
    changes = [(name, f"{_shown(a)} -> {_shown(b)}{_delta(a, b)}") for name, (a, b) in difference.changed.items()]
    lines = [difference.title, *columns(changes, indent="  ")]
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
    """Returns the versions of the tools; targets with equal versions share one entry."""
    by_versions: dict[str, list[str]] = {}
    for arch, versions in inspection.tools.items():
        by_versions.setdefault(", ".join(f"{name} {version}" for name, version in versions.items()), []).append(arch)
    return "; ".join(f"{versions} for {', '.join(archs)}" for versions, archs in by_versions.items())
