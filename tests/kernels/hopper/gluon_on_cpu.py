"""Runs a warp-specialized Gluon kernel's own source on the CPU, in torch: a thread for each role, barriers that block.

Triton's interpreter knows no Gluon. This knows as much of it as the kernels of `warpwave.kernels.hopper` say, so that
their arithmetic, their masks and above all their protocol (which chunk lies where, who waits for whom) can be tested
without a GPU. A product is finished when it is asked for, so what it cannot show is a read that comes too early, or a
wait for wgmma that is missing.
"""

from __future__ import annotations

import inspect
import threading
import time
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from warpwave.kernels import dropout
from warpwave.kernels.hopper import dropout as hopper_dropout
from warpwave.problem import AttentionProblem
from warpwave.runtime import parameters
from warpwave.runtime.launch import Launch, Mapped

PATIENCE_S = 20.0  # a role that waits longer waits for ever


class Value(Tensor):
    """A register tensor."""

    type = types.SimpleNamespace(layout=None)  # type: ignore[assignment]

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:  # type: ignore[override]
        """Converted; with `bitcast`, the same bits."""
        if not bitcast:
            return super().to(dtype)
        return (
            self.as_subclass(Tensor).int().view(dtype).as_subclass(Value)
            if dtype.is_floating_point
            else (self.as_subclass(Tensor).contiguous().view(dtype).as_subclass(Value))
        )


class Failed(Exception):
    """Another role failed, so this one waits for nothing."""


class Barrier:
    """An mbarrier: a phase ends when all arrivals have come and all bytes that were expected."""

    failed = threading.Event()

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.pending = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        assert self.count == 0, "initialized twice"
        self.count = self.pending = count

    def arrive(self, count: int = 1, expected: int = 0, came: int = 0) -> None:
        with self.changed:
            assert self.count > 0, "never initialized"
            self.bytes += expected - came
            self.pending -= count
            assert self.pending >= 0, "more arrivals than a phase has"
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
            self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            # The phase of that parity has ended: the one under way has the other.
            for _ in range(int(PATIENCE_S / 0.2)):
                if self.changed.wait_for(lambda: self.phase & 1 != parity & 1, 0.2):
                    return
                if self.failed.is_set():
                    raise Failed
            raise AssertionError("deadlock")


class Memory:
    """Shared memory, or a view of it."""

    layout = None

    def __init__(self, values: Any, dtype: Any = None) -> None:
        self.values, self.dtype = values, dtype

    def _map(self, view: Callable[[Any], Any]) -> Memory:
        return Memory(view(self.values), self.dtype)

    @property
    def shape(self) -> list[int]:
        return list(self.values.shape)

    def index(self, i: Any) -> Memory:
        return self._map(lambda x: x[int(i)])

    def reshape(self, shape: list[int]) -> Memory:
        return self._map(lambda x: x.view(shape))

    def permute(self, order: Sequence[int]) -> Memory:
        return self._map(lambda x: x.permute(*order))

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        return self._map(lambda x: x.narrow(dim, int(start), int(length)))

    def reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> Memory:
        values = self.values.view(-1)
        if dtype != values.dtype:
            values = values.view(dtype)
        return Memory(values[: torch.Size(shape).numel()].view(list(shape)), dtype)

    def load(self, layout: Any = None) -> Tensor:
        return self.values.clone().as_subclass(Value)

    def store(self, value: Tensor) -> None:
        self.values.copy_(value)


