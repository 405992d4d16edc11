"""`python -m warpwave`: the same commands as `warpwave`."""

from warpwave.workbench.cli import command

command()
