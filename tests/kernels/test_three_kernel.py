"""What `three_kernel` says of itself: chunks, workspace, costs, choices. What it computes is tests/conformance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warpwave.cached_calls import operands_without_memory
from warpwave.errors import InvalidInput
from warpwave.gpu import ARCHS, CPU, INTERPRETER, Gpu
from warpwave.kernels.three_kernel import backward as three_kernel_gradients
from warpwave.kernels.three_kernel import config as three_kernel_configs
from warpwave.kernels.three_kernel import host as three_kernel
from warpwave.kernels.three_kernel import launches as three_kernel_launches
from warpwave.kernels.three_kernel import library as three_kernel_library
from warpwave.kernels.three_kernel.config import library_cannot
from warpwave.kernels.three_kernel.plan import Config, allocate_workspace, least_bytes, pieces, plan, workspace_bytes
from warpwave.kernels.three_kernel.softmax import UNSPECIALIZED
from warpwave.operands import Operands
from warpwave.problem import AttentionProblem, Causal
from warpwave.runtime.parameters import parameters

PROBLEM = AttentionProblem(
    batch=2, seqlen_q=300, seqlen_k=290, num_heads_q=4, num_heads_kv=2, head_dim=1024, head_dim_v=512,
    dtype="bfloat16", softmax_scale=0.1,
)  # fmt: skip
H200 = replace(Gpu.for_arch("sm_90"), num_sms=132)
CONFIG = Config("triton", "triton", 64, 64, 32, 64, 4, 2, 1, 16, 128, 8, 1 << 20)
WAYS = [("library", "library"), ("library", "triton"), ("triton", "triton"), ("fused", "triton")]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"scores": "cublas"}, "scores is 'cublas'; it must be 'library', 'triton', 'hopper' or 'fused'"),
        ({"values": "fused"}, "values is 'fused'"),
        ({"values": "hopper"}, "both must be 'hopper', or neither"),
        ({"scores": "hopper", "values": "hopper"}, "block_m x block_n is 64 x 64; 'hopper' has tiles of 128 x 256"),
        ({"scores": "fused", "values": "library"}, "values is 'library'; with scores='fused' it must be 'triton'"),
        ({"block_m": 48}, "block_m is 48; it must be a power of two, at least 16"),
        ({"block_k": 128}, "block_k is 128; it must be at most block_n, which is 64"),
        ({"softmax_warps": 3}, "softmax_warps is 3"),
        ({"scores": "library", "split_d": 2}, "split_d is 2 and scores 'library'"),
        ({"workspace_bytes": 0}, "workspace_bytes is 0; it must be at least 1"),
    ],
)
def test_a_config_checks_itself(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(CONFIG, **changes)


@given(
    seqlen_q=st.integers(1, 400),
    seqlen_k=st.integers(1, 400),
    heads=st.integers(1, 5),
    causal=st.sampled_from([None, Causal(), Causal("top_left")]),
    left=st.integers(-1, 90),
    right=st.integers(-1, 90),
    way=st.sampled_from(WAYS),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    extra=st.floats(1, 12),
)
@settings(max_examples=200, deadline=None)
def test_chunks_cover_every_row_once_and_every_visible_key(
    seqlen_q: int, seqlen_k: int, heads: int, causal: Any, left: int, right: int, way: Any, dtype: str, extra: float
) -> None:
    problem = replace(
        PROBLEM, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_q=heads, num_heads_kv=heads, causal=causal,
        window_size=(left, right), dtype=dtype, head_dim_v=64,
    )  # fmt: skip
    config = replace(CONFIG, scores=way[0], values=way[1], block_m=16, block_n=32)
    config = replace(config, workspace_bytes=int(extra * least_bytes(problem, config)))
    cut, band = plan(problem, config), problem.band(seqlen_q, seqlen_k)
    assert workspace_bytes(problem, config) <= config.workspace_bytes
    seen: set[tuple[int, int]] = set()
    for chunk in cut.chunks:
        assert 0 < chunk.rows <= cut.rows and 0 < chunk.heads <= cut.heads
        assert chunk.row_begin % config.block_m == 0 and chunk.key_base % config.block_n == 0
        rows = range(chunk.row_begin, chunk.row_begin + chunk.rows)
        for row in (rows[0], rows[-1]):
            keys = band.keys(row, seqlen_k)
            if keys and not (band.low is not None and band.high is not None and band.low > band.high):
                assert chunk.key_begin <= keys[0] and keys[-1] < chunk.key_end
                assert chunk.key_base <= keys[0] and keys[-1] < chunk.key_base + cut.width
        cells = {(head, row) for head in range(chunk.first_head, chunk.first_head + chunk.heads) for row in rows}
        assert not seen & cells
        seen |= cells
    assert len(seen) == problem.batch * heads * seqlen_q


def test_a_window_needs_no_wider_workspace_than_it_shows() -> None:
    long = replace(PROBLEM, batch=1, seqlen_q=65_536, seqlen_k=65_536, causal=Causal(), window_size=(1023, -1))
    cut = plan(long, replace(CONFIG, workspace_bytes=1 << 22))
    assert cut.width <= cut.rows + 1024 + 64
    assert plan(replace(long, window_size=(-1, -1)), replace(CONFIG, workspace_bytes=1 << 26)).width == 65_536


def test_a_workspace_too_small_is_refused_with_what_it_takes() -> None:
    with pytest.raises(
        InvalidInput, match=r"workspace_bytes is 1000; one tile of 64 queries of one head takes \d+ bytes"
    ):
        plan(PROBLEM, replace(CONFIG, workspace_bytes=1000))


def test_hidden_blocks_cost_nothing() -> None:
    """Ours by tiles, 16 * 17 / 2 of 16 * 16; torch's by parts of the rows, each up to its last visible key: more parts
    of a longer call."""
    for way, length, tiles in (("triton", 1024, 16), ("library", 2048, 1), ("library", 4096, 2), ("library", 16384, 8)):
        square = replace(PROBLEM, seqlen_q=length, seqlen_k=length)
        config = replace(CONFIG, scores=way, workspace_bytes=1 << 34)
        full, causal = (three_kernel.cost(p, H200, config) for p in (square, replace(square, causal=Causal())))
        assert causal.parts[0].flops / full.parts[0].flops == (tiles + 1) / (2 * tiles)


def test_costs_by_hand() -> None:
    """5 x 5 tiles of 64 a head, 8 heads: raw scores, probabilities in place of nothing, out in 8 tiles of columns."""
    cost = three_kernel.cost(PROBLEM, H200, replace(CONFIG, workspace_bytes=1 << 30))
    tiles = 8 * 5 * 5
    scores = tiles * 64 * 64
    score, softmax, values = cost.parts
    assert score.flops == 2 * scores * 1024 and values.flops == 2 * scores * 512
    assert score.read_bytes == tiles * 128 * 1024 * 2 and score.write_bytes == 4 * scores
    assert softmax.read_bytes == 8 * scores and softmax.write_bytes == 2 * scores + 4 * 2 * 300 * 4
    assert values.read_bytes == scores * 2 * 8 + tiles * 64 * 512 * 2
    assert cost.workspace_bytes == 8 * 320 * (320 * (4 + 2) + 4), "rows and keys in whole tiles"
    fused = three_kernel.cost(PROBLEM, H200, replace(CONFIG, scores="fused", workspace_bytes=1 << 30))
    assert len(fused.parts) == 2 and fused.parts[0].write_bytes == 2 * scores
    assert fused.workspace_bytes == 8 * 320 * (320 * 2 + 5 * 2 * 4)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("feature", [{}, {"mask_shape": (1, 1, 300, 290)}, {"seqlen_q": 1, "seqlen_k": 4096}])
def test_the_default_fits_every_gpu(arch: str, dtype: str, feature: dict[str, Any]) -> None:
    gpu, problem = Gpu.for_arch(arch), replace(PROBLEM, dtype=dtype, **feature)
    chosen, *others = three_kernel.configs(problem, gpu)
    assert chosen not in others and len(set(others)) == len(others)
    for config in (chosen, *others):
        assert three_kernel.smem_bytes(problem, gpu, config) <= gpu.smem_per_block_bytes
        assert least_bytes(problem, config) <= config.workspace_bytes <= three_kernel.MAX_WORKSPACE_BYTES
        assert not library_cannot(problem, gpu, config)


def test_a_chunk_is_large_and_bounded() -> None:
    large = replace(PROBLEM, batch=4, seqlen_q=4096, seqlen_k=4096, num_heads_q=16, num_heads_kv=16)
    a100 = replace(Gpu.for_arch("sm_80"), num_sms=108)
    config = three_kernel.configs(large, a100)[0]
    cut = plan(large, config)
    tiles = cut.heads * (cut.rows // config.block_m) * (cut.width // config.block_n)
    assert tiles >= 2 * a100.num_sms
    assert config.workspace_bytes == three_kernel_configs.SCORES_BYTES + config.sums_bytes
    small = replace(a100, memory_bytes=1 << 30)
    assert three_kernel.configs(large, small)[0].workspace_bytes == 1 << 26


def test_torch_multiplies_wherever_it_can() -> None:
    """On NVIDIA, and float32 everywhere; not values that a mask may hide, and no packed sequences."""
    large = replace(PROBLEM, batch=4, seqlen_q=4096, seqlen_k=4096, num_heads_q=16, num_heads_kv=16)

    def ways(arch: str, **changes: Any) -> tuple[str, str]:
        config = three_kernel.configs(replace(large, **changes), Gpu.for_arch(arch))[0]
        return config.scores, config.values

    for arch in ("sm_80", "sm_90", "sm_100"):
        expected = ("hopper", "hopper") if arch == "sm_90" else ("library", "library")
        assert ways(arch) == ways(arch, causal=Causal()) == expected
        assert ways(arch, mask_shape=(1, 1, 1, 4096)) == ("library", "triton")
        assert ways(arch, dtype="float32", precision="ieee") == ("library", "library")
        assert ways(arch, dtype="float32", precision="tf32x3") == ("triton", "triton")
    assert ways("gfx942", dtype="float32", precision="ieee") == ("library", "library")
    assert "library" not in ways("gfx942")


def test_the_softmax_leaves_its_pass_where_that_saves_more_than_it_costs() -> None:
    """Where torch cannot multiply, 16 bits on sm_100: up to head_dim_v 2,299. On Hopper, where it halves a tile, up to
    329 for both widths."""
    packed = replace(
        PROBLEM, batch=4, seqlen_q=4096, seqlen_k=4096, num_heads_q=16, num_heads_kv=16, packed=True, total_q=9000,
        total_k=9000,
    )  # fmt: skip

    def scores(arch: str, head_dim: int, head_dim_v: int, **changes: Any) -> str:
        problem = replace(packed, head_dim=head_dim, head_dim_v=head_dim_v, **changes)
        return str(three_kernel.configs(problem, Gpu.for_arch(arch))[0].scores)

    assert [scores("sm_100", 1024, width) for width in (512, 2048, 2560)] == ["fused", "fused", "triton"]
    assert [scores("sm_90", width, width) for width in (320, 384, 2048)] == ["fused", "triton", "triton"]
    assert scores("sm_86", 1024, 512) == "triton"


def test_hopper_takes_two_blocks_a_multiprocessor_and_leaves_what_does_not_fill_it() -> None:
    call = replace(PROBLEM, batch=1, seqlen_q=2048, seqlen_k=2048, num_heads_q=16, num_heads_kv=16, head_dim_v=1024)
    config = three_kernel.configs(call, H200)[0]
    assert config.scores == "hopper" and len(plan(call, config).chunks) == 1
    long = replace(call, seqlen_q=8192, seqlen_k=8192)
    config = three_kernel.configs(long, H200)[0]
    cut = plan(long, config)
    assert config.scores == "hopper" and config.workspace_bytes <= 600_000_000
    assert cut.heads * cut.rows // 128 >= 1.9 * H200.num_sms, "256 blocks: heads are whole"
    few = replace(call, head_dim=512, head_dim_v=512, seqlen_q=64, seqlen_k=8192)  # rounds half empty, K and V long
    assert three_kernel.configs(few, H200)[0].scores == "library"
    shorter = replace(few, seqlen_k=2048)  # torch's would be faster if the host were no slower
    for problem in (shorter, replace(few, seqlen_q=128), replace(few, num_heads_kv=4, seqlen_k=2048)):
        assert three_kernel.configs(problem, H200)[0].scores == "hopper"
    for problem in (replace(call, head_dim=1004), replace(call, window_size=(100, 0))):
        assert three_kernel.configs(problem, H200)[0].scores == "library"


@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "ieee"])
def test_few_scores_take_two_launches_where_these_fill_the_gpu(precision: str) -> None:
    """64 queries and keys of 4 heads: 128 blocks of 16 queries and 64 columns at head_dim 512; wider heads take three,
    and so do other GPUs and 16-bit types."""
    call = replace(
        PROBLEM, batch=1, seqlen_q=64, seqlen_k=64, num_heads_q=4, num_heads_kv=4, head_dim=512, head_dim_v=512,
        dtype="float32", precision=precision,
    )  # fmt: skip
    config = three_kernel.configs(call, H200)[0]
    assert (config.values, config.block_v, config.softmax_rows) == ("online", 64, 16) and config.split_d >= 8
    cost = three_kernel.cost(call, H200, config)
    assert [part.blocks for part in cost.parts][1] == 128 and cost.launches == 2
    for other in (replace(call, head_dim=2048, head_dim_v=2048), replace(call, seqlen_k=2048)):
        assert three_kernel.configs(other, H200)[0].values != "online"
    assert three_kernel.configs(call, Gpu.for_arch("sm_80"))[0].values != "online"


def test_few_scores_of_long_sums_share_head_dim() -> None:
    """64 queries and keys of 4 heads are 4 tiles; as many blocks share each as may, and as there are pairs of steps."""
    short = replace(
        PROBLEM, batch=1, seqlen_q=64, seqlen_k=64, num_heads_kv=4, head_dim=8192, head_dim_v=8192, dtype="float32"
    )
    config = three_kernel.configs(short, H200)[0]
    assert (config.scores, config.block_m, config.split_d) == ("triton", 64, 32)
    assert three_kernel.configs(replace(short, head_dim=512), H200)[0].split_d == 8
    assert three_kernel.configs(replace(short, head_dim=64), H200)[0].split_d == 1


def test_what_it_refuses() -> None:
    assert three_kernel.why_not(PROBLEM, INTERPRETER) == []
    assert three_kernel.why_not(replace(PROBLEM, requires_grad=True), H200) == []
    assert any("found tensors on the CPU" in reason for reason in three_kernel.why_not(PROBLEM, CPU))
    assert any("no paged cache" in reason for reason in three_kernel.why_not(replace(PROBLEM, page_size=16), H200))
    (reason,) = three_kernel.why_not(replace(PROBLEM, seqlen_k=2**21), H200)
    assert "scores of 128 queries of one head would take 1.5 GiB of memory; the limit is 1:" in reason


def test_auto_leaves_gradients_that_it_does_not_support_to_eager() -> None:
    wide = replace(PROBLEM, requires_grad=True)
    for problem in (wide, replace(wide, head_dim=64, head_dim_v=64), PROBLEM):
        for gpu in (H200, Gpu.for_arch("sm_80")):
            assert three_kernel.outrun(problem, gpu) == []
    (reason,) = three_kernel.outrun(replace(wide, softcap=1.0), H200)
    assert reason == "three_kernel's gradients do not support softcap: eager's would be used, after a second forward"


def test_gradients_multiply_whole_groups_together() -> None:
    """Heads from within a group to within another, over two batch items: each once, whole groups in one run."""
    grouped = replace(PROBLEM, batch=2, num_heads_q=12, num_heads_kv=4)
    runs = list(three_kernel_gradients.runs_of_heads(grouped, 1, 23))
    assert runs == [(0, 1, 1, 2), (0, 3, 3, 3), (1, 0, 3, 3), (1, 9, 1, 2)]
    heads = [batch * 12 + head + i for batch, head, kv_heads, members in runs for i in range(kv_heads * members)]
    assert heads == list(range(1, 23))
    alone = replace(PROBLEM, batch=2, num_heads_q=4, num_heads_kv=4)
    assert list(three_kernel_gradients.runs_of_heads(alone, 0, 8)) == [(0, 0, 4, 1), (1, 0, 4, 1)]


def test_every_chunk_is_one_variant() -> None:
    """Chunks differ in numbers that the compiler does not look at: the second compiles nothing."""
    operands = operands_without_memory(PROBLEM)
    config = replace(CONFIG, workspace_bytes=500_000)
    out = operands.q[..., :512]
    for values in ("triton", "library"):
        config = replace(config, values=values, sums_bytes=100_000)
        cut = plan(PROBLEM, config)
        workspace = allocate_workspace(PROBLEM, config, cut, operands.q.device)
        of_chunks = list(three_kernel_launches.launches(PROBLEM, H200, operands, out, None, config, cut, workspace))
        scales = [scale for *_, of_chunk in of_chunks for scale in of_chunk]
        assert len(of_chunks) == len(cut.chunks) > 8 and (not scales or len(scales) > len(cut.chunks))
        for specs in (*zip(*(chunk[:3] for chunk in of_chunks), strict=True), scales):
            _are_one_variant([spec for spec in specs if spec is not None])


def _are_one_variant(specs: list[Any]) -> None:
    if specs:
        for spec in specs:
            scalars = [parameter for parameter in parameters(spec.kernel) if parameter.kind == "scalar"]
            numbers = zip(scalars, spec.scalars, specs[0].scalars, strict=True)
            differing = [parameter for parameter, a, b in numbers if a != b]
            alone = {parameter.name for parameter in differing if len(parameter.path) == 1}
            assert not any(parameter.specialized for parameter in differing) and not alone - set(UNSPECIALIZED)
            assert spec.constants == specs[0].constants
            assert 0 < spec.grid < 2**31


@given(
    heads=st.integers(1, 9),
    rows=st.integers(1, 300),
    width=st.integers(1, 600),
    room=st.integers(1, 1 << 19),
    all_heads=st.integers(1, 9),
)
@settings(max_examples=200, deadline=None)
def test_pieces_cover_a_chunk_once_and_fit_what_was_allocated(
    heads: int, rows: int, width: int, room: int, all_heads: int
) -> None:
    """Chunks of fewer heads and rows than the workspace is for, too."""
    problem = replace(PROBLEM, head_dim_v=width, num_heads_q=all_heads, num_heads_kv=all_heads, batch=1, seqlen_q=300)
    config = replace(CONFIG, scores="library", values="library", sums_bytes=room, workspace_bytes=1 << 22)
    cut = plan(problem, config)
    sums = allocate_workspace(problem, config, cut, torch.device("meta")).sums
    assert sums is not None
    heads, rows = min(heads, cut.heads), min(rows, cut.rows)
    found = pieces(problem, config, heads, rows)
    cells = [
        (head, row)
        for piece in found
        for head in range(piece.first_head, piece.first_head + piece.heads)
        for row in range(piece.row_begin, piece.row_begin + piece.rows)
    ]
    assert sorted(cells) == [(head, row) for head in range(heads) for row in range(rows)]
    assert max(piece.heads * piece.rows for piece in found) <= sums.shape[0]


def test_explain_says_how_a_call_is_cut() -> None:
    large = replace(
        PROBLEM, batch=1, seqlen_q=2048, seqlen_k=2048, num_heads_q=16, num_heads_kv=16, head_dim=1024, head_dim_v=1024
    )
    config = replace(
        three_kernel.configs(large, H200)[0], scores="library", values="library", workspace_bytes=64 << 20,
        sums_bytes=32 << 20,
    )  # fmt: skip
    tile, launches, chunks, tiles, sums = three_kernel.notes(large, H200, config)
    assert tile.startswith("16 bits, Hopper, the softmax by itself: ")
    assert launches.endswith("; the table would choose another config")
    assert chunks == (
        "8 chunks of 2 heads x 2048 queries: scores 2 x 2048 x 2048 x 4 bytes = 33.6 MB, P in their place"
    )
    assert tiles == "by tiles of 128 x 256 a chunk is 256 of scores and 128 of out, for 132 SMs"
    assert sums == "sums in 1 piece a chunk, at most 4096 rows x 1024 x 4 bytes = 16.8 MB"


def test_operands_spread_far_are_copied_for_torchs_products() -> None:
    shape, far = (2, 300, 4, 64), 2**31 // 299 + 8
    dense = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    spread = torch.empty_strided(shape, (far * 300, far, 64, 1), dtype=torch.bfloat16, device="meta")
    large = torch.empty((2, 2**15, 16, 4096), dtype=torch.bfloat16, device="meta")  # past 2^31, but without gaps
    operands = Operands(dense, spread, large)

    def straight(operands: Operands) -> Operands:
        return operands

    near = three_kernel_library.brought_near(straight, operands)(operands)
    assert near.k.is_contiguous() and not spread.is_contiguous()
    assert near.q is dense and near.v is large
    assert three_kernel_library.brought_near(straight, Operands(dense, dense, large)) is straight
