"""transformers: warpwave as an attention implementation of its models, for generation and training.

    from warpwave.integrations import transformers as door

    registration = door.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="warpwave")
    registration.remove()

A model's attention is two functions under one name. `make_mask` describes a mask: plain causal and bidirectional masks,
windows, padding and packed documents stay descriptions of the size of a row; any other mask is built as a tensor, as
for `sdpa`. `attend` computes attention with it. Inside a graph that torch compiles or exports, a description is the
shape of a tensor. Continuous batching and returned attention weights are refused, and so is every argument that
`attend` does not know.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from warpwave.api import attention, attention_varlen
from warpwave.errors import InvalidInput, InvalidType, UnsupportedProblem

__all__ = ["Registration", "attend", "make_mask", "register"]

FIRST, BEFORE = (5, 17), (6, 0)  # versions of transformers whose interfaces this module was tested with
# Arguments of models that change nothing here: other layers or the cache read them.
NO_EFFECT = frozenset(
    ("cache_position", "logits_to_keep", "num_items_in_batch", "output_hidden_states", "position_ids", "return_dict",
     "use_cache")
)  # fmt: skip
# Models that add to their causal mask, or index it: it must be a tensor even for packed documents.
NEED_DENSE_MASKS = frozenset(("diffusion_gemma", "doge", "dots3_note", "falcon", "mistral_large4"))


# Registration ---------------------------------------------------------------------------------------------------------


_masking: Any = None  # transformers.masking_utils, once something is registered: compiled code cannot import


_registering = threading.Lock()
# name -> registrations that are not removed, and transformers' interfaces with what the name meant before the first
_registered: dict[str, tuple[int, list[tuple[Any, Any]]]] = {}


class Registration:
    """The two functions under a name in transformers, until `remove`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._removed = False

    def remove(self) -> None:
        """Restores what the name meant before, once no other registration of the name is left. Models that still use
        the name raise a KeyError then. May be called again. Functions that others registered since stay."""
        with _registering:
            if self._removed:
                return
            self._removed = True
            count, before = _registered.pop(self.name)
            if count > 1:
                _registered[self.name] = count - 1, before
                return
            for interface, previous in before:
                if interface().get(self.name) not in (attend, make_mask):
                    continue
                if previous is None:
                    interface._global_mapping.pop(self.name)  # transformers has no public way to remove a name
                else:
                    interface.register(self.name, previous)


def register(name: str = "warpwave") -> Registration:
    """Registers the attention function and the mask function for `attn_implementation=name`.

    Args:
        name: without "flash", which transformers takes for a package, and without "/" and "|", which it takes for a hub
            kernel; nor one of transformers' own, "eager" and "sdpa".

    Returns:
        A `Registration`, whose `remove()` undoes it.

    Raises:
        InvalidInput: a name that transformers would interpret.
        InvalidType: the name is not a str.
        ImportError: transformers is missing, or is older than 5.17 or newer than 5.
    """
    if not isinstance(name, str):
        raise InvalidType(f"name is {name!r}; it must be a str")
    if not name or "flash" in name or "/" in name or "|" in name or name in ("eager", "sdpa"):
        raise InvalidInput(
            f"name is {name!r}; it must not be empty, 'eager' or 'sdpa', and have no 'flash', '/' or '|', which have "
            "another meaning in transformers"
        )
    interfaces = _interfaces()
    with _registering:
        count, before = _registered.get(name, (0, [(interface, interface().get(name)) for interface in interfaces]))
        for interface, function in zip(interfaces, (attend, make_mask), strict=True):
            interface.register(name, function)
        _registered[name] = count + 1, before
    return Registration(name)


def _interfaces() -> tuple[Any, Any]:
    global _masking
    host: Any = importlib.import_module("transformers")
    version = tuple(int(part) for part in host.__version__.split(".")[:2])
    if not FIRST <= version < BEFORE:
        first, before = (".".join(map(str, limit)) for limit in (FIRST, BEFORE))
        raise ImportError(f"transformers is {host.__version__}; warpwave's functions need >= {first}, < {before}")
    _masking = importlib.import_module("transformers.masking_utils")
    return host.AttentionInterface, host.AttentionMaskInterface


