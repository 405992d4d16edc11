"""Lists a kernel's parameters, and flattens those that are passed as one argument.

A kernel may take several parameters as one argument, a group: a `typing.NamedTuple` of pointers, numbers, compile-time
constants or further groups. Each field is a parameter of the compiled kernel. A launch keeps the values in three flat
lists (`Launch.tensors`, `scalars`, `constants`), so a new length replaces one list and builds no groups. This module
assigns the values to the parameters.

Triton specializes every integer of a tuple, because `do_not_specialize` applies to whole arguments only. Each new
length could therefore compile another variant. The launcher instead compiles with other integers in their place
(`unspecialized`), and launches the compiled kernel directly.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, NamedTuple, NewType, get_type_hints

from warpwave.runtime.triton_or_stub import tl

Pointer = Annotated[Any, "address"]  # annotates an address in a group: a tensor, or None if it is absent
# Annotates an integer of a group that Triton specializes for 1 and for multiples of 16.
Specialized = NewType("Specialized", int)
ANY_INTEGER, ANY_LONG = 3, 2**32 + 3  # integers of 32 and of 64 bits that Triton does not specialize
_ADDRESS = re.compile(r"(^|_)(ptr|map)(_\d)?$")


class Parameter(NamedTuple):
    """One parameter of a kernel.

    Attributes:
        name: of the argument, or of the field of a group.
        path: the index of the argument, then the indices in the nested groups.
        kind: "constant" for a compile-time constant, "tensor" for a `Pointer` of a group or an argument whose name ends
            in ptr or map, else "scalar".
        specialized: whether Triton specializes an integer for 1 and for multiples of 16.
    """

    name: str
    path: tuple[int, ...]
    kind: str
    specialized: bool


@cache
def parameters(kernel: Any) -> tuple[Parameter, ...]:
    """Returns all parameters of a kernel, in the order of its source."""
    found: list[Parameter] = []
    of_triton = getattr(kernel, "params", ())  # the interpreter has none, and specializes nothing
    for place, (name, annotation) in enumerate(_arguments(kernel)):
        specialized = bool(of_triton) and not of_triton[place].do_not_specialize
        found += _inside(name, (place,), annotation, specialized)
    return tuple(found)


@cache
def _arguments(kernel: Any) -> tuple[tuple[str, Any], ...]:
    """Returns name and annotation of each argument; None if it has no annotation."""
    annotations = get_type_hints(kernel.fn)
    return tuple((name, annotations.get(name)) for name in inspect.signature(kernel.fn).parameters)


@cache
def _fields(group: Any) -> tuple[tuple[str, Any], ...]:
    """Returns name and annotation of each field of a group."""
    return tuple(get_type_hints(group, include_extras=True).items())


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, tuple)


def _inside(name: str, path: tuple[int, ...], annotation: Any, specialized: bool) -> Iterator[Parameter]:
    if _is_group(annotation):
        for place, (field, of_field) in enumerate(_fields(annotation)):
            yield from _inside(field, (*path, place), of_field, of_field is Specialized)
    else:
        in_group = len(path) > 1
        is_address = annotation == Pointer if in_group else _ADDRESS.search(name)
        kind = "constant" if annotation is tl.constexpr else "tensor" if is_address else "scalar"
        yield Parameter(name, path, kind, specialized)


def in_order(kernel: Any, tensors: Sequence[Any], scalars: Sequence[Any], constants: Mapping[str, Any]) -> list[Any]:
    """Returns the value of each parameter, in the order of the kernel's source. A constant of a group is a
    `tl.constexpr`, because Triton would treat a plain number as a run-time value."""
    given = {"tensor": iter(tensors), "scalar": iter(scalars)}
    values: list[Any] = []
    for parameter in parameters(kernel):
        if parameter.kind != "constant":
            values.append(next(given[parameter.kind]))
        elif len(parameter.path) == 1:
            values.append(constants[parameter.name])
        else:
            values.append(tl.constexpr(constants[parameter.name]))
    assert not any(len(list(rest)) for rest in given.values()), f"{kernel.__name__} is given more than it takes"
    return values


def unspecialized(kernel: Any, values: Iterable[Any]) -> list[Any]:
    """Returns values to compile with: each integer that must not be specialized is replaced by one of its width that
    Triton does not specialize."""
    found = []
    for parameter, value in zip(parameters(kernel), values, strict=True):
        free = value.__class__ is int and parameter.kind == "scalar" and not parameter.specialized
        found.append((ANY_INTEGER if -(2**31) <= value < 2**31 else ANY_LONG) if free else value)
    return found


def grouped(kernel: Any, values: Iterable[Any]) -> list[Any]:
    """Returns the kernel's arguments, built from one value for each parameter."""
    left = iter(values)
    return [_made(annotation, left) for _, annotation in _arguments(kernel)]


def _made(annotation: Any, left: Iterator[Any]) -> Any:
    if not _is_group(annotation):
        return next(left)
    return annotation(*(_made(of_field, left) for _, of_field in _fields(annotation)))


def flat(arguments: Iterable[Any]) -> Iterator[Any]:
    """Yields the arguments, with tuples replaced by their elements."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from flat(argument)
        else:
            yield argument


@cache
def arranger(kernel: Any) -> Callable[..., Callable[..., tuple[Any, ...]]]:
    """Returns `make(*scalars)`, which returns `arrange(*tensors)`, which returns a kernel's arguments as Triton's
    launcher takes them: plain tuples instead of named ones, and None for the constants, which it ignores.

    Every launch calls `arrange`. It is generated as one expression, which takes a tenth of the time of `grouped`.
    """
    kinds = [parameter.kind for parameter in parameters(kernel)]
    names = ["None" if kind == "constant" else f"{kind}_{i}" for i, kind in enumerate(kinds)]
    scalars, tensors = (", ".join(name for name in names if name.startswith(kind)) for kind in ("scalar", "tensor"))
    left = iter(names)
    expression = "".join(f"{_source(annotation, left)}, " for _, annotation in _arguments(kernel))
    scope: dict[str, Any] = {}
    exec(f"def make({scalars}):\n    return lambda {tensors}: ({expression})", scope)
    made: Callable[..., Any] = scope["make"]
    return made


def _source(annotation: Any, left: Iterator[str]) -> str:
    if not _is_group(annotation):
        return next(left)
    return "(" + "".join(f"{_source(of_field, left)}, " for _, of_field in _fields(annotation)) + ")"