class Map:
    """A tensor map: what lies outside the tensor is read as zeros, and not written."""

    def __init__(self, tensor: Tensor, block: list[int]) -> None:
        self.tensor, self.dtype, self.layout = tensor, tensor.dtype, None
        self.shape = [torch.tensor(n) for n in tensor.shape]
        self.rows_read: set[int] = set()  # the first of each block
        self.adding = threading.Lock()
        self.block_type = types.SimpleNamespace(shape=block, nbytes=torch.Size(block).numel() * tensor.element_size())

    def _check(self, place: Sequence[Any]) -> None:
        assert int(place[-1]) * self.tensor.element_size() % 16 == 0, "a copy begins at a multiple of 16 bytes"

    def read(self, place: Sequence[Any]) -> Tensor:
        self._check(place)
        self.rows_read.add(int(place[-2]))
        block = torch.zeros(self.block_type.shape, dtype=self.dtype)
        source, target = [], []
        for at, extent, size in zip(map(int, place), self.block_type.shape, self.tensor.shape, strict=True):
            begin, end = max(at, 0), min(at + extent, size)
            if begin >= end:
                return block
            source.append(slice(begin, end))
            target.append(slice(begin - at, end - at))
        block[tuple(target)] = self.tensor[tuple(source)]
        return block

    def write(self, place: Sequence[Any], block: Tensor, add: bool = False) -> None:
        self._check(place)
        target, source = [], []
        for at, extent, size in zip(map(int, place), self.block_type.shape, self.tensor.shape, strict=True):
            begin, end = max(at, 0), min(at + extent, size)
            if begin >= end:
                return
            target.append(slice(begin, end))
            source.append(slice(begin - at, end - at))
        if add:
            with self.adding:
                self.tensor[tuple(target)] += block[tuple(source)]
        else:
            self.tensor[tuple(target)] = block[tuple(source)]


class Pointer:
    """A pointer into a flat tensor, with offsets."""

    def __init__(self, memory: Tensor, offsets: Any = 0) -> None:
        self.memory, self.offsets = memory, offsets
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offsets + more)

    def __getitem__(self, axes: Any) -> Pointer:
        return Pointer(self.memory, self.offsets[axes])


