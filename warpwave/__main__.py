"""`python -m warpwave`: the same commands as `warpwave`."""

from warpwave.cli import command

command()
