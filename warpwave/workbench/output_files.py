"""Files that commands write: what may be written over, and how nobody ever reads half of one.

A command replaces or extends only what it wrote itself. It recognizes such a file by its structure: a record by its
first line, ceilings by their schema, a report by its last line, which holds a digest of everything above it. A file
that quotes one of ours is not ours, and neither is a report that somebody has edited.
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
    """A file that cannot be written, or must not be. The message says why and what to do."""


@dataclass(frozen=True)
class Kind:
    """A kind of file that a command writes.

    Attributes:
        what: what such a file is called, as in "report of warpwave".
        is_ours: whether the command wrote a file that is there, so that it may be replaced or extended.
    """

    what: str
    is_ours: Callable[[Path], bool]


def check_output(path: Path, kind: Kind) -> None:
    """Says before a long run what writing would say after it. An empty file is nobody's, and may be replaced.

    Raises:
        CannotWrite: nothing can be written there, or something else is there.
    """
    try:
        if path.is_dir():
            raise CannotWrite(f"{path} is a directory; name a file in it")
        if path.exists() and not path.is_file():  # a device or a pipe: a rename would put a file in its place
            raise CannotWrite(f"{path} is no regular file; name another")
        if path.exists() and path.stat().st_size and not kind.is_ours(path):
            raise CannotWrite(f"{path} is there already and is no {kind.what}; name another file, or remove it")
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
        CannotWrite: both names are of one file.
    """
    if _target(a) == _target(b) or (a.exists() and b.exists() and a.samefile(b)):
        raise CannotWrite(f"{a} and {b} are one file; name two")


def write_output(path: Path, text: str, kind: Kind, *, replace: bool = True) -> None:
    """Writes a file whole or not at all, over nothing but a file of its kind.

    Raises:
        CannotWrite: it cannot be written, something else is there, or it is there and is not to be replaced.
    """
    check_output(path, kind)
    try:
        write_whole(path, text, replace=replace)
    except FileExistsError:
        raise CannotWrite(f"{path} is there already; name another file, or remove it") from None
    except OSError as error:
        raise _cannot(path, error) from None


def write_whole(path: Path, text: str, *, replace: bool = True) -> None:
    """Writes a file whole or not at all: another is written beside it and takes its name.

    Args:
        path: the file; of a link, the file it stands for.
        text: its content, written as UTF-8.
        replace: whether a file that is there is replaced. It keeps its permissions.

    Raises:
        FileExistsError: it is there and is not to be replaced.
        OSError: it cannot be written.
    """
    target = _target(path)
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        part.write_bytes(text.encode())
        if not replace:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))  # fails where somebody else was faster
        elif target.exists():
            shutil.copymode(target, part)
        os.replace(part, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


def _target(path: Path) -> Path:
    """The file that a path stands for, links followed."""
    return Path(os.path.realpath(path))


def _cannot(path: Path, error: OSError) -> CannotWrite:
    return CannotWrite(f"{path} cannot be written: {error.strerror or error}")


# Sealed texts ---------------------------------------------------------------------------------------------------------


def sealed(text: str) -> str:
    """A text of HTML or Markdown, whole lines, with a last line by which `is_sealed` recognizes it."""
    return text + SEAL.format(hashlib.sha256(text.encode()).hexdigest())


def is_sealed(path: Path) -> bool:
    """Whether a file is a sealed text as it was written, to the last byte."""
    with path.open("rb") as file:
        content = file.read(LARGEST_BYTES)
    found = _SEALED.search(content)
    return found is not None and hashlib.sha256(content[: found.start()]).hexdigest() == found[1].decode()
