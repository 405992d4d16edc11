"""The seeded faults: each a change of one place in the package that the named tests must notice, and by what words.

A fault is caught when a test fails by assertion and the failure says what it should; a crash is no catch.
"""

from __future__ import annotations

from tests.mutants.gradients import BACKWARD, HOPPER_BACKWARD, OF_DROPOUT
from tests.mutants.integrations import INTEGRATIONS
from tests.mutants.mutant import (
    EAGER,
    FLASH,
    HIDE,
    LARGE,
    NAIVE,
    PARTIALS,
    PASSES,
    PRIMITIVES,
    SPLIT,
    STORE,
    THREE,
    TILED,
    Mutant,
)
from tests.mutants.quantized import QUANTIZED

# The eleven that correctness is first asked about. Portable Triton has no barrier of its own to drop; the nearest
# mistake it lets one make is to serve a call with what was prepared for another.
NAMED = [
    Mutant(
        "mask one key too wide", FLASH,
        "high = last_key_offset + window_right", "high = last_key_offset + window_right + 1",
        "test_probes.py::test_count", "flash_fwd and causal-flash_fwd and 113", "torch.equal",
    ),
    Mutant(
        "padding key counted", FLASH,
        "HAS_LOW, HAS_HIGH) & (keys < key_end)[None, :]", "HAS_LOW, HAS_HIGH)",
        "test_probes.py::test_count", "flash_fwd and none and 113", "torch.equal",
    ),
    Mutant(
        "first key tile lost", FLASH,
        "for key_tile in range(first, key_end, BLOCK_N)", "for key_tile in range(first + BLOCK_N, key_end, BLOCK_N)",
        "test_probes.py::test_support", "flash_fwd and none and 113", "keys from 0",
    ),
    Mutant(
        "accumulator not rescaled", FLASH,
        "v, acc * alpha[:, None], PRECISION)", "v, acc, PRECISION)",
        "test_gates.py::test_case_grid", "float16-113x103-d64-h2x2-b2-sharp-flash_fwd", "FAIL B2 RMS of out",
    ),
    Mutant(
        "wrong head map: modulo instead of division", FLASH,
        "kv_head = head // group_size", "kv_head = head % (num_heads_q // group_size)",
        "test_probes.py::test_retrieval_across_heads", "flash_fwd and 6", "torch.equal",
    ),
    Mutant(
        "strides of k used for v", FLASH,
        "v_ptr += batch * stride_vb + kv_head * stride_vh", "v_ptr += batch * stride_vb + kv_head * stride_kh",
        "test_pairs.py::test_layouts_equal_contiguous", "differ-False-True-flash_fwd", "bits(",
    ),
    Mutant(  # unsigned, for the negative offset of a signed one ends the process instead of the test
        "32-bit offset", PRIMITIVES,
        "rows.to(tl.int64)[:, None] * stride_row", "rows.to(tl.uint32)[:, None] * tl.cast(stride_row, tl.uint32)",
        "test_edges.py::test_offsets_past_32_bits", "k-1-4294967296-flash_fwd", "bits(",
    ),
    Mutant(
        "last row of each tile not stored", FLASH,
        STORE, STORE.replace("inside", "inside & (rows != row_last)[:, None]"),
        "test_poison.py::test_every_cell_is_written", "flash_fwd and d64-h4x2", "isnan",
    ),
    Mutant(
        "LSE in base two", FLASH,
        "(m_i + tl.math.log2(l_i)) * LN_2", "m_i + tl.math.log2(l_i)",
        "test_edges.py::test_lse_is_the_natural_logarithm_in_float32", "False-flash_fwd", "Tensor-likes are not close",
    ),
    Mutant(
        "stale cache key: a call's options left out", "plans.py",
        "key: list[Any] = [said, is", "key: list[Any] = [said[0][-2:], is",
        "test_edges.py::test_causal_alignment", "flash_fwd", "keys_seen",
    ),
    Mutant(
        "window's left edge exclusive", FLASH,
        "low = last_key_offset - window_left", "low = last_key_offset - window_left + 1",
        "test_probes.py::test_support", "flash_fwd and 64 and 113", "keys from",
    ),
]  # fmt: skip

