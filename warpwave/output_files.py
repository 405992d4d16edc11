"""Files that commands write: what may be written over, and how nobody ever reads half of one."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from warpwave.errors import InvalidInput


class CannotWrite(InvalidInput):
    """A file that cannot be written, or must not be. The message says why and what to do."""


def check_output(path: Path, *, is_ours: Callable[[Path], bool], what: str) -> None:
    """Says before a long run what writing would say after it.

    Args:
        path: the file.
        is_ours: whether a file that is there may be replaced, or appended to.
        what: what such a file is called, as in "report of warpwave".

    Raises:
        CannotWrite: nothing can be written there, or something else is there.
    """
    if path.is_dir():
        raise CannotWrite(f"{path} is a directory; name a file in it")
    if path.exists() and not path.is_file():  # a device or a pipe: a rename would put a file in its place
        raise CannotWrite(f"{path} is no regular file; name another")
    if path.exists() and not is_ours(path):
        raise CannotWrite(f"{path} is there already and is no {what}; name another file, or remove it")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise CannotWrite(f"{path} cannot be written: there is no directory {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CannotWrite(f"{path} cannot be written: no permission to write in {folder}; name another file")


def write_whole(path: Path, text: str, *, replace: bool = True) -> None:
    """Writes a file whole or not at all: another is written beside it and takes its name.

    Args:
        path: the file; of a link, the file it stands for.
        text: its content, written as UTF-8.
        replace: whether a file that is there is replaced.

    Raises:
        FileExistsError: it is there and is not to be replaced.
        OSError: it cannot be written.
    """
    target = path.resolve()
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        part.write_text(text, encoding="utf-8")
        if replace:
            os.replace(part, target)
        else:
            os.link(part, target)  # which, unlike a rename, fails where somebody else was faster
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
