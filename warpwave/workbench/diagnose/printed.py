"""Reads tables as people print them (Markdown, CSV, pasted text) and returns them as the data of a TOML table file.

Headings and cells give sizes, facts, figures and series. Options of the command add what a table does not state: the
card, the call and facts about the code. Headings and cells that are not understood are returned too, for the output to
list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from warpwave.workbench.diagnose.headings import (
    COMMENT,
    OWN,
    SIZES,
    Heading,
    answer,
    bytes_of,
    described,
    heading,
    is_nothing,
    measured,
    number,
    of_caption,
    owner,
    rounded,
    size,
)
from warpwave.workbench.diagnose.parse import DTYPES, OURS, TableError, is_peer_name
from warpwave.workbench.diagnose.text_tables import TextTable, decode, text_tables

METRIC = re.compile(r"|metric|measure|measurement|quantity|item|value", re.I)
# What a column of times is of, best first; a column without such a word precedes them.
STATISTICS = [
    re.compile(rf"(?<![a-z])({words})(?![a-z])", re.I)
    for words in ("median|p50", "mean|avg|average", "min|best", "max|peak")
]
WARP = 32
MOST_LISTED = 5  # cells of a column that are listed as not read
Line = dict[Any, Any]  # a size, a fact, or (column, passes) of a figure -> its value


def read(content: bytes, *, source: str, call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tables of a text as the data of a TOML file.

    Args:
        content: the bytes of the file.
        source: its name, for messages and the title.
        call: the sizes that options give, which the bytes of a tensor are divided by.

    Raises:
        Unreadable: the bytes are no text, or too many cells.
        TableError: no table has a figure with a unit.
    """
    found = text_tables(decode(content))
    if not found:
        raise TableError(
            f"{source} has no table; a table is Markdown, CSV, or columns divided by two spaces, with a line of "
            "headings"
        )
    tables: list[dict[str, Any]] = []
    facts: list[Line] = []
    claims: list[dict[str, Any]] = []
    unread: list[str] = []
    per_head = False
    for index, text_table in enumerate(found):
        name = f"table {index + 1}" if len(found) > 1 else "the table"
        lines, left_out = _lines(_upright(text_table), call)
        unread += left_out
        claims += [claim for line in lines if (claim := line.pop("claim", None))]
        by_head = [line.pop("per_head", False) for line in lines]
        of_head = any(by_head)
        per_head = per_head or of_head
        if any(_figures(line) for line in lines):
            tables.append({"name": name, "lines": lines, "per_head": of_head, "call": of_caption(text_table.caption)})
        else:
            facts += lines
    if not tables:
        raise TableError(
            f"{source} has no figure that has a unit; write the unit in the heading, such as time (ms) or TFLOP/s, or "
            f"in the cells{_unread_words(unread)}"
        )
    for table in tables:
        # If one table has times of one head, the others have too, unless they have sizes of their own.
        sized = any(key in SIZES for line in table["lines"] for key in line)
        table["per_head"] = table["per_head"] or (per_head and not sized)
        _join(table["lines"], facts)
    return {
        "title": source,
        "source": "read as printed",
        "tables": [made for table in tables for made in _as_data(table)],
        "claims": claims,
        "unread": list(dict.fromkeys(unread)),
    }


def _unread_words(unread: Sequence[str]) -> str:
    return f"; not read: {', '.join(dict.fromkeys(unread))}" if unread else ""


def _upright(table: TextTable) -> TextTable:
    """Returns a table with its figures in columns; a table whose first column names the figures is transposed."""
    names = [row[0] for row in table.rows]
    if not METRIC.fullmatch(table.header[0].strip()):
        return table
    of_units = sum(heading(name).kind == "figure" for name in names)
    by_cell = sum(any(measured(cell) for cell in row[1:]) for row in table.rows)
    if 2 * max(of_units, by_cell) < len(names):
        return table
    columns = [i for i, text in enumerate(table.header) if i and not COMMENT.search(text)]
    rows = tuple((table.header[i], *(row[i] for row in table.rows)) for i in columns)
    return TextTable(table.caption, ("Configuration", *names), rows)


