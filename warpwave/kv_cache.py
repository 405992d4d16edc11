"""`PagedKVCache`: keys and values of many sequences in pages of one pool, and the tables that say which page is whose.

Kwon et al., "Efficient memory management for large language model serving with PagedAttention" (2023). The host keeps
the books: which pages are free, whose they are and how long each sequence is, so that nothing here waits for the
device. The device has copies of what kernels read, the page table and the lengths, in tensors that never move: a CUDA
graph captured once sees every later change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from warpwave.checks import DTYPE_NAMES, bind_axes, check_offsets
from warpwave.errors import InvalidInput, InvalidType, OutOfPages
from warpwave.kernels import append_kv

EVICTED = -1  # stands in a page table for a page that was given back
MAX_INDICES = 256  # row tensors kept for calls that name the same rows again


class Rotary(NamedTuple):
    """Rotary position embedding: how far each pair of elements of a head turns at each position.

    Attributes:
        cos, sin: float32 (positions, rotary_dim / 2), rotary_dim at most head_dim: elements beyond it do not turn.
        interleaved: whether pairs are neighbours (2i, 2i + 1), or (i, i + rotary_dim / 2) as in GPT-NeoX and Llama.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False

    @staticmethod
    def of(
        rotary_dim: int,
        positions: int,
        base: float = 10_000.0,
        interleaved: bool = False,
        device: torch.device | str = "cpu",
    ) -> Rotary:
        """The usual angles, `position * base^(-2i / rotary_dim)` (Su et al., "RoFormer", 2021)."""
        frequencies = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
        return Rotary(angles.cos().float().to(device), angles.sin().float().to(device), interleaved)


@dataclass(frozen=True, eq=False)
class CacheLayer:
    """The tensors of one layer's cache, as kernels read them: your own, or a layer of a `PagedKVCache`.

    Args:
        k: (num_pages, page_size, num_heads_kv, head_dim).
        v: (num_pages, page_size, num_heads_kv, head_dim_v).
        page_table: int32 (rows, pages_of_a_row): the page that holds tokens `i * page_size` to `(i + 1) * page_size`
            of a row's sequence is `page_table[row, i]`.
        seqused_k: int32 (rows,): how many tokens of each row are there.
    """

    k: torch.Tensor
    v: torch.Tensor
    page_table: torch.Tensor
    seqused_k: torch.Tensor


@dataclass
class _Sequence:
    """One row's books.

    Attributes:
        length: tokens.
        pages: page ids in order, `EVICTED` for those given back.
    """

    length: int = 0
    pages: list[int] = field(default_factory=list)


