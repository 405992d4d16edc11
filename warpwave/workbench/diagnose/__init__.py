"""Diagnoses a table of measurements by arithmetic alone: `warpwave explain --from-table FILE`.

`parse` reads the file, `facts` computes the work and bytes of each row, `rules` and `claims` derive findings from them,
and `text` prints. No GPU and no kernel is used, and no rule is specific to one file.
docs/workbench/diagnose.md describes the format.
"""