def _lines(table: TextTable, call: Mapping[str, Any]) -> tuple[list[Line], list[str]]:
    """Returns each row as sizes, facts and figures, and the headings and cells that were not read."""
    heads = [_with_cells(heading(text), [row[i] for row in table.rows], table) for i, text in enumerate(table.header)]
    heads = _one_of_each(_with_owners(heads), table.header)
    # With a total beside them, other times without a series are parts of it.
    times = [h for h in heads if h.name == "time_us"]
    total = next((h for h in times if re.match(r"total", h.owner, re.I) or not h.owner), None)
    parts = [h for h in times if total and h is not total and _is_part(h.owner)]
    sized = [(i, head) for i, head in enumerate(heads) if head.kind == "size"]
    known = [head for i, head in sized if any(size(head.name, row[i]) is not None for row in table.rows)]
    lines = []
    unread: dict[str, list[str]] = {}
    for row in table.rows:
        line: Line = {}
        is_whole = True
        for head, text, cell in zip(heads, table.header, row, strict=True):
            is_part = any(head is part for part in parts)
            if not _read_cell(line, head, text, cell, is_part=is_part, caption=table.caption) and not is_nothing(cell):
                unread.setdefault(text, []).append(cell)
                # A default or an option in its place would make a different call of this row.
                is_whole = is_whole and not any(head is each for each in known)
        _add_keys(line, call)
        if line and is_whole:
            lines.append(line)
    shown = [text for head, text in zip(heads, table.header, strict=True) if head.kind == "unknown" and text]
    return lines, [*shown, *(words for text, cells in unread.items() for words in _unread_cells(text, cells))]


def _unread_cells(heading: str, cells: Sequence[str]) -> list[str]:
    """Returns one text for each cell of a column that was not read; the rest are counted."""
    shown = [f"{heading} = {cell}" for cell in cells[:MOST_LISTED]]
    return [*shown, f"{heading} in {len(cells) - MOST_LISTED} more rows"] if len(cells) > MOST_LISTED else shown


def _with_owners(heads: list[Heading]) -> list[Heading]:
    """Returns headings in which a rate or memory without a series belongs to the one series that has a heading."""
    figures = [h for h in heads if h.kind == "figure"]
    named = {h.owner for h in figures if h.owner}
    bare = {h.name for h in figures if not h.owner}
    if len(named) != 1 or "time_us" in bare or any(h.kind == "series" for h in heads):
        return heads
    (name,) = named
    return [replace(h, owner=name) if h.kind == "figure" and not h.owner else h for h in heads]


def _one_of_each(heads: list[Heading], texts: Sequence[str]) -> list[Heading]:
    """Returns headings in which a figure of a series has one column, whatever the order; the others are unknown."""
    best: dict[tuple[str, str, str], tuple[int, int]] = {}
    for index, head in enumerate(heads):
        if head.kind == "figure":
            statistic = next((i for i, words in enumerate(STATISTICS) if words.search(texts[index])), -1)
            key = (_series(head.owner), head.name, head.passes)
            best[key] = min(best.get(key, (statistic, index)), (statistic, index))
    kept = {index for _, index in best.values()}
    return [
        head if head.kind != "figure" or index in kept else Heading("unknown", texts[index])
        for index, head in enumerate(heads)
    ]


def _is_part(words: str) -> bool:
    return bool(re.search(r"\b(compute|launch|softmax|overhead|load|store|copy|merge|reduc|qk|pv|gemm)", words, re.I))


def _with_cells(head: Heading, cells: Sequence[str], table: TextTable) -> Heading:
    """Returns a heading without a unit as a figure if the cells, or the caption, state the unit."""
    if head.kind not in ("unknown", "bytes", "label", "size"):
        return head
    told = [found for cell in cells if (found := measured(cell))]
    if told and 2 * len(told) >= len([cell for cell in cells if not is_nothing(cell)]):
        if head.kind in ("bytes", "size") and told[0][0] == "memory_mb":
            return head
        words = head.name if head.kind != "bytes" else "total"
        return Heading("figure", told[0][0], owner(words), 0.0, head.passes, told[0][2])
    unit = re.search(r"[(\[]([^)\]]+)[)\]]", table.caption)
    above = heading(f"({unit[1]})") if unit else None
    if head.kind == "unknown" and above is not None and above.kind == "figure" and any(map(number, cells)):
        return Heading("figure", above.name, head.owner, above.factor, head.passes, above.per_head)
    return head


