"""Somebody's table of measurements, diagnosed by arithmetic alone: `warpwave explain --from-table FILE`.

`parse` reads the file, `facts` works out what each row computes and moves, `rules` and `claims` find what follows from
it, `text` prints. It uses no GPU and none of our kernels, and no rule is about one file.
docs/workbench/diagnose.md describes the format.
"""
