"""Seeded faults of portable gradients, and of dropout in both passes."""

from __future__ import annotations

from tests.mutants.mutant import EAGER, FLASH, Mutant

# Of the portable gradients.
DQ, DKV, DBIAS = (f"kernels/flash_bwd/{name}.py" for name in ("dq", "dkv", "dbias"))
BACKWARD_TILES = "kernels/flash_bwd/tiles.py"
ONE_SIDE, BY_ONE_SIDE = "kernels/flash_bwd/one_side.py", "../kernels/flash_bwd/test_one_side.py::"
BY_GATES = "../kernels/flash_bwd/test_gradients.py::"
SLOPES = "test_slopes.py"
BACKWARD = [
    Mutant(
        "gradients: nothing arrives at the log-sum-exp", BACKWARD_TILES,
        "delta -= load_rows(dlse_ptr + line", "delta -= 0.0 * load_rows(dlse_ptr + line",
        f"{BY_GATES}test_tiles", "128 and False", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "gradients in float32: what arrives at the log-sum-exp with the other sign", DQ,
        "delta -= load_rows(dlse_ptr + line, rows, seqlen_q, 0.0)\n            lse_log2",
        "delta += load_rows(dlse_ptr + line, rows, seqlen_q, 0.0)\n            lse_log2",
        f"{BY_GATES}test_behind_the_portable_forward", "sinks and ieee", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "gradients in float32: sink left out of the denominator", DQ,
        "l_i = l_i * alpha + tl.math.exp2(sink_log2 - m_shift)", "l_i = l_i * alpha",
        f"{BY_GATES}test_behind_the_portable_forward", "sinks and ieee", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "gradients in float32: delta not rescaled", DQ,
        "delta = delta * alpha + tl.sum(", "delta = delta + tl.sum(",
        f"{BY_GATES}test_pairs_of_features", "ieee and mask and sinks", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "gradients: dk without the softmax scale", DKV,
        "times(dk, rules.softmax_scale)", "times(dk, 1.0)",
        f"{BY_GATES}test_tiles", "128 and False", "FAIL B1 maximum of dk",
    ),
    Mutant(
        "gradients: delta of the second tile of columns alone", BACKWARD_TILES,
        "delta += tl.sum(tl.where(out[i]", "delta = tl.sum(tl.where(out[i]",
        f"{BY_GATES}test_head_sizes", "80", "FAIL",
    ),
    Mutant(
        "gradients: the second tile has the columns of the first", "kernels/column_tiles.py",
        "WIDTH + tl.arange(0, REST)", "0 + tl.arange(0, REST)",
        f"{BY_GATES}test_head_sizes", "80", "FAIL",
    ),
    Mutant(
        "gradients: dv of a group's first head alone", DKV,
        "dout_ptr + head * dout_tensor.stride_h", "dout_ptr + kv_head * group_size * dout_tensor.stride_h",
        f"{BY_GATES}test_each_feature_alone", "scale and 3", "FAIL B1 maximum of dv",
    ),
    Mutant(
        "gradients: wrong head map of dk and dv", DKV,
        "head = kv_head * group_size + member", "head = kv_head + member * num_heads_kv",
        f"{BY_GATES}test_not_finite_in_one_head_stays_there", "", "torch.equal",
    ),
    Mutant(
        "gradients: wrong head map of dq", DQ,
        "kv_head = head // group_size", "kv_head = head % (num_heads_q // group_size)",
        f"{BY_GATES}test_not_finite_in_one_head_stays_there", "", "torch.equal",
    ),
    Mutant(
        "gradients: first key tile lost for dq", DQ,
        "for step in range(begin, end, BLOCK_N)", "for step in range(begin + BLOCK_N, end, BLOCK_N)",
        f"{BY_GATES}test_tiles", "128 and False", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "gradients: last query tile lost for dk and dv", DKV,
        "for step in range(begin, end, BLOCK_M)", "for step in range(begin, end - BLOCK_M, BLOCK_M)",
        f"{BY_GATES}test_tiles", "128 and False", "FAIL B1 maximum of dv",
    ),
    Mutant(
        "gradients: the first query that sees a tile of keys not read", DKV,
        "key_begin, key_last, seqlen_q, -high, -low,", "key_begin, key_last, seqlen_q, -high + 1, -low,",
        f"{BY_GATES}test_tiles", "128 and False", "FAIL B1 maximum of dv",
    ),
    Mutant(
        "gradients: mask one key too wide", BACKWARD_TILES,
        "visible = visible & (distance <= high)", "visible = visible & (distance <= high + 1)",
        f"{BY_GATES}test_tiles", "128 and False", "FAIL B1 maximum of d",
    ),
    Mutant(
        "gradients: delta of a row taken from the word of its log-sum-exp", BACKWARD_TILES,
        "delta = (words >> 32).to(tl.int32)", "delta = words.to(tl.int32)",
        f"{BY_GATES}test_tiles", "128 and False", "FAIL B1 maximum of dk",
    ),
    Mutant(
        "gradients: log-sum-exp of another packed sequence", DKV,
        "statistics_ptr += q_begin\n", "statistics_ptr += 0 * q_begin\n",
        f"{BY_GATES}test_each_feature_alone", "packed", "FAIL B1 maximum of dv",
    ),
    Mutant(
        "gradients: 0 times the NaN of what a mask hides", BACKWARD_TILES,
        "    if MAY_HIDE:\n        ds = tl.where(p == 0.0, 0.0, ds)", "    if MAY_HIDE:\n        ds = ds + 0.0",
        f"{BY_GATES}test_rows_that_see_nothing", "mask and float16", "bits(",
    ),
    Mutant(
        "gradients: 0 times the NaN of what the band hides", BACKWARD_TILES,
        "        if at_edge:\n            ds = tl.where(p == 0.0, 0.0, ds)",
        "        if at_edge:\n            ds = ds + 0.0",
        f"{BY_GATES}test_rows_that_see_nothing", "queries and float16", "bits(",
    ),
    Mutant(
        "gradients: log-sum-exp of a row that sees nothing left at -inf", BACKWARD_TILES,
        'return tl.where(lse_log2 == float("-inf"), float("inf"), lse_log2)', "return lse_log2 + 0.0",
        f"{BY_GATES}test_rows_that_see_nothing", "packed and float32", "tensor(False)",
    ),
    Mutant(
        "gradients: no second walk over the queries", DKV,
        "tl.where(again, group_size, 0)", "tl.where(again, 0, 0)",
        f"{BY_GATES}test_rows_that_see_nothing", "mask and float16", "bits(",
    ),
    Mutant(
        "gradients: slopes' sums go on in a second walk", DQ,
        "if WRITE_DSLOPES and WALK == 1:", "if WRITE_DSLOPES and WALK >= 1:",
        f"{BY_GATES}test_keys_that_no_query_sees_may_hold_anything", "bias", "bits(",
    ),
    Mutant(
        "gradients: NaN that arrives at a row that sees nothing goes on", BACKWARD_TILES,
        "tl.where(out[i] == 0.0, 0.0, terms)", "terms + 0.0",
        f"{BY_GATES}test_rows_that_see_nothing", "queries and float16", "bits(",
    ),
    Mutant(
        "gradients: a sink's with the other sign", DQ,
        "tl.store(of_sinks_ptr + part, -tl.sum(", "tl.store(of_sinks_ptr + part, tl.sum(",
        f"{BY_GATES}test_behind_the_portable_forward", "sinks and float16", "FAIL A peer rule of dsinks",
    ),
    Mutant(
        "gradients: softcap's derivative left out", BACKWARD_TILES,
        "ds * derivative)", "ds * 1.0)",
        f"{BY_GATES}test_pairs_of_features", "softcap and packed", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "gradients: a slope's distance without the offset of the keys", DQ,
        "tl.abs(rows[:, None] + (seqlen_k - seqlen_q) - keys[None, :])", "tl.abs(rows[:, None] - keys[None, :])",
        f"{BY_GATES}test_pairs_of_features", "alibi and packed", "FAIL A peer rule of dalibi_slopes",
    ),
    Mutant(
        "gradients: excess of dS times whole distances", DQ,
        "excess * p_distance)", "0.0 * p_distance)",
        SLOPES, "flash_fwd and mask", "Tensor-likes are not close",
    ),
    Mutant(
        "gradients of slopes: sink left out of the sums of dS", DQ,
        "ds_sum - of_sink", "ds_sum - 0.0 * of_sink",
        SLOPES, "flash_fwd and sinks", "Tensor-likes are not close",
    ),
    Mutant(
        "gradients: of a bias for all batch items without the last item", DBIAS,
        "batch_end = batch_size", "batch_end = batch_size - 1",
        f"{BY_GATES}test_bias_of_any_shape", "40", "FAIL A peer rule of dbias",
    ),
    Mutant(
        "gradients: parts of a bias overlap", "kernels/primitives.py",
        "begin + least + (part < items % num_parts).to(tl.int32)", "begin + least + 1",
        f"{BY_GATES}test_parts_of_a_gradient_of_a_bias_sum_all_batch_items_once", "4", "dbias",
    ),
    Mutant(
        "gradients of one side: parts leave items out", "kernels/primitives.py",
        "part * least + tl.minimum(part, items % num_parts)", "part * least + tl.minimum(part + 1, items % num_parts)",
        f"{BY_ONE_SIDE}test_more_parts_than_tiles_and_uneven_ones", "3 and 64", "FAIL A peer rule of d",
    ),
    Mutant(
        "gradients of one side: queries that see nothing are read", BACKWARD_TILES,
        'end = tl.where(lse == float("-inf"), 0, row_end)', 'end = tl.where(lse == float("inf"), 0, row_end)',
        f"{BY_ONE_SIDE}test_rows_that_see_nothing", "mask", "bits(",
    ),
    Mutant(
        "gradients of one side: infinities of hidden keys multiplied", "kernels/column_tiles.py",
        'is_finite = tl.abs(tiles[i]) < float("inf")', 'is_finite = tl.abs(tiles[i]) <= float("inf")',
        f"{BY_ONE_SIDE}test_keys_that_no_query_sees_may_hold_anything", "inf", "bits(",
    ),
    Mutant(
        "gradients of one side: dropout of the first rows in every tile", ONE_SIDE,
        "dropped_head, row_tile,", "dropped_head, 0,",
        f"{BY_ONE_SIDE}test_features", "dropout and 16x128", "FAIL A peer rule of d",
    ),
    Mutant(
        "gradients of one side: statistics of the group's first head", ONE_SIDE,
        "line = batch * lse_tensor.stride_b + head * lse_tensor.stride_h",
        "line = batch * lse_tensor.stride_b + kv_head * group_size * lse_tensor.stride_h",
        f"{BY_ONE_SIDE}test_features", "softcap and 16x128", "FAIL A peer rule of d",
    ),
    Mutant(
        "gradients: every query reads the first one's mask", BACKWARD_TILES,
        "if MASK_PER_QUERY:", "if MASK_PER_QUERY and False:",
        f"{BY_ONE_SIDE}test_features", "", "FAIL",
    ),
    Mutant(
        "gradients of one side: the last part is not added", "kernels/flash_bwd/parts.py",
        "for split in range(num_splits):", "for split in range(num_splits - 1):",
        f"{BY_ONE_SIDE}test_features", "softcap and 2", "FAIL A peer rule of d",
    ),
    Mutant(
        "gradients of one side: dk added up in place of dv", "kernels/flash_bwd/parts.py",
        "_add(other_parts_ptr, other_sum_ptr,", "_add(parts_ptr, other_sum_ptr,",
        f"{BY_ONE_SIDE}test_features", "softcap and 16x128 and 2", "FAIL A peer rule of dv",
    ),
    Mutant(
        "gradients: of a bias from the first part alone", "kernels/flash_bwd/host.py",
        "outputs.of_bias.sum(0)", "outputs.of_bias[0]",
        f"{BY_GATES}test_parts_of_a_gradient_of_a_bias_sum_all_batch_items_once", "4", "dbias",
    ),
]  # fmt: skip

