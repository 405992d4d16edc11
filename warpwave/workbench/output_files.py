"""Writes the files of commands: never over a foreign file, and never in part.

A command replaces or extends only files that it wrote. It recognizes such a file by its structure: a record by its
first line, ceilings by their schema, a report by its last line, which holds a digest of everything above it. A file
that merely quotes one of these, or a report that was edited, is treated as foreign.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from warpwave.errors import InvalidInput
from warpwave.workbench.input_files import LARGEST_BYTES

SEAL = "<!-- Written by warpwave. SHA-256 of the text above: {} -->\n"  # a comment in HTML and in Markdown
_SEALED = re.compile("([0-9a-f]{64})".join(map(re.escape, SEAL.split("{}"))).encode() + rb"\Z")


class CannotWrite(InvalidInput):
    """A file cannot be written, or must not be overwritten. The message gives the reason and the next step."""


@dataclass(frozen=True)
class Kind:
    """A kind of file that a command writes.

    Attributes:
        what: its name in messages, as in "report of warpwave".
        is_ours: whether the command wrote an existing file, so that the file may be replaced or extended.
    """

    what: str
    is_ours: Callable[[Path], bool]


def check_output(path: Path, kind: Kind) -> None:
    """Checks before a long run that its output can be written. An empty file may be replaced.

    Raises:
        CannotWrite: the path is `-` or cannot be written, or holds a file of another kind.
    """
    if path == Path("-"):  # many programs, and options that handle it before this check, take it for standard output
        raise CannotWrite("- is not the name of a file, and this output cannot be standard output; name a file")
    try:
        if path.is_dir():
            raise CannotWrite(f"{path} is a directory; name a file in it")
        if path.exists() and not path.is_file():  # a device or a pipe: a rename would put a file in its place
            raise CannotWrite(f"{path} is no regular file; name another")
        if path.exists() and path.stat().st_size and not kind.is_ours(path):
            raise CannotWrite(f"{path} already exists and is not a {kind.what}; name another file, or remove it")
        target = _target(path)
        folder = target.parent
        if target.is_symlink():
            raise CannotWrite(f"{path} cannot be written: it is a link that leads back to itself")
        if not folder.is_dir():
            raise CannotWrite(f"{path} cannot be written: there is no directory {folder}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise CannotWrite(f"{path} cannot be written: no permission to write in {folder}; name another file")
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise _cannot(path, error) from None


def check_different(a: Path, b: Path) -> None:
    """Refuses two outputs that would replace each other.

    Raises:
        CannotWrite: both paths lead to the same file.
    """
    if _target(a) == _target(b) or (a.exists() and b.exists() and a.samefile(b)):
        raise CannotWrite(f"{a} and {b} are one file; name two")


def write_output(path: Path, text: str, kind: Kind, *, replace: bool = True) -> None:
    """Writes a file atomically, and replaces only a file of the same kind.

    Raises:
        CannotWrite: the file cannot be written, is of another kind, or exists and `replace` is false.
    """
    check_output(path, kind)
    try:
        write_whole(path, text, replace=replace)
    except FileExistsError:
        raise CannotWrite(f"{path} already exists; name another file, or remove it") from None
    except OSError as error:
        raise _cannot(path, error) from None


def write_whole(path: Path, text: str, *, replace: bool = True) -> None:
    """Writes a file atomically: a temporary file is written beside it and renamed.

    Args:
        path: the file; for a link, its target is written.
        text: its content, written as UTF-8.
        replace: whether an existing file is replaced. It keeps its permissions.

    Raises:
        FileExistsError: the file exists and `replace` is false.
        OSError: the file cannot be written.
    """
    target = _target(path)
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        part.write_bytes(text.encode())
        if not replace:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))  # fails if another process was faster
        elif target.exists():
            shutil.copymode(target, part)
        os.replace(part, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


def _target(path: Path) -> Path:
    """Returns the path with links resolved."""
    return Path(os.path.realpath(path))


def _cannot(path: Path, error: OSError) -> CannotWrite:
    return CannotWrite(f"{path} cannot be written: {error.strerror or error}")


# Sealed texts ---------------------------------------------------------------------------------------------------------


def sealed(text: str) -> str:
    """Returns a text of whole lines, HTML or Markdown, with a last line by which `is_sealed` recognizes it."""
    return text + SEAL.format(hashlib.sha256(text.encode()).hexdigest())


def is_sealed(path: Path) -> bool:
    """Returns whether a file is a sealed text, unchanged to the last byte."""
    with path.open("rb") as file:
        content = file.read(LARGEST_BYTES)
    found = _SEALED.search(content)
    return found is not None and hashlib.sha256(content[: found.start()]).hexdigest() == found[1].decode()
