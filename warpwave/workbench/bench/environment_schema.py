"""The schema of an environment record: the card, the processor, the code and the versions of a measurement, and the
card's readings around it. Figures that are only shown may have any form, and older versions have fewer of them.
"""

from __future__ import annotations

from warpwave.workbench.schema import Anything, Flag, Integer, ListOf, MapOf, Number, OrNone, Table, Text

WORD = Text(500)
COUNT, BYTES = Integer(1, 1 << 40), Integer(0, 1 << 60)

CARD = Table(
    optional={
        "name": WORD,
        "arch": WORD,
        "capability": WORD,
        "driver": OrNone(WORD),
        "sm_count": Integer(0, 100_000),
        "memory_bytes": OrNone(BYTES),
        "l2_bytes": OrNone(BYTES),
        "power_limit_w": OrNone(Number(0, 1e6)),
    },
    others=Anything(),
)
PROCESSOR = Table(
    optional={"model": OrNone(WORD), "cores": OrNone(COUNT), "torch_threads": OrNone(COUNT)}, others=Anything()
)
CODE = Table(
    optional={"commit": OrNone(WORD), "dirty": OrNone(Flag()), "source_sha256": OrNone(WORD)}, others=Anything()
)
# The result of `environment.describe`.
ENVIRONMENT = Table(
    optional={
        "date": WORD,
        "device": WORD,
        "gpu": OrNone(CARD),
        "cpu": OrNone(PROCESSOR),
        "code": OrNone(CODE),
        "peers": OrNone(MapOf(WORD)),
    },
    others=Anything(),
)
# The result of `environment.snapshot`.
READING = Table(
    optional={
        "sm_mhz": OrNone(Number(1, 1e6)),
        "memory_mhz": OrNone(Number(1, 1e6)),
        "power_w": OrNone(Number(0, 1e6)),
        "temperature_c": OrNone(Number(-300, 1e4)),
        "throttle": OrNone(ListOf(WORD, 0, 100)),
    }
)
