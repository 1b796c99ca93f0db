"""docs/claims.md: every sentence of the README has a test or a result that is there."""

import pathlib
import re
import runpy

import pytest

pytestmark = pytest.mark.one_release

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "docs" / "claims.py"))
PAGE = """\
# A title

**One line.** It has [a link](a.md), e.g. this one, and
goes on. jzero does 3 things! `that` too?

```sh
make train    # trains
make test
```

| what | how |
| --- | --- |
| a row | [a cell](x.md) |

![A picture](a.png)

```python
import this

x = 1
```
"""
SENTENCES = ["One line.", "It has a link, e.g. this one, and goes on.", "jzero does 3 things!", "`that` too?",
             "make train # trains", "make test", "a row | a cell", "A picture",
             "The code from `import this` on."]  # fmt: skip


def test_the_page_is_what_its_script_writes():
    """Which it does only if entries and README fit together, and all that they name is there."""
    page = SCRIPT["page"]()
    assert (ROOT / "docs" / "claims.md").read_text() == page, "run `python docs/claims.py`"


def test_sentences_are_found_wherever_they_stand():
    assert SCRIPT["sentences"](PAGE) == SENTENCES


def test_no_letter_of_the_readme_is_lost():
    """Headings, the heads of tables, links' targets and code but for its first lines are what is left out."""
    readme = (ROOT / "README.md").read_text()
    found = " ".join(SCRIPT["sentences"](readme))
    lines = re.sub(r"^```.*?^```", "", readme, flags=re.DOTALL | re.MULTILINE).splitlines()
    prose = SCRIPT["plain"](" ".join(line for line in lines if not line.startswith(("#", "|"))))
    assert len(prose) > 1000
    assert [word for word in prose.split() if word not in found] == []


@pytest.mark.parametrize(
    ("readme", "held", "fault"),
    [
        (["A."], {}, "no entry for 'A.'"),
        ([], {"B.": ["README.md"]}, "the README no longer says 'B.'"),
        (["A."], {"A.": []}, "nothing holds 'A.'"),
        (["A."], {"A.": ["tests/none"]}, "there is no 'tests/none'"),
        (["A."], {"A.": ["tests/test_docs.py::test_none"]}, "there is no 'tests/test_docs.py::test_none'"),
        (["A."], {"A.": ["Read: here"]}, "there is no 'Read: here'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(readme, held, fault):
    assert SCRIPT["faults"](readme, held) == [fault]


def test_what_fits_is_no_fault():
    held = [
        "tests/test_docs.py::test_lines_are_short",
        "LICENSE",
        "Read: the documentation of others",
    ]
    assert SCRIPT["faults"](["A."], {"A.": held}) == []
