"""vLLM: warpwave's paged kernels as an attention backend, registered by a general plugin.

    vllm serve ... --attention-backend WARPWAVE

Installing warpwave beside vLLM is enough: the package's entry point in the group `vllm.general_plugins` is `plugin`,
which adds the name and selects nothing. VLLM_PLUGINS, vLLM's list of the plugins to load, can leave it out.

Written against the interfaces of vLLM 0.33, to which `register` is limited. The backend serves decoder layers with
float16, bfloat16 and fp8 (e4m3) caches: prefill, chunked prefill, decode and batches of both, sliding windows, softcap,
ALiBi and sinks. `Backend`'s predicates refuse every other configuration before a model is loaded.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from warpwave.api import attention_with_kv_cache
from warpwave.errors import UnsupportedProblem
from warpwave.kv_cache import CacheLayer

__all__ = ["Backend", "Builder", "Implementation", "Metadata", "plugin", "register"]

log = logging.getLogger("warpwave")

NAME = "WARPWAVE"
VERSION = "0.33"
PAGE_SIZES = [16, 32, 64, 128, 256]  # of the GPU kernels; vLLM splits its blocks into pages of one of them
MAX_HEAD_DIM = 256
FLOAT8 = ("fp8", "fp8_e4m3")  # vLLM's names of caches of float8_e4m3fn with a factor for each tensor
FLOAT8_CAPABILITY = (8, 9)
LENGTH_STEP = 512  # tokens; each value of max_seqlen_k makes another plan


# Registration ---------------------------------------------------------------------------------------------------------


def register() -> None:
    """Adds the backend to vLLM under the name "WARPWAVE". May be called again.

    Raises:
        ImportError: vLLM is missing, or is not version 0.33.
    """
    installed = importlib.metadata.version("vllm")
    if not installed.startswith(f"{VERSION}."):
        raise ImportError(f"vllm is {installed}; warpwave's backend is written for {VERSION}")
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    if NAME not in registry.AttentionBackendEnum.__members__:
        registry.register_backend(NAME, f"{__name__}.WarpwaveBackend")


def plugin() -> None:
    """Calls `register`, for vLLM's loader of plugins. An error would end programs that use no part of warpwave, so a
    vLLM of another version is logged."""
    try:
        register()
    except ImportError as error:
        log.warning("the attention backend %s is not available: %s", NAME, error)


def __getattr__(name: str) -> Any:
    """Returns the classes that vLLM imports by name, which derive from its base classes."""
    if name.startswith("Warpwave"):
        return _classes()[name]
    raise AttributeError(f"module {__name__} has no attribute {name}")


@functools.cache
def _classes() -> dict[str, Any]:
    host: Any = importlib.import_module("vllm.v1.attention.backend")
    write = importlib.import_module("vllm.v1.attention.ops.triton_reshape_and_cache_flash")
    support = host.AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    bodies: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("WarpwaveBackend", (Backend, host.AttentionBackend), {}),
        ("WarpwaveBuilder", (Builder, host.AttentionMetadataBuilder), {"_cudagraph_support": support}),
        (
            "WarpwaveImplementation",
            (Implementation, host.AttentionImpl),
            {"write": staticmethod(write.triton_reshape_and_cache_flash)},
        ),
    ]
    return {name: type(name, bases, body | {"__module__": __name__}) for name, bases, body in bodies}


# What the backend takes -----------------------------------------------------------------------------------------------


class Backend:
    """What the backend takes, and its classes. The defaults of vLLM's base class refuse all features that are not
    named here: MLA, sparse attention, prefix-LM masks, encoders, context parallelism, batch invariance."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *FLOAT8]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> Any:
        return _classes()["WarpwaveImplementation"]

    @staticmethod
    def get_builder_cls() -> Any:
        return _classes()["WarpwaveBuilder"]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return PAGE_SIZES

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Returns whether rows of 16 bits are multiples of 16 bytes. Keys and values alternate in vLLM's cache, so that
        the values are aligned too; in fp8 they are with multiples of 16."""
        return head_size % 8 == 0 and 0 < head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Returns False: the host's lengths determine whether a batch is a plain decode step."""
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return tuple(capability) >= (8, 0)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *rest: Any, **others: Any
    ) -> str | None:
        """Returns why a combination is refused, None if it is not. `device_capability` is vLLM's last argument."""
        if kv_cache_dtype in FLOAT8:
            capability = tuple(others.get("device_capability") or rest[-1])
            if capability >= FLOAT8_CAPABILITY:
                return None
            return f"kv_cache_dtype is {kv_cache_dtype}; float8 needs compute capability 8.9, the GPU has {capability}"
        if kv_cache_dtype in (None, "auto") or kv_cache_dtype == str(dtype).removeprefix("torch."):
            return None
        return f"warpwave reads caches of the model's dtype, {dtype}, and fp8 ones; kv_cache_dtype is {kv_cache_dtype}"