# Masks ----------------------------------------------------------------------------------------------------------------


class Pattern(NamedTuple):
    """A mask that positions describe.

    Attributes:
        causal: whether a query sees no later key.
        window: keys a query sees on each side of its own position, which is included; -1 for unlimited.
        padded: whether the mask's tensor hides keys.
        documents: for packed documents, the offsets of all documents and the length of the longest.
    """

    causal: bool
    window: tuple[int, int] = (-1, -1)
    padded: bool = False
    documents: tuple[torch.Tensor, int] | None = None


# Tensors that `make_mask` returned -> what they stand for.
_patterns = WeakTensorKeyDictionary()


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **said: Any,
) -> torch.Tensor | None:
    """Returns the mask of a forward pass, for all layers of a kind; transformers calls it.

    Returns:
        One of:

        - None: `attend`'s is_causal describes the whole mask.
        - (batch, keys), boolean, True = visible: hides keys by padding. `attend` adds causality and window, aligned to
          the last of these keys. A cache may have more cells.
        - (batch, seqlen), int32: the document of each token.
        - (batch, 1, seqlen_q, keys), boolean: all of the mask.

        In graphs that are compiled or exported, where a tensor's shape alone can be read, the last two axes have sizes
        2 + left and 2 + right of a window, -1 for unlimited; the mask is equal along them, and they take no memory:

        - (batch, 1, keys or 0, 2 + left, 2 + right): hides keys by padding, as (batch, keys) above; 0 keys hide
          nothing.
        - (batch, 1, seqlen_q, keys, 2 + left, 2 + right): all of the mask of packed documents.
    """
    if attention_mask is not None and not torch.compiler.is_compiling() and attention_mask in _patterns:
        # `generate` makes the mask of a static cache before the model does, which takes two axes for padding of all
        # tokens. A window's mask begins at kv_offset.
        return attention_mask
    if config is not None and not _calls_the_interface(type(config).__module__):
        raise UnsupportedProblem(
            f"the attention of {config.model_type} is its own code, which calls no registered attention function",
            {},
            "attn_implementation='eager'",
        )
    mask_function = mask_function or _masking.causal_mask_function
    tracing = torch.compiler.is_compiling() or _is_traced(attention_mask, q_offset)
    skips = (allow_is_causal_skip, allow_is_bidirectional_skip)
    pattern = None if use_vmap else _recognized(mask_function, *skips, local_size, config)
    if pattern is not None and not (tracing and isinstance(q_offset, torch.Tensor)):
        q_begin, k_begin = int(q_offset), int(kv_offset)
        # Cells of a static cache that are not written yet; a mask without positions reads all cells.
        by_position = pattern.causal or pattern.window != (-1, -1)
        beyond = k_begin + kv_length - q_begin - q_length if by_position else 0
        if beyond == 0 or (pattern.causal and beyond > 0):
            return _of_pattern(
                pattern, batch_size, q_length, kv_length - beyond, q_begin, k_begin, attention_mask, kv_length, device,
                tracing,
            )  # fmt: skip
    packed = None
    may_be_packed = not (use_vmap or attention_mask is not None or any(skips))
    if may_be_packed and getattr(config, "model_type", "") not in NEED_DENSE_MASKS:
        packed = _packed(mask_function, local_size, config, tracing)
    if packed is not None and packed[1] is not None:
        return _of_documents(packed[0], packed[1])
    dense: torch.Tensor | None = _masking.sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, local_size=local_size, use_vmap=use_vmap,
        allow_is_causal_skip=allow_is_causal_skip and tracing,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and tracing,
        device=device, config=config, **said,
    )  # fmt: skip
    if packed is not None and dense is not None:
        return _with_window(dense, packed[0], packed[0].window)
    return dense


