# SPDX-License-Identifier: Apache-2.0
"""`StepPlan`: all that is decided of a step before it runs, as one frozen value."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec as P

from jzero._blocks import Blocks
from jzero._memory_kinds import DEVICE
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.analysis._residuals import Residual
from jzero.sharding.cut._subgraphs import OptimizerProgram
from jzero.sharding.partition._matrix_buckets import UpdatesByCall
from jzero.sharding.partition._saved import Loops
from jzero.sharding.plan._distributed_updates import DistributedUpdate
from jzero.sharding.plan._interface import ProgramInterface
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._stages import StageAxes
from jzero.sharding.plan._stored_layout import StoredLayout
from jzero.sharding.plan._trace import WholeBatch
from jzero.tracing import _jaxpr


class Analysis(NamedTuple):
    """What is known of a step's jaxpr: the plan says what to do about it."""

    frame: Frame  # the step's root frame
    distributed: UpdatesByCall  # the distributed updates of its jaxpr, by call
    whole_batch: WholeBatch | None  # None if the step has collectives of its own


@dataclasses.dataclass(frozen=True)
class Exchange:
    """When parameters are gathered and gradients reduced, and in which dtype."""

    reduce_once: bool  # gradients of microbatches are reduced after the last one, not for each
    # Gradients are reduced in it; None is the dtype in which the step has them.
    reduce_dtype: Any
    # Those of microbatches are summed in it; None is the wider of float32 and theirs.
    accumulate_dtype: Any
    gather_once: bool  # one gather serves all microbatches
    keep_gathered: bool  # one gather serves the forward and the backward pass
    prefetch_bytes: int  # how many gathered bytes may be ahead of their use
    freed_first: int  # the most bytes of a matrix that may be there beside its whole gradient
    # In an evaluation, the most bytes that one loop gathers before it and keeps through its iterations; None
    # in a training, where JAX's AD says which loops are part of one pass.
    loop_bytes: int | None = None
    # Larger matrices are gathered, and their gradients reduced, in tiles of so many bytes.
    tile_bytes: int | None = None
    # Passes gather parameters in it; None is their own dtypes.
    gather_codes: Blocks | None = None
    # By data axis, in which gradients travel over it; None for their own dtypes.
    reduce_codes: tuple[tuple[str, Blocks | None], ...] = ()

    def reduced_together(self, devices: int) -> int:
        """How many bytes of whole gradients are reduced together, at most.

        A reduction's latency grows with its devices: 2 MiB for each keep it below a tenth of the time on the
        wire (experiments/rivals, 64 and 512 devices). 4 MiB are small anyway: without them each bias would
        take a latency where `prefetch_bytes` is 0.
        """
        most = max(min(self.prefetch_bytes, devices * 2**21), 2**22)
        return most if self.tile_bytes is None else min(most, self.tile_bytes)


@dataclasses.dataclass(frozen=True)
class Microbatches:
    num: int  # how many each device works through
    # For each leaf of the arguments, the dim along which it is cut; None for what they share.
    dims: tuple[int | None, ...]
    loops: Loops | None = None  # the report on their loops
    by_layer: bool = False  # all of them pass a layer before the next layer comes


@dataclasses.dataclass(frozen=True)
class UpdateBucket:
    """Some subgraphs of the update, which run as one program."""

    subgraphs: tuple[int, ...]  # of the optimizer program, by index
    leaves: tuple[str, ...]  # paths of the offloaded leaves that they read or renew
    nbytes: int  # of these leaves, on each device
    # How many slices the leaves are cut into; the devices update one after the other.
    parts: int = 1
    nbytes_at_once: int = 0  # of such a slice
    on_host: bool = False  # the hosts' processors run it