OTHERS = [
    Mutant(
        "bf16x3 without one of its cross products", PRIMITIVES,
        """        small = tl.dot(a[0], b[1], small)
        total = tl.dot(a[0], b[0], number(small))
        if acc is not None:
            total += acc
    elif PRECISION == "tf32x3":""",
        """        total = tl.dot(a[0], b[0], number(small))
        if acc is not None:
            total += acc
    elif PRECISION == "tf32x3":""",
        "test_precision.py::test_a_budget_is_kept", "d64 and sharp", "bf16x3 does not keep 0.0001",
    ),
    Mutant(
        "bf16x6 without the product of the middle parts", PRIMITIVES,
        "small = tl.dot(a[1], b[1], small)", "small = small + 0.0",
        "test_precision.py::test_a_budget_is_kept", "d64 and sharp", "bf16x6 does not keep 1e-06",
    ),
    Mutant(
        "tf32x3 without one of its cross products", PRIMITIVES,
        'small = tl.dot(a[0], b[1], small, input_precision="tf32")', "small = small + 0.0",
        "test_precision.py::test_every_arithmetic_keeps_its_promise", "tf32x3-sharp", "the promise is broken",
    ),
    Mutant(
        "Inf times a remainder of nothing", PRIMITIVES,
        """    if IN_INTERPRETER:
        x = tl.where(x == x, x, -LARGEST)
    return tl.maximum(x, -LARGEST)""", "    return x + 0.0",
        "test_precision.py::test_inf_stays_inf", "bf16x3", "Inf did not stay Inf",
    ),
    Mutant(
        "a budget is kept by whatever is cheapest", "precision.py",
        "if promised_error(name, problem) <= budget]", "if budget > 0]",
        "test_precision.py::test_a_budget_is_kept", "d64 and sharp", "tf32 does not keep 0.0001",
    ),
    Mutant(
        "scale of a padded head_dim", "checks.py",
        "1.0 / math.sqrt(head_dim)", "1.0 / math.sqrt(1 << (head_dim - 1).bit_length())",
        "test_edges.py::test_default_scale_is_of_the_callers_head_dim", "80-flash_fwd", "bits(",
    ),
    Mutant(
        "softcap after bias", EAGER,
        """        squashed = torch.tanh(scores / problem.softcap)
        scores = squashed * problem.softcap
    if views.bias is not None:
""",
        """        bias = 0.0 if views.bias is None else tile.of(views.bias)
        squashed = torch.tanh((scores + bias) / problem.softcap)
        scores = squashed * problem.softcap
    elif views.bias is not None:
""",
        "test_gates.py::test_case_grid", "softcap and bias and eager", "FAIL",
    ),
    Mutant(
        "sink left out of the denominator", FLASH,
        "l_i = l_i * alpha + tl.math.exp2(sink_log2 - m_shift)", "l_i = l_i * alpha",
        "test_gates.py::test_case_grid", "113x103-d64-h2x1-b2-sinks-normal-flash_fwd", "FAIL C LSE",
    ),
    Mutant(
        "sink in base two", FLASH,
        "tl.load(sinks_ptr + head) * LOG2_E", "tl.load(sinks_ptr + head)",
        "test_edges.py::test_rows_that_see_nothing", "mask-True-flash_fwd", "FAIL C LSE",
    ),
    Mutant(
        "top-left mask aligned to the last key", FLASH,
        "high = tl.minimum(high, 0)", "high = tl.minimum(high, last_key_offset)",
        "test_edges.py::test_causal_alignment", "top_left and flash_fwd", "keys_seen",
    ),
    Mutant(
        "NaN leaks from values that nobody sees", FLASH,
        "load_tile(v, keys, dims_v, key_begin, key_end,", "load_tile(v, keys, dims_v, 0, seqlen_k,",
        "test_pairs.py::test_keys_that_no_query_sees_may_hold_anything", "window-bfloat16-nan-flash_fwd", "bits(",
    ),
    Mutant(
        "hidden by bias only as far as the number goes", PRIMITIVES,
        'return tl.where(bias == float("-inf"), float("-inf"), scores + bias * LOG2_E)',
        "return scores + bias * LOG2_E",
        "test_pairs.py::test_keys_that_no_query_sees_may_hold_anything", "bias-bfloat16-nan-flash_fwd", "bits(",
    ),
    Mutant(
        "bias of -inf is a large negative number", PRIMITIVES,
        'return tl.where(bias == float("-inf"), float("-inf"), scores + bias * LOG2_E)',
        "return scores + tl.maximum(bias, -1e4) * LOG2_E",
        "test_edges.py::test_minus_infinity_in_bias_hides", "flash_fwd and float16", "FAIL",
    ),
    Mutant(
        "bias of +inf is a large number", PRIMITIVES,
        'tl.where(tl.abs(bias) < float("inf"), bounded, bias)', 'tl.where(bias > float("-inf"), bounded, bias)',
        "test_edges.py::test_plus_infinity_in_bias_is_nan_in_its_row", "flash_fwd", "isnan",
    ),
    Mutant(
        "running maximum becomes 0 before anything is seen", PRIMITIVES,
        "return p, alpha, m_new,", "return p, alpha, m_shift,",
        "test_edges.py::test_first_tile_hidden_and_later_logits_low", "flash_fwd and 1000 and float16", "FAIL",
    ),
    Mutant(
        "hidden scores are a large negative number", FLASH,
        HIDE, HIDE.replace('float("-inf")', "-1.0e5"),
        "test_edges.py::test_one_visible_key", "flash_fwd and 245000 and 200 and float16", "FAIL",
    ),
    Mutant(
        "ALiBi rewards distance", FLASH,
        "scores -= slope_log2 * distance", "scores += slope_log2 * distance",
        "test_gates.py::test_case_grid", "113x103 and alibi and heads-normal-flash_fwd", "FAIL C LSE",
    ),
    Mutant(
        "ALiBi counted from the first key", FLASH,
        "tl.abs(rows[:, None] + last_key_offset - keys[None, :])", "tl.abs(rows[:, None] - keys[None, :])",
        "test_gates.py::test_case_grid", "113x103 and alibi and heads-normal-flash_fwd", "FAIL C LSE",
    ),
    Mutant(
        "a row that sees nothing is 0 / 0", FLASH,
        "tl.where(l_i == 0.0, 1.0, l_i))[:, None]", "l_i)[:, None]",
        "test_edges.py::test_rows_that_see_nothing", "mask-False-flash_fwd", "FAIL",
    ),
    Mutant(
        "NaN swept under the rug", FLASH,
        "rounded(out, out_ptr", "rounded(tl.where(out == out, out, 0.0), out_ptr",
        "test_edges.py::test_not_finite_in_q_or_k_reaches_the_rows_that_see_it", "q-nan-flash_fwd", "isnan",
    ),
    Mutant(
        "v of another head", FLASH,
        "v_ptr += batch * stride_vb + kv_head * stride_vh", "v_ptr += batch * stride_vb + (1 - kv_head) * stride_vh",
        "test_edges.py::test_not_finite_in_v_stays_in_its_head", "flash_fwd and nan", "isfinite",
    ),
    Mutant(
        "probabilities rounded before they are summed", PRIMITIVES,
        "l_i * alpha + tl.sum(p, 1)", "l_i * alpha + tl.sum(p.to(tl.float16).to(tl.float32), 1)",
        "test_gates.py::test_case_grid", "float16-113x103-d64-h2x2-b2-normal-flash_fwd", "FAIL C LSE",
    ),
    Mutant(
        "16-bit accumulator", FLASH,
        "v, acc * alpha[:, None], PRECISION)",
        "v, (acc * alpha[:, None]).to(tl.float16).to(tl.float32), PRECISION)",
        "test_probes.py::test_retrieval", "float32:ieee and none and flash_fwd", "torch.equal",
    ),
    Mutant(
        "kv heads taken in turn", FLASH,
        "kv_head = head // group_size", "kv_head = head % (num_heads_q // group_size)",
        "test_edges.py::test_query_heads_share_kv_heads_in_groups", "flash_fwd and 6", "torch.equal",
    ),
    Mutant(
        "columns beyond head_dim_v stored", FLASH,
        STORE, STORE.replace("inside", "(rows < seqlen_q)[:, None] & (dims_v >= 0)[None, :]"),
        "test_poison.py::test_guards_and_inputs_stay_as_they_were", "flash_fwd and d40x59", "a guard region",
    ),
    Mutant(
        "an empty sequence sees one key", FLASH,
        "k_begin, seqlen_k = packed_sequence(cu_seqlens_k_ptr, batch, seqlen_k, total_k)",
        "k_begin, seqlen_k = packed_sequence(cu_seqlens_k_ptr, batch, seqlen_k, total_k); seqlen_k += seqlen_k == 0",
        "test_edges.py::test_empty_sequences_among_packed_ones", "flash_fwd", "eq(0)",
    ),
    Mutant(
        "no keys: LSE 0", "plans.py",
        'float("-inf"), dtype=lse_dtype(q)', "0.0, dtype=lse_dtype(q)",
        "test_edges.py::test_empty_sizes", "flash_fwd and False", "torch.equal",
    ),
    Mutant(
        "no queries: out as wide as q", "plans.py",
        "out = q.new_zeros((*q.shape[:-1], problem.head_dim_v), dtype=dtype)", "out = q.new_zeros(q.shape)",
        "test_edges.py::test_empty_sizes", "flash_fwd and False", "shape",
    ),
    Mutant(
        "scale 0 is 0 times -inf", FLASH,
        HIDE + "\n            scale_left = 1.0\n", HIDE.replace(" * scale_left", "") + "\n",
        "test_edges.py::test_scale_zero_is_uniform_over_what_is_visible", "flash_fwd", "FAIL",
    ),
    Mutant(
        "a scale of 0 is no scale", "checks.py",
        "if softmax_scale is None:", "if not softmax_scale:",
        "test_edges.py::test_scale_zero_is_uniform_over_what_is_visible", "eager", "FAIL",
    ),
    Mutant(
        "gradient of the LSE dropped", "autograd.py",
        "out, lse, dout, dlse, wanted)", "out, lse, dout, None, wanted)",
        "test_gradients.py::test_lse_alone_in_the_loss", "eager", "FAIL",
    ),
    Mutant(
        "gradient of k not scaled", EAGER,
        "+= dk * problem.softmax_scale", "+= dk",
        "test_gradients.py::test_gates", "eager and float16 and normal", "FAIL",
    ),
    Mutant(
        "torch's CPU kernel is given NaN behind a mask", "kernels/torch_sdpa.py",
        "not _is_tame(problem, operands, hides)", "not (hides or _is_tame(problem, operands, hides))",
        "../kernels/test_torch_sdpa.py::test_what_nobody_sees_may_hold_anything", "", "not close",
    ),
    Mutant(
        "gradient of the sinks has the wrong sign", EAGER,
        "grads.sinks -= ", "grads.sinks += ",
        "test_gradients.py::test_gradients_of_empty_calls", "eager and True and 5", "Tensor-likes",
    ),
    Mutant(
        "second derivative is silently none", "autograd.py",
        '    raise RuntimeError("warpwave.attention has first', '    raise RuntimeError("has',
        "test_gradients.py::test_second_derivative_is_refused", "eager", "first derivatives only",
    ),
    Mutant(
        "integer masks let through", "checks.py",
        "if tensor.dtype not in dtypes:", "if tensor.dtype not in (*dtypes, torch.uint8):",
        "test_bad_input.py::test_wrong_type", "integer", "a kernel was bound",
    ),
    Mutant(
        "heads that do not divide let through", "checks.py",
        "    if num_heads_q % num_heads_kv:\n", "    if num_heads_q < num_heads_kv:\n",
        "test_bad_input.py::test_wrong_value", "divide", "a kernel was bound",
    ),
    Mutant(
        "an infinite scale let through", "checks.py",
        "0 <= scale <= LARGEST", "0 <= scale",
        "test_bad_input.py::test_wrong_value", "scale", "a kernel was bound",
    ),
    Mutant(
        "sequences longer than the longest let through", "checks.py",
        "        if length > longest:\n", "        if False:\n",
        "test_bad_input.py::test_wrong_contents_when_checked", "longest", "a kernel was bound",
    ),
    Mutant(
        "offsets beyond the last query not clamped", PRIMITIVES,
        "tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + item + 1), begin), total)",
        "tl.maximum(tl.load(cu_seqlens_ptr + item + 1), begin)",
        "test_bad_input.py::test_wrong_contents_unchecked_stay_inside_the_tensors", "flash_fwd and beyond",
        "a guard region was written",
    ),
    Mutant(
        "a refusal names one reason", "dispatch.py",
        "            {kernel: reasons},\n", "            {kernel: reasons[:1]},\n",
        "test_bad_input.py::test_a_refusal_lists_every_reason_and_what_would_run", "", "not in",
    ),
    Mutant(
        "CPU tensors launched on a GPU kernel", "kernels/reasons.py",
        'if gpu.vendor == "cpu":', 'if gpu.vendor == "none":',
        "test_bad_input.py::test_a_gpu_kernel_by_name_without_a_gpu_names_found_and_needed", "", "not in",
    ),
    Mutant(
        "a check is an assertion", "checks.py",
        "        if size == 0:\n            raise InvalidInput(f\"{name} has 0 heads; it must have at least one\")\n",
        "        assert size, InvalidInput(f\"{name} has 0 heads; it must have at least one\")\n",
        "test_bad_input.py::test_all_of_this_holds_without_assertions", "", "0 heads",
    ),
    Mutant(
        "the last element of head_dim left out", NAIVE,
        "for _ in range(HEAD_DIM):", "for _ in range(HEAD_DIM - 1):",
        "test_gates.py::test_case_grid", "float16-113x103-d64-h2x2-b2-normal-naive", "FAIL C LSE",
    ),
    Mutant(
        "the mark of a hidden pair taken for its weight", NAIVE,
        "tl.where((p == HIDDEN)[:, None], 0.0, p[:, None] * v[None, :])", "p[:, None] * v[None, :]",
        "test_probes.py::test_support", "causal-naive and 113", "keys from",
    ),
    Mutant(
        "the row of the output not divided by its sum", NAIVE,
        "out = acc * tl.load(row_scale_ptr + rows, mask=rows < seqlen_q, other=0.0)[:, None]", "out = acc",
        "test_gates.py::test_case_grid", "float16-113x103-d64-h2x2-b2-normal-naive", "FAIL B2 RMS of out",
    ),
    Mutant(
        "the last step of head_dim left out", TILED,
        "for _ in range(0, HEAD_DIM, BLOCK_K):", "for _ in range(0, HEAD_DIM // BLOCK_K * BLOCK_K, BLOCK_K):",
        "test_gates.py::test_case_grid", "float16-113x103-d40-h2x1-b2-normal-tiled", "FAIL C LSE",
    ),
    Mutant(
        "a tile of scores that the window's edge cuts is skipped", TILED,
        "((tile_n + 1) * BLOCK_N <= key_begin)", "(tile_n * BLOCK_N < key_begin)",
        "test_poison.py::test_every_cell_is_written", "top_left and tiled", "isnan",
    ),
    Mutant(
        "values that nobody sees are multiplied by 0", TILED,
        "v = tl.where((seen != 0)[:, None], v, 0.0)", "v = tl.where((seen >= 0)[:, None], v, 0.0)",
        "test_pairs.py::test_keys_that_no_query_sees_may_hold_anything", "bias-bfloat16-nan-tiled", "bits(",
    ),
    Mutant(
        "the rest of a line of scores counted as keys", PASSES,
        "visible = inside & band_visible", "visible = in_lines & band_visible",
        "test_probes.py::test_count", "none-tiled and 113", "torch.equal",
    ),
    Mutant(
        "softmax over the scores of another batch item", PASSES,
        "scores_ptr += batch_head.to(tl.int64) * seqlen_q * stride_sm", "scores_ptr += head * seqlen_q * stride_sm",
        "test_probes.py::test_count", "none-tiled and 113", "torch.equal",
    ),
    Mutant(
        "scores of a sequence longer than the longest written into the next head's", PRIMITIVES,
        "return begin.to(tl.int64), tl.minimum(end - begin, longest)", "return begin.to(tl.int64), end - begin",
        "test_bad_input.py::test_wrong_contents_unchecked_stay_inside_the_tensors", "tiled",
        "a guard region was written",
    ),
    Mutant(
        "cells beyond a sequence's used length attended to", "kernels/paged_keys.py",
        "used = tl.minimum(tl.maximum(tl.load(seqused_k_ptr + row), 0), seqlen_k)", "used = seqlen_k * 1",
        "test_paged.py::test_count", "16-none-split_kv", "torch.equal",
    ),
    Mutant(
        "the page table of another row", "kernels/paged_keys.py",
        "return page_table_ptr + row * stride_table, used", "return page_table_ptr + batch * stride_table, used",
        "test_paged.py::test_retrieval", "16-split_kv", "torch.equal",
    ),
    Mutant(
        "keys read from another cell of their page", SPLIT,
        "cells = (keys % PAGE_SIZE).to(tl.int64)", "cells = (keys % PAGE_SIZE // 2 * 2).to(tl.int64)",
        "test_paged.py::test_retrieval", "16-split_kv", "torch.equal",
    ),
    Mutant(
        "a tile of keys in each turn of the shares lost", SPLIT,
        "stride = num_splits * BLOCK_N", "stride = num_splits * BLOCK_N + BLOCK_N",
        "test_paged.py::test_page_sizes_and_splits", "16-two", "FAIL",
    ),
    Mutant(
        "pages of the tile before", SPLIT,
        "page_table_ptr, key_tile + stride, columns", "page_table_ptr, key_tile, columns",
        "test_paged.py::test_retrieval", "16-split_kv", "torch.equal",
    ),
    Mutant(
        "the last keys of a cache, which no map may bring, left out", SPLIT,
        "first_tile = tl.where(mine, map_end, end)", "first_tile = end",
        "test_paged.py::test_page_sizes_and_splits", "maps", "FAIL",
    ),
    Mutant(
        "heads that groups leave over are not counted", "kernels/flash_fwd/kernel.py",
        "tile = num_tiles - 1 - place // heads\n", "tile = num_tiles - 1 - place // heads_in_l2\n",
        "test_edges.py::test_heads_left_over_by_groups_that_share_l2", "flash_fwd-3 and not hopper", "gates fail",
    ),
    Mutant(
        "query heads of a group taken in turn", SPLIT,
        "heads = kv_head * GROUP_SIZE + tile_rows % TILE_HEADS  # [BLOCK_M]",
        "heads = kv_head + tile_rows % TILE_HEADS * num_heads_kv",
        "test_paged.py::test_retrieval", "16-split_kv", "torch.equal",
    ),
    Mutant(
        "a row keeps its scores with the kv head beside its own", SPLIT,
        "row_heads[:, None] == key_heads[None, :], scores", "row_heads[:, None] >= key_heads[None, :], scores",
        "test_paged.py::test_page_sizes_and_splits", "16- and heads", "FAIL",
    ),
    Mutant(
        "values that are not finite reach the kv head beside theirs", SPLIT,
        "tl.where(doubtful, begin + walked_keys * KV_HEADS, begin)", "begin",
        "test_paged.py::test_kv_heads_that_share_a_tile_do_not_matter", "nan and maps", "not close",
    ),
    Mutant(
        "a prefix that is read for all read again for each", SPLIT,
        "key_begin = tl.maximum(key_begin, first_key)", "key_begin = tl.maximum(key_begin, first_key * 0)",
        "test_paged.py::test_a_shared_prefix_is_read_once", "False", "FAIL C LSE",
    ),
    Mutant(
        "the merge leaves out the first part", PARTIALS,
        "only, 0, num_parts", "only, 1, num_parts",
        "../kernels/test_partials.py::test_parts_become_one", "70", "Tensor-likes are not close",
    ),
    Mutant(
        "parts loaded later merged as if maxima were equal", PARTIALS,
        "acc = acc * scale[:, None] + some * scale_some[:, None]", "acc = acc * scale[:, None] + some",
        "../kernels/test_partials.py::test_parts_become_one", "70", "Tensor-likes are not close",
    ),
    Mutant(
        "sums of the shares not rescaled", PARTIALS,
        "l_i * scale + l_other * scale_other, scale", "l_i * scale + l_other, scale",
        "test_paged.py::test_page_sizes_and_splits", "16-three", "FAIL C LSE",
    ),
    Mutant(
        "shares merged as if their maxima were equal", PARTIALS,
        "0.0, weight[:, :, None] * acc)", "0.0, acc)",
        "test_paged.py::test_page_sizes_and_splits", "16-three", "FAIL B2 RMS of out",
    ),
    Mutant(
        "a share without keys leaves the state of the launch before", SPLIT,
        "split, acc, m_i, l_i, rows_heads, row_head, in_range,",
        "split, acc, m_i, l_i, rows_heads, row_head, in_range & (begin < end),",
        "test_paged.py::test_every_cell_is_written_and_no_input", "three-page16", "isnan",
    ),
    Mutant(
        "parts that are no piece keep the state of the launch before", SPLIT,
        "range(used + split, PIECES, num_splits)", "range(PIECES + split, PIECES, num_splits)",
        "test_paged.py::test_every_cell_is_written_and_no_input", "pieces-page16", "isnan",
    ),
    Mutant(
        "a piece begins with the maximum of the one before", SPLIT,
        'm_i = tl.where(piece_ends, float("-inf"), m_i)', "m_i = tl.where(piece_ends, m_i, m_i)",
        "test_paged.py::test_bits_of_pieces_do_not_depend_on_shares", "window0-False", "assert False",
    ),
    Mutant(
        "a tensor map brings keys of the sequence behind", SPLIT,
        "map_end = end // BLOCK_N * BLOCK_N", "map_end = tl.cdiv(end, BLOCK_N) * BLOCK_N",
        "test_tensor_maps.py::test_packed", "one-False", "isnan",
    ),
    Mutant(
        "a tensor map brings keys that no query sees", SPLIT,
        "map_begin = tl.cdiv(key_begin, BLOCK_N) * BLOCK_N", "map_begin = key_begin // BLOCK_N * BLOCK_N",
        "test_tensor_maps.py::test_values_that_no_row_sees_are_not_read", "", "isnan",
    ),
    Mutant(
        "what a part without keys never wrote is merged", PARTIALS,
        "tl.where((l == 0.0)[:, :, None], 0.0, weight", "tl.where((l != l)[:, :, None], 0.0, weight",
        "../kernels/test_partials.py::test_parts_become_one", "70", "Tensor-likes are not close",
    ),
    Mutant(
        "sink left out where shares are merged", PARTIALS,
        "join(m_i, l_i, sink_log2, 1.0)", "join(m_i, l_i, sink_log2, 0.0)",
        "test_paged.py::test_page_sizes_and_splits", "16-three", "FAIL C LSE",
    ),
    Mutant(
        "a plan of a cached call kept without what was said", "api.py",
        "full = (said, causal.__class__, num_splits,",
        "full = (num_splits,",
        "test_paged.py::test_masks", "split_kv and False", "FAIL",
    ),
    Mutant(
        "negative page ids let through", "kv_cache/contents.py",
        "if not 0 <= pages[row][i] < num_pages:", "if not pages[row][i] < num_pages:",
        "test_paged_bad_input.py::test_wrong_contents_when_checked", "negative", "a kernel was bound",
    ),
    Mutant(
        "lengths above the table's capacity let through", "kv_cache/contents.py",
        "if not 0 <= used[row] <= capacity:", "if not 0 <= used[row]:",
        "test_paged_bad_input.py::test_wrong_contents_when_checked", "capacity", "not in",
    ),
    Mutant(
        "a page table of 64-bit integers let through", "checks.py",
        "if tensor.dtype not in dtypes:", "if tensor.dtype not in (*dtypes, torch.int64):",
        "test_paged_bad_input.py::test_wrong_type", "long and page", "",
    ),
    Mutant(
        "a shared page written in place", "kv_cache/cache.py",
        "if self._references[page] - references[page] > 1:", "if self._references[page] - references[page] > 99:",
        "../test_kv_cache.py::test_forks_share_pages_until_one_writes", "7", "assert",
    ),
    Mutant(
        "lengths advanced though pages are missing", "kv_cache/cache.py",
        "            raise OutOfPages(needed, len(self._free), self.num_pages)\n",
        "            self._of(rows[0]).length += 1\n"
        "            raise OutOfPages(needed, len(self._free), self.num_pages)\n",
        "../test_kv_cache.py::test_out_of_pages_changes_nothing", "", "state(cache)",
    ),
    Mutant(
        "new keys turned the wrong way", "kernels/append_kv.py",
        "x = x * cos + tl.where(first, -y, y) * sin", "x = x * cos + tl.where(first, y, -y) * sin",
        "../test_kv_cache.py::test_the_kernel_writes_what_torch_writes", "halves and dtype0",
        "Tensor-likes are not close",
    ),
    Mutant(
        "merging of partial results in base two", "states.py",
        "weights = torch.exp(lse - shift)", "weights = torch.exp2(lse - shift)",
        "../test_states.py::test_parts_merge_to_the_whole", "3", "Tensor-likes are not close",
    ),
    Mutant(
        "lse of another dtype let through", "states.py",
        "if lse.dtype != torch.float32:", "if not lse.dtype.is_floating_point:",
        "../test_states.py::test_bad_input", "", "DID NOT RAISE",
    ),
    Mutant(
        "the last of 65,536 programs lost", FLASH,
        "pid = tl.program_id(0)", "pid = tl.minimum(tl.program_id(0), 65534)",
        "test_gpu.py::test_grid_limits", "65536", "", needs_gpu=True,
    ),
    Mutant(
        "a plan recalled for tensors laid out otherwise", "plans.py",
        "if last is not None and last[0](*tensors):", "if last is not None:",
        "../test_ops.py::test_a_call_is_recalled_only_for_tensors_laid_out_alike", "", "strides",
    ),
    Mutant(
        "a plan recalled for tensors at odd addresses", "plans.py",
        "if bits & UNALIGNED:", "if False:",
        "../test_ops.py::test_a_call_is_recalled_only_for_tensors_laid_out_alike", "", "alignment",
    ),
    Mutant(
        "a mask of another length in a known class", "checks.py",
        "if (size == 1) != (before == 1) or size not in (1, whole):", "if False:",
        "../test_new_lengths.py::test_sizes_that_contradict_each_other_are_refused_in_a_known_class", "",
        "DID NOT RAISE",
    ),
    Mutant(
        "a plan made without gradients serves calls that want them", "plans.py",
        "asked = (said, is_grad_enabled(), is_deterministic())", "asked = (said, True, is_deterministic())",
        "../test_ops.py::test_a_call_known_without_gradients_has_them_all_the_same", "no_grad", "assert",
    ),
    Mutant(
        "a tangent lost", "autograd.py",
        ".tangent is not None for t", ".tangent is NotImplemented for t",
        "../test_derivatives.py::test_tangents_are_refused_and_never_lost", "jvp", "DID NOT RAISE",
    ),
    Mutant(
        "a graph's launches share the stream's counter", "runtime/launch.py",
        "if counter is None or capturing():", "if counter is None:",
        "../test_driver.py::test_a_counter_is_the_streams_own_or_the_graphs", "", "assert",
    ),
    Mutant(
        "a graph that the driver refuses is taken as started", "runtime/graphs.py",
        "elif start(graph, stream):", "elif start(graph, stream) < 0:",
        "../test_graphs.py::test_a_capture_a_profiler_and_a_refusal_have_kernels_one_by_one", "", "assert",
    ),
    Mutant(
        "graphs make room for each other all the time", "runtime/graphs.py",
        "if self._missed < ANEW_AFTER:", "if self._missed < 1:",
        "../test_graphs.py::test_graphs_stay_bounded_and_are_destroyed", "", "assert",
    ),
    Mutant(
        "launches run while their graph is made", "runtime/driver.py",
        "            here.stream = stream\n", "            here.stream = here.stream\n",
        "../test_graphs.py::test_what_comes_again_starts_as_one", "", "assert",
    ),
    Mutant(
        "compiles while a graph is captured", "runtime/launch.py",
        "if torch.cuda.is_current_stream_capturing():", "if False:",
        "test_gpu.py::test_compiling_during_capture_is_refused_and_the_capture_survives", "", "", needs_gpu=True,
    ),
]  # fmt: skip

