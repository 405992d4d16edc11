"""Reads the rows of the committed records: each call that was timed beside a peer, with the best peer and the ratio."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gradients import WRONG
from warpwave.workbench.bench.records import OURS, Measurement, RecordError, read_records
from warpwave.workbench.bench.timing import Samples, ratio_if_paired

ROOT = Path(__file__).parent.parent
FOLDERS = (ROOT / "benchmarks" / "records", ROOT / "warpwave" / "workbench" / "report" / "shipped")
# Checks of other suites' calls, timed for a moment each.
LEFT_OUT = ("verify",)
WITH_CODE_OF = " with code of "  # between a GPU's name and another's, whose code it executed; left out too
# Groups of benchmarks/gradients.py -> their names as suites.
OF_GRADIENTS = {
    "rows": "backward",
    "between": "backward, between",
    "grouped": "backward, grouped",
    "both": "forward and backward",
    "drawn": "backward, drawn",
    "features": "backward, features",
    "biases": "backward, biases",
    "models": "backward, models",
    "short sequences": "backward, short sequences",
    "few": "backward, few queries or keys",
    "padded": "backward, padding",
    "short": "backward, few blocks",
    "few keys": "forward, few keys",
    "narrow": "backward, head_dim up to 32",
    "dropout, backward": "backward, dropout",
    "survey, backward": "backward, survey",
    "survey, forward": "forward, survey",
    "steps": "training steps",
}
NOT_PEERS = ("warpwave", "deterministic", "before", "none", "tree")


@dataclass(frozen=True)
class Row:
    """One call beside its best peer, which is the fastest that is accurate enough.

    Attributes:
        suite, card, case: what was timed, and on which card.
        peer: the best peer's name in the record.
        ratio: the median over rounds of the peer's time over ours.
        ours_us, peer_us: medians.
        record: the file's name.
        date: when the run began, in ISO format.
    """

    suite: str
    card: str
    case: str
    peer: str
    ratio: float
    ours_us: float
    peer_us: float
    record: str
    date: str

    @property
    def is_loss(self) -> bool:
        return self.ratio < 1


def newest_rows(folders: Sequence[Path] = FOLDERS) -> dict[tuple[str, str], list[Row]]:
    """Returns (suite, card) -> its rows, all of one record: of the records with the most rows, the newest.

    A run that the clock ended early thus does not replace a whole one.
    """
    found: dict[tuple[str, str], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for folder in folders:
        for path in sorted(folder.glob("*.json*")):
            for row in rows_of(path):
                if row.suite not in LEFT_OUT and WITH_CODE_OF not in row.card:
                    found[row.suite, row.card][row.record].append(row)
    chosen = {key: max(of.values(), key=lambda rows: (len(rows), rows[0].date)) for key, of in found.items()}
    return dict(sorted(chosen.items()))


def rows_of(path: Path) -> Iterator[Row]:
    """Yields the rows of a record; none of a file without calls beside peers."""
    if path.suffix == ".jsonl":
        yield from _of_bench(path)
    elif path.suffix == ".json":
        data = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(data, dict) and "environment" in data:
            yield from _of_program(path.name, data)


def _of_bench(path: Path) -> Iterator[Row]:
    """Yields the rows of a record of `warpwave bench`, or of the programs that write the same lines."""
    try:
        records = read_records(path)
    except RecordError:  # another program's lines
        return
    cases: dict[tuple[str, str, str, str], list[Measurement]] = defaultdict(list)
    for environment, m in records.measurements:
        cases[environment, m.suite, m.case, m.mode].append(m)
    for (environment, suite, case, _), measured in cases.items():
        told = records.environments[environment]
        best = _best(measured, host=suite == "host")
        gpu = told.get("gpu")
        if best is not None and gpu:
            yield Row(suite, gpu["name"], case, *best, path.name, told["date"])


def _best(measured: Sequence[Measurement], host: bool) -> tuple[str, float, float, float] | None:
    """Returns the best peer, the ratio, and both times. Ours is `auto`, or a kernel by name if `auto` was not timed."""

    def samples(m: Measurement) -> Samples | None:
        return m.host if host else m.timing

    timed = [(m, found) for m in measured if (found := samples(m)) is not None]
    mine = sorted(((m, s) for m, s in timed if m.is_ours), key=lambda x: x[0].contender != f"{OURS}auto")
    peers = [(m, s) for m, s in timed if m.is_peer and m.verdict is not None and m.verdict.passed]
    if not mine or not peers:
        return None
    peer, of_peer = min(peers, key=lambda x: x[1].median_us)
    ratio = ratio_if_paired(of_peer, mine[0][1])
    return None if ratio is None else (peer.contender, ratio.median, mine[0][1].median_us, of_peer.median_us)


def _of_program(record: str, data: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the rows of a JSON file of a program in this folder."""
    environment = data["environment"]
    if not environment.get("gpu"):
        return
    card, date = environment["gpu"]["name"], environment["date"]
    for group, entries in data.items():
        for entry in entries if isinstance(entries, list) else ():
            if not isinstance(entry, dict):
                continue
            if "bfloat16" in entry:  # quantized_beside_16_bits.py
                yield from _of_quantized(entry, record, card, date)
                continue
            if isinstance(entry.get("ms"), dict) and "warpwave" in entry["ms"]:
                suite, case = _name(group, entry)
                wrong = [name for name, error in entry.get("difference", {}).items() if error > WRONG]
                of_right = {name: found for name, found in entry["ms"].items() if found and name not in wrong}
                times = {name: [1000 * ms for ms in found] for name, found in of_right.items()}
            elif "direction" in entry:  # portable.py
                suite, case, times = f"portable {entry['direction']}", entry["case"], entry["us"]
            else:
                continue
            yield from _beside_best(suite, card, case, times, record, date)


def _beside_best(
    suite: str, card: str, case: str, times: Mapping[str, list[float]], record: str, date: str
) -> Iterator[Row]:
    """Yields the row of a case with times of ours and of a peer."""
    peers = {name: found for name, found in times.items() if name not in NOT_PEERS}
    if "warpwave" in times and peers:
        peer = min(peers, key=lambda name: median(peers[name]))
        ratio = median(b / a for a, b in zip(times["warpwave"], peers[peer], strict=True))
        mine = median(times["warpwave"])
        yield Row(suite, card, case, peer, ratio, mine, median(peers[peer]), record, date)


def _name(group: str, entry: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the suite and the case of an entry with times of whole calls, models or steps."""
    if "what" in entry:  # llama_stack.py
        return "a model in transformers", entry["what"]
    if "batches" in entry:  # train.py
        return "training a model", f"context {entry['context']}, {entry['batches']}, {entry['mode']}"
    return OF_GRADIENTS.get(group, group), entry["case"]


def _name_of_point(entry: Mapping[str, Any]) -> str:
    size = f"{entry['head_dim']}, {entry['batch']} x {entry['seqlen']}, {'causal' if entry['causal'] else 'full'}"
    return size + (f", blocks of {entry['block']}" if entry["block"] else "")


def _of_quantized(entry: Mapping[str, Any], record: str, card: str, date: str) -> Iterator[Row]:
    """Yields a row for each way of quantizing: its default config beside the calls in 16 bits."""
    timed = {name: found["us"] for name, found in entry.items() if isinstance(found, dict) and found.get("is_right")}
    peers = {name: us for name, us in timed.items() if ": " not in name}
    for way, default in entry["defaults"].items():
        if default in timed:
            times = {"warpwave": timed[default], **peers}
            yield from _beside_best(f"8 bits, {way}", card, _name_of_point(entry), times, record, date)
