"""diffusers: warpwave in the attention layers of one model, by its attention processors.

    from warpwave.integrations import diffusers as door

    routing = door.route(pipeline.transformer)   # or pipeline.unet
    image = pipeline(prompt)
    routing.remove()

diffusers has no public way to add an attention backend: the list of its backends is closed. It has a public way to
replace a model's processors, which compute its attention layers. `route` replaces each processor by a copy that calls
the processor's own code, with torch's `scaled_dot_product_attention` computed by
`warpwave.integrations.pytorch.scaled_dot_product_attention`. Only calls of that function are routed: the backend of
the model must be diffusers' default, `native`.
"""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from warpwave.errors import InvalidInput, InvalidType
from warpwave.integrations import pytorch

__all__ = ["Routing", "route"]

log = logging.getLogger("warpwave")


class Routing:
    """A model whose attention layers are routed, until `remove`."""

    def __init__(self, model: Any, replaced: dict[str, Any], routed: dict[str, Any]) -> None:
        self._model, self._replaced, self._routed = model, replaced, routed

    def remove(self) -> None:
        """Restores the model's processors. Processors that were set after `route` stay. May be called again."""
        present = self._model.attn_processors
        ours = {name for name, processor in present.items() if processor is self._routed.get(name)}
        if ours:
            restored = {name: self._replaced[name] if name in ours else present[name] for name in present}
            self._model.set_attn_processor(restored)


def route(model: Any) -> Routing:
    """Routes the attention layers of a model through warpwave.

    Args:
        model: a model of diffusers with `attn_processors` and `set_attn_processor`: a transformer, UNet or autoencoder,
            not a pipeline.

    Returns:
        A `Routing`, whose `remove()` undoes it.

    Raises:
        InvalidType: the model has no processors that can be set.
        InvalidInput: the model has no attention layers, or is routed already.
    """
    if not (hasattr(model, "attn_processors") and hasattr(model, "set_attn_processor")):
        raise InvalidType(
            f"model is a {type(model).__name__}, which has no attn_processors; route a pipeline's transformer or unet"
        )
    replaced = dict(model.attn_processors)
    if not replaced:
        raise InvalidInput(f"model, a {type(model).__name__}, has no attention layers whose processors can be set")
    if any(isinstance(processor, _Routed) for processor in replaced.values()):
        raise InvalidInput(f"model, a {type(model).__name__}, is routed already; remove that routing first")
    routed = {name: _routed(processor) for name, processor in replaced.items()}
    model.set_attn_processor(dict(routed))
    kinds = sorted({type(processor).__name__ for processor in replaced.values()})
    log.info("%d attention processors of %s are routed: %s", len(routed), type(model).__name__, ", ".join(kinds))
    return Routing(model, replaced, routed)


class _Routed:
    """Marks a routed processor."""


def _routed(processor: Any) -> Any:
    """Returns a copy of a processor that shares its weights and routes torch's function while it runs."""
    found = copy.copy(processor)
    kind: Any = type(processor)
    found.__class__ = _routed_class(kind)
    return found


@functools.cache
def _routed_class(of: Any) -> Any:
    """Returns a subclass of a processor's class: models look at classes, and at the signature of `__call__`."""
    original: Any = of.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            with _Route():
                return original(self, *args, **named)
        # torch.compile cannot trace Tensor.unflatten inside a mode. While it traces, the name itself is replaced.
        before: Any = F.scaled_dot_product_attention
        ours: Any = pytorch.scaled_dot_product_attention
        F.scaled_dot_product_attention = ours
        try:
            return original(self, *args, **named)
        finally:
            F.scaled_dot_product_attention = before

    def reduce(self: Any) -> Any:  # pickle and deepcopy: no module has the class under its name
        plain = object.__new__(of)
        plain.__dict__.update(self.__dict__)
        return _routed, (plain,)

    body = {"__call__": call, "__reduce__": reduce, "__module__": of.__module__}
    return type(of.__name__, (of, _Routed), body)


class _Route(TorchFunctionMode):
    """Sends torch's function to warpwave's, in this thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        if func is pytorch.of_torch:
            return pytorch.scaled_dot_product_attention(*args, **(kwargs or {}))
        found: torch.Tensor = func(*args, **(kwargs or {}))
        return found
