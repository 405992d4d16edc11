"""Makes Triton's interpreter faster; the tests interpret hundreds of thousands of calls of device functions.

The interpreter replaces the functions of `triton.language` at every launch. It does the same at every call of a device
function, which takes it a third of the time of our kernels and changes nothing but `triton.language.core`. Here a
launch replaces both modules' functions, and a call runs the device function only. It makes a table of all types
whenever it needs NumPy's name of one, which takes a tenth of the time; here each type is looked up once. It spends a
quarter of the time on checks of integer sums and products for overflow, and ignores their results; here an overflow of
signed integers is an error, and a check takes one NumPy operation. It describes the shape of each tensor and of each
type anew, and compares types by name and shapes by size; here each shape is described once, and equal types and shapes
are found by identity.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

IN_NUMPY = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def patch() -> None:
    from triton import language
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    replace_functions, np_dtype_of = interpreter._patch_lang, interpreter._get_np_dtype
    np_dtypes: dict[str, Any] = {}
    # It replaces what it finds among the globals of a function.
    of_both = SimpleNamespace(__globals__={"tl": language, "core": language.core})

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    def np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype_of(dtype)
        return np_dtypes[name]

    def refuse_overflow(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        dtype = lhs.type.scalar
        if dtype.int_bitwidth < 64 and dtype.is_int_signed():
            wide = (x.handle.data.astype(np.int64) for x in (lhs, rhs))
            exact = IN_NUMPY[operation.__name__](*wide)
            bits = np.iinfo(f"int{dtype.int_bitwidth}")
            assert bits.min <= exact.min() and exact.max() <= bits.max, f"{dtype} overflows in {operation.__name__}"

    describe_type, describe_tensor = core.block_type.__init__, core.tensor.__init__
    equal, broadcast = core.dtype.__eq__, TritonSemantic.broadcast_impl_value
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}  # sizes -> a type and a tensor of the shape

    def first_of(type: Any) -> Any:
        made = object.__new__(core.tensor)
        describe_tensor(made, None, type)
        return made

    of_scalars = first_of(core.int32)

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        if sizes not in shapes:
            describe_type(self, element_ty, shape)
            shapes[sizes] = self, first_of(self)
        like, self.of_tensors = shapes[sizes]
        self.element_ty, self.shape, self.numel = element_ty, like.shape, like.numel
        self.name = f"<{sizes}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        like = type.of_tensors if type.is_block() else of_scalars
        self.handle, self.type, self.dtype, self.numel, self.shape = handle, type, type.scalar, like.numel, like.shape

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    TritonSemantic.broadcast_impl_value = lambda self, lhs, rhs: (
        (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)
    )
    interpreter._patch_lang = lambda fn: replace_functions(of_both)
    interpreter._get_np_dtype = np_dtype
    interpreter.InterpretedFunction.__call__ = call
    TritonSemantic.binary_op_sanitize_overflow_impl = refuse_overflow
