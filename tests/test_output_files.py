"""What commands write over, and what they leave alone."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from warpwave.output_files import CannotWrite, check_output, write_whole


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
        check_output(pipe, is_ours=lambda _: pytest.fail("reading it would never end"), what="report")


def test_somebody_elses_file_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "thesis").touch()
    with pytest.raises(CannotWrite, match="is there already and is no report of ours; name another file"):
        check_output(tmp_path / "thesis", is_ours=lambda _: False, what="report of ours")
    with pytest.raises(CannotWrite, match="is a directory"):
        check_output(tmp_path, is_ours=lambda _: True, what="report")
    with pytest.raises(CannotWrite, match=re.escape(f"there is no directory {tmp_path / 'none'}")):
        check_output(tmp_path / "none" / "file", is_ours=lambda _: True, what="report")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis"]
