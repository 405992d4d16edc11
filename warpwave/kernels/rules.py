"""Tables of choices: how a family chooses a config, as rows of condition, choice, measured gain and record; and the
checks of a config's sizes.

The first row whose condition holds decides. `explain` prints the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from warpwave.gpu import Gpu
from warpwave.problem import AttentionProblem, by_kind

C = TypeVar("C")

# The gain of a row that was never timed: the widest tile that compiles without spills, or with fewest.
NOT_MEASURED = "not measured; compiled with the fewest spills"
# The records of configs in code of cards with `mma` instructions (docs/notes/other_cards.md): of plain calls, of
# float32, of masks and biases, and of columns in two tiles; and how their gain ends.
MMA_CONFIGS = "2026-11-27-h200-mma-configs.json"
MMA_CONFIGS_2 = "2026-11-27-h200-mma-configs-2.json"
MASKS_OF_MMA = "2026-11-27-mma-masks.json"
MASKS_99_KIB = "2026-11-28-mma-masks-99-kib.json"
TWO_TILES = "2026-11-28-two-column-tiles.json"
IN_CODE_OF_MMA = "in code of these cards on a Hopper GPU"


def check_sizes(config: Any, powers_of_two: Mapping[str, int], positive: Sequence[str] = ()) -> None:
    """Checks the sizes of a config.

    Args:
        powers_of_two: the names of fields that must be powers of two -> the least value of each.
        positive: the names of fields that must be at least 1.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """
    for name in (*powers_of_two, *positive):
        if not isinstance(getattr(config, name), int):
            raise ValueError(f"{name} is {getattr(config, name)!r}; it must be an integer")
    for name, least in powers_of_two.items():
        value = getattr(config, name)
        if value < least or value & (value - 1):
            raise ValueError(f"{name} is {value}; it must be a power of two, at least {least}")
    for name in positive:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least 1")


class Rule(NamedTuple, Generic[C]):
    """One row.

    Attributes:
        where: the condition in words, as `explain` prints it.
        holds: evaluates the condition on the family's view of a call.
        choices: the choice: configs, of which the first that fits is used; or one function of a config and the call
            that returns the changed config.
        gain: the measured gain and its baseline, or that there is no measurement.
        record: file of benchmarks/records or docs/notes with the measurement; "" if there is none.
    """

    where: str
    holds: Callable[[Any], bool]
    choices: Sequence[C]
    gain: str
    record: str = ""


def by_width(
    where: str, holds: Callable[[Any], bool], choices: Sequence[C], gain: str, record: str = ""
) -> tuple[Rule[C], ...]:
    """Returns three rows that differ in head_dim alone: up to 64, 65 to 128, and above (`bucket` of the view)."""
    widths = ("head_dim up to 64", "head_dim 65 to 128", "head_dim above 128")
    return tuple(
        Rule(f"{where}, {width}", _of_bucket(holds, bucket), (choice,), gain, record)
        for bucket, (width, choice) in enumerate(zip(widths, choices, strict=True))
    )


def _of_bucket(holds: Callable[[Any], bool], bucket: int) -> Callable[[Any], bool]:
    return lambda call: call.bucket == bucket and holds(call)


def deciding(rules: Sequence[Rule[C]], call: Any) -> Rule[C]:
    """Returns the first rule that holds. The last row of a table holds for every call."""
    return next(rule for rule in rules if rule.holds(call))


def undecided(rules: Sequence[Rule[C]], call: Any) -> list[Rule[C]]:
    """Returns the rules that depend on sizes, up to the first one that holds for all sizes; rules that hold for no size
    are left out.

    Args:
        call: the family's view of a call without sizes. A condition that computes with a size raises TypeError.
    """
    found = []
    for rule in rules:
        try:
            if not rule.holds(call):
                continue
        except TypeError:
            found.append(rule)
            continue
        return [*found, rule]
    return found


def chooser(
    rules: Sequence[Rule[C]], view: Callable[[AttentionProblem, Gpu], Any]
) -> Callable[[AttentionProblem, Gpu], Rule[C]]:
    """Returns the function that finds a call's row. Conditions that read no size are evaluated once per kind of
    problem.

    Args:
        view: the family's view of a call, which conditions read.
    """

    @by_kind
    def left(problem: AttentionProblem, gpu: Gpu) -> list[Rule[C]]:
        return undecided(rules, view(problem, gpu))

    def rule_of(problem: AttentionProblem, gpu: Gpu) -> Rule[C]:
        rows = left(problem, gpu)
        return rows[0] if len(rows) == 1 else deciding(rows, view(problem, gpu))

    return rule_of


def changed(config: C, rows: Sequence[Rule[Callable[[C, Any], C]]], call: Any) -> C:
    """Returns the config after the changes of the rows, in their order."""
    for rule in rows:
        config = rule.choices[0](config, call)
    return config


def notes(rules: Sequence[Rule[Any]], is_default: bool, fits: bool = True) -> list[str]:
    """Returns the rows that decided, one sentence each.

    Args:
        is_default: whether the config is the one that the rows lead to.
        fits: whether the rows' choice fits the GPU; if not, the default is the next smaller one.
    """
    found = [f"{rule.where}: {rule.gain}" + (f" ({rule.record})" if rule.record else "") for rule in rules]
    if not fits:
        found[-1] += "; made smaller to fit shared memory"
    if not is_default:
        found[-1] += "; the table would choose another config"
    return found
