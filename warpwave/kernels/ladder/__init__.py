"""The first rungs of the teaching ladder, with scores in memory (docs/kernels/ladder.md)."""
