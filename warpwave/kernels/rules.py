"""Tables of configs: a family's choice of a default config as rows of condition, choice, measured gain and record.

The first row whose condition holds decides, and its first config that fits the GPU is the default. `explain` prints
the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

C = TypeVar("C")


class Rule(NamedTuple, Generic[C]):
    """One row.

    Attributes:
        where: the condition in words, as `explain` prints it.
        holds: evaluates the condition on the family's view of a call.
        configs: the choice; if one does not fit, the next one is used.
        gain: the measured gain and its baseline.
        record: file of benchmarks/records with the measurement; "" if the code was only compiled and inspected.
    """

    where: str
    holds: Callable[[Any], bool]
    configs: Sequence[C]
    gain: str
    record: str = ""


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


def note(rule: Rule[Any], config: Any) -> str:
    """Returns the row that decided, in one sentence, with a note if the config is not in the row."""
    chosen = "" if config in rule.configs else "; the table would choose another config"
    return f"{rule.where}: {rule.gain}" + (f" ({rule.record})" if rule.record else "") + chosen
