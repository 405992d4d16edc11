"""Seeded faults of quantized calls."""

from __future__ import annotations

from tests.mutants.mutant import FLASH, SPLIT, Mutant

DESCALES = "kernels/descales.py"

QUANTIZED = [
    Mutant(
        "quantized: the first block's factor for all keys", FLASH,
        "tl.load(k_descale_ptr + key_tile // descales.K_BLOCK * descales.k.stride_n)", "tl.load(k_descale_ptr)",
        "test_quantized.py::test_each_block_has_its_own_factor", "int8 and flash_fwd", "FAIL B2 RMS of out",
    ),
    Mutant(
        "quantized: the first block's factor for all values", FLASH,
        "tl.load(v_descale_ptr + key_tile // descales.V_BLOCK * descales.v.stride_n)", "tl.load(v_descale_ptr)",
        "test_quantized.py::test_each_block_has_its_own_factor", "float8 and flash_fwd", "FAIL B2 RMS of out",
    ),
    Mutant(
        "quantized: another head's factor of q", FLASH,
        "member * of_q.stride_h", "member * of_q.stride_g",
        "test_quantized.py::test_one_factor_of_q_for_a_group_of_heads", "int8 and flash_fwd", "assert ",
    ),
    Mutant(
        "quantized: heads of q counted as groups", DESCALES,
        "head * group if of_each else head,", "head,",
        "test_quantized.py::test_one_factor_of_q_for_a_group_of_heads", "int8 and flash_fwd", "assert ",
    ),
    Mutant(
        "quantized: the scale of float8 probabilities stays in out", FLASH,
        "out = times(out, 1.0 / descales.P_SCALE)", "out = times(out, 1.0)",
        "test_quantized.py::test_plain_calls", "normal and e4m3fn:128 and flash_fwd", "FAIL B2 RMS of out",
    ),
    Mutant(
        "quantized: a float8 out does not saturate", DESCALES,
        "bounded = tl.minimum(tl.maximum(out, -LARGEST), LARGEST)", "bounded = out",
        "test_quantized.py::test_out_in_other_dtypes", "out_dtype1 and flash_fwd", "assert ",
    ),
    Mutant(
        "quantized: q is rotated and k is not", "kernels/quantize.py",
        "rotate and i < 2", "rotate and i < 1",
        "test_quantized.py::test_quantize_then_attend_is_close_to_the_original", "options1", "assert ",
    ),
    Mutant(
        "quantize: a sequence of one block has no factor", "kernels/quantize_tensor.py",
        "mask=block == 0", "mask=block == 1",
        "../kernels/test_quantize.py::test_the_launch_agrees_with_torch", "dtype2-head-True-1.0-True",
        "AssertionError",
    ),
    Mutant(
        "8-bit cache: the factor of a page's first token for all", SPLIT,
        "factors_of_cells(descales.v, page, cells, kv_head)", "factors_of_cells(descales.v, page, cells * 0, kv_head)",
        "test_quantized_cache.py::test_decode", "int8 and token and split_kv", "FAIL B2 RMS of out",
    ),
    Mutant(
        "8-bit cache: weights stay relative to the largest of their row", SPLIT,
        "factor = (largest / WEIGHT)[:, None]", "factor = (0 * largest + 1 / WEIGHT)[:, None]",
        "test_quantized_cache.py::test_decode", "int8 and token and split_kv", "FAIL B2 RMS of out",
    ),
    Mutant(
        "8-bit cache: pieces without the factors of values", SPLIT,
        'piece_keys\n                    if descales.FACTORS == "head":',
        'piece_keys\n                    if descales.FACTORS == "none":',
        "test_quantized_cache.py::test_splits", "pieces and int8 and head", "FAIL B2 RMS of out",
    ),
    Mutant(
        "8-bit cache: a copied page loses its factors", "kv_cache/pools.py",
        "pool.dim() > 1", "pool.dim() > 3",
        "../test_quantized_cache.py::test_a_fork_copies_the_factors_of_its_page", "dtype1", "assert ",
    ),
    Mutant(
        "8-bit cache: factors of values are written to a page's first token", "kernels/append_kv.py",
        "factors_of_cells(descales.v, page, cell, head)", "factors_of_cells(descales.v, page, cell * 0, head)",
        "../test_quantized_cache.py::test_the_kernel_writes_what_torch_writes", "dtype1 and token and none", "assert ",
    ),
]  # fmt: skip
