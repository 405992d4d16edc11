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
    def replaced(aggregate: Any, _semantic: Any = None, **changes: Any) -> Any:
        """Returns an aggregate with other values of some fields."""
        names = [name for name, _ in aggregate.type.fields]
        return type(aggregate)(*(changes.get(name, getattr(aggregate, name)) for name in names))

    constexpr_function = gluon.constexpr_function
    jit: Any = gluon.jit

    def _with_group(cls: Any) -> Any:
        """Returns a plain class with the fields of a group (parameters.py), then those of the class derived from it."""
        of_kernel = {Pointer: object, int: gl.tensor, float: gl.tensor}
        fields = {name: of_kernel.get(of, of) for name, of in get_type_hints(cls, include_extras=True).items()}
        kept = fields.keys() if "_fields" not in vars(cls) else ()  # a group's own attributes are no defaults
        defaults = {name: vars(cls)[name] for name in kept if name in vars(cls)}
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        return type(cls.__name__, (), {**names, **defaults, "__annotations__": fields})

    @dataclass_transform()
    def aggregate(cls: Any) -> Any:
        """Returns Gluon's aggregate of a class. A class without `__init__` gets one that takes all fields in order, as
        Triton 3.9 itself adds. A field of type `object` that is None becomes an empty tuple.

        A class may be a group (parameters.py) or be derived from one. It then has the group's fields first, and is made
        as `cls(*group, ...)`. Device functions can return an aggregate, and other aggregates can hold it, but no group.
        An absent pointer of the group becomes an empty tuple.

        The source of a constructor is part of a kernel's cache key. It is therefore registered like that of a file.
        """
        if issubclass(cls, tuple):
            cls = _with_group(cls)
        if "__init__" not in vars(cls):
            fields, taken, lines = cls.__annotations__, ["self"], []
            for name, of in fields.items():
                taken.append(f"{name}={vars(cls)[name]!r}" if name in vars(cls) else name)
                value = {gl.constexpr: f"gl.constexpr({name})", object: f"gl.tuple([]) if {name} is None else {name}"}
                lines.append(f"    self.{name} = {value.get(of, name)}\n")
            for name in fields.keys() & vars(cls).keys():
                delattr(cls, name)  # the default is in the constructor
            lines.insert(0, f"def __init__({', '.join(taken)}):\n")
            file, scope = f"<fields of {cls.__module__}.{cls.__qualname__}>", {"gl": gl, "__name__": cls.__module__}
            linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
            exec(compile("".join(lines), file, "exec"), scope)
            scope["__init__"].__qualname__ = f"{cls.__qualname__}.__init__"
            cls.__init__ = constexpr_function(scope["__init__"])
        return _aggregate(cls)

else:
    gluon = gl = mbarrier = tma = jit = constexpr_function = aggregate = tl
    fence_async_shared = warpgroup_mma = warpgroup_mma_wait = tma_add = tma_load = tma_store = TensorDescriptor = tl
    block_barrier = reinterpret = replaced = tl

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
    "replaced",
    "tma",
    "tma_add",
    "tma_load",
    "tma_store",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
