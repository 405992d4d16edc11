"""A hook of mkdocs.yml: links from a page to files of the repository outside docs/ become the file's path.

Pages link to records and source files by relative paths, which work in the repository and on its web page. The site has
no copy of these files, so there the path stands behind the link's text. A path without a file is a warning, and so an
error of `make docs`.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.plugins.site_links")

LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>\.\.?/[^)\s#]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Returns the page with each link to a file outside of docs/ replaced by its text and the file's path."""
    docs = Path(config["docs_dir"]).resolve()
    source = Path(page.file.abs_src_path)

    def shown(link: re.Match[str]) -> str:
        target = (source.parent / link["target"]).resolve()
        if target.is_relative_to(docs):
            return link[0]
        if not target.exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, link["target"])
        path = target.relative_to(docs.parent).as_posix()
        return link["text"] if link["text"].strip("`").endswith(path) else f"{link['text']} (`{path}`)"

    return LINK.sub(shown, markdown)
