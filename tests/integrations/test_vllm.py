"""The door to vLLM: steps of prefill and decode through the backend's classes against attention of each request.

The classes derive from a stand-in of vLLM's base classes and, if vLLM is installed, from its own, loaded without the
rest of vLLM: steps then have vLLM's metadata class, and its own Triton kernel writes the cache. vLLM itself does not
run here."""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import warpwave
from warpwave.integrations import vllm as door

PARENTS = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends", "vllm.v1.attention.ops")
BACKEND, REGISTRY = "vllm.v1.attention.backend", "vllm.v1.attention.backends.registry"
WRITER = "vllm.v1.attention.ops.triton_reshape_and_cache_flash"


def write_to_slots(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
) -> None:
    """What vLLM's function does: caches are (pages, page_size, heads, width), negative slots are padding."""
    rows = (slot_mapping >= 0).nonzero().flatten()
    slots, size = slot_mapping[rows], key_cache.shape[1]
    for cache, new, scale in ((key_cache, key, k_scale), (value_cache, value, v_scale)):
        if kv_cache_dtype == "fp8":
            new = (new.float() / scale).clamp(-448, 448).to(cache.dtype)
        cache[slots // size, slots % size] = new[rows]


def module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(content)
    return made


def stand_in() -> dict[str, ModuleType]:
    class Builder:
        def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
            self.vllm_config = vllm_config

    class Support(enum.Enum):
        NEVER = 0
        UNIFORM_SINGLE_TOKEN_DECODE = 1

    members: dict[str, str] = {}
    names = SimpleNamespace(__members__=members)
    bases = {"AttentionBackend": type("AttentionBackend", (), {}), "AttentionImpl": type("AttentionImpl", (), {})}
    return {
        BACKEND: module(BACKEND, AttentionMetadataBuilder=Builder, AttentionCGSupport=Support, **bases),
        REGISTRY: module(REGISTRY, AttentionBackendEnum=names, register_backend=members.__setitem__),
        WRITER: module(WRITER, triton_reshape_and_cache_flash=write_to_slots),
    }


def published(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """vLLM's files, with empty modules in place of what they import."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vllm is not installed")
    triton = pytest.importorskip("triton")
    root = Path(spec.origin).parent
    quantization: dict[str, Any] = dict.fromkeys(
        ("kFp8Dynamic64Sym", "kFp8Dynamic128Sym", "kFp8StaticTensorSym", "kNvfp4Dynamic", "FP8_DTYPE")
    )
    quantization["get_fp8_min_max"] = lambda: (-448.0, 448.0)
    on_cpu = not torch.cuda.is_available()  # the writer takes ROCm's settings there: it has none for a CPU
    platform = SimpleNamespace(is_rocm=lambda: on_cpu, is_xpu=lambda: False, has_device_capability=lambda number: True,
                               fp8_dtype=lambda: torch.float8_e4m3fn)  # fmt: skip
    logger = SimpleNamespace(info=lambda *given: None)
    stubs: dict[str, dict[str, Any]] = {
        "vllm.logger": {"init_logger": lambda name: logger},
        "vllm.utils.import_utils": {"resolve_obj_by_qualname": resolve},
        "vllm.model_executor.layers.quantization.utils.quant_utils": quantization,
        "vllm.v1.kv_cache_interface": {
            "KVCacheLayout": object,
            "get_kv_quant_mode": None,
            "KVQuantMode": enum.Enum,
            "is_quantized_kv_cache": lambda name: name.startswith("fp8"),
        },
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": triton.language, "triton": triton},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
        "vllm.distributed.parallel_state": {
            "get_dcp_world_size_and_rank": lambda used: (1, 0),
            "get_pcp_group": lambda: SimpleNamespace(world_size=1, rank_in_group=0),
        },
    }
    found = {name: module(name, **content) for name, content in stubs.items()}
    for name, stub in found.items():
        monkeypatch.setitem(sys.modules, name, stub)
    for name in (BACKEND, REGISTRY, WRITER):
        place = importlib.util.spec_from_file_location(name, root.parent / f"{name.replace('.', '/')}.py")
        assert place is not None and place.loader is not None
        found[name] = importlib.util.module_from_spec(place)
        monkeypatch.setitem(sys.modules, name, found[name])
        place.loader.exec_module(found[name])
    return found


def resolve(name: str) -> Any:
    return getattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2])


@pytest.fixture(params=["stand-in", "published"])
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    found = stand_in() if request.param == "stand-in" else published(monkeypatch)
    for name, content in ({parent: module(parent) for parent in PARENTS} | found).items():
        monkeypatch.setitem(sys.modules, name, content)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.33.0")
    door._classes.cache_clear()
    yield request.param
    door._classes.cache_clear()


PAGE, WIDTH, HEADS, HEADS_KV = 16, 16, 4, 2
LAYER = SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1))


class Requests:
    """Sequences whose pages lie in random order in a cache, as vLLM's scheduler would place them."""

    def __init__(self, lengths: list[int], by_head: bool) -> None:
        torch.manual_seed(0)
        self.q = [torch.randn(length, HEADS, WIDTH) for length in lengths]
        self.k, self.v = ([torch.randn(length, HEADS_KV, WIDTH) for length in lengths] for _ in range(2))
        shape = (40, HEADS_KV, PAGE) if by_head else (40, PAGE, HEADS_KV)
        self.cache = torch.full((*shape, 2 * WIDTH), torch.nan)  # cells that were not written must have no effect
        self.cache = self.cache if by_head else self.cache.transpose(1, 2)
        self.table = torch.randperm(40)[: 5 * len(lengths)].view(-1, 5).int()
        self.done = [0] * len(lengths)

    def step(self, counts: list[int], padding: int = 0, idle: int = 0) -> tuple[Any, list[torch.Tensor]]:
        """vLLM's metadata of a step that computes so many tokens of each request, and its q, k, v by token. `idle`
        requests without tokens pad a graph's batch, and `padding` tokens its rows."""
        spans = [slice(begin, begin + count) for begin, count in zip(self.done, counts, strict=True)]
        parts = [torch.cat([t[span] for t, span in zip(of, spans, strict=True)]) for of in (self.q, self.k, self.v)]
        slots = []
        for row, span in enumerate(spans):
            positions = torch.arange(span.start, span.stop)
            slots.append(self.table[row][positions // PAGE].long() * PAGE + positions % PAGE)
        self.done = [span.stop for span in spans]
        pad = [torch.zeros(padding, *t.shape[1:]) for t in parts]
        offsets = torch.tensor([0, *counts, *[0] * idle]).cumsum(0)
        table = torch.cat([self.table, torch.zeros(idle, 5, dtype=torch.int32)])
        for row, span in enumerate(spans):  # no page is read past a request's length
            table[row, -(-span.stop // PAGE) :] = -1 if row % 2 else 2**31 - 1
        kind: Any = getattr(sys.modules[BACKEND], "CommonAttentionMetadata", SimpleNamespace)
        common = kind(
            num_reqs=len(counts) + idle, num_actual_tokens=sum(counts) + padding, max_query_len=max(counts),
            causal=True, max_seq_len=max(self.done), query_start_loc=offsets.int(),
            query_start_loc_cpu=offsets.int(), seq_lens=torch.tensor([*self.done, *[0] * idle], dtype=torch.int32),
            block_table_tensor=table, slot_mapping=torch.cat([*slots, torch.full((padding,), -1)]),
        )  # fmt: skip
        return common, [torch.cat(pair) for pair in zip(parts, pad, strict=True)]


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # vLLM's arguments, and warpwave's
    "plain": ({}, {}),
    "window": ({"sliding_window": 8}, {"window_size": (7, -1)}),
    "softcap and sinks": (
        {"logits_soft_cap": 4.0, "sinks": torch.arange(4.0)},
        {"softcap": 4.0, "sinks": torch.arange(4.0)},
    ),
    "ALiBi": ({"alibi_slopes": [0.1, 0.2, 0.3, 0.4]}, {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}),
}


def builder() -> Any:
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=80))
    return door.Backend.get_builder_cls()(None, ["layer"], config, torch.device("cpu"))


@pytest.mark.parametrize("by_head", [True, False], ids=["by head", "by token"])
@pytest.mark.parametrize("options", OPTIONS)
def test_steps_of_prefill_and_decode(options: str, by_head: bool, host: str) -> None:
    """A prefill, a step of chunks beside decodes, decodes alone, with rows and requests that pad a graph's batch."""
    vllms, mine = OPTIONS[options]
    requests = Requests([50, 23, 37, 19], by_head)
    layer = door.Backend.get_impl_cls()(HEADS, WIDTH, 0.3, HEADS_KV, **vllms)
    steps = (([30, 20, 16, 1], 0, 0), ([17, 1, 19, 14], 3, 0), ([1, 1, 1, 1], 0, 0), ([1, 1, 1, 1], 2, 2))
    for counts, padding, idle in steps:
        before = list(requests.done)
        common, (q, k, v) = requests.step(counts, padding, idle)
        metadata = builder().build(0, common)
        layer.do_kv_cache_update(LAYER, k, v, requests.cache, common.slot_mapping)
        output = torch.full((len(q), HEADS, WIDTH), torch.nan)
        assert layer.forward(LAYER, q, k, v, requests.cache, metadata, output=output) is output
        assert metadata.one_query_each == (counts == [1, 1, 1, 1])
        begin = 0
        for row, (done, count) in enumerate(zip(before, counts, strict=True)):
            expected = warpwave.attention(
                requests.q[row][None, done : done + count], requests.k[row][None, : done + count],
                requests.v[row][None, : done + count], causal=True, softmax_scale=0.3, **mine,
            )  # fmt: skip
            torch.testing.assert_close(output[begin : begin + count], expected[0])
            begin += count
        assert not output[begin : begin + idle].any()


@pytest.mark.parametrize("by_head", [True, False], ids=["by head", "by token"])
def test_an_fp8_cache(by_head: bool, host: str) -> None:
    """Attention to what vLLM's function wrote, times the layer's factors: a prefill, then a step of decodes."""
    requests = Requests([30, 21], by_head)
    requests.q, requests.k, requests.v = ([t.half() for t in of] for of in (requests.q, requests.k, requests.v))
    cache = torch.full_like(requests.cache, 255, dtype=torch.uint8)  # the bytes of NaN
    assert cache.stride() == requests.cache.stride()
    scales = SimpleNamespace(_k_scale=torch.tensor(0.02), _v_scale=torch.tensor(0.5))
    layer = door.Backend.get_impl_cls()(HEADS, WIDTH, 0.3, HEADS_KV, kv_cache_dtype="fp8")
    for counts in ([29, 20], [1, 1]):
        before = list(requests.done)
        common, tokens = requests.step(counts)
        q, k, v = (t.half() for t in tokens)
        layer.do_kv_cache_update(scales, k, v, cache, common.slot_mapping)
        output = torch.full((len(q), HEADS, WIDTH), torch.nan, dtype=torch.float16)
        layer.forward(scales, q, k, v, cache, builder().build(0, common), output=output)
        begin = 0
        for row, (done, count) in enumerate(zip(before, counts, strict=True)):
            # Read back: Triton's interpreter rounds to float8 without carrying into the exponent.
            at = torch.arange(done + count)
            pages, cells = requests.table[row].long()[at // PAGE], at % PAGE
            keys, values = (
                of[pages, cells][None].float() * scale
                for of, scale in zip(layer._pages(cache), (scales._k_scale, scales._v_scale), strict=True)
            )
            torch.testing.assert_close(values[0, -1], requests.v[row][done + count - 1].float(), rtol=0.5, atol=0.02)
            asked = requests.q[row][None, done : done + count].float()
            expected = warpwave.attention(asked, keys, values, causal=True, softmax_scale=0.3)
            torch.testing.assert_close(output[begin : begin + count].float(), expected[0], rtol=2e-3, atol=2e-3)
            begin += count


def test_metadata_of_a_captured_step_follows_its_tensors(host: str) -> None:
    """As a CUDA graph does: one metadata object, whose tensors get the contents of later steps; unused rows have no
    tokens."""
    requests = Requests([40, 40, 40], True)
    layer = door.Backend.get_impl_cls()(HEADS, WIDTH, 0.3, HEADS_KV)
    common, (q, k, v) = requests.step([30, 20, 10])
    layer.do_kv_cache_update(LAYER, k, v, requests.cache, common.slot_mapping)
    common, _ = requests.step([1, 1, 1])
    metadata = builder().build_for_cudagraph_capture(common)
    assert metadata.max_seq_len == 80 and metadata.seq_lens is common.seq_lens
    assert metadata.block_table is common.block_table_tensor and metadata.query_start_loc is common.query_start_loc
    for lengths in ([30, 20, 10], [5, 0, 9]):
        metadata.seq_lens.copy_(torch.tensor(lengths))
        q = torch.randn(3, HEADS, WIDTH)
        output = layer.forward(LAYER, q, k, v, requests.cache, metadata, output=torch.empty_like(q))
        for row, length in enumerate(lengths):
            keys, values = requests.k[row][None, :length], requests.v[row][None, :length]
            expected = warpwave.attention(q[None, row : row + 1], keys, values, causal=True, softmax_scale=0.3)
            torch.testing.assert_close(output[row], expected[0, 0])


@pytest.mark.parametrize("by_head", [True, False], ids=["by head", "by token"])
def test_the_kernel_reads_both_memory_layouts(by_head: bool, host: str) -> None:
    """Keys and values alternate in vLLM's cache, so that neither is contiguous."""
    if torch.cuda.is_available():
        pytest.skip("for Triton's interpreter; the test behind the gpu marker has the same layouts")
    requests = Requests([30, 20], by_head)
    common, (q, k, v) = requests.step([30, 20])
    layer = door.Backend.get_impl_cls()(HEADS, WIDTH, 0.3, HEADS_KV)
    layer.do_kv_cache_update(LAYER, k, v, requests.cache, common.slot_mapping)
    k_pages, v_pages = layer._pages(requests.cache)
    cache = warpwave.CacheLayer(k_pages, v_pages, common.block_table_tensor, common.seq_lens)
    pair = [
        warpwave.attention_with_kv_cache(
            q[[28, 29, 49]], cache, cu_seqlens_q=torch.tensor([0, 2, 3]).int(), max_seqlen_q=2, causal=True,
            kernel=kernel,
        )
        for kernel in ("split_kv", "eager")
    ]  # fmt: skip
    torch.testing.assert_close(*pair)


@pytest.mark.gpu
@pytest.mark.parametrize("by_head", [True, False], ids=["by head", "by token"])
def test_steps_on_the_gpu_and_in_a_graph(by_head: bool, host: str) -> None:
    """A prefill, a mixed step, and decode steps by one CUDA graph, with a request that pads its batch."""
    requests = Requests([50, 23, 37], by_head)
    layer = door.Backend.get_impl_cls()(HEADS, WIDTH, 0.3, HEADS_KV, sliding_window=24)
    cache = requests.cache.cuda().bfloat16()  # a copy in the same memory layout
    assert cache.stride() == requests.cache.stride()
    table = torch.zeros(4, 5, dtype=torch.int32, device="cuda")
    table[:3] = requests.table.cuda()
    used = torch.zeros(4, dtype=torch.int32, device="cuda")
    q_now = torch.zeros(4, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    out_now, graph = torch.empty_like(q_now), torch.cuda.CUDAGraph()

    def check(output: torch.Tensor, before: list[int], counts: list[int]) -> None:
        begin = 0
        for row, (done, count) in enumerate(zip(before, counts, strict=True)):
            keys, values = (of[row][None, : done + count].bfloat16().float() for of in (requests.k, requests.v))
            expected = warpwave.attention(
                requests.q[row][None, done : done + count].bfloat16().float(), keys, values, causal=True,
                window_size=(23, -1), softmax_scale=0.3,
            )  # fmt: skip
            torch.testing.assert_close(output[begin : begin + count].float().cpu(), expected[0], rtol=2e-2, atol=2e-2)
            begin += count

    metadata = None
    for counts in ([30, 20, 16], [17, 1, 18], [1, 1, 1], [1, 1, 1]):
        before = list(requests.done)
        common, tokens = requests.step(counts)
        q, k, v = (t.cuda().bfloat16() for t in tokens)
        layer.do_kv_cache_update(LAYER, k, v, cache, common.slot_mapping.cuda())
        if max(counts) > 1:
            common.query_start_loc, common.seq_lens = common.query_start_loc.cuda(), common.seq_lens.cuda()
            common.block_table_tensor = table[:3]
            output = layer.forward(LAYER, q, k, v, cache, builder().build(0, common), output=torch.empty_like(q))
            check(output, before, counts)
            continue
        used[:3] = common.seq_lens.cuda()
        q_now[:3] = q
        if metadata is None:
            common.num_actual_tokens, common.block_table_tensor, common.seq_lens = 4, table, used
            metadata = builder().build_for_cudagraph_capture(common)
            layer.forward(LAYER, q_now, k, v, cache, metadata, output=out_now)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                layer.forward(LAYER, q_now, k, v, cache, metadata, output=out_now)
        graph.replay()
        check(out_now, before, counts)


def test_what_the_backend_takes(host: str) -> None:
    backend = door.WarpwaveBackend
    assert backend.get_name() == "WARPWAVE" and [backend.supports_head_size(n) for n in (64, 256, 60, 512, 0)] == [
        True, True, False, False, False
    ]  # fmt: skip
    assert [backend.supports_compute_capability(c) for c in ((9, 0), (8, 0), (7, 5))] == [True, True, False]
    given: tuple[Any, ...] = (16, False, False, False, False, (9, 0))
    assert backend.supports_combination(64, torch.bfloat16, "bfloat16", *given) is None
    assert backend.supports_combination(64, torch.bfloat16, "auto", *given) is None
    assert backend.supports_combination(64, torch.bfloat16, "fp8", *given) is None
    assert "needs compute capability 8.9" in str(
        backend.supports_combination(64, torch.bfloat16, "fp8", *given[:-1], (8, 0))
    )
    assert "kv_cache_dtype is fp8_e5m2" in str(backend.supports_combination(64, torch.bfloat16, "fp8_e5m2", *given))
    with pytest.raises(warpwave.UnsupportedProblem, match="attn_type"):
        backend.get_impl_cls()(HEADS, WIDTH, 0.3, attn_type="encoder_only")
    layer = backend.get_impl_cls()(HEADS, WIDTH, 0.3, HEADS_KV)
    q = torch.randn(2, HEADS, WIDTH)
    assert not layer.forward(LAYER, q, q, q, torch.empty(0), None, torch.ones_like(q)).any()  # vLLM measures memory
    with pytest.raises(warpwave.UnsupportedProblem, match="output_scale"):
        layer.forward(LAYER, q, q, q, torch.empty(0), None, torch.ones_like(q), torch.ones(1))
    common, _ = Requests([4], True).step([4])
    common.causal = torch.ones(1, dtype=torch.bool)
    with pytest.raises(warpwave.UnsupportedProblem, match="not causal"):
        builder().build(0, common)
    if host == "published":
        plain: dict[str, Any] = {
            "head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 48, "use_mla": False,
            "has_sink": True, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
            "device_capability": (9, 0), "attn_type": "decoder", "has_sliding_window": True,
        }  # fmt: skip
        assert backend.validate_configuration(**plain) == []
        refused = {"kv_cache_dtype": "fp8_e5m2", "use_mla": True, "use_dcp": True, "attn_type": "encoder",
                   "block_size": 8, "use_non_causal": True, "use_batch_invariant": True,
                   "dtype": torch.float32}  # fmt: skip
        for name, value in refused.items():
            assert backend.validate_configuration(**plain | {name: value}), name


def test_registration(host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    names = sys.modules[REGISTRY].AttentionBackendEnum.__members__
    door.plugin()
    door.register()  # vLLM loads plugins in several processes, and may load them twice
    assert "WARPWAVE" in names and not caplog.records
    if host == "published":
        assert names["WARPWAVE"].get_class() is door.WarpwaveBackend
        assert resolve(".".join(door.WarpwaveBackend.full_cls_name())) is door.WarpwaveBackend
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.34.1")
    with pytest.raises(ImportError, match=r"vllm is 0\.34\.1"):
        door.register()
    door.plugin()
    assert "WARPWAVE is not available: vllm is 0.34.1" in caplog.text
    with pytest.raises(AttributeError, match="no attribute other"):
        _ = door.other
