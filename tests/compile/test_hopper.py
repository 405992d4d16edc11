"""The Hopper forward compiles to what makes it fast: its own instructions, no spills, and products that overlap."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.compile.test_targets import compile_all, job
from tests.marks import needs_triton, one_in

pytestmark = needs_triton

# Bytes of local memory a thread may take, by (head_dim, feature), in 16-bit types up to head_dim 256 with Triton 3.6 to
# 3.8: a tile's coordinates, kept across the loops over keys and hardly touched in one that overlaps. What is not listed
# takes none. 3.9, whose assembler is another, spills more at the edges (`spill_bound`).
SPILL_BOUNDS = {
    **{(64, feature): 64 for feature in ("window", "alibi", "packed")},
    **{(head_dim, "packed"): 64 for head_dim in (112, 128, 192)},
    **{(256, feature): 128 for feature in ("causal", "window", "packed")},
    (80, "packed"): 128,
    (112, "causal"): 64,
    (192, "alibi"): 64,
    (256, "plain"): 64,
    (256, "alibi"): 192,
    # Beside the loop that overlaps: with 3.6 to 3.9 at most 48 up to head_dim 128, 80 at 192, 312 at 256.
    **{(head_dim, feature): 64 for head_dim in (64, 80, 96, 112, 128) for feature in ("mask", "bias")},
    **{(head_dim, feature): bound for head_dim, bound in ((192, 128), (256, 384)) for feature in ("mask", "bias")},
}


# With dropout by head_dim, in 3.6 and 3.7: beside the loops that overlap, but for up to 12 bytes.
SPILLED_WITH_DROPOUT = {64: 64, 128: 64, 256: 128}


def spill_bound(head_dim: int, feature: str) -> int:
    """With 3.9 up to 72 bytes where others take none, 176 at (256, "alibi"), and at (96, "packed") and (112, "packed")
    368: none in a loop that overlaps."""
    bound = SPILL_BOUNDS.get((head_dim, feature), 0)
    if not pytest.importorskip("triton").__version__.startswith("3.9."):
        return bound
    return max(bound, 384 if feature == "packed" and head_dim in (96, 112) else 80)


FEATURES = ("plain", "causal", "window", "alibi", "packed", "mask", "bias")
SAMPLE = [
    (64, "causal"),
    (128, "plain"),
    (128, "causal"),
    (256, "causal"),
    (80, "packed"),
    (128, "mask"),
    (128, "bias"),
]
# A tile of a bias does not fit beside those of 256 columns.
FULL = [(d, feature) for d in (64, 96, 112, 128, 192, 256) for feature in FEATURES if (d, feature) != (256, "bias")]


# In float32, and from head_dim 257 on: coordinates again, and a few registers at the edges of the loops.
OTHER_SPILLS = 128
LOOP_SPILLS = {"fp16x3 256 packed": 64}  # accesses in a loop where they are many: 57 with 3.7
WAYS = ("fp16x1", "fp16x3", "bf16x6")
SAMPLE_OF_PARTS = [
    *(("fp16x3", 64, "causal"), ("fp16x3", 256, "plain"), ("fp16x1", 64, "plain")),
    *(("fp16x3", 64, "mask"), ("fp16x3", 128, "mask")),
]
# Without masks and biases, which the kernel refuses above head_dim 256, and biases in float32, too.
FEATURES_OF_OTHERS = FEATURES[:5]
FEATURES_OF_PARTS = FEATURES[:6]
FULL_OF_PARTS = [(name, head_dim, feature) for name in WAYS for head_dim in (64, 128, 192, 256)
                 for feature in FEATURES_OF_PARTS]  # fmt: skip
SAMPLE_OF_WIDE = [(384, "causal")]
FULL_OF_WIDE = [(head_dim, feature) for head_dim in (272, 320, 384) for feature in FEATURES_OF_OTHERS]


def hopper_job(head_dim: int, feature: str, precision: str = "") -> dict[str, Any]:
    made = job("sm_90", "float32" if precision else "bfloat16", head_dim, feature) | {"kernel": "hopper/flash_fwd"}
    if precision:
        made["problem"] |= {"precision": precision}
    if feature not in ("mask", "bias"):  # enough queries that the default is the config of large calls
        made["problem"] |= {"seqlen_q": 4096}
        made["problem"] |= {"total_q": 8192} if feature == "packed" else {}
    return made


def check(head_dim: int, feature: str, facts: dict[str, Any]) -> None:
    what, instructions = f"head_dim {head_dim} {feature} {facts['config']}", facts["instructions"]
    assert facts["smem_bytes"] <= facts["smem_bound"] <= facts["smem_limit"], what
    assert facts["spill_bytes"] <= spill_bound(head_dim, feature), f"{what}: {facts['spill_bytes']} spilled"
    assert instructions.get("HGMMA", 0) > 0, f"{what}: no wgmma"
    assert instructions.get("UTMALDG", 0) > 0, f"{what}: K and V do not come by TMA"
    assert instructions.get("UTMASTG", 0) > 0, f"{what}: out does not leave by TMA"
    assert instructions.get("USETMAXREG", 0) > 0, f"{what}: registers are not handed to the consumers"


@one_in(4)
@pytest.mark.parametrize(("head_dim", "feature"), SAMPLE)
def test_sample(head_dim: int, feature: str) -> None:
    (facts,) = compile_all([hopper_job(head_dim, feature)])
    check(head_dim, feature, facts)


@pytest.mark.parametrize("head_dim", [128, *(pytest.param(d, marks=pytest.mark.full) for d in (64, 256))])
def test_dropout(head_dim: int) -> None:
    """A call of Philox serves four pairs, and has seven products of 64 bits."""
    a_job = hopper_job(head_dim, "causal") | {"listing": True}
    a_job["problem"] = {**a_job["problem"], "dropout_p": 0.1}
    (facts,) = compile_all([a_job])
    assert facts["smem_bytes"] <= facts["smem_bound"] <= facts["smem_limit"]
    assert facts["spill_bytes"] <= SPILLED_WITH_DROPOUT[head_dim], facts["spill_bytes"]
    config = facts["config"]
    # Each consumer has three tiles in its code: the first, one that overlaps and one that does not.
    calls = 3 * config["block_m"] // 64 * config["block_n"] // 8
    products = len(re.findall(r"IMAD\.(?:WIDE|HI)\.U32", facts["listing"]))
    # Also two calls for the keys and one for each head, and divisions of the scheduler.
    assert products <= 7 * (calls + 3) + 14, f"{products} products for {calls} calls"


@pytest.mark.parametrize("head_dim", [128, *(pytest.param(d, marks=pytest.mark.full) for d in (64, 256))])
def test_softcap(head_dim: int) -> None:
    """A tile's tanh has one branch in the loop that overlaps, which does not spill."""
    (facts,) = compile_all([hopper_job(head_dim, "softcap and sinks") | {"listing": True}])
    assert facts["smem_bytes"] <= facts["smem_bound"] <= facts["smem_limit"]
    assert facts["spill_bytes"] <= 80, what(facts)
    loops = loops_over_keys(facts["listing"], **{"VOTE.ANY": "v", "MUFU.RCP": "r"})
    block_n = facts["config"]["block_n"]
    overlapped = [x for x in loops if re.search("H+[^HW]*W", x.replace("v", "")) and x.count("r") == block_n // 2]
    assert overlapped, what(facts)
    for loop in overlapped:
        assert "S" not in loop and "HWHWHW" not in loop, what(facts)
        assert "v" not in loop[loop.index("r") : loop.rindex("r")], what(facts)


# head_dim, dtype of the queries, that of the cache, and config of a call on 8-bit pages.
SAMPLE_OF_8_BIT_PAGES = [
    (64, "bfloat16", "int8", (64, 64, 3, 3)),
    (64, "bfloat16", "float8_e4m3fn", (192, 128, 3, 1)),
    (128, "bfloat16", "float8_e4m3fn:token", (192, 64, 4, 1)),
]
TOKENS_OF_8_BIT_PAGES = [
    (64, (192, 64, 3, 1)),
    (128, (128, 64, 3, 1)),
    (128, (192, 64, 4, 1)),
    (192, (128, 32, 2, 1)),
    (256, (128, 32, 2, 1)),
]
FULL_OF_8_BIT_PAGES = [
    *((64, c, config) for c in ("int8", "float8_e4m3fn") for config in ((64, 128, 2, 2), (128, 128, 3, 1))),
    *((128, c, config) for c in ("int8", "float8_e4m3fn") for config in ((128, 128, 2, 1), (192, 64, 4, 1))),
    *((d, c, (128, 64, 2, 1)) for d in (192, 256) for c in ("int8", "float8_e4m3fn")),
    *((d, c, config) for c in ("int8:token", "float8_e4m3fn:token") for d, config in TOKENS_OF_8_BIT_PAGES),
]


@one_in(2)
@pytest.mark.parametrize(
    ("head_dim", "dtype", "cache", "config"),
    [
        *SAMPLE_OF_8_BIT_PAGES,
        *(
            pytest.param(head_dim, dtype, cache, config, marks=pytest.mark.full)
            for head_dim, cache, config in FULL_OF_8_BIT_PAGES
            for dtype in ("bfloat16", "float16")
            if (head_dim, dtype, cache, config) not in SAMPLE_OF_8_BIT_PAGES
        ),
    ],
)
def test_8_bit_pages(head_dim: int, dtype: str, cache: str, config: tuple[int, int, int, int]) -> None:
    """Registers suffice beside a widener: without enough, ptxas waits for every wgmma before it starts the next. Triton
    3.9 spills up to 264 bytes at the edges, 3.6 up to 104, the others up to 88."""
    names = ("block_m", "block_n", "num_stages", "blocks_per_sm")
    a_job = hopper_job(head_dim, "packed") | {"config": dict(zip(names, config, strict=True)), "listing": True}
    numbers, _, kind = cache.partition(":")
    of_cache = {"page_size": 64, "dtype_kv": numbers, "kv_factors": kind or "head"}
    a_job["problem"] |= {"causal": "bottom_right", "dtype": dtype, **of_cache}
    triton = pytest.importorskip("triton")
    (facts,) = compile_all([a_job])
    assert facts["smem_bytes"] <= facts["smem_bound"] <= facts["smem_limit"] // config[3]
    assert facts["spill_bytes"] <= (272 if triton.__version__.startswith("3.9.") else 112), what(facts)
    assert not any("HWHWHW" in loop for loop in loops_over_keys(facts["listing"])), what(facts)


# head_dim, heads, keys of a causal call with few tiles, and its config: two blocks an SM, or a long and a short one.
TWO_BLOCKS, IN_TURN = {"num_stages": 2, "blocks_per_sm": 2}, {"num_stages": 3, "blocks_per_sm": 1}
SAMPLE_OF_FEW_TILES = [(128, 32, 640, TWO_BLOCKS), (256, 8, 2048, IN_TURN)]
FULL_OF_FEW_TILES: list[tuple[int, int, int, dict[str, int]]] = [
    *((d, 32, 640, TWO_BLOCKS) for d in (72, 96, 112)),
    *((d, 8, 2048, IN_TURN) for d in (80, 96, 112, 128, 160, 192, 224)),
]


@pytest.mark.parametrize(
    ("head_dim", "heads", "keys", "config"),
    [*SAMPLE_OF_FEW_TILES, *(pytest.param(*p, marks=pytest.mark.full) for p in FULL_OF_FEW_TILES)],
)
def test_few_tiles_of_a_causal_call(head_dim: int, heads: int, keys: int, config: dict[str, int]) -> None:
    a_job = hopper_job(head_dim, "causal")
    a_job["problem"] |= {"batch": 1, "num_heads_q": heads, "num_heads_kv": heads, "seqlen_q": keys, "seqlen_k": keys}
    (facts,) = compile_all([a_job])
    assert facts["config"].items() >= {"block_m": 64, "block_n": 64, **config}.items()
    check(head_dim, "causal", facts)
    assert facts["spill_bytes"] == 0


@pytest.mark.parametrize(
    ("head_dim", "page_size"),
    [
        (128, 0),
        *(pytest.param(*p, marks=pytest.mark.full) for p in ((64, 0), (64, 16), (128, 16), (256, 0), (256, 16))),
    ],
)
def test_split_keys(head_dim: int, page_size: int) -> None:
    """Triton 3.6 to 3.9 spill up to 56 bytes."""
    a_job = hopper_job(head_dim, "packed" if page_size else "causal")
    a_job["problem"] |= {"batch": 1, "num_heads_q": 8, "num_heads_kv": 2, "seqlen_q": 200, "seqlen_k": 20000}
    a_job["problem"] |= {"page_size": page_size, "total_q": 200, "total_k": 20000} if page_size else {}
    (facts,) = compile_all([a_job])
    assert facts["config"]["num_splits"] > 4
    assert facts["smem_bytes"] <= facts["smem_bound"] <= facts["smem_limit"]
    assert facts["spill_bytes"] <= 64, what(facts)
    assert facts["instructions"].get("UTMASTG", 0) == 0, "partial results are stored from registers"


# Triton 3.9 spills up to 280 bytes at 64, where a tile of 128 keys has eight pages of 16.
FULL_OF_PAGES = [(64, 16), (64, 256), (80, 16), (192, 32), (256, 16), (256, 64)]


@pytest.mark.parametrize(
    ("head_dim", "page_size"), [(128, 16), *(pytest.param(*p, marks=pytest.mark.full) for p in FULL_OF_PAGES)]
)
def test_pages(head_dim: int, page_size: int) -> None:
    """Spills are in the producer and at the edges: none where tiles overlap."""
    a_job = hopper_job(head_dim, "packed") | {"listing": True}
    a_job["problem"] |= {"page_size": page_size}
    (facts,) = compile_all([a_job])
    assert facts["smem_bytes"] <= facts["smem_bound"] <= facts["smem_limit"]
    assert facts["spill_bytes"] <= 320, what(facts)
    overlapped = [loop for loop in loops_over_keys(facts["listing"]) if re.fullmatch(r"H+[^H]+", loop)]
    assert overlapped and not any("S" in loop for loop in overlapped), what(facts)


# What large calls from head_dim 65 to 128 take: three warpgroups, 160 registers a thread.
OF_192 = {"block_m": 192, "block_n": 64, "num_stages": 4}
SAMPLE_OF_192 = [(128, "window")]
FULL_OF_192 = [(d, f) for d in (80, 96, 112) for f in ("plain", "causal", "window", "alibi")] + [(128, "alibi")]


@pytest.mark.parametrize(
    ("head_dim", "feature"), [*SAMPLE_OF_192, *(pytest.param(*p, marks=pytest.mark.full) for p in FULL_OF_192)]
)
def test_tiles_of_192_queries(head_dim: int, feature: str) -> None:
    (facts,) = compile_all([hopper_job(head_dim, feature) | {"listing": True, "config": OF_192}])
    assert facts["smem_bytes"] <= facts["smem_bound"] <= facts["smem_limit"]
    assert facts["spill_bytes"] <= 80
    products = head_dim // 16
    overlapped = [loop for loop in loops_over_keys(facts["listing"]) if re.fullmatch(r"H+[^H]+", loop)]
    assert any(loop.count("H") >= products + OF_192["block_n"] // 16 for loop in overlapped), what(facts)
    assert not any("S" in loop for loop in overlapped), what(facts)


# Defaults between the powers of two: rows of V in wider pieces, and 128 keys a step; and of calls with few tiles.
BETWEEN = {
    (112, 112): {"block_m": 192, "block_n": 64, "num_stages": 4, "narrowest_v": 64},
    (48, 48): {"block_m": 192, "block_n": 128, "num_stages": 3, "narrowest_v": 64},
    (160, 160): {"block_m": 128, "block_n": 128, "num_stages": 2},
    (176, 176): {"block_m": 128, "block_n": 64, "num_stages": 2, "narrowest_v": 64},
    (192, 128): {"block_m": 128, "block_n": 128, "num_stages": 2},
    (96, 64): {"block_m": 192, "block_n": 128, "num_stages": 3},
    (128, 64): {"block_m": 192, "block_n": 128, "num_stages": 3},
    (184, 184): {"block_m": 128, "block_n": 64, "num_stages": 3},
    (128, 128): {"block_m": 64, "block_n": 128, "num_stages": 2},
    (256, 256): {"block_m": 64, "block_n": 64, "num_stages": 3},
    (64, 128): {"block_m": 64, "block_n": 64, "num_stages": 3, "blocks_per_sm": 2},
    (152, 152): {"block_m": 64, "block_n": 64, "num_stages": 2, "blocks_per_sm": 2},
}


@pytest.mark.parametrize("feature", ["plain", pytest.param("causal", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "widths", [(192, 128), *(pytest.param(w, marks=pytest.mark.full) for w in BETWEEN if w != (192, 128))]
)
def test_tiles_of_widths_between_the_powers_of_two(widths: tuple[int, int], feature: str) -> None:
    asked = hopper_job(widths[0], feature) | {"listing": True, "config": BETWEEN[widths]}
    asked["problem"] |= {"head_dim_v": widths[1]}
    (facts,) = compile_all([asked])
    check(widths[0], feature, facts | {"spill_bytes": 0})
    assert facts["spill_bytes"] <= 80, what(facts)
    overlapped = [loop for loop in loops_over_keys(facts["listing"]) if re.fullmatch(r"H+[^H]+", loop)]
    assert overlapped and not any("S" in loop for loop in overlapped), what(facts)


@pytest.mark.full
@pytest.mark.parametrize("feature", FEATURES)
def test_matrix(feature: str) -> None:
    points = [point for point in FULL if point[1] == feature]
    for point, facts in zip(points, compile_all([hopper_job(*point) for point in points]), strict=True):
        check(*point, facts)


def check_others(what: str, facts: dict[str, Any]) -> None:
    assert facts["smem_bytes"] <= facts["smem_bound"] <= facts["smem_limit"], f"{what} {facts['config']}"
    assert facts["spill_bytes"] <= OTHER_SPILLS, f"{what} {facts['config']}: {facts['spill_bytes']} spilled"
    loops = loops_over_keys(facts["listing"])
    assert loops, f"{what}: no loop multiplies"
    for loop in loops:
        # Where registers do not suffice, ptxas serializes: it waits for every wgmma before it starts the next.
        assert "HWHWHW" not in loop, f"{what}: wgmma serialized"
        assert loop.count("S") <= LOOP_SPILLS.get(what, 24), f"{what}: spills in a loop: {loop}"


@one_in(4)
@pytest.mark.parametrize(("precision", "head_dim", "feature"), SAMPLE_OF_PARTS)
def test_float32_by_parts(precision: str, head_dim: int, feature: str) -> None:
    (facts,) = compile_all([hopper_job(head_dim, feature, precision) | {"listing": True}])
    check_others(f"{precision} head_dim {head_dim} {feature}", facts)
    *ahead, attend = facts["launches"]
    for launch in ahead:
        assert launch["spill_bytes"] == 0
        assert launch["instructions"].get("F2F", 0) == 0, "parts are converted one by one"
    assert attend["instructions"].get("HGMMA", 0) > 0 and attend["instructions"].get("UTMALDG", 0) > 0
    # Both loops at least, each with every product of parts: of 16 columns for scores, of 16 keys for values.
    products, config = {"fp16x1": 1, "fp16x3": 3, "bf16x6": 6}[precision], facts["config"]
    slices = 1 if precision == "fp16x1" else max(1, head_dim // 64)
    a_tile = products * (head_dim // 16 + config["block_n"] // 16 * slices)
    loops = loops_over_keys(facts["listing"])
    if precision == "fp16x1":  # as 16-bit types: both products are under way before either is waited for
        assert any(loop.startswith("H" * a_tile + "W") for loop in loops), loops
    else:
        assert max(loop.count("H") for loop in loops) == a_tile


@pytest.mark.parametrize(("head_dim", "feature"), SAMPLE_OF_WIDE)
def test_rows_wider_than_256(head_dim: int, feature: str) -> None:
    (facts,) = compile_all([hopper_job(head_dim, feature) | {"listing": True}])
    check_others(f"head_dim {head_dim} {feature}", facts)


@pytest.mark.full
@pytest.mark.parametrize("feature", FEATURES_OF_PARTS)
def test_matrix_of_parts_and_wide_rows(feature: str) -> None:
    jobs = {f"{p} {d}": hopper_job(d, f, p) for p, d, f in FULL_OF_PARTS if f == feature}
    jobs |= {f"{d}": hopper_job(d, f) for d, f in FULL_OF_WIDE if f == feature}
    for what, facts in zip(jobs, compile_all([j | {"listing": True} for j in jobs.values()]), strict=True):
        check_others(f"{what} {feature}", facts)


@one_in(3)
@pytest.mark.parametrize(("head_dim", "feature"), [(128, "mask"), (128, "bias"), (64, "window")])
def test_hidden_scores_do_not_keep_products_apart(head_dim: int, feature: str) -> None:
    """A loop that issues the scores' products and those with V of the tile before, then waits; and does not spill."""
    (facts,) = compile_all([hopper_job(head_dim, feature) | {"listing": True}])
    overlapped = [loop for loop in loops_over_keys(facts["listing"]) if re.fullmatch(r"S*H+[^H]+", loop)]
    config = facts["config"]
    products = head_dim // 16 + config["block_n"] // 16
    assert any(loop.count("H") == products and loop.count("E") > config["block_n"] // 2 for loop in overlapped), what(
        facts
    )
    assert not any("S" in loop for loop in overlapped if loop.count("H") == products), what(facts)


def what(facts: dict[str, Any]) -> str:
    return f"{facts['config']}: {loops_over_keys(facts['listing'])}"


def loops_over_keys(sass: str, **more: str) -> list[str]:
    """The innermost loops that multiply: H (wgmma), E (exponential), W (wait for wgmma), S (access to local memory),
    and letters for more instructions."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"^\.(L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"^\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            lines.append(instruction[1])
    spans = []
    for end, text in enumerate(lines):
        jump = re.search(r"BRA.*`\(\.(L_x_\d+)\)", text)
        if jump and labels.get(jump[1], end + 1) <= end and any("GMMA" in x for x in lines[labels[jump[1]] : end]):
            spans.append((labels[jump[1]], end))
    innermost = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    letters = {"GMMA": "H", "MUFU.EX2": "E", "WARPGROUP.DEPBAR": "W", "STL": "S", "LDL": "S"} | more
    return [
        "".join(next((letters[key] for key in letters if key in text), "") for text in lines[begin:end])
        for begin, end in innermost
    ]


def test_loops_over_keys_are_found() -> None:
    listing = ".L_x_1:\n /*0000*/ HGMMA R0 ;\n /*0010*/ MUFU.EX2 R1, R1 ;\n /*0020*/ BRA `(.L_x_1) ;\n"
    assert loops_over_keys(listing) == ["HE"]


def test_a_bias_is_handed_back_after_its_loads_have_returned() -> None:
    """An arrival does not wait for loads. The vote on the maximum does, which needs every score."""
    a_job = hopper_job(64, "bias") | {"listing": True}
    a_job["problem"] = {**a_job["problem"], "bias_dtype": "bfloat16"}
    (facts,) = compile_all([a_job])
    letters = {"LDSM": "L", "VOTE.ANY": "v", "BAR.ARV": "A"}
    lines = facts["listing"].splitlines()
    order = "".join(next((letter for name, letter in letters.items() if name in line), "") for line in lines)
    tiles = re.findall("L+([vA])", order)
    assert len(tiles) >= 3, order  # the first tile, those at the edge, and those that overlap
    assert set(tiles) == {"v"}, order


def test_one_half_of_the_output_is_gone_before_the_other_takes_its_place() -> None:
    """One thread waits until TMA has read a buffer, then a barrier of the group tells the others, then they write. The
    barrier is none of the source's: the compiler puts it there."""
    events = {"cp.async.bulk.tensor": "T", "cp.async.bulk.wait_group": "W", "bar.sync": "B", "stmatrix": "S"}
    (facts,) = compile_all([hopper_job(256, "causal") | {"ptx": True}])
    order = ""
    for line in facts["ptx"].splitlines():
        event = next((letter for name, letter in events.items() if name in line), "")
        order += event if event != "T" or ".global.shared" in line else ""  # the copies that come are loads
    order = re.sub(r"(.)\1+", r"\1", order)
    behind = re.findall(r"T[^S]*(?=S)", order)
    assert len(behind) >= 3, order  # two halves of two warpgroups
    assert all(re.search("WB$", between) for between in behind), order


@pytest.mark.parametrize("feature", ["plain"])
def test_the_wait_for_values_stays_behind_the_exponentials(feature: str) -> None:
    """Above head_dim 128: the second wait of the loop, for P V, comes after most of the tile's 32 exponentials."""
    (facts,) = compile_all([hopper_job(256, feature) | {"listing": True}])
    overlapped = [loop for loop in loops_over_keys(facts["listing"]) if re.fullmatch("H" * 20 + "W[^H]+", loop)]
    assert len(overlapped) >= 1, "no loop issues both products before it waits"
    for loop in overlapped:
        assert "S" not in loop, f"the loop spills: {loop}"
        assert loop.split("W")[1].count("E") > 16, loop


@pytest.mark.parametrize(("head_dim", "feature"), [(64, "plain"), (128, "causal")])
def test_conversions_hide_between_exponentials(head_dim: int, feature: str) -> None:
    """Up to head_dim 128 the second wait comes before the exponentials, and only a few of the conversions to 16 bits
    behind the last of them; one barrier of the group a tile, three where newer compilers put more."""
    large = hopper_job(head_dim, feature) | {"listing": True}
    large["problem"] |= {"seqlen_q": 4096, "seqlen_k": 4096, "batch": 4, "num_heads_q": 32, "num_heads_kv": 32}
    (facts,) = compile_all([large])
    assert facts["config"]["block_m"] == 192
    most = 1 if pytest.importorskip("triton").__version__.startswith("3.6.") else 3
    products = head_dim // 16 + facts["config"]["block_n"] // 16
    found = 0
    for loop in loops_over_keys(facts["listing"], **{"F2FP": "C", "BAR.SYNC": "B"}):
        if re.fullmatch("B*" + "H" * products + "[^H]+", loop) and "S" not in loop:
            found += 1
            assert loop.count("B") <= most, loop
            exponentials = loop.split("W")[2]
            assert exponentials.count("E") == facts["config"]["block_n"] // 2, loop
            assert exponentials[exponentials.rindex("E") :].count("C") <= 8, loop
    assert found, what(facts)
