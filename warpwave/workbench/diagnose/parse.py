"""The reader of tables of measurements. docs/workbench/diagnose.md describes the format."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from warpwave.workbench.hardware.catalog import DataSheet, find, hint, sheet_of
from warpwave.workbench.hardware.occupancy import MULTIPROCESSORS
from warpwave.workbench.input_files import LARGEST_BYTES, Unreadable, read_bytes, read_toml
from warpwave.workbench.model.roofline import data_sheet_rates
from warpwave.workbench.schema import quoted

CASES = Path(__file__).with_name("cases")
OURS = "theirs"  # the series of a column without a series in its name
DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "fp8": 1}
# Defaults that scale the work or the bytes of a call: size -> words for the output.
ASSUMED = {"batch": "batch 1", "dtype": "dtype float32", "causal": "no causal mask"}
PASSES = ("forward", "backward", "both")
GRIDS = ("query tiles", "heads", "output tiles")
LEAST, MOST = 1e-9, 1e15  # range of a figure or size, in any unit of the format
MOST_SMS = 100_000
MEASURED = ("time_us", "time_ms", "tflops", "tokens_per_s", "memory_mb")
PART = "part_us"
# Names of other projects' code. A series with such a name and no tiles is a peer, which multiplies on matrix units.
PEERS = re.compile(
    r"torch|sdpa|flash[-_ ]?attention|flash[-_ ]?attn|\bfa-?v?[234]\b|cudnn|xformers|triton|cutlass|flashinfer|flex|"
    r"tensorrt|trt|\bjax\b|\bxla\b|aotriton|composable|tilelang|thunderkittens|miopen|vllm|\bffpa\b",
    re.IGNORECASE,
)
OF_AUTHOR = re.compile(r"\b(ours?|my|mine|theirs|your|yours|this work|custom|proposed)\b", re.IGNORECASE)
OF_CODE = ("grid", "blocks", "block_m", "block_n", "threads")  # facts that are unknown of a peer's code


def is_peer_name(series: str) -> bool:
    """Returns whether a series is named like another project's code rather than the author's."""
    return PEERS.search(series) is not None and OF_AUTHOR.search(series) is None


class TableError(ValueError):
    """A table file does not exist or has a mistake. The message gives the place and the allowed values."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """The attention call of a row; None for sizes that are not stated.

    Attributes:
        batch, heads, heads_kv, seqlen, seqlen_k, head_dim: sizes; seqlen_k defaults to seqlen, heads_kv to heads.
        dtype: dtype of q, k and v; fp8 is any 8-bit float, with out in 16 bits.
        causal: whether a causal mask, aligned to the last key, is applied.
        passes: what was timed: "forward", "backward" or "both".
        softcap: whether scores are capped by a tanh.
    """

    batch: int = 1
    heads: int | None = None
    heads_kv: int | None = None
    seqlen: int | None = None
    seqlen_k: int | None = None
    head_dim: int | None = None
    dtype: str = "float32"
    causal: bool = False
    passes: str = "forward"
    softcap: bool = False


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The known facts about the code of a series.

    Attributes:
        grid: the unit of work of a thread block: "query tiles" of a head, "heads", or "output tiles" (query tiles times
            key tiles, as in a matrix product).
        blocks: blocks of the launch, if the table states them.
        block_m, block_n: queries and keys of a tile.
        threads, busy_threads: threads of a block; those that compute.
        unit: "scalar" (float32 units) or "matrix"; "" if the table does not state it.
        scores: "chip" or "memory", where scores are stored; score_bytes is the size of each.
        smem_bytes, smem_available_bytes: shared memory that a block uses, and the limit without opting in to more.
        launch_heads: "one" head per launch, "all" heads in one launch, or "" if unknown.
        softmax_rows: rows that the softmax's launch covers, if the table states them.
        max_difference: difference from a reference, if one was computed.
        is_peer: whether it is another project's kernel, for comparison, whose tiles are unknown.
    """

    grid: str = "query tiles"
    blocks: int | None = None
    block_m: int | None = None
    block_n: int | None = None
    threads: int | None = None
    busy_threads: int | None = None
    unit: str = ""
    scores: str = "chip"
    score_bytes: int = 4
    smem_bytes: int | None = None
    smem_available_bytes: int | None = None
    launch_heads: str = "all"
    softmax_rows: int | None = None
    max_difference: float | None = None
    is_peer: bool = False


