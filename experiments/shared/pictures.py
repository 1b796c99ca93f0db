"""Pictures of results: one style, drawn to files."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

matplotlib.use("Agg")  # draw to files, also where there is no display


@contextlib.contextmanager
def drawn(path: Path, *args: Any, font: int = 13, **kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Figure and axes as `pyplot.subplots` makes them, written to `path` at the end."""
    style: Any = {"font.size": font, "axes.spines.top": False, "axes.spines.right": False}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(*args, layout="constrained", **kwargs)
        yield figure, axes
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