# Of the Hopper kernel's float32, whose source runs on a CPU as well (tests/kernels/hopper/gluon_on_cpu.py).
HOPPER_FLOAT32 = [
    Mutant(
        "float32 on Hopper: scores of scaled operands not scaled back", "kernels/hopper/split_float32.py",
        "scale = rules.scale * gl.minimum(", "scale = rules.scale + 0 * gl.minimum(",
        "../kernels/hopper/test_flash_fwd_on_cpu.py::test_the_protocol_on_a_cpu", "full and fp16x1", "gates fail",
    ),
    Mutant(
        "float32 on Hopper: values scaled back by another head's power of two", "kernels/hopper/split_float32.py",
        "work.head // group_size) * 2 + 1)", "work.head // group_size) * 2)",
        "../kernels/hopper/test_flash_fwd_on_cpu.py::test_the_protocol_on_a_cpu", "full and fp16x1", "gates fail",
    ),
    Mutant(
        "float32 on Hopper: a scale that keys count for which no query sees", "kernels/prepass/scale_ahead.py",
        "high_row = tl.maximum(tl.minimum(high_row, length_q + high), low_row)",
        "high_row = tl.maximum(high_row, low_row)",
        "../kernels/test_scale_ahead.py::test_what_nobody_sees_has_no_say", "top_left", "nothing was garbage",
    ),
    Mutant(
        "float32 on Hopper: Inf counts towards a scale", "kernels/prepass/scale_ahead.py",
        'tl.where(magnitudes < float("inf"), magnitudes, 0.0)', "tl.where(magnitudes == magnitudes, magnitudes, 0.0)",
        "../kernels/test_scale_ahead.py::test_nan_and_inf_stay_and_do_not_count", "", "assert False",
    ),
    Mutant(
        "float32 on Hopper: the second part of an operand left out", "kernels/prepass/scale_ahead.py",
        "return part, x - part.to(tl.float32)", "return part, x - x",
        "../kernels/test_scale_ahead.py::test_parts_and_scales", "full and fp16x3", "assert",
    ),
    Mutant(
        "float32 on Hopper: a product of parts taken twice, another left out", "kernels/hopper/split_float32.py",
        "values_slice(v_ring, tile + (PARTS - 1 - s - a), i)", "values_slice(v_ring, tile + (PARTS - 1 - a), i)",
        "../kernels/hopper/test_flash_fwd_on_cpu.py::test_the_protocol_on_a_cpu", "full and bf16x6", "gates fail",
    ),
    Mutant(
        "float32 on Hopper: parts of another head", "kernels/hopper/flash_fwd/roles.py",
        "work.head * rules.PARTS + part", "work.head + part",
        "../kernels/hopper/test_flash_fwd_on_cpu.py::test_the_protocol_on_a_cpu", "full and bf16x6", "gates fail",
    ),
    Mutant(
        "float32 on Hopper: parts of a head written over the next head's", "kernels/prepass/split_ahead.py",
        "(batch_head * rows_of_head + token) * ROW", "(batch_head * rows_of_part + token) * ROW",
        "../kernels/hopper/test_flash_fwd.py::test_parts_add_up_to_the_operands", "", "assert",
    ),
]  # fmt: skip