@dataclass(frozen=True, kw_only=True)
class Device:
    """The card, as far as the table or the catalog describes it.

    Attributes:
        name: for people.
        num_sms: smallest and largest possible number.
        bandwidth_gbps, l2_bytes, smem_per_sm_bytes: None where unknown.
        tflops: unit -> rate: "scalar", and the matrix units by dtype.
        exponentials_gops: 10^9 exponentials a second; None if unknown.
        clock: the clock of these rates in words, if it is not the one of the data sheet's peaks; else empty.
        unit_name: SM, CU or WGP.
        has_tf32: whether float32 products may run on matrix units.
    """

    name: str
    num_sms: tuple[int, int] | None = None
    bandwidth_gbps: float | None = None
    l2_bytes: int | None = None
    smem_per_sm_bytes: int | None = None
    tflops: Mapping[str, float] = field(default_factory=dict)
    exponentials_gops: float | None = None
    clock: str = ""
    unit_name: str = "SM"
    has_tf32: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement.

    Attributes:
        table: the name of its table.
        series: the name of the code that was measured.
        label: distinguishes it from the other rows of its table.
        call, kernel: the call and the code.
        varied: the columns of its table that describe the call or the kernel, with the row's values.
        time_us: time of the whole call, or of one head if `per_head`.
        per_head: whether times and rates are of one head.
        tflops, tokens_per_s, memory_mb: as given.
        digits: figure -> its number of significant digits.
        launch_saving: how launches were made cheaper ("graph", "streams"); empty if they were not.
        parts: name -> us, if the row gives parts of its time.
        is_unit_assumed: whether `kernel.unit` follows from the rate alone (`implied`), and the table does not state it.
    """

    table: str
    series: str
    label: str
    call: Call
    kernel: Kernel
    varied: Mapping[str, Any]
    time_us: float | None = None
    per_head: bool = False
    tflops: float | None = None
    tokens_per_s: float | None = None
    memory_mb: float | None = None
    digits: Mapping[str, int] = field(default_factory=dict)
    launch_saving: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    is_unit_assumed: bool = False

    @property
    def name(self) -> str:
        """The series and the label, or the series alone if it is the label."""
        return self.series if self.label == self.series else f"{self.series}, {self.label}"


@dataclass(frozen=True, kw_only=True)
class Document:
    """A table file.

    Attributes:
        title, source: a title, and the origin of the figures.
        device: the card.
        rows: every measurement, in order.
        kernels: series -> the known facts about its code.
        claims: the author's conclusions, as data; see `claims`.
        parts: parts of a time that are given outside a row: name -> us.
        assumed: what the table does not state and has a default, in words.
        unread: headings of columns, and cells, that were not read.
    """

    title: str
    source: str
    device: Device
    rows: tuple[Row, ...]
    kernels: Mapping[str, Kernel]
    claims: tuple[Mapping[str, Any], ...]
    parts: Mapping[str, float]
    assumed: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def series(self) -> list[str]:
        return list(dict.fromkeys(row.series for row in self.rows))


def names() -> list[str]:
    """Returns the names of the tables that ship with the package."""
    return sorted(path.stem for path in CASES.glob("*.toml"))


@dataclass(frozen=True, kw_only=True)
class Given:
    """What options of the command add to a table. They replace what the file says for all rows; columns keep theirs.

    Attributes:
        gpu: a card of the catalog, or the file of a card (`card_file`).
        call: sizes of the call, as in `[call]`.
        code: series -> facts about its code, as in `[kernels.NAME]`; those of "" hold for every series but peers.
    """

    gpu: str | None = None
    call: Mapping[str, Any] = field(default_factory=dict)
    code: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def load(name: str | Path, given: Given | None = None) -> Document:
    """Loads a table by the path of its file, or by the name of one that ships with the package.

    A file whose name ends in `.toml` has the format of docs/workbench/diagnose.md. Any other is read as it was printed:
    Markdown, CSV, or text; `-` is standard input.

    Raises:
        TableError: there is no such file, or it has a mistake; the first one is reported.
    """
    given = given or Given()
    ships = name in names() and not os.path.isfile(name)
    path = CASES / f"{name}.toml" if ships else Path(name)
    try:
        if path.suffix.lower() == ".toml":
            return parse(read_toml(path), source=path.name, given=given)
        from warpwave.workbench.diagnose.printed import read

        piped = str(name) == "-"
        source = "standard input" if piped else path.name
        content = sys.stdin.buffer.read(LARGEST_BYTES) if piped else read_bytes(path)
        try:
            data = read(content, source=source, call=given.call)
        except Unreadable as error:
            raise TableError(f"{source} is {error}") from None
    except Unreadable as error:
        raise TableError(f"{error}; give the path of a table, or one of {', '.join(names())}") from None
    if not any("launch_heads" in facts for facts in given.code.values()):
        for table in data["tables"]:  # a time of one head may be a share of a launch of all
            table |= {"kernel": {"launch_heads": ""}} if table["per_head"] else {}
    unread = tuple(data.pop("unread"))
    return replace(parse(data, source=source, given=given), unread=unread)


def facts_of_code(texts: list[str]) -> dict[str, dict[str, Any]]:
    """Returns the facts about code that options give: "block_m=64", or "flash.block_m=64" for one series.

    Raises:
        TableError: a text that is no fact.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        series, _, key = name.strip().rpartition(".")
        if not equals and key in _names(Kernel):
            raise TableError(f"--code {quoted(text)} has no value; write {text.strip()}=VALUE")
        if key not in _names(Kernel):
            raise TableError(f"--code {quoted(text)} is no fact about code; {_hint(key, _names(Kernel))}")
        found.setdefault(series, {})[key] = _value(value.strip())
    for series, values in found.items():
        _make(Kernel, values, Kernel(), f"--code {series}".strip())
    return found


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