class Language(types.SimpleNamespace):
    """What stands for `gl` in one block."""

    def __init__(self, program: int, programs: int) -> None:
        super().__init__()
        self.float32, self.int32, self.int64 = torch.float32, torch.int32, torch.int64
        self.float16, self.bfloat16 = torch.float16, torch.bfloat16
        self.int8, self.int16, self.float8e4nv = torch.int8, torch.int16, torch.float8_e4m3fn
        self.program_id, self.num_programs = lambda axis: program, lambda axis: programs
        self.constexpr, self.tuple = lambda x: x, tuple
        self.static_range = range
        self.to_tensor = torch.as_tensor
        self.NVMMASharedLayout = self.SwizzledSharedLayout = lambda *a, **k: None
        self.SliceLayout = self.BlockedLayout = self.DotOperandLayout = lambda *a, **k: None
        self.NVMMADistributedLayout = lambda *a, **k: None
        self.full = lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype).as_subclass(Value)
        self.zeros = lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype).as_subclass(Value)
        self.zeros_like = torch.zeros_like
        self.arange = lambda begin, end, layout=None: torch.arange(begin, end).as_subclass(Value)
        self.convert_layout = lambda x, layout, assert_trivial=False: x
        self.where = lambda c, a, b: torch.where(*torch.broadcast_tensors(*map(torch.as_tensor, (c, a, b))))
        self.maximum = lambda a, b: maximum(torch.as_tensor(a), torch.as_tensor(b))
        self.minimum = lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b))
        self.cdiv = lambda a, b: -(-a // b)
        self.abs, self.log2, self.floor, self.sqrt = torch.abs, torch.log2, torch.floor, torch.sqrt
        self.fma = fused_multiply_add
        self.max = lambda x, axis: x.amax(axis)
        self.sum = lambda x, axis: x.sum(axis)
        self.reshape = lambda x, shape: x.reshape(shape)
        self.broadcast = torch.broadcast_tensors
        self.permute = lambda x, order: x.permute(*order)
        self.split = lambda x: x.unbind(-1)
        self.join = lambda a, b: torch.stack((a, b), -1)

    def allocate_shared_memory(self, dtype: Any, shape: Sequence[int], layout: Any) -> Any:
        """Tiles that start as NaN, or as 99; or barriers that are not initialized."""
        if layout == "barriers":
            made = Barriers([Barrier() for _ in range(shape[0])])
            return made if len(shape) > 1 else made.index(0)
        return Memory(torch.full(list(shape), torch.nan if dtype.is_floating_point else 99, dtype=dtype), dtype)

    def warp_specialize(self, roles: Sequence[Any], warps: Sequence[int], registers: Sequence[int]) -> None:
        """Runs the roles that are present, each in a thread of its own."""
        run_roles([partial(role[0], *role[1]) for role in roles if role])

    def load(self, pointer: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
        offsets = torch.as_tensor(pointer.offsets)
        mask = torch.broadcast_to(torch.as_tensor(True if mask is None else mask), offsets.shape)
        if not pointer.memory.numel():
            return torch.full(offsets.shape, other, dtype=pointer.memory.dtype)
        return torch.where(mask, pointer.memory[torch.where(mask, offsets, 0)], other)

    def store(self, pointer: Pointer, value: Tensor, mask: Tensor) -> None:
        mask = torch.broadcast_to(mask, value.shape)
        pointer.memory[pointer.offsets[mask]] = value[mask]

    def atomic_add(self, pointer: Pointer, value: int, sem: str) -> int:
        before = int(pointer.memory[pointer.offsets])
        pointer.memory[pointer.offsets] += value
        return before

    def atomic_xchg(self, pointer: Pointer, value: int, sem: str) -> None:
        pointer.memory[pointer.offsets] = value


class Block:
    """What one block has of its own: its number, shared memory and barriers."""

    def __init__(self, program: int, programs: int) -> None:
        self.language = Language(program, programs)

    def tile(self, shape: list[int], dtype: torch.dtype) -> Memory:
        """Shared memory; starts as NaN, or as 99."""
        return Memory(torch.full(shape, torch.nan if dtype.is_floating_point else 99, dtype=dtype), dtype)

    def barriers(self, count: int, arrivals: int) -> Barriers:
        """`count` barriers of `arrivals` each."""
        made = Barriers([Barrier() for _ in range(count)])
        for barrier in made.barriers:
            barrier.init(arrivals)
        return made


class Barriers:
    """What `allocate_shared_memory` gives for barriers."""

    def __init__(self, barriers: list[Barrier]) -> None:
        self.barriers = barriers
        self.shape = [len(barriers), 1]

    def index(self, i: Any) -> tuple[Barriers, int]:
        return self, int(i)


def settled(
    m: Tensor, lead: Tensor, top: Tensor, factors: tuple[Tensor, ...], lag: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`softmax.settle`, by whole rows: what a thread keeps of its lead where no score rises is at most the row's."""
    scale, *zeros = factors
    zero = zeros[0] if zeros else torch.zeros_like(scale)
    top = top.amax(1, keepdim=True).expand_as(top)
    leads = fused_multiply_add(top, scale, -(m + zero))
    rises = leads > lag
    m_new = torch.where(rises, top * scale - zero, (m + zero) - zero)
    alpha = torch.where(m_new != m, torch.exp2(m - m_new), 1.0)
    left = fused_multiply_add(top, scale, -(m_new + zero)) if zeros else torch.zeros_like(m)
    return m_new, alpha, torch.where(rises, left, maximum(lead, leads))


def tanh_of_tile(x: Tensor) -> Tensor:
    """`parts.tanh_of_tile` in float32: its polynomial up to 1/2, its exponentials above."""
    z = x * x
    near = (((-0.04440223 * z + 0.13190297) * z - 0.33326318) * z + 0.99999946) * x
    return torch.where(x.abs() > 0.5, 1 - 2 / (1 + torch.exp2(x * 2.8853901)), near)


def functions(modules: dict[str, Any], block: Block, own: dict[str, Any] | None = None) -> dict[str, Any]:
    """The device functions of modules as plain functions for one block, by module and name; `own` stands in for more of
    their names."""

    def init(barrier: Any, count: int) -> None:
        barrier[0].barriers[barrier[1]].init(count)

    def arrive(barrier: Any, *, count: int = 1, pred: bool = True) -> None:
        barrier[0].barriers[barrier[1]].arrive(count)

    def expect(barrier: Any, nbytes: int, pred: bool = True) -> None:
        barrier[0].barriers[barrier[1]].arrive(1, expected=nbytes)

    def wait(barrier: Any, parity: Any) -> None:
        barrier[0].barriers[barrier[1]].wait(int(parity))

    def tma_load(source: Map, place: Any, barrier: Any, target: Memory) -> None:
        target.values.copy_(source.read(place))
        barrier[0].barriers[barrier[1]].arrive(0, came=source.block_type.nbytes)

    def wait_full(ring: Any, n: Any) -> None:
        # A parity tells a phase from the next, not from the one after: who waits for the k-th use of a stage while the
        # one before has not come passes at once. So stages that several readers share are a race.
        barriers = ring.full.barriers
        barrier, use = barriers[int(n) % len(barriers)], int(n) // len(barriers)
        assert barrier.phase >= use, "a reader waits for a chunk whose stage still waits for the one before"
        barrier.wait(use)

    def wait_for_turn(count: Pointer, rank: Any) -> None:
        # Programs run one after another, so only another role of this program can still pass the turn. This wait gives
        # up before those that wait for this role, so that its failure is the one that is raised.
        for _ in range(int(PATIENCE_S / 2 / 0.01)):
            if count.memory[count.offsets] == rank:
                return
            if Barrier.failed.is_set():
                raise Failed
            time.sleep(0.01)
        raise AssertionError("waits for a block that was not taken before")

    def product(a: Any, b: Memory, acc: Tensor, use_acc: Any = True, is_async: bool = False) -> Tensor:
        left = a.values if isinstance(a, Memory) else a
        # Sums of int8 products are exact in float32.
        made = (left.float() @ b.values.float()).to(acc.dtype)
        return (made + acc if use_acc else made).as_subclass(Value)

    def wait_product(outstanding: int, deps: Sequence[Tensor]) -> Any:
        return deps[0] if len(deps) == 1 else tuple(deps)

    stand_ins = {
        "gl": block.language,
        "mbarrier": types.SimpleNamespace(
            init=init, arrive=arrive, expect=expect, wait=wait, MBarrierLayout=lambda: "barriers"
        ),
        "reinterpret": Memory.reinterpret,
        "with_fields": lambda aggregate, **changes: types.SimpleNamespace(**(vars(aggregate) | changes)),
        "tma_load": tma_load,
        "wait_full": wait_full,
        "tma_add": lambda target, place, source: target.write(place, source.values, add=True),
        "tma_store": lambda target, place, source: target.write(place, source.values),
        "tma": types.SimpleNamespace(store_wait=lambda pending: None),
        "wait_for_turn": wait_for_turn,
        "pass_turn": lambda count, rank: count.memory.__setitem__(count.offsets, rank + 1),
        "warpgroup_mma": product,
        "warpgroup_mma_wait": wait_product,
        "fence_async_shared": lambda: None,
        "block_barrier": lambda: None,
        "warp_specialize": block.language.warp_specialize,
        "exp2": torch.exp2,
        "lg2": torch.log2,
        "exp2_at_most_one": lambda x: torch.exp2(torch.minimum(x, torch.zeros(()))),
        "tanh": torch.tanh,
        "tanh_of_tile": tanh_of_tile,
        "int8_in_float16": lambda numbers: numbers.to(torch.float16),
        "int8_in_bfloat16": lambda numbers: numbers.to(torch.bfloat16),
        "float8_in_bfloat16": lambda numbers: numbers.to(torch.bfloat16),
        "rescale": lambda acc, alpha: acc * alpha,
        "settle": settled,
        "add_scaled": lambda total, factor, x: fused_multiply_add(factor, x, total),
        "add_up": lambda acc, alpha, large, small: acc * alpha + (large + number(small)),
        "number": number,
        "hide": hidden,
        "low_bits": lambda count: ((1 << count.long()) - 1).int(),
        "scaled": lambda x, scale: x * scale,
        "wait_for_launch_before": lambda threads: None,
        "half_part": lambda x: (x.to(torch.float16), x - x.to(torch.float16).float()),
        "bfloat16_part": lambda x: (x.to(torch.bfloat16), x - x.to(torch.bfloat16).float()),
        "like": lambda per_row, x: per_row[:, None],
        "accumulator_layout": lambda width: None,
        "eight_bit_accumulator_layout": lambda width: None,
        "row_vectors": lambda width, warps=4: None,
        "load_dropout_key": lambda seed: dropout._key_of(seed.memory),
        "dropout_of_head": dropout_of_head,
        "dropout_numbers": dropout_numbers,
        "following": lambda i: i + 1,
        "sixteen_rows": lambda tile, box, i: (
            tile.reshape(tile.shape[-2:]).slice(16 * i, 16).slice(64 * box, min(64, tile.shape[-1]), dim=1)
        ),
        "zero_below": lambda p, numbers, threshold: torch.where(numbers < threshold, 0.0, p),
        "negate_below": lambda p, numbers, threshold: torch.where(numbers < threshold, -p, p),
    }
    stand_ins |= own or {}
    modules = modules | {hopper_dropout.__name__: hopper_dropout}  # whose names many import
    spaces: dict[str, dict[str, Any]] = {}

    def space(module: types.ModuleType) -> dict[str, Any]:
        if module.__name__ not in spaces:
            names: dict[str, Any] = {"__builtins__": __builtins__}
            spaces[module.__name__] = names
            for name, value in vars(module).items():
                names[name] = stand_ins.get(name) or plain(value)
        return spaces[module.__name__]

    def plain(value: Any) -> Any:
        if isinstance(value, types.ModuleType) and value.__name__ in modules:
            return types.SimpleNamespace(**{k: v for k, v in space(value).items() if k != "__builtins__"})
        if type(value).__name__ == "constexpr":
            return value.value
        if inspect.isclass(value) and value.__module__ in modules and "hash_attrs" in vars(value):
            constructor = vars(value)["hash_attrs"][0]  # an aggregate's, as it was written
            code = getattr(constructor, "fn", constructor)
            make = types.FunctionType(code.__code__, {"gl": block.language}, code.__name__, code.__defaults__)

            def aggregate(*a: Any) -> types.SimpleNamespace:
                groups = vars(value).get("groups", [False] * len(a))
                fields: list[Any] = []
                for given, is_group in zip(a, groups, strict=False):
                    fields += given if is_group else [given]
                made = types.SimpleNamespace()
                make(made, *fields)
                return made

            return aggregate
        code = getattr(value, "fn", None) or getattr(value, "__wrapped__", None)
        if code is None and inspect.isfunction(value) and value.__module__ in modules:
            code = value
        if isinstance(code, types.FunctionType) and code.__module__ in modules:
            home = modules[code.__module__]
            optional = code.__defaults__ and tuple(map(plain, code.__defaults__))
            made = types.FunctionType(code.__code__, {}, code.__name__, optional, code.__closure__)

            def call(*a: Any, **k: Any) -> Any:
                made_there = types.FunctionType(made.__code__, space(home), made.__name__, made.__defaults__)
                return made_there(*a, **k)

            return call
        return value

    return {name: types.SimpleNamespace(**space(module)) for name, module in modules.items()}


def hidden(x: Tensor, words: Tensor) -> Tensor:
    """[64, keys / 8, 4, 2] with minus infinity where a bit of its word is 0 (mask_bits.py)."""
    bit = 2 * torch.arange(x.shape[1])[:, None, None] + torch.arange(2)
    return torch.where((words >> bit) & 1 != 0, x, -torch.inf)


def dropout_of_head(keys: Any, batch: Any, head: Any) -> tuple[Any, ...]:
    """The key of a head, by the host's Philox."""
    counter = tuple(torch.as_tensor(x).as_subclass(Tensor).long() for x in (head, batch))
    return keys[1], *dropout.philox(keys[0], counter)  # type: ignore[arg-type]


def dropout_numbers(of_head: Any, row_begin: Any, rows: Any, key_begin: Any, keys: Any) -> Tensor:
    """The random numbers of a tile, by the host's Philox and by position."""
    assert row_begin % 16 == key_begin % 16 == 0, "threads of a GPU would take the numbers of other pairs"
    i, j = (torch.as_tensor(x).as_subclass(Tensor).long() for x in (row_begin + rows, key_begin + keys))
    i, j = torch.broadcast_tensors(i, j)
    first, second = dropout.philox(of_head[0], (of_head[1] ^ j & ~8, of_head[2] ^ i & ~8))
    word = torch.where(i >> 3 & 1 != 0, second, first)
    return torch.where(j >> 3 & 1 != 0, word << 16, word).int().as_subclass(Value)


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c, rounded once (but for what float64 leaves out)."""
    return (a.double() * b.double() + c.double()).float().as_subclass(Value)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """A GPU's: of NaN and a number, the number. `torch.fmax` of a signaling NaN, as in unwritten memory, is NaN."""
    return torch.where(a.isnan(), b, torch.where(b.isnan(), a, torch.maximum(a, b)))


def number(x: Tensor) -> Tensor:
    """The lowest number in place of NaN, by a GPU's maximum."""
    return maximum(x, torch.tensor(torch.finfo(torch.float32).min))


class Source:
    """A kernel's source and name. Triton hashes a kernel by all functions that it calls, and cannot if some are
    interpreted."""

    def __init__(self, kernel: Any) -> None:
        self.fn, self.__name__ = kernel.fn, kernel.fn.__name__


def unwritten(problem: AttentionProblem, q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns out and lse of a call, filled with NaN: what is not written shows."""
    out = torch.full((*q.shape[:-1], problem.head_dim_v), torch.nan, dtype=getattr(torch, problem.dtype_of_out))
    rows: tuple[int, ...] = (problem.num_heads_q, problem.total_q)
    if not problem.packed:
        rows = (problem.batch, problem.num_heads_q, problem.seqlen_q)
    return out, torch.full(rows, torch.nan)


def run_launch(
    spec: Launch, modules: Sequence[types.ModuleType], programs: int, own: dict[str, Any]
) -> list[Map | None]:
    """Runs a launch of a Gluon kernel by the kernel's own source, one of so many programs after another. Returns the
    launch's tensor maps, and None in the places of its other tensors.

    Args:
        modules: those whose device functions it calls, its own among them.
        own: what stands in for more of their names, made anew for each program by a call.
    """
    given: list[Any] = []
    counter = torch.zeros(1, dtype=torch.int64)
    for tensor in spec.tensors:
        if isinstance(tensor, Mapped):
            plan = tensor.plan
            base = tensor.base
            if not base.numel():  # a map has one row at least
                base = base.new_zeros(1 + sum((n - 1) * m for n, m in zip(plan.shape, plan.strides, strict=True)))
            given.append(Map(base.as_strided(plan.shape, plan.strides), list(plan.block)))
        else:
            if tensor is not None and tensor.device.type == "meta":  # the tile counter
                tensor = counter
            given.append(None if tensor is None else Pointer(memory_from(tensor)))
    maps = [x if isinstance(x, Map) else None for x in given]
    scalars = [None if x is None else torch.tensor(x) for x in spec.scalars]
    kernel = Source(spec.kernel)
    values = parameters.in_order(kernel, given, scalars, spec.constants)
    values = [x.value if type(x).__name__ == "constexpr" else x for x in values]
    arguments = parameters.grouped(kernel, values)
    by_name = {m.__name__: m for m in modules}
    for program in range(programs):
        block = Block(program, programs)
        names = functions(by_name, block, {name: make() for name, make in own.items()})
        home = names[spec.kernel.fn.__module__]
        getattr(home, spec.kernel.fn.__name__)(*arguments)
    assert counter.item() == 0, "the tile counter was not put back"
    return maps


def memory_from(tensor: Tensor) -> Tensor:
    """The memory of a tensor from its first element on, in one dimension; strides are the kernel's arguments."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided((size,), (1,))


def run_roles(roles: Sequence[Callable[[], None]]) -> None:
    """Each role in a thread of its own, to the end of all of them; the first failure is raised."""
    failures: list[BaseException] = []

    def guarded(role: Callable[[], None]) -> None:
        try:
            role()
        except Failed:
            pass
        except BaseException as failure:
            failures.append(failure)
            Barrier.failed.set()

    Barrier.failed.clear()
    threads = [threading.Thread(target=guarded, args=(role,), daemon=True) for role in roles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE_S)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a role never ended"
