"""benchmarks/soak.py: everything it speaks of happens, and what it is there to find it finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import soak
from warpwave import PagedKVCache
from warpwave.kernels import append_kv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL: dict[str, int] = {
    "max_batch": 5, "max_seqlen": 320, "num_pages": 60, "head_dim": 16, "window": 15, "bank": 64,
}  # fmt: skip


@pytest.fixture(autouse=True)
def by_torch_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Appends by torch's operations: interpreted programs take milliseconds each."""
    monkeypatch.setattr(append_kv, "INTERPRETED", False)


def run(steps: int, **more: Any) -> soak.Soak:
    with torch.no_grad():
        return soak.soak(steps, DEVICE, check_every=5, heads=(4, 2), **(SMALL | more))


def test_everything_happens() -> None:
    happened = run(400).happened
    assert all(happened[kind] for kind in (*soak.EVENTS, "checked", "no row free")), happened
    assert happened["checked"] >= 60
    happened = run(200, num_pages=20, max_seqlen=200).happened
    assert happened["out of pages"] and happened["prompt refused"], happened
    assert run(100, max_seqlen=40).happened["full length"]


def test_pages_given_back_too_early_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    evict = PagedKVCache.evict
    monkeypatch.setattr(PagedKVCache, "evict", lambda self, rows, window, max_truncate: evict(self, rows, 0))
    with pytest.raises(SystemExit, match=r"step \d+: row \d of \d+ tokens is .* off, more than"):
        run(400)


def test_a_shared_page_written_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork_that_counts_nothing(self: PagedKVCache, row: int, length: int | None = None) -> int:
        child = self.add()
        parent = self._sequences[row]
        assert parent is not None and length is not None
        pages = parent.pages[: -(-length // self.page_size)]
        self._sequences[child] = type(parent)(length, pages)
        self._publish([(child, column, page) for column, page in enumerate(pages)], [(child, length)])
        return child

    monkeypatch.setattr(PagedKVCache, "fork", fork_that_counts_nothing)
    with pytest.raises((SystemExit, IndexError)):
        run(400)


def test_a_table_that_is_not_the_hosts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = PagedKVCache._publish
    monkeypatch.setattr(PagedKVCache, "_publish", lambda self, pages, lengths: publish(self, pages[1:], lengths))
    with pytest.raises(SystemExit, match=r"step \d+: "):
        run(100)


def test_memory_that_grows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter((0, 2**20 + 1))
    monkeypatch.setattr(soak, "memory", lambda device: {"device": next(sizes), "host": 0})
    with pytest.raises(SystemExit, match="memory on the device grew from 0 to 1048577 bytes"):
        run(20)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    soak.main(["--steps", "12", "--device", str(DEVICE)])
    said = capsys.readouterr().out
    assert said.startswith("12 steps in ") and "memory flat" in said
    with pytest.raises(SystemExit) as refused:
        soak.main(["--steps", "0"])
    assert refused.value.code == 2
