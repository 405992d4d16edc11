"""Turns of the consumer warpgroups at the tensor cores.

Products of 8 bits are so short that two warpgroups would multiply at the same time and then take exponentials at the
same time. Each therefore waits for its turn before it starts the products of a tile, and passes the turn on when it has
started them: one group multiplies while another takes exponentials. All groups count the same tiles, so a group also
takes its turn for a tile that it skips.

`turns` is a tuple of two barriers for each group, or () if groups do not take turns. One thread passes a turn on for
its group, while another warp may still wait for that turn. With a single barrier for each group, its phase could end
twice meanwhile, and that warp would wait forever. Two barriers alternate: one ends its next phase only after the group
has passed the next turn on, before which all of its warps have multiplied, or met at a barrier, and thus had theirs.
The barriers of each group are one allocation. If all were in one, the compiler would put a barrier of the group between
passing a turn on and the next wait.
"""

from warpwave.kernels.hopper.parts import arrive_alone, skip
from warpwave.runtime.gluon_or_stub import gl, jit, mbarrier


@jit
def turns_init(turns, GROUPS: gl.constexpr):
    """Initializes the barriers."""
    if len(turns) > 0:
        for g in gl.static_range(GROUPS):
            for i in gl.static_range(2):
                mbarrier.init(turns[g].index(i), count=1)


@jit
def take_turn(turns, GROUP: gl.constexpr, n):
    """Waits until the group before has started its products of tile n, the first group until the last group has
    started those of tile n - 1."""
    if len(turns) > 0:
        turn = n
        if GROUP == 0:
            turn = n - 1
        mbarrier.wait(turns[GROUP].index(turn & 1), (turn >> 1) & 1)


@jit
def pass_turn(turns, GROUP: gl.constexpr, n, GROUPS: gl.constexpr):
    """Passes the turn of tile n on to the next group."""
    if len(turns) > 0:
        arrive_alone(turns[(GROUP + 1) % GROUPS].index(n & 1))


@jit
def skip_in_turn(turns, GROUP: gl.constexpr, k_ring, v_ring, n, count, GROUPS: gl.constexpr):
    """Hands back, unread, the tiles that other groups of the block see and this one does not."""
    for _ in range(count):
        take_turn(turns, GROUP, n)
        pass_turn(turns, GROUP, n, GROUPS)
        n = skip(k_ring, v_ring, n, 1)
    return n
