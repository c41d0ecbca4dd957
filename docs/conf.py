"""Sphinx's settings for these pages: Markdown by MyST, the API from the docstrings."""

import inspect
import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).parents[1]
# `models` and `train` run from the checkout and are not installed.
sys.path.insert(0, str(ROOT))

from models.llama import Llama  # noqa: E402
from pallas_kernels.layers import AddRMSNorm, LinearCrossEntropy, RMSNorm, SwiGLU  # noqa: E402

project = "pallas_kernels"
author = "the authors of pallas_kernels"
copyright = f"{author}; Apache-2.0"
html_title = "pallas_kernels"
html_theme = "sphinx_book_theme"
html_theme_options = {"show_navbar_depth": 1, "show_toc_level": 2, "use_download_button": False}
html_static_path = ["_static"]
html_show_sourcelink = False
exclude_patterns = ["_build"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["dollarmath"]
# A link to a heading, as a code-hosting site makes it: `page.md#heading`.
myst_heading_anchors = 4

# The types stand with the arguments' descriptions, so that signatures stay short.
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# Docstrings put code into single backticks, as Markdown does.
default_role = "code"


class LinksOutOfTheDocs(SphinxTransform):
    """Links to the repository's other files become downloads; those to its folders, plain text.

    MyST takes a Markdown file that lies outside of `docs` for a page that is missing. On a
    code-hosting site the same links open the files and folders.
    """

    default_priority = 5

    def apply(self, **kwargs: object) -> None:
        """Replaces the links of one page."""
        folder = Path(self.env.doc2path(self.env.docname)).parent
        for link in list(self.document.findall(addnodes.pending_xref)):
            if link.get("reftype") != "myst":
                continue
            target = link["reftarget"].split("#")[0]
            # MyST names a Markdown file by its whole path, without the suffix.
            found = Path(f"{target}.md") if link.get("refdomain") == "doc" else folder / target
            found = found.resolve()
            if not target or found.is_relative_to(ROOT / "docs") or not found.exists():
                continue
            text = [child.deepcopy() for child in link.children]
            if found.is_dir():
                link.replace_self(nodes.inline("", "", *text))
                continue
            path = Path(*[".."] * len(folder.relative_to(ROOT).parts), found.relative_to(ROOT))
            download = addnodes.download_reference(
                "", "", *text, refdoc=self.env.docname, reftarget=str(path), reftype="myst"
            )
            link.replace_self(download)


def _restructure(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Makes reStructuredText of the Markdown that docstrings use.

    Code in backticks may have letters after it, such as a plural's. A table, which ends at an empty
    line, becomes a block of text as it stands.
    """
    restructured: list[str] = []
    in_table = False
    for line in lines:
        if not in_table and line.lstrip().startswith("|"):
            in_table = True
            indent = line[: len(line) - len(line.lstrip())]
            restructured += [f"{indent}::", ""]
        in_table = in_table and bool(line.strip())
        as_it_stands = f"    {line}" if in_table else re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", line)
        restructured.append(as_it_stands)
    lines[:] = [*restructured, ""]


# Their metaclass has the signature `(*args, **kwargs)`, which autodoc would take.
for layer in (AddRMSNorm, LinearCrossEntropy, Llama, RMSNorm, SwiGLU):
    _self, *parameters = inspect.signature(layer.__init__).parameters.values()
    layer.__signature__ = inspect.Signature(parameters)


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this when it reads the settings."""
    app.add_transform(LinksOutOfTheDocs)
    # Before napoleon, which has the default priority of 500.
    app.connect("autodoc-process-docstring", _restructure, priority=400)
    return {"parallel_read_safe": True}
