# SPDX-License-Identifier: Apache-2.0
"""What the parts of a segment have made in one run, on the devices and on the host, and its ways between."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jzero._memory_kinds import PINNED
from jzero.ir._regions import variables
from jzero.offload._file_run import FileRun, Wanted
from jzero.offload._layer_programs import LayerPrograms, Locals
from jzero.segments._segment import Arrays, Var
from jzero.sharding.cut._layer_parts import LayerPart, Stretch
from jzero.sharding.plan._leaves import LeafPlan
from jzero.tracing import _jaxpr


@dataclasses.dataclass
class CutSegment:
    """A segment in parts, and what a run of it needs to know.

    Attributes:
      inner: what one device computes.
      parts: the cut of it, in the order in which they run.
      programs: of the parts.
      leaf_of: what rests on the hosts of what it takes.
      hosted: outputs that parts make for the host.
      home: where outputs rest that go to pinned memory, by index.
      waiting: what parts hand to others that waits on the host meanwhile.
      last: the part after which nobody reads a value; leaves, too, for one that a loop holds may be fetched
        again.
      kept: what is read after the last part, or at the end of a loop's turn.
      handed_over: outputs that whoever is told of their arrival has from then on; None is given.
    """

    inner: Locals
    parts: tuple[LayerPart, ...]
    programs: LayerPrograms
    leaf_of: dict[Var, LeafPlan]
    hosted: set[Var]
    home: dict[int, NamedSharding]
    waiting: frozenset[Var]
    last: dict[Var, LayerPart]
    kept: set[Var]
    handed_over: frozenset[Var] = frozenset()


class PartValues:
    """Values of one run.

    Attributes:
      cut: what runs.
      env: values by variable: arrays, or lists of the slices of stacks.
      there: gradients in pinned memory, by variable; of one whose slices arrive by themselves by variable and
        turn.
      files: where leaves come from that are in files; None if none are.
    """

    def __init__(self, cut: CutSegment, env: dict[Var, Any], files: FileRun | None = None):
        self.cut, self.env, self.files = cut, env, files
        self.there: dict[Any, jax.Array] = {}

    def fetch(self, leaves: Sequence[Var]) -> Arrays:
        """Whole leaves, on their way to the devices."""
        if self.files:
            return self.files.fetched(self.wanted(leaves))
        places = [self.cut.programs.home(var) for var in leaves]
        return jax.device_put([self.env[var] for var in leaves], places) if leaves else []

    def wanted(self, leaves: Sequence[Var], at: int | None = None) -> tuple[Wanted, ...]:
        """What of leaves is read from files: them, or one slice of each."""
        return tuple([Wanted(var, at) for var in leaves]) if self.files else ()

    def held(self, reads: Iterable[Var]) -> dict[Var, jax.Array]:
        """Leaves among what a loop reads, whole, on their way to the devices."""
        held = [v for v in reads if v in self.cut.leaf_of]
        return dict(zip(held, self.fetch(held), strict=True))

    def back(self, reads: Iterable[Var]) -> None:
        """What waits on the host, on its way to the devices; what a part is yet to make comes later."""
        self.env |= self.brought(reads, self.env)

    def brought(self, reads: Iterable[Var], values: Mapping[Var, Any]) -> dict[Var, jax.Array]:
        """The same, of these values."""
        mine = [
            v for v in dict.fromkeys(reads) if v in self.cut.waiting and _is_pinned(values.get(v))
        ]
        places = [self.cut.programs.home(var) for var in mine]
        return dict(zip(mine, jax.device_put([values[v] for v in mine], places), strict=True))

    def away(self, made: Iterable[Var], values: dict[Var, Any]) -> Arrays:
        """What shall wait on the host, on its way there; the devices' copies are dropped."""
        mine = [v for v in made if v in self.cut.waiting]
        places = [self.cut.programs.home(var, PINNED) for var in mine]
        copies = jax.device_put([values[v] for v in mine], places)
        values.update(zip(mine, copies, strict=True))
        return list(copies)

    def send(self, made: Iterable[Var]) -> Arrays:
        """Gradients among what a part has made, on their way to the host."""
        mine = [v for v in made if v in self.cut.hosted]
        atoms = self.cut.inner.jaxpr.outvars
        places = [self.cut.home[atoms.index(var)] for var in mine]
        copies = jax.device_put([self._as_given(v) for v in mine], places) if mine else []
        self.there.update(zip(mine, copies, strict=True))
        return list(copies)

    def _as_given(self, var: Var) -> jax.Array:
        """An output as the segment gives it; a loop's last carry is each device's own."""
        programs = self.cut.programs
        if not programs.form(var).stacked:
            return self.env[var]
        index = self.cut.inner.jaxpr.outvars.index(var)
        return programs.finish((index,), [var])([self.env[var]])[0]

    def drop(self, part: LayerPart) -> None:
        """Forgets what nobody reads after this part, and what is on the host, if that is all it is for."""
        made = part.gives if isinstance(part, Stretch) else part.eqn.outvars
        for var in [*part.reads, *made]:
            if self.cut.last.get(var, part) is part and var not in self.cut.kept:
                self.env.pop(var, None)

    def outputs(self) -> Arrays:
        """Those of the segment; what no part makes as it is wanted is made now."""
        cut, atoms = self.cut, self.cut.inner.jaxpr.outvars
        found = [self._output(i) for i in range(len(atoms))]
        rest = tuple(
            i for i, x in enumerate(found)
            if x is None and cut.handed_over.isdisjoint(variables([atoms[i]]))
        )  # fmt: skip
        if rest:
            reads = variables([atoms[i] for i in rest])
            env = self.env | self.held(reads)
            made = cut.programs.finish(rest, tuple(reads))([env[var] for var in reads])
            for i, x in zip(rest, made, strict=True):
                found[i] = jax.device_put(x, cut.home[i]) if i in cut.home else x
        return found

    def _output(self, index: int) -> Any:
        """An output that a part has made as it is wanted, else None."""
        jaxpr = self.cut.inner.jaxpr
        atom, home = jaxpr.outvars[index], self.cut.home
        if _jaxpr.is_literal(atom):
            return None
        first = jaxpr.outvars.index(atom)
        if atom in self.there and home.get(index) == home[first]:
            return self.there[atom]
        if first != index:
            return None
        as_wanted = atom not in jaxpr.invars and not self.cut.programs.form(atom).stacked
        return self.env[atom] if as_wanted and index not in self.cut.home else None


def _is_pinned(x: Any) -> bool:
    if isinstance(x, jax.core.Tracer):
        return _jaxpr.is_on_host(jax.typeof(x))
    return isinstance(x, jax.Array) and x.sharding.memory_kind == PINNED