TOP = ("title", "source", "gpu", "device", "call", "kernels", "tables", "claims", "parts")
OF_TABLE = ("name", "series", "columns", "rows", "per_head", "launch_saving", "call", "kernel")


def parse(data: Mapping[str, Any], *, source: str, given: Given | None = None) -> Document:
    """Makes a document from parsed TOML; messages name `source` as its origin.

    Raises:
        TableError: the first mistake, with its place and the allowed values.
    """
    given = given or Given()
    _check(data, TOP, source)
    for key in ("title", "tables"):
        if key not in data:
            raise TableError(f"{source}: {key} must be given")
    for key in ("title", "source"):
        if not isinstance(data.get(key, ""), str):
            raise TableError(f"{source}: {key} must be text, got {quoted(data[key])}")
    if not isinstance(data["tables"], list) or not data["tables"]:
        raise TableError(f"{source}: tables must be a list of at least one [[tables]]")
    call = _make(Call, data.get("call", {}), Call(), f"{source}: [call]")
    call = _make(Call, dict(given.call), call, "the options of the call")
    raw = _table(data.get("kernels", {}), f"{source}: kernels")
    for name, values in raw.items():
        _make(Kernel, values, Kernel(), f"{source}: [kernels.{name}]")
    tables = [_table(table, f"{source}: tables[{index}]") for index, table in enumerate(data["tables"])]
    series = _all_series(tables)
    for name in given.code:
        if name and name.casefold() not in {each.casefold() for each in series}:
            raise TableError(f"--code names the series {quoted(name)}; the table has {', '.join(series)}")
    kernels = _kernels(raw, series, given)
    rows: list[Row] = []
    for index, table in enumerate(tables):
        rows += _rows(table, call, kernels, f"{source}: tables[{index}]")
    claims = data.get("claims", [])
    if not isinstance(claims, list) or any(not isinstance(claim, dict) or "says" not in claim for claim in claims):
        raise TableError(f"{source}: claims must be a list of [[claims]], each with what it says")
    stated = {*given.call, *data.get("call", {}), *(key for t in tables for key in t.get("call", {}))}
    stated |= {column for table in tables for column in table.get("columns", ())}
    return Document(
        title=str(data["title"]),
        source=str(data.get("source", source)),
        device=_device(data, source, given.gpu),
        rows=tuple(rows),
        kernels=kernels,
        claims=tuple(claims),
        parts=_numbers(data.get("parts", {}), f"{source}: [parts]"),
        assumed=tuple(words for size, words in ASSUMED.items() if size not in stated),
    )


