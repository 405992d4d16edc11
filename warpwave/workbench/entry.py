"""The entry point of the command `warpwave`. It also runs where torch or the packages of the extra `workbench` are
missing, and names the missing package.

The library and `warpwave.explain` need none of the extra's packages. The command needs typer, its tables need rich, and
the report needs jinja2. `doctor` runs without torch.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from warpwave.workbench.terminal import complain

REQUIRED = ("jinja2", "numpy", "rich", "torch", "typer")
INSTALL = "pip install 'warpwave[workbench]'"


def command() -> NoReturn:
    """Runs the command with the arguments of `sys.argv`; exit code 2 if a required package is missing."""
    try:
        from warpwave.workbench.cli import command as run
    except ModuleNotFoundError as error:
        if not is_required(error):
            raise
        complain(what_to_install(error))
        sys.exit(2)
    run()


def is_required(error: ModuleNotFoundError) -> bool:
    """Returns whether the missing module is torch or belongs to the extra `workbench`."""
    return (error.name or "").split(".")[0] in REQUIRED


def what_to_install(error: ModuleNotFoundError) -> str:
    """Returns one sentence that names the missing package and the command that installs it."""
    package = (error.name or "").split(".")[0]
    return f"the command needs {package}, which is not installed; run {INSTALL}"