def _calls_the_interface(module: str) -> bool:
    """Returns whether the layers of a model call the functions of transformers' interface, by the rule by which
    transformers itself lets a model change its implementation: a module that defines attention layers imports the
    interface. Other modules take their layers from elsewhere.

    transformers refuses "sdpa" for the other models, but no registered name.

    Args:
        module: of the model's config.
    """
    found = sys.modules.get(module.replace(".configuration_", ".modeling_"))
    if found is None or hasattr(found, "ALL_ATTENTION_FUNCTIONS"):
        return True
    own = [c for c in vars(found).values() if isinstance(c, type) and c.__module__ == found.__name__]
    return not any("Attention" in c.__name__ and torch.nn.Module in c.__bases__ for c in own)


def _of_pattern(
    pattern: Pattern,
    batch: int,
    q_length: int,
    keys: int,
    q_offset: int,
    kv_offset: int,
    padding: torch.Tensor | None,
    cells: int,
    device: torch.device | str,
    tracing: bool,
) -> torch.Tensor | None:
    """Returns the mask of a pattern over the first `keys` cells of `cells`."""
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + keys]
        missing = keys - padding.shape[1]
        if missing:
            padding = torch.nn.functional.pad(padding, (0, missing))
        if not tracing and padding.all():
            padding = None
    left, right = pattern.window
    far = q_offset + q_length - 1 - kv_offset  # the distance of the last query to the first key
    if left >= far and (pattern.causal or right < 0 or right >= kv_offset + keys - 1 - q_offset):
        left = right = -1
    plain = left < 0 and right < 0
    # None means to `attend`: one query sees all keys, and masks of equal lengths are causal or full.
    if padding is None and plain and (not pattern.causal or keys == q_length or (q_length == 1 and keys == cells)):
        return None
    if tracing:
        if padding is None:
            padding = torch.ones(batch, keys if keys < cells else 0, dtype=torch.bool, device=device)
        return _with_window(padding[:, None], pattern, (left, right))
    # `generate` makes masks contiguous, and the pattern is kept under this tensor, not under a copy.
    mask = torch.ones(batch, keys, dtype=torch.bool, device=device) if padding is None else padding.contiguous()
    _patterns[mask] = Pattern(pattern.causal, (left, right), padding is not None)
    return mask


def _of_documents(pattern: Pattern, segments: torch.Tensor) -> torch.Tensor:
    """Returns the mask of packed documents. Waits for the device, once for a forward pass."""
    mask = segments.to(torch.int32, copy=True)
    _patterns[mask] = pattern._replace(documents=_documents(mask))
    return mask


