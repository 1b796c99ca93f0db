"""How Sphinx builds the site (`make site`), of the whole repository, so that links need no rewriting."""

from typing import Any

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
]
exclude_patterns = [".*"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# In docstrings, `x` is code.
default_role = "literal"
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
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_copy_source = False
html_show_sphinx = False

# The README has no directives, so that it reads as well elsewhere; on the site it is the first page.
CONTENTS = """

```{toctree}
:hidden:

Guide <docs/guide/index>
Coming from elsewhere <docs/migrate/index>
Reference <docs/reference/index>
The papers <docs/systems>
Measured <docs/performance>
How it works <docs/design>
```
"""


def setup(app: Any) -> None:
    app.connect("source-read", _add_contents)


def _add_contents(app: Any, page: str, source: list[str]) -> None:
    if page == root_doc:
        source[0] += CONTENTS
