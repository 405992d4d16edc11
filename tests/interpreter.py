"""Makes calls of device functions in Triton's interpreter cheap; the tests interpret hundreds of thousands of them.

The interpreter replaces the functions of `triton.language` at every launch. It does the same at every call of a device
function, which takes it a third of the time of our kernels and changes nothing but `triton.language.core`. Here a
launch replaces both modules' functions, and a call runs the device function only.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def patch_at_launches_only() -> None:
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    # It replaces what it finds among the globals of a function.
    of_both = SimpleNamespace(__globals__={"tl": language, "core": language.core})

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = lambda fn: patch(of_both)
    interpreter.InterpretedFunction.__call__ = call
