"""The entry point of the command `warpwave`. It also runs where the packages of the extra `workbench` are missing.

The library and `warpwave.explain` need none of these packages. The command needs typer, its tables need rich, and the
report needs jinja2.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from warpwave.workbench.terminal import complain

EXTRA = ("jinja2", "numpy", "rich", "typer")
INSTALL = "pip install 'warpwave[workbench]'"


def command() -> NoReturn:
    """Runs the command with the arguments of `sys.argv`; exit code 2 if a package of the extra is missing."""
    try:
        from warpwave.workbench.cli import command as run
    except ModuleNotFoundError as error:
        if not is_of_the_extra(error):
            raise
        complain(what_to_install(error))
        sys.exit(2)
    run()


def is_of_the_extra(error: ModuleNotFoundError) -> bool:
    """Returns whether the missing module belongs to the extra `workbench`."""
    return (error.name or "").split(".")[0] in EXTRA


def what_to_install(error: ModuleNotFoundError) -> str:
    """Returns one sentence that names the missing package and the command that installs it."""
    package = (error.name or "").split(".")[0]
    return f"the command needs {package}, which is not installed; run {INSTALL}"