def _documents(segments: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns the offsets of the documents of all rows in order, and the longest length."""
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    offsets = begins.flatten().nonzero().flatten()
    offsets = torch.cat([offsets, offsets.new_tensor([segments.numel()])]).to(torch.int32)
    return offsets, int(offsets.diff().max())


def _with_window(mask: torch.Tensor, pattern: Pattern, window: tuple[int, int]) -> torch.Tensor:
    """Returns a view of a mask whose last two axes are a window, by their sizes; right of a causal one is 0."""
    left, right = window
    return mask[..., None, None].expand(*mask.shape, 2 + left, 2 + (0 if pattern.causal else right))


def _window_of(mask: torch.Tensor) -> tuple[torch.Tensor, Pattern]:
    """Returns the mask and the pattern that `_with_window` joined, of a row of keys or of packed documents."""
    left, right = mask.shape[-2] - 2, mask.shape[-1] - 2
    causal, mask = right == 0, mask[..., 0, 0]
    pattern = Pattern(causal, (left, -1 if causal else right), padded=mask.shape[-1] > 0)
    return mask if mask.dim() == 4 else mask[:, 0], pattern


def _recognized(
    function: Any, skips_causal: bool, skips_both: bool, local_size: int | None, config: Any
) -> Pattern | None:
    """Returns the pattern of a mask that transformers lets a function skip; None for all other masks.

    transformers allows it for masks that causality, or both directions, and local_size describe alone. local_size is
    a window or the length of chunks; the model's config has both under their names.
    """
    if not (skips_causal or skips_both):
        return None
    if function is _masking.causal_mask_function or function is _masking.bidirectional_mask_function:
        causal = function is _masking.causal_mask_function
        return Pattern(causal) if causal == skips_causal else None
    left = _window(local_size, config)
    if left is None:
        return None
    return Pattern(True, (left - 1, -1)) if skips_causal else Pattern(False, (left, left))


def _window(local_size: int | None, config: Any) -> int | None:
    """Returns local_size if it is a window, None if it may be the length of chunks."""
    if local_size is None or getattr(config, "attention_chunk_size", None) == local_size:
        return None
    return local_size if getattr(config, "sliding_window", None) == local_size else None


def _packed(
    function: Any, local_size: int | None, config: Any, tracing: bool
) -> tuple[Pattern, torch.Tensor | None] | None:
    """Returns the pattern within documents and the document of each token, which is None in a graph; None if a mask is
    not that of packed documents, or of something else too.

    transformers passes the documents of position ids only to the mask's function.
    """
    if getattr(function, "__name__", "") != "and_mask":
        return None
    window = _window(local_size, config)
    if local_size is not None and window is None:
        return None
    pattern = Pattern(True, (-1 if window is None else window - 1, -1))
    if tracing:
        return pattern, None
    parts: Any = inspect.getclosurevars(function).nonlocals.get("mask_functions", ())
    made = [inspect.getclosurevars(part).nonlocals for part in parts]
    packed = [found["packed_sequence_mask"] for found in made if "packed_sequence_mask" in found]
    if len(made) != 2 or len(packed) != 1:
        return None
    (i,) = (i for i, found in enumerate(made) if "packed_sequence_mask" not in found)
    # From 5.23 on, a function that gives positions within documents to the pattern's.
    within = made[i]["mask_function"] if "position_ids" in made[i] else parts[i]
    if window is None and within is not _masking.causal_mask_function:
        return None
    return pattern, packed[0]


def _is_traced(*values: Any) -> bool:
    """Returns whether a value's contents cannot be read: a stand-in of torch's tracers."""
    kinds = (torch._subclasses.FakeTensor, torch.fx.Proxy)
    return any(isinstance(value, kinds) for value in values)


# Attention ------------------------------------------------------------------------------------------------------------


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Computes a layer's attention; transformers calls it.

    Args:
        module: the layer; its `is_causal` counts if the argument is None.
        query: (batch, num_heads_q, seqlen_q, head_dim).
        key, value: (batch, num_heads_kv, seqlen_k, head_dim or head_dim_v).
        attention_mask: what `make_mask` returned, or a mask (batch, 1 or num_heads_q, seqlen_q, seqlen_k), boolean or
            added to the scores.
        dropout: probability of dropout; models pass 0 outside of training.
        scaling: 1/sqrt(head_dim) if None.
        sliding_window: keys that a query sees, its own included. Read only for a padding mask that is not
            `make_mask`'s: its masks hold their window.
        s_aux: (num_heads_q,): sinks.
        position_bias: (batch or 1, num_heads_q, seqlen_q, seqlen_k), added to the scores.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed documents in a batch of one row; in a graph
            they stand for the documents that `make_mask` found in position ids.

    Returns:
        (batch, seqlen_q, num_heads_q, head_dim_v), and None for the attention weights.

    Raises:
        UnsupportedProblem: a mask or a position_bias beside packed documents, or an unknown argument.
        InvalidType: a mask of integers that `make_mask` did not make.
    """
    if others:
        _check(others)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    sinks = None if s_aux is None else _sinks(s_aux, query)
    # softcap=None would cost `attention` six calls of functions, to convert it to 0.0.
    said: dict[str, Any] = {
        "softmax_scale": scaling, "softcap": 0.0 if softcap is None else softcap, "sinks": sinks,
        "dropout_p": dropout,
    }  # fmt: skip
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if attention_mask is None and cu_seq_lens_q is None:
        causal = bool(is_causal) and q.shape[1] > 1
        if causal and k.shape[1] > q.shape[1]:  # an empty static cache: only the queries' own cells are written
            k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
            position_bias = None if position_bias is None else position_bias[..., : q.shape[1]]
        return attention(q, k, v, causal=causal, mask=None, bias=position_bias, **said), None
    pattern = None
    if attention_mask is not None and attention_mask.dim() > 4:
        attention_mask, pattern = _window_of(attention_mask)
        if cu_seq_lens_q is not None and attention_mask.dim() == 4:
            attention_mask = None
    elif attention_mask is not None and not torch.compiler.is_compiling():
        pattern = _patterns.get(attention_mask)
    if pattern is None:
        window = -1 if sliding_window is None else sliding_window - 1
        pattern = Pattern(bool(is_causal), (window, -1 if is_causal else window), padded=True)
    documents = pattern.documents
    if attention_mask is not None and documents is None and not _is_visible_or_added(attention_mask):
        documents = _documents(attention_mask)  # of a copy of `make_mask`'s tensor
    if documents is not None or cu_seq_lens_q is not None:
        if documents is None and attention_mask is not None and pattern.padded:
            raise UnsupportedProblem("cu_seq_lens_q was given with a mask", {}, "one of them")
        if position_bias is not None:
            raise UnsupportedProblem("attention_varlen takes no position_bias beside packed documents", {}, "padding")
        offsets: Any = (cu_seq_lens_q, cu_seq_lens_k) if documents is None else (documents[0],) * 2
        longest: Any = (max_length_q, max_length_k) if documents is None else (documents[1],) * 2
        out = attention_varlen(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1],
            max_seqlen_q=longest[0], max_seqlen_k=longest[1], causal=pattern.causal, window_size=pattern.window,
            **said,
        )  # fmt: skip
        return out.unflatten(0, (len(q), -1)), None
    mask, bias, causal = None, position_bias, False
    assert attention_mask is not None
    if attention_mask.dim() == 2:
        keys = attention_mask.shape[1] or k.shape[1]
        if keys < k.shape[1]:
            k, v = k[:, :keys], v[:, :keys]
            bias = None if bias is None else bias[..., :keys]
        mask = attention_mask[:, None, None] if pattern.padded else None
        causal = pattern.causal
        said["window_size"] = pattern.window
    elif attention_mask.dtype == torch.bool:
        mask = attention_mask
    else:
        bias = attention_mask if bias is None else bias + attention_mask
    out = attention(q, k, v, causal=causal, mask=mask, bias=bias, **said)
    return out, None


def _is_visible_or_added(mask: torch.Tensor) -> bool:
    """Returns whether a mask is boolean or added to the scores; False if it holds documents.

    Raises:
        InvalidType: neither of these. A tokenizer's mask of ones and zeros must not be read as two documents.
    """
    if mask.dtype == torch.bool or mask.is_floating_point():
        return True
    if mask.dtype == torch.int32 and mask.dim() == 2:
        return False
    raise InvalidType(
        f"attention_mask is {mask.dtype} with {mask.dim()} axes; it must be boolean (True = visible), a float that is "
        "added to the scores, or what the mask function made"
    )


def _check(others: Mapping[str, Any]) -> None:
    """Raises UnsupportedProblem for what would be computed without one of the model's arguments."""
    for name, argument in others.items():
        if name not in NO_EFFECT and argument is not None and argument is not False:
            raise UnsupportedProblem(
                f"the model passes {name}, which warpwave does not support", {}, "attn_implementation='eager'"
            )


def _sinks(s_aux: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Returns sinks in a dtype that the call takes: parameters may have another dtype than activations."""
    return s_aux if s_aux.dtype == query.dtype else s_aux.float()
