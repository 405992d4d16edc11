"""`PagedKVCache`: keys and values of many sequences in pages of one pool, and the tables that map sequences to pages.

Kwon et al., "Efficient memory management for large language model serving with PagedAttention" (2023). The host records
which pages are free, which sequence holds each page, and how long each sequence is, so nothing here waits for the
device. The device has copies of the page table and the lengths, which kernels read, in tensors that never move: a CUDA
graph captured once sees every later change.

Every method checks its arguments, then changes the device, then changes the host's records. The device's tables change
in one operation, and the records change by assignments that cannot fail, so an error leaves both unchanged.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from warpwave.checks.calls import bind_axes
from warpwave.errors import InvalidInput, InvalidType, OutOfPages
from warpwave.kernels import append_kv
from warpwave.kv_cache import pools
from warpwave.kv_cache.records import EVICTED, Append, Growth, SequenceRecord
from warpwave.kv_cache.tokens import (
    CacheLayer,
    Rotary,
    check_counts,
    check_offsets_tensor,
    check_positions,
    integer_or_integers,
    integers,
    new_tokens,
    one_or_many,
    values_in,
)
from warpwave.options import as_int
from warpwave.runtime.bounded import Bounded

MAX_INDICES = 256  # row tensors kept for repeated calls with the same rows
FLOAT8 = torch.float8_e4m3fn  # the one float8 dtype that a pool may have
ALIGNMENT = 64  # int32 numbers in 256 bytes: kernels are compiled for addresses that are multiples of 16


def _seen_as(t: torch.Tensor | None, dtype: torch.dtype, other: torch.dtype) -> torch.Tensor | None:
    """Returns a tensor of one dtype as a view of another dtype of the same size, and any other tensor as it is."""
    return t.view(other) if t is not None and t.dtype == dtype else t


class PagedKVCache:
    """Keys and values of up to `max_batch` sequences, in pages that are taken as the sequences grow.

    A sequence is a row of the page table, from `add` or `fork` to `free`. `extend` takes pages and advances lengths;
    `append` does that and writes the new tokens of a one-layer cache. Sequences with the same beginning
    can share pages, and a shared page is copied when one of its sequences writes into it.

    Args:
        num_pages: pages of the pool, for all sequences together.
        page_size: tokens of a page, a power of two. Small pages waste less memory at the ends of sequences, large ones
            need fewer table look-ups.
        num_heads_kv, head_dim: heads and head size of K; V has the same heads.
        head_dim_v: head size of V; head_dim if None.
        v_in_k: whether V is the first head_dim_v columns of K, as in a latent cache (MLA): one pool stores both, and
            `v_new` is omitted. 8-bit caches do not support it.
        num_layers: layers that share the tables; each has its own pools.
        max_batch: rows of the page table.
        max_seqlen: tokens of the longest sequence; the table has `ceil(max_seqlen / page_size)` columns.
        dtype: float16, bfloat16 or float32; or float8_e4m3fn or int8, for tokens and queries of 16 bits.
        device: device of the pools and tables.
        k_descale, v_descale: of an 8-bit cache: float32, positive, (num_heads_kv,) or (num_layers, num_heads_kv), one
            factor per head; magnitudes above 448 (float8) or 127 (int8) times the factor saturate. None: a factor for
            each head of each token, computed from its largest magnitude when it is appended.

    Attributes:
        layers: one `CacheLayer` per layer, whose tensors never move.
        has_evicted: whether `evict` was ever called.
        page_table: int32 (max_batch, pages of a row), on the device.
        seqused_k: int32 (max_batch,), on the device; 0 for rows without a sequence.

    Raises:
        InvalidInput, InvalidType: a size or dtype that no cache can have, or `device` is a GPU and there is none.

    Note:
        A method that raises changes nothing: neither the host's records nor the device's tables nor a token. A cache
        works inside and outside of `torch.inference_mode`, in whichever mode it was created, and its pools never
        require a gradient. Methods that change a cache must not run in two threads at the same time.

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
        v_in_k: bool = False,
        num_layers: int = 1,
        max_batch: int,
        max_seqlen: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
    ) -> None:
        sizes = {
            name: as_int(name, size)
            for name, size in {
                "num_pages": num_pages, "page_size": page_size, "num_heads_kv": num_heads_kv, "head_dim": head_dim,
                "head_dim_v": head_dim if head_dim_v is None else head_dim_v, "num_layers": num_layers,
                "max_batch": max_batch, "max_seqlen": max_seqlen,
            }.items()
        }  # fmt: skip
        for name, size in sizes.items():
            if size < 1:
                raise InvalidInput(f"{name} is {size}; it must be at least 1")
        num_pages, page_size, num_heads_kv, head_dim, head_dim_v, num_layers, max_batch, max_seqlen = sizes.values()
        if page_size & (page_size - 1):
            raise InvalidInput(f"page_size is {page_size}; it must be a power of two, for example 16 or 64")
        pools.check_latent(v_in_k, dtype, head_dim, head_dim_v)
        given = pools.check_given(dtype, device, (k_descale, v_descale), num_layers, num_heads_kv)
        self.num_pages, self.page_size, self.max_batch, self.max_seqlen = num_pages, page_size, max_batch, max_seqlen
        self._columns = -(-max_seqlen // page_size)
        # The page table and the lengths are in one tensor, so that one operation changes both or raises.
        self._lengths_at = -(-max_batch * self._columns // ALIGNMENT) * ALIGNMENT
        with torch.inference_mode(False):  # else only inference mode could change these tensors
            self._tables = torch.zeros(self._lengths_at + max_batch, dtype=torch.int32, device=device)
            cells, widths = (num_pages, page_size, num_heads_kv), (head_dim, head_dim_v)
            self._pools = [pools.of_layer(dtype, device, cells, widths, given, i, v_in_k) for i in range(num_layers)]
        self._head_dim_v = head_dim_v
        self._sequences: list[SequenceRecord | None] = [None] * max_batch
        self.has_evicted = False
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is taken first
        self._references = [0] * num_pages
        self._make_views()

    def _make_views(self) -> None:
        """Sets what is derived from the tensors: the views of the tables, and the layers."""
        with torch.inference_mode(False):
            self.page_table, self.seqused_k = self._views(self._tables)
        self.device = self._tables.device
        self.layers = tuple(
            CacheLayer(
                k, k[..., : self._head_dim_v] if v is None else v, self.page_table, self.seqused_k, *factors
            )
            for k, v, *factors in self._pools
        )  # fmt: skip
        self._indices: Bounded[tuple[int, ...], torch.Tensor] = Bounded(MAX_INDICES)

    def _views(self, tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the page table and the lengths in a tensor like `_tables`."""
        return tables[: self.max_batch * self._columns].view(self.max_batch, -1), tables[self._lengths_at :]

    def __getstate__(self) -> dict[str, Any]:
        state = {
            name: value
            for name, value in vars(self).items()
            if name not in ("page_table", "seqused_k", "layers", "_indices")  # pickle would copy them
        }
        # torch cannot load pickles of float8 tensors; no pool has the dtype uint8.
        return state | {"_pools": [(*(_seen_as(t, FLOAT8, torch.uint8) for t in pool),) for pool in self._pools]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

        def changeable(t: Any) -> Any:
            t = _seen_as(t, torch.uint8, FLOAT8)
            return t.clone() if t is not None and t.is_inference() else t

        with torch.inference_mode(False):  # tensors that were copied or read in that mode can be changed only there
            self._tables = changeable(self._tables)
            for i, pool in enumerate(self._pools):  # one after another, so that little memory is in use twice
                self._pools[i] = (*map(changeable, pool),)
        self._make_views()

    # Properties ------------------------------------------------------------------------------------------------------

    @property
    def layer(self) -> CacheLayer:
        """The layer of a one-layer cache."""
        if len(self.layers) != 1:
            raise InvalidInput(
                f"the cache has {len(self.layers)} layers; use one of them, cache.layers[i], after extend if tokens "
                "are appended"
            )
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
        """Number of pages that no sequence holds."""
        return len(self._free)

    @property
    def rows(self) -> list[int]:
        """Rows that hold a sequence, in order."""
        return [row for row, sequence in enumerate(self._sequences) if sequence is not None]

    @property
    def lengths(self) -> dict[int, int]:
        """The number of tokens of each row's sequence, by row."""
        return {row: s.length for row, s in enumerate(self._sequences) if s is not None}

    def kept(self, row: int) -> tuple[int, int]:
        """Returns the first token of a row's sequence that was not evicted, and the number of tokens; 0 and 0 if it
        holds no sequence."""
        if not 0 <= as_int("a row", row) < self.max_batch:
            raise InvalidInput(f"row {row} is not in the cache, which has {self.max_batch} rows")
        sequence = self._sequences[row]
        return (0, 0) if sequence is None else (sequence.evicted * self.page_size, sequence.length)

    def pages(self, row: int) -> list[int]:
        """Returns the page ids of a row's sequence in order, -1 for pages that were evicted."""
        return list(self._of(row).pages)

    def shared_prefix(self, rows: Sequence[int]) -> int:
        """Returns how many tokens these sequences share: those of their common pages, from the first page on."""
        sequences = [self._of(row) for row in integers("rows", rows, "a row")]
        if not sequences:
            return 0
        common = 0
        for column in zip(*(s.pages for s in sequences), strict=False):
            if len(set(column)) > 1 or column[0] == EVICTED:
                break
            common += 1
        return min(common * self.page_size, *(s.length for s in sequences), self.max_seqlen)

    def index(self, rows: Sequence[int]) -> torch.Tensor:
        """Returns the rows as int32 on the cache's device: the same tensor for the same rows, while they are in use."""
        key = tuple(integers("rows", rows, "a row"))
        found = self._indices.get(key)
        if found is None:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "rows are a list and a CUDA graph is being captured: pass cache.index(rows), made beforehand"
                )
            for row in key:
                if not 0 <= row < self.max_batch:
                    raise InvalidInput(f"row {row} is not in the cache, which has {self.max_batch} rows")
            with torch.inference_mode(False):
                found = torch.tensor(key, dtype=torch.int32, device="cpu").to(self.device)
        self._indices.put(key, found)
        return found

    # Adding and removing sequences -----------------------------------------------------------------------------------

    def add(self) -> int:
        """Begins an empty sequence and returns its row.

        Raises:
            InvalidInput: all rows hold sequences.
        """
        row = self._free_row()
        self._sequences[row] = SequenceRecord()
        return row

    def fork(self, row: int, length: int | None = None) -> int:
        """Begins a sequence that shares the first `length` tokens of another sequence, all of them if None. No page is
        copied until one of the two sequences writes into it. Returns the new row.

        Tokens that the other sequence lost to `evict` are missing in the new one too, which keeps the same window.

        Raises:
            InvalidInput: the other sequence has fewer tokens, or the new sequence would need evicted tokens, or all
                rows hold sequences.
            InvalidType: row or length is not an integer.
        """
        row = as_int("a row", row)
        parent = self._of(row)
        length = parent.length if length is None else as_int("length", length)
        if not 0 <= length <= parent.length:
            raise InvalidInput(f"length is {length}; the sequence of row {row} has {parent.length} tokens to share")
        self._refuse_evicted(row, parent, length)
        self._refuse_capture("fork")
        child = self._free_row()
        pages = parent.pages[: -(-length // self.page_size)]
        self._publish([(child, column, page) for column, page in enumerate(pages)], [(child, length)])
        for page in pages:
            if page != EVICTED:
                self._references[page] += 1
        self._sequences[child] = SequenceRecord(length, pages, parent.evicted if length else 0, parent.window_left)
        return child

    def free(self, rows: Sequence[int] | int) -> None:
        """Ends sequences. Pages that no other sequence shares become free."""
        listed = one_or_many(rows)
        sequences = self._distinct(listed)
        self._refuse_capture("free")
        self._publish([], [(row, 0) for row in listed])
        for row, sequence in zip(listed, sequences, strict=True):
            self._give_back(sequence.pages)
            self._sequences[row] = None

    def truncate(self, row: int, length: int) -> None:
        """Removes the last tokens of a sequence, for example when drafted tokens are rejected, and the pages that held
        them.

        Raises:
            InvalidInput: the sequence is shorter than that, or queries after the remaining tokens would need tokens
                that were evicted.
            InvalidType: row or length is not an integer.
        """
        row, length = as_int("a row", row), as_int("length", length)
        sequence = self._of(row)
        if not 0 <= length <= sequence.length:
            raise InvalidInput(f"length is {length}; the sequence of row {row} has {sequence.length} tokens")
        self._refuse_evicted(row, sequence, length)
        self._refuse_capture("truncate")
        self._publish([], [(row, length)])
        kept = -(-length // self.page_size)
        self._give_back(sequence.pages[kept:])
        del sequence.pages[kept:]
        sequence.length, sequence.evicted = length, min(sequence.evicted, kept)

    def evict(self, rows: Sequence[int] | int, window_left: int, max_truncate: int = 0) -> int:
        """Gives back the pages that no later query sees through a sliding window (window_left, ...). Positions and
        lengths do not change.

        Args:
            window_left: keys that a query sees before its own position: the next token of a sequence of n tokens sees
                keys from `n - window_left`. Later queries must keep to this window.
            max_truncate: the most tokens that `truncate`, or a `fork` of a part, may later remove from the present
                length: keys from `n - max_truncate - window_left` are kept.

        Returns:
            How many pages became free.

        Raises:
            InvalidInput: a number is negative, or the window needs tokens that an earlier call evicted.
            InvalidType: a row or a number is not an integer.
        """
        listed = one_or_many(rows)
        sequences = self._distinct(listed)
        window_left, max_truncate = as_int("window_left", window_left), as_int("max_truncate", max_truncate)
        if window_left < 0:
            raise InvalidInput(f"window_left is {window_left}; it must be at least 0: without a window all is seen")
        if max_truncate < 0:
            raise InvalidInput(f"max_truncate is {max_truncate}; it must be at least 0")
        behind = []  # pages of each sequence that end before the window
        for row, sequence in zip(listed, sequences, strict=True):
            first = sequence.evicted * self.page_size
            if max(0, sequence.length - window_left) < first:
                raise InvalidInput(
                    f"window_left is {window_left}; the tokens of row {row} before {first} were evicted, so the next "
                    f"of its {sequence.length} tokens can see at most {sequence.length - first} keys before it"
                )
            kept = max(0, sequence.length - max_truncate - window_left)
            behind.append(max(sequence.evicted, kept // self.page_size))
        self._refuse_capture("evict")
        changes = [
            (row, column, EVICTED)
            for row, sequence, end in zip(listed, sequences, behind, strict=True)
            for column in range(sequence.evicted, end)
        ]
        self._publish(changes, [])
        before = len(self._free)
        for sequence, end in zip(sequences, behind, strict=True):
            for column in range(sequence.evicted, end):
                self._give_back([sequence.pages[column]])
                sequence.pages[column] = EVICTED
            sequence.evicted, sequence.window_left = end, window_left
        self.has_evicted = True
        return len(self._free) - before

    # Adding tokens ---------------------------------------------------------------------------------------------------

    def extend(self, rows: Sequence[int], counts: Sequence[int] | int = 1) -> None:
        """Takes the pages for new tokens of these sequences and advances their lengths, without writing the tokens.

        Models of several layers call it once a step, before each layer's `attention_with_kv_cache` writes its own new
        keys and values into the last cells, and before the replay of a CUDA graph that does so. On an error nothing
        changes.

        Args:
            counts: new tokens of each sequence, or one number for all.

        Raises:
            OutOfPages: too few pages are free.
            InvalidInput: a row without a sequence or named twice, or a sequence longer than max_seqlen.
            InvalidType: a row or a count is not an integer.
            RuntimeError: a CUDA graph is being captured.
        """
        listed, numbers = integers("rows", rows, "a row"), integer_or_integers("counts", counts)
        numbers = [numbers] * len(listed) if isinstance(numbers, int) else numbers
        with self._grown(self._growth(listed, self._check_growth(listed, numbers), numbers)):
            pass

    def append(
        self,
        rows: Sequence[int],
        k_new: torch.Tensor,
        v_new: torch.Tensor | None = None,
        *,
        cu_seqlens: torch.Tensor | None = None,
        counts: Sequence[int] | None = None,
        rotary: Rotary | None = None,
    ) -> None:
        """Appends new tokens to sequences of a one-layer cache. On an error nothing is appended.

        Args:
            rows: rows of the sequences.
            k_new: (len(rows), seqlen, num_heads_kv, head_dim), or packed (total, num_heads_kv, head_dim). Gradients are
                not propagated: the cache stores only the values.
            v_new: the same for V. None if the cache is latent: the values are then the first columns of k_new.
            cu_seqlens: int32 (len(rows) + 1,), the offsets of `counts` on the device. Only its shape and dtype are
                checked: `counts` decides which tokens go to which row.
            counts: new tokens of each sequence, if they are packed.
            rotary: rotates k_new to the tokens' positions first.

        Raises:
            OutOfPages, InvalidInput, InvalidType, RuntimeError: as `extend`, and if a tensor does not fit.
        """
        if cu_seqlens is not None and counts is None:
            raise InvalidInput("cu_seqlens was given without counts, the same lengths on the host")
        listed = integers("rows", rows, "a row")
        if cu_seqlens is not None:
            check_offsets_tensor(cu_seqlens, len(listed))
        numbers = None if counts is None else integers("counts", counts)
        if v_new is None and isinstance(k_new, torch.Tensor):
            v_new = values_in(self.layer, k_new)
        with self.prepare_append(self.layer, listed, k_new, v_new, counts=numbers, rotary=rotary).applied():
            pass

    def prepare_append(
        self,
        layer: CacheLayer,
        rows: list[int],
        k_new: torch.Tensor,
        v_new: torch.Tensor | None,
        *,
        q: torch.Tensor | None = None,
        counts: list[int] | None = None,
        name: str = "counts",
        rotary: Rotary | None = None,
    ) -> Append:
        """Checks and compiles an append, without changing anything.

        Args:
            q: queries to rotate along with k_new.
            counts: new tokens of each row if k_new is packed, else None.
            name: the name of `counts` in messages.
        """
        for what, tensor in (("k_new", k_new), ("v_new", v_new)):
            if not isinstance(tensor, torch.Tensor):
                raise InvalidType(f"{what} is a {type(tensor).__name__}; it must be a torch.Tensor")
        packed = counts is not None
        if counts is not None:
            bind_axes("k_new", k_new, "total num_heads_kv head_dim", {})
            check_counts(name, counts, len(k_new), "k_new")
        else:
            counts = [k_new.shape[1] if k_new.dim() > 1 else 0] * len(rows)
        sequences = self._check_growth(rows, counts)
        new = new_tokens(layer, k_new, v_new, q=q, rows=self.index(rows), packed=packed, rotary=rotary)
        if rotary is not None:
            ends = (sequence.length + count for sequence, count in zip(sequences, counts, strict=True))
            check_positions(rotary, max(ends, default=0))
        growth = self._growth(rows, sequences, counts)
        if packed:
            new = new._replace(cu_seqlens=growth.offsets)
        interleaved = rotary is not None and rotary.interleaved
        write = append_kv.prepare(new, max(counts, default=0), interleaved)

        @contextlib.contextmanager
        def applied() -> Iterator[None]:
            with self._grown(growth):
                write(new)
                yield

        def tables() -> tuple[torch.Tensor, torch.Tensor]:
            changed = self._tables.clone()
            changed[growth.cells] = growth.after
            return self._views(changed)

        return Append(new, applied, tables)

    # Host records ----------------------------------------------------------------------------------------------------

    def _of(self, row: int) -> SequenceRecord:
        if row.__class__ is not int:
            row = as_int("a row", row)
        sequence = self._sequences[row] if 0 <= row < self.max_batch else None
        if sequence is None:
            raise InvalidInput(f"row {row} holds no sequence; rows that do are {self.rows}")
        return sequence

    def _distinct(self, rows: list[int]) -> list[SequenceRecord]:
        """Returns the sequences of rows, each of which may be named once."""
        sequences = [self._of(row) for row in rows]
        if len(set(rows)) < len(rows):
            row, n = Counter(rows).most_common(1)[0]
            raise InvalidInput(f"row {row} is named {n} times; each row may be named once")
        return sequences

    def _free_row(self) -> int:
        for row, sequence in enumerate(self._sequences):
            if sequence is None:
                return row
        raise InvalidInput(f"all {self.max_batch} rows of the cache hold sequences; free one, or raise max_batch")

    def _refuse_capture(self, what: str) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"PagedKVCache.{what} changes records on the host, which a CUDA graph cannot capture: call it before "
                "the replay, and capture attention_with_kv_cache on cache.layers[i]"
            )

    def _refuse_evicted(self, row: int, sequence: SequenceRecord, length: int) -> None:
        """Raises InvalidInput if queries after the first `length` tokens would need a token that was evicted.

        A query at position p sees keys from `p - window_left`. So a sequence that lost its tokens before `first` may be
        cut to no fewer than `first + window_left` tokens, which also keeps the page that the next token is written to,
        or to 0 tokens.
        """
        first = sequence.evicted * self.page_size
        shortest = first + sequence.window_left if first else 0
        if 0 < length < shortest:
            raise InvalidInput(
                f"length is {length}; the tokens of row {row} before {first} were evicted for a window of "
                f"{sequence.window_left} keys: length must be 0 or from {shortest} to {sequence.length}. "
                "evict(..., max_truncate=n) keeps the tokens that truncating by n needs"
            )

    def _give_back(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            if page == EVICTED:
                continue
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def _publish(self, pages: Sequence[tuple[int, int, int]], lengths: Sequence[tuple[int, int]]) -> None:
        """Writes (row, column, page) and (row, length) to the device's tables, in stream order, after the kernels that
        still read the old ones. On an error nothing is written."""
        cells = [row * self._columns + column for row, column, _ in pages] + [self._lengths_at + r for r, _ in lengths]
        if cells:
            sent = torch.tensor(
                [*cells, *(p for _, _, p in pages), *(n for _, n in lengths)], dtype=torch.int64, device="cpu"
            )
            sent = sent.to(self.device)
            self._tables[sent[: len(cells)]] = sent[len(cells) :].to(torch.int32)

    def _check_growth(self, rows: list[int], counts: list[int]) -> list[SequenceRecord]:
        """Checks that rows can grow by these numbers of tokens, assuming free pages, and returns their sequences."""
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
        return sequences

    def _growth(self, rows: list[int], sequences: list[SequenceRecord], counts: list[int]) -> Growth:
        """Finds pages for new tokens and prepares the changes, without making them."""
        size, references = self.page_size, Counter[int]()
        shared = []  # (row, sequence, its last page), if others share the page and it would write into it
        needed = 0
        for row, sequence, count in zip(rows, sequences, counts, strict=True):
            needed += -(-(sequence.length + count) // size) - len(sequence.pages)
            if count and sequence.length % size:
                page = sequence.pages[-1]
                if self._references[page] - references[page] > 1:
                    references[page] += 1
                    shared.append((row, sequence, page))
        needed += len(shared)
        if needed > len(self._free):
            raise OutOfPages(needed, len(self._free), self.num_pages)

        taken = reversed(self._free[len(self._free) - needed :])
        replaced = [(sequence, page, next(taken)) for _, sequence, page in shared]
        # Indices in the device's tables, their values afterward, and those that undo the growth.
        cells = [row * self._columns + len(sequence.pages) - 1 for row, sequence, _ in shared]
        old, new = [page for _, page, _ in replaced], [page for _, _, page in replaced]
        after, before = list(new), list(old)
        ends = []
        for row, sequence, count in zip(rows, sequences, counts, strict=True):
            end, columns = sequence.length + count, len(sequence.pages)
            pages = [next(taken) for _ in range(columns * size, end, size)] if end > columns * size else []
            if pages:
                first = row * self._columns + columns
                cells += range(first, first + len(pages))
                after += pages
                before += [EVICTED] * len(pages)
            ends.append((sequence, end, pages))
        cells += [self._lengths_at + row for row in rows]
        after += [end for _, end, _ in ends]
        before += [sequence.length for sequence in sequences]

        # One transfer. The offsets come first, because their address must be a multiple of 16.
        offsets = list(accumulate(counts, initial=0))
        sent = torch.tensor([*offsets, *after, *before, *cells, *old, *new], dtype=torch.int64, device="cpu").to(
            self.device
        )
        parts = sent.split([len(offsets) + 2 * len(cells), len(cells), 2 * len(old)])
        numbers = parts[0].to(torch.int32).split([len(offsets), len(cells), len(cells)])
        copies = parts[2].view(2, -1) if old else None
        return Growth(needed, replaced, ends, parts[1], numbers[1], numbers[2], copies, numbers[0])

    @contextlib.contextmanager
    def _grown(self, growth: Growth) -> Iterator[None]:
        """Grows sequences around a body, which runs on the device's new tables. The host's records change after it. If
        the body raises, the device's tables are restored, and its writes are in cells that no sequence has."""
        if growth.copies is not None:
            pools.copy_pages(self._pools, *growth.copies)
        self._tables[growth.cells] = growth.after
        try:
            yield
        except BaseException:
            self._tables[growth.cells] = growth.before
            raise
        del self._free[len(self._free) - growth.num_pages :]
        for sequence, old_page, new_page in growth.replaced:
            self._references[old_page] -= 1
            self._references[new_page] = 1
            sequence.pages[-1] = new_page
        for sequence, end, pages in growth.ends:
            for page in pages:
                self._references[page] = 1
            sequence.pages += pages
            sequence.length = end
