"""Somebody's table of measurements, diagnosed by arithmetic alone: `warpwave explain --from-table FILE`.

`parse` reads the file, `facts` works out what each row computes and moves, `rules` and `claims` find what follows from
it, `text` prints. No GPU is touched, no kernel of ours is asked, no rule knows a file. docs/tables.md has the format.
"""