# Metadata of a step ---------------------------------------------------------------------------------------------------


@dataclass
class Metadata:
    """What the layers of one step share. The tensors are vLLM's, which stay at their addresses: a CUDA graph reads the
    contents of later steps.

    Attributes:
        num_rows: rows of q, with the padding of a graph.
        num_tokens: rows of q that belong to requests.
        max_query_len: the most queries of a request.
        max_seq_len: the longest request, or a bound.
        query_start_loc: int32 (requests + 1,), offsets of the requests' queries.
        seq_lens: int32 (requests,), tokens of each request, the present ones included.
        block_table: int32 (requests, pages).
    """

    num_rows: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor

    @property
    def one_query_each(self) -> bool:
        """Whether every request, those that pad a graph's batch included, has exactly one row of q."""
        return self.max_query_len == 1 and self.num_rows == len(self.seq_lens)


class Builder:
    """Makes the metadata of a step. Steps with one query for each request may be captured in CUDA graphs."""

    vllm_config: Any

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """Returns the metadata of a step.

        Raises:
            UnsupportedProblem: the step is not causal.
        """
        common = common_attn_metadata
        if common.causal is not True:
            raise UnsupportedProblem("a step of vLLM is not causal", {}, "a model with causal attention")
        return Metadata(
            common.num_actual_tokens, int(common.query_start_loc_cpu[-1]), common.max_query_len, common.max_seq_len,
            common.query_start_loc, common.seq_lens, common.block_table_tensor,
        )  # fmt: skip

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        """Returns the metadata of a step to capture, whose launches must cover the longest request of later steps."""
        metadata = self.build(0, common_attn_metadata)
        metadata.max_seq_len = self.vllm_config.model_config.max_model_len
        return metadata


# Attention of a layer -------------------------------------------------------------------------------------------------


class Implementation:
    """One layer's attention."""

    write: Any  # vLLM's function that writes keys and values to slots of the cache

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Takes vLLM's arguments.

        Args:
            sliding_window: keys that a query sees, its own included.

        Raises:
            UnsupportedProblem: attention of an encoder.
        """
        if attn_type != "decoder":
            raise UnsupportedProblem(f"attn_type is {attn_type}", {}, "decoder layers")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.window = None if sliding_window is None else (sliding_window - 1, -1)
        self.softcap = float(logits_soft_cap or 0.0)
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks = sinks

    def _pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns keys and values of (pages, num_kv_heads, page_size, 2 * head_size) as pools of pages, in any memory
        layout of the first three axes. vLLM allocates float8 as bytes."""
        if self.kv_cache_dtype in FLOAT8:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        return kv_cache.transpose(1, 2).split(self.head_size, dim=-1)

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Writes a step's keys and values, (tokens, num_kv_heads, head_size), to the slots that vLLM assigned."""
        k, v = self._pages(kv_cache)
        self.write(key, value, k, v, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the attention of a step's queries to output.

        Args:
            query: (tokens, num_heads, head_size).
            key, value: not read: they are in the cache.
            kv_cache: (pages, num_kv_heads, page_size, 2 * head_size).
            attn_metadata: None in the run that measures memory, whose output is 0.
            output: (tokens, num_heads, head_size).

        Raises:
            UnsupportedProblem: a quantized output.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedProblem("output_scale was given; outputs are not quantized", {}, "no attention fusion")
        if attn_metadata is None:
            return output.fill_(0)
        step = attn_metadata
        k, v = self._pages(kv_cache)
        capacity = k.shape[1] * step.block_table.shape[1]
        if self.alibi_slopes is not None and self.alibi_slopes.device != query.device:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        said: dict[str, Any] = {
            "causal": True, "window_size": self.window, "softcap": self.softcap, "softmax_scale": self.scale,
            "alibi_slopes": self.alibi_slopes, "sinks": self.sinks,
            "max_seqlen_k": min(-(-step.max_seq_len // LENGTH_STEP) * LENGTH_STEP, capacity),
        }  # fmt: skip
        factors = (layer._k_scale, layer._v_scale) if self.kv_cache_dtype in FLOAT8 else ()
        cache = CacheLayer(k, v, step.block_table, step.seq_lens, *factors)
        if step.one_query_each:
            rows = slice(step.num_rows)
            attention_with_kv_cache(query[rows, None], cache, **said, out=output[rows, None])
        else:
            rows = slice(step.num_tokens)
            attention_with_kv_cache(
                query[rows], cache, cu_seqlens_q=step.query_start_loc, max_seqlen_q=step.max_query_len, **said,
                out=output[rows],
            )  # fmt: skip
        return output
