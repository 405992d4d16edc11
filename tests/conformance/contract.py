"""The contract's edge cases and bad input: the tests of each row, and the seeded faults that prove the tests.

test_contract.py checks that the named tests and faults exist, and that every test of the two files and every fault has
a row.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One promise: its wording, its tests, and the seeded faults that make them fail."""

    promise: str
    tests: tuple[str, ...]
    mutants: tuple[str, ...]


EDGES = "test_edges.py::"
BAD = "test_bad_input.py::"
GRADIENTS = "test_gradients.py::"
GPU, CONTEXTS = "test_gpu.py::", "test_contexts.py::"
PAGED, PAGED_BAD = "test_paged.py::", "test_paged_bad_input.py::"
CACHE, STATES = "../test_kv_cache.py::", "../test_states.py::"
CACHE_ERRORS, CALLS = "../test_kv_cache_errors.py::", "../test_cached_calls.py::"

TABLE = (
    # Edge cases and the expected behavior
    Row(
        "fully masked row: out 0, lse -inf, its dq 0, nothing to dk and dv, never NaN",
        (EDGES + "test_rows_that_see_nothing", GRADIENTS + "test_gradients_of_empty_calls"),
        ("a row that sees nothing is 0 / 0",),
    ),
    Row(
        "the same with a sink: out 0, lse the sink logit, sink gradient finite",
        (
            EDGES + "test_rows_that_see_nothing",
            EDGES + "test_sinks_far_from_the_logits",
            GRADIENTS + "test_gradients_of_empty_calls",
        ),
        ("sink in base two", "gradient of the sinks has the wrong sign"),
    ),
    Row(
        "no keys: out 0, lse -inf or the sink, dq 0, no launch",
        (EDGES + "test_empty_sizes", GRADIENTS + "test_gradients_of_empty_calls"),
        ("no keys: LSE 0",),
    ),
    Row(
        "no queries or no batch: empty out and lse, dk = dv = 0, no launch",
        (EDGES + "test_empty_sizes", GRADIENTS + "test_gradients_of_empty_calls"),
        ("no queries: out as wide as q",),
    ),
    Row(
        "empty sequence among packed ones: its rows as above, the others bit-equal to a run without it",
        (EDGES + "test_empty_sequences_among_packed_ones",),
        ("an empty sequence sees one key",),
    ),
    Row(
        "one visible key: that row of v bit for bit, whatever the logit",
        (EDGES + "test_one_visible_key",),
        ("hidden scores are a large negative number",),
    ),
    Row(
        "first visited tile masked, later logits low: the same gates; the running maximum never becomes 0",
        (EDGES + "test_first_tile_hidden_and_later_logits_low",),
        ("running maximum becomes 0 before anything is seen", "tiles behind the whole ones taken from among them"),
    ),
    Row(
        "NaN or Inf in q or k: exactly the rows that see it",
        (EDGES + "test_not_finite_in_q_or_k_reaches_the_rows_that_see_it",),
        ("NaN swept under the rug",),
    ),
    Row(
        "NaN or Inf in v: the rows that see it, never another head or batch item",
        (
            EDGES + "test_not_finite_in_v_stays_in_its_head",
            EDGES + "test_not_finite_in_v_stays_in_the_heads_that_see_it",
        ),
        ("v of another head", "heads that see different keys share tiles"),
    ),
    Row(
        "NaN or Inf where nobody sees it: no effect, bit-equal",
        ("test_pairs.py::test_keys_that_no_query_sees_may_hold_anything",),
        ("NaN leaks from values that nobody sees", "hidden by bias only as far as the number goes"),
    ),
    Row(
        "-inf in bias hides, +inf is NaN in that row only",
        (EDGES + "test_minus_infinity_in_bias_hides", EDGES + "test_plus_infinity_in_bias_is_nan_in_its_row"),
        ("bias of -inf is a large negative number", "bias of +inf is a large number"),
    ),
    Row(
        "a finite bias hides nothing, the lowest number included, and takes the row where it is the largest",
        (
            EDGES + "test_the_lowest_number_as_a_bias_shows_its_pair",
            EDGES + "test_the_largest_number_as_a_bias_takes_the_row",
        ),
        ("the lowest number as a bias overflows",),
    ),
    Row(
        "causal with unequal lengths: bottom-right; top-left by name",
        (EDGES + "test_causal_alignment", EDGES + "test_causal_true_is_bottom_right"),
        ("top-left mask aligned to the last key", "stale cache key: a call's options left out"),
    ),
    Row(
        "every tile of rows once, whatever heads the groups that share L2 leave over",
        (EDGES + "test_heads_left_over_by_groups_that_share_l2",),
        ("heads that groups leave over are not counted",),
    ),
    Row(
        "window: inclusive on both sides, counted from the last key, -1 unlimited",
        (EDGES + "test_window_is_inclusive_and_follows_the_last_key", "test_probes.py::test_support"),
        ("window's left edge exclusive",),
    ),
    Row(
        "LSE: natural logarithm, float32, (batch, heads, rows) or (heads, total)",
        (EDGES + "test_lse_is_the_natural_logarithm_in_float32",),
        ("LSE in base two",),
    ),
    Row(
        "default scale: of the caller's head_dim, before any padding",
        (EDGES + "test_default_scale_is_of_the_callers_head_dim",),
        ("scale of a padded head_dim",),
    ),
    Row(
        "scale 0: uniform over the visible keys",
        (EDGES + "test_scale_zero_is_uniform_over_what_is_visible", EDGES + "test_a_scale_of_nothing_leaves_no_nan"),
        ("scale 0 is 0 times -inf", "a scale of 0 is no scale", "a scale of 0 multiplies torch's causal mask"),
    ),
    Row(
        "GQA: query head h reads kv head h // group",
        (EDGES + "test_query_heads_share_kv_heads_in_groups", "test_probes.py::test_retrieval_across_heads"),
        ("wrong head map: modulo instead of division", "kv heads taken in turn"),
    ),
    Row(
        "LSE in a loss: the right gradient",
        (GRADIENTS + "test_lse_alone_in_the_loss", GRADIENTS + "test_gates"),
        ("gradient of the LSE dropped",),
    ),
    Row(
        "second derivative: a clear RuntimeError",
        (GRADIENTS + "test_second_derivative_is_refused",),
        ("second derivative is silently none",),
    ),
    Row(
        "grid limits: 65,535 and 65,536 of anything",
        (GPU + "test_grid_limits",),
        ("the last of 65,536 programs lost",),
    ),
    Row(
        "outputs fully written, inputs not at all",
        ("test_poison.py::test_every_cell_is_written", "test_poison.py::test_guards_and_inputs_stay_as_they_were"),
        ("last row of each tile not stored", "columns beyond head_dim_v stored"),
    ),
    Row(
        "a dirty workspace: no effect, bit-equal",
        ("test_poison.py::test_a_second_run_is_bit_equal", "test_poison.py::test_every_cell_is_written"),
        ("a tile of scores that the window's edge cuts is skipped",),
    ),
    Row(
        "addresses past 2^31 and 2^32 elements",
        (EDGES + "test_offsets_past_32_bits", GPU + "test_far_tensors", GPU + "test_far_outputs"),
        ("32-bit offset",),
    ),
    # Bad input
    Row(
        "a wrong type: TypeError; tensors on two devices: ValueError",
        (
            BAD + "test_wrong_type",
            BAD + "test_wrong_value",
            BAD + "test_errors_are_the_ones_python_users_catch",
            GPU + "test_cpu_tensors_for_a_gpu_kernel",
            GPU + "test_mixed_devices_are_refused",
        ),
        ("integer masks let through",),
    ),
    Row(
        "a wrong shape: ValueError naming argument, got, expected; an unknown option is an error",
        (
            BAD + "test_wrong_value",
            BAD + "test_an_unknown_argument_is_an_error",
            BAD + "test_a_good_call_is_not_refused",
        ),
        ("heads that do not divide let through",),
    ),
    Row(
        "a wrong scale, softcap or window: ValueError",
        (BAD + "test_wrong_value",),
        ("an infinite scale let through",),
    ),
    Row(
        "numbers that are equal are one call, whatever their types; what is no number is refused even if it is equal",
        (
            BAD + "test_equal_numbers_of_other_types_are_one_call",
            BAD + "test_a_known_call_forgives_no_type",
            BAD + "test_what_a_call_says_has_one_type",
        ),
        ("a bool is a number", "equal numbers of other types keep their type"),
    ),
    Row(
        "what is around a call, autocast or the process's settings, changes no bit",
        (
            CONTEXTS + "test_autocast_changes_no_bit",
            CONTEXTS + "test_autocast_changes_no_gradient",
            CONTEXTS + "test_float32_keeps_its_bits_whatever_the_process_allows",
            CONTEXTS + "test_which_settings_keep_float32",
            CONTEXTS + "test_threads_never_meet_a_changed_setting",
        ),
        ("autocast reaches torch's products", "float32 products follow the process's setting"),
    ),
    Row(
        "valid but unsupported here: NotImplementedError with every reason and what would run",
        (BAD + "test_a_refusal_lists_every_reason_and_what_would_run", "test_gates.py::test_case_grid"),
        ("a refusal names one reason",),
    ),
    Row(
        "contents of cu_seqlens: named when checked, memory-safe when not",
        (
            BAD + "test_wrong_contents_when_checked",
            BAD + "test_wrong_contents_unchecked_stay_inside_the_tensors",
            BAD + "test_any_numbers_as_offsets_stay_inside_the_tensors",
        ),
        (
            "a packed sequence may end before it begins",
            "sequences longer than the longest let through",
            "offsets beyond the last query not clamped",
            "scores of a sequence longer than the longest written into the next head's",
        ),
    ),
    Row(
        "compiling while a graph is captured: RuntimeError, the capture survives",
        (GPU + "test_compiling_during_capture_is_refused_and_the_capture_survives",),
        ("compiles while a graph is captured",),
    ),
    Row(
        "no GPU: import works, auto serves, a GPU kernel by name says what was found and what it needs",
        (BAD + "test_a_gpu_kernel_by_name_without_a_gpu_names_found_and_needed",),
        ("CPU tensors launched on a GPU kernel",),
    ),
    Row(
        "all checks hold under python -O",
        (BAD + "test_all_of_this_holds_without_assertions",),
        ("a check is an assertion",),
    ),
    # Paged caches and partial results
    Row(
        "empty sequence in a cache: its rows as above, the others bit-equal to a run without it",
        (PAGED + "test_empty_sequences_do_not_matter", PAGED + "test_page_sizes_and_splits"),
        ("sink left out where shares are merged", "sums of the shares not rescaled"),
    ),
    Row(
        "NaN behind the used length and in unused pages: no effect, bit-equal",
        (PAGED + "test_count", PAGED + "test_paged_equals_dense"),
        ("cells beyond a sequence's used length attended to",),
    ),
    Row(
        "paged equals dense with the same tiles and splits, whatever the pages",
        (PAGED + "test_paged_equals_dense", PAGED + "test_retrieval", PAGED + "test_shared_and_evicted_pages"),
        ("the page table of another row", "keys read from another cell of their page"),
    ),
    Row(
        "splits: any number meets the gates, and merges what was written and nothing else",
        (PAGED + "test_page_sizes_and_splits", PAGED + "test_every_cell_is_written_and_no_input"),
        ("shares merged as if their maxima were equal", "a share without keys leaves the state of the launch before"),
    ),
    Row(
        "page table not int32, page size not positive: an error",
        (PAGED_BAD + "test_wrong_type", PAGED_BAD + "test_wrong_value"),
        ("a page table of 64-bit integers let through",),
    ),
    Row(
        "page ids, rows and lengths: named when checked, memory-safe when not",
        (
            PAGED_BAD + "test_wrong_contents_when_checked",
            PAGED + "test_wrong_contents_unchecked_stay_inside_the_tensors",
        ),
        ("negative page ids let through", "lengths above the table's capacity let through"),
    ),
    Row(
        "out of pages: an error before anything is written",
        (CACHE + "test_out_of_pages_changes_nothing", CACHE + "test_a_call_that_is_refused_changes_nothing"),
        ("lengths advanced though pages are missing",),
    ),
    Row(
        "merging of partial results: natural LSE, any number of parts; an lse of a wrong shape or dtype is an error",
        (STATES + "test_parts_merge_to_the_whole", STATES + "test_bad_input"),
        ("merging of partial results in base two", "lse of another dtype let through"),
    ),
    Row(
        "evicted tokens: no fork, truncation or window that would need them; no page is freed while in use",
        (
            CACHE + "test_a_fork_of_evicted_tokens_frees_no_page_of_another",
            CACHE + "test_a_sequence_is_cut_only_as_far_as_its_window_is_there",
            CACHE + "test_tokens_that_may_be_taken_back_keep_their_window",
            CACHE + "test_forks_share_pages_until_one_writes",
            "../test_kv_cache_model.py::test_the_cache_is_what_lists_of_tokens_say",
        ),
        (
            "a fork of evicted tokens let through",
            "a sequence truncated into evicted tokens",
            "the window before the end of a truncated sequence not counted",
            "pages evicted that truncation was promised",
            "a fork counts no page",
        ),
    ),
    Row(
        "a call on a cache that fails has changed nothing, in any mode of torch",
        (
            CACHE_ERRORS + "test_whichever_operation_fails_nothing_has_changed",
            CACHE_ERRORS + "test_another_thread_than_the_one_that_made_it_in_inference_mode",
        ),
        (
            "books changed before the device",
            "a failed append leaves the lengths on the device advanced",
            "a cache made in inference mode works nowhere else",
        ),
    ),
    Row(
        "lengths on the host decide what is appended; checked compares them with the offsets",
        (CALLS + "test_lengths_on_the_host_say_what_is_appended",),
        ("seqlens_q not compared with cu_seqlens_q", "queries of an append follow the offsets on the device"),
    ),
    Row(
        "a cache takes no part in autograd: the pool stays out, backward on a result raises",
        (
            CACHE_ERRORS + "test_the_pool_stays_out_of_every_graph",
            CACHE_ERRORS + "test_backward_says_that_there_is_no_gradient",
        ),
        (
            "appended tokens join the graph",
            "a gradient through the cache lost without a word",
            "a plan of a call without gradients serves a call with them",
        ),
    ),
    Row(
        "numbers on the device over the whole int32 range: every access inside its tensor, sizes follow tensors",
        (
            PAGED_BAD + "test_any_numbers_unchecked_stay_inside_the_tensors",
            CALLS + "test_any_offsets_become_offsets",
            CALLS + "test_sizes_follow_tensors_and_not_their_contents",
        ),
        (
            "queries of a cached call that end before they begin have a length",
            "offsets beyond the last token size what is allocated",
            "a gathered cache keeps the offsets it was given",
        ),
    ),
    Row(
        "positions beyond a table of angles: an error where the host knows the lengths, or when checked",
        (CALLS + "test_queries_beyond_the_table_of_angles_are_refused",),
        ("queries beyond the table of angles let through",),
    ),
)
