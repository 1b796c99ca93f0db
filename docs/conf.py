"""How Sphinx builds the site (`make site`), of the whole repository, so that links need no rewriting."""

import html
import re
from typing import Any

from sphinx.util import logging

import jzero

project = "jzero"
author = "the jzero authors"
version = release = jzero.__version__
html_title = "jzero"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
root_doc = "README"
include_patterns = [
    "README.md",
    "docs/**.md",
    "examples/README.md",
    "experiments/**/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "tests/golden/README.md",
]
exclude_patterns = [".*"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# In docstrings, `x` is code. What follows `::` is a sketch: highlighted as Python, its words would have the
# colours of keywords. Examples begin with `>>>`, and blocks of pages name their language.
default_role = "literal"
highlight_language = "text"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_use_ivar = True
napoleon_custom_sections = ["Reference"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "pydata_sphinx_theme"
html_additional_pages = {"index": "to_readme.html"}
templates_path = ["templates"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {
    "logo": {"text": "jzero"},
    "show_prev_next": False,
    "navigation_with_keys": False,
    # Not where code is wide: examples of docstrings, two programs side by side, a terminal.
    "secondary_sidebar_items": dict.fromkeys(
        (
            "README",
            "docs/guide/**",
            "docs/design",
            "docs/facts",
            "docs/from-deepspeed",
            "docs/performance",
            "docs/systems",
            "docs/what-is-missing",
            "experiments/**",
        ),
        ["page-toc"],
    ),  # fmt: skip
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_sidebars = {"docs/systems": []}  # It has no pages below it, and so nothing to list.
html_copy_source = False
html_show_sphinx = False

# These pages have no directives, so that they read as well elsewhere. On the site the README is the first
# page, and its sections `### In ...` are tabs.
CONTENTS = {
    root_doc: """

```{toctree}
:hidden:

Guide <docs/guide/index>
Migrating <docs/migrate/index>
Reference <docs/reference/index>
How it works <docs/design>
Measurements <docs/performance>
Papers <docs/systems>
```
""",
    "CONTRIBUTING": """

```{toctree}
:hidden:

tests/golden/README
```
""",
}


def setup(app: Any) -> None:
    app.connect("source-read", _add_contents)
    app.connect("html-page-context", _check_page)
    app.connect("html-page-context", _break_code)


def _add_contents(app: Any, page: str, source: list[str]) -> None:
    if page == root_doc:
        source[0] = _with_tabs(source[0])
    source[0] += CONTENTS.get(page, "")


def _with_tabs(page: str) -> str:
    before, *sections = re.split(r"^### In (.+)\n", page, flags=re.MULTILINE)
    sections[-1], end, after = sections[-1].partition("\n## ")
    tabs = [
        f"::::{{tab-item}} {title}\n{text}\n::::\n"
        for title, text in zip(sections[::2], sections[1::2], strict=True)
    ]
    return f"{before}:::::{{tab-set}}\n{''.join(tabs)}:::::\n{end}{after}"


# What `site.css` and the theme need to show a page on a phone, and readers who do not see its pictures.
SCROLLS = r'<div class="pst-scrollable-table-container">\s*<table'


def _check_page(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Warns, which fails the build, of a table that would make a page wider than its window, and the like."""
    body = context.get("body", "")
    found = {
        "a table in no box that scrolls": len(re.findall("<table", body))
        - len(re.findall(SCROLLS, body)),
        "a picture without alt text": len(re.findall(r'<img(?![^>]* alt="[^"]+")', body)),
        "a sketch in the colours of Python": len(re.findall('<div class="highlight-default', body)),
        "other than two tabs": page == root_doc and body.count('"sd-tab-label"') != 2,
        "no site.css": not any("site.css" in str(file) for file in context["css_files"]),
    }
    for what, times in found.items():
        if times:
            logging.getLogger(__name__).warning(what, location=page)


def _break_code(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Lets code between words break where a reader would break it, and short names not at all."""

    def broken(match: re.Match[str]) -> str:
        code = match[1]
        if len(html.unescape(code)) <= 18:
            return f'<span class="pre short">{code}<'
        code = re.sub("([(=/_.])(?=[^)=._])", r"\1<wbr>", code)
        return f'<span class="pre">{code}<'

    if "body" in context:
        context["body"] = re.sub(r'<span class="pre">([^<]+)<', broken, context["body"])
