"""What a seeded fault is, and files that many faults are in."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One fault.

    Attributes:
        name: what is wrong, in words.
        file: which file of the package.
        old, new: the text, which occurs there exactly once, and what replaces it.
        test: the test function that must fail, "test_probes.py::test_count".
        select: which of its parameters are enough, as pytest's -k expression.
        shows: what the failure must say.
        needs_gpu: whether only a GPU shows it.
        needs_package: a package without which the tests are skipped.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    select: str = ""
    shows: str = ""
    needs_gpu: bool = False
    needs_package: str = ""


FLASH, PRIMITIVES, EAGER = "kernels/flash_fwd/kernel.py", "kernels/primitives.py", "kernels/eager.py"
SPLIT, PARTIALS = "kernels/split_kv/device.py", "kernels/partials.py"
NAIVE, TILED, PASSES = "kernels/ladder/naive.py", "kernels/ladder/tiled.py", "kernels/ladder/three_passes.py"
LARGE, THREE = "kernels/large_head_dim/device.py", "kernels/three_kernel/device.py"
HIDE = 'scores = tl.where(visible, scores * scale_left, float("-inf"))'
