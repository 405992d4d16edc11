"""A diagnosis as text or JSON, and the command `explain --from-table`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from warpwave.errors import InvalidInput
from warpwave.workbench.diagnose.facts import Finding
from warpwave.workbench.diagnose.implied import implied
from warpwave.workbench.diagnose.missing import missing
from warpwave.workbench.diagnose.parse import Document, Given, TableError, load
from warpwave.workbench.diagnose.rules import KINDS, diagnose, notes
from warpwave.workbench.terminal import printable

WIDTH = 110


def run(name: str | Path, as_json: bool, given: Given | None = None) -> str:
    """Returns the output of `explain --from-table NAME`.

    Args:
        name: path of the table, the name of one that ships with the package, or "-" for standard input.
        as_json: whether to return JSON instead of text.
        given: what options add to the table.

    Raises:
        InvalidInput: there is no such table, or it has a mistake.
    """
    try:
        document = load(name, given)
        findings = diagnose(document)
    except TableError as error:
        raise InvalidInput(str(error)) from None
    if as_json:
        data: dict[str, Any] = {"title": document.title, "source": document.source, "device": asdict(document.device)}
        data |= {"findings": [asdict(f) for f in findings], "notes": notes(document)}
        known = implied(document)
        data |= {"not_said": missing(known), "assumed": known.assumed, "not_read": known.unread}
        return json.dumps(data, indent=2)
    return text(document, findings)


def text(document: Document, findings: list[Finding]) -> str:
    """Returns the sections of the diagnosis; each finding is followed by its arithmetic."""
    device = document.device
    lines = [f"table      {printable(document.title)}", f"source     {printable(document.source)}"]
    sms = ""
    if device.num_sms is not None:
        low, high = device.num_sms
        sms = f", {low if low == high else f'{low} to {high}'} {device.unit_name}s"
    lines.append(f"device     {printable(device.name)}{sms}")
    if device.clock:
        lines.append(f"rates      at {device.clock}")
    causes = [f for f in findings if f.is_cause]
    wrong = [f for f in findings if f.kind in ("contradiction", "not comparable", "unverified") and not f.is_cause]
    claims = [f for f in findings if f.kind == "claim"]
    rest = [f for f in findings if f not in (*causes, *wrong, *claims)]
    for heading, part in (
        ("WHY        causes of slowness that follow from the figures, largest first", causes),
        ("CHECK      figures that cannot be compared, disagree, or were not verified", wrong),
        ("CLAIMS     the author's conclusions against the figures", claims),
        ("ALSO       other findings", rest),
    ):
        if part:
            lines += ["", heading, *_listed(part)]
    if known := notes(document):
        lines += ["", "NOTES      knowledge of the software, not arithmetic"]
        for note in known:
            lines += textwrap.wrap(note, WIDTH, initial_indent="  - ", subsequent_indent="    ")
    complete = implied(document)
    if lacking := missing(complete):
        lines += ["", "NOT SAID   what the table and the options leave out, and the rules that could not be applied"]
        for fact, silent in lacking.items():
            lines += textwrap.wrap(f"{fact}: {silent}", WIDTH, initial_indent="  - ", subsequent_indent="    ")
    for words, label in ((complete.assumed, "assumed    "), (complete.unread, "not read   ")):
        if words:
            lines += ["", *textwrap.wrap(printable(", ".join(words)), WIDTH, initial_indent=label)]
    return "\n".join(lines)


def _listed(findings: list[Finding]) -> Iterator[str]:
    for number, finding in enumerate(findings, 1):
        label = f"  {number}. "
        said = (
            f"{finding.kind}: {finding.text}."
            if finding.kind in KINDS and finding.kind != "claim"
            else f"{finding.text}."
        )
        yield from textwrap.wrap(said, WIDTH, initial_indent=label, subsequent_indent=" " * len(label))
        if finding.arithmetic != "-":
            indent = " " * len(label)
            yield from textwrap.wrap(
                f"= {finding.arithmetic}", WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  "
            )
