"""`NVMe`: the policy under which optimizer state rests in files and passes through the host's memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from jax.sharding import Mesh, NamedSharding

from jzero._errors import OptionError, message
from jzero._memory_kinds import HOST, NVME
from jzero._quantities import make_int
from jzero.offload import _tiers
from jzero.offload._nvme_step import FilePolicy, NVMeStep
from jzero.offload.memory._nvme_store import StoreSpec
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.cut._pieces import UpdatePart
from jzero.sharding.plan._boundary import Boundary
from jzero.sharding.plan._offload import Leaves, Offload, Shared, StepProgram
from jzero.sharding.plan._plan import Analysis, StepPlan, Turn
from jzero.sharding.plan._stages import StageAxes
from jzero.sharding.run._run import Runner

_LEAST_BYTES = 2**16


@dataclasses.dataclass(frozen=True)
class NVMe(Offload):
    """Optimizer state rests in files, on NVMe disks, and is updated by the host's processors.

    A step reads, updates and writes it tile by tile, all three at the same time::

        gradients = grad part(parameters, batch)     # each goes to the host when it is reduced
        for tile in tiles:                           # one range of elements of moments, masters
            read(tile)                               # ahead, into one of few buffers
            tile, parameters = update(tile, gradients)
            write(tile)                              # behind
            copy(parameters, host -> device)

    >>> import tempfile, jax, jax.numpy as jnp, optax, jzero
    >>> tx = jzero.master_weights(optax.adamw(1e-2))
    >>> def step_fn(state, batch):
    ...     params, opt_state = state
    ...     grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(params)
    ...     updates, opt_state = tx.update(grads, opt_state, params)
    ...     return optax.apply_updates(params, updates), opt_state
    >>> folder = tempfile.TemporaryDirectory()
    >>> train_step = jzero.shard_train_step(step_fn, offload=jzero.NVMe(folder.name))
    >>> w, batch = jnp.ones((64, 64), jnp.bfloat16), jnp.ones((8, 64), jnp.bfloat16)
    >>> w, opt_state = train_step((w, tx.init(w)), batch)
    >>> opt_state.masters
    NVMeArray(shape=(64, 64), dtype=float32)

    Attributes:
      path: a folder on the disk.
      host_bytes: the most bytes of the host's memory for tiles in each process.
      in_place: whether the new state is written over the old one.
      resume: whether files of an earlier run are gone on with.
      threads: how many threads update.
    """

    path: str | os.PathLike[str]
    host_bytes: int = 2**30
    in_place: bool = False
    resume: bool = False
    threads: int | None = None
    tier: ClassVar[str] = NVME

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike) or not os.fspath(self.path):
            raise OptionError(message(
                "NVMe", f"path={self.path!r}", "It is a folder on a disk of the devices' host.",
                'Use jzero.NVMe("/nvme/run").'))  # fmt: skip
        object.__setattr__(self, "path", str(Path(os.fspath(self.path)).absolute()))
        make_int(
            self, "NVMe", "host_bytes", _LEAST_BYTES, None,
            "It is how many bytes of the host's memory hold tiles of state, an int from 65536.",
            "Use host_bytes=2**30, or drop it.",
        )  # fmt: skip
        for name in ("in_place", "resume"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(message(
                    "NVMe", f"{name}={getattr(self, name)!r}", "It is True or False.",
                    f"Drop it, or use {name}=True."))  # fmt: skip
        if self.threads is not None:
            make_int(
                self, "NVMe", "threads", 1, None, "It is how many threads update, an int from 1.",
                "Drop it to use all processors that this process may use.",
            )  # fmt: skip

    @property
    def slots(self) -> int:
        """The old state and the new one, or one over the other."""
        return 1 if self.in_place else 2

    @property
    def tiles_bytes(self) -> int:
        """`host_bytes`."""
        return self.host_bytes

    @property
    def first_tier(self) -> str:
        """Ordinary memory of the host: what is in which tile the step says."""
        return HOST

    def rest(
        self, leaves: Leaves, frame: Frame, mesh: Mesh, stage_axes: StageAxes,
        automatic: Sequence[str],
    ) -> tuple[Leaves, UpdatePart]:  # fmt: skip
        """Optimizer state in files."""
        resting, update = _tiers.offloaded(self, leaves, frame, stage_axes)
        _tiers.check_axes(self, automatic)
        return resting, update

    def turns(
        self, leaves: Leaves, frame: Frame, update: UpdatePart, boundary: Boundary
    ) -> tuple[Turn, ...]:
        """What the host updates, and what rests on the devices."""
        return _tiers.turns(leaves, update)

    def program(
        self, plan: StepPlan, analysis: Analysis, mesh: Mesh, shardings: Sequence[NamedSharding],
        shared: Shared,
    ) -> StepProgram:  # fmt: skip
        """Gradients on the devices, their update on the host, tile by tile."""
        policy = FilePolicy(
            Path(self.path), self.host_bytes, self.in_place, self.resume, self.threads
        )
        return NVMeStep(Runner(plan, analysis, mesh), shardings, policy, shared)

    def files_of(self, step: StepProgram) -> StoreSpec:
        """The files of a state."""
        assert isinstance(step, NVMeStep)
        return step.spec