def _all_series(tables: list[Mapping[str, Any]]) -> list[str]:
    """Returns the names of all series, as far as the tables are well-formed; `_rows` reports what is not."""
    found: list[str] = []
    for table in tables:
        columns, lines = table.get("columns"), table.get("rows")
        if not isinstance(columns, list) or not isinstance(lines, list):
            continue
        names = [str(column).rpartition(".")[::2] for column in columns]
        if "series" in columns:
            at = columns.index("series")
            found += [str(line[at]) for line in lines if isinstance(line, list) and len(line) > at and line[at] != "-"]
        found += [owner or str(table.get("series", OURS)) for owner, plain in names if plain in MEASURED]
    return list(dict.fromkeys(found))


def _kernels(raw: Mapping[str, Any], series: list[str], given: Given) -> dict[str, Kernel]:
    """Returns what is known about the code of each series. Peers are recognized by their names, unless all series have
    such names."""
    peers = {name for name in series if is_peer_name(name) and not set(raw.get(name, {})) & set(OF_CODE)}
    if peers >= set(series):
        peers = set()
    found = {}
    for name in dict.fromkeys((*raw, *series)):
        values: dict[str, Any] = {"is_peer": True, "unit": "matrix"} if name in peers else {}
        values |= raw.get(name, {})
        if not values.get("is_peer"):
            values |= given.code.get("", {})
        for told, facts in given.code.items():
            values |= facts if told and told.casefold() == name.casefold() else {}
        found[name] = _make(Kernel, values, Kernel(), f"[kernels.{name}]")
    return found


def _sheet(data: Mapping[str, Any], source: str, option: str | None) -> DataSheet | None:
    """Returns the sheet of the card that the option or else the table names; None if neither names one."""
    try:
        # A table may come from anybody, so only the option may name another file.
        found = find(str(data.get("gpu", ""))) if option is None else sheet_of(option)
    except ValueError as error:
        raise TableError(str(error)) from None
    if found is None and (option is not None or "gpu" in data):
        name = f"{source}: gpu {quoted(data['gpu'])}" if option is None else f"--gpu {quoted(option)}"
        text = str(data["gpu"]) if option is None else option
        raise TableError(f"{name} is not in the catalog; {hint(text)}; --gpu also takes a card's file")
    return found


