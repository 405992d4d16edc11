"""`python -m warpwave`: the same commands as `warpwave`."""

from warpwave.workbench.entry import command

command()