# Of its masks and biases, the same.
ON_CPU = "../kernels/hopper/test_flash_fwd_on_cpu.py::"
HOPPER_MASKS = [
    Mutant(
        "Hopper: values that a mask hides from all not zeroed", "kernels/hopper/flash_fwd/mask_bias.py",
        "index(n % v_ring.stages)), seen)", "index(n % v_ring.stages)), seen + 1)",
        f"{ON_CPU}test_masks_and_biases_on_a_cpu", "mask- and 64", "torch.equal",
    ),
    Mutant(
        "Hopper: a block whose output is not finite not brought again", "kernels/hopper/flash_fwd/roles.py",
        "            if wanted != 0:", "            if row_first < 0:",
        f"{ON_CPU}test_masks_and_biases_on_a_cpu", "causal and 64", "torch.equal",
    ),
    Mutant(
        "Hopper: what is left of the heads is the last group", "kernels/hopper/scheduler.py",
        "later = s.num_tiles - 1 - t", "later = t",
        "../kernels/hopper/test_scheduler.py::test_every_block_comes_once", "", "assert",
    ),
    Mutant(
        "Hopper: tiles skipped by another block's flags", "kernels/hopper/flash_fwd/mask_bias.py",
        "work.tile * rules.GROUPS + g, (work.seqlen_q", "work.tile + 0 * g, (work.seqlen_q",
        f"{ON_CPU}test_tiles_that_a_mask_hides_are_not_visited", "128", "gates fail",
    ),
    Mutant(
        "Hopper: a bias of other queries", "kernels/hopper/flash_fwd/mask_bias.py",
        "(work.tile * rules.GROUPS + g) * ROWS, key]", "work.tile * ROWS + g * ROWS, key]",
        f"{ON_CPU}test_masks_and_biases_on_a_cpu", "causal and 64", "gates fail",
    ),
    Mutant(
        "Hopper: a window one key too short", "kernels/hopper/flash_fwd/mask_bias.py",
        "~bits_below((rows + (keys.low - key_first))", "~bits_below((rows + (keys.low + 1 - key_first))",
        f"{ON_CPU}test_keys_of_a_window_are_counted_on_a_cpu", "60 and 64", "torch.equal",
    ),
    Mutant(
        "bits of a mask in another order", "kernels/prepass/mask_bits.py",
        "columns // 8 * 2 + columns % 2", "columns // 8 + columns % 2 * 16",
        "../kernels/test_mask_bits.py::test_every_cell_has_its_bit", "", "torch.equal",
    ),
]  # fmt: skip

