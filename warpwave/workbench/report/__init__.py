"""Records as a page: `warpwave report RECORD...`, and the last step of `warpwave demo`.

    records -> machines.py   groups runs by machine
            -> bounds.py     the bounds of each case on its machine
            -> verdicts.py   the verdict of each case, as a word and as a sentence
            -> content.py    every fact of the report as plain data
            -> page.py       one HTML file (template.html, style.css, plots.py); markdown.py: the same facts as Markdown

Both renderings use the same facts, and each fact follows from the records. Nothing is measured here.

training.py draws the loss curves of training runs on another page; examples and studies call it.
"""
