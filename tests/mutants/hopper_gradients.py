"""Seeded faults of Hopper's gradients, and of dropout in its kernels."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

# Of Hopper's gradients, whose source runs on a CPU as well. Roles agree about the tiles in all of them: see HOPPER.
JOINT_STEPS = "kernels/hopper/flash_bwd/joint_steps.py"
JOINT, APART_DKV, APART_DQ, BAND, ROWS = (
    f"kernels/hopper/flash_bwd/{name}.py" for name in ("joint", "dkv", "dq", "band", "rows")
)
SPLIT_STEPS, SPLIT_ROWS = (f"kernels/hopper/flash_bwd/split_{name}.py" for name in ("steps", "rows"))
ON_CPU, HIDDEN_ON_CPU, FLOAT32_ON_CPU = (
    f"../kernels/hopper/test_flash_bwd{what}_on_cpu.py::" for what in ("", "_masks", "_float32")
)
PARTS_ON_CPU = f"{FLOAT32_ON_CPU}test_float32_on_a_cpu"
MASKED_PARTS_ON_CPU = f"{FLOAT32_ON_CPU}test_float32_under_masks_on_a_cpu"
BACKWARD_ON_CPU = f"{ON_CPU}test_the_protocol_on_a_cpu"
MASKS_ON_CPU = f"{HIDDEN_ON_CPU}test_masks_on_a_cpu"
BIASES_ON_CPU = f"{HIDDEN_ON_CPU}test_biases_on_a_cpu"
NEIGHBOURS_ON_CPU = f"{ON_CPU}test_nan_of_a_neighbor_stays_there"
DROPPED_BY_GRADIENTS = f"{ON_CPU}test_gradients_drop_the_pairs_of_the_contract"
DROPPED_BY_FORWARD = "../kernels/hopper/test_flash_fwd_on_cpu.py::test_the_forward_drops_the_pairs_of_the_contract"
DROPPED_ON_CPU = f"{ON_CPU}test_dropout_on_a_cpu"
UNWRITTEN = "../kernels/test_zero_unwritten.py::test_packed_tokens_that_see_nothing_and_tokens_of_no_sequence"
OF_HOPPER_DROPOUT = [
    Mutant(
        "hopper dropout: the second half of a tile drops as the first", "kernels/hopper/flash_bwd/joint_steps.py",
        "p1 = signed(p1, row_first + HALF, key_first, True, rules)",
        "p1 = signed(p1, row_first, key_first, True, rules)",
        DROPPED_ON_CPU, "causal and not 40 and not 128", "FAIL B1 maximum of dv",
    ),
    Mutant(
        "hopper dropout: the second half of columns drops as the first", "kernels/hopper/dropout.py",
        "second = drop(second, dropout, row_first + half, key_first,",
        "second = drop(second, dropout, row_first, key_first,",
        DROPPED_BY_GRADIENTS, "128", "torch.equal",
    ),
    Mutant(
        "hopper dropout: queries and keys exchanged in a transposed tile", "kernels/hopper/dropout.py",
        "if KEYS_FIRST:\n            rows = across\n            keys = upright",
        "if KEYS_FIRST:\n            rows = upright\n            keys = across",
        DROPPED_BY_GRADIENTS, "128", "torch.equal",
    ),
    Mutant(
        "hopper dropout: dv of launches apart not scaled", "kernels/hopper/flash_bwd/dkv.py",
        "result = times(result, rules.dropout.scale)", "result = times(result, 1.0)",
        DROPPED_ON_CPU, "causal and 192", "FAIL B1 maximum of dv",
    ),
    Mutant(
        "hopper dropout: dP not scaled", "kernels/hopper/flash_bwd/steps.py",
        "(dp * rules.dropout.scale) - gl.abs(p)", "(dp * 1.0) - gl.abs(p)",
        DROPPED_ON_CPU, "causal and 128 and not 192", "FAIL B1 maximum of dk",
    ),
    Mutant(
        "hopper dropout: NaN of queries before the first that sees a key", "kernels/hopper/flash_bwd/steps.py",
        "if row_first < band.q_seen:", "if row_first < band.q_begin:",
        DROPPED_ON_CPU, "queries and 128 and not 192", "FAIL",
    ),
    Mutant(
        "hopper dropout: out not scaled", "kernels/hopper/flash_fwd/consumer.py",
        "factor = factor * rules.dropout.scale", "factor = factor * 1.0",
        DROPPED_BY_FORWARD, "0.5", "not close",
    ),
]  # fmt: skip
HOPPER_BACKWARD = [
    Mutant(
        "hopper/flash_bwd: keys of a split's own head", "kernels/hopper/flash_bwd/producer.py",
        "kv_head = work.head // schedule.splits", "kv_head = work.head",
        f"{ON_CPU}test_splits_of_a_group", "causal and 0-float16", "gates fail",
    ),
    Mutant(
        "hopper/flash_bwd: as many heads in each of several unequal splits", "kernels/hopper/flash_bwd/steps.py",
        "count = (work.head + 1) * heads.num_heads // heads.key_heads[0] - first", "count = heads.group_size + 0",
        f"{ON_CPU}test_splits_of_a_group", "causal and 5-3 and 0-float16", "waits for a block",
    ),
    Mutant(
        "hopper/flash_bwd: dK of one split for all", "kernels/hopper/flash_bwd/sum_splits.py",
        "for split in range(splits):", "for split in range(1):",
        f"{ON_CPU}test_splits_of_a_group", "causal and 0-float16", "gates fail",
    ),
    Mutant(
        "hopper/flash_bwd: one part of a block for all", "kernels/hopper/flash_bwd/sum_splits.py",
        "for part in range(parts):", "for part in range(1):",
        f"{ON_CPU}test_parts_of_blocks", "False", "gates fail",
    ),
    Mutant(
        "hopper/flash_bwd: dQ of a part from the first steps of its block", "kernels/hopper/flash_bwd/joint.py",
        "place_of_step(first_step + i,", "place_of_step(i,",
        f"{ON_CPU}test_parts_of_blocks", "False", "gates fail",
    ),
    Mutant(
        "deterministic=True without effect", "kernels/hopper/flash_bwd/joint_launch.py",
        '"IS_DETERMINISTIC": problem.deterministic', '"IS_DETERMINISTIC": False',
        "../kernels/hopper/test_flash_bwd_host.py::test_the_argument_orders_sums", "True", "[False]",
    ),
    Mutant(
        "sums in any order: a block does not wait for the one that stores", "kernels/hopper/flash_bwd/turns.py",
        "rank = gl.minimum(rank, 1)", "rank = gl.minimum(rank, 0)",
        "../kernels/hopper/test_turns.py::test_blocks_that_walk_a_tile_of_queries_have_its_turns_in_their_order",
        "False", "assert [0, 0",
    ),
    Mutant(
        "gradients on Hopper: blocks of the last keys add in the order of keys", "kernels/hopper/flash_bwd/turns.py",
        "rank = (last_key - band.k_begin) // rules.BLOCK_N - block", "rank = block + 0 * last_key",
        "../kernels/hopper/test_turns.py::test_blocks_that_walk_a_tile_of_queries_have_its_turns_in_their_order",
        "True", "assert",
    ),
    Mutant(
        "gradients on Hopper: blocks of the first keys come before those for which they wait", BAND,
        "if not rules.ASCENDS:\n        tile = gl.cdiv", "if True:\n        tile = gl.cdiv",
        BACKWARD_ON_CPU, "causal and 128 and True", "waits for a block that was not taken before",
    ),
    Mutant(
        "gradients on Hopper: no call takes the last keys first", "kernels/hopper/flash_bwd/joint_launch.py",
        "ascends(problem, config)),", "False),",
        "../kernels/hopper/test_flash_bwd_host.py::test_a_call_of_enough_waves_walks_from_the_first_tile_on",
        "True", "assert False is True",
    ),
    Mutant(
        "gradients on Hopper: positions of queries before those that were loaded", JOINT,
        "following = row_first + rules.BLOCK_M", "following = row_first + 0",
        BACKWARD_ON_CPU, "causal and 128 and True", "FAIL B1 maximum of d",
    ),
    Mutant(
        "gradients on Hopper: nothing arrives at the log-sum-exp", ROWS,
        "delta -= sums", "delta -= 0.0 * sums",
        BACKWARD_ON_CPU, "causal and 128", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "gradients on Hopper: log-sum-exp of what does not exist is -inf", ROWS,
        'lse * LOG2_E, float("inf"))', 'lse * LOG2_E, float("-inf"))',
        BACKWARD_ON_CPU, "full and 128", "FAIL B1 maximum of dk",
    ),
    Mutant(
        "gradients on Hopper: a sink's with the other sign", ROWS,
        "tl.where(sees, -tl.exp(sink", "tl.where(sees, tl.exp(sink",
        BACKWARD_ON_CPU, "causal and 128", "FAIL A peer rule of dsinks",
    ),
    Mutant(
        "gradients on Hopper: rows that see nothing left out of a sink's", ROWS,
        "of_sink += tl.load(dlse_ptr", "of_sink += 0.0 * tl.load(dlse_ptr",
        BACKWARD_ON_CPU, "queries and keys and 128", "FAIL A peer rule of dsinks",
    ),
    Mutant(
        "gradients on Hopper: dq's sums read in another order", ROWS,
        "[1, 4, 2, 0, 3, 5]", "[1, 2, 4, 0, 3, 5]",
        BACKWARD_ON_CPU, "full and 24", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "gradients on Hopper: dq added to another tile than it is of", JOINT,
        "head, tile = place_of_step(first_step + i, first_head, members, span, True, rules)",
        "head, tile = place_of_step(first_step + i, first_head, members, span, True, rules); "
        "tile = span.begin + (first_step + i) // members",
        BACKWARD_ON_CPU, "full and 128", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "gradients on Hopper: dq of each block in place of their sum", JOINT,
        "if rank == 0:", "if rank >= 0:",
        BACKWARD_ON_CPU, "full and 128", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "gradients on Hopper: turns that count blocks which add nothing", "kernels/hopper/flash_bwd/turns.py",
        "rank = rank - gl.maximum(first_key, 0) // rules.BLOCK_N", "rank = rank + 0",
        BACKWARD_ON_CPU, "wider and 128", "waits for a block that was not taken before",
    ),
    Mutant(
        "gradients on Hopper: the last keys first, which wait for others", BAND,
        "if not rules.ASCENDS:\n        tile = gl.cdiv", "if False:\n        tile = gl.cdiv",
        BACKWARD_ON_CPU, "causal and 128 and False", "waits for a block that was not taken before",
    ),
    Mutant(
        "gradients on Hopper: dq into the other group's buffer", JOINT_STEPS,
        "tiles.dq[i].index(GROUP)", "tiles.dq[i].index(1 - GROUP)",
        BACKWARD_ON_CPU, "full and 24", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "gradients on Hopper: all copies of a share of dq to its first lines", JOINT,
        "to += COPY", "to += 0 * COPY",
        BACKWARD_ON_CPU, "full and 96", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "gradients on Hopper: dq's second share of a second piece from its first columns", JOINT_STEPS,
        "else int(widths[int(piece)]))", "else 0)",
        BACKWARD_ON_CPU, "full and 160", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "gradients on Hopper: dq's second pieces stored among the first", ROWS,
        "column = 64 * ACROSS * piece", "column = 64 * piece",
        BACKWARD_ON_CPU, "full and 160", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "gradients on Hopper: second half of a broad tile with the first's log-sum-exp", JOINT_STEPS,
        "statistics_of(tiles.queries, n, FIRST, HALF, across)",
        "statistics_of(tiles.queries, n, 0 * FIRST, HALF, across)",
        BACKWARD_ON_CPU, "full and 160", "FAIL B1 maximum of dv",
    ),
    Mutant(
        "gradients on Hopper: second half of a broad tile with the first's dO", JOINT_STEPS,
        "unseen_zero(n + 1), GROUP, HALF, rules)", "unseen_zero(n + 1), GROUP, 0, rules)",
        BACKWARD_ON_CPU, "full and 160", "FAIL B1 maximum of dv",
    ),
    Mutant(
        "gradients on Hopper: dS of a broad tile's second half over the first's", JOINT_STEPS,
        ".slice(FIRST, HALF, dim=1).store(ds)", ".slice(0 * FIRST, HALF, dim=1).store(ds)",
        BACKWARD_ON_CPU, "full and 160", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "gradients on Hopper: the second piece of dk and dv stored over the first", JOINT,
        "[batch, head, key, column + i * COLUMNS]", "[batch, head, key, i * COLUMNS]",
        BACKWARD_ON_CPU, "full and 160", "FAIL B1 maximum of dk",
    ),
    Mutant(
        "gradients on Hopper: only the first piece of keys behind a packed sequence zeroed", JOINT,
        "zero_tail(tiles.keys[i].index(0), keys_used)", "zero_tail(tiles.keys[0].index(0), keys_used)",
        NEIGHBOURS_ON_CPU, "192 and 0-float16", "d",
    ),
    Mutant(
        "gradients on Hopper: the first rows behind a packed sequence not zeroed", "kernels/hopper/rows.py",
        "i = gl.maximum(rows_used, 0) // 16", "i = gl.maximum(rows_used, 0) // 16 + 1",
        NEIGHBOURS_ON_CPU, "128 and not 192 and causal", "d",
    ),
    Mutant(
        "gradients on Hopper: dk without the softmax scale", JOINT,
        "dk = times(dk, rules.softmax_scale)", "dk = times(dk, 1.0)",
        BACKWARD_ON_CPU, "full and 24", "FAIL B1 maximum of dk",
    ),
    Mutant(
        "gradients on Hopper: scores of the last piece of columns alone", "kernels/hopper/flash_bwd/joint_steps.py",
        "x, use_acc=i > 0, is_async=True)", "x, use_acc=False, is_async=True)",
        BACKWARD_ON_CPU, "full and 104", "FAIL B1 maximum of d",
    ),
    Mutant(
        "gradients on Hopper: a group's first head in place of each", "kernels/hopper/flash_bwd/producer.py",
        "head, tile = place_of_step(first_step + i, first_head, members, span, TILES_FIRST, rules)",
        "head, tile = place_of_step(first_step + i, first_head, members, span, TILES_FIRST, rules); "
        "head = first_head",
        BACKWARD_ON_CPU, "full and 24", "FAIL B1 maximum of dv",
    ),
    Mutant(
        "gradients on Hopper: last head of a group lost", "kernels/hopper/flash_bwd/launches.py",
        "-(-problem.num_heads_q // heads),", "max(1, problem.num_heads_q // heads - 1),",
        BACKWARD_ON_CPU, "full and 24", "FAIL B1 maximum of dv",
    ),
    Mutant(
        "gradients on Hopper: second half of a tile with the first's log-sum-exp", JOINT_STEPS,
        "(tiles.queries, n, HALF, HALF, across)", "(tiles.queries, n, 0 * HALF, HALF, across)",
        BACKWARD_ON_CPU, "full and 24", "FAIL B1 maximum of dv",
    ),
    Mutant(
        "gradients on Hopper: second half of a tile with the first's band", JOINT_STEPS,
        "lse1[None, :], band, row_first + HALF,", "lse1[None, :], band, row_first,",
        BACKWARD_ON_CPU, "causal and 24", "FAIL B1 maximum of dv",
    ),
    Mutant(
        "gradients on Hopper: softcap's derivative left out", JOINT_STEPS,
        "ds = ds * cap", "ds = ds * 1.0",
        BACKWARD_ON_CPU, "window and 128", "FAIL B1 maximum of dk",
    ),
    Mutant(
        "gradients on Hopper: ALiBi's distance without the offset of the keys", "kernels/hopper/flash_bwd/steps.py",
        "gl.abs(rows + band.offset - keys)", "gl.abs(rows - keys)",
        BACKWARD_ON_CPU, "window and 128", "FAIL B1 maximum of dv",
    ),
    Mutant(
        "gradients on Hopper: a cut tile walked without its mask", BAND,
        "whole_begin = gl.cdiv(gl.maximum(key_last - band.high - band.q_begin, 0), rules.BLOCK_M)",
        "whole_begin = gl.maximum(key_last - band.high - band.q_begin, 0) // rules.BLOCK_M",
        BACKWARD_ON_CPU, "causal and 128", "FAIL B1 maximum of dv",
    ),
    Mutant(
        "gradients on Hopper: queries end with those that see a block's first key", BAND,
        "gl.minimum(last, gl.minimum(key_last, band.k_end - 1) - band.low + 1)",
        "gl.minimum(last, key_first - band.low + 1)",
        BACKWARD_ON_CPU, "window and 128", "waits for a block that was not taken before",
    ),
    Mutant(
        "gradients on Hopper: mask one key too narrow", BAND,
        "seen = constant >= first[:, None] - of_thread", "seen = constant > first[:, None] - of_thread",
        BACKWARD_ON_CPU, "causal and 128", "FAIL B1 maximum of d",
    ),
    Mutant(
        "gradients on Hopper: window's left edge exclusive", BAND,
        "(constant <= last[:, None] - of_thread)", "(constant < last[:, None] - of_thread)",
        BACKWARD_ON_CPU, "packed and window and 128", "FAIL B1 maximum of d",
    ),
    Mutant(
        "dQ apart: mask one key too narrow", BAND,
        "seen = constant <= last[:, None] - of_thread", "seen = constant < last[:, None] - of_thread",
        BACKWARD_ON_CPU, "causal and 192", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "gradients on Hopper: one loop leaves a cut tile beside whole ones without its mask",
        JOINT, "cut = (row_first < whole_first) | (row_first >= whole_end)",
        "cut = (row_first + rules.BLOCK_M < whole_first) | (row_first >= whole_end)",
        BACKWARD_ON_CPU, "causal and 128", "FAIL B1 maximum of d",
    ),
    Mutant(
        "gradients on Hopper: all tiles of a head before the next head", "kernels/hopper/flash_bwd/steps.py",
        "    if TILES_FIRST:\n", "    if not TILES_FIRST:\n",
        "../kernels/hopper/test_turns.py::test_blocks_that_walk_a_tile_of_queries_have_its_turns_in_their_order",
        shows="assert",
    ),
    Mutant(
        "gradients on Hopper: positions of the next tile for the next head", JOINT,
        "row_first = gl.where(h == g, following, row_first)", "row_first = following",
        f"{ON_CPU}test_splits_of_a_group", "causal and 3-1 and 0-float16", "gates fail",
    ),
    Mutant(
        "gradients on Hopper: statistics of another packed sequence", BAND,
        "(work.q_begin // TILE + work.batch) * TILE", "(work.q_begin // TILE) * TILE",
        BACKWARD_ON_CPU, "packed and 128", "FAIL B1 maximum of d",
    ),
    Mutant(
        "gradients on Hopper: queries of the next sequence multiplied", "kernels/hopper/flash_bwd/steps.py",
        "if rows_used < BLOCK_M:", "if rows_used < 0:",
        NEIGHBOURS_ON_CPU, "192", "dk",
    ),
    Mutant(
        "bias on Hopper: that of the kv head", "kernels/hopper/flash_bwd/producer.py",
        "load_bias(tiles.bias, place, full, batch, head,", "load_bias(tiles.bias, place, full, batch, work.head,",
        BIASES_ON_CPU, "score and 40", "FAIL B1 maximum of dk",
    ),
    Mutant(
        "bias on Hopper: tile of the other group", APART_DQ,
        "load_bias(tiles.bias, stage * GROUPS + g,", "load_bias(tiles.bias, stage * GROUPS + 1 - g,",
        BIASES_ON_CPU, "score and 40", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "bias on Hopper: read in the other stage of P", APART_DKV,
        "bias_tile = tiles.bias.tiles.shape[0] // 2 * (n % 2)",
        "bias_tile = tiles.bias.tiles.shape[0] // 2 * (1 - n % 2)",
        BIASES_ON_CPU, "score and 40", "FAIL B1 maximum of d",
    ),
    Mutant(
        "bias on Hopper: its gradient times the softcap's derivative", APART_DQ,
        "if rules.HAS_SOFTCAP and not takes_ds:", "if rules.HAS_SOFTCAP:",
        BIASES_ON_CPU, "softcap and 40", "FAIL B1 maximum of dbias",
    ),
    Mutant(
        "bias on Hopper: hidden tiles of its gradient not written", "kernels/hopper/flash_bwd/kernel.py",
        "dbias.zero_()", "dbias.fill_(1.0)",
        BIASES_ON_CPU, "window and 40", "FAIL B1 maximum of dbias",
    ),
    Mutant(
        "bias on Hopper: its gradient of the first batch item alone", "kernels/hopper/flash_bwd/kernel.py",
        "tensors.dbias.sum(axes, keepdim=True) if axes", "tensors.dbias[:1].sum(axes, keepdim=True) if axes",
        BIASES_ON_CPU, "window and 40", "FAIL B1 maximum of dbias",
    ),
    Mutant(
        "bias on Hopper: NaN of keys that it hides multiplied", "kernels/prepass/bias_seen.py",
        "seen = tl.max(shown, 0).to(tl.int8)", "seen = tl.max(shown + 1, 0).to(tl.int8)",
        f"{HIDDEN_ON_CPU}test_what_a_bias_hides_goes_nowhere", "", "FAIL",
    ),
    Mutant(
        "gradients of tokens before the first packed sequence not zeroed", "kernels/prepass/zero_unwritten.py",
        "_zero(ptr, tl.zeros_like(first), first, width,", "_zero(ptr, first, first, width,",
        UNWRITTEN, "", "assert",
    ),
    Mutant(
        "gradients of tokens behind the last packed sequence not zeroed", "kernels/prepass/zero_unwritten.py",
        "_zero(ptr, last + of_last, total, width,", "_zero(ptr, total, total, width,",
        UNWRITTEN, "", "assert",
    ),
    Mutant(
        "gradients of keys that no query sees not zeroed", "kernels/prepass/in_use.py",
        "sees = length_q > 0", "sees = length_q >= 0",
        UNWRITTEN, "", "assert",
    ),
    Mutant(
        "mask on Hopper: only the first tensor of a side is checked", "kernels/prepass/zero_unseen.py",
        "large = tl.max(_are_large(first) | _are_large(second)) != 0", "large = tl.max(_are_large(first)) != 0",
        "../kernels/test_zero_unseen.py::test_a_large_number_of_any_operand_is_found", "nan", "assert False == (nan",
    ),
    Mutant(
        "mask on Hopper: copies are never read", "kernels/hopper/flash_bwd/producer.py",
        "elif gl.load(copies_needed_ptr) == 0:", "elif gl.load(copies_needed_ptr) >= 0:",
        MASKS_ON_CPU, "40 and alibi and nan", "FAIL",
    ),
    Mutant(
        "mask on Hopper: padding of one head for a group", "kernels/hopper/flash_bwd/launches.py",
        "(heads > 1 and problem.num_heads_q > problem.num_heads_kv)", "(heads > 1 and False)",
        f"{HIDDEN_ON_CPU}test_padding_of_each_head_on_a_cpu", "4", "FAIL",
    ),
    Mutant(
        "mask on Hopper: last step of each block lost", "kernels/prepass/mask_steps.py",
        "tl.store(lists_ptr, tl.maximum(count, 1))", "tl.store(lists_ptr, tl.maximum(count - 1, 1))",
        MASKS_ON_CPU, "40 and alibi", "FAIL B1 maximum of d",
    ),
    Mutant(
        "mask on Hopper: keys behind the end have the bits of the last one", "kernels/hopper/flash_bwd/steps.py",
        "words = gl.where((rows < rows_end)[:, None], words, 0)", "words = gl.where((rows >= 0)[:, None], words, 0)",
        f"{HIDDEN_ON_CPU}test_keys_behind_the_end_of_a_mask_have_no_weight", "40",
        "isfinite",
    ),
    Mutant(
        "mask on Hopper: the second half of a tile sees as the first", "kernels/hopper/flash_bwd/joint_steps.py",
        "half = words >> (HALF // 4)", "half = words >> 0",
        MASKS_ON_CPU, "40 and alibi", "FAIL B1 maximum of d",
    ),
    Mutant(
        "bias on Hopper: sums of a tile that no block visits", "kernels/hopper/flash_bwd/rows.py",
        "is_stored = tl.load(turns_ptr + batch_head * num_tiles + place) > 0",
        "is_stored = tl.load(turns_ptr + batch_head * num_tiles + place) >= 0",
        f"{HIDDEN_ON_CPU}test_a_bias_whose_gradient_is_not_wanted", "from and 128", "FAIL",
    ),
    Mutant(
        "mask on Hopper: hidden tiles walked", "kernels/prepass/mask_steps.py",
        "return (shown != 0).to(tl.int32)", "return ((shown >= 0) & (step >= 0) & (block < end)).to(tl.int32)",
        f"{HIDDEN_ON_CPU}test_tiles_that_a_mask_hides_are_not_walked", "", "sum(walked)",
    ),
    Mutant(
        "mask on Hopper: sums of a tile that no block lists", "kernels/hopper/flash_bwd/rows.py",
        "mask=is_stored, other=0.0)", "mask=is_stored | ~is_stored, other=0.0)",
        f"{HIDDEN_ON_CPU}test_queries_that_no_block_sees_have_no_gradient", "32", "FAIL",
    ),
    Mutant(
        "mask on Hopper: a block that shows nothing takes a turn", "kernels/prepass/mask_steps.py",
        "tl.store(lists_ptr + 2, -1)", "tl.store(lists_ptr + 2, 0)",
        f"{HIDDEN_ON_CPU}test_padding_of_each_head_on_a_cpu", "True", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "mask on Hopper: the rank of a step counts its own block", "kernels/prepass/mask_steps.py",
        "earlier, step[None, :], block, row_blocks", "earlier, step[None, :], block + 1, row_blocks",
        MASKS_ON_CPU, "32 and alibi", "waits for a block",
    ),
    Mutant(
        "slopes on Hopper: gradient with the other sign", APART_DQ,
        "found - row_sums(of_slope", "found + row_sums(of_slope",
        f"{HIDDEN_ON_CPU}test_slopes_on_a_cpu", "", "FAIL A peer rule of dalibi_slopes",
    ),
    Mutant(
        "slopes on Hopper: what dS of a row adds up to, with the other sign", APART_DQ,
        "row_sums(ds_sum, rules.BLOCK_N) - sums", "row_sums(ds_sum, rules.BLOCK_N) + sums",
        f"{HIDDEN_ON_CPU}test_slopes_of_distant_keys_on_a_cpu", "",
        "Tensor-likes are not close",
    ),
    Mutant(
        "slopes on Hopper: sink left out of the sums of dS", ROWS,
        "sums -= of_sink", "sums -= 0.0 * of_sink",
        f"{HIDDEN_ON_CPU}test_slopes_of_distant_keys_on_a_cpu", "sinks",
        "Tensor-likes are not close",
    ),
    Mutant(
        "dK and dV apart: softcap's derivative not passed on", APART_DKV,
        "passed = p * cap", "passed = p * 1.0",
        BACKWARD_ON_CPU, "window and 192", "FAIL B1 maximum of dk",
    ),
    Mutant(
        "dK and dV apart: next scores of the same queries", APART_DKV,
        "tiles.queries.ring, n + 1, zero_accumulator", "tiles.queries.ring, n, zero_accumulator",
        BACKWARD_ON_CPU, "full and 192", "FAIL B1 maximum of dv",
    ),
    Mutant(
        "dK and dV apart: delta of another tile", APART_DKV,
        "delta = statistics_of(tiles.dout, n, 0", "delta = statistics_of(tiles.dout, n + 1, 0",
        BACKWARD_ON_CPU, "causal and 192", "FAIL B1 maximum of dk",
    ),
    Mutant(
        "dK and dV apart: dK without the softmax scale", APART_DKV,
        "times(result, rules.softmax_scale)", "times(result, 1.0)",
        BACKWARD_ON_CPU, "full and 192", "FAIL B1 maximum of dk",
    ),
    Mutant(
        "dK and dV apart: a cut tile without its mask", APART_DKV,
        "p = gl.where(visible(p, band, row_first, key_first, True, rules), p, 0.0)", "p = p * 1.0",
        BACKWARD_ON_CPU, "causal and 192", "FAIL B1 maximum of dv",
    ),
    Mutant(
        "dK and dV apart: the first head's slope for a whole group", APART_DKV,
        "head = gl.where(place + 1 == count, head + 1, head)", "head = gl.where(place + 1 == count, head, head)",
        BACKWARD_ON_CPU, "window and 192", "FAIL B1 maximum of dv",
    ),
    Mutant(
        "dQ apart: statistics of the first group's queries for both", APART_DQ,
        "(row_first - band.q_begin)\n    lse", "(block_first - band.q_begin)\n    lse",
        BACKWARD_ON_CPU, "full and 192", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "dQ apart: without the softmax scale", APART_DQ,
        "times(dq, rules.softmax_scale)", "times(dq, 1.0)",
        BACKWARD_ON_CPU, "full and 192", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "dQ apart: tiles above the diagonal taken for whole", APART_DQ,
        "cut = cut | (key_first + rules.BLOCK_N - 1 > row_first + band.high)",
        "cut = cut | (key_first > row_first + ROWS + band.high)",
        BACKWARD_ON_CPU, "causal and 192", "FAIL B1 maximum of dq",
    ),
    Mutant(
        "dQ apart: keys of the next sequence multiplied", APART_DQ,
        "if keys_used < rules.BLOCK_N:", "if keys_used < 0:",
        NEIGHBOURS_ON_CPU, "192", "dq",
    ),
    Mutant(
        "dQ apart: values of the next sequence not hidden", APART_DQ,
        "cut = key_first + rules.BLOCK_N > band.k_end", "cut = key_first > band.k_end",
        NEIGHBOURS_ON_CPU, "192", "dq",
    ),
    Mutant(
        "float32 gradients on Hopper: a large part for a small one", SPLIT_STEPS,
        "values_slice(ring, tile + 1, i), small, is_async=True)", "values_slice(ring, tile, i), small, is_async=True)",
        PARTS_ON_CPU, "causal and 40", "FAIL B1 maximum of d",
    ),
    Mutant(
        "float32 gradients on Hopper: scales of the first head", SPLIT_STEPS,
        "tile = (batch * num_heads + head)", "tile = (batch * num_heads + 0 * head)",
        PARTS_ON_CPU, "causal and 40", "FAIL B1 maximum of d",
    ),
    Mutant(
        "float32 gradients on Hopper: a row's scale undone by half", SPLIT_STEPS,
        "power_of_two(biased - 14 + exponent)", "power_of_two(biased - 15 + exponent)",
        PARTS_ON_CPU, "causal and 40", "FAIL B1 maximum of d",
    ),
    Mutant(
        "float32 gradients on Hopper: rows of dS need not add up", "kernels/hopper/flash_bwd/split_dq.py",
        "x - like(excess, x) * gl.load(", "x - 0.0 * like(excess, x) * gl.load(",
        f"{FLOAT32_ON_CPU}test_float32_on_other_data", "causal and low",
        "FAIL B2 RMS of dq",
    ),
    Mutant(
        "float32 gradients under a mask on Hopper: the second half of the last tile of a mask is not written",
        SPLIT_ROWS, "first < tl.cdiv(high_row, ALIGN) * ALIGN", "first < high_row",
        MASKED_PARTS_ON_CPU, "head and 40 and nan", "FAIL B1 maximum of d",
    ),
    Mutant(
        "float32 gradients on Hopper: what arrives at the log-sum-exp is taken for an error", SPLIT_ROWS,
        "tl.store(sums_ptr + at, sums)", "tl.store(sums_ptr + at, 0.0 * sums)",
        f"{FLOAT32_ON_CPU}test_float32_on_other_data", "causal and low",
        "FAIL B2 RMS of dq",
    ),
    Mutant(
        "float32 gradients on Hopper: what arrives at the log-sum-exp overflows", SPLIT_ROWS,
        "most = LARGEST_DLSE - bits - v_exponent", "most = bits * 0 + exponent",
        f"{FLOAT32_ON_CPU}test_float32_of_a_loss_of_the_log_sum_exp_alone", "",
        "FAIL B1 maximum of d",
    ),
    Mutant(
        "float32 gradients on Hopper: keys of the next sequence in a tile", SPLIT_ROWS,
        "x = load_keys(tensor, seen, item, head, begin, first, low_row, high_row,",
        "x = load_keys(tensor, seen, item, head, begin, first, low_row, 2147483647 - begin * 0,",
        NEIGHBOURS_ON_CPU, "float32 and causal", "d",
    ),
]  # fmt: skip
