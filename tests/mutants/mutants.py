"""The seeded faults: each a change of one place in the package that the named tests must notice, and by what words.

A fault is caught when a test fails by assertion and the failure says what it should; a crash is no catch.
"""

from __future__ import annotations

from tests.mutants.cache import CACHE, PAGED
from tests.mutants.forward import NAMED, OTHERS
from tests.mutants.found import FOUND
from tests.mutants.gradients import BACKWARD, OF_DROPOUT
from tests.mutants.hopper import HOPPER, HOPPER_FLOAT32, HOPPER_MASKS, HOPPER_PAGES, HOPPER_QUANTIZED, HOPPER_SPLITS
from tests.mutants.hopper_gradients import HOPPER_BACKWARD, OF_HOPPER_DROPOUT
from tests.mutants.integrations import INTEGRATIONS
from tests.mutants.large_heads import LARGE_HEADS
from tests.mutants.quantized import QUANTIZED

__all__ = ["MUTANTS", "NAMED"]

MUTANTS = [
    *(
        NAMED
        + OTHERS
        + PAGED
        + HOPPER_FLOAT32
        + HOPPER_MASKS
        + HOPPER_QUANTIZED
        + HOPPER_PAGES
        + HOPPER_SPLITS
        + HOPPER
    ),
    *(LARGE_HEADS + FOUND + CACHE),
    *(BACKWARD + OF_DROPOUT + OF_HOPPER_DROPOUT + HOPPER_BACKWARD + INTEGRATIONS + QUANTIZED),
]