@dataclasses.dataclass(frozen=True, eq=False)
class StepPlan:
    """What goes where and runs when: frozen, printable, hashable, the same on every process."""

    stage: int  # 0 to 3
    stage_axes: StageAxes  # the stage's row, on the data axes
    automatic: tuple[str, ...]  # the mesh's other axes, over which XLA shards
    # The mesh axes behind each axis name that the step may use.
    step_axes: tuple[tuple[str, tuple[str, ...]], ...]
    # 'whole batch' (the step sums over it), or 'written' (the step's own collectives)
    reductions: str
    leaves: tuple[LeafPlan, ...]  # one per leaf of the state, in the order of `jax.tree.leaves`
    arguments: tuple[P, ...]  # how each leaf of the other arguments is sharded
    outputs: tuple[StoredLayout, ...]  # layouts of what the step returns beside the state
    microbatches: Microbatches
    exchange: Exchange
    update: OptimizerProgram  # what follows from offloaded leaves, in subgraphs
    buckets: tuple[UpdateBucket, ...]  # in which the subgraphs run, in order
    device_bytes: int  # the most bytes of offloaded leaves on each device at any time
    # Layouts of the values that programs take from the caller and pass to each other.
    interface: ProgramInterface
    # The step's variables, named by where its jaxpr makes them; the same on every process.
    names: Mapping[_jaxpr.Var, str]
    evaluates: bool = False  # the step reads its state, and returns none
    updates: bool = True  # some leaf comes back as another value
    donates: bool = True  # the step consumes the state that it is passed
    # Leaves, by index, that an evaluation does not read; its program does not take them.
    unread: frozenset[int] = frozenset()
    # Offloaded for the backward pass, of one microbatch; None without this option.
    activations: tuple[Residual, ...] | None = None
    # Distributed updates, and those that every device repeats on gathered matrices.
    owned: tuple[DistributedUpdate, ...] = ()

    def __post_init__(self) -> None:
        run = [index for bucket in self.buckets for index in bucket.subgraphs]
        assert sorted(run) == list(range(len(self.update.subgraphs))), (
            "each subgraph runs in one bucket"
        )
        taken = {
            var for subgraph in self.update.subgraphs for var in (*subgraph.reads, *subgraph.gives)
        }
        unknown = {*taken, *self.update.transferred} - self.interface.variables
        assert not unknown, "a value passed between programs is in no interface"

    @property
    def cut_dims(self) -> tuple[int | None, ...]:
        """The dims along which microbatches cut arguments; None for replicated arguments."""
        return tuple(
            dim if dim is not None and any(spec[dim : dim + 1]) else None
            for dim, spec in zip(self.microbatches.dims, self.arguments, strict=True)
        )

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        return self.stage_axes.axes

    @property
    def num_devices(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def accumulate(self) -> int:
        return self.microbatches.num

    @property
    def in_parts(self) -> bool:
        """Whether a step's passes are several programs: parameters are stored on the hosts."""
        apart = self.accumulate == 1 or self.microbatches.by_layer
        return apart and any(leaf.is_streamed for leaf in self.leaves)

    @property
    def reduce_once(self) -> bool:
        return self.exchange.reduce_once

    @functools.cached_property
    def layouts(self) -> tuple[StoredLayout, ...]:
        return (*(leaf.layout for leaf in self.new_leaves), *self.outputs)

    @property
    def new_leaves(self) -> tuple[LeafPlan, ...]:
        return () if self.evaluates else self.leaves

    @functools.cached_property
    def fingerprint(self) -> str:
        """A short hash of the plan, which processes compare."""
        return hashlib.sha256("\n".join(self.rows()).encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepPlan) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def nbytes_at_rest(self, role: str | None = None, tier: str = DEVICE) -> int:
        """Stored bytes on each device, of one role or of all, in one memory kind."""
        return sum(
            leaf.nbytes_per_device
            for leaf in self.leaves
            if leaf.tier == tier and role in (None, leaf.role)
        )

    def __str__(self) -> str:
        return "\n".join(self.rows())

    def rows(self) -> Iterator[str]:
        axes = ", ".join(f"{name}={size}" for name, size in self.axes)
        width = max((len(leaf.path) for leaf in self.leaves), default=0)
        yield f"stage {self.stage} over {axes}; reductions: {self.reductions}"
        yield from (f"  {leaf.row(width)}" for leaf in self.leaves)
        yield f"arguments: {', '.join(map(str, self.arguments))}"
        yield f"outputs: {', '.join(map(str, self.outputs))}"
        yield f"{self.stage_axes}; {self.exchange}"
        if self.evaluates:
            yield f"returns no state; reads all leaves but {_ranges(self.unread)}"
        elif not self.donates:
            yield "keeps the state passed to it"
        yield f"Auto axes {self.automatic}; the step's axes {self.step_axes}"
        if self.microbatches.num > 1:
            first = "layers" if self.microbatches.by_layer else "microbatches"
            yield f"{self.microbatches.num} microbatches, cut along {self.microbatches.dims}; {first} first"
        # Without the lines that made them: these have paths, which processes need not have in common.
        for r in self.activations or ():
            times = f"in {r.iterations} iterations, {r.times} times"
            yield f"on the host for the backward pass: {r.dtype} {r.shape} {times}"
        yield from (f"each device updates {each}" for each in self.owned)
        for index, bucket in enumerate(self.buckets):
            yield f"bucket {index}: {bucket}"
            for graph in (self.update.subgraphs[i] for i in bucket.subgraphs):
                yield (
                    f"  level {graph.level}, equations {_ranges(graph.eqns)}: {self._named(graph.reads)} -> "
                    f"{self._named(graph.gives)}, outputs {graph.outs}, leaves {graph.leaves}"
                )
        if self.buckets:
            yield f"at most {self.device_bytes} bytes of them on a device; apart {_ranges(self.update.apart)}"
            yield from self.interface.rows(self.names)

    def _named(self, variables: Iterable[_jaxpr.Var]) -> str:
        return f"[{' '.join(self.names[var] for var in variables)}]"


def variable_names(frame: Frame) -> dict[_jaxpr.Var, str]:
    """Names of the root frame's variables, by where they are made: `input3`, `12.0` (of equation 12)."""
    jaxpr = frame.jaxpr
    names = {var: f"constant{i}" for i, var in enumerate(jaxpr.constvars)}
    names |= {var: f"input{i}" for i, var in enumerate(jaxpr.invars)}
    for i, eqn in enumerate(jaxpr.eqns):
        names |= {var: f"{i}.{k}" for k, var in enumerate(eqn.outvars)}
    return names


def _ranges(numbers: Iterable[int]) -> str:
    """`0-3,7` of 0, 1, 2, 3 and 7."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found) or "none"
