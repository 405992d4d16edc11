"""Seeded faults of paged caches, of split keys and of their merge."""

from __future__ import annotations

from tests.mutants.mutant import PARTIALS, SPLIT, Mutant

# Of kernels that read pages and merge splits, and of what the cache refuses or leaves alone.
PAGED = [
    Mutant(
        "cells beyond a sequence's used length attended to", "kernels/paged_keys.py",
        "used = tl.minimum(tl.maximum(tl.load(pages.seqused_k_ptr + row), 0), seqlen_k)", "used = seqlen_k * 1",
        "test_paged.py::test_count", "16-none-split_kv", "torch.equal",
    ),
    Mutant(
        "the page table of another row", "kernels/paged_keys.py",
        "pages.table_ptr + row * pages.stride_table", "pages.table_ptr + batch * pages.stride_table",
        "test_paged.py::test_retrieval", "16-split_kv", "torch.equal",
    ),
    Mutant(
        "keys read from another cell of their page", SPLIT,
        "cells = (keys % pages.PAGE_SIZE).to(tl.int64)", "cells = (keys % pages.PAGE_SIZE // 2 * 2).to(tl.int64)",
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
        "query heads of a group taken in turn", SPLIT,
        "heads = unit * HEADS + tile_rows % HEADS  # [BLOCK_M]",
        "heads = unit + tile_rows % HEADS * num_units",
        "test_paged.py::test_retrieval", "16-split_kv", "torch.equal",
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
        "test_paged.py::test_bits_of_pieces_do_not_depend_on_shares", "window0 and float32", "At index 0 diff",
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
        "final_state(m_i, l_i, sinks_ptr, head, HAS_SINKS)", "final_state(m_i, l_i, sinks_ptr, head, False)",
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
        "a page table of 64-bit integers let through", "checks/calls.py",
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
        "../kernels/test_append_kv.py::test_the_kernel_writes_what_torch_writes", "halves and dtype0",
        "Tensor-likes are not close",
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
        "int32 overflows",
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
