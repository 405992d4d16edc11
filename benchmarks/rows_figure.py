"""Draws every measured row as one picture, and writes the page that shows it with a table of all losses.

    python -m benchmarks.rows_figure

A row is a call that was timed beside a peer; measured_rows.py reads them from the committed records. A dot shows how
many times as fast as the best peer the row is. Writes docs/rows.md and docs/img/rows.svg.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import geometric_mean

from benchmarks.measured_rows import ROOT, Row, newest_rows
from warpwave.workbench.report.svg import Scale, mark_path, number

PAGE = ROOT / "docs" / "rows.md"
DRAWING = ROOT / "docs" / "img" / "rows.svg"
Rows = Mapping[tuple[str, str], Sequence[Row]]

CARD = "NVIDIA H200"  # suites on other cards are labeled with the card
# Section -> suite in the records -> its label.
SECTIONS: dict[str, dict[str, str]] = {
    "Forward": {
        "forward": "the tuned rows",
        "drawn": "drawn shapes",
        "drawn any_head_dim": "drawn, any head_dim",
        "drawn any_head_dim again": "a draw that rules follow",
        "named forward": "rows that lost before",
        "prefill": "prefill",
        "prefill_paged": "prefill from pages",
        "few_tiles": "few tiles of rows",
        "head_sizes": "head sizes",
        "odd_lengths": "odd lengths",
        "gqa": "grouped heads",
        "models": "calls of published models",
        "forward, survey": "a survey of models",
        "forward, few keys": "few keys at head_dim 48",
        "short_sequences": "many short sequences",
        "quick": "quick",
    },
    "Small calls": {"tiny": "tiny", "case_report_1": "1 to 8 sequences of 4 to 512"},
    "Features": {"masks": "masks and biases", "windows": "windows", "options": "options", "varlen": "packed"},
    "Decode": {
        "decode": "one query, contiguous",
        "decode_batches": "batches",
        "drawn decode": "drawn, 1 to 16 queries",
        "drawn decode again": "drawn again, 1 to 16 queries",
        "drawn decode, third": "a third draw, 1 to 16 queries",
        "drawn decode, fourth": "a fourth draw, 1 to 16 queries",
        "drawn decode, fifth": "a fifth draw, 1 to 16 queries",
        "drawn decode, sixth": "a sixth draw, 1 to 16 queries",
        "drawn decode, seventh": "a seventh draw, 1 to 16 queries",
        "named decode": "calls that lost before",
        "decode_paged": "paged",
        "decode_8_bit": "8-bit caches",
    },
    "Large heads": {
        "large_head_dim": "bfloat16",
        "large_head_dim_float32": "float32",
        "decode_large_head": "decode",
    },
    "float32": {"float32": "all precisions", "ladder": "the ladder"},
    "Gradients": {
        "backward": "backward",
        "backward, between": "backward, 136 to 192",
        "backward, grouped": "backward, grouped heads",
        "backward, drawn": "backward, drawn",
        "backward, models": "backward, published models",
        "backward, survey": "backward, a survey of models",
        "backward, head_dim up to 32": "backward, head_dim up to 32",
        "backward, short sequences": "backward, many short sequences",
        "backward, few queries or keys": "backward, few queries or keys",
        "backward, few blocks": "backward, few blocks of keys",
        "backward, padding": "backward, padding",
        "backward, dropout": "backward, dropout",
        "backward, features": "backward, features",
        "backward, biases": "backward with a bias",
        "forward and backward": "forward and backward",
        "training steps": "grouped heads, small step",
        "training": "forward for gradients",
    },
    "Portable": {"portable forward": "forward", "portable backward": "backward"},
    "Quantized": {
        "8 bits, float8": "float8",
        "8 bits, float8, v bfloat16": "float8, v bfloat16",
        "8 bits, int8, v bfloat16": "int8, v bfloat16",
        "8 bits, int8": "int8",
    },
    "Models": {"a model in transformers": "8 layers, transformers", "training a model": "a training step"},
    "Host time": {"host": "eager calls"},
}
OTHER = "Other"
# Name in the legend -> names in the records, in the order of marks.
PEERS = {
    "SDPA, cuDNN": ("sdpa_cudnn", "cudnn"),
    "FlashAttention-4": ("flash_attention_4",),
    "SDPA, torch's choice": ("sdpa_default", "sdpa"),
    "SDPA, efficient": ("sdpa_efficient", "efficient"),
    "SDPA, FlashAttention-2": ("sdpa_flash", "flash"),
    "FFPA": ("ffpa_cute", "ffpa_triton"),
    "warpwave in bfloat16": ("bfloat16",),
    "three torch calls": ("three_calls",),
    "another": (),
}

WIDTH, TOP, LANE, RADIUS, RING = 1280, 64, 30, 4.3, 6.6
SECTION_AT, LABEL_AT, ROWS_AT, LOSSES_AT, MEAN_AT = 16, 118, 352, 414, 468  # columns; the last three end there
PLOT = (506, 1166)
BEYOND = (1184, 1264)  # rows faster than HIGH
LOW, HIGH = 0.25, 4.0
TICKS = (0.25, 0.35, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 4)
LIGHT = ("#0a5ca8", "#c2500e", "#00795e", "#97408f", "#8a6d00", "#2b87b8", "#5b6b2f", "#6a6f76", "#1c2024")
DARK = ("#6db4ff", "#ff9a58", "#4ccfa6", "#dc9fd6", "#dfc04f", "#8fd0ee", "#b5c77c", "#b0b5bb", "#e7e6e1")
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.t{fill:#57606a}.b{font-weight:600}.g{stroke:#d8dce1}"
    ".one{stroke:#24292f;stroke-width:1.5}.bg{fill:#fff}.slow{fill:#b3261e;opacity:.08}.l{fill:#b3261e;font-weight:600}"
    ".loss{stroke:#b3261e;stroke-width:1.7;fill:none}"
    + "".join(f".p{i}{{fill:{color}}}" for i, color in enumerate(LIGHT))
    + "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.t{fill:#9da7b3}.g{stroke:#30363d}.one{stroke:#e6edf3}"
    ".bg{fill:#0d1117}.slow{fill:#ff6b5e;opacity:.13}.l{fill:#ff8d82}.loss{stroke:#ff6b5e}"
    + "".join(f".p{i}{{fill:{color}}}" for i, color in enumerate(DARK))
    + "}"
)


def main() -> None:
    """Writes the page and the drawing."""
    for path, text in files(newest_rows()).items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


def files(rows: Rows) -> dict[Path, str]:
    """Returns path -> content of what the command writes."""
    return {PAGE: page(rows), DRAWING: drawing(rows)}


def lanes(rows: Rows) -> Iterator[tuple[str, str, Sequence[Row]]]:
    """Yields section, label and rows of each suite, in the order of the picture; of a suite, the H200 first."""
    known = {suite for suites in SECTIONS.values() for suite in suites}
    other = {suite: suite for suite, _ in rows if suite not in known}
    for section, suites in (*SECTIONS.items(), (OTHER, other)):
        for suite, label in suites.items():
            cards = sorted((card for name, card in rows if name == suite), key=lambda card: (card != CARD, card))
            for card in cards:
                short = "" if card == CARD else f", {card.removeprefix('NVIDIA ').split()[0]}"
                yield section, label + short, rows[suite, card]


def peer_index(row: Row) -> int:
    """Returns the place in PEERS of a row's best peer."""
    names = list(PEERS.values())
    return next((i for i, found in enumerate(names) if row.peer in found), len(names) - 1)