def _read_cell(line: Line, head: Heading, text: str, cell: str, *, is_part: bool, caption: str) -> bool:
    """Adds the value of a cell to its line. Returns False if the column holds sizes, facts or figures and the cell has
    no valid one."""
    if head.kind in ("size", "fact"):
        value = size(head.name, cell) if not head.factor else round((number(cell) or 0) * head.factor) or None
        if value is None:
            return False
        if head.name == "warps":
            line["threads"] = WARP * value
        else:
            line[head.name] = value
    elif head.kind == "figure":
        told, value = measured(cell), number(cell)
        if told is not None:
            value, name = told[1], told[0]
        elif value is None or not head.factor or is_nothing(cell):
            return False
        else:
            value, name = rounded(value * head.factor), head.name
        if value <= 0:
            return False
        line["per_head"] = line.get("per_head", False) or head.per_head or bool(told and told[2])
        key = (f"{owner(text) or text}.part_us" if is_part else f"{_series(head.owner)}{name}", head.passes)
        line[key] = value
    elif head.kind in ("series", "label"):
        _identify(line, head, text, cell, caption)
    elif head.kind == "bytes" and (amount := bytes_of(cell)) is not None:
        line[f"bytes of {head.name}"] = amount
    elif head.kind == "fits" and (told_fits := answer(cell)) is not None:
        line["claim"] = {"says": f"{text} {cell}", "fits_in": head.name, "answer": told_fits}
    return True


def _series(words: str) -> str:
    return "" if not words or re.fullmatch(r"total|end to end|all", words, re.I) else f"{words}."


def _identify(line: Line, head: Heading, text: str, cell: str, caption: str) -> None:
    """Adds the series that a cell names, or its label with the sizes and facts in it."""
    if is_nothing(cell):
        return
    has_tiles = bool(re.search(r"\b(tiles?|block)\b", f"{text} {caption}", re.I))
    facts = described(cell, has_tiles)
    if "warps" in facts:
        facts["threads"] = WARP * facts.pop("warps")
    line |= {key: value for key, value in facts.items() if key not in line}
    if is_peer_name(cell) or (head.kind == "series" and not facts):
        line["series"] = OURS if OWN.search(cell) and owner(cell) == OURS else cell
    elif owner(cell) != OURS:
        line["label"] = cell


def _add_keys(line: Line, call: Mapping[str, Any]) -> None:
    """Adds the number of keys that the bytes of K imply, and the working set that a claim is about."""
    of_k, total = line.pop("bytes of k", None), line.pop("bytes of total", None)
    for name in [key for key in line if isinstance(key, str) and key.startswith("bytes of ")]:
        line.pop(name)
    width, dtype = line.get("head_dim", call.get("head_dim")), line.get("dtype", call.get("dtype"))
    if of_k and width and dtype and "seqlen" not in line and "seqlen" not in call:
        keys = of_k / (width * DTYPES[dtype])
        if keys >= 1 and keys == int(keys):
            line["seqlen"] = int(keys)
    if "claim" in line:
        if total:
            line["claim"] |= {"working_set_mb": total / 2**20}
        else:
            del line["claim"]


def _figures(line: Line) -> list[Any]:
    return [key for key in line if isinstance(key, tuple)]


def _join(lines: list[Line], facts: Sequence[Line]) -> None:
    """Adds the sizes of tables without figures to the rows that agree with them in every size that both state."""
    for line in lines:
        for other in facts:
            shared = [key for key in SIZES if key in line and key in other]
            if shared and all(line[key] == other[key] for key in shared):
                line |= {key: other[key] for key in SIZES if key in other}
                break


def _as_data(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the table in the format of TOML, once for each of the passes that its headings name."""
    lines: list[Line] = table["lines"]
    made, named = [], dict.fromkeys(key[1] for line in lines for key in _figures(line))
    for passes in named:
        own = [{key[0] if isinstance(key, tuple) else key: value for key, value in line.items()
                if not isinstance(key, tuple) or key[1] == passes} for line in lines]  # fmt: skip
        if passes and len(named) > 1:  # as a column, which labels the rows
            own = [line | {"passes": passes} for line in own]
        columns = list(dict.fromkeys(key for line in own for key in line))
        data = {
            "name": table["name"] if not passes else f"{table['name']}, {passes}",
            "per_head": table["per_head"],
            "columns": columns,
            "rows": [[line.get(column, "-") for column in columns] for line in own],
        }
        made.append(data | {"call": {**table["call"], **({"passes": passes} if passes else {})}})
    return made
