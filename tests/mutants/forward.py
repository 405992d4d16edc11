"""Seeded faults of the forward of dense and packed calls, of the checks before it, and of plans and launches."""

from __future__ import annotations

from tests.mutants.mutant import EAGER, FLASH, HIDE, NAIVE, PARTIALS, PASSES, PRIMITIVES, TILED, Mutant

# The eleven that correctness is first asked about. Portable Triton has no barrier of its own to drop; the nearest
# mistake it lets one make is to serve a call with what was prepared for another.
NAMED = [
    Mutant(
        "mask one key too wide", PRIMITIVES,
        "high = seqlen_k - seqlen_q + window_right", "high = seqlen_k - seqlen_q + window_right + 1",
        "test_probes.py::test_count", "flash_fwd and causal-flash_fwd and 113", "torch.equal",
    ),
    Mutant(
        "padding key counted", FLASH,
        "visible = visible & (keys < key_end)[None, :]", "visible = visible",
        "test_probes.py::test_count", "flash_fwd and none and 113", "torch.equal",
    ),
    Mutant(
        "first key tile lost", FLASH,
        "for step in range(begin, end, BLOCK_N)", "for step in range(begin + BLOCK_N, end, BLOCK_N)",
        "test_probes.py::test_support", "flash_fwd and none and 113", "keys from 0",
    ),
    Mutant(
        "accumulator not rescaled", FLASH,
        "p, v, times(acc, alpha[:, None]),", "p, v, acc,",
        "test_gates.py::test_case_grid", "float16-113x103-d64-h2x2-b2-sharp-flash_fwd", "FAIL B2 RMS of out",
    ),
    Mutant(
        "wrong head map: modulo instead of division", FLASH,
        "kv_head = head // group_size", "kv_head = head % (num_heads_q // group_size)",
        "test_probes.py::test_retrieval_across_heads", "flash_fwd and 6", "torch.equal",
    ),
    Mutant(
        "strides of k used for v", FLASH,
        "v_tensor.stride_b + kv_head * v_tensor.stride_h", "v_tensor.stride_b + kv_head * k_tensor.stride_h",
        "test_pairs.py::test_layouts_equal_contiguous", "differ-False-True-flash_fwd", "bits(",
    ),
    Mutant(  # unsigned, for the negative offset of a signed one ends the process instead of the test
        "32-bit offset", PRIMITIVES,
        "rows.to(tl.int64)[:, None] * stride_row", "rows.to(tl.uint32)[:, None] * tl.cast(stride_row, tl.uint32)",
        "test_edges.py::test_offsets_past_32_bits", "k-1-4294967296-flash_fwd", "bits(",
    ),
    Mutant(
        "last row of each tile not stored", FLASH,
        "store_tiles(out_ptr, rows, seqlen_q,", "store_tiles(out_ptr, rows, row_last,",
        "test_poison.py::test_every_cell_is_written", "flash_fwd and d64-h4x2", "isnan",
    ),
    Mutant(
        "LSE in base two", PARTIALS,
        "(m_i + tl.math.log2(l_i)) * LN_2", "m_i + tl.math.log2(l_i)",
        "test_edges.py::test_lse_is_the_natural_logarithm_in_float32", "False-flash_fwd", "Tensor-likes are not close",
    ),
    Mutant(
        "stale cache key: a call's options left out", "plans.py",
        "key: list[Any] = [said, is", "key: list[Any] = [said[0][-2:], is",
        "test_edges.py::test_causal_alignment", "flash_fwd", "keys_seen",
    ),
    Mutant(
        "window's left edge exclusive", PRIMITIVES,
        "low = seqlen_k - seqlen_q - window_left", "low = seqlen_k - seqlen_q - window_left + 1",
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
        "scale of a padded head_dim", "checks/calls.py",
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
        "final_state(m_i, l_i, sinks_ptr, head, HAS_SINKS)", "final_state(m_i, l_i, sinks_ptr, head, False)",
        "test_gates.py::test_case_grid", "113x103-d64-h2x1-b2-sinks-normal-flash_fwd", "FAIL C LSE",
    ),
    Mutant(
        "sink in base two", PARTIALS,
        "tl.load(sinks_ptr + heads) * LOG2_E", "tl.load(sinks_ptr + heads)",
        "test_edges.py::test_rows_that_see_nothing", "mask-True-flash_fwd", "FAIL C LSE",
    ),
    Mutant(
        "top-left mask aligned to the last key", PRIMITIVES,
        "high = tl.minimum(high, 0)", "high = tl.minimum(high, seqlen_k - seqlen_q)",
        "test_edges.py::test_causal_alignment", "top_left and flash_fwd", "keys_seen",
    ),
    Mutant(
        "tiles behind the whole ones taken from among them", PRIMITIVES,
        "tl.where(step < whole_begin, step, step + (whole_end - whole_begin))", "step",
        "test_edges.py::test_first_tile_hidden_and_later_logits_low", "flash_fwd and float16 and not hopper", "FAIL",
    ),
    Mutant(
        "NaN leaks from values that nobody sees", FLASH,
        "v_offset, keys, dims_v, key_begin, key_end,", "v_offset, keys, dims_v, 0, seqlen_k,",
        "test_pairs.py::test_keys_that_no_query_sees_may_hold_anything", "window-bfloat16-nan-flash_fwd", "bits(",
    ),
    Mutant(
        "a second walk over the keys adds to the sums of the first", FLASH,
        "acc = only_where(~again, acc)", "acc = times(acc, 1.0)",
        "test_pairs.py::test_keys_that_no_query_sees_may_hold_anything", "bias-bfloat16-nan-flash_fwd", "bits(",
    ),
    Mutant(
        "scores of the second tile of columns alone", "kernels/column_tiles.py",
        "transposed(b[i]), total, PRECISION)", "transposed(b[i]), None, PRECISION)",
        "test_gates.py::test_case_grid", "float16-113x103-d192x128-h2x1-b2-normal-flash_fwd", "FAIL B2 RMS of out",
    ),
    Mutant(
        "a mask at any address is read in groups", "kernels/arguments.py",
        "tensor.data_ptr() % 16 == 0", "tensor.data_ptr() >= 0",
        "../kernels/test_arguments.py::test_masks_and_biases_that_groups_cannot_read_are_copied", "", "is not",
    ),
    Mutant(
        "keys of a mask read in groups whatever its strides", "kernels/arguments.py",
        "math.gcd(*multiples) % PAIR_GROUP == 0", "math.gcd(*multiples) >= 0",
        "../kernels/test_arguments.py::test_masks_and_biases_are_read_in_groups_where_all_strides_allow_it", "", "== 1",
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
        "tl.abs(rows[:, None] + (seqlen_k - seqlen_q) - keys[None, :])", "tl.abs(rows[:, None] - keys[None, :])",
        "test_gates.py::test_case_grid", "113x103 and alibi and heads-normal-flash_fwd", "FAIL C LSE",
    ),
    Mutant(
        "a row that sees nothing is 0 / 0", PARTIALS,
        "tl.where(l_i == 0.0, 1.0, l_i))", "l_i)",
        "test_edges.py::test_rows_that_see_nothing", "mask-False-flash_fwd", "FAIL",
    ),
    Mutant(
        "NaN swept under the rug", FLASH,
        "stride_m, out, HEAD_DIM_V)", "stride_m, only_where(out[0] == out[0], out), HEAD_DIM_V)",
        "test_edges.py::test_not_finite_in_q_or_k_reaches_the_rows_that_see_it", "q-nan-flash_fwd", "isnan",
    ),
    Mutant(
        "v of another head", FLASH,
        "kv_head * v_tensor.stride_h", "(1 - kv_head) * v_tensor.stride_h",
        "test_edges.py::test_not_finite_in_v_stays_in_its_head", "flash_fwd and nan", "isfinite",
    ),
    Mutant(
        "probabilities rounded before they are summed", PRIMITIVES,
        "l_i * alpha + tl.sum(p, 1)", "l_i * alpha + tl.sum(p.to(tl.float16).to(tl.float32), 1)",
        "test_gates.py::test_case_grid", "float16-113x103-d64-h2x2-b2-normal-flash_fwd", "FAIL C LSE",
    ),
    Mutant(
        "16-bit accumulator", "kernels/column_tiles.py",
        "rows[i], acc[i], PRECISION)", "rows[i], acc[i].to(tl.float16).to(tl.float32), PRECISION)",
        "test_probes.py::test_retrieval", "float32:ieee and none and flash_fwd", "torch.equal",
    ),
    Mutant(
        "kv heads taken in turn", FLASH,
        "kv_head = head // group_size", "kv_head = head % (num_heads_q // group_size)",
        "test_edges.py::test_query_heads_share_kv_heads_in_groups", "flash_fwd and 6", "torch.equal",
    ),
    Mutant(
        "columns beyond head_dim_v stored", FLASH,
        "stride_m, out, HEAD_DIM_V)", "stride_m, out, BLOCK_DV + REST_DV)",
        "test_poison.py::test_guards_and_inputs_stay_as_they_were", "flash_fwd and d40x59", "a guard region",
    ),
    Mutant(
        "an empty sequence sees one key", FLASH,
        "seqlen_k, sequences.total_k)", "seqlen_k, sequences.total_k); seqlen_k += seqlen_k == 0",
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
        HIDE + "\n                scale_left = 1.0\n", HIDE.replace(" * scale_left", "") + "\n",
        "test_edges.py::test_scale_zero_is_uniform_over_what_is_visible", "flash_fwd", "FAIL",
    ),
    Mutant(
        "a scale of 0 is no scale", "checks/calls.py",
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
        "integer masks let through", "checks/calls.py",
        "if tensor.dtype not in dtypes:", "if tensor.dtype not in (*dtypes, torch.uint8):",
        "test_bad_input.py::test_wrong_type", "integer", "a kernel was bound",
    ),
    Mutant(
        "heads that do not divide let through", "checks/calls.py",
        "    if num_heads_q % num_heads_kv:\n", "    if num_heads_q < num_heads_kv:\n",
        "test_bad_input.py::test_wrong_value", "divide", "a kernel was bound",
    ),
    Mutant(
        "an infinite scale let through", "checks/calls.py",
        "0 <= scale <= LARGEST", "0 <= scale",
        "test_bad_input.py::test_wrong_value", "scale", "a kernel was bound",
    ),
    Mutant(
        "sequences longer than the longest let through", "checks/calls.py",
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
        "a check is an assertion", "checks/calls.py",
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
        "raw, rows, keys, row_inside, key_end,", "raw, rows, keys, row_inside, line_end,",
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
        "heads that groups leave over are not counted", "kernels/flash_fwd/kernel.py",
        "tile = num_tiles - 1 - place // heads\n", "tile = num_tiles - 1 - place // heads_in_l2\n",
        "test_edges.py::test_heads_left_over_by_groups_that_share_l2", "flash_fwd-3 and not hopper", "gates fail",
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
        "a mask of another length in a known class", "checks/calls.py",
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
        "a captured call shares memory with eager calls", "runtime/scratch.py",
        "        if capturing():\n            return made()\n", "",
        "../test_launches_of_a_call.py::test_launches_take_what_they_were_specified_with", "merge", "isdisjoint",
    ),
    Mutant(
        "maxima lie where the inverses do", "kernels/hopper/flash_fwd/host.py",
        "inverses if maxima is None else maxima", "inverses if inverses is not None else maxima",
        "../test_launches_of_a_call.py::test_launches_take_what_they_were_specified_with", "maxima", "torch.Size",
    ),
    Mutant(
        "two workspaces exchanged", "kernels/three_kernel/hopper_host.py",
        "out tile_top lowered row_scale", "out lowered tile_top row_scale",
        "../test_launches_of_a_call.py::test_launches_take_what_they_were_specified_with", "three_kernel", "torch.Size",
    ),
    Mutant(
        "compiles while a graph is captured", "runtime/launch.py",
        "if torch.cuda.is_current_stream_capturing():", "if False:",
        "test_gpu.py::test_compiling_during_capture_is_refused_and_the_capture_survives", "", "", needs_gpu=True,
    ),
]  # fmt: skip
