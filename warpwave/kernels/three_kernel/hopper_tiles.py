"""The tile order of three_kernel's products on Hopper. Holds no kernel.

Items are numbered over heads, blocks of rows and columns of tiles, so that concurrent items share reads; a program
takes every num_programs-th item.

Bound: a few divisions per item, while products run.
"""

# No postponed annotations: Gluon checks an aggregate's fields against its annotations.

from typing import NamedTuple

from warpwave.runtime.gluon_or_stub import aggregate, gl, jit

BLOCK_M = gl.constexpr(128)  # queries of a tile, 64 for each of two warpgroups
BLOCK_N = gl.constexpr(256)  # keys of a tile of scores, and columns of v of a tile of out


class OfChunk(NamedTuple):
    """The work of a launch: heads counted over the batch from first_head on, rows from row_begin to row_end of each.

    Attributes:
        heads, blocks, columns: heads of the chunk, blocks of BLOCK_M rows per head, and columns of tiles per block: of
            keys in the first launch, of v in the second.
        together: blocks whose tiles are traversed together.
        diagonal: twice the number of key tiles that a block -1 would see; each further block sees half a tile more.
        key_tiles: number of tiles of all keys.
    """

    first_head: int
    row_begin: int
    row_end: int
    num_heads: int
    group_size: int
    heads: int
    blocks: int
    columns: int
    together: int
    diagonal: int
    key_tiles: int


@aggregate
class Chunk:
    """The work of a launch."""

    of_chunk: OfChunk


@jit
def key_tiles_of(chunk, block):
    """Returns the tiles of keys that some row of a block sees; one if none sees a key."""
    return gl.minimum(gl.maximum((chunk.diagonal + block) >> 1, 1), chunk.key_tiles)


@jit
def raster(chunk, item, HAS_HIGH: gl.constexpr):
    """Returns (head of the chunk, block of rows, column) of an item of all heads' blocks x columns.

    `together` blocks are traversed column by column, because blocks that share rows or columns share them in L2. If
    later blocks see more keys, they come first, for all heads, before any earlier blocks.
    """
    span = chunk.heads if HAS_HIGH else 1  # heads that are traversed together
    of_span = chunk.blocks * chunk.columns * span
    rest = item % of_span
    of_group = chunk.together * chunk.columns * span
    first = rest // of_group * chunk.together
    rest = rest % of_group
    together = gl.minimum(chunk.together, chunk.blocks - first)
    head = item // of_span * span + rest // (together * chunk.columns)
    rest = rest % (together * chunk.columns)
    block = first + rest % together
    if HAS_HIGH:
        block = chunk.blocks - 1 - block
    return head, block, rest // together


@jit
def below_diagonal(chunk, item, all_tiles):
    """Returns (head of the chunk, block of rows, tile of keys) of an item of all heads' visible tiles, row by row.

    Block b sees (diagonal + b) / 2 tiles, at least 1 and at most key_tiles. Where neither bound applies, there are
    (x - 1)^2 / 4 of them up to x, so a tile's block is a square root.
    """
    head = item // all_tiles
    rest = item % all_tiles
    single = gl.minimum(chunk.blocks, gl.maximum(2 - chunk.diagonal, 0))  # blocks with one tile, before those with more
    # Blocks before the first one that sees all tiles.
    whole = gl.minimum(chunk.blocks, gl.maximum(2 * chunk.key_tiles - chunk.diagonal, single))
    begin = chunk.diagonal + single - 1
    end = chunk.diagonal + whole - 1
    before_whole = single + (end * end >> 2) - (begin * begin >> 2)
    of_square = gl.maximum(rest - single, 0) + (begin * begin >> 2)
    odd = 4 * of_square + 3
    root = gl.sqrt(odd.to(gl.float32)).to(gl.int32)
    root = gl.where(root * root > odd, root - 1, root)
    root = gl.where((root + 1) * (root + 1) <= odd, root + 1, root)
    block = root + 1 - chunk.diagonal
    tile = of_square - (root * root >> 2)
    behind = rest - before_whole
    block = gl.where(behind >= 0, whole + behind // chunk.key_tiles, block)
    tile = gl.where(behind >= 0, behind % chunk.key_tiles, tile)
    return head, gl.where(rest < single, rest, block), gl.where(rest < single, 0, tile)


@jit
def place_scores(chunk, item, all_tiles, HAS_HIGH: gl.constexpr):
    """Returns (head of the chunk, block of rows, tile of keys) of an item; `all_tiles` tiles of a head are visible."""
    if HAS_HIGH:
        head, block, tile = below_diagonal(chunk, item, all_tiles)
    else:
        head, block, tile = raster(chunk, item, HAS_HIGH)
    return head, block, tile


@jit
def value_turns(chunk):
    """Returns the largest number of tiles of out of a program."""
    return gl.cdiv(chunk.heads * chunk.blocks * chunk.columns, gl.num_programs(0))


@jit
def place_values(chunk, turn, HAS_HIGH: gl.constexpr):
    """Returns (head of the chunk, block of rows, column, tiles of keys) of a program's turn: no tiles if none is left.

    Items are dealt back and forth: a program that got a long one gets a short one with it.
    """
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    item = turn * programs + gl.where(turn % 2 == 0, pid, programs - 1 - pid)
    is_there = item < chunk.heads * chunk.blocks * chunk.columns
    head, block, column = raster(chunk, gl.where(is_there, item, 0), HAS_HIGH)
    return head, block, column, gl.where(is_there, key_tiles_of(chunk, block), 0)
