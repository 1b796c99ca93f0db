# SPDX-License-Identifier: Apache-2.0
"""`PrintedProgram`: a step's jaxpr to read, with the names and layouts of its leaves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import jax

from jzero._errors import counted
from jzero._memory_kinds import DEVICE
from jzero.ir._layout import Layout, from_spec
from jzero.segments._given import TypedPart
from jzero.sharding.partition._partition import DeviceProgram
from jzero.sharding.plan import _stored_layout
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._plan import StepPlan
from jzero.sharding.plan._stored_layout import Shard
from jzero.sharding.plan._trace import WRITTEN
from jzero.tracing._printed import Note, printed
from jzero.tracing._types import Jaxpr


@dataclasses.dataclass(frozen=True, eq=False)
class PrintedProgram:
    """A step's jaxpr; `print` it."""

    title: str  # of which step, and after which pass
    jaxpr: Jaxpr  # the program
    arguments: tuple[Note, ...]  # the name and layout of each argument
    results: tuple[Note, ...]  # the same of each result

    def __repr__(self) -> str:
        num = counted(len(self.jaxpr.eqns), "equation", "equations")
        return f"<PrintedProgram: {self.title}, {num}; print it>"

    def __str__(self) -> str:
        return f"# {self.title}\n{printed(self.jaxpr, self.arguments, self.results)}"


def as_traced(
    name: str, jaxpr: Jaxpr, plan: StepPlan, mesh: Mapping[str, int],
    arguments: Mapping[str, jax.ShapeDtypeStruct], outputs: Sequence[str],
) -> PrintedProgram:  # fmt: skip
    """A step as it was traced: its arguments and results are the state's leaves, then the others.

    `arguments` maps each leaf other than the state to its shape and sharding; `outputs` are paths.
    """
    state = tuple(_at_rest(leaf, mesh) for leaf in plan.leaves)
    given = tuple(
        Note(path, str(from_spec(x.shape, mesh, x.sharding.spec))) for path, x in arguments.items()
    )
    results = state[: 0 if plan.evaluates else len(state)]
    results += tuple(_outputs(outputs, jaxpr, plan, mesh))
    of = "of one device" if plan.reductions == WRITTEN else "of the whole batch"
    axes = ", ".join(f"{axis}: {num}" for axis, num in mesh.items())
    title = f"{name}, as traced, {of}; layouts over the mesh ({axes})"
    return PrintedProgram(title, jaxpr, (*state, *given), results)


def as_partitioned(
    name: str,
    after: str,
    program: DeviceProgram,
    part: TypedPart,
    plan: StepPlan,
    arguments: Sequence[str],
    outputs: Sequence[str],
) -> PrintedProgram:
    """A step's program of one device after a pass; for a step of several programs, that of gradients.

    `part` says which of the step's arguments and results it has. `arguments` and `outputs` are the paths of
    those other than the state.
    """
    state = [(leaf.path, leaf.role) for leaf in plan.leaves]
    takes = [*state, *((path, "") for path in arguments)]
    returns = [*state[: len(plan.new_leaves)], *((path, "") for path in outputs)]
    ins = [("", "") if i is None else takes[i] for i in part.taken]
    handed = [("" if hint is None else hint.leaf, "for the update") for hint in part.reduced]
    outs = [handed[j] if i is None else returns[i] for j, i in enumerate(part.made)]
    mesh = dict(program.ins[0].mesh) if program.ins else {}
    axes = ", ".join(f"{axis}: {num}" for axis, num in mesh.items())
    what = ", gradients" if None in part.made else ""
    title = f"{name}{what}, after {after}, of one device; layouts over the mesh ({axes})"
    return PrintedProgram(
        title, program.jaxpr, _laid_out(ins, program.ins), _laid_out(outs, program.outs)
    )


def _laid_out(named: Sequence[tuple[str, str]], layouts: Sequence[Layout]) -> tuple[Note, ...]:
    return tuple(
        Note(path, f"{layout}  {role}".rstrip())
        for (path, role), layout in zip(named, layouts, strict=True)
    )


def _outputs(
    paths: Sequence[str], jaxpr: Jaxpr, plan: StepPlan, mesh: Mapping[str, int]
) -> Iterator[Note]:
    atoms = jaxpr.outvars[len(jaxpr.outvars) - len(paths) :]
    for path, atom, layout in zip(paths, atoms, plan.outputs, strict=True):
        whole = [*atom.aval.shape]
        if plan.reductions == WRITTEN and isinstance(layout, Shard):
            whole[layout.dim] *= math.prod(mesh[axis] for axis in layout.axes)
        yield Note(path, str(from_spec(whole, mesh, _stored_layout.partition_spec(layout))))


def _at_rest(leaf: LeafPlan, mesh: Mapping[str, int]) -> Note:
    """`[16@data, 8]  parameter, in pinned_host`."""
    whole = leaf.decoded
    layout = from_spec(
        whole.shape, mesh, _stored_layout.partition_spec(whole.layout, whole.automatic)
    )
    said = [leaf.role, f"in {leaf.tier}" * (leaf.tier != DEVICE), str(leaf.codes or "")]
    return Note(leaf.path, f"{layout}  {', '.join(filter(None, said))}")
