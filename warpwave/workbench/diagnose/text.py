"""A diagnosis as text or JSON, and the command behind `explain --from-table`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from warpwave.errors import InvalidInput
from warpwave.workbench.diagnose.facts import Finding
from warpwave.workbench.diagnose.parse import Document, TableError, load
from warpwave.workbench.diagnose.rules import KINDS, diagnose, notes
from warpwave.workbench.terminal import printable

WIDTH = 110


def run(name: str | Path, as_json: bool) -> str:
    """Returns the output of `explain --from-table NAME`.

    Raises:
        InvalidInput: there is no such table, or it has a mistake.
    """
    try:
        document = load(name)
        findings = diagnose(document)
    except TableError as error:
        raise InvalidInput(str(error)) from None
    if as_json:
        data = {"title": document.title, "source": document.source, "device": asdict(document.device)}
        return json.dumps(data | {"findings": [asdict(f) for f in findings], "notes": notes(document)}, indent=2)
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
