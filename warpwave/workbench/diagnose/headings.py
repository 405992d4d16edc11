"""The meaning of a heading and of a cell in a table that was printed for people: sizes, units, tiles, series."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from warpwave.workbench.diagnose.parse import DTYPES, MOST, OURS

# Words for a size of the call or a fact of the kernel, in the lower case and without spaces, "_" and "-".
ALIASES = {
    "batch": "b batch batches batchsize bs bsz numbatches nbatch",
    "heads": "h head heads numheads nheads nhead numhead headsq numheadsq qheads hq",
    "heads_kv": "hkv headskv kvheads numheadskv numkvheads nkvheads hk nheadskv nheadsk numheadsk headsk kvh nkv",
    "seqlen": "s n t seq seqlen sequence sequencelength seqlength seqlens length context contextlength ctx ctxlen nctx "
    "seqlenq sq lenq qlen queries seqq lq",
    "seqlen_k": "seqlenk sk lenk klen kvlen keys seqk seqlenkv seqkv kvlength lk skv",
    "head_dim": "d hdim headdim dim headdimension headsize dhead dh hd headdims",
    "dtype": "dtype datatype precision type",
    "causal": "causal iscausal mask",
    "passes": "pass passes direction mode",
    "blocks": "blocks numblocks nblocks threadblocks gridsize grid ctas workgroups programs",
    "block_m": "blockm bm blockq br blockrows tilem tileq mtile",
    "block_n": "blockn bn blockk bc blockcols tilen tilek ntile blockkv",
    "threads": "threads threadsperblock numthreads nthreads blocksize workgroupsize",
    "warps": "warps numwarps nwarps warpsperblock",
    "smem_bytes": "smem sharedmemory smembytes lds",
    "series": "implementation kernel method provider backend library algorithm version impl approach framework",
    "label": "config configuration variant case name setup test tile tiles shape",
}
MEANING = {word: key for key, words in ALIASES.items() for word in words.split()}
SIZES = ("batch", "heads", "heads_kv", "seqlen", "seqlen_k", "head_dim", "dtype", "causal", "passes")
FACTS = ("blocks", "block_m", "block_n", "threads", "warps", "smem_bytes")

# Spelling of a unit -> (the figure's name in the format, factor to its unit).
UNITS: dict[str, tuple[str, float]] = {
    **dict.fromkeys(("ns", "nsec", "nanoseconds"), ("time_us", 1e-3)),
    **dict.fromkeys(("us", "usec", "usecs", "microseconds", "microsec"), ("time_us", 1.0)),
    **dict.fromkeys(("ms", "msec", "msecs", "milliseconds", "millisec"), ("time_us", 1e3)),
    **dict.fromkeys(("s", "sec", "secs", "seconds"), ("time_us", 1e6)),
    **dict.fromkeys(("tflops", "tflop/s", "tflops/s", "tflop", "tf/s"), ("tflops", 1.0)),
    **dict.fromkeys(("gflops", "gflop/s", "gflops/s", "gf/s"), ("tflops", 1e-3)),
    **dict.fromkeys(("pflops", "pflop/s", "pflops/s"), ("tflops", 1e3)),
    **dict.fromkeys(("tokens/s", "tok/s", "t/s", "tokens/sec", "tokens per second", "tps"), ("tokens_per_s", 1.0)),
    **dict.fromkeys(("kb", "kib"), ("memory_mb", 2.0**-10)),
    **dict.fromkeys(("mb", "mib"), ("memory_mb", 1.0)),
    **dict.fromkeys(("gb", "gib"), ("memory_mb", 2.0**10)),
}
_NAMED = "|".join(sorted((re.escape(unit) for unit in UNITS if len(unit) > 1), key=len, reverse=True))
PER_HEAD = re.compile(r"\s*(?:/|per)\s*heads?\b", re.I)
QUANTITY = re.compile(
    r"\b(kernel|wall|run|exec(?:ution)?|elapsed|mean|median|p50|avg|average|min|best|peak|max|used|usage|device|gpu|dense|"
    r"time|times|timing|latency|runtime|duration|performance|perf|throughput|speed|memory|mem|footprint|in|per|rate|"
    r"total|forward|fwd|backward|bwd)\b",
    re.I,
)
# Columns that repeat other columns or hold opinions.
COMMENT = re.compile(
    r"\b(speed ?up|ratio|vs|versus|faster|slower|winner|status|notes?|analysis|observations?|comments?|remarks?|delta|"
    r"diff(erence)?|improvement|relative|gain|verdict|result|rank|efficiency|util(ization)?)\b|(?<![a-z])(std|stdev|stddev|sd|variance|iqr|p(?!50)\d\d)(?![a-z])|%|^x$",
    re.I,
)
MINE = re.compile(
    r"\b(ours?|my|mine|theirs|your|yours|this work|custom|proposed|implementation|impl|kernel|version|baseline)\b", re.I
)
OWN = re.compile(r"\b(ours?|my|mine|theirs|your|yours|this work|custom|proposed)\b", re.I)
CAUSAL = re.compile(r"(?<![\w-])(non-?|non |not |no |without )?causal(?!\w)", re.I)
DTYPE = re.compile(r"(?<![a-z0-9])(fp16|float16|bf16|bfloat16|fp32|float32|fp8)(?![a-z0-9])", re.I)
# A cell with a second number ("1024,2048", "1.2/1.3", "64 128") is no number.
NUMBER = re.compile(
    r"[~≈<>]?\s*([-+]?(?:(?:\d{1,3}(?:[,']\d{3})+|\d+)\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?!\d|\s*[-,'./:x]?\s*\d)"
)
NOTHING = re.compile(r"|-+|—|–|n/?a|nan|oom|none|x|\?|\.+|error|fail(ed)?|not (run|supported|available)", re.I)  # noqa: RUF001


@dataclass(frozen=True)
class Heading:
    """What a column holds.

    Attributes:
        kind: `"size"` of the call, `"fact"` of the kernel, `"figure"`, `"series"`, `"label"`, `"fits"` (whether the
            working set fits a cache), `"bytes"` (of a named tensor), `"comment"`, or `"unknown"`.
        name: the size, fact, figure (`"time_us"`), cache or tensor; the words themselves if unknown.
        owner: the series of a figure; empty if the heading does not name one.
        factor: the factor from a cell's unit to the figure's; 0 if the heading has no unit.
        passes: the passes that the heading names; empty if it names none.
        per_head: whether figures are of one head.
    """

    kind: str
    name: str
    owner: str = ""
    factor: float = 0.0
    passes: str = ""
    per_head: bool = False


def heading(text: str) -> Heading:
    """Returns the meaning of a heading."""
    low, per_head = PER_HEAD.sub("", text.lower()), bool(PER_HEAD.search(text))
    if fits := re.search(r"\bfits?\b.*\b(l1|l2|smem|shared memory|cache)\b", low):
        return Heading("fits", {"cache": "l2", "shared memory": "l1", "smem": "l1"}.get(fits[1], fits[1]))
    if tensor := re.fullmatch(r"(k|v|kv|k ?\+ ?v|q)[ _]?(size|bytes|mem(ory)?)", low):
        return Heading("bytes", tensor[1])
    if re.fullmatch(r"total|working ?set|sum|total size", low):
        return Heading("bytes", "total")
    unit, rest = _unit(low)
    passes = "backward" if re.search(r"\b(bwd|backward)\b", low) else ""
    passes = "both" if passes and re.search(r"\b(fwd|forward)\b", low) else passes
    if unit is None:
        inner = re.search(r"[(\[]([^)\]]*)[)\]]", low)
        for words in (low, re.sub(r"[(\[].*", "", low), inner[1] if inner else ""):
            if known := MEANING.get(re.sub(r"[\s_\-#.]", "", words)):
                kind = "size" if known in SIZES else "fact" if known in FACTS else known
                return Heading(kind, known)
        if COMMENT.search(low):
            return Heading("comment", text)
        return Heading("unknown", text, owner(text), passes=passes)
    if COMMENT.search(rest):
        return Heading("comment", text)
    name, factor = UNITS[unit]
    if name == "memory_mb" and re.search(r"\b(smem|shared memory|lds)\b", low):
        return Heading("fact", "smem_bytes", factor=factor * 2.0**20)
    return Heading("figure", name, owner(_without_unit(text)), factor, passes, per_head)


def _unit(low: str) -> tuple[str | None, str]:
    """Returns the unit that a heading names, and the heading without it."""
    for inner in re.findall(r"[(\[,]\s*([^)\],]*)\s*[)\]]?", low):
        if inner.strip() in UNITS:
            return inner.strip(), low.replace(inner, "")
    plain = re.sub(r"[()\[\]]", " ", low).strip()
    if found := re.search(rf"(?:^|[\s_]|in )({_NAMED})$|^({_NAMED})\b", plain):
        unit = found[1] or found[2]
        return unit, plain.replace(unit, "")
    return None, low


def _without_unit(text: str) -> str:
    text = re.sub(rf"[(\[]\s*({_NAMED}|s)\s*[)\]]", " ", PER_HEAD.sub("", text), flags=re.I)
    return re.sub(rf"(^|[\s_])({_NAMED})$|^({_NAMED})\b", " ", text.strip(), flags=re.I)


def owner(words: str) -> str:
    """Returns the words without those of a quantity, as the name of a series; `OURS` for "ours" or "my kernel"."""
    rest = re.sub(r"\(\s*\)|\[\s*\]", " ", QUANTITY.sub(" ", words.replace("_", " ")))
    rest = re.sub(r"\s+", " ", rest).strip(" -:,/+&")
    if not rest or (OWN.search(rest) and not MINE.sub("", rest).strip(" -:,/()[]")):
        return OURS if OWN.search(words) else ""
    return rest


def number(cell: str) -> float | None:
    """Returns the number that a cell begins with, or None. Commas and apostrophes divide thousands."""
    found = NUMBER.match(cell)
    value = math.inf if found is None else float(found[1].replace(",", "").replace("'", ""))
    return value if abs(value) <= MOST else None


def measured(cell: str) -> tuple[str, float, bool] | None:
    """Returns (figure, value, per head) of a cell that states its unit: "1.65 us/head"; None if it does not."""
    found = NUMBER.match(cell)
    if found is None:
        return None
    rest = cell[found.end() :].strip()
    per_head = bool(PER_HEAD.match(rest.lstrip("abcdefghijklmnopqrstuvwxyz")))
    unit = re.sub(r"[^a-z/ ].*", "", PER_HEAD.sub("", rest.lower())).strip()
    value = number(cell)
    if unit not in UNITS or value is None:
        return None
    name, factor = UNITS[unit]
    return name, rounded(value * factor), per_head


def rounded(value: float) -> float:
    """Returns a converted figure without the noise of binary fractions."""
    return float(f"{value:.12g}")


def is_nothing(cell: str) -> bool:
    """Returns whether a cell holds no value: empty, a dash, OOM."""
    return NOTHING.fullmatch(cell.strip(" ~()")) is not None


def size(name: str, cell: str) -> Any:
    """Returns the value of a size or a fact; None if the cell has none."""
    low = cell.lower().strip()
    if name == "dtype":
        short = {"fp16": "float16", "half": "float16", "f16": "float16", "bf16": "bfloat16", "fp32": "float32"}
        short |= {"f32": "float32", "float": "float32", "float8": "fp8"}
        return low if low in DTYPES else short.get(low)
    if name == "causal":
        return {"yes": True, "true": True, "1": True, "causal": True, "no": False, "false": False, "0": False,
                "full": False, "none": False, "✓": True, "✅": True, "❌": False, "✗": False}.get(low)  # fmt: skip
    if name == "passes":
        return {"fwd": "forward", "bwd": "backward", "fwd+bwd": "both", "fwd_bwd": "both"}.get(
            low, low if low in ("forward", "backward", "both") else None
        )
    found = NUMBER.match(low)
    value, rest = number(low), low[found.end() :] if found else ""
    if value is None or re.match(r"(?!k\b|ki?b\b)[a-z]", rest):
        return None  # "1M" is not 1
    value *= 1024 if re.match(r"\s*(k|ki?b)\b", rest) else 1
    return int(value) if value >= 1 and value == int(value) else None


def bytes_of(cell: str) -> float | None:
    """Returns the bytes of a cell like "128 KB"; None if it is no size in memory."""
    told = measured(cell)
    return told[1] * 2**20 if told is not None and told[0] == "memory_mb" else None


def answer(cell: str) -> bool | None:
    """Returns the answer that a cell gives to a yes-or-no question; None if neither."""
    if re.search(r"✓|✅|✔|\byes\b", cell, re.I):
        return True
    return False if re.search(r"❌|✗|✘|\bno\b", cell, re.I) else None


def of_caption(text: str) -> dict[str, Any]:
    """Returns the sizes of the call in the line above a table: "B=4, H=32", "batch4-head32-d64-bwd-causal=True"."""
    found = {name: value for name, value in described(text, has_tiles=False).items() if name in SIZES}
    for word, value in re.findall(r"(?:^|[-_ ,(])(batch|heads?|hdim|head_dim|d)[-_ ]?(\d+)(?=$|[-_ ,:)])", text, re.I):
        found[MEANING[word.lower().replace("_", "")]] = int(value)
    if told := re.search(r"\bcausal\s*[=:]\s*(\w+)", text, re.I):
        causal = size("causal", told[1])
        found |= {} if causal is None else {"causal": causal}
    elif found and len(masks := {not without for without in CAUSAL.findall(text)}) == 1:  # prose states no sizes
        found["causal"] = masks.pop()
    if found and len(dtypes := {size("dtype", word.lower()) for word in DTYPE.findall(text)}) == 1:
        found["dtype"] = dtypes.pop()
    if re.search(r"(\b|-|_)(bwd|backward)(\b|-|_)", text, re.I) and not re.search(r"fwd|forward", text, re.I):
        found["passes"] = "backward"
    return {name: value for name, value in found.items() if value is not None}


def described(cell: str, has_tiles: bool) -> dict[str, Any]:
    """Returns the sizes and facts in a cell that describes a configuration: "B=1, H=4", "64x128x64 tiles, 32 threads".

    Args:
        has_tiles: whether two numbers with an x between them are a tile; three always are.
    """
    found: dict[str, Any] = {}
    for word, value in re.findall(r"\b([a-zA-Z][\w ]*?)\s*[=:]\s*(\d+k?)\b", cell):
        name = MEANING.get(re.sub(r"[\s_]", "", word.lower()))
        if name in SIZES or name in FACTS:
            found[name] = size(name, value)
    tile = re.search(r"(?<!x)\b(\d+)\s*x\s*(\d+)(\s*x\s*\d+)?\b(?!\s*x\s*\d)", cell)  # four numbers are a shape
    if tile and (tile[3] or has_tiles or re.search(r"\b(tiles?|blocks?)\b", cell, re.I)):
        found |= {"block_m": int(tile[1]), "block_n": int(tile[2])}
    if threads := re.search(r"\b(\d+)\s*(threads|warps)\b", cell, re.I):
        found[threads[2].lower()] = int(threads[1])
    return {name: value for name, value in found.items() if value}