def peer_name(row: Row) -> str:
    """Returns the name of a row's best peer."""
    index = peer_index(row)
    return list(PEERS)[index] if PEERS[list(PEERS)[index]] else row.peer


# The drawing ----------------------------------------------------------------------------------------------------------


def swarm(rows: Sequence[Row]) -> list[tuple[float, float, Row]]:
    """Returns (x, dy, row) for each dot: dots with close ratios lie above each other, so that none is hidden."""
    x = Scale(LOW, HIGH, *PLOT, log=True)
    apart = 2 * RADIUS + 0.6
    columns = int((BEYOND[1] - BEYOND[0]) // apart)
    placed: list[tuple[float, float, Row]] = []
    beyond = 0
    for row in sorted(rows, key=lambda row: (row.ratio, row.case)):
        if row.ratio > HIGH:
            line, column = divmod(beyond, columns)
            placed.append((BEYOND[0] + (column + 0.5) * apart, (line + 1) // 2 * (-1) ** line * apart, row))
            beyond += 1
            continue
        at = x(max(row.ratio, LOW))
        free = [
            (at - px, dy, radius(row) + radius(other) + 0.6)
            for px, dy, other in placed
            if at - px < radius(row) + radius(other) + 0.6
        ]
        steps = (sign * n * apart / 4 for n in range(8 * len(placed) + 1) for sign in (1, -1))
        dy = next(dy for dy in steps if all(dx**2 + (py - dy) ** 2 >= least**2 - 1e-6 for dx, py, least in free))
        placed.append((at, dy, row))
    return placed


def radius(row: Row) -> float:
    """Returns the radius of a row's dot, and of the ring around a loss."""
    return RING if row.is_loss else RADIUS


def drawing(rows: Rows) -> str:
    """Returns the drawing: a lane for each suite and card, a dot for each row."""
    parts: list[str] = []
    y, section_before = float(TOP), ""
    for section, label, found in lanes(rows):
        dots = swarm(found)
        up, down = (max(0.0, *(sign * dy for _, dy, _ in dots)) + RING + 4 for sign in (-1, 1))
        up, down = max(up, LANE / 2), max(down, LANE / 2)
        if section != section_before:
            parts.append(_line("g", SECTION_AT, y, BEYOND[1], y))
            parts.append(_text(SECTION_AT, y + up + 4, section, "b"))
            section_before = section
        parts += _lane(label, found, dots, y + up)
        y += up + down
    x = Scale(LOW, HIGH, *PLOT, log=True)
    said = "Speed relative to the best peer of every measured row, by suite. Rows left of 1 are losses."
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {number(y + 92)}" role="img" '
        f'aria-labelledby="t"><title id="t">{said}</title><style>{STYLE}</style>',
        f'<rect class="bg" width="{WIDTH}" height="{number(y + 92)}" rx="6"/>',  # legible on a page of either theme
        f'<rect class="slow" x="{PLOT[0]}" y="{TOP}" width="{number(x(1) - PLOT[0])}" height="{number(y - TOP)}"/>',
        _text((PLOT[0] + x(1)) / 2, 30, "slower than the best peer", "l", "middle"),
        _text((PLOT[1] + x(1)) / 2, 30, "times as fast as the best peer", "b", "middle"),
        _text(sum(BEYOND) / 2, TOP - 12, f"above {HIGH:g}", "t", "middle"),
        _text(ROWS_AT, TOP - 12, "rows", "t", "end"),
        _text(LOSSES_AT, TOP - 12, "losses", "t", "end"),
        _text(MEAN_AT, TOP - 12, "mean", "t", "end"),
    ]
    for tick in TICKS:
        at = x(tick)
        head.append(_line("one" if tick == 1 else "g", at, TOP, at, y))
        head += [_text(at, place, f"{tick:g}", "t", "middle") for place in (TOP - 12, y + 18)]
    return "\n".join([*head, *parts, *_legend(rows, y + 52), "</svg>"]) + "\n"


def _lane(label: str, rows: Sequence[Row], dots: Sequence[tuple[float, float, Row]], y: float) -> Iterator[str]:
    losses = sum(row.is_loss for row in rows)
    mean = geometric_mean(row.ratio for row in rows)
    yield _text(LABEL_AT, y + 4, label)
    yield _text(ROWS_AT, y + 4, f"{len(rows)}", "t", "end")
    yield _text(LOSSES_AT, y + 4, f"{losses}", "l" if losses else "t", "end")
    yield _text(MEAN_AT, y + 4, f"{mean:.2f}", "l" if mean < 1 else "t", "end")
    for x, dy, row in dots:
        said = f"{row.case}: {row.ratio:.3f} of {peer_name(row)}"
        yield _mark(x, y + dy, peer_index(row), row.is_loss, said)


def _legend(rows: Rows, y: float) -> Iterator[str]:
    used = sorted({peer_index(row) for found in rows.values() for row in found})
    yield _text(SECTION_AT, y, "best peer", "t")
    at = float(LABEL_AT)
    for i in used:
        name = list(PEERS)[i]
        yield _mark(at + RADIUS, y - 4, i)
        yield _text(at + 16, y, name)
        at += 16 + 7.2 * len(name) + 8
    yield _mark(LABEL_AT + RADIUS, y + 20, 0, is_loss=True)
    yield _text(LABEL_AT + 16, y + 24, "ring: a loss", "l")
    yield _text(
        LABEL_AT + 116, y + 24, "mean: the geometric mean of a suite. Labels without a card are of an H200.", "t"
    )


def _mark(x: float, y: float, index: int, is_loss: bool = False, said: str = "") -> str:
    told = f"<title>{escape(said)}</title>" if said else ""
    ring = f'<circle class="loss" cx="{number(x)}" cy="{number(y)}" r="{RING}"/>' if is_loss else ""
    return f'{ring}<path class="p{index}" d="{mark_path(x, y, index, RADIUS)}">{told}</path>'


def _text(x: float, y: float, text: str, css_class: str = "", anchor: str = "") -> str:
    of_class = f' class="{css_class}"' if css_class else ""
    anchored = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text{of_class} x="{number(x)}" y="{number(y)}"{anchored}>{escape(text)}</text>'


def _line(css_class: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{css_class}" x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"/>'


# The page -------------------------------------------------------------------------------------------------------------


def page(rows: Rows) -> str:
    """Returns the page in Markdown."""
    found = list(lanes(rows))
    every = [row for _, _, of_lane in found for row in of_lane]
    losses = [(section, label, row) for section, label, of_lane in found for row in of_lane if row.is_loss]
    losses.sort(key=lambda loss: loss[2].ratio)
    return TEXT.format(
        rows=len(every),
        suites=len(found),
        losses=len(losses),
        table=_table(LOSS_HEAD, (_loss(*loss) for loss in losses)),
        records=_table(RECORD_HEAD, (_suite(*lane) for lane in found)),
    )


LOSS_HEAD = ("ratio", "suite", "call", "warpwave us", "best peer us", "best peer", "record")
RECORD_HEAD = ("suite", "rows", "losses", "geometric mean", "least", "most", "record", "date")


def _loss(section: str, label: str, row: Row) -> tuple[str, ...]:
    times = (microseconds(row.ours_us), microseconds(row.peer_us))
    return (f"{row.ratio:.3f}", f"{section}: {label}", row.case, *times, peer_name(row), f"`{row.record}`")


def _suite(section: str, label: str, rows: Sequence[Row]) -> tuple[str, ...]:
    ratios = [row.ratio for row in rows]
    figures = (f"{geometric_mean(ratios):.3f}", f"{min(ratios):.3f}", f"{max(ratios):.2f}")
    losses = f"{sum(row.is_loss for row in rows)}"
    return (f"{section}: {label}", f"{len(rows)}", losses, *figures, f"`{rows[0].record}`", rows[0].date[:10])


def _table(head: Sequence[str], body: Iterator[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *body))


def microseconds(us: float) -> str:
    """Returns a time with three digits."""
    return f"{us:,.0f}" if us >= 100 else f"{us:.3g}"


TEXT = """# Every measured row

Each of the {rows} dots is a call that was timed together with other implementations. Its position is the speed relative
to the best peer: the median over interleaved rounds of the peer's time over ours. {losses} rows are losses: they lie
left of 1, have a ring, and are listed in the table below.

![Speed relative to the best peer of every measured row, by suite](img/rows.svg)

`python -m benchmarks.rows_figure` writes the picture and this page from the
[committed records](../benchmarks/records/README.md).

- The best peer of a row is the fastest peer whose result was accurate enough. Color and shape show which peer it is.
- Each of the {suites} suites is drawn from one record: the newest of the suite's records on a card that have the most
  rows with a peer. A run that ended early therefore does not replace a complete one.
- Times are device times, except for host times in "Host time". Rows of a model or of a training step are whole steps.
- Our contender is `auto`, or the kernel that the suite names if `auto` was not timed. "Quantized" has a suite for each
  pair of dtypes, and its peers compute in 16 bits.
- `d128 16x1/4096 h32/8` is head_dim 128, 16 sequences of one query and 4,096 keys, and 32 query heads on 8 kv heads.
  Other names begin with head_dim.
- Rows of different suites may be of different versions of the code. The list of records has the commits.
- Not shown: runs without peers, text logs, and `verify`, which times calls of other suites only briefly.

## Losses

{table}

## Records

{records}
"""


if __name__ == "__main__":
    main()
