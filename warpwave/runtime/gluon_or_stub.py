"""Gluon under one set of names, for what Triton 3.6 to 3.9 name differently.

Without Triton every name is a stub, as in `triton_or_stub`, so that kernels' claims and costs are available anywhere.
"""

from __future__ import annotations

import linecache
from typing import Any, dataclass_transform, get_type_hints

from warpwave.runtime.parameters import Pointer
from warpwave.runtime.triton_or_stub import NO_TRITON, tl

if NO_TRITON is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language import _core
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.language.core import _aggregate  # `gluon.aggregate` from 3.8 on

    # Renamed in 3.8; the old names raise from 3.9 on.
    tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
    tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
    block_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
    if hasattr(tma, "async_atomic_add"):  # from 3.8 on; the compiler has the instruction before
        tma_add = tma.async_atomic_add
    else:

        @_core.builtin
        def tma_add(desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
            """Adds a tile in shared memory to a tensor's by TMA; completes as a store does."""
            coord = _semantic._convert_to_ir_values(coord, require_i64=False)
            add = _core.ir.DESCRIPTOR_REDUCE_KIND.ADD
            _semantic.builder.create_async_tma_reduce(add, desc.handle, coord, src.handle)

    @_core.builtin
    def reinterpret(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
        """Returns shared memory as a tensor of another dtype, shape and layout. The method is public from 3.9 on."""
        method = getattr(memory, "reinterpret", None) or memory._reinterpret
        return method(dtype, shape, layout, _semantic=_semantic)

    @_core.builtin
    def warp_specialize(
        roles: Any, num_warps: Any, registers: Any, _semantic: Any = None, _generator: Any = None
    ) -> None:
        """Runs roles, each a function and its arguments, or () for an absent one. The first role has the warps of the
        launch; the others have `num_warps` and request `registers`."""
        kept = [role for role in roles if len(role)]
        others = [i for i, role in enumerate(roles[1:]) if len(role)]
        of_others = ([each[i] for i in others] for each in (num_warps, registers))
        gl.warp_specialize(kept, *of_others, _semantic=_semantic, _generator=_generator)

    @_core.builtin
    def with_fields(aggregate: Any, _semantic: Any = None, **changes: Any) -> Any:
        """Returns an aggregate with other values of some fields."""
        made = object.__new__(type(aggregate))  # the constructor takes groups, whose fields the aggregate has
        vars(made).update(vars(aggregate) | changes)
        return made

    constexpr_function = gluon.constexpr_function
    jit: Any = gluon.jit

    @dataclass_transform()
    def aggregate(cls: Any) -> Any:
        """Returns Gluon's aggregate of a class. A class without `__init__` gets one that takes all fields in order, as
        Triton 3.9 itself adds. A field of type `object` that is None becomes an empty tuple.

        A field whose type is a group (parameters.py) becomes the fields of the group, of which an absent pointer is an
        empty tuple. `cls(group)` takes the group as it is. Aggregates cannot hold groups: a constructor gets plain
        values in place of constants, and in Triton 3.6 no names.

        The source of a constructor is part of a kernel's cache key. It is therefore registered like that of a file.
        """
        groups = [isinstance(of, type) and issubclass(of, tuple) for of in cls.__annotations__.values()]
        if "__init__" not in vars(cls):
            fields, defaults = _fields_of(cls), {n: vars(cls)[n] for n in cls.__annotations__ if n in vars(cls)}
            taken, lines = ["self"], []
            for name, of in fields.items():
                taken.append(f"{name}={defaults[name]!r}" if name in defaults else name)
                value = {gl.constexpr: f"gl.constexpr({name})", object: f"gl.tuple([]) if {name} is None else {name}"}
                lines.append(f"    self.{name} = {value.get(of, name)}\n")
            for name in defaults:
                delattr(cls, name)  # the default is in the constructor
            cls.__annotations__ = fields
            lines.insert(0, f"def __init__({', '.join(taken)}):\n")
            file, scope = f"<fields of {cls.__module__}.{cls.__qualname__}>", {"gl": gl, "__name__": cls.__module__}
            linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
            exec(compile("".join(lines), file, "exec"), scope)
            scope["__init__"].__qualname__ = f"{cls.__qualname__}.__init__"
            cls.__init__ = constexpr_function(scope["__init__"])
        made = _aggregate(cls)
        if any(groups):
            made.groups, made.__new__ = groups, _taking_groups(groups, made.__new__)
        return made

    def _fields_of(cls: Any) -> dict[str, Any]:
        """Returns the fields of an aggregate's class, those of groups in the places of the groups."""
        in_aggregate = {Pointer: object, int: gl.tensor, float: gl.tensor}
        fields: dict[str, Any] = {}
        for name, of in cls.__annotations__.items():
            is_group = isinstance(of, type) and issubclass(of, tuple)
            found = get_type_hints(of, include_extras=True) if is_group else {name: of}
            fields |= {field: in_aggregate.get(hint, hint) for field, hint in found.items()}
        return fields

    def _taking_groups(groups: list[bool], make: Any) -> Any:
        """Returns `make`, which takes fields, as a function that takes groups where `groups` says so."""

        def __new__(cls: Any, *given: Any, **options: Any) -> Any:
            values: list[Any] = []
            for i, value in enumerate(given):
                values += list(value) if groups[i] else [value]
            return make(cls, *values, **options)

        return __new__

else:
    gluon = gl = mbarrier = tma = jit = aggregate = tl
    constexpr_function = tl.constexpr_function
    fence_async_shared = warpgroup_mma = warpgroup_mma_wait = tma_add = tma_load = tma_store = TensorDescriptor = tl
    block_barrier = reinterpret = warp_specialize = with_fields = tl

__all__ = [
    "TensorDescriptor",
    "aggregate",
    "block_barrier",
    "constexpr_function",
    "fence_async_shared",
    "gl",
    "jit",
    "mbarrier",
    "reinterpret",
    "tma",
    "tma_add",
    "tma_load",
    "tma_store",
    "warp_specialize",
    "warpgroup_mma",
    "warpgroup_mma_wait",
    "with_fields",
]