class PagedKVCache:
    """Keys and values of up to `max_batch` sequences, in pages that are taken as the sequences grow.

    A sequence is a row of the page table, from `add` or `fork` to `free`. `extend` takes pages and advances lengths;
    `append` does that and writes the new tokens of a one-layer cache. Sequences of equal beginning share pages, and a
    shared page is copied when one of its sequences writes into it.

    Args:
        num_pages: pages of the pool, for all sequences together.
        page_size: tokens of a page, a power of two: 1, 16, 32, 64, 128, 256. Small pages waste less at the ends of
            sequences, large ones take fewer table look-ups.
        num_heads_kv, head_dim: of K; V has the same heads.
        head_dim_v: of V; head_dim if None.
        num_layers: layers that share the tables; each has pools of its own.
        max_batch: rows of the page table.
        max_seqlen: tokens of the longest sequence; the table has `ceil(max_seqlen / page_size)` columns.
        dtype: float16, bfloat16 or float32.
        device: where the pools and tables live.

    Attributes:
        layers: a `CacheLayer` each, whose tensors never move.
        page_table: int32 (max_batch, pages of a row), on the device.
        seqused_k: int32 (max_batch,), on the device; 0 for rows without a sequence.

    Raises:
        InvalidInput, InvalidType: a size or dtype that no cache can have.

    Example:
        >>> import torch, warpwave
        >>> cache = warpwave.PagedKVCache(num_pages=8, page_size=16, num_heads_kv=2, head_dim=64, max_batch=4,
        ...     max_seqlen=128, dtype=torch.float32, device="cpu")
        >>> row = cache.add()
        >>> k, v = torch.randn(1, 20, 2, 64), torch.randn(1, 20, 2, 64)
        >>> out = warpwave.attention_with_kv_cache(torch.randn(1, 20, 4, 64), cache, rows=[row], k_new=k, v_new=v,
        ...     causal=True)
        >>> out.shape, cache.lengths[row], cache.num_free_pages
        (torch.Size([1, 20, 4, 64]), 20, 6)
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_heads_kv: int,
        head_dim: int,
        head_dim_v: int | None = None,
        num_layers: int = 1,
        max_batch: int,
        max_seqlen: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
    ) -> None:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        sizes = {
            "num_pages": num_pages, "page_size": page_size, "num_heads_kv": num_heads_kv, "head_dim": head_dim,
            "head_dim_v": head_dim_v, "num_layers": num_layers, "max_batch": max_batch, "max_seqlen": max_seqlen,
        }  # fmt: skip
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool):
                raise InvalidType(f"{name} is {size!r}; it must be an integer")
            if size < 1:
                raise InvalidInput(f"{name} is {size}; it must be at least 1")
        if page_size & (page_size - 1):
            raise InvalidInput(f"page_size is {page_size}; it must be a power of two: 1, 16, 32, 64, 128 or 256")
        if dtype not in DTYPE_NAMES:
            raise InvalidType(f"dtype is {dtype}; it must be one of {', '.join(map(str, DTYPE_NAMES))}")
        self.num_pages, self.page_size, self.max_batch, self.max_seqlen = num_pages, page_size, max_batch, max_seqlen
        self.page_table = torch.zeros(max_batch, -(-max_seqlen // page_size), dtype=torch.int32, device=device)
        self.seqused_k = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self.device = self.page_table.device
        self.layers = tuple(
            CacheLayer(
                torch.empty(num_pages, page_size, num_heads_kv, head_dim, dtype=dtype, device=device),
                torch.empty(num_pages, page_size, num_heads_kv, head_dim_v, dtype=dtype, device=device),
                self.page_table,
                self.seqused_k,
            )
            for _ in range(num_layers)
        )
        self._sequences: list[_Sequence | None] = [None] * max_batch
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is taken first
        self._references = [0] * num_pages
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}

    # What there is ---------------------------------------------------------------------------------------------------

    @property
    def layer(self) -> CacheLayer:
        """The layer of a cache that has one."""
        if len(self.layers) != 1:
            raise InvalidInput(f"the cache has {len(self.layers)} layers; pass one of them, cache.layers[i]")
        return self.layers[0]

    @property
    def k(self) -> torch.Tensor:
        """The pool of keys of a one-layer cache, (num_pages, page_size, num_heads_kv, head_dim)."""
        return self.layer.k

    @property
    def v(self) -> torch.Tensor:
        """The pool of values of a one-layer cache, (num_pages, page_size, num_heads_kv, head_dim_v)."""
        return self.layer.v

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence has."""
        return len(self._free)

    @property
    def rows(self) -> list[int]:
        """Rows that hold a sequence, in order."""
        return [row for row, sequence in enumerate(self._sequences) if sequence is not None]

    @property
    def lengths(self) -> dict[int, int]:
        """Row -> tokens of its sequence."""
        return {row: s.length for row, s in enumerate(self._sequences) if s is not None}

    def pages(self, row: int) -> list[int]:
        """Page ids of a row's sequence in order, -1 for pages that were evicted."""
        return list(self._of(row).pages)

    def shared_prefix(self, rows: Sequence[int]) -> int:
        """How many tokens these sequences share: those of the pages they have in common from the first on."""
        sequences = [self._of(row) for row in rows]
        if not sequences:
            return 0
        common = 0
        for column in zip(*(s.pages for s in sequences), strict=False):
            if len(set(column)) > 1 or column[0] == EVICTED:
                break
            common += 1
        return min(common * self.page_size, *(s.length for s in sequences), self.max_seqlen)

    def index(self, rows: Sequence[int]) -> torch.Tensor:
        """The rows as int32 on the cache's device; the same tensor for the same rows, as long as they are asked for."""
        key = tuple(rows)
        found = self._indices.pop(key, None)
        if found is None:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "rows are a list and a CUDA graph is being captured: pass cache.index(rows), made before that"
                )
            for row in key:
                if not isinstance(row, int) or isinstance(row, bool):
                    raise InvalidType(f"a row is {row!r}; rows are integers, as add() returns them")
                if not 0 <= row < self.max_batch:
                    raise InvalidInput(f"row {row} is none of the cache's {self.max_batch} rows")
            found = torch.tensor(key, dtype=torch.int32).to(self.device)
        self._indices[key] = found  # the latest last
        while len(self._indices) > MAX_INDICES:
            del self._indices[next(iter(self._indices))]
        return found

    # Sequences come and go -------------------------------------------------------------------------------------------

    def add(self) -> int:
        """Begins an empty sequence and returns its row.

        Raises:
            InvalidInput: all rows hold sequences.
        """
        for row, sequence in enumerate(self._sequences):
            if sequence is None:
                self._sequences[row] = _Sequence()
                return row
        raise InvalidInput(f"all {self.max_batch} rows of the cache hold sequences; free one, or raise max_batch")

    def fork(self, row: int, length: int | None = None) -> int:
        """Begins a sequence that shares the first `length` tokens of another (all of them if None): no page is copied
        until one of the two writes into it. Returns the new row.

        Raises:
            InvalidInput: the other has fewer tokens, or all rows hold sequences.
        """
        parent = self._of(row)
        length = parent.length if length is None else length
        if not 0 <= length <= parent.length:
            raise InvalidInput(f"length is {length}; the sequence of row {row} has {parent.length} tokens to share")
        self._refuse_capture("fork")
        child = self.add()
        pages = parent.pages[: -(-length // self.page_size)]
        for page in pages:
            if page != EVICTED:
                self._references[page] += 1
        self._sequences[child] = _Sequence(length, pages)
        self._publish([(child, column, page) for column, page in enumerate(pages)], [child])
        return child

    def free(self, rows: Sequence[int] | int) -> None:
        """Ends sequences. Pages that nobody else shares are free again."""
        rows = [rows] if isinstance(rows, int) else list(rows)
        sequences = self._distinct(rows)
        self._refuse_capture("free")
        for row, sequence in zip(rows, sequences, strict=True):
            self._give_back(sequence.pages)
            self._sequences[row] = None
        self._publish([], rows)

    def truncate(self, row: int, length: int) -> None:
        """Takes back the last tokens of a sequence, as when drafted tokens are refused, and the pages that held
        them.

        Raises:
            InvalidInput: the sequence is shorter than that, or what would be its end was evicted.
        """
        sequence = self._of(row)
        if not 0 <= length <= sequence.length:
            raise InvalidInput(f"length is {length}; the sequence of row {row} has {sequence.length} tokens")
        kept = -(-length // self.page_size)
        if kept and sequence.pages[kept - 1] == EVICTED:
            raise InvalidInput(f"length is {length}; those tokens of row {row} were evicted")
        self._refuse_capture("truncate")
        self._give_back(sequence.pages[kept:])
        del sequence.pages[kept:]
        sequence.length = length
        self._publish([], [row])

    def evict(self, rows: Sequence[int] | int, window_left: int) -> int:
        """Gives back the pages that no later query sees through a sliding window (window_left, ...). Positions and
        lengths stay what they are.

        Args:
            window_left: keys that a query sees before its own position: the next token of a sequence of n tokens sees
                keys from `n - window_left`.

        Returns:
            How many pages became free.
        """
        rows = [rows] if isinstance(rows, int) else list(rows)
        sequences = self._distinct(rows)
        if window_left < 0:
            raise InvalidInput(f"window_left is {window_left}; it must be at least 0: without a window all is seen")
        self._refuse_capture("evict")
        before, changes = len(self._free), []
        for row, sequence in zip(rows, sequences, strict=True):
            behind = max(0, sequence.length - window_left) // self.page_size
            for column in range(min(behind, len(sequence.pages))):
                if sequence.pages[column] != EVICTED:
                    self._give_back([sequence.pages[column]])
                    sequence.pages[column] = EVICTED
                    changes.append((row, column, EVICTED))
        self._publish(changes, [])
        return len(self._free) - before

    # Tokens come -----------------------------------------------------------------------------------------------------

    def extend(self, rows: Sequence[int], counts: Sequence[int] | int = 1) -> None:
        """Takes the pages for new tokens of these sequences and advances their lengths, without writing the tokens.

        For models of several layers: once a step, before each layer's `attention_with_kv_cache` writes its own new
        keys and values into the last cells; and before the replay of a CUDA graph that does so. All of it happens or,
        with an error, nothing.

        Args:
            counts: new tokens of each sequence, or one number for all.

        Raises:
            OutOfPages: too few pages are free.
            InvalidInput: a row without a sequence or named twice, or a sequence longer than max_seqlen.
            RuntimeError: a CUDA graph is being captured.
        """
        rows = list(rows)
        counts = [counts] * len(rows) if isinstance(counts, int) else list(counts)
        self._check_extension(rows, counts)
        references = Counter[int]()
        copies: list[tuple[int, int]] = []  # row, page that others share and it would write into
        needed = 0
        for row, count in zip(rows, counts, strict=True):
            sequence = self._of(row)
            needed += max(0, -(-(sequence.length + count) // self.page_size) - len(sequence.pages))
            if count and sequence.length % self.page_size:
                page = sequence.pages[-1]
                if self._references[page] - references[page] > 1:
                    references[page] += 1
                    copies.append((row, page))
        needed += len(copies)
        if needed > len(self._free):
            raise OutOfPages(needed, len(self._free), self.num_pages)

        changes = []
        new_pages = []
        for row, page in copies:
            sequence = self._of(row)
            self._references[page] -= 1
            new_pages.append(self._take())
            sequence.pages[-1] = new_pages[-1]
            changes.append((row, len(sequence.pages) - 1, new_pages[-1]))
        for row, count in zip(rows, counts, strict=True):
            sequence = self._of(row)
            sequence.length += count
            while len(sequence.pages) * self.page_size < sequence.length:
                sequence.pages.append(self._take())
                changes.append((row, len(sequence.pages) - 1, sequence.pages[-1]))
        if copies:
            from_to = torch.tensor([[page for _, page in copies], new_pages]).to(self.device)
            for layer in self.layers:
                for pool in (layer.k, layer.v):
                    pool[from_to[1]] = pool[from_to[0]]
        self._publish(changes, rows)

    def append(
        self,
        rows: Sequence[int],
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor | None = None,
        counts: Sequence[int] | None = None,
        rotary: Rotary | None = None,
    ) -> None:
        """Appends new tokens to sequences of a one-layer cache: all of them, or with an error nothing.

        Args:
            rows: which sequences.
            k_new: (len(rows), seqlen, num_heads_kv, head_dim), or packed (total, num_heads_kv, head_dim).
            v_new: the same of V.
            cu_seqlens: int32 (len(rows) + 1,) where tokens are packed.
            counts: the same as lengths on the host, where they are packed: new tokens of each sequence.
            rotary: rotates k_new to the tokens' positions first.

        Raises:
            OutOfPages, InvalidInput, InvalidType, RuntimeError: as `extend`, and where a tensor does not fit.
        """
        write, new, counts = self.prepare_append(
            self.layer, rows, k_new, v_new, cu_seqlens=cu_seqlens, counts=counts, rotary=rotary
        )
        self.extend(rows, counts)
        write(new)

    def prepare_append(
        self,
        layer: CacheLayer,
        rows: Sequence[int],
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        *,
        q: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        counts: Sequence[int] | None = None,
        rotary: Rotary | None = None,
    ) -> tuple[Any, append_kv.New, list[int]]:
        """Checks and compiles an append: (write, its argument, new tokens of each row). Nothing has changed yet."""
        rows = list(rows)
        for name, tensor in (("k_new", k_new), ("v_new", v_new)):
            if not isinstance(tensor, torch.Tensor):
                raise InvalidType(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
        if cu_seqlens is not None:
            if counts is None:
                raise InvalidInput("cu_seqlens was given without counts, the same lengths on the host")
            check_offsets("cu_seqlens_q", [0, *torch.tensor(counts).cumsum(0).tolist()], k_new.shape[0], max(counts))
        counts = [k_new.shape[1]] * len(rows) if counts is None else list(counts)
        self._check_extension(rows, counts)
        new = new_tokens(layer, k_new, v_new, q=q, rows=self.index(rows), cu_seqlens=cu_seqlens, rotary=rotary)
        if rotary is not None:
            longest = max((self._of(row).length + n for row, n in zip(rows, counts, strict=True)), default=0)
            if longest > len(rotary.cos):
                raise InvalidInput(
                    f"rotary has angles for {len(rotary.cos)} positions and a sequence would have {longest} tokens"
                )
        interleaved = rotary is not None and rotary.interleaved
        return append_kv.prepare(new, max(counts, default=0), interleaved), new, counts

    # Books -----------------------------------------------------------------------------------------------------------

    def _of(self, row: int) -> _Sequence:
        if not isinstance(row, int) or isinstance(row, bool):
            raise InvalidType(f"a row is {row!r}; rows are integers, as add() returns them")
        sequence = self._sequences[row] if 0 <= row < self.max_batch else None
        if sequence is None:
            raise InvalidInput(f"row {row} holds no sequence; rows that do are {self.rows}")
        return sequence

    def _distinct(self, rows: list[int]) -> list[_Sequence]:
        sequences = [self._of(row) for row in rows]
        for row, n in Counter(rows).items():
            if n > 1:
                raise InvalidInput(f"row {row} is named {n} times; each row once")
        return sequences

    def _check_extension(self, rows: list[int], counts: list[int]) -> None:
        sequences = self._distinct(rows)
        if len(counts) != len(rows):
            raise InvalidInput(f"counts has {len(counts)} numbers for {len(rows)} rows")
        for row, sequence, count in zip(rows, sequences, counts, strict=True):
            if count < 0:
                raise InvalidInput(f"row {row} would grow by {count} tokens; counts must not be negative")
            if sequence.length + count > self.max_seqlen:
                raise InvalidInput(
                    f"the sequence of row {row} has {sequence.length} tokens and would have {sequence.length + count}; "
                    f"max_seqlen is {self.max_seqlen}"
                )
        self._refuse_capture("extend")

    def _refuse_capture(self, what: str) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"PagedKVCache.{what} keeps its books on the host, which a CUDA graph cannot capture: call it before "
                "the replay, and capture attention_with_kv_cache on cache.layers[i]"
            )

    def _take(self) -> int:
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _give_back(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            if page == EVICTED:
                continue
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def _publish(self, changes: Sequence[tuple[int, int, int]], rows: Sequence[int]) -> None:
        """Brings (row, column, page) of the table, and the lengths of rows, to the device: in stream order, behind
        the kernels that still read the old ones."""
        lengths = [0 if (s := self._sequences[row]) is None else s.length for row in rows]
        numbers = [number for change in changes for number in change]
        if not (numbers or lengths):
            return
        sent = torch.tensor([*numbers, *rows, *lengths], dtype=torch.int64).to(self.device)
        if changes:
            row, column, page = sent[: len(numbers)].view(-1, 3).unbind(1)
            self.page_table[row, column] = page.to(torch.int32)
        if rows:
            row, length = sent[len(numbers) :].view(2, -1)
            self.seqused_k[row] = length.to(torch.int32)


def new_tokens(
    layer: CacheLayer,
    k_new: torch.Tensor | None,
    v_new: torch.Tensor | None,
    *,
    q: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    rotary: Rotary | None = None,
) -> append_kv.New:
    """Checks new tokens against a cache and describes their launch; q, where given, is rotated too, to a new tensor.

    Raises:
        InvalidInput, InvalidType: naming the argument that does not fit.
    """
    axes: dict[str, tuple[int, str]] = {}
    bind_axes("the cache's k", layer.k, "num_pages page_size num_heads_kv head_dim", axes)
    bind_axes("the cache's v", layer.v, "num_pages page_size num_heads_kv head_dim_v", axes)
    leading = "total" if cu_seqlens is not None else "batch seqlen"
    if (k_new is None) != (v_new is None):
        raise InvalidInput("k_new and v_new come together: one of them is None")
    tensors = {
        "k_new": (k_new, f"{leading} num_heads_kv head_dim"),
        "v_new": (v_new, f"{leading} num_heads_kv head_dim_v"),
    }
    for name, (tensor, pattern) in {**tensors, "q": (q, f"{leading} num_heads_q head_dim")}.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise InvalidType(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
        if tensor.dtype != layer.k.dtype:
            raise InvalidType(f"{name} is {tensor.dtype} and the cache {layer.k.dtype}; they must share one dtype")
        if tensor.device != layer.k.device:
            raise InvalidInput(f"{name} is on {tensor.device} and the cache on {layer.k.device}")
        bind_axes(name, tensor, pattern, axes)
    if rows is not None and cu_seqlens is None:
        bind_axes("rows", rows, "batch", axes)
    if cu_seqlens is not None:
        if cu_seqlens.dtype != torch.int32:
            raise InvalidType(f"cu_seqlens is {cu_seqlens.dtype}; it must be torch.int32")
        if rows is not None and len(cu_seqlens) != len(rows) + 1:
            raise InvalidInput(f"cu_seqlens has {len(cu_seqlens)} offsets for {len(rows)} rows; it must have one more")
    if rotary is not None:
        _check_rotary(rotary, layer)
    return append_kv.New(
        k_new,
        v_new,
        q if rotary is not None else None,
        None if q is None or rotary is None else torch.empty(q.shape, dtype=q.dtype, device=q.device),
        layer.k,
        layer.v,
        layer.page_table,
        layer.seqused_k,
        rows,
        cu_seqlens,
        None if rotary is None else rotary.cos,
        None if rotary is None else rotary.sin,
    )


def _check_rotary(rotary: Rotary, layer: CacheLayer) -> None:
    axes: dict[str, tuple[int, str]] = {}
    for name in ("cos", "sin"):
        tensor = getattr(rotary, name)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
            raise InvalidType(f"rotary.{name} is {getattr(tensor, 'dtype', type(tensor).__name__)}; it must be float32")
        if tensor.device != layer.k.device:
            raise InvalidInput(f"rotary.{name} is on {tensor.device} and the cache on {layer.k.device}")
        bind_axes(f"rotary.{name}", tensor, "positions rotary_dim/2", axes)
        if not tensor.is_contiguous():
            raise InvalidInput(f"rotary.{name} is not contiguous; pass rotary.{name}.contiguous()")
    positions, half = axes["positions"][0], axes["rotary_dim/2"][0]
    if positions < 1 or not 0 < 2 * half <= layer.k.shape[-1]:
        raise InvalidInput(
            f"rotary.cos has shape ({positions}, {half}); it must hold at least one position and rotate 2 to "
            f"head_dim = {layer.k.shape[-1]} elements, two a column"
        )
