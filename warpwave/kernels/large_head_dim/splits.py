"""The number of splits of the keys of `large_head_dim`'s launches, by the rounds in which blocks run."""

from __future__ import annotations

MOST_ROUNDS = 8  # more rounds only add starts
# The time of starting a block, which loads q and stores its result, and the time of storing, reading and merging a
# partial result, as numbers of keys that take equally long. They were fitted to blocks of 64 rows on a latent cache
# (576/512, an H200); docs/notes/large_head_dim.md has the figures, also of blocks that read by pointers.
KEYS_OF_START, KEYS_OF_PART = 256, 96


def splits_by_rounds(blocks: int, seqlen_k: int, block_n: int, places: int) -> int:
    """Returns the number of splits with the shortest estimated time; each split has at least two tiles of keys.

    Args:
        blocks: blocks if keys are not split.
        block_n: keys of a tile.
        places: blocks that run at once.
    """
    blocks, tiles = max(1, blocks), -(-seqlen_k // block_n)
    if tiles < 4:
        return 1

    def keys(splits: int) -> int:
        """Returns the estimated time, as a number of keys."""
        rounds = -(-blocks * splits // places)
        return rounds * (-(-tiles // splits) * block_n + KEYS_OF_START + KEYS_OF_PART * (splits > 1))

    # The most splits of each number of rounds; of those whose longest split is the same, the fewest.
    most = (min(places * rounds // blocks, tiles // 2) for rounds in range(1, MOST_ROUNDS + 1))
    return min({1, *(-(-tiles // -(-tiles // splits)) for splits in most if splits)}, key=lambda s: (keys(s), s))
