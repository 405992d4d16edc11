"""What a user's mistake ends in: one sentence and exit code 2; and nothing of theirs is written over."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.workbench.report.samples import pair, write
from warpwave.workbench.output_files import CannotWrite
from warpwave.workbench.report import command, page
from warpwave.workbench.report.command import check_writable, main, save


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return write(tmp_path / "record.jsonl", pair())


def says(capsys: pytest.CaptureFixture[str]) -> str:
    printed = capsys.readouterr()
    assert printed.err.startswith("warpwave: ")
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.err
    return printed.err


def test_it_writes_report_html_here(
    record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([record]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'report.html'}\n"
    assert "sdpa_cudnn" in (tmp_path / "report.html").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["record.jsonl", "report.html"]
    assert main([record]) == 0  # its own report it may replace


def test_markdown_alone_writes_no_page(record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([record], markdown_out=tmp_path / "r.md") == 0
    assert (tmp_path / "r.md").read_text().startswith("# Attention on NVIDIA H200\n")
    assert not (tmp_path / "report.html").exists()
    assert main([record], markdown_out=tmp_path / "r.md") == 0


def test_markdown_to_standard_output(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([record], markdown_out=Path("-")) == 0
    assert capsys.readouterr().out.startswith("# Attention on NVIDIA H200\n")


def test_without_a_record_it_tells_the_shipped_one(tmp_path: Path) -> None:
    assert main([], out=tmp_path / "r.html") == 0
    assert "not on this machine" in (tmp_path / "r.html").read_text()


def test_two_files_of_one_machine_are_told_together_and_one_named_twice_once(record: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", pair(case="the other file's case"))
    assert main([record, other, record], markdown_out=tmp_path / "r.md") == 0
    written = (tmp_path / "r.md").read_text()
    assert written.count("\n## ") == 1
    assert "the other file's case" in written
    assert "geometric mean of 2 cases" in written


@pytest.mark.parametrize("name", ["report.html", "r.md"])
def test_what_is_not_ours_is_not_written_over(
    record: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / name
    mine.write_text("<p>my thesis</p>")
    where: dict[str, Any] = {"out": mine} if name == "report.html" else {"markdown_out": mine}
    assert main([record], **where) == 2
    assert "is not a report of warpwave" in says(capsys)
    assert mine.read_text() == "<p>my thesis</p>"


def test_a_directory_and_a_missing_one(record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([record], out=tmp_path) == 2
    assert "is a directory" in says(capsys)
    assert main([record], out=tmp_path / "no" / "r.html") == 2
    assert "there is no directory" in says(capsys)


def test_no_permission(
    record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda *args: False)  # root may write anywhere
    assert main([record], out=tmp_path / "r.html") == 2
    assert "no permission" in says(capsys)


def test_a_full_disk_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "r.md"
    save(old, "before\n")
    before = old.read_text()

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(CannotWrite, match="No space left on device"):
        save(old, "after\n")
    assert old.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.md"]


@pytest.mark.parametrize("name", ["r.html", "r.md"])
def test_a_report_that_somebody_edited_is_theirs(
    record: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As are notes into which one was pasted, whole, at their beginning or at their end."""
    path = tmp_path / name
    where: dict[str, Any] = {"out": path} if name == "r.html" else {"markdown_out": path}
    assert main([record], **where) == 0
    written = path.read_text()
    for theirs in (written + "My own remark.\n", "# My notes\n" + written, written.replace("H200", "H100", 1)):
        path.write_text(theirs)
        capsys.readouterr()
        assert main([record], **where) == 2
        assert "is not a report of warpwave, or was edited since; name another file" in says(capsys)
        assert path.read_text() == theirs
    path.write_text(written)
    assert main([record], **where) == 0


