"""Host code for what a mask or a bias hides: the launches that read it before all others, and their memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from warpwave.kernels.hopper.flash_bwd.config import Config
from warpwave.kernels.hopper.flash_bwd.launches import Step, Tensors, query_tiles, steps_over_keys
from warpwave.kernels.prepass import bias_seen, mask_bits, mask_steps, zero_unseen
from warpwave.problem import AttentionProblem
from warpwave.runtime.scratch import Need


def needs(problem: AttentionProblem, config: Config, keys: int) -> list[Need | None]:
    """Returns the shape and dtype of each field of `launches.Hidden`, None for absent ones.

    Args:
        keys: of a step in the launch of dQ.
    """
    words: list[Need | None] = [None] * 4
    if problem.mask_shape is not None:
        for transposed, of in _lists(problem, config, keys).items():
            words[transposed] = (of.packed.size,), torch.int32
            words[2 + transposed] = of.shape, torch.int32
    if problem.dtype == "float32":  # what is hidden becomes zeros when operands are split (split_rows.py)
        return [*words, None, (mask_bits.keys_seen_shape(problem), torch.int8), *[None] * 5]
    shapes_of_flags = mask_bits.seen_shapes if problem.bias_shape is None else bias_seen.shapes
    flags: list[Need | None] = [(shape, torch.int8) for shape in shapes_of_flags(problem)]
    dtype = getattr(torch, problem.dtype)
    of_queries = (problem.batch, problem.seqlen_q, problem.num_heads_q)
    of_keys = (problem.batch, problem.seqlen_k, problem.num_heads_kv)
    shapes = [(*of_queries, problem.head_dim), (*of_keys, problem.head_dim)]
    shapes += [(*of_keys, problem.head_dim_v), (*of_queries, problem.head_dim_v)]
    return [*words, *flags, ((1,), torch.int8), *((shape, dtype) for shape in shapes)]


def steps(problem: AttentionProblem, tensors: Tensors, config: Config) -> list[Step]:
    """Returns the launches: they pack the mask, list the steps of blocks, flag the queries and keys that mask and bias
    do not hide entirely, and check the others. If these hold a large number, the operands are copied with zeros for
    them. In float32 they only flag the keys that some query sees, and nothing is checked or copied."""
    found, hidden = [], tensors.workspace.hidden
    if problem.bias_shape is not None:
        of_bias = bias_seen.specify(problem, *_bias_and_flags(tensors))
        found.append(Step(of_bias, _bias_and_flags))
    if problem.mask_shape is not None:
        lists = _lists(problem, config, steps_over_keys(problem, tensors, config)[0])
        for transposed in lists:
            given = partial(_mask_and_words, transposed=transposed)
            mask, words, *seen = given(tensors)
            found.append(Step(mask_bits.specify(problem, mask, words, transposed, tuple(seen)), given))
        for transposed, of in lists.items():
            given = partial(_words_and_walks, transposed=transposed)
            found.append(Step(mask_steps.specify(of, *given(tensors)), given))
    if problem.dtype == "float32":
        return [*found, Step(mask_bits.specify_keys_seen(problem, *_words_and_keys(tensors)), _words_and_keys)]
    assert hidden.copies_needed is not None
    copying = zero_unseen.specify(_queries(tensors), _keys(tensors), hidden.copies_needed)
    found += [Step(of, _tokens_and_copies) for of in copying]
    return found


def _lists(problem: AttentionProblem, config: Config, keys: int) -> dict[bool, mask_steps.Lists]:
    """Returns the lists of steps by whether the mask is transposed: those of blocks of keys, over tiles of queries of
    all heads of a group; and in launches apart those of blocks of queries, over tiles of `keys` keys."""
    group, tile, rows = problem.num_heads_q // problem.num_heads_kv, mask_bits.TILE_KEYS, mask_bits.BLOCK_ROWS
    of_keys = mask_bits.packed(problem, transposed=True)
    steps_of_head = query_tiles(problem, config.block_m)
    per_block, repeat = config.block_n // rows, tile // config.block_m
    found = {True: mask_steps.Lists(of_keys, -(-problem.seqlen_k // rows), per_block, repeat, steps_of_head, group)}
    if not config.is_joint:
        of_queries = mask_bits.packed(problem)
        per_block, repeat, steps_of_head = tile // rows, tile // keys, of_queries.tiles * tile // keys
        found[False] = mask_steps.Lists(of_queries, -(-problem.seqlen_q // rows), per_block, repeat, steps_of_head)
    return found


def _mask_and_words(t: Tensors, transposed: bool) -> tuple[Any, ...]:
    hidden = t.workspace.hidden
    words = hidden.words_transposed if transposed else hidden.words
    # Those of a bias include what the mask hides; those of float32 are of keys alone, made from the words.
    is_flagging = transposed and t.operands.bias is None and hidden.seen_queries is not None
    return t.operands.mask, words, *((hidden.seen_queries, hidden.seen_keys) if is_flagging else (None, None))


def _words_and_keys(t: Tensors) -> tuple[Any, ...]:
    return t.workspace.hidden.words, t.workspace.hidden.seen_keys


def _words_and_walks(t: Tensors, transposed: bool) -> tuple[Any, ...]:
    hidden = t.workspace.hidden
    return (hidden.words_transposed, hidden.walks_transposed) if transposed else (hidden.words, hidden.walks)


def _bias_and_flags(t: Tensors) -> tuple[Any, ...]:
    return t.operands.bias, t.operands.mask, t.workspace.hidden.seen_queries, t.workspace.hidden.seen_keys


def _tokens_and_copies(t: Tensors) -> tuple[Any, ...]:
    return *_queries(t).flat, *_keys(t).flat, t.workspace.hidden.copies_needed


def _queries(t: Tensors) -> zero_unseen.Tensors:
    hidden = t.workspace.hidden
    assert hidden.q is not None and hidden.dout is not None and hidden.seen_queries is not None
    return zero_unseen.Tensors((t.operands.q, t.dout), (hidden.q, hidden.dout), hidden.seen_queries)


def _keys(t: Tensors) -> zero_unseen.Tensors:
    hidden = t.workspace.hidden
    assert hidden.k is not None and hidden.v is not None and hidden.seen_keys is not None
    return zero_unseen.Tensors((t.operands.k, t.operands.v), (hidden.k, hidden.v), hidden.seen_keys)
