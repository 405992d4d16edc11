"""Additive biases: how a tile of scores gets its bias, and how dS is stored.

A bias with a number for each score is copied by TMA. The joint launch has one stage for its tiles. If another block
owns keys (dkv.py), each tile is copied to the stage that will hold its step's P, so it takes no further shared memory.
If a block owns queries (dq.py), tiles of the bias are copied with those of K. If the gradient of the bias is wanted, dS
replaces the bias in its tile, in the same type, and is stored by TMA. A bias that is the same for all queries or for
all keys is read by plain loads.
"""

# No postponed annotations here: an aggregate's fields are checked against its annotations.

from typing import NamedTuple

from warpwave.kernels.hopper.parts import ROWS, accumulator_layout, matrix
from warpwave.runtime.gluon_or_stub import (
    aggregate,
    constexpr_function,
    fence_async_shared,
    gl,
    jit,
    tma_load,
    tma_store,
)
from warpwave.runtime.parameters import Pointer


class BiasOfCall(NamedTuple):
    """The bias of a call, (batch, head, query, key).

    Attributes:
        ptr: given if it is read by plain loads. Its stride along keys is 1, or 0 where `Options.BIAS` is "rows".
        stride_b, stride_h, stride_m: 0 along broadcast axes. The first two also show which axes a tensor map lacks.
    """

    stride_b: int
    stride_h: int
    stride_m: int
    ptr: Pointer


@aggregate
class Bias:
    """The bias of a call, and its gradient.

    Args:
        maps: its tensor map if each score has its own number, else ().
        gradient_maps: the tensor map of dS of (batch, query head, query, key) if it is wanted, else ().
        tiles: tiles of it in shared memory, [count, 1, 1, queries, keys]; unused without a map.
        full, empty: barriers of their stages if they are not copied with K; else unused.
    """

    of_call: BiasOfCall
    maps: gl.tuple
    gradient_maps: gl.tuple
    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@constexpr_function
def bytes_of(maps, tiles):
    """Returns the bytes of a number of tiles of a bias, 0 without a map."""
    return int(tiles) * sum(m.block_type.nbytes for m in maps)


@constexpr_function
def as_stages_of_p(p, map):
    """Returns how many tiles of a bias the stages of P hold, whose elements have 4 bytes."""
    return p.shape[0] * p.shape[-2] * p.shape[-1] * 4 // map.block_type.nbytes


@jit
def exp2_at_most_one(x):
    """Returns min(2^x, 1); NaN stays. With a bias of large magnitude, scores and the log-sum-exp lose many bits, and
    their difference, which should be at most 0, may be large."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; min.NaN.f32 t, $1, 0f00000000; ex2.approx.ftz.f32 $0, t; }",
        "=r,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@jit
def load_bias(bias, tile, barrier, batch, head, row, key):
    """Loads tile number `tile` of a bias by TMA; its first score is that of a query and a key."""
    for i in gl.static_range(len(bias.maps)):
        of_batch = gl.where(bias.stride_b == 0, 0, batch)
        of_head = gl.where(bias.stride_h == 0, 0, head)
        tma_load(bias.maps[i], [of_batch, of_head, row, key], barrier, bias.tiles.index(tile))


@jit
def bias_of(bias, tile, work, head, row_first, key_first, KEYS_FIRST: gl.constexpr, WIDTH: gl.constexpr, rules):
    """Returns the bias of a tile of scores, [64 keys, WIDTH queries] if KEYS_FIRST, else [64 queries, WIDTH keys], or
    one line of it; 0 without a bias. A tile that was loaded must have arrived."""
    layout: gl.constexpr = accumulator_layout(WIDTH)
    if rules.BIAS == "":
        return gl.to_tensor(0.0)
    elif rules.BIAS == "cells":
        if KEYS_FIRST:
            return matrix(bias.tiles.index(tile)).permute((1, 0)).load(layout)
        else:
            return matrix(bias.tiles.index(tile)).load(layout)
    else:
        if KEYS_FIRST == (rules.BIAS == "keys"):
            along = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
        else:
            along = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
        # Rows past the last one read the last one: their scores are hidden.
        if rules.BIAS == "keys":
            offsets = gl.minimum(key_first + along, work.seqlen_k - 1).to(gl.int64)
        else:
            offsets = gl.minimum(row_first + along, work.seqlen_q - 1).to(gl.int64) * bias.stride_m
        line = bias.ptr + (work.batch.to(gl.int64) * bias.stride_b + head.to(gl.int64) * bias.stride_h)
        return gl.load(line + offsets)


@jit
def store_gradient(ds, bias, tile, work, row, key):
    """Starts storing dS, [64 queries, keys], through the tile of the bias, which must have been read."""
    for i in gl.static_range(len(bias.gradient_maps)):
        matrix(bias.tiles.index(tile)).store(ds.to(bias.gradient_maps[i].dtype))
        fence_async_shared()
        tma_store(bias.gradient_maps[i], [work.batch, work.head, row, key], bias.tiles.index(tile))
