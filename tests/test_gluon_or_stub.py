"""Aggregates without a constructor."""

from __future__ import annotations

from typing import Any

import pytest

from tests.marks import needs_triton

pytestmark = needs_triton


def an_aggregate(defaults: dict[str, Any] | None = None, **fields: Any) -> Any:
    from warpwave.runtime.gluon_or_stub import aggregate

    return aggregate(type("Pair", (), {"__annotations__": fields, "__module__": __name__} | (defaults or {})))


def test_a_constructor_takes_all_fields_in_order() -> None:
    from warpwave.runtime.gluon_or_stub import gl

    pair = an_aggregate(first=gl.constexpr, second=gl.constexpr)(7, gl.constexpr(8))
    assert [(type(field), field.value) for field in (pair.first, pair.second)] == [(gl.constexpr, 7), (gl.constexpr, 8)]
    with pytest.raises(TypeError):
        an_aggregate(first=gl.constexpr, second=gl.constexpr)(7)


def test_fields_have_defaults() -> None:
    from warpwave.runtime.gluon_or_stub import gl

    pair = an_aggregate({"second": 8, "third": None}, first=gl.constexpr, second=gl.constexpr, third=object)
    assert pair(7).second.value == 8 and pair(7, 9).second.value == 9
    assert list(pair(7).third) == [] and pair(7, 9, "given").third == "given"


def test_fields_are_part_of_a_kernels_cache_key() -> None:
    from warpwave.runtime.gluon_or_stub import gl

    fields = [{"first": gl.constexpr}, {"other": gl.constexpr}, {"first": gl.tensor}, {"first": gl.constexpr}]
    one, renamed, retyped, again = (an_aggregate(**of).hash_attrs[0].cache_key for of in fields)
    assert one == again and len({one, renamed, retyped}) == 3
