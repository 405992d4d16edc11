"""Seeded faults of the doors to other projects."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OF_TORCH, OF_FLASH_ATTN = "integrations/pytorch.py", "integrations/flash_attn.py"
OF_FLASH_OPERATORS = "integrations/pytorch_flash.py"
OF_TRANSFORMERS, OF_VLLM = "integrations/transformers.py", "integrations/vllm.py"
IN_TORCH, IN_FLASH_OPERATORS, IN_FLASH_ATTN, IN_CACHES, IN_TRANSFORMERS, IN_VLLM = (
    f"../integrations/test_{name}.py::"
    for name in ("pytorch", "pytorch_flash", "flash_attn", "flash_attn_caches", "transformers", "vllm")
)

INTEGRATIONS = [
    Mutant(
        "torch's function: is_causal aligned to the last key", OF_TORCH,
        "causal=_TOP_LEFT if is_causal else False", "causal=bool(is_causal)",
        f"{IN_TORCH}test_the_grid_agrees_with_torch", "", "not close",
    ),
    Mutant(
        "torch's function: dropout lost", OF_TORCH,
        "dropout_p=dropout_p,\n    ).transpose(1, 2)", "dropout_p=0.0,\n    ).transpose(1, 2)",
        f"{IN_TORCH}test_dropout", "", "not close",
    ),
    Mutant(
        "torch's function: routed after the context", OF_TORCH,
        "if _routes == 0 and F.scaled_dot_product_attention is _routed:", "if _routes < 0:",
        f"{IN_TORCH}test_a_context_routes_and_restores", "", "TORCHS",
    ),
    Mutant(
        "flash operators: the backward has another seed", OF_FLASH_OPERATORS,
        "random_state.view(torch.int64)", "random_state.view(torch.int64).flip(0)",
        f"{IN_FLASH_OPERATORS}test_the_flash_operators_keep_the_seed_of_dropout", "", "not close",
    ),
    Mutant(
        "flash operators: a causal mask that sees one key more", OF_FLASH_OPERATORS,
        "0 if is_causal else", "1 if is_causal else",
        f"{IN_FLASH_OPERATORS}test_the_flash_operator_of_dense_calls", "", "not close",
    ),
    Mutant(
        "flash_attn: the right side of a window taken from the left", OF_FLASH_ATTN,
        '"window_size": (left, right)', '"window_size": (left, left)',
        f"{IN_FLASH_ATTN}test_documented_windows", "2 and window1", "not close",
    ),
    Mutant(
        "flash_attn: deterministic lost", OF_FLASH_ATTN,
        'host_bool("deterministic", deterministic) or None', "None",
        f"{IN_FLASH_ATTN}test_deterministic", "2", "[True, None]",
    ),
    Mutant(
        "flash_attn: left padding counted into the length", OF_FLASH_ATTN,
        "used = used - cache_leftpad", "used = used - 0",
        f"{IN_CACHES}test_kvcache", "left and padding and 2", "not close",
    ),
    Mutant(
        "flash_attn: one length for all sequences", OF_FLASH_ATTN,
        "not in caches.DTYPES[name] or len(tensor) != batch)", "not in caches.DTYPES[name])",
        f"{IN_FLASH_ATTN}test_errors_name_the_arguments_of_the_caller", "", "DID NOT RAISE",
    ),
    Mutant(
        "transformers: a window of one key too many", OF_TRANSFORMERS,
        "Pattern(True, (left - 1, -1)) if", "Pattern(True, (left, -1)) if",
        f"{IN_TRANSFORMERS}test_logits_and_gradients", "Mistral", "not close", needs_package="transformers",
    ),
    Mutant(
        "transformers: chunks read as a window in a graph", OF_TRANSFORMERS,
        '"attention_chunk_size", None) == local_size', '"attention_chunk_size", None) == -1',
        f"{IN_TRANSFORMERS}test_an_unknown_pattern_is_a_dense_mask", "", "assert", needs_package="transformers",
    ),
    Mutant(
        "transformers: a graph's window of one key too many", OF_TRANSFORMERS,
        "expand(*mask.shape, 2 + left,", "expand(*mask.shape, 3 + left,",
        f"{IN_TRANSFORMERS}test_masks_of_caches", "", "not close", needs_package="transformers",
    ),
    Mutant(
        "transformers: packed documents of a graph without their window", OF_TRANSFORMERS,
        "_with_window(dense, packed[0], packed[0].window)", "_with_window(dense, packed[0], (-1, -1))",
        f"{IN_TRANSFORMERS}test_compiled_training_of_packed_documents", "Mistral", "not close",
        needs_package="transformers",
    ),
    Mutant(
        "transformers: dropout lost", OF_TRANSFORMERS,
        '"dropout_p": dropout,', '"dropout_p": 0.0,',
        f"{IN_TRANSFORMERS}test_dropout", "", "not close", needs_package="transformers",
    ),
    Mutant(
        "vllm: a window of one key too many", OF_VLLM,
        "(sliding_window - 1, -1)", "(sliding_window, -1)",
        f"{IN_VLLM}test_steps_of_prefill_and_decode", "stand-in and window", "not close",
    ),
    Mutant(
        "vllm: a captured step covers only its own lengths", OF_VLLM,
        "metadata.max_seq_len = self.vllm_config.model_config.max_model_len", "metadata.max_seq_len += 0",
        f"{IN_VLLM}test_metadata_of_a_captured_step_follows_its_tensors", "stand-in", "== 80",
    ),
]  # fmt: skip