# Of the Hopper kernel, which runs on its GPU alone. None lets the producer and its consumers disagree about how many
# tiles come: that is no wrong result but a launch that never ends.
HOPPER = [
    Mutant(
        "Hopper: mask one key too wide", "kernels/hopper/visible.py",
        "high = offset + rules.window_right", "high = offset + rules.window_right + 1",
        "test_probes.py::test_count", "hopper and causal", "torch.equal", needs_gpu=True,
    ),
    Mutant(
        "Hopper: padding key counted", "kernels/hopper/softmax.py",
        "keys.end - 1 - key_first", "keys.end - key_first",
        "test_probes.py::test_count", "hopper and none", "torch.equal", needs_gpu=True,
    ),
    Mutant(
        "Hopper: first key tile lost", "kernels/hopper/visible.py",
        "begin = (first - keys.begin) // rules.BLOCK_N", "begin = (first - keys.begin) // rules.BLOCK_N + 1",
        "test_probes.py::test_support", "hopper", "keys from 0", needs_gpu=True,
    ),
    Mutant(
        "Hopper: accumulator not rescaled", "kernels/hopper/softmax.py",
        "(rescale(acc[i], beside_columns(alpha, acc[i])),)", "(acc[i],)",
        "test_gates.py::test_case_grid", "hopper and sharp", "FAIL", needs_gpu=True,
    ),
    Mutant(
        "Hopper: two of a row's four threads settle its maximum", "kernels/hopper/softmax.py",
        'in (("$1", 2), ("a", 1))', 'in (("$1", 2), ("a", 2))',
        "test_gates.py::test_case_grid", "hopper and sharp", "FAIL", needs_gpu=True,
    ),
    Mutant(
        "Hopper: wrong head map", "kernels/hopper/flash_fwd/roles.py",
        "kv_head = work.head // schedule.group_size",
        "kv_head = work.head % (schedule.num_heads // schedule.group_size)",
        "test_probes.py::test_retrieval_across_heads", "hopper and 6", "torch.equal", needs_gpu=True,
    ),
    Mutant(
        "Hopper: log-sum-exp in bits", "kernels/hopper/softmax.py",
        "(m_i + gl.log2(l_row)) * LN_2", "(m_i + gl.log2(l_row))",
        "test_gates.py::test_case_grid", "hopper", "FAIL", needs_gpu=True,
    ),
    Mutant(
        "Hopper: maximum lags without limit", "kernels/hopper/softmax.py",
        "rises = of_tile > LAG", "rises = of_tile == float(\"inf\")",
        "test_gates.py::test_case_grid", "hopper and sharp", "FAIL", needs_gpu=True,
    ),
    Mutant(
        "Hopper: values behind a packed sequence not zeroed", "kernels/hopper/flash_fwd/roles.py",
        "if rows_used < rules.BLOCK_N:", "if rows_used < -rules.BLOCK_N:",
        "test_pairs.py::test_other_batch_items_may_hold_nan", "hopper", "bits(", needs_gpu=True,
    ),
    Mutant(
        "Hopper: rows stored into the next packed sequence", "kernels/hopper/rows.py",
        "inside = (rows < rows_left)", "inside = (rows < rows_left + 8)",
        "test_pairs.py::test_packed_equals_single_calls", "hopper", "bits(", needs_gpu=True,
    ),
    Mutant(
        "Hopper: both rows of a thread hidden by the first's bits", "kernels/hopper/words.py",
        "and.b32 t, ${2 * n + (i & 2)}", "and.b32 t, ${2 * n + 0 * i}",
        "test_probes.py::test_count", "hopper and mask", "torch.equal", needs_gpu=True,
    ),
    Mutant(
        "Hopper: tile counter not put back", "kernels/hopper/scheduler.py",
        "gl.atomic_xchg(counter_ptr, 0", "gl.atomic_xchg(counter_ptr, 1",
        "../kernels/hopper/test_flash_fwd.py::test_a_launch_finds_the_counter_as_the_one_before_found_it", "",
        "torch.equal", needs_gpu=True,
    ),
]  # fmt: skip

