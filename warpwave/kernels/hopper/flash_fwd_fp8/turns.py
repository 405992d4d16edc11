"""Turns of the consumer warpgroups at the tensor cores.

The products of a tile take about as long as its exponentials. Warpgroups that start their products together share the
tensor cores, finish together, and then share the unit that computes exponentials: each unit is idle while the other
works. A warpgroup therefore waits for its turn before it starts the products of a tile. A block with one consumer
warpgroup has no turns.

A turn ends when the maximum of the tile's scores is known, before the wait for the last products. The next warpgroup
wakes up and starts its products while those of this one finish, so the tensor cores do not idle in between (inferred).
On an H100 at 1 x 16384 the kernel is 1.03 to 1.14 times as fast as without turns; turns that end when the products have
finished reach 0.96 to 1.00 of that rate (benchmarks/records/2026-11-25-h100-float8-turns.json). Turns that end behind
the start of the products gain nothing: the tensor cores alternate between the warpgroups (inferred;
docs/notes/hopper_fp8.md).

A turn is a named barrier of two warpgroups, one for each group: the group before arrives, the group itself waits. The
last group gives the first turn of a launch to group 0, which takes the turn that is left at the end. All groups count
the same tiles, so a group also takes its turn for a tile that it skips.
"""

from warpwave.kernels.hopper.parts import FREE_BARRIERS, skip
from warpwave.runtime.gluon_or_stub import constexpr_function, gl, jit


@constexpr_function
def _turn_asm(op, group):
    return f"bar.{op} {FREE_BARRIERS.value + int(group)}, 256; mov.b32 $0, $1;"


@jit
def turn_barrier(OP: gl.constexpr, GROUP: gl.constexpr):
    """Executes `bar.sync` or `bar.arrive` of a group's turn, once per thread. The compiler does not account for it when
    it places its own barriers."""
    thread = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(_turn_asm(OP, GROUP), "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)


@jit
def start_turns(GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Gives the first turn to group 0."""
    if GROUPS > 1 and GROUP == GROUPS - 1:
        turn_barrier("arrive", 0)


@jit
def take_turn(GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Waits until the group before has ended its turn."""
    if GROUPS > 1:
        turn_barrier("sync", GROUP)


@jit
def end_turn(GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Gives the turn to the next group."""
    if GROUPS > 1:
        turn_barrier("arrive", (GROUP + 1) % GROUPS)


@jit
def last_turn(GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Takes the turn that is left: a block must not end with arrivals pending in a named barrier."""
    if GROUPS > 1 and GROUP == 0:
        turn_barrier("sync", 0)


@jit
def skip_in_turn(GROUP: gl.constexpr, k_ring, v_ring, n, count, GROUPS: gl.constexpr):
    """Hands back, unread, the tiles that other groups of the block see and this one does not."""
    for _ in range(count):
        take_turn(GROUP, GROUPS)
        end_turn(GROUP, GROUPS)
        n = skip(k_ring, v_ring, n, 1)
    return n
