"""`Cost`: what a kernel moves and computes for one problem, per resource, as its own file states it."""

from __future__ import annotations

from dataclasses import dataclass

from warpwave.problem import AttentionProblem


@dataclass(frozen=True)
class Cost:
    """Work of one launch, padding and re-reads included; `AttentionProblem` has the compulsory part.

    Args:
        blocks: thread blocks (programs) launched.
        flops: multiplications and additions of the two products over every tile computed.
        exponentials: over every tile computed.
        read_bytes: bytes requested from L2 or memory, each tile counted each time it is read.
        write_bytes: bytes written.
        smem_bytes: shared memory one block needs, as estimated before compiling; 0 where the kernel uses none.
        workspace_bytes: device memory allocated beside the outputs.

    What follows is for `warpwave.model`; 0 where a kernel does not say.
        items: tiles of the output that blocks work on, where a block draws several; 0: one a block.
        steps: tiles of keys walked, over all blocks.
        longest: steps of the item that walks most; 0: all items walk as many.
        threads: of a block.
        registers: of a thread, as estimated before compiling.
        chains: independent instruction streams of a block, that hide each other's latency.
        blocks_per_sm: as the kernel launches them; 0: as many as fit.
        scratch_bytes: of `read_bytes` and `write_bytes`, those of the workspace.
        launches: kernels launched, one after another.
        parts: the same of each launch, where they differ.
    """

    blocks: int
    flops: int
    exponentials: int
    read_bytes: int
    write_bytes: int
    smem_bytes: int = 0
    workspace_bytes: int = 0
    items: int = 0
    steps: int = 0
    longest: int = 0
    threads: int = 0
    registers: int = 0
    chains: int = 1
    blocks_per_sm: int = 0
    scratch_bytes: int = 0
    launches: int = 1
    parts: tuple[Cost, ...] = ()


def visited_tiles(problem: AttentionProblem, block_m: int, block_n: int) -> int:
    """(query tile, key tile) pairs in which position hides not everything, over all heads and sequences: what kernels
    visit, counted on the host."""
    total = 0
    counted: dict[tuple[int, int], int] = {}
    for seqlen_q, seqlen_k in problem.items():
        if (seqlen_q, seqlen_k) not in counted:
            low, high = problem.band(seqlen_q, seqlen_k)
            count = 0
            for row_begin in range(0, seqlen_q, block_m):
                row_last = min(row_begin + block_m, seqlen_q) - 1
                begin = 0 if low is None else max(0, row_begin + low) // block_n
                end = seqlen_k if high is None else min(seqlen_k, row_last + high + 1)
                count += max(0, -(-end // block_n) - begin)
            counted[seqlen_q, seqlen_k] = 0 if low is not None and high is not None and low > high else count
        total += counted[seqlen_q, seqlen_k]
    return total * problem.num_heads_q