LARGE_HEADS = [
    Mutant(
        "the last piece of a wide head left out", LARGE,
        "for d in range(0, HEAD_DIM, BLOCK_D):", "for d in range(0, HEAD_DIM // BLOCK_D * BLOCK_D, BLOCK_D):",
        "test_large_heads.py::test_query_heads_of_a_group_share_tiles", "", "FAIL",
    ),
    Mutant(
        "rows of a shared tile all taken for the first head's", LARGE,
        "heads = unit * HEADS + lines % HEADS", "heads = unit * HEADS + lines * 0",
        "test_large_heads.py::test_query_heads_of_a_group_share_tiles", "", "FAIL",
    ),
    Mutant(
        "every split begins with the first key", LARGE,
        "first += split * tiles_a_split * BLOCK_N", "first += 0 * split * tiles_a_split * BLOCK_N",
        "test_large_heads.py::test_keys_split_over_blocks", "plain and True", "FAIL",
    ),
    Mutant(
        "k read for any v of its layout", "kernels/large_head_dim/latent_host.py",
        "        and k.data_ptr() == v.data_ptr()\n", "",
        "test_large_heads.py::test_one_tensor_for_k_and_v", "1", "bits(",
    ),
    Mutant(
        "keys beside a latent's visible ones not zeroed", "kernels/large_head_dim/latent_device.py",
        "zero_unseen(ring, n, share.begin - key, share.end - key, V_BOXES)", "n += 0",
        "../kernels/hopper/test_latent.py::test_what_lies_beside_the_keys_has_no_effect", "", "torch.equal",
    ),
    Mutant(
        "a latent's sums not rescaled", "kernels/large_head_dim/latent_device.py",
        "acc[i] * alpha[None, :], is_async=True", "acc[i], is_async=True",
        "../kernels/hopper/test_latent.py::test_the_protocol_on_a_cpu", "plain", "FAIL",
    ),
    Mutant(
        "shares of a latent's keys overlap", "kernels/large_head_dim/latent_device.py",
        "first = (tile + tiles * split // num_splits) * KEYS", "first = tile * KEYS",
        "../kernels/hopper/test_latent.py::test_the_protocol_on_a_cpu", "plain and 3", "FAIL",
    ),
    Mutant(
        "pages of a tile copied over one another", "kernels/split_kv/few_rows_device.py",
        "box.slice(i * COPY, COPY, dim=2)", "box.slice(0, COPY, dim=2)",
        "../kernels/hopper/test_few_rows.py::test_the_protocol_on_a_cpu", "pages and 16 and not long", "FAIL",
    ),
    Mutant(
        "ids of the first step's pages for all steps", "kernels/split_kv/few_rows_device.py",
        "lanes == n % STEPS * PAGES + i", "lanes == i",
        "../kernels/hopper/test_few_rows.py::test_the_protocol_on_a_cpu", "pages and 32", "FAIL",
    ),
    Mutant(
        "heads that see different keys share tiles", "kernels/large_head_dim/host.py",
        "if shape is not None and shape[1] > 1:", "if shape is not None and shape[1] > 10**6:",
        "test_large_heads.py::test_a_mask_of_its_own_keeps_a_head_to_itself", "", "bits(",
    ),
    Mutant(
        "tiles of probabilities summed whatever their maxima", THREE,
        "part = acc + part * tl.math.exp2(m_tile - m_shift)[:, None]", "part = acc + part",
        "test_large_heads.py::test_every_way_in_chunks", "fused and plain", "FAIL",
    ),
    Mutant(
        "scores of the first share of head_dim alone", "kernels/three_kernel/softmax.py",
        "for share in tl.static_range(1, SPLIT_D):", "for share in tl.static_range(1, 1):",
        "test_large_heads.py::test_every_way_in_chunks", "shared and plain", "FAIL",
    ),
    Mutant(
        "one head more than the workspace was allowed", "kernels/three_kernel/plan.py",
        "config.workspace_bytes, key=", "2 * config.workspace_bytes, key=",
        "test_large_heads.py::test_the_workspace_is_what_was_said", "float16-ours", "workspace_bytes",
    ),
    Mutant(
        "three_kernel's gradients: delta of un-normalised probabilities", "kernels/three_kernel/backward.py",
        "delta = delta * scale\n", "delta = delta * 1.0\n",
        "test_large_heads.py::test_gradients_of_wide_heads", "float16 and plain", "FAIL",
    ),
    Mutant(
        "three_kernel's gradients: a later chunk replaces what the keys were given", "kernels/torch_products.py",
        "total += product(a, b)", "total.copy_(product(a, b))",
        "test_large_heads.py::test_gradients_of_wide_heads", "bfloat16 and causal", "FAIL",
    ),
    Mutant(
        "sums of later rows scaled by the factors of the first", "kernels/three_kernel/softmax.py",
        "stride_rh + rows_before + row)", "stride_rh + row)",
        "test_large_heads.py::test_sums_in_pieces_of_rows", "", "FAIL",
    ),
    Mutant(
        "scores read up to what the first row of a tile sees", "kernels/three_kernel/softmax.py",
        "own_end = visible_keys(first_row, last_row,", "own_end = visible_keys(first_row, first_row,",
        "test_large_heads.py::test_every_width", "640-float32 and three_kernel", "FAIL",
    ),
    Mutant(
        "softmax within the second launch: what was summed is not rescaled", "kernels/three_kernel/online.py",
        "acc * alpha[:, None]", "acc",
        "test_large_heads.py::test_every_way_in_chunks", "online", "FAIL",
    ),
    Mutant(
        "three_kernel on Hopper: P of tiles below their rows' reference not lowered",
        "kernels/three_kernel/hopper_products.py",
        "if is_lowered != 0.0:", "if is_lowered > 1.0:",
        "../kernels/hopper/test_products.py::test_tiles_with_references_of_their_own", "", "FAIL",
    ),
    Mutant(
        "three_kernel on Hopper: sums of tiles added whatever their references", "kernels/three_kernel/statistics.py",
        "tl.sum(sums * factor, 0)", "tl.sum(sums, 0)",
        "../kernels/hopper/test_products.py::test_tiles_with_references_of_their_own", "", "FAIL",
    ),
    Mutant(
        "three_kernel on Hopper: tiles below the diagonal of another block", "kernels/three_kernel/hopper_tiles.py",
        "block = root + 1 - chunk.diagonal", "block = root - chunk.diagonal",
        "../kernels/hopper/test_products.py::test_every_tile_is_dealt_out_once", "", "assert",
    ),
]  # fmt: skip