# Of dropout, and of gradients that must repeat.
DROPOUT, IN_DROPOUT = "kernels/dropout.py", "../kernels/test_dropout.py::"
OF_DROPOUT = [
    Mutant(
        "dropout: the offset has no effect", DROPOUT,
        "offset = tl.load(seed_ptr + 1)", "offset = tl.load(seed_ptr)",
        f"{IN_DROPOUT}test_forwards_drop_the_same_pairs", "flash_fwd and 128", "torch.equal",
    ),
    Mutant(
        "dropout: rows that share a call drop the same", DROPOUT,
        "word = tl.where(row_bit != 0, w1, w0)", "word = w0",
        f"{IN_DROPOUT}test_forwards_drop_the_same_pairs", "flash_fwd and 128", "torch.equal",
    ),
    Mutant(
        "dropout: numbers compared as unsigned ones on the host", DROPOUT,
        "number - ((number & _SIGN) << 1) >= _least_kept(dropout_p)", "number - _SIGN >= _least_kept(dropout_p)",
        f"{IN_DROPOUT}test_the_mask_is_the_contract", "", "assert",
    ),
    Mutant(
        "dropout: every item of a batch drops the same", DROPOUT,
        "torch.arange(batch.start, batch.stop, device=seed.device)",
        "0 * torch.arange(batch.start, batch.stop, device=seed.device)",
        f"{IN_DROPOUT}test_independence", "0.5", "(0, 1)",
    ),
    Mutant(
        "dropout: every call draws the same seed", DROPOUT,
        "return torch.randint(2**63 - 1, SEED_SHAPE, dtype=torch.int64, device=device)",
        "return torch.zeros(SEED_SHAPE, dtype=torch.int64, device=device)",
        f"{IN_DROPOUT}test_the_default_generator_determines_what_is_dropped", "", "each call draws",
    ),
    Mutant(
        "dropout: what is kept not scaled", FLASH,
        "out = times(out, dropout.scale)", "out = times(out, 1.0)",
        f"{IN_DROPOUT}test_forwards_drop_the_same_pairs", "flash_fwd and 128", "not close",
    ),
    Mutant(
        "dropout: log-sum-exp of what is kept", FLASH,
        "                p = tl.where(kept, p, 0.0)",
        "                l_i -= tl.sum(tl.where(kept, 0.0, p), 1)\n                p = tl.where(kept, p, 0.0)",
        f"{IN_DROPOUT}test_lse_is_that_of_the_softmax_without_dropout", "flash_fwd", "not close",
    ),
    Mutant(
        "dropout: packed sequences drop as the first", EAGER,
        "_Part(range(b, b + 1), ", "_Part(range(0, 1), ",
        f"{IN_DROPOUT}test_packed_sequences_drop_what_a_dense_batch_drops", "eager", "not close",
    ),
    Mutant(
        "dropout: dq of probabilities that were dropped", DQ,
        "dp = tl.where(kept, dp * dropout.scale, 0.0)", "dp = dp * dropout.scale",
        f"{BY_GATES}test_each_feature_alone", "dropout and not packed", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "dropout: dv of probabilities that were dropped", DKV,
        "p_kept = tl.where(kept, p, 0.0)", "p_kept = tl.where(kept, p, p)",
        f"{BY_GATES}test_each_feature_alone", "dropout and not packed", "FAIL B1 maximum of dv",
    ),
    Mutant(
        "dropout: queries and keys exchanged in a transposed tile", DKV,
        "row_tile, first_rows[None, :], key_begin, first_keys[:, None]",
        "key_begin, first_keys[:, None], row_tile, first_rows[None, :]",
        f"{BY_GATES}test_each_feature_alone", "dropout and not packed", "FAIL B1 maximum of dv",
    ),
    Mutant(
        "dropout: the heads of a group drop the same in dk and dv", DKV,
        "dropped_head = dropout_of_head(dropout_key, batch, head)",
        "dropped_head = dropout_of_head(dropout_key, batch, kv_head)",
        f"{BY_GATES}test_each_feature_alone", "dropout and packed", "FAIL B1 maximum of dv",
    ),
    Mutant(
        "dropout: gradient of a bias through what was dropped", DBIAS,
        "dp = tl.where(kept, dp * dropout.scale, 0.0)", "dp = dp * dropout.scale",
        f"{BY_GATES}test_pairs_of_features", "dropout and bias", "FAIL B1 maximum of dbias",
    ),
    Mutant(
        "deterministic=False without effect", "options.py",
        "if self.deterministic is None else self.deterministic", "if not self.deterministic else True",
        "../kernels/hopper/test_flash_bwd_host.py::test_deterministic_mode_orders_sums_unless_the_argument_refuses",
        "False", "[True]",
    ),
]  # fmt: skip
