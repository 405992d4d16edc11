"""`Cost`: what a kernel moves and computes for one problem, per resource, as its own file states it."""

from __future__ import annotations

from dataclasses import dataclass


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
    """

    blocks: int
    flops: int
    exponentials: int
    read_bytes: int
    write_bytes: int
    smem_bytes: int = 0
    workspace_bytes: int = 0