def _device(data: Mapping[str, Any], source: str, option: str | None) -> Device:
    given = dict(_table(data.get("device", {}), f"{source}: [device]"))
    _check(given, ("name", "num_sms", "bandwidth_gbps", "l2_mb", "smem_per_sm_kb", "tflops"), f"{source}: [device]")
    base = Device(name="an unnamed card")
    if (sheet := _sheet(data, source, option)) is not None:
        rates = data_sheet_rates(sheet)
        peaks = rates.product_tflops
        base = Device(
            name=sheet.name,
            num_sms=(sheet.num_sms, sheet.num_sms),
            bandwidth_gbps=sheet.bandwidth_gbps,
            l2_bytes=sheet.l2_bytes + sheet.last_level_cache_bytes,
            smem_per_sm_bytes=sheet.smem_per_sm_bytes,
            tflops={"scalar": peaks["float32"], **{k: v for k, v in peaks.items() if k != "float32"}},
            exponentials_gops=rates.exponentials_gops,
            clock=rates.clock,
            unit_name=MULTIPROCESSORS[sheet.arch].unit if sheet.arch in MULTIPROCESSORS else "SM",
            has_tf32="tf32" in peaks,
        )
    if "name" in given:
        base = replace(base, name=str(given["name"]))
    if (sms := given.get("num_sms")) is not None:
        pair = sms if isinstance(sms, list) else [sms, sms]
        if len(pair) != 2 or any(type(n) is not int or not 1 <= n <= MOST_SMS for n in pair) or pair[0] > pair[1]:
            raise TableError(f"{source}: num_sms must be a positive whole number or [least, most], got {quoted(sms)}")
        base = replace(base, num_sms=(pair[0], pair[1]))
    numbers = _numbers({k: given[k] for k in ("bandwidth_gbps", "l2_mb", "smem_per_sm_kb") if k in given}, source)
    if "bandwidth_gbps" in numbers:
        base = replace(base, bandwidth_gbps=numbers["bandwidth_gbps"])
    if "l2_mb" in numbers:
        base = replace(base, l2_bytes=int(numbers["l2_mb"] * 2**20))
    if "smem_per_sm_kb" in numbers:
        base = replace(base, smem_per_sm_bytes=int(numbers["smem_per_sm_kb"] * 1024))
    if "tflops" in given:
        base = replace(base, tflops={**base.tflops, **_numbers(given["tflops"], f"{source}: tflops")})
    return base


def _rows(table: Mapping[str, Any], call: Call, kernels: Mapping[str, Kernel], where: str) -> list[Row]:
    _check(table, OF_TABLE, where)
    name, columns, lines = (table.get(key) for key in ("name", "columns", "rows"))
    if not isinstance(columns, list) or not all(isinstance(column, str) for column in columns):
        raise TableError(f"{where}: columns must be a list of names")
    if not isinstance(lines, list) or not lines:
        raise TableError(f"{where}: rows must be a list of rows")
    if not isinstance(table.get("per_head", False), bool):
        raise TableError(f"{where}: per_head must be true or false, got {quoted(table['per_head'])}")
    default = str(table.get("series", OURS))
    own = _make(Call, table.get("call", {}), call, f"{where}: call")
    given_kernel = _table(table.get("kernel", {}), f"{where}: kernel")
    found: list[Row] = []
    for number, line in enumerate(lines):
        at = f"{where}: rows[{number}]"
        if not isinstance(line, list) or len(line) != len(columns):
            raise TableError(f"{at} must have {len(columns)} figures, one a column, got {quoted(line)}")
        calls: dict[str, Any] = {}
        codes: dict[str, Any] = {}
        figures: dict[str, dict[str, float]] = {}
        parts: dict[str, float] = {}
        series, label, saving = default, "", str(table.get("launch_saving", ""))
        for column, value in zip(columns, line, strict=True):
            owner, _, plain = column.rpartition(".")
            if value == "" or (isinstance(value, str) and value.strip() == "-"):
                continue  # not measured
            if plain in MEASURED or plain == PART:
                if type(value) not in (int, float) or not LEAST <= value <= MOST:
                    raise TableError(f'{at}: {column} must be a number above 0, or "-" for none, got {quoted(value)}')
                if plain == PART:
                    parts[owner] = float(value)
                else:
                    figures.setdefault(owner, {})[plain] = value
            elif plain in _names(Call):
                calls[plain] = value
            elif plain in _names(Kernel):
                codes[plain] = value
            elif plain in ("series", "label", "launch_saving"):
                series = str(value) if plain == "series" else series
                label = str(value) if plain == "label" else label
                saving = str(value) if plain == "launch_saving" else saving
            else:
                known = (*MEASURED, PART, *_names(Call), *_names(Kernel), "series", "label", "launch_saving")
                raise TableError(f"{at}: unknown column {quoted(column)}; {_hint(plain, known)}")
        varied = {**calls, **codes}
        for owner, values in figures.items():
            who = owner or series
            code = _make(Kernel, {**given_kernel, **codes}, kernels.get(who, Kernel()), at)
            time = values.get("time_us", values["time_ms"] * 1e3 if "time_ms" in values else None)
            found.append(
                Row(
                    table=str(name or where),
                    series=who,
                    label=label or ", ".join(f"{k} {v}" for k, v in (calls or codes).items()) or who,
                    call=_make(Call, calls, own, at),
                    kernel=code,
                    varied=varied,
                    time_us=time,
                    per_head=bool(table.get("per_head", False)),
                    tflops=values.get("tflops"),
                    tokens_per_s=values.get("tokens_per_s"),
                    memory_mb=values.get("memory_mb"),
                    digits={key: _digits(value) for key, value in values.items()},
                    launch_saving=saving,
                    parts=parts,
                )
            )
    return found


