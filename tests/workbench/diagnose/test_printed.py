"""Tables as people print them: the five reports' files as they are, and every format and damage that is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import warpwave
from warpwave import AttentionProblem
from warpwave.workbench.cli import app
from warpwave.workbench.diagnose.facts import time_us
from warpwave.workbench.diagnose.implied import implied
from warpwave.workbench.diagnose.parse import Document, Given, TableError, facts_of_code, load
from warpwave.workbench.diagnose.rules import diagnose
from warpwave.workbench.hardware.catalog import resolve
from warpwave.workbench.model.roofline import us

PRINTED = Path(__file__).with_name("printed")
TILES_OF_2 = ["scores=memory", "score_bytes=2", "unit=matrix", "grid=output tiles", "softmax_rows=1024"]
# What the reports say in their text and their tables do not.
GIVEN = {
    0: Given(gpu="a100-80gb", call={"dtype": "float32"}, code=facts_of_code(["block_m=1", "threads=256"])),
    1: Given(
        gpu="l4",
        call={"dtype": "float16", "heads": 1},
        code=facts_of_code(["block_m=64", "block_n=64", "threads=256", "busy_threads=64"]),
    ),
    2: Given(
        gpu="h100",
        call={"dtype": "float16", "heads": 16, "seqlen": 1024, "head_dim": 64},
        code=facts_of_code(TILES_OF_2),
    ),
    3: Given(
        gpu="rtx3060",
        call={"dtype": "float32", "heads": 1, "seqlen": 512, "head_dim": 64},
        code=facts_of_code(["grid=heads", "block_m=32", "block_n=32", "threads=32"]),
    ),
    4: Given(
        gpu="mi100",
        call={"dtype": "float32", "seqlen": 2048, "head_dim": 64},
        code=facts_of_code(["naive.scores=memory", "shared.scores=memory"]),
    ),
}


def _printed(number: int) -> Document:
    return load(PRINTED / f"case_report_{number}.md", GIVEN[number])


EXPECTED = [
    # 0: rows that are different problems; the last has 16 blocks; 1 MB fits L2; a latency-bound loop
    (0, "not comparable", ("33.44 MFLOP, 134.2 MFLOP, 33.48 MFLOP, 9.15 MFLOP",)),
    (0, "idle SMs", ("head_dim 8192", "16 blocks on 108 SMs")),
    (0, "grid fills", ("128 blocks fill 108 SMs",)),
    (0, "latency", ("head_dim 2048", "no unit is busy", "4.4% of the busy scalar units")),
    (0, "intensity", ("0.47 FLOP a byte", "0.50")),
    (0, "re-reads", ("each key is read 16 times",)),
    (0, "claim", ("Fits in L2? ❌ No", "1.049 MB fits L2 of 41.94 MB")),
    # 1: under-filled, the rest inside the loop, idle threads, a peer on a slow path
    (1, "idle SMs", ("flat from 2 to 32 blocks", "a step at 64", "58 SMs")),
    (1, "idle SMs", ("8 blocks on 58 SMs", "7.25 x", "the other 9.2 x is inside", "takes 267 us")),
    (1, "idle threads", ("192 of 256", "25%")),
    (1, "latency", ("33.2 x", "3.0% of the busy scalar units")),
    (1, "peer", ("PyTorch, seqlen 4", "slow path")),
    # 2: 16 % of peak, launches do not depend on tiles, both readings, rows left out, scores in L2, the cliff
    (2, "share of peak", ("162.7 TFLOP/s", "16.4")),
    (2, "contradiction", ("11 us for Large Tiles", "0.05 us for Small Tiles", "what differs is not launching")),
    (2, "idle SMs", ("heads one at a time", "32 blocks against 128", "at most 4 x of the 7.8 x", "1.9 x remain")),
    (2, "grid fills", ("heads in one launch", "the whole 7.8 x remains")),
    (2, "figure explained", ("heads were batched",)),
    (2, "unverified", ("1,024 of 16,384 rows",)),
    (2, "unverified", ("no accuracy is given",)),
    (2, "scores in memory", ("8.389 MB a head", "2.50 us", "16 heads x 2.097 MB stay in L2")),
    (2, "scores in memory", ("a cliff near seqlen 1,280",)),
    # 3: one block of one warp on 28 SMs, ratios that must agree, tokens counted twice, memory that says nothing
    (3, "idle SMs", ("1 block on 28 SMs", "28 x")),
    (3, "few warps", ("32 threads is 1 warp", "each SM has at most 1 for its 4 schedulers")),
    (3, "contradiction", ("15.0 x by latency and 7.5 x by throughput",)),
    (3, "contradiction", ("1,024 tokens where the call has 512",)),
    (3, "figure explained", ("1.5 MB together", "says nothing about the kernel")),
    # 4: 256 MB are 16 heads' scores; 16 MB cannot hold four float32 tensors; none is near a bound
    (4, "figure explained", ("Naive: 256 MB at 2048 are the scores of 16 heads",)),
    (4, "figure explained", ("Flash: 16 MB are less than q, k, v and out in float32",)),
    (4, "scores in memory", ("Naive: scores left L2 at seqlen 362",)),
    (4, "latency", ("Flash", "8.0% of the busy scalar units")),
]


@pytest.mark.parametrize(("number", "kind", "words"), EXPECTED)
def test_a_report_as_printed_has_its_verdicts(number: int, kind: str, words: tuple[str, ...]) -> None:
    found = [f"{f.text} = {f.arithmetic}" for f in diagnose(_printed(number)) if f.kind == kind]
    assert any(all(word in text for word in words) for text in found), found


@pytest.mark.parametrize("number", range(5))
def test_a_report_as_printed_accuses_no_peer_and_has_no_false_waves(number: int) -> None:
    document = _printed(number)
    causes = [f for f in diagnose(document) if f.is_cause]
    peers = {row.series for row in document.rows if row.kernel.is_peer}
    assert causes and not peers & {f.series for f in causes}
    # Report 1: two waves of 58 would take 1.09 ms for 64 blocks; the table has 0.747.
    assert "waves" not in {f.kind for f in causes}


def test_peers_are_known_by_name() -> None:
    peers = {n: {r.series for r in _printed(n).rows if r.kernel.is_peer} for n in (1, 2, 3)}
    assert peers == {1: {"PyTorch"}, 2: {"PyTorch SDPA", "FlashAttention-3"}, 3: {"PyTorch Baseline"}}
    assert all(row.kernel.unit == "matrix" for row in _printed(3).rows if row.kernel.is_peer)


def _load(tmp_path: Path, text: str | bytes, name: str = "t.md", **call: Any) -> Document:
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(file, Given(gpu="l4", call=call))


def _rows(document: Document) -> list[tuple[Any, ...]]:
    return [(r.series, r.call.seqlen, r.time_us) for r in document.rows]


TWO = [("theirs", 512, 900.0), ("PyTorch", 512, 50.0), ("theirs", 1024, 1900.0), ("PyTorch", 1024, 110.0)]


@pytest.mark.parametrize(
    "text",
    [
        "| seqlen | Ours (ms) | PyTorch (ms) |\n|---|---|---|\n| 512 | **0.9** | 0.05 |\n| 1024 | 1.9 | `0.11` |\n",
        "Seq_Len | our time [us] | torch | x\n--|--|--|--\n512 | 900 | 50 us | 18x\n1,024 | 1900 | 110 us | 17x\n",
        "seqlen,ours_ms,PyTorch_ms\n512,0.9,0.05\n1024,1.9,0.11\n",
        'N;ours (ms);"PyTorch (ms)"\n512;0,9;0,05\n1024;1,9;0,11\n',
        "N\tours (ms)\tPyTorch (ms)\n512\t0.9\t0.05\n1024\t1.9\t0.11\n",
        "On our box.\n\n  N      ours (us)   PyTorch (us)\n  512    900         50\n  1k     1900        110\n\nSee.",
        "┌──┬──┬──┐\n│ N │ ours (µs) │ PyTorch (μs) │\n├──┼──┼──┤\n│ 512 │ 900 │ 50 │\n│ 1024 │ 1900 │ 110 │\n└──┘",
        "+---+---+---+\n| N | ours (ms) | PyTorch (ms) |\n+===+===+===+\n| 512 | 0.9 | 0.05 |\n| 1024 | 1.9 | 0.11 |",
        "Times (ms)\n\n| n | Ours | PyTorch |\n|---|---|---|\n| 512 | 0.9 | 0.05 |\n| 1024 | 1.9 | 0.11 |",
        "| provider | seqlen | latency (ms) |\n|---|---|---|\n| ours | 512 | 0.9 |\n| PyTorch | 512 | 0.05 |\n"
        "| ours | 1024 | 1.9 |\n| PyTorch | 1024 | 0.11 |\n",
    ],
)  # fmt: skip
def test_a_table_reads_alike_in_every_format(tmp_path: Path, text: str) -> None:
    rows = [(("PyTorch" if "torch" in s.lower() else s), n, t) for s, n, t in _rows(_load(tmp_path, text))]
    assert rows == TWO


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    document = _load(tmp_path, "seqlen,ours (µs),speedup ×\n512,900,2×\n".encode(encoding), "t.csv")  # noqa: RUF001
    assert _rows(document) == [("theirs", 512, 900.0)]


@pytest.mark.parametrize("wrong", ["cp1252", "mac_roman"])
def test_text_that_was_decoded_wrongly_is_repaired(tmp_path: Path, wrong: str) -> None:
    plain = "| Tiles | Time |\n|---|---|\n| 64×128×64, 32 threads | 1.65 μs/head |\n"  # noqa: RUF001
    damaged = plain.encode().decode(wrong)
    assert damaged != plain
    (row,) = _load(tmp_path, damaged).rows
    assert (row.kernel.block_m, row.kernel.block_n, row.kernel.threads) == (64, 128, 32)
    assert row.time_us == 1.65 and row.per_head and row.kernel.launch_heads == ""


def test_passes_in_headings_are_rows_of_their_own(tmp_path: Path) -> None:
    document = _load(tmp_path, "seqlen,fwd (ms),bwd (ms)\n512,1,3\n", "t.csv")
    assert [(r.call.passes, r.time_us) for r in document.rows] == [("forward", 1000.0), ("backward", 3000.0)]


def test_what_triton_prints_is_read_with_its_caption(tmp_path: Path) -> None:
    """Rates without times, row numbers before the sizes, and the call in the line above."""
    document = _load(
        tmp_path,
        "fused-attention-batch4-head32-d64-bwd-causal=True:\n     N_CTX  Triton [FP16] (TFLOPS)  ours (TFLOPS)\n"
        "0   1024.0               123.4           98.7\n1   2048.0               156.3          130.2\n",
    )
    row = document.rows[1]
    assert [r.series for r in document.rows] == ["Triton [FP16]", "theirs"] * 2
    assert (row.call.batch, row.call.heads, row.call.head_dim, row.call.seqlen) == (4, 32, 64, 1024)
    assert row.call.causal and row.call.passes == "backward"
    # 5 products of 2 x 64 operations for each of 524,800 pairs of 128 heads, at 98.7 TFLOP/s
    assert time_us(row) == pytest.approx(10 * 64 * 128 * 524_800 / 98.7e6)


@pytest.mark.parametrize("gap", ["", "\n"])
@pytest.mark.parametrize(
    "table", ["seqlen,ours_ms,torch_ms\n512,0.9,0.1\n", "  seqlen  ours (us)  torch (us)\n0  512  900  100\n"]
)
@pytest.mark.parametrize(("words", "causal"), [("causal", True), ("non-causal", False), ("causal=True", True)])
def test_a_line_of_sizes_with_commas_is_the_caption(
    tmp_path: Path, gap: str, table: str, words: str, causal: bool
) -> None:
    row = _load(tmp_path, f"# H100, B=4, H=32, head_dim = 128, bf16, {words}\n{gap}{table}", "t.csv").rows[0]
    call = row.call
    assert (call.batch, call.heads, call.head_dim, call.seqlen) == (4, 32, 128, 512)
    assert (call.dtype, call.causal, row.time_us) == ("bfloat16", causal, 900.0)


@pytest.mark.parametrize("words", ["fp16 against fp32, causal and non-causal, H=2", "My fp16 kernel, causal:"])
def test_a_caption_with_both_masks_or_dtypes_or_without_sizes_states_none(tmp_path: Path, words: str) -> None:
    call = _load(tmp_path, f"{words}\n\n| seqlen | ours (ms) |\n|--|--|\n| 512 | 1 |\n").rows[0].call
    assert (call.dtype, call.causal) == ("float32", False)


@pytest.mark.parametrize(
    "text",
    [
        "[fwd] B=8, H=12, N=1024 | time: 1.2 ms | 20.9 TFLOPs\n[fwd] B=8, H=12, N=2048 | time: 4.7 ms | 21.8 TFLOPs\n",
        "1024, 0.5 ms\n2048, 1.9 ms\n",
        "mine  S=1024  H=16 D=64: 0.5 ms\nmine  S=2048  H=16 D=64: 1.9 ms\n",
    ],
)
def test_lines_of_measurements_without_headings_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(TableError, match=r"has no table.*with a line of headings"):
        _load(tmp_path, text, "t.txt")


def test_headings_that_repeat_a_size_are_headings(tmp_path: Path) -> None:
    document = _load(tmp_path, "Time (ms)\n| seqlen | D=64 | D=128 |\n|--|--|--|\n| 512 | 1 | 2 |\n")
    assert [(r.series, r.time_us) for r in document.rows] == [("D=64", 1000.0), ("D=128", 2000.0)]


@pytest.mark.parametrize("heading", ["nheads_kv", "nheads_k", "num_heads_k", "heads_k", "n_kv_heads"])
def test_kv_heads_of_a_decode_are_read_and_set_its_bytes(tmp_path: Path, heading: str) -> None:
    """2 x 16 x 8 x 16384 keys x 128 x 2 bytes are 1.07 GB: 400 us on an H100 are 80 % of its bandwidth."""
    text = f"seqlen_q,seqlen_k,batch,nheads,{heading},headdim,ours (us)\n1,16384,16,32,8,128,400\n"
    (tmp_path / "t.csv").write_text(text)
    document = load(tmp_path / "t.csv", Given(gpu="h100", call={"dtype": "bfloat16"}))
    assert document.rows[0].call.heads_kv == 8 and document.unread == ()
    cause = next(f for f in diagnose(document) if f.is_cause)
    assert cause.kind == "memory" and "at 80% of the bandwidth" in cause.text


def test_heads_follow_from_time_times_rate(tmp_path: Path) -> None:
    text = "seqlen,ours (ms),TFLOP/s\n1024,1.003,4.282\n2048,2.006,8.564\n"
    (first, second) = implied(_load(tmp_path, text, "t.csv", head_dim=64)).rows
    assert (first.call.heads, second.call.heads) == (16, 16)
    vague = implied(_load(tmp_path, text.replace("8.564", "7.831"), "t.csv", head_dim=64)).rows
    assert vague[0].call.heads is None


def test_rates_that_grow_with_the_one_size_are_one_problem(tmp_path: Path) -> None:
    text = "seqlen,ours (ms),TFLOP/s\n1024,1.01,4.31\n2048,2.02,8.62\n4096,4.04,{}\n"
    one = diagnose(_load(tmp_path, text.format("17.24"), "t.csv"))
    assert "not comparable" not in {f.kind for f in one}
    assert "not comparable" in {f.kind for f in diagnose(_load(tmp_path, text.format("8.62"), "t.csv"))}


def test_if_all_series_have_names_of_peers_none_is_one(tmp_path: Path) -> None:
    alone = _load(tmp_path, "seqlen,FlashAttention (ms)\n512,1\n")
    assert not any(row.kernel.is_peer for row in alone.rows)


def test_columns_win_over_options_and_options_over_a_toml_file(tmp_path: Path) -> None:
    document = _load(tmp_path, "H,seqlen,ours (ms)\n4,512,1\n", "t.csv", heads=8, head_dim=64)
    assert (document.rows[0].call.heads, document.rows[0].call.head_dim) == (4, 64)
    changed = load("case_report_3", Given(gpu="h100", call={"heads": 2}))
    assert changed.device.num_sms == (132, 132) and {row.call.heads for row in changed.rows} == {2}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no table here\n", "has no table"),
        ("| seqlen | ours |\n|---|---|\n| 512 | 0.9 |\n", "no figure that has a unit.*not read: ours"),
        (b"\x89PNG\x00\x00", "is no text: it has zero bytes"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(TableError, match=words):
        _load(tmp_path, text)


def test_sizes_in_exponents_are_read_and_unknown_units_are_not(tmp_path: Path) -> None:
    text = "seqlen,ours_us\n1e3,100\n2.5E+3,400\n4M,900\n8k,1000\n'16384 tokens',3000\n".replace("'", "")
    document = _load(tmp_path, text, "t.csv")
    assert [row.call.seqlen for row in document.rows] == [1000, 2500, 8192, 16384]
    assert document.unread == ("seqlen = 4M",)


def test_cells_that_hold_no_valid_figure_are_listed(tmp_path: Path) -> None:
    text = "seqlen,threads,ours_us\n64,many,1\n128,32,-5\n256,32,inf\n512,32,0\n1024,32,NaN\n2048,32,OOM\n4096,32,\n"
    document = _load(tmp_path, text, "t.csv")
    assert [row.call.seqlen for row in document.rows] == [64]
    # NaN, OOM and an empty cell mean that there is no figure.
    assert document.unread == ("threads = many", "ours_us = -5", "ours_us = inf", "ours_us = 0")
    long = "seqlen,ours_us\n64,1\n" + "".join(f"{128 * n},-{n}\n" for n in range(1, 10))
    unread = _load(tmp_path, long, "t.csv").unread
    assert unread[:5] == tuple(f"ours_us = -{n}" for n in range(1, 6)) and unread[5:] == ("ours_us in 4 more rows",)


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        ("tiles=64", "no fact about code"),
        ("block_m", "'block_m' has no value; write block_m=VALUE"),
        ("flash.block_m", "write flash.block_m=VALUE"),
        ("block-m=64", "did you mean block_m"),
        ("block_m=-1", "positive whole number"),
        ("unit=fpga", "scalar or matrix"),
    ],
)
def test_a_fact_about_code_that_is_none_is_refused(fact: str, words: str) -> None:
    with pytest.raises(TableError, match=words):
        facts_of_code([fact])


def test_facts_of_a_series_that_the_table_lacks_are_refused() -> None:
    with pytest.raises(TableError, match="--code names the series 'flsh'; the table has"):
        load(PRINTED / "case_report_4.md", Given(code=facts_of_code(["flsh.block_m=64"])))


def test_the_command_takes_a_printed_table_with_the_calls_options() -> None:
    command = ["explain", "--from-table", str(PRINTED / "case_report_3.md"), "--gpu", "rtx3060", "--dtype", "fp32"]
    command += ["--heads", "1", "--seqlen-q", "512", "--head-dim", "64", "--code", "grid=heads", "--code", "threads=32"]
    said = CliRunner().invoke(app, command)
    assert said.exit_code == 0, said.output
    assert "idle SMs: theirs: 1 block on 28 SMs" in said.output
    assert "smem_bytes: blocks that an SM holds at once" in said.output
    data = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert list(data["not_said"]) == ["smem_bytes"] and data["assumed"] == ["batch 1", "no causal mask"]


def test_the_command_reads_standard_input() -> None:
    said = CliRunner().invoke(app, ["explain", "--from-table", "-", "--gpu", "l4"], input="seqlen,ours (ms)\n64,1\n")
    assert said.exit_code == 0 and "not said" not in said.output and "heads, head_dim, tflops" in said.output


@pytest.mark.parametrize("option", [["--mask"], ["--window", "64,0"], ["--measured-us", "5"]])
def test_the_command_refuses_what_no_table_has(option: list[str]) -> None:
    said = CliRunner().invoke(app, ["explain", "--from-table", "case_report_3", *option])
    assert said.exit_code == 2 and f"--from-table takes no {option[0]}" in said.output


def test_what_is_not_said_is_listed_with_the_rules_that_are_silent() -> None:
    said = CliRunner().invoke(app, ["explain", "--from-table", str(PRINTED / "case_report_4.md")]).output
    assert "seqlen, heads, head_dim, tflops: shares of the units' rates, latency" in said
    assert "the card (--gpu): thread blocks against SMs" in said
    assert "assumed    batch 1, dtype float32, no causal mask" in said


def test_the_page_of_a_case_report_prints_what_the_command_says() -> None:
    page = (Path(__file__).parents[3] / "docs" / "workbench" / "case-report.md").read_text(encoding="utf-8")
    shown = page.split("```text\n")[1].split("```")[0].strip().split("\n\n")
    said = [f"{f.kind}: {f.text}.\n= {f.arithmetic}" for f in diagnose(_printed(1)) if f.is_cause]
    assert len(shown) == 3 and set(shown) <= set(said)
    call = AttentionProblem(
        batch=1, seqlen_q=512, seqlen_k=512, num_heads_q=1, num_heads_kv=1, head_dim=64, head_dim_v=64,
        dtype="float16", softmax_scale=0.125,
    )  # fmt: skip
    for kernel, sms in (("flash_fwd", "16.5 x"), ("split_kv", "2.06 x")):
        p = warpwave.explain(call, gpu=resolve("h200"), kernel=kernel, hot=True).prediction
        assert p is not None
        assert f"idle SMs {sms} | {us(p.time_us)}" in page and f"{p.factors['idle SMs']:.3g} x" == sms
    p = warpwave.explain(call, gpu=resolve("l4"), hot=True).prediction
    assert p is not None
    assert f"predicts {us(p.time_us)} ({us(p.low_us).split()[0]} to {us(p.high_us).split()[0]})" in " ".join(
        page.split()
    )


@pytest.mark.parametrize("cell", ["1024,2048", "[512, 1024]", "512 1024", "512-1024", "512/1024"])
def test_a_cell_with_several_lengths_is_not_read_as_one(tmp_path: Path, cell: str) -> None:
    document = _load(tmp_path, f"| seqlen | ours (ms) |\n|--|--|\n| {cell} | 1 |\n| 2,048 | 2 |\n")
    assert [r.call.seqlen for r in document.rows] == [2048] and document.unread == (f"seqlen = {cell}",)


@pytest.mark.parametrize("space", ["\u00a0", "\u202f"])
def test_spaces_that_do_not_break_divide_thousands(tmp_path: Path, space: str) -> None:
    text = f"| seqlen | ours (us) |\n|--|--|\n| 4{space}096 | 12{space}500.5 |\n"
    assert _rows(_load(tmp_path, text)) == [("theirs", 4096, 12500.5)]


def test_a_column_with_a_decimal_comma_has_only_decimal_commas(tmp_path: Path) -> None:
    text = "| seqlen | ours (ms) | torch (ms) |\n|--|--|--|\n| 1,024 | 0,512 | 1,250 |\n| 2,048 | 1,985 ms | 2,250 |\n"
    times = [(r.call.seqlen, r.time_us) for r in _load(tmp_path, text).rows]
    assert times == [(1024, 512.0), (1024, 1_250_000.0), (2048, 1985.0), (2048, 2_250_000.0)]


def test_a_shape_is_no_tile_and_both_passes_are_labeled(tmp_path: Path) -> None:
    text = "| shape | fwd (ms) | bwd (ms) | fwd+bwd (ms) |\n|--|--|--|--|\n| 4x16x1024x64 | 1 | 3 | 4 |\n"
    rows = _load(tmp_path, text).rows
    assert {r.series for r in rows} == {"theirs"} and {r.kernel.block_m for r in rows} == {None}
    sizes = _load(tmp_path, text.replace("shape", "seqlen").replace("4x16x1024x64", "512")).rows
    assert [r.label for r in sizes] == ["seqlen 512", "seqlen 512, passes backward", "seqlen 512, passes both"]


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 4, 3, 2, 1), (3, 2, 0, 1, 4)])
def test_of_several_statistics_one_is_read_whatever_their_order(tmp_path: Path, order: tuple[int, ...]) -> None:
    cells = [("seqlen", "512"), ("ours mean (ms)", "2"), ("ours std (ms)", "0.01"), ("ours min (ms)", "1"),
             ("ours max (ms)", "3")]  # fmt: skip
    text = "\n".join(",".join(cells[i][line] for i in order) for line in (0, 1)) + "\n"
    document = _load(tmp_path, text, "t.csv")
    assert _rows(document) == [("theirs", 512, 2000.0)]
    assert set(document.unread) == {"ours min (ms)", "ours max (ms)"}


def test_of_two_columns_of_one_figure_the_first_is_read_and_the_other_listed(tmp_path: Path) -> None:
    document = _load(tmp_path, "seqlen,ours (ms),ours (us)\n512,1.2,1900\n", "t.csv")
    assert _rows(document) == [("theirs", 512, 1200.0)] and document.unread == ("ours (us)",)


@pytest.mark.parametrize(
    ("heading", "cell"), [("dtype", "int8"), ("causal", "maybe"), ("batch", "4M"), ("mask", "padding")]
)
def test_a_row_with_a_size_that_is_not_read_takes_no_default_for_it(tmp_path: Path, heading: str, cell: str) -> None:
    good = {"dtype": "fp16", "causal": "no", "batch": "2", "mask": "causal"}[heading]
    text = f"{heading};seqlen;ours (ms)\n{good};512;1\n{cell};1024;3\n"
    document = _load(tmp_path, text, "t.csv")
    assert _rows(document) == [("theirs", 512, 1000.0)] and document.unread == (f"{heading} = {cell}",)


@pytest.mark.parametrize("between", ["2048", "# out of memory with torch", "and longer:", ""])
@pytest.mark.parametrize("mark", [",", ";", " | "])
def test_rows_after_a_remark_belong_to_the_table_above(tmp_path: Path, between: str, mark: str) -> None:
    lines = ["B=2, H=4, D=64", "seqlen,ours (ms),speedup", "512,1,2x", between, "1024,3,2.1x", "", "2048,9,2.2x"]
    document = _load(tmp_path, "\n".join([lines[0], *(line.replace(",", mark) for line in lines[1:])]) + "\n", "t.csv")
    assert _rows(document) == [("theirs", 512, 1000.0), ("theirs", 1024, 3000.0), ("theirs", 2048, 9000.0)]
    assert {row.call.heads for row in document.rows} == {4} and {row.table for row in document.rows} == {"the table"}
