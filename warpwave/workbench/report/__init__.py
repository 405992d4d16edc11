"""What a record says, as a page to read: `warpwave report RECORD...`, and the end of `warpwave demo`.

    records -> machines.py   runs of one machine together, machines apart
            -> bounds.py     how fast each case could be there
            -> verdicts.py   what came of each case, in a word and a sentence
            -> content.py    every fact of the report as plain data
            -> page.py       one HTML file (template.html, style.css, plots.py); markdown.py: the same facts as Markdown

Both renderings read the same facts, and each fact follows from the record. Nothing is measured here.
"""
