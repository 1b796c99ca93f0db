# SPDX-License-Identifier: Apache-2.0
"""A picture of estimates: bytes on each device by stage and role."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jzero._errors import OptionError, message
from jzero._quantities import parse_bytes, readable_bytes, readable_count
from jzero.reports._estimate import WHO, Estimate, roles_on_devices

# Dark to light from the bottom, so that roles can be distinguished without colour, too.
_COLORS = ("#0d47a1", "#42a5f5", "#ffb300", "#8d6e63", "#b0bec5", "#e0e0e0")


def plot_stages(found: Sequence[Estimate], file: str, memory: str | None = None) -> None:
    """Writes stacked bars, one per estimate, and a line at `memory` if it is given."""
    figure_module = _matplotlib()
    suffixes = figure_module.Figure().canvas.get_supported_filetypes()
    suffix = Path(file).suffix.removeprefix(".").lower()
    if suffix not in suffixes:
        raise OptionError(message(
            WHO, f"plot={file!r}", f"Its suffix is one of {', '.join(sorted(suffixes))}.",
            "Write --plot out.png."))  # fmt: skip
    figure = figure_module.Figure(figsize=(8, 4.5), layout="constrained")
    _draw(figure.add_subplot(), found, memory)
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise OptionError(message(
            WHO, f"plot={file!r} cannot be written: {error.strerror}", "Its folder must exist.",
            "Write --plot out.png.")) from None  # fmt: skip


def _draw(axes: Any, found: Sequence[Estimate], memory: str | None) -> None:
    gib = 2**30
    names = [f"stage {e.options.stage}" for e in found]
    roles = roles_on_devices(found)
    below = [0.0] * len(found)
    for role, color in zip(roles, _COLORS, strict=False):
        sizes = [e.nbytes(role) / gib for e in found]
        axes.bar(names, sizes, bottom=below, color=color, label=role, width=0.6)
        below = [old + new for old, new in zip(below, sizes, strict=True)]
    for i, e in enumerate(found):
        axes.annotate(readable_bytes(e.total), (i, below[i]), (0, 3), textcoords="offset points",
                      ha="center", va="bottom")  # fmt: skip
    num_bytes = parse_bytes(memory)
    if num_bytes:
        axes.axhline(num_bytes / gib, color="#c62828", linestyle="--", label=f"memory: {memory}")
    first = found[0]
    axes.set(ylabel="GiB on each device", title=f"{readable_count(first.num_params)} parameters on "
             f"{first.num_devices} devices, activations aside")  # fmt: skip
    axes.set_xlim(-0.7, len(found) - 0.3)
    axes.margins(y=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.figure.legend(loc="outside right upper", frameon=False)


def _matplotlib() -> Any:
    try:
        import matplotlib.figure
    except ImportError:
        raise OptionError(message(
            WHO, "matplotlib is not installed", "It draws the picture of --plot.",
            "Install it with pip install 'jzero[plot]', or drop --plot.")) from None  # fmt: skip
    return matplotlib.figure