def _digits(value: float) -> int:
    """Returns the significant digits of a figure as written; trailing zeros of a whole number do not count."""
    mantissa = f"{value:.12g}".split("e")[0]
    plain = mantissa.replace(".", "").lstrip("0")
    return len(plain.rstrip("0") or "0") if "." not in mantissa else len(plain)


def _make(kind: type, values: Any, base: Any, where: str) -> Any:
    """Returns `base` with some of its values replaced; each value is checked."""
    values = dict(_table(values, where))
    _check(values, _names(kind), where)
    for key, value in values.items():
        if key == "dtype" and value not in list(DTYPES):  # a list, because the value may be unhashable
            raise TableError(f"{where}: dtype must be one of {', '.join(DTYPES)}, got {quoted(value)}")
        if key == "grid" and value not in GRIDS:
            raise TableError(f"{where}: grid must be one of {', '.join(GRIDS)}, got {quoted(value)}")
        if key == "unit" and value not in ("scalar", "matrix"):
            raise TableError(f"{where}: unit must be scalar or matrix, got {quoted(value)}")
        if key == "scores" and value not in ("chip", "memory"):
            raise TableError(f"{where}: scores must be chip or memory, got {quoted(value)}")
        if key == "launch_heads" and value not in ("one", "all", ""):
            raise TableError(f'{where}: launch_heads must be one, all, or "" if unknown, got {quoted(value)}')
        if key == "passes" and value not in PASSES:
            raise TableError(f"{where}: passes must be one of {', '.join(PASSES)}, got {quoted(value)}")
        if key in ("dtype", "grid", "unit", "scores", "launch_heads", "passes"):
            continue
        if key in ("causal", "softcap", "is_peer"):
            if not isinstance(value, bool):
                raise TableError(f"{where}: {key} must be true or false, got {quoted(value)}")
        elif key == "max_difference":
            if value != 0:
                _numbers({key: value}, where)
        elif type(value) is not int or not 1 <= value <= MOST:
            raise TableError(f"{where}: {key} must be a positive whole number, got {quoted(value)}")
    return replace(base, **values)


def _names(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TableError(f"{where} must be a table, got {quoted(value)}")
    return value


def _numbers(values: Any, where: str) -> dict[str, float]:
    for key, value in _table(values, where).items():
        if type(value) not in (int, float) or not LEAST <= value <= MOST:
            raise TableError(f"{where}: {key} must be a number above 0, got {quoted(value)}")
    return {key: float(value) for key, value in values.items()}


def _check(table: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in allowed:
            raise TableError(f"{where}: unknown key {quoted(key)}; {_hint(key, allowed)}")


def _hint(key: str, allowed: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(key, allowed, n=1)
    return f"did you mean {close[0]}?" if close else f"allowed are {', '.join(allowed)}"
