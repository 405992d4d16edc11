"""Makes Triton's interpreter faster; the tests interpret hundreds of thousands of calls of device functions.

The interpreter replaces the functions of `triton.language` at every launch. It does the same at every call of a device
function, which takes it a third of the time of our kernels and changes nothing but `triton.language.core`. Here a
launch replaces both modules' functions, and a call runs the device function only. It makes a table of all types
whenever it needs NumPy's name of one, which takes a tenth of the time; here each type is looked up once. It spends
a quarter of the time on checks of integer sums and products for overflow, and ignores their results; here an overflow
of signed integers is an error, and a check takes one NumPy operation.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

IN_NUMPY = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def patch() -> None:
    from triton import language
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

    interpreter._patch_lang = lambda fn: replace_functions(of_both)
    interpreter._get_np_dtype = np_dtype
    interpreter.InterpretedFunction.__call__ = call
    TritonSemantic.binary_op_sanitize_overflow_impl = refuse_overflow
