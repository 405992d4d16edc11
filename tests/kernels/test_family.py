"""Families are imported by the calls that use them."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys

import pytest

from warpwave import dispatch
from warpwave.kernels.family import Family

FAMILIES = (*dispatch.KERNELS, *dispatch.GRADIENT_KERNELS, dispatch.eager_backward)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.NAME))
def test_its_name_is_that_of_its_module(family: Family) -> None:
    name = family.NAME
    assert callable(family.why_not)
    assert sys.modules[family.__name__].NAME == name


def test_what_a_family_lacks_is_an_attribute_error() -> None:
    assert not hasattr(Family("eager"), "outrun")
    with pytest.raises(AttributeError, match="no attribute 'outrun'"):
        Family("eager").outrun  # noqa: B018


def test_inspecting_a_family_does_not_import_it() -> None:
    family = Family("no such module")
    assert not hasattr(family, "__wrapped__")
    assert inspect.unwrap(family) is family  # type: ignore[arg-type]
    assert copy.copy(family).NAME == "no such module"
    with pytest.raises(ModuleNotFoundError):
        family.why_not  # noqa: B018


def test_choosing_a_kernel_imports_the_families_before_it() -> None:
    """Each of the others would take a first call tens of milliseconds."""
    code = (
        "import sys\n"
        "from warpwave import api, dispatch, AttentionProblem, Gpu\n"
        "problem = AttentionProblem(batch=2, seqlen_q=4096, seqlen_k=4096, num_heads_q=16, num_heads_kv=16,\n"
        "    head_dim=128, head_dim_v=128, dtype='bfloat16', softmax_scale=0.1)\n"
        "print(dispatch.choose(problem, Gpu.for_arch('sm_90')).kernel.NAME)\n"
        "families = (*dispatch.KERNELS, *dispatch.GRADIENT_KERNELS)\n"
        "print(*(family.NAME for family in families if family.__name__ in sys.modules))\n"
        "print(*(name for name in sys.modules if name.startswith('warpwave.kernels')))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    chosen, families, modules = found.stdout.splitlines()
    assert chosen == "hopper/flash_fwd"
    assert families.split() == ["split_kv", "hopper/flash_fwd"]
    assert not {"warpwave.kernels.three_kernel", "warpwave.kernels.hopper.flash_bwd"} & set(modules.split())
