"""Groups of parameters: the value of each parameter, and the values that Triton specializes."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

import warpwave
from warpwave.kernels import groups
from warpwave.runtime import parameters, triton_or_stub
from warpwave.runtime.parameters import Pointer, Specialized
from warpwave.runtime.triton_or_stub import tl

pytestmark = pytest.mark.skipif(triton_or_stub.NO_TRITON is not None, reason="Triton is published for Linux only")


class Lines(NamedTuple):
    ptr: Pointer
    stride_m: int
    stride_d: Specialized


class Rules(NamedTuple):
    bias: Lines
    cap: float
    HAS_BIAS: tl.constexpr


def source(x: Lines, rules: Rules, sinks_ptr, length, units, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    ...


ONE = Specialized(1)
UNITS = 4  # the place of an argument that Triton must not specialize
KERNEL = SimpleNamespace(
    __name__="source", fn=source, params=[SimpleNamespace(do_not_specialize=i == UNITS) for i in range(6)]
)
CONSTANTS = {"BLOCK": 64, "HAS_BIAS": True}


@pytest.fixture
def kernel() -> Any:
    class Kernel(SimpleNamespace):
        __hash__ = object.__hash__  # type: ignore[assignment]

    return Kernel(**vars(KERNEL))


def test_each_field_is_a_parameter(kernel: Any) -> None:
    found = parameters.parameters(kernel)
    assert [(p.name, p.path) for p in found] == [
        ("ptr", (0, 0)), ("stride_m", (0, 1)), ("stride_d", (0, 2)),
        ("ptr", (1, 0, 0)), ("stride_m", (1, 0, 1)), ("stride_d", (1, 0, 2)), ("cap", (1, 1)), ("HAS_BIAS", (1, 2)),
        ("sinks_ptr", (2,)), ("length", (3,)), ("units", (4,)), ("BLOCK", (5,)),
    ]  # fmt: skip
    assert "".join(p.kind[0] for p in found) == "tsstsssctssc"
    assert [p.name for p in found if p.specialized and p.kind == "scalar"] == ["stride_d", "stride_d", "length"]


def test_values_go_where_the_source_has_them(kernel: Any) -> None:
    tensors, scalars = ["x", "bias", "sinks"], [8, 1, 16, 1, 0.5, 100, 7]
    values = parameters.in_order(kernel, tensors, scalars, CONSTANTS)
    x, rules, sinks, length, units, block = parameters.grouped(kernel, values)
    assert (x, rules.bias, rules.cap) == (Lines("x", 8, ONE), Lines("bias", 16, ONE), 0.5)
    assert isinstance(rules.HAS_BIAS, tl.constexpr) and rules.HAS_BIAS.value is True
    assert (sinks, length, units, block) == ("sinks", 100, 7, 64)
    assert list(parameters.flat((x, rules, sinks, length, units, block))) == values
    arranged = parameters.arranger(kernel)(*scalars)(*tensors)
    assert arranged == (("x", 8, 1), (("bias", 16, 1), 0.5, None), "sinks", 100, 7, None)


def test_a_value_too_many_is_an_error(kernel: Any) -> None:
    with pytest.raises(AssertionError, match="more than it takes"):
        parameters.in_order(kernel, ["x", "bias", "sinks", "more"], [8, 1, 16, 1, 0.5, 100, 7], CONSTANTS)


@pytest.mark.parametrize("other", [1, 8, 16, 2**31 - 1])
def test_a_length_is_not_what_is_compiled_for(kernel: Any, other: int) -> None:
    """Triton would compile again for 1 and for multiples of 16, for `do_not_specialize` does not apply in tuples."""

    def compiled(stride_m: int, stride_d: int) -> list[Any]:
        scalars = [stride_m, stride_d, 16, 1, 0.5, 100, 7]
        values = parameters.in_order(kernel, [None, None, None], scalars, CONSTANTS)
        return [str(value) for value in parameters.unspecialized(kernel, values)]

    assert compiled(other, 1) == compiled(7, 1)
    assert compiled(2**31, 1) != compiled(7, 1) == compiled(-(2**31), 1)
    assert compiled(7, 16) != compiled(7, 1)


def test_a_device_function_that_reads_fields_takes_one_class_of_group() -> None:
    """Triton compiles a device function once for arguments of the same types, and the type of a tuple does not state
    its fields. Of two groups with the same types in another order, the second would get the fields of the first."""
    fields = {field for group in vars(groups).values() if hasattr(group, "_fields") for field in group._fields}
    unnamed = []
    for path in (Path(warpwave.__file__).parent / "kernels").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if "gluon_or_stub" in source:  # Gluon's aggregates are told apart by their class
            continue
        for function in (f for f in ast.walk(ast.parse(source)) if isinstance(f, ast.FunctionDef)):
            if not any("jit" in ast.dump(decorator) for decorator in function.decorator_list):
                continue
            bare = {argument.arg for argument in function.args.args if argument.annotation is None}
            unnamed += [
                f"{path.name}: {function.name}({node.value.id}) reads .{node.attr}"
                for node in ast.walk(function)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
                if node.value.id in bare and node.attr in fields
            ]
    assert not unnamed
