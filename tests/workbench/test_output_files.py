"""What commands write over, and what they leave alone."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from warpwave.workbench.output_files import (
    CannotWrite,
    Kind,
    check_output,
    is_sealed,
    sealed,
    write_output,
    write_whole,
)


def test_a_file_is_replaced_only_where_it_may_be(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, "first", replace=False)
    with pytest.raises(FileExistsError):
        write_whole(path, "second", replace=False)
    assert path.read_text() == "first"
    write_whole(path, "third")
    assert path.read_text() == "third"
    assert list(tmp_path.iterdir()) == [path]


def test_others_may_read_what_is_written_as_they_may_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "any").touch()
    write_whole(tmp_path / "ours", "x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "any").stat().st_mode


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no named pipes in folders")
def test_what_is_no_regular_file_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    """As /dev/null, which a rename would make a file of, for everybody."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(CannotWrite, match="is no regular file"):
        check_output(pipe, Kind("report", lambda _: pytest.fail("reading it would never end")))


def test_somebody_elses_file_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("x")
    with pytest.raises(CannotWrite, match="already exists and is not a report of ours; name another file"):
        check_output(tmp_path / "thesis", Kind("report of ours", lambda _: False))
    ours = Kind("report", lambda _: True)
    with pytest.raises(CannotWrite, match="is a directory"):
        check_output(tmp_path, ours)
    with pytest.raises(CannotWrite, match=re.escape(f"there is no directory {tmp_path / 'none'}")):
        check_output(tmp_path / "none" / "file", ours)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis"]


def test_a_dash_is_no_name_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CannotWrite, match=r"^- is not the name of a file.*; name a file$"):
        write_output(Path("-"), "text", Kind("report", lambda _: True))
    assert not list(tmp_path.iterdir())


def test_what_the_system_refuses_is_a_sentence(tmp_path: Path) -> None:
    """A name too long to look at, a link to itself: what one Python raises there, another does not."""
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / ("x" * 300), tmp_path / "loop" / "file", tmp_path / "loop"):
        with pytest.raises(CannotWrite, match="cannot be written"):
            write_output(path, "text", Kind("report", lambda _: True))
    assert [p.name for p in tmp_path.iterdir()] == ["loop"]


def test_a_sealed_text_is_recognized_to_the_last_byte(tmp_path: Path) -> None:
    path = tmp_path / "r.md"
    written = sealed("# Report\n\nAll is well.\n")
    for text, ours in (
        (written, True),
        (written + "\n", False),
        (written.replace("well", "bad"), False),
        (" " + written, False),
        (written.replace("\n", "\r\n"), False),
        (written.splitlines()[-1] + "\n", False),
        (sealed(""), True),
        ("", False),
    ):
        path.write_bytes(text.encode())
        assert is_sealed(path) == ours, text


def test_a_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "private"
    path.write_text("old")
    path.chmod(0o600)
    write_whole(path, "new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o600
