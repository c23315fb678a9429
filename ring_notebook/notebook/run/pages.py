"""The runs of a folder as pages for any web server: a list, and the report of each, without scripts."""

from __future__ import annotations

import sys
from dataclasses import replace
from html import escape
from pathlib import Path
from urllib.parse import quote

from ring_notebook.errors import RingError
from ring_notebook.files.private_files import replace_text
from ring_notebook.notebook.panel.report import mime_bundle
from ring_notebook.notebook.run import catalogue
from ring_notebook.text.words import plural

_INDEX = "index.html"
_OURS = "<meta name=generator content='Ring Notebook'>"
# Displays of ranks may have scripts and load remote content: the policy of a page forbids both.
_HEAD = f"""<!doctype html><html lang=en><meta charset=utf-8>{_OURS}
<meta http-equiv=Content-Security-Policy content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name=viewport content="width=device-width"><title>TITLE</title>
<style>:root{{color-scheme:light dark}}body{{font:14px system-ui,sans-serif;margin:12px}}</style>
"""


def write_pages(folder: Path, *, every: bool = False) -> str:
    """Write a list of the runs of this folder and the report of each to ``folder``, made where it is not there.

    Earlier pages there are replaced; pages of deleted runs stay. Short cells that logged nothing are left out without
    ``every``. Returns a line that says where. Raises RingError if ``folder`` has a foreign index.html, and OSError.
    """
    index = folder / _INDEX
    if index.exists() and _OURS not in index.read_text(errors="replace"):
        raise RingError(f"{index} was not written by `%ring runs page`; give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    listed = catalogue.listing(sys.maxsize, every=every)
    at = listed.columns.index("run")
    ids, named = [row[at] for row in listed.rows], listed.pictures["name"]
    links = [f"<a href='{quote(run)}.html'>{name}</a>" for run, name in zip(ids, named, strict=True)]
    for run in ids:
        record = catalogue.find(run)
        back = f"<p><a href='{_INDEX}'>All runs</a></p>"
        page = _page(record.title, back + mime_bundle(record, displays=True)["text/html"])
        replace_text(folder / f"{run}.html", page, private=False)
    page = _page("Runs", replace(listed, pictures={**listed.pictures, "name": links})._repr_html_())
    replace_text(index, page, private=False)
    return f"Wrote {plural(len(ids), 'run')} to {index.absolute()}; the folder can be hosted as it is."


def _page(title: str, body: str) -> str:
    return _HEAD.replace("TITLE", escape(title)) + body
