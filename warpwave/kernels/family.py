"""A kernel family by name, imported at its first use."""

from __future__ import annotations

import importlib
from typing import Any


class Family:
    """Stands for the module of a kernel family: every public attribute but `NAME` imports the module.

    Importing all families takes 0.3 s, most of which Triton spends on the sources of device functions. A call uses two
    or three families.

    Args:
        name: the `NAME` of the module.
        place: where the module is in this folder, if its name does not state it.
    """

    def __init__(self, name: str, place: str = "") -> None:
        self.NAME = name
        self.__name__ = f"{__package__}.{place or name.replace('/', '.')}"

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # attributes that inspection reads of any object
            raise AttributeError(attribute)
        module = importlib.import_module(self.__name__)
        found = self.__dict__[attribute] = getattr(module, attribute)  # later uses do not come here
        return found

    def __repr__(self) -> str:
        return f"Family({self.NAME!r})"
