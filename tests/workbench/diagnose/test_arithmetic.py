"""The arithmetic that a diagnosis prints, computed again from the printed figures alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import pytest

from tests.workbench.diagnose.generated import NAMES, table
from tests.workbench.diagnose.test_printed import _printed
from warpwave.workbench.diagnose.parse import Document, load, names
from warpwave.workbench.diagnose.rules import diagnose

PREFIX = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
UNIT = re.compile(r"(Ki|Mi|Gi|[kMGTP]?)(FLOP/s|FLOP|B/s|B|tokens/s)\b")
TERM = re.compile(r"([-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?)\s*((?:[kMGTP]|[KMG]i)?(?:FLOP/s|FLOP|B/s|B)|tokens/s|us|ms|%)?")


def _value(term: str) -> tuple[float, float] | None:
    """Returns a printed figure in SI units, and the relative error of its rounding."""
    power = re.fullmatch(r"(.*)\^2", term.strip())
    text = power[1] if power else term.strip()
    text = re.sub(r"\s*(at \d+( blocks)?|blocks?|heads?|busy|x|SMs?|CUs?)$", "", text.strip())
    found = TERM.fullmatch(text)
    if found is None:
        return None
    number, unit = found[1], found[2] or ""
    value = float(number.replace(",", ""))
    decimals = len(number.partition(".")[2].partition("e")[0]) if "e" not in number else 0
    off = 0.5 * 10.0**-decimals / abs(value) if value and ("." in number or unit) else 0.0
    if unit == "%":
        value /= 100
    elif unit in ("us", "ms"):
        value *= {"us": 1e-6, "ms": 1e-3}[unit]
    elif unit and (scaled := UNIT.fullmatch(unit)):
        value *= 2.0 ** {"Ki": 10, "Mi": 20, "Gi": 30}[scaled[1]] if scaled[1].endswith("i") else PREFIX[scaled[1]]
    return (value**2, 2 * off) if power else (value, off)


def _side(text: str) -> tuple[float, float] | None:
    """Returns the value of a product, quotient or sum, and its relative rounding error."""
    while group := re.search(r"(sqrt|ceil)?\(([^()]*)\)", text):
        inner = _side(group[2])
        if inner is None and group[1]:
            return None
        function = {"sqrt": math.sqrt, "ceil": math.ceil}.get(group[1], float)
        # Brackets that hold words are labels of what follows.
        text = text.replace(group[0], f"{function(inner[0]):.9f}" if inner is not None else "").strip()
    total, error = 0.0, 0.0
    for part in re.split(r" \+ ", text):
        value, off = 1.0, 0.0
        for i, token in enumerate(re.split(r" (x|/) ", part)):
            if i % 2:
                operator = token
                continue
            found = _value(token)
            if found is None:
                return None
            value = found[0] if i == 0 else value * found[0] if operator == "x" else value / found[0]
            off += found[1]
        total, error = total + value, max(error, off)
    return total, error


def _equations(document: Document) -> Iterator[tuple[str, float, float, float]]:
    """Yields each printed equation with both sides and the error that rounding allows."""
    for finding in diagnose(document):
        for said in re.split(r"; | against ", finding.arithmetic):
            left, equals, right = said.partition(" = ")
            if not equals:
                continue
            right = re.sub(r" (of|busy|a head|tokens|x the minimum).*|,? not .*|,$| [±(].*| (x )?for .*", "", right)
            sides = _side(left), _side(right.strip())
            if sides[0] is not None and sides[1] is not None:
                yield said, sides[0][0], sides[1][0], sides[0][1] + sides[1][1]


DOCUMENTS = {
    **{name: lambda name=name: load(name) for name in names()},
    **{f"printed {n}": lambda n=n: _printed(n) for n in range(5)},
    **{f"planted {cause}": lambda cause=cause: table(cause, 0).document for cause in NAMES},
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_printed_arithmetic_can_be_recomputed(name: str) -> None:
    for said, left, right, off in _equations(DOCUMENTS[name]()):
        assert math.isclose(left, right, rel_tol=off + 0.006), f"{said}: {left:.6g} against {right:.6g}"


def test_most_of_the_equations_are_understood() -> None:
    """Without this the test above could pass by reading nothing."""
    checked = sum(1 for make in DOCUMENTS.values() for _ in _equations(make()))
    printed = sum(f.arithmetic.count(" = ") for make in DOCUMENTS.values() for f in diagnose(make()))
    assert checked > 0.85 * printed > 100, (checked, printed)
