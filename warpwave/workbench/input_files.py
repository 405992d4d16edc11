"""Reads files of text, JSON and TOML. Every reader of the workbench uses these functions, and then checks the data with
a schema (`warpwave.workbench.schema`).

No file is trusted: its size and its nesting are bounded before its data is used, and every fault raises `Unreadable`
with a one-sentence message.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

LARGEST_BYTES = 64 << 20  # a year of measurements is a tenth of it; /dev/zero never ends
DEEPEST = 20  # nesting of lists and tables; our formats need at most 6


class Unreadable(ValueError):
    """A file or a line is invalid. The message is a sentence, or the end of one that begins with the file's name."""


def read_bytes(path: Path) -> bytes:
    """Returns the bytes of a file.

    Raises:
        Unreadable: the file does not exist, or is too large.
    """
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror or error}") from None
    if len(content) > LARGEST_BYTES:
        raise Unreadable(f"{path} is larger than {LARGEST_BYTES >> 20} MiB, which no file of this kind is")
    return content


def read_text(path: Path) -> str:
    """Returns the text of a file.

    Raises:
        Unreadable: the file does not exist, is too large, or is not UTF-8.
    """
    content = read_bytes(path)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"{path} is no UTF-8 text: byte {error.start:,} is {content[error.start]:#04x}") from None


def read_json(path: Path) -> Any:
    """Returns the data of a JSON file.

    Raises:
        Unreadable: the file cannot be read, or is not JSON.
    """
    return _named(path, parse_json, read_text(path))


def read_toml(path: Path) -> Any:
    """Returns the data of a TOML file.

    Raises:
        Unreadable: the file cannot be read, or is not TOML.
    """
    return _named(path, parse_toml, read_text(path))


def _named(path: Path, parse: Any, text: str) -> Any:
    try:
        return parse(text)
    except Unreadable as error:
        raise Unreadable(f"{path} is {error}") from None


def parse_json(text: str) -> Any:
    """Returns the data of a JSON text.

    Raises:
        Unreadable: the text is not JSON, or nested too deeply.
    """
    return _parsed("JSON", json.loads, text)


def parse_toml(text: str) -> Any:
    """Returns the data of a TOML text.

    Raises:
        Unreadable: the text is not TOML, or nested too deeply.
    """
    return _parsed("TOML", tomllib.loads, text)


_TOO_DEEP = f"nested more than {DEEPEST} deep"


def _parsed(what: str, loads: Callable[[str], Any], text: str) -> Any:
    try:
        data = loads(text)
    except RecursionError:
        raise Unreadable(_TOO_DEEP) from None
    except ValueError as error:
        raise Unreadable(f"not {what}: {error}") from None
    _check_depth(data)
    return data


def _check_depth(data: Any) -> None:
    level = [data]
    for _ in range(DEEPEST + 1):
        level = [child for item in level if isinstance(item, dict | list) for child in _children(item)]
        if not level:
            return
    raise Unreadable(_TOO_DEEP)


def _children(item: dict[str, Any] | list[Any]) -> Any:
    return item.values() if isinstance(item, dict) else item
