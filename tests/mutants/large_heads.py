"""Seeded faults of kernels for large head dimensions."""

from __future__ import annotations

from tests.mutants.mutant import LARGE, THREE, Mutant

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
        "zero_unseen(ring, n, share.begin - key, share.end - key, k_map, 1, V_BOXES)", "n += 0",
        "../kernels/hopper/test_latent.py::test_what_lies_beside_the_keys_has_no_effect", "16", "torch.equal",
    ),
    Mutant(
        "keys beside a latent's visible ones not zeroed for many rows", "kernels/large_head_dim/latent_rows_device.py",
        "zero_unseen(ring, n, share.begin - key, share.end - key, k_map, 2, PIECES // 2)", "n += 0",
        "../kernels/hopper/test_latent.py::test_what_lies_beside_the_keys_has_no_effect", "64", "torch.equal",
    ),
    Mutant(
        "a latent's sums not rescaled for many rows", "kernels/large_head_dim/latent_rows_device.py",
        "acc = rescaled(acc, factors.load(by_row))", "factors.load(by_row)",
        "../kernels/hopper/test_latent.py::test_the_protocol_of_many_rows_on_a_cpu", "six", "FAIL",
    ),
    Mutant(
        "offsets of packed latents not clamped", "kernels/large_head_dim/latent_rows_device.py",
        "        row_first = gl.maximum(row_first, 0)\n", "",
        "../kernels/hopper/test_latent.py::test_offsets_that_do_not_ascend", "", "assert",
    ),
    Mutant(
        "a latent's sums not rescaled", "kernels/large_head_dim/latent_device.py",
        "acc[i] * alpha[None, :], is_async=True", "acc[i], is_async=True",
        "../kernels/hopper/test_latent.py::test_the_protocol_on_a_cpu", "plain", "FAIL",
    ),
    Mutant(
        "shares of a latent's keys overlap", "kernels/large_head_dim/latent_keys.py",
        "first = (tile + tiles * split // num_splits) * KEYS", "first = tile * KEYS",
        "../kernels/hopper/test_latent.py::test_the_protocol_on_a_cpu", "plain and 3", "FAIL",
    ),
    Mutant(
        "rows of a latent's tile all see what the last query sees", "kernels/large_head_dim/latent_rows_device.py",
        "begin, end = keys_seen(query, query,", "query = query * 0 + last_query; begin, end = keys_seen(query, query,",
        "../kernels/hopper/test_latent.py::test_the_protocol_of_many_rows_on_a_cpu", "second and 1", "FAIL",
    ),
    Mutant(
        "pieces of a latent multiplied by the other warpgroup's place", "kernels/large_head_dim/latent_rows_device.py",
        "column = (2 * i + GROUP) * WIDTH + columns", "column = (GROUP * (PIECES // 2) + i) * WIDTH + columns",
        "../kernels/hopper/test_latent.py::test_the_protocol_of_many_rows_on_a_cpu", "six and 1", "FAIL",
    ),
    Mutant(
        "packed latents begin with the first query", "kernels/large_head_dim/latent_rows_device.py",
        "q_row = tile.q_begin * num_heads + tile.row_first", "q_row = tile.row_first",
        "../kernels/hopper/test_latent.py::test_packed_queries", "True and 1", "FAIL",
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
        "packed queries of another sequence", "kernels/split_kv/few_rows_device.py",
        "first_query.to(gl.int64) * q_tensor.stride_m", "call.batch.to(gl.int64) * q_tensor.stride_m",
        "../kernels/hopper/test_few_rows.py::test_packed_queries_on_a_cpu", "4", "FAIL",
    ),
    Mutant(
        "packed queries after the last token", "kernels/split_kv/few_rows_device.py",
        "count = gl.minimum(end - first, call.seqlen_q)", "count = gl.maximum(end - first, call.seqlen_q)",
        "../kernels/hopper/test_few_rows.py::test_any_offsets_stay_inside_the_tensors", "", "count",
    ),
    Mutant(
        "lse of packed queries as of padded ones", "kernels/split_kv/few_rows_device.py",
        ".to(gl.int64) * heads + first_query + queries", ".to(gl.int64) * heads + queries",
        "../kernels/hopper/test_few_rows.py::test_packed_queries_on_a_cpu", "4", "FAIL",
    ),
    Mutant(
        "blocks of 16 rows for more", "kernels/split_kv/few_rows_host.py", '"ROWS": config.block_m,', '"ROWS": 16,',
        "../kernels/hopper/test_few_rows.py::test_the_protocol_on_a_cpu", "17 or 24", "FAIL",
    ),
    Mutant(
        "a config of 16 rows takes more", "kernels/split_kv/host.py",
        "few_rows.takes(problem, gpu, operands, config.block_m)", "few_rows.takes(problem, gpu, operands)",
        "../kernels/hopper/test_few_rows.py::test_a_config_of_fewer_rows_than_the_call_goes_by_pointers", "",
        "few_rows_kernel",
    ),
    Mutant(
        "keys of 8 bits stay with split_kv as those of 16 bits", "kernels/hopper/split_tiles.py",
        "(of_few if problem.dtype_kv is None else LEAST_KEYS_PER_SM)", "of_few",
        "../kernels/hopper/test_flash_fwd_splits.py::test_auto_splits_keys_of_8_bits", "64", "split_kv",
    ),
    Mutant(
        "many rows leave split_kv although hopper/flash_fwd cannot run them", "kernels/split_kv/claims.py",
        "return is_able and not hides_keys(problem)",
        "return not hides_keys(problem)",
        "../kernels/test_split_kv.py::test_few_queries_of_many_heads_take_larger_tiles", "head_dim", "split_kv",
    ),
    Mutant(
        "heads that see different keys share tiles", "problem.py",
        "if shape is not None and shape[1] > 1:", "if shape is not None and shape[1] > 10**6:",
        "test_edges.py::test_not_finite_in_v_stays_in_the_heads_that_see_it", "split_kv or large_head_dim", "bits(",
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
        "three_kernel's gradients: delta of un-normalized probabilities", "kernels/three_kernel/backward.py",
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
