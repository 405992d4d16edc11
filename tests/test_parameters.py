"""Groups of parameters: the value of each, what Triton specializes, and the class that each device function gets."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import linecache
import pkgutil
import sys
import textwrap
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, get_type_hints

import pytest
import torch

from tests.marks import needs_triton
from warpwave import kernels
from warpwave.kernels import groups, primitives
from warpwave.runtime import parameters
from warpwave.runtime.launch import Anywhere
from warpwave.runtime.parameters import Pointer, Specialized
from warpwave.runtime.triton_or_stub import tl

pytestmark = needs_triton


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


def _is_device_function(value: Any) -> bool:
    return inspect.isfunction(getattr(value, "fn", None))


def _class_of(node: ast.expr, known: dict[str, Any], module: ModuleType) -> Any:
    """The class of group that an expression of device code has, or None."""
    found: Any = None
    if isinstance(node, ast.Name):
        found = known.get(node.id)
    elif isinstance(node, ast.Attribute):
        holder = _class_of(node.value, known, module)
        found = get_type_hints(holder).get(node.attr) if holder else None
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        called = getattr(getattr(module, node.func.id, None), "fn", None)
        found = get_type_hints(called).get("return") if called else None
    return found if parameters._is_group(found) else None


def wrong_groups(module: ModuleType) -> list[str]:
    """The calls of device functions that pass a group of another class than the parameter's."""
    wrong = []
    for name, function in vars(module).items():
        if not _is_device_function(function) or function.fn.__module__ != module.__name__:
            continue
        known = {k: c for k, c in get_type_hints(function.fn).items() if parameters._is_group(c)}
        body = ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
        for node in ast.walk(body):  # outer statements first
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                made = _class_of(node.value, known, module)
                if made:
                    known[node.targets[0].id] = made
        for call in (n for n in ast.walk(body) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)):
            called = getattr(module, call.func.id, None)  # type: ignore[attr-defined]
            if not _is_device_function(called):
                continue
            hints = get_type_hints(called.fn)  # type: ignore[union-attr]
            for parameter, given in zip(inspect.signature(called.fn).parameters, call.args, strict=False):  # type: ignore
                takes = hints.get(parameter)
                passed = _class_of(given, known, module)
                # The name that `in_elements` takes has another class afterwards.
                changes = called.fn is primitives.in_elements.fn and passed is groups.Tokens  # type: ignore[union-attr]
                if passed is not (takes if parameters._is_group(takes) else None) and not changes:
                    wrong.append(f"{name}: {ast.unparse(call)} passes {passed} as {parameter}: {takes}")
    return wrong


MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")
    if "gluon" not in (importlib.util.find_spec(found.name).origin or "")  # type: ignore[union-attr]
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.removeprefix("warpwave.kernels."))
def test_device_functions_get_the_class_of_group_that_they_take(module: ModuleType) -> None:
    """Triton compiles a device function once for arguments of the same types, and the type of a tuple does not state
    its fields. Of two groups with the same types in another order, the second would get the fields of the first."""
    assert wrong_groups(module) == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.removeprefix("warpwave.kernels."))
def test_no_kernel_takes_an_argument_of_tritons(module: ModuleType) -> None:
    """Triton generates a function with a kernel's arguments and its own `options`."""
    for name, function in vars(module).items():
        if name.endswith("_kernel") and _is_device_function(function):
            assert "options" not in inspect.signature(function.fn).parameters, name


class Turned(NamedTuple):
    ptr: Pointer
    stride_d: Specialized
    stride_m: int


def test_a_group_of_another_class_is_found() -> None:
    source = """
@jit
def row_of(x: Lines, row):
    return x.ptr + row * x.stride_m

@jit
def kernel(x: Lines, rules: Rules, y: Turned, BLOCK: tl.constexpr):
    a = row_of(x, 1) + row_of(rules.bias, 2)
    z = y
    b = row_of(z, 3)
"""
    made = ModuleType("made")
    sys.modules["made"] = made
    linecache.cache["made"] = (len(source), None, source.splitlines(True), "made")
    vars(made).update(jit=lambda f: SimpleNamespace(fn=f, arg_names=()), Lines=Lines, Rules=Rules, Turned=Turned, tl=tl)
    exec(compile(source, "made", "exec"), vars(made))
    (found,) = wrong_groups(made)
    assert "row_of(z, 3)" in found and "Turned" in found


@pytest.mark.parametrize("first", [0, 1])
def test_on_amd_no_kernel_is_compiled_for_small_tensors_alone(first: int) -> None:
    """Triton marks tensors below 2 GiB with an S, and compiles offsets of 32 bits for them."""
    specialize = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    backend = pytest.importorskip("triton.backends.amd.compiler").HIPBackend
    tensor = torch.empty(64)[first:]
    alone, stand_in = (specialize(backend, x, False, True, True) for x in (tensor, Anywhere(tensor)))
    assert "S" in alone[1], "Triton still does"
    assert stand_in == (alone[0], alone[1].replace("S", ""))