# What held-back tests and a red team found, each put back.
FOUND = [
    Mutant(
        "tiles of K and V of two swizzles share a buffer", "kernels/arguments.py",
        "if gpu.capability == 90 and block_m >= WGMMA_ROWS:", "if gpu.capability == 0 and block_m >= WGMMA_ROWS:",
        "../compile/test_descriptors.py::test_one_layout_for_each_address", "flash_fwd and 33", "mixed_descriptors",
    ),
    Mutant(
        "a compiled graph for every longest sequence", "options.py",
        "if type(value) is int or isinstance(value, torch.SymInt)",
        "if value.__class__ is int or isinstance(value, torch.SymInt)",
        "../test_training.py::test_packed_lengths_share_their_compiled_graphs", "", "forward <= 2",
    ),
    Mutant(
        "traced gradients have the operands' strides", "ops.py",
        "t.new_empty(t.shape) if want", "torch.empty_like(t) if want",
        "../test_training.py::test_opcheck_of_the_backward", "True", "SUCCESS",
    ),
    Mutant(
        "autocast reaches torch's products", "kernels/torch_products.py",
        'torch.autocast(device.type, enabled=False) if device.type in ("cpu", "cuda") else contextlib.nullcontext()',
        "contextlib.nullcontext()",
        "test_contexts.py::test_autocast_changes_no_bit", "eager and bfloat16-float32", "bits(",
    ),
    Mutant(
        "float32 products follow the process's setting", "kernels/torch_products.py",
        '"ieee") == "ieee"', '"ieee") != ""',
        "test_contexts.py::test_which_settings_keep_float32", "", "keeps_float32",
    ),
    Mutant(
        "a packed sequence may end before it begins", "kernels/primitives.py",
        "tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + item + 1), begin), total)",
        "tl.minimum(tl.load(cu_seqlens_ptr + item + 1), total)",
        "test_bad_input.py::test_any_numbers_as_offsets_stay_inside_the_tensors", "three_kernel", "guard",
    ),
    Mutant(
        "a bool is a number", "options.py",
        "if isinstance(value, bool) or not isinstance(value, numbers.Real):", "if not isinstance(value, numbers.Real):",
        "test_bad_input.py::test_a_known_call_forgives_no_type", "softcap", "DID NOT RAISE",
    ),
    Mutant(
        "equal numbers of other types keep their type", "options.py",
        "    return float(value)", "    return value if value else 0.0",
        "test_bad_input.py::test_what_a_call_says_has_one_type", "", "float",
    ),
    Mutant(
        "a kernel claims what it has no config for", "kernels/hopper/flash_fwd/claims.py",
        "if not reasons and has_bias_cells(problem)", "if reasons and has_bias_cells(problem)",
        "../test_dispatch.py::test_problems_that_once_had_no_config", "sm_90", "claims",
    ),
    Mutant(
        "a scale of 0 multiplies torch's causal mask", "kernels/torch_sdpa.py",
        " and problem.softmax_scale > 0", "",
        "test_edges.py::test_a_scale_of_nothing_leaves_no_nan", "torch_sdpa", "FAIL",
    ),
    Mutant(
        "keys that are not finite left to torch where nothing is hidden", "kernels/torch_sdpa.py",
        "if rounds or not _is_tame(problem, operands, hides):",
        "if rounds or not _is_tame(problem, operands, hides) and hides:",
        "../kernels/test_torch_sdpa.py::test_a_key_that_is_not_finite_makes_no_zeros", "nan", "isnan",
    ),
    Mutant(
        "the sign of a lazily negated view is lost", "checks.py",
        "type(operands)(*[t.resolve_neg()", "type(operands)(*[torch._neg_view(t)",
        "test_pairs.py::test_lazily_negated_views_equal_their_values", "flash_fwd and q", "bits(",
    ),
    Mutant(
        "the lowest number as a bias overflows", "kernels/primitives.py",
        'bias = tl.where(tl.abs(bias) < float("inf"), bounded, bias)',
        'bias = tl.where(tl.abs(bounded) < float("inf"), bias, bias)',
        "test_edges.py::test_the_lowest_number_as_a_bias_shows_its_pair", "flash_fwd and ieee", "FAIL C LSE",
    ),
    Mutant(
        "gradients: NaN of a row that sees nothing is multiplied by 0", "kernels/eager.py",
        "torch.where((scores != NEG_INF).any(-1)[..., None], t", "torch.where((scores != 1.0).any(-1)[..., None], t",
        "test_gradients.py::test_rows_that_see_nothing_pass_no_nan_on", "eager and mask", "bits(",
    ),
    Mutant(
        "three_kernel's gradients: rows that see nothing stay in their chunk", "kernels/three_kernel/backward.py",
        "first = chunk.row_begin if high is None else min(max(chunk.row_begin, -high), end)", "first = chunk.row_begin",
        "test_gradients.py::test_rows_that_see_nothing_pass_no_nan_on", "three_kernel and more", "bits(",
    ),
    Mutant(
        "gradients: the derivative of a capped score that is hidden", "kernels/eager.py",
        "ds = torch.where(scores == NEG_INF, 0.0, ds * (1 - squashed * squashed))",
        "ds = ds * (1 - squashed * squashed)",
        "test_drawn.py::test_what_was_wrong_once", "eager", "nan",
    ),
    Mutant(
        "merging: NaN of a part without keys reaches the gradient of its lse", "states.py",
        "out = out + by_row * torch.where(by_row == 0, 0.0, part.float())",
        "out = out + torch.where(by_row == 0, 0.0, by_row * part.float())",
        "../test_states.py::test_a_part_without_keys_has_gradient_zero_whatever_it_holds", "", "isfinite",
    ),
]  # fmt: skip

