"""Seeded faults that held-back tests and a red team found, each put back."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FOUND = [
    Mutant(
        "tiles of K and V of two swizzles share a buffer", "kernels/arguments.py",
        "if gpu.capability == 90 and block_m >= WGMMA_ROWS:", "if gpu.capability == 0 and block_m >= WGMMA_ROWS:",
        "../compile/test_descriptors.py::test_one_layout_for_each_address", "flash_fwd and 33", "unwritten_registers",
    ),
    Mutant(
        "V narrower than a float8 K shares its buffer", "kernels/arguments.py",
        "if not is_float8_v and gpu.capability == 90", 'if problem.dtype == "int8" and gpu.capability == 90',
        "../compile/test_descriptors.py::test_narrow_values_beside_keys_of_8_bits", "129 and float8_e4m3fn-bfloat16",
        "unwritten_registers",
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
        "test_bad_input.py::test_any_numbers_as_offsets_stay_inside_the_tensors", "three_kernel", "int32 overflows",
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
        "if not found and has_bias_cells(problem)", "if found and has_bias_cells(problem)",
        "../test_dispatch.py::test_problems_that_once_had_no_config", "sm_90", "claims",
    ),
    Mutant(
        "a scale of 0 multiplies torch's causal mask", "kernels/torch_sdpa.py",
        " and problem.softmax_scale > 0", "",
        "test_edges.py::test_a_scale_of_nothing_leaves_no_nan", "torch_sdpa", "FAIL",
    ),
    Mutant(
        "keys that are not finite left to torch where nothing is hidden", "kernels/torch_sdpa.py",
        "or not _is_tame(problem, operands, hides):", "or not _is_tame(problem, operands, hides) and hides:",
        "../kernels/test_torch_sdpa.py::test_a_key_that_is_not_finite_makes_no_zeros", "nan", "isnan",
    ),
    Mutant(
        "the sign of a lazily negated view is lost", "checks/calls.py",
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
