"""A kernel family by name, imported at its first use."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class Family:
    """Stands for the module of a kernel family: every attribute but `NAME` imports the module.

    Importing all families takes 0.3 s, most of which Triton spends on the sources of device functions. A call uses two
    or three families.

    Args:
        name: the `NAME` of the module.
        place: where the module is in this folder, if its name does not state it.
    """

    def __init__(self, name: str, place: str = "") -> None:
        self.NAME = name
        self._place = place or name.replace("/", ".")
        self._module: ModuleType | None = None

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:
            self._module = importlib.import_module(f".{self._place}", __package__)
            self.__dict__.update(vars(self._module))  # so that later uses do not come here
        return getattr(self._module, attribute)

    def __repr__(self) -> str:
        return f"Family({self.NAME!r})"
