"""Draws the picture of design.md, as SVG for light and dark pages alike.

python docs/pictures/draw.py
"""

import pathlib
from collections.abc import Iterable, Sequence

FOLDER = pathlib.Path(__file__).parent
WIDTH = 700
DEVICES = 4
CELL, PITCH = 14, 16  # of the squares of a block
BLOCK = PITCH * DEVICES - (PITCH - CELL)
COLUMNS = (46, 216, 386, 556)  # where blocks begin

# By class: the attribute, and its colour on light and on dark pages.
COLOURS = {
    "page": ("fill", "#ffffff", "#0d1117"),
    "ink": ("fill", "#1f2328", "#e6edf3"),
    "faint": ("fill", "#59636e", "#9198a1"),
    "line": ("stroke", "#59636e", "#9198a1"),
    "edge": ("stroke", "#d1d9e0", "#3d444d"),
    "parameter": ("fill", "#2f6fde", "#6ea8fe"),
    "gradient": ("fill", "#c65d00", "#f0a050"),
    "moments": ("fill", "#2e8b57", "#63c68b"),
}
STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 13px }
.small { font-size: 12px }
.title { font-size: 15px; font-weight: 600 }
.middle { text-anchor: middle }
.edge, .line { fill: none }
"""
ARROW_HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M 0 0 L 8 4 L 0 8 z" class="faint"/></marker>'
)
STRIPES = (
    '<pattern id="stripes" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="2.2" height="4" class="gradient"/></pattern>'
)


def picture(title: str, height: int, parts: Iterable[str]) -> str:
    """A whole SVG file, on a page of its own colour."""
    page = f'<rect x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="8" class="page edge"/>'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img">',
        f"<title>{title}</title>",
        f"<style>{STYLE}{colours(1)}\n@media (prefers-color-scheme: dark) {{\n{colours(2)}\n}}\n</style>",
        f"<defs>{ARROW_HEAD}{STRIPES}</defs>",
        page, *parts, "</svg>\n",
    ])  # fmt: skip


def colours(page: int) -> str:
    """The rules of all classes; of light pages (1) or of dark ones (2)."""
    return "\n".join(f".{name} {{ {row[0]}: {row[page]} }}" for name, row in COLOURS.items())


def text(x: float, y: float, words: str, classes: str = "ink") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{classes}">{words}</text>'


def lines(x: float, y: float, words: Sequence[str], classes: str) -> list[str]:
    return [text(x, y + 16 * i, line, classes) for i, line in enumerate(words)]


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M {x:g} {y:g} L {to_x:g} {to_y:g}" class="line" marker-end="url(#head)"/>'


def block(
    x: float, y: float, kind: str, *, whole: bool = False, terms: bool = False, low: bool = False
) -> list[str]:
    """Four devices (rows) by the four quarters of an array (columns), and who has which.

    Each device has its own quarter, or the `whole`, or of all quarters one term (`terms`) of a sum; `low`
    squares are 16 bits of 32.
    """
    found = []
    for device in range(DEVICES):
        for quarter in range(DEVICES):
            left, top = x + PITCH * quarter, y + PITCH * device
            found.append(
                f'<rect x="{left + 0.5:g}" y="{top + 0.5:g}" width="13" height="13" class="edge"/>'
            )
            if whole or terms or device == quarter:
                height = CELL / 2 if low else CELL
                colour = 'fill="url(#stripes)"' if terms else f'class="{kind}"'
                found.append(
                    f'<rect x="{left:g}" y="{top + (CELL - height) / 2:g}" width="{CELL}" '
                    f'height="{height:g}" {colour}/>'
                )
    return found


def between(column: int, y: float, above: str, below: str = "") -> list[str]:
    """The arrow from the block of a column to the next one, with words above and below."""
    start, end = COLUMNS[column] + BLOCK + 8, COLUMNS[column + 1] - 8
    middle, level = (start + end) / 2, y + BLOCK / 2
    return [
        text(middle, level - 8, above, "ink small middle"),
        text(middle, level + 19, below, "faint small middle"),
        arrow(start, level, end, level),
    ]


def captions(y: float, columns: Sequence[Sequence[str]]) -> list[str]:
    return [
        line
        for x, words in zip(COLUMNS, columns, strict=True)
        for line in lines(x + BLOCK / 2, y + BLOCK + 20, words, "faint small middle")
    ]


def forward(y: float) -> list[str]:
    return [
        text(20, y - 16, "Forward pass", "ink title"),
        *block(COLUMNS[0], y, "parameter"),
        *between(0, y, "cast"),
        *block(COLUMNS[1], y, "parameter", low=True),
        *between(1, y, "all-gather", "Psi"),
        *block(COLUMNS[2], y, "parameter", whole=True, low=True),
        *between(2, y, "product"),
        *block(COLUMNS[3], y, "parameter", low=True),
        *captions(
            y,
            [
                ["stored: a quarter", "on each device"],
                ["bfloat16: half", "the bytes to move"],
                ["gathered ahead, while", "another product runs"],
                ["freed after its use;", "the shards stay"],
            ],
        ),
    ]


def backward(y: float) -> list[str]:
    return [
        text(20, y - 16, "Backward pass", "ink title"),
        *block(COLUMNS[0], y, "parameter", low=True),
        *between(0, y, "all-gather", "Psi"),
        *block(COLUMNS[1], y, "parameter", whole=True, low=True),
        *between(1, y, "product"),
        *block(COLUMNS[2], y, "gradient", terms=True, low=True),
        *between(2, y, "reduce-scatter", "Psi"),
        *block(COLUMNS[3], y, "gradient", low=True),
        *captions(
            y,
            [
                ["the residual of the", "forward pass"],
                ["gathered again,", "ahead"],
                ["gradient, partial: one", "term of a sum on each"],
                ["a quarter of the sum", "on each device"],
            ],
        ),
    ]


def update(y: float) -> list[str]:
    level = y + BLOCK / 2 + 5
    plus = [
        text((COLUMNS[i] + BLOCK + COLUMNS[i + 1]) / 2, level, "+", "ink title middle")
        for i in (0, 1)
    ]
    return [
        text(20, y - 16, "Update", "ink title"),
        *block(COLUMNS[0], y, "gradient", low=True),
        *block(COLUMNS[1], y, "moments"),
        *block(COLUMNS[2], y, "parameter"),
        *block(COLUMNS[3], y, "parameter"),
        *plus,
        *between(2, y, "optimizer"),
        *captions(y, [["gradient"], ["moments"], ["parameter"], ["the new parameter", ""]]),
    ]


def way_of_a_parameter() -> str:
    legend = [
        "Each block: four devices from top to bottom, the four quarters of one array from left to right.",
        "Low squares are bfloat16. Striped ones are terms of a partial sum.",
    ]
    return picture(
        "The way of one parameter through a step at stage 3",
        530,
        [
            *forward(48),
            *backward(208),
            *update(368),
            *lines(20, 498, legend, "faint small"),
        ],
    )


PICTURES = {"way-of-a-parameter.svg": way_of_a_parameter}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())
