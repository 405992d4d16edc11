"""Tests a paged cache over a long time: sequences begin, grow, share pages, lose pages and end.

    PYTHONPATH=. python benchmarks/soak.py [--device cuda] [--steps 100000]

In every step all sequences get a token, in one CUDA graph of append and attention with a sliding window, which replays
with changing lengths and page tables (without CUDA: in one eager call). Between steps, a sequence may begin with a
prompt, be forked, ended or truncated, or free the pages that its window has passed; if pages run out, one must end. A
token's key and value follow from its number in a bank, so the host describes the whole cache by numbers. At intervals,
one sequence's output is computed from them in float64 and compared with the step's, and the cache's bookkeeping with
the numbers. Memory must not grow, on the device or on the host.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from warpwave import InvalidInput, OutOfPages, PagedKVCache, attention_with_kv_cache

CLOSE = 2e-2  # of the largest element of an output, bfloat16's steps and P's rounding included
GROWTH_ALLOWED = {"device": 2**20, "host": 64 * 2**20}  # bytes after the first tenth of the run
CUT = 9  # tokens at the most that are taken back, or that a fork leaves out
SLACK = 10 * CUT  # tokens kept beyond what the window shows, for the window of those that are left after several cuts
EVENTS = ("prompt", "prompt", "fork", "end", "cut", "evict", "evict")


class Soak:
    """A cache and its expected contents.

    Args:
        device: the cache's device.
        seed: of the events and of the bank.
        max_batch, max_seqlen, num_pages: of the cache; the pages are too few for all sequences at their longest.
        heads, head_dim: query and kv heads, and their width.
        window: keys that a query sees before its own.
    """

    def __init__(
        self,
        device: torch.device,
        seed: int = 0,
        *,
        max_batch: int = 64,
        max_seqlen: int = 2048,
        num_pages: int = 2048,
        heads: tuple[int, int] = (8, 2),
        head_dim: int = 64,
        window: int = 511,
        bank: int = 4096,
    ) -> None:
        self.device, self.window, self.chance = device, window, random.Random(seed)
        self.cache = PagedKVCache(
            num_pages=num_pages, page_size=16, num_heads_kv=heads[1], head_dim=head_dim, max_batch=max_batch,
            max_seqlen=max_seqlen, device=device,
        )  # fmt: skip
        self.max_seqlen = max_seqlen
        g = torch.Generator(device).manual_seed(seed)
        self.bank_k, self.bank_v = (
            torch.randn(bank, heads[1], head_dim, generator=g, device=device).to(torch.bfloat16) for _ in range(2)
        )
        self.q = torch.randn(max_batch, 1, heads[0], head_dim, generator=g, device=device).to(torch.bfloat16)
        self.held: dict[int, list[int]] = {}  # numbers of each sequence's tokens
        self.numbers = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.staged = torch.zeros(max_batch, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.staged_numbers = self.staged.numpy()
        self.happened: Counter[str] = Counter()
        self.out = self._step()
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = self._step()

    def _step(self) -> torch.Tensor:
        """Writes the last token of every sequence and attends with its query."""
        k, v = (bank[self.numbers][:, None] for bank in (self.bank_k, self.bank_v))
        out: torch.Tensor = attention_with_kv_cache(
            self.q, self.cache.layers[0], k_new=k, v_new=v, window_size=(self.window, 0)
        )
        return out

    def event(self) -> None:
        """Applies a random event to one sequence."""
        kind, rows = self.chance.choice(EVENTS), sorted(self.held)
        if kind == "prompt" or not rows:
            kind = "prompt"
            longest = min(400, self.max_seqlen // 2)
            tokens = [self.chance.randrange(len(self.bank_k)) for _ in range(self.chance.randint(1, longest))]
            try:
                row = self.cache.add()
            except InvalidInput:
                kind = "no row free"
            else:
                at = torch.tensor(tokens, device=self.device)
                try:
                    self.cache.append([row], self.bank_k[at][None], self.bank_v[at][None])
                    self.held[row] = tokens
                except OutOfPages:
                    self.cache.free(row)
                    kind = "prompt refused"
        elif kind == "fork":
            parent = self.chance.choice(rows)
            length = self.chance.randint(max(1, len(self.held[parent]) - CUT), len(self.held[parent]))
            try:
                self.held[self.cache.fork(parent, length)] = self.held[parent][:length]
            except InvalidInput:
                kind = "no row free"
        elif kind == "end":
            self.end(self.chance.choice(rows))
        elif kind == "cut":
            row = self.chance.choice(rows)
            length = self.chance.randint(max(1, len(self.held[row]) - CUT), len(self.held[row]))
            self.cache.truncate(row, length)
            del self.held[row][length:]
        else:
            self.cache.evict(self.chance.choice(rows), self.window, max_truncate=SLACK)
        self.happened[kind] += 1

    def end(self, row: int) -> None:
        """Ends a sequence."""
        self.cache.free(row)
        del self.held[row]

    def step(self) -> None:
        """Appends a token to every sequence; if pages run out or a sequence has its full length, one ends first."""
        for row in [row for row, tokens in self.held.items() if len(tokens) == self.max_seqlen]:
            self.end(row)
            self.happened["full length"] += 1
        while self.held:
            try:
                self.cache.extend(list(self.held))
                break
            except OutOfPages:
                self.end(max(self.held, key=lambda row: len(self.held[row])))
                self.happened["out of pages"] += 1
        if self.graph is not None:
            torch.cuda.current_stream().synchronize()  # the copy before has been read
        for row, tokens in self.held.items():
            tokens.append(self.chance.randrange(len(self.bank_k)))
            self.staged_numbers[row] = tokens[-1]
        self.numbers.copy_(self.staged, non_blocking=True)
        if self.graph is None:
            self.out = self._step()
        else:
            self.graph.replay()

    def check(self) -> None:
        """Checks one sequence's output, and the cache's bookkeeping."""
        row = self.chance.choice(sorted(self.held))
        seen = torch.tensor(self.held[row][-self.window - 1 :], device=self.device)
        k, v, q = self.bank_k[seen].double(), self.bank_v[seen].double(), self.q[row, 0].double()
        group = len(q) // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        p = torch.softmax(torch.einsum("hd,nhd->hn", q, k) * q.shape[-1] ** -0.5, -1)
        expected = torch.einsum("hn,nhd->hd", p, v)
        error = float((self.out[row, 0].double() - expected).abs().max() / expected.abs().max())
        if not error <= CLOSE:
            raise SystemExit(f"row {row} of {len(self.held[row])} tokens is {error:.2e} off, more than {CLOSE}")
        if self.cache.lengths != {row: len(tokens) for row, tokens in self.held.items()}:
            raise SystemExit(f"lengths are {self.cache.lengths}, not what was appended")
        used = {page for row in self.held for page in self.cache.pages(row) if page >= 0}
        if len(used) + self.cache.num_free_pages != self.cache.num_pages:
            raise SystemExit(
                f"{len(used)} pages are held and {self.cache.num_free_pages} free, of {self.cache.num_pages}"
            )
        held = torch.tensor(self.cache.pages(row), dtype=torch.int32)
        if not torch.equal(self.cache.page_table[row, : len(held)].cpu(), held):
            raise SystemExit(f"the device's table of row {row} is not the host's")


def memory(device: torch.device) -> dict[str, int]:
    """Returns the bytes allocated on the device, and the process's largest resident memory on the host."""
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return {"device": held, "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def soak(steps: int, device: torch.device, seed: int = 0, check_every: int = 20, **sizes: Any) -> Soak:
    """Runs `steps` steps; the result has the counts of events.

    Raises:
        SystemExit: an output, the bookkeeping or memory is wrong; the message names it and the step.
    """
    run = Soak(device, seed, **sizes)
    before: dict[str, int] = {}
    for step in range(steps):
        try:
            if step < 8 or run.chance.random() < 0.25:
                run.event()
            run.step()
            if run.held and step % check_every == 0:
                run.check()
                run.happened["checked"] += 1
        except SystemExit as found:
            raise SystemExit(f"step {step}: {found}") from None
        if step == max(steps // 10, 1):
            before = memory(device)
    for where, now in memory(device).items():
        if before and now > before[where] + GROWTH_ALLOWED[where]:
            raise SystemExit(f"memory on the {where} grew from {before[where]} to {now} bytes")
    return run


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    if chosen.steps < 1:
        parser.error("--steps must be at least 1")
    start = time.perf_counter()
    with torch.no_grad():
        run = soak(chosen.steps, torch.device(chosen.device), chosen.seed)
    took = time.perf_counter() - start
    tally = ", ".join(f"{name} {count}" for name, count in sorted(run.happened.items()))
    now = memory(torch.device(chosen.device))
    print(f"{chosen.steps} steps in {took:.1f} s, {1e3 * took / chosen.steps:.2f} ms each: {tally}")
    print(
        f"memory flat: {now['device'] / 2**20:.1f} MiB on the device, {now['host'] / 2**20:.0f} MiB at most on the host"
    )


if __name__ == "__main__":
    main()
