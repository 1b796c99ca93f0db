"""How a program is sharded: stage, mesh, dtype and options."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax

import jzero
from small import grouped

from ._program import Program


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a program is sharded.

    Attributes:
      stage: 0 to 3.
      axes: sizes of the data axes, 'data', or 'a' and 'b'.
      dtype: of the training; JAX's 64-bit types are on for float64 only.
      accumulate: microbatches on each device.
      options: others of `jzero.shard_train_step`, by single names.
      rows: of the whole batch, for programs that are drawn.
    """

    stage: int = 3
    axes: tuple[int, ...] = (8,)
    dtype: str = "float64"
    accumulate: int = 1
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rows: int = 0

    def __str__(self) -> str:
        axes = "x".join(map(str, self.axes))
        parts = [f"stage {self.stage}", f"{axes} devices", self.dtype]
        parts += [f"{self.accumulate} microbatches"] if self.accumulate > 1 else []
        parts += [f"{self.rows} rows"] if self.rows else []
        return ", ".join([*parts, *(f"{name}={value}" for name, value in self.options.items())])

    @property
    def names(self) -> tuple[str, ...]:
        return ("data",) if len(self.axes) == 1 else tuple("ab"[: len(self.axes)])

    @property
    def num_devices(self) -> int:
        return math.prod(self.axes)

    @property
    def refuses_much(self) -> bool:
        """Whether most programs that couple elements of the update are refused in it."""
        return isinstance(self.options.get("offload"), jzero.HostCPU)

    def shard(self, step: Any, in_specs: Any = None, automatic: int = 1, **more: Any) -> Any:
        """The step on a mesh of virtual devices, where leaves of any size are in shards."""
        names, sizes = self.names, self.axes
        if automatic > 1:
            names, sizes = (*names, "model"), (*sizes, automatic)
        mesh = jax.make_mesh(sizes, names, devices=jax.devices()[: math.prod(sizes)])
        options = {"min_shard_bytes": 0, **self.options, **more}
        if self.accumulate > 1:
            options["accumulate"] = self.accumulate
        given = grouped(axis_names=self.names, **options)
        return jzero.shard_train_step(step, stage=self.stage, mesh=mesh, in_specs=in_specs, **given)


def applies(program: Program, setting: Setting) -> bool:
    """Whether the program can be asked for this: its dtype, and room for its other mesh axis."""
    devices = program.automatic * setting.num_devices
    own = setting.accumulate == 1 or "accumulate" not in program.options
    return setting.dtype in program.exact_dtypes and devices <= jax.device_count() and own


def sharded(program: Program, setting: Setting) -> Any:
    """The program's step in a setting."""
    names = setting.names if len(setting.names) > 1 else setting.names[0]
    more = dict(program.options)
    in_specs = more.pop("in_specs", None) or program.in_specs(names)
    step = functools.partial(setting.shard, program.step, in_specs, program.automatic)
    return step(**more)
