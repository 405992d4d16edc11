"""No kernel gives ptxas 12.8 the code that it gets wrong: matrix descriptors of two layouts from one address.

The fault was seen on an H200 with Triton 3.6.0: results off by up to 4 times their norm, from run to run, and illegal
memory accesses, wherever V came through registers (an odd stride, a mask) in rows of another swizzle than K's.
docs/notes/descriptors.md has the instructions.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.compile.test_targets import FEATURES, compile_all, job
from tests.marks import needs_triton, one_in
from warpwave.workbench.inspect.compiled import mixed_descriptors, unwritten_registers

pytestmark = needs_triton

# What ptxas 12.8 turned into reads of two registers that nothing had written: K's descriptor, then V's.
WRONG = """
    or.b64  %rd430, %rd380, 4611686293305294848;
    add.s64 %rd432, %rd380, 4611686293305294850;
    or.b64  %rd449, %rd380, -4611685949707911168;
    add.s64 %rd450, %rd380, -4611685949707911136;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1}, %rd429, %rd430, 0, 1, 1, 0, 0;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1}, %rd431, %rd432, 1, 1, 1, 0, 0;
    wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%r2}, {%r3}, %rd449, 1, 1, 1, 1;
    wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%r2}, {%r3}, %rd450, 1, 1, 1, 1;
"""


def test_the_pattern_is_found_where_it_is() -> None:
    assert mixed_descriptors(WRONG) == {"%rd380": ["0x40000040", "0xc0000010"]}
    one_layout = WRONG.replace("-4611685949707911168", "4611686293305294852")
    assert mixed_descriptors(one_layout.replace("-4611685949707911136", "4611686293305294854")) == {}


# What it then did, here in flash_fwd of int8: the base of V is in UR14, and nothing wrote UR18 or UR19.
SASS = """
        /*71f0*/                   ULDC UR14, c[0x0][0x250] ;
        /*7220*/                   UIADD3 UR18, UP0, UR18, 0x40, URZ ;
        /*73c0*/                   UIADD3.X UR19, UR19, -0x7fffffe0, URZ, UP0, !UPT ;
        /*73e0*/                   ULOP3.LUT UP1, UR15, UR14, 0x3fff, URZ, 0xc0, !UPT ;
        /*f460*/                   HGMMA.64x32x16.F32 R24, R40, gdesc[UR12].tnspB, RZ, !UPT ;
        /*f470*/              @!P0 HGMMA.64x32x16.F32 R24, R44, gdesc[UR16].tnspB, R24 ;
"""


def test_registers_that_nothing_wrote_are_found() -> None:
    assert [read.split()[0] for read in unwritten_registers(SASS)] == ["UR18", "UR19"]
    right = SASS.replace("UIADD3 UR18, UP0, UR18", "UIADD3 UR18, UP0, UR14").replace("UR19, UR19", "UR19, UR14")
    assert not unwritten_registers(right)
    in_shared_memory = right.replace("R24, R44, gdesc[UR16].tnspB", "R24, gdesc[UR16]")
    assert [read.split()[0] for read in unwritten_registers(in_shared_memory)] == ["UR16", "UR17"]


def one_job(name: str, dims: tuple[int, int], dtype: str = "bfloat16", feature: str = "causal") -> dict[str, Any]:
    made = job("sm_90", dtype, dims[0], feature) | {"kernel": name}
    made["problem"] |= {"head_dim": dims[0], "head_dim_v": dims[1]}
    return made


def check(jobs: list[dict[str, Any]]) -> None:
    for made, facts in zip(jobs, compile_all(jobs), strict=True):
        assert not any(facts["mixed_descriptors"]), (made, facts["config"], facts["mixed_descriptors"])


# (head_dim, head_dim_v) whose rows have other swizzles, with strides that cp.async takes for K alone, and for neither.
SAMPLE = [
    *(("flash_fwd", dims) for dims in ((33, 16), (40, 9), (16, 65))),
    ("split_kv", (33, 16)),
    ("large_head_dim", (33, 16)),
]
WIDTHS = (1, 16, 17, 24, 32, 33, 40, 64, 65, 129, 256)


@one_in(2)
@pytest.mark.parametrize(("name", "dims"), SAMPLE, ids=str)
def test_one_layout_for_each_address(name: str, dims: tuple[int, int]) -> None:
    check([one_job(name, dims)])


@one_in(3)
@pytest.mark.parametrize(("dtype", "dtype_v"), [("int8", "int8"), ("int8", "bfloat16"), ("float8_e4m3fn", "bfloat16")])
@pytest.mark.parametrize("dims", [(129, 17), (65, 17), (100, 9)], ids=str)
def test_narrow_values_beside_keys_of_8_bits(dims: tuple[int, int], dtype: str, dtype_v: str) -> None:
    """`compile_all` asserts that no register is read unwritten."""
    made = one_job("flash_fwd", dims, dtype, "plain")
    made["problem"] |= {"dtype_v": dtype_v, "dtype_out": "bfloat16", "descale_blocks": (0, 0, 0)}
    compile_all([made])


@pytest.mark.full
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["flash_fwd", "split_kv", "large_head_dim", "tiled"])
def test_one_layout_for_each_address_in_full(name: str, dtype: str, feature: str) -> None:
    widths = WIDTHS if name in ("flash_fwd", "split_kv") else (*WIDTHS, 300)
    points = [(d, dv) for d in widths for dv in widths]
    check([one_job(name, dims, dtype, feature) for dims in points[::3]])
