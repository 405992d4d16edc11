"""Seeded faults of the forward on Hopper."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

# Of the Hopper kernel's float32, whose source runs on a CPU as well (tests/kernels/hopper/gluon_on_cpu.py).
FLOAT32_MASKS_ON_CPU = "../kernels/hopper/test_flash_fwd_float32_masks_on_cpu.py::test_float32_under_masks_on_a_cpu"
HOPPER_FLOAT32 = [
    Mutant(
        "float32 on Hopper: scores of scaled operands not scaled back", "kernels/hopper/split_float32.py",
        "scale=in_range(rules.scale * inverse))", "scale=in_range(rules.scale + 0 * inverse))",
        "../kernels/hopper/test_flash_fwd_on_cpu.py::test_the_protocol_on_a_cpu", "full and fp16x1", "gates fail",
    ),
    Mutant(
        "float32 on Hopper: values scaled back by another head's power of two", "kernels/hopper/split_float32.py",
        "work.head // group_size) * 2 + 1)", "work.head // group_size) * 2)",
        "../kernels/hopper/test_flash_fwd_on_cpu.py::test_the_protocol_on_a_cpu", "full and fp16x1", "gates fail",
    ),
    Mutant(
        "float32 on Hopper: a scale that keys count for which no query sees", "kernels/prepass/in_use.py",
        "end = tl.minimum(end, length_q + high)", "end = tl.minimum(end, length_k)",
        "../kernels/test_scale_ahead.py::test_what_nobody_sees_has_no_say", "top_left", "nothing was garbage",
    ),
    Mutant(
        "float32 under a mask on Hopper: a key that no query sees counts towards a scale",
        "kernels/prepass/scale_ahead.py", "mask=inside, other=0) != 0", "mask=inside, other=0) >= 0",
        FLOAT32_MASKS_ON_CPU, "grouped and one", "torch.equal",
    ),
    Mutant(
        "float32 under a mask on Hopper: keys before the first one in use are not written",
        "kernels/prepass/scale_ahead.py", "first_written = low_row // ALIGNED_KEYS * ALIGNED_KEYS",
        "first_written = low_row",
        FLOAT32_MASKS_ON_CPU, "window and one", "gates fail",
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
        "float32 on Hopper: parts of another head", "kernels/hopper/flash_fwd/producer.py",
        "work.head * rules.PARTS + part", "work.head + part",
        "../kernels/hopper/test_flash_fwd_on_cpu.py::test_the_protocol_on_a_cpu", "full and bf16x6", "gates fail",
    ),
    Mutant(
        "float32 on Hopper: parts of a head written over the next head's", "kernels/prepass/split_ahead.py",
        "(batch_head * rows_of_head + token) * ROW", "(batch_head * rows_of_part + token) * ROW",
        "../kernels/hopper/test_flash_fwd.py::test_parts_add_up_to_the_operands", "", "assert",
    ),
]  # fmt: skip

# Of its split keys, the same.
SPLITS = "kernels/hopper/flash_fwd/splits.py"
ON_SPLITS = "../kernels/hopper/test_flash_fwd_on_cpu.py::test_split_keys_on_a_cpu"
HOPPER_SPLITS = [
    Mutant(
        "Hopper: a split without keys counts the tile that it loads", SPLITS,
        "l_row = gl.where(is_empty, 0.0, l_row)", "l_row = gl.where(is_empty, l_row, l_row)",
        ON_SPLITS, "full and more", "gates fail",
    ),
    Mutant(
        "Hopper: a step between two splits left out", SPLITS,
        "steps * (split + 1) // splits.num_splits", "(steps * (split + 1) - 1) // splits.num_splits",
        ON_SPLITS, "full and three", "gates fail",
    ),
    Mutant(
        "Hopper: sums of a split stored over the next split's maxima", SPLITS,
        "lines + split * of_split", "lines",
        ON_SPLITS, "full and three", "",
    ),
    Mutant(
        "Hopper: partial results divided by their rounded sum", SPLITS,
        "weighted = out[i] * gl.convert_layout", "weighted = out[i] + 0 * gl.convert_layout",
        ON_SPLITS, "full and three", "gates fail",
    ),
    Mutant(
        "Hopper: a split counted as a head", SPLITS,
        "work = with_fields(work, head=work.head // splits.num_splits)", "work = with_fields(work, head=work.head % 1)",
        ON_SPLITS, "full and three", "gates fail",
    ),
]  # fmt: skip

# Of its masks and biases, the same.
ON_CPU = "../kernels/hopper/test_flash_fwd_on_cpu.py::"
HOPPER_MASKS = [
    Mutant(
        "Hopper: values that a mask hides from all not zeroed", "kernels/hopper/flash_fwd/mask_bias.py",
        "* v_ring.parts + part)), seen)", "* v_ring.parts + part)), seen + 1)",
        f"{ON_CPU}test_masks_and_biases_on_a_cpu", "mask- and 64", "torch.equal",
    ),
    Mutant(
        "Hopper: a block whose output is not finite not brought again", "kernels/hopper/flash_fwd/consumer.py",
        "            if wanted == 0:", "            if wanted >= 0:",
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
        "Hopper: the log-sum-exp of another head of a tile", "kernels/hopper/visible.py",
        "head * rules.HEADS + rows % rules.HEADS", "head * rules.HEADS + 0 * rows",
        f"{ON_CPU}test_heads_that_share_tiles_on_a_cpu", "full and 4", "gates fail",
    ),
    Mutant(
        "bits of a mask in another order", "kernels/prepass/mask_bits.py",
        "column // 8 % 4 * 2 + column % 2", "column // 8 % 4 + column % 2 * 4",
        "../kernels/test_mask_bits.py::test_every_cell_has_its_bit", "", "torch.equal",
    ),
]  # fmt: skip

# Of its forward with quantized operands, the same.
QUANTIZED_ON_CPU = "../kernels/hopper/test_flash_fwd_quantized_on_cpu.py::"
HOPPER_QUANTIZED = [
    Mutant(
        "Hopper, factors of blocks: room for as many as tiles in flight", "kernels/hopper/factors.py",
        "[2 * (STAGES + 1), 1]", "[2 * STAGES, 1]",
        f"{QUANTIZED_ON_CPU}test_configs", "dims3", "gates fail",
    ),
    Mutant(
        "Hopper, factors of blocks of values: those of keys", "kernels/hopper/factors.py",
        "of_v = factor_at(rules.factors.of_v, work, kv_head, key - work.k_begin)",
        "of_v = factor_at(rules.factors.of_k, work, kv_head, key - work.k_begin)",
        f"{QUANTIZED_ON_CPU}test_the_protocol_on_a_cpu", "int8 and values and 64", "gates fail",
    ),
    Mutant(
        "int8 on Hopper: the factor of the first block for all queries", "kernels/hopper/factors.py",
        "(row // of_q.BLOCK)", "(row * 0)",
        f"{QUANTIZED_ON_CPU}test_the_protocol_on_a_cpu", "sinks", "gates fail",
    ),
    Mutant(
        "int8 on Hopper: tiles of keys with two factors", "kernels/hopper/flash_fwd/kernel.py",
        "= has_blocks or pages.PAGE_SIZE > 0", "= pages.PAGE_SIZE > 0",
        f"{QUANTIZED_ON_CPU}test_the_protocol_on_a_cpu", "far", "gates fail",
    ),
    Mutant(
        "int8 on Hopper: only 16 values before a window are zeroed", "kernels/hopper/flash_fwd/consumer.py",
        "rules.BLOCK_N if rules.ALIGN_KEYS else 16", "16",
        f"{QUANTIZED_ON_CPU}test_values_that_no_query_sees_may_be_nan", "far", "assert ",
    ),
    Mutant(
        "quantized on Hopper: sums of probabilities that hold a factor of V", "kernels/hopper/softmax.py",
        "sums = sums * scale.weight", "sums = sums * 1.0",
        f"{QUANTIZED_ON_CPU}test_the_protocol_on_a_cpu", "values", "gates fail",
    ),
    Mutant(
        "quantized on Hopper: sums of int8 products start at 0", "kernels/hopper/parts.py",
        "use_acc=i > 0 or zero.dtype == gl.int32", "use_acc=i > 0",
        f"{QUANTIZED_ON_CPU}test_the_protocol_on_a_cpu", "full", "gates fail",
    ),
    Mutant(
        "quantized on Hopper: V widened by the head of another token", "kernels/prepass/widen_values.py",
        "rows % num_heads * v_tensor.stride_h", "(rows + 1) % num_heads * v_tensor.stride_h",
        f"{QUANTIZED_ON_CPU}test_widened_values", "", "torch.equal",
    ),
    Mutant(
        "quantized on Hopper: the output without its factor", "kernels/hopper/flash_fwd/consumer.py",
        "factor = factor * of_output(rules.factors, work)", "factor = factor * 1.0",
        f"{QUANTIZED_ON_CPU}test_the_protocol_on_a_cpu", "values", "gates fail",
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
        "Hopper: one large score changes how the tanh of its tile is computed", "kernels/hopper/parts.py",
        'f"selp.f32 ${i}, z, w, far"', 'f"selp.f32 ${i}, z, z, far"',
        "../kernels/hopper/test_tanh.py::test_a_result_depends_on_its_own_score_alone", "", "array_equal",
    ),
    Mutant(
        "Hopper: a softcap's polynomial beyond its range", "kernels/hopper/parts.py",
        'half, one, minus_two, two_in_bits = "0f3F000000"', 'half, one, minus_two, two_in_bits = "0f3F400000"',
        "../kernels/hopper/test_tanh.py::test_tanh_of_a_tile_is_within_its_bound", "any", "7e-07",
    ),
    Mutant(
        "Hopper: wrong head map", "kernels/hopper/flash_fwd/producer.py",
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
        "Hopper: values behind a packed sequence not zeroed", "kernels/hopper/flash_fwd/consumer.py",
        "if rows_used < rules.BLOCK_N:", "if rows_used < -rules.BLOCK_N:",
        "test_pairs.py::test_other_batch_items_may_hold_nan", "hopper", "bits(", needs_gpu=True,
    ),
    Mutant(
        "Hopper: rows stored into the next packed sequence", "kernels/hopper/rows.py",
        "(rows < queries_left * HEADS)[:, None] & (columns < head_dim_v)",
        "(rows < queries_left * HEADS + 8)[:, None] & (columns < head_dim_v)",
        "test_pairs.py::test_packed_equals_single_calls", "hopper", "bits(", needs_gpu=True,
    ),
    Mutant(
        "Hopper: both rows of a thread hidden by the first's bits", "kernels/hopper/words.py",
        "and.b32 t, ${2 * n + (i & 2)}", "and.b32 t, ${2 * n + 0 * i}",
        "test_probes.py::test_count", "hopper and mask", "torch.equal", needs_gpu=True,
    ),
    Mutant(
        "Hopper: tile counter not put back", "kernels/hopper/scheduler.py",
        "if drawn == num_tiles - 1:\n            gl.atomic_xchg(counter_ptr, 0",
        "if drawn == num_tiles - 1:\n            gl.atomic_xchg(counter_ptr, 1",
        "../kernels/hopper/test_flash_fwd.py::test_a_launch_finds_the_counter_as_the_one_before_found_it", "",
        "torch.equal", needs_gpu=True,
    ),
]  # fmt: skip

# The same for paged caches.
PAGES_ON_CPU = f"{ON_CPU}test_pages_on_a_cpu"
EIGHT_BITS_ON_CPU = f"{ON_CPU}test_8_bit_pages_on_a_cpu"
HOPPER_PAGES = [
    Mutant(
        "Hopper: every page of a tile copied to its first rows", "kernels/hopper/pages.py",
        "tile.slice(j * COPY, COPY, dim=2)", "tile.slice(0 * j, COPY, dim=2)",
        PAGES_ON_CPU, "full and 16", "gates fail",
    ),
    Mutant(
        "Hopper: the page table of another row", "kernels/hopper/pages.py",
        "table_row_of(pages, batch).to(gl.int64)", "batch.to(gl.int64)",
        PAGES_ON_CPU, "full and 16", "gates fail",
    ),
    Mutant(
        "Hopper: tiles that begin inside a page", "kernels/hopper/flash_fwd/kernel.py",
        "= has_blocks or pages.PAGE_SIZE > 0", "= has_blocks",
        PAGES_ON_CPU, "window and 16", "gates fail",
    ),
    Mutant(
        "Hopper: the length of another row", "kernels/hopper/scheduler.py",
        "length_of(pages, table_row_of(pages, b), s.seqlen_k)", "length_of(pages, b, s.seqlen_k)",
        PAGES_ON_CPU, "causal and 16", "gates fail",
    ),
    Mutant(
        "Hopper: the first tile of a sequence twice, the last not at all", "kernels/hopper/scheduler.py",
        "slot - before + missing)", "slot - before)",
        "../kernels/hopper/test_scheduler.py::test_sequences_that_decode_come_before_prompts", "lengths0", "assert",
    ),
    Mutant(
        "Hopper, 8-bit cache: rows of a tile from its beginning", "kernels/hopper/flash_fwd/widener.py",
        "source.slice((j + 1) * ROWS_AT_ONCE", "source.slice(j * ROWS_AT_ONCE",
        EIGHT_BITS_ON_CPU, "full and bfloat16", "gates fail",
    ),
    Mutant(
        "Hopper, 8-bit cache: the factor of V of another head", "kernels/hopper/flash_fwd/launches.py",
        "for x in (page, head, cell)", "for x in (page, 0 * head, cell)",
        EIGHT_BITS_ON_CPU, "full and bfloat16", "gates fail",
    ),
    Mutant(
        "Hopper, 8-bit cache: the log-sum-exp of raised probabilities", "kernels/hopper/flash_fwd/consumer.py",
        "l_row = l_row * LOWER", "l_row = l_row * 1.0",
        EIGHT_BITS_ON_CPU, "full and bfloat16", "gates fail",
    ),
    Mutant(
        "Hopper, 8-bit cache: queries without their power of two", "kernels/hopper/flash_fwd/consumer.py",
        "in_range(rules_of_head.scale * power)", "in_range(rules_of_head.scale + 0 * power)",
        EIGHT_BITS_ON_CPU, "full and bfloat16", "gates fail",
    ),
    Mutant(
        "Hopper, factors of tokens: that of a page's first token for all", "kernels/hopper/token_factors.py",
        "cell * strides[2]", "0 * cell * strides[2]",
        EIGHT_BITS_ON_CPU, "full and token and bfloat16", "gates fail",
    ),
    Mutant(
        "Hopper, factors of tokens: sums of probabilities with the factors of values", "kernels/hopper/softmax.py",
        "counted = p * scale.weights", "counted = p",
        EIGHT_BITS_ON_CPU, "full and token and bfloat16", "gates fail",
    ),
    Mutant(
        "Hopper, factors of tokens: probabilities not raised beside float16", "kernels/hopper/flash_fwd/kernel.py",
        "narrows_queries or TOKEN_FACTORS", "narrows_queries",
        f"{ON_CPU}test_tokens_whose_values_are_zero", "1.0 and float16 and not bfloat16", "gates fail",
    ),
    Mutant(
        "Hopper, factors of tokens: a maximum that lags beside float16 queries", "kernels/hopper/softmax.py",
        "Weighted(weights, rules.NARROWS_QUERIES)", "Weighted(weights, True)",
        f"{ON_CPU}test_the_key_that_leads_a_row_has_no_error_of_its_own", "float16 and not bfloat16", "gates fail",
    ),
    Mutant(
        "Hopper, factors of tokens: those of the tile before", "kernels/hopper/factors.py",
        "return rules_with_tokens(n, rules)", "return rules_with_tokens(n - 1, rules)",
        EIGHT_BITS_ON_CPU, "full and token and bfloat16", "gates fail",
    ),
]  # fmt: skip