# What a paged cache did wrong, and what calls on one must refuse or leave alone.
CACHE = [
    Mutant(
        "a fork of evicted tokens let through", "kv_cache/cache.py",
        "        self._refuse_evicted(row, parent, length)\n", "",
        "../test_kv_cache.py::test_a_fork_of_evicted_tokens_frees_no_page_of_another", "", "DID NOT RAISE",
    ),
    Mutant(
        "a sequence truncated into evicted tokens", "kv_cache/cache.py",
        "        self._refuse_evicted(row, sequence, length)\n", "",
        "../test_kv_cache.py::test_a_sequence_is_cut_only_as_far_as_its_window_is_there", "truncate", "DID NOT RAISE",
    ),
    Mutant(
        "the window before the end of a truncated sequence not counted", "kv_cache/cache.py",
        "shortest = first + sequence.window_left if first else 0", "shortest = first + 1 if first else 0",
        "../test_kv_cache.py::test_a_sequence_is_cut_only_as_far_as_its_window_is_there", "fork", "DID NOT RAISE",
    ),
    Mutant(
        "pages evicted that truncation was promised", "kv_cache/cache.py",
        "kept = max(0, sequence.length - max_truncate - window_left)", "kept = max(0, sequence.length - window_left)",
        "../test_kv_cache.py::test_tokens_that_may_be_taken_back_keep_their_window", "", "the token at 23",
    ),
    Mutant(
        "a fork counts no page", "kv_cache/cache.py",
        "            if page != EVICTED:\n                self._references[page] += 1\n",
        "            if page != EVICTED:\n                self._references[page] += 0\n",
        "../test_kv_cache.py::test_forks_share_pages_until_one_writes", "7", "assert",
    ),
    Mutant(
        "seqlens_q not compared with cu_seqlens_q", "cached_calls.py",
        "            if got != said:\n", "            if got < said:\n",
        "../test_cached_calls.py::test_lengths_on_the_host_say_what_is_appended", "another and torch", "DID NOT RAISE",
    ),
    Mutant(
        "queries of an append follow the offsets on the device", "cached_calls.py",
        "operands = operands._replace(cu_seqlens_q=append.new.cu_seqlens)", "operands = operands._replace()",
        "../test_cached_calls.py::test_lengths_on_the_host_say_what_is_appended", "another and torch",
        "torch.equal(out, expected)",
    ),
    Mutant(
        "books changed before the device", "kv_cache/cache.py",
        """        self._publish([], [(row, 0) for row in listed])
        for row, sequence in zip(listed, sequences, strict=True):
            self._give_back(sequence.pages)
            self._sequences[row] = None
""",
        """        for row, sequence in zip(listed, sequences, strict=True):
            self._give_back(sequence.pages)
            self._sequences[row] = None
        self._publish([], [(row, 0) for row in listed])
""",
        "../test_kv_cache_errors.py::test_whichever_operation_fails_nothing_has_changed", "free", "has changed",
    ),
    Mutant(
        "a failed append leaves the lengths on the device advanced", "kv_cache/cache.py",
        "            self._tables[growth.cells] = growth.before\n", "",
        "../test_kv_cache_errors.py::test_whichever_operation_fails_nothing_has_changed", "append and not packed",
        "has changed",
    ),
    Mutant(
        "a cache made in inference mode works nowhere else", "kv_cache/cache.py",
        "with torch.inference_mode(False):  # else only", "with torch.enable_grad():  # else only",
        "../test_kv_cache_errors.py::test_another_thread_than_the_one_that_made_it_in_inference_mode", "",
        "Inplace update to inference tensor",
    ),
    Mutant(
        "appended tokens join the graph", "kernels/append_kv.py",
        "@torch.inference_mode()  # writes", "@torch.enable_grad()  # writes",
        "../test_kv_cache_errors.py::test_the_pool_stays_out_of_every_graph", "False", "requires_grad",
    ),
    Mutant(
        "a gradient through the cache lost without a word", "api.py",
        "    if wanting:\n", "    if wanting and not return_lse:\n",
        "../test_kv_cache_errors.py::test_backward_says_that_there_is_no_gradient", "k_new", "requires_grad",
    ),
    Mutant(
        "a plan of a call without gradients serves a call with them", "api.py",
        "if key is not None and not wanting:", "if key is not None:",
        "../test_kv_cache_errors.py::test_backward_says_that_there_is_no_gradient", "q", "requires_grad",
    ),
    Mutant(
        "offsets beyond the last token size what is allocated", "kernels/paging.py",
        "cu_seqlens.long().clamp(0, total).cummax(0).values", "cu_seqlens.long().cummax(0).values",
        "../test_cached_calls.py::test_any_offsets_become_offsets", "", "assert",
    ),
    Mutant(
        "a gathered cache keeps the offsets it was given", "kernels/paging.py",
        "offsets_within(operands.cu_seqlens_q, len(q)).to(torch.int32)", "operands.cu_seqlens_q.clone()",
        "../test_cached_calls.py::test_sizes_follow_tensors_and_not_their_contents", "", "seen.elements <= allowed",
    ),
    Mutant(
        "queries of a cached call that end before they begin have a length", "kernels/primitives.py",
        "tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + item + 1), begin), total)",
        "tl.minimum(tl.load(cu_seqlens_ptr + item + 1), total)",
        "test_paged_bad_input.py::test_any_numbers_unchecked_stay_inside_the_tensors", "split_kv-False",
        "a guard region was written",
    ),
    Mutant(
        "queries beyond the table of angles let through", "cached_calls.py",
        "check_positions(rotary, max((used[row] for row in rows), default=0))", "check_positions(rotary, 0)",
        "../test_cached_calls.py::test_queries_beyond_the_table_of_angles_are_refused", "", "DID NOT RAISE",
    ),
    Mutant(
        "threads drop one plan twice", "runtime/bounded.py",
        "with self._lock:\n            self._entries.pop", "with threading.Lock():\n            self._entries.pop",
        "../test_bounded.py::test_threads_that_put_more_than_is_kept", "", "errors == []",
    ),
    Mutant(
        "new keys that torch has not negated yet", "kv_cache/tokens.py",
        "None if t is None else t.resolve_neg() for t in (k_new, v_new, q)",
        "None if t is None else t for t in (k_new, v_new, q)",
        "../test_cached_calls.py::test_signs_that_torch_has_put_off", "kernel", "torch.equal",
    ),
]  # fmt: skip

MUTANTS = [
    *(NAMED + OTHERS + HOPPER_FLOAT32 + HOPPER_MASKS + HOPPER + LARGE_HEADS + FOUND + CACHE),
    *(BACKWARD + OF_DROPOUT + HOPPER_BACKWARD + INTEGRATIONS + QUANTIZED),
]
