"""`Setting`: what a program is built for, besides shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

from jzero._options import Options
from jzero.sharding import _plan


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a program is built for, besides shapes.

    Attributes:
      options: what the user chose.
      mesh: the mesh, concrete or abstract.
      axis_names: the data axes; the mesh may have others.
      axis_name: the name by which the step itself calls all of them together, if it does.
    """

    options: Options
    mesh: Any
    axis_names: tuple[str, ...]
    axis_name: str | None

    @property
    def axes(self) -> dict[str, int]:
        """Names and sizes of the data axes."""
        return {name: self.mesh.shape[name] for name in self.axis_names}

    @property
    def automatic(self) -> dict[str, int]:
        """Names and sizes of the mesh's other axes, over which XLA shards."""
        names = [name for name in self.mesh.axis_names if name not in self.axis_names]
        return {name: self.mesh.shape[name] for name in names}

    @property
    def sharding(self) -> _plan.Sharding:
        """Over which axes each role rests."""
        return self.options.sharding(self.axes)

    @property
    def batch_axes(self) -> dict[str, int]:
        """The data axes as the batch sees them: microbatches are devices in time, of the last axis."""
        last = self.axis_names[-1]
        return self.axes | {last: self.axes[last] * self.options.accumulate}

    @property
    def step_axes(self) -> dict[str, tuple[str, ...]]:
        """The mesh axes behind each axis name that the step may use."""
        if self.axis_name is not None and self.axis_name not in self.axis_names:
            return {self.axis_name: self.axis_names}
        return {name: (name,) for name in self.axis_names}
