"""How Sphinx builds the site: `make docs`.

The sources are the pages as they lie in the repository, so that a link leads somewhere there and on the site.
`reference.py` writes the pages that are made from the code, and `outputs.py` keeps what the notebooks have shown.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

from ring_notebook import __version__

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import outputs  # noqa: E402
import reference  # noqa: E402

project = "Ring Notebook"
copyright = "2026, Ring Notebook developers"
author = "Ring Notebook developers"
version = release = __version__
root_doc = "docs/index"
include_patterns = ["docs/**.md", "notebooks/**.ipynb", "benchmarks/README.md", "*.md"]
exclude_patterns = ["README.md", ".*", "build", "native", "ring_notebook", "tests", "**/.ipynb_checkpoints"]
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_llms_txt",
    "sphinx-mathjax-offline",
]

nb_execution_mode = "off"
suppress_warnings = ["misc.highlighting_failure"]  # cells with lines of the shell (!ls) are not Python
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
default_role = "py:obj"

autodoc_typehints = "signature"
autodoc_mock_imports = ["distributed", "pyspark", "ray"]
autodoc_member_order = "alphabetical"
autodoc_default_options = {"members": True, "imported-members": True, "show-inheritance": False}

html_theme = "pydata_sphinx_theme"
html_title = f"Ring Notebook {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(HERE / "static" / "scorer.js")
html_extra_path = ["root"]
html_show_sourcelink = False
html_theme_options = {
    "navigation_with_keys": False,
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "navbar_end": ["theme-switcher"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
copybutton_exclude = ".linenos, .gp"
llms_txt_description = "Distributed training from a notebook cell: %%ringtrain, ringrun, and Horovod's functions."


def as_rst(_app: Sphinx, _kind: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Docstrings are written for editors: lists of ``name: what it is`` become fields, and indented blocks code."""
    written: list[str] = []
    for block in "\n".join(lines).strip("\n").split("\n\n"):
        block_lines = block.split("\n")
        if all(line.startswith("    ") for line in block_lines):
            written += [] if any(line.endswith("::") for line in written[-2:]) else [".. code-block:: python", ""]
        else:
            if all(re.match(r"[\w, ]+: |    ", line) for line in block_lines):
                block_lines = [line if line.startswith(" ") else f":{line}" for line in block_lines]
            # A bar outside of literals begins a substitution.
            block_lines = [re.sub(r"``.*?``|(\|)", lambda it: r"\|" if it[1] else it[0], line) for line in block_lines]
        written += [*block_lines, ""]
    lines[:] = written


def setup(app: Sphinx) -> None:
    """Sphinx calls it before it reads a page."""
    reference.write()
    outputs.write_vega(HERE / "static")
    app.connect("source-read", outputs.add)
    app.connect("autodoc-process-docstring", as_rst)