@pytest.mark.parametrize("spelling", ["r.md", "./r.md", "link.md"])
def test_the_page_and_the_markdown_are_two_files(
    spelling: str, record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.md").symlink_to("r.md")
    assert main([record], out=Path("r.md"), markdown_out=Path(spelling)) == 2
    assert "are one file; name two" in says(capsys)
    assert not (tmp_path / "r.md").exists()


def test_nothing_is_written_where_one_of_two_cannot_be(
    record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([record], out=tmp_path / "no" / "r.html", markdown_out=tmp_path / "r.md") == 2
    assert "there is no directory" in says(capsys)
    assert not (tmp_path / "r.md").exists()


def test_a_page_that_is_too_large(
    record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page, "LARGEST_BYTES", 1000)
    assert main([record], out=tmp_path / "r.html") == 2
    assert "fewer files" in says(capsys)
    assert not (tmp_path / "r.html").exists()


def test_a_missing_and_an_empty_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([tmp_path / "none.jsonl"], out=tmp_path / "r.html") == 2
    assert "none.jsonl" in says(capsys)
    (tmp_path / "empty.jsonl").write_text("")
    assert main([tmp_path / "empty.jsonl"], out=tmp_path / "r.html") == 2
    assert "empty" in says(capsys)


def spoil(path: Path, line: int, change: Callable[[dict[str, Any]], None]) -> None:
    lines = path.read_text().splitlines()
    record = json.loads(lines[line])
    change(record)
    lines[line] = json.dumps(record)
    path.write_text("\n".join(lines) + "\n")


def put(*keys: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        for key in keys[:-1]:
            record = record[key]
        record[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("line", "change"),
    [
        (1, put("timing", "samples_us", value=[0.0, 1.0])),
        (1, put("timing", "samples_us", value=[])),
        (1, put("timing", "samples_us", value=[float("nan")])),
        (1, put("timing", "samples_us", value=[-3.0])),
        (1, put("timing", "samples_us", value="fast")),
        (1, put("timing", value=17)),
        (1, put("problem", "batch", value="many")),
        (1, put("problem", "head_dim", value=None)),
        (1, put("problem", "dtype", value="float7")),
        (1, put("verdict", "rms_error", value="small")),
        (1, put("contender", value=7)),
        (1, put("case", value=["x"])),
        (1, put("gpu_before", value="warm")),
        (1, put("gpu_after", value={"power_w": "much"})),
        (1, put("peak_memory_bytes", value="big")),
        (1, put("config", value="64x64")),
        (1, put("config", value={"num_stages": 1e308})),
        (1, put("timing", "method", value={})),
        (1, put("timing", "input_sets", value="many")),
        (1, put("problem", "precision", value="tf64")),
        (1, put("problem", "requires_grad", value={})),
        (1, put("problem", "mask_visible_pairs", value=1e308)),
        (1, put("problem", "num_heads_q", value=10**30)),
        (1, put("gpu_before", value={"throttle": [[1]]})),
        (1, put("goal", value={"ratio": None, "over_launch_us": None})),
        (0, put("environment", value="here")),
        (0, put("environment", "gpu", value="H200")),
        (0, put("environment", "gpu", "memory_bytes", value="141 GB")),
        (0, put("environment", "cpu", value=3)),
        (1, put("schema_version", value=99)),
    ],
)
def test_a_damaged_record_is_a_sentence(
    record: Path,
    tmp_path: Path,
    line: int,
    change: Callable[[dict[str, Any]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(record, line, change)
    assert main([record], out=tmp_path / "r.html") == 2
    assert "record.jsonl" in says(capsys)
    assert not (tmp_path / "r.html").exists()


def test_version_1_records_are_read(record: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    for line in lines:
        line["schema_version"] = 1
        for name in ("mode", "peak_memory_bytes", "goal"):
            line.pop(name, None)
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([record], out=tmp_path / "r.html") == 0
    assert "SLOWER" in (tmp_path / "r.html").read_text()


def test_a_link_is_followed_and_stays(record: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.html"
    link = tmp_path / "link.html"
    target.write_text("")
    link.symlink_to(target)
    assert main([record], out=link) == 0
    assert link.is_symlink()
    assert "sdpa_cudnn" in target.read_text()


def test_checking_writes_nothing(tmp_path: Path) -> None:
    check_writable(tmp_path / command.DEFAULT_NAME)
    assert list(tmp_path.iterdir()) == []
