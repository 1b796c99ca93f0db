# SPDX-License-Identifier: Apache-2.0
"""`LayeredSegment`: a segment whose parameters are stored on the hosts, cut in parts that fit a device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jzero._errors import OptionError, message
from jzero._folded import folded
from jzero._memory_kinds import DEVICE, PINNED, HostNeed
from jzero.ir._regions import variables
from jzero.offload._file_reads import FileReader, FileReads, FileSource
from jzero.offload._layer_programs import ArrayForm, LayerPrograms, Locals
from jzero.offload._layer_schedule import CutSegment, LayerSchedule, Output
from jzero.offload.execute._executor import Section
from jzero.offload.memory._file_storage import FileStorage
from jzero.offload.schedule._ops import Update, Value, Wanted
from jzero.segments._planned import PlannedStep
from jzero.segments._segment import Segment, Values, Var, shard_of
from jzero.sharding.cut import _interchange, _layer_parts, _layers
from jzero.sharding.cut._layer_parts import (
    SENT,
    LayerPart,
    ScannedLayers,
    StraightStage,
)
from jzero.sharding.plan._backend import Window
from jzero.tracing import _call, _jaxpr

WHO = _call.WHO
# Where activations wait on the host, the devices have those of the part (or iteration) that runs, and those
# that the next two read.
UNDER_WAY = 1
NO_FILES = contextlib.nullcontext(None)


class LayeredSegment:
    """A segment as a list of operations, part by part (`LayerSchedule`).

    One part's leaves are fetched while the part before runs::

        fetch 1, fetch 2, run 1, fetch 3 (when 1 is over), run 2, ...

    Those of an outer loop run in each iteration. The first part of the next iteration is fetched while the
    last part of this one runs; of a `while`, when the host has read that there is a next iteration.
    """

    def __init__(
        self, planned: PlannedStep, segment: Segment, sent: Sequence[Var], window: Window,
        names: Mapping[Var, Value],
    ):  # fmt: skip
        """Cuts the segment, which takes parameters as they are stored on the hosts.

        `sent` are outputs that go to pinned memory; `names` are those of the step's leaves in the list.
        Raises an `OptionError` if one part reads more parameters than `window` has room for.
        """
        self._segment, self.sent, self.host_bytes = segment, tuple(sent), window.host_bytes
        inner = Locals.of(segment, planned.plan.new_leaves)
        self._mesh = planned.mesh
        of_step = dict(zip(planned.frame.jaxpr.invars, planned.plan.leaves, strict=False))
        self._taken = taken = {var: segment.takes[i] for var, i in inner.taken.items()}
        leaf_of = {
            var: of_step[of]
            for var, of in taken.items()
            if of in of_step and of_step[of].is_streamed
        }
        outvars = inner.jaxpr.outvars
        sends = [i for i, var in enumerate(segment.gives) if var in self.sent]
        numbers = [i for i in sends if _jaxpr.is_literal(outvars[i])]
        self.literals = {segment.gives[i]: i for i in numbers}
        fresh = set(variables(outvars)) - set(inner.jaxpr.invars)
        made = [i for i in sends if i not in numbers and outvars[i] in fresh]
        # A stack that is sharded along its iterations has no slices.
        in_slices = {outvars[i] for i in made if not any(inner.outs[i].spec[:1])}
        avals = {var: segment.types[var].aval(planned.mesh) for var in self.sent}
        out_shardings = {
            i: avals[segment.gives[i]].sharding.with_memory_kind(PINNED) for i in sends
        }
        nbytes = {var: leaf.nbytes_per_device for var, leaf in leaf_of.items()}
        # Devices with collectives of their own may leave a `while` one after the other.
        together = planned.plan.reductions == "whole batch" or planned.plan.num_devices == 1
        nests = ("scan", "while") if together else ("scan",)
        jaxpr, batch = inner.jaxpr, {var for var, of in taken.items() if of not in of_step}
        # A stage reads as much as has room, of files in the host's memory, too.
        room = min(window.device_bytes, window.host_bytes or window.device_bytes)
        if planned.plan.microbatches.by_layer:
            jaxpr = _interchange.layer_major(jaxpr, nbytes, batch, room)
        parts = _layers.cut(jaxpr, nbytes, batch, in_slices, room, nests)
        plans = {var: segment.types[of] for var, of in taken.items()}
        forms = {var: ArrayForm(x.spec, automatic=x.automatic) for var, x in plans.items()}
        self._cut = CutSegment(
            inner, parts, LayerPrograms(planned, inner, forms, parts), leaf_of,
            {var: names[taken[var]] for var in leaf_of},
            {var: Value.of_gradient(shard_of(aval)) for var, aval in avals.items()},
            {outvars[i]: segment.gives[i] for i in reversed(made)},
            out_shardings, _layer_parts.offloaded(parts), segment.gives, window.device_bytes,
        )  # fmt: skip
        self.gradients = self._cut.gradients  # each of `sent`, as one device has it
        self._check_room()
        self._under_way = UNDER_WAY if self._cut.waiting else None
        self._files = self._file_reads() if window.host_bytes else None

    @property
    def parts(self) -> tuple[LayerPart, ...]:
        return self._cut.parts

    def _check_room(self) -> None:
        cut = self._cut
        bad = [
            f"{', '.join(name.text for name in folded(cut.leaf_of[v].path for v in part.leaves))}: "
            f"{part.nbytes} bytes"
            for part in _layer_parts.fetched(cut.parts)
            if part.nbytes > cut.device_bytes
        ]
        if bad:
            most = max(part.nbytes for part in cut.parts)
            policy = "NVMe(path, " if self.host_bytes else "PinnedHost("
            raise OptionError(message(
                WHO, bad, "What one part of the step reads of parameters is on a device at a time, gathered, "
                f"and device_bytes={cut.device_bytes} of Memory(params=) is the most that may be there.",
                f"Use {policy}device_bytes={most}) or more; from {2 * most} one part is fetched while "
                "another runs.", things="parts", shown=6))  # fmt: skip

    def _file_reads(self) -> FileReads:
        cut = self._cut

        def whole(reads: Sequence[Var]) -> list[Wanted]:
            return [Wanted(cut.leaves[v], None) for v in dict.fromkeys(reads) if v in cut.leaves]

        # Leaves that are outputs, or that outputs follow from which no part makes, are read at the end.
        in_order, between = [], [whole(variables(cut.inner.jaxpr.outvars))]
        for part in _layer_parts.fetched(cut.parts):
            at = 0 if isinstance(part, ScannedLayers) else None
            in_order.append([Wanted(cut.leaves[var], at) for var in part.leaves])
            between.append(whole(part.reads))
        between += [whole(variables(x.init)) for x in _layer_parts.outer_loops(cut.parts)]
        sources = {
            cut.leaves[var]: FileSource(
                leaf, cut.programs.sharding(var, PINNED), cut.programs.slice_sharding(var)
            )
            for var, leaf in cut.leaf_of.items()
        }
        return FileReads(sources, self.host_bytes, in_order, between)

    def num_slices(self) -> dict[Var, int]:
        """In how many slices each leaf is fetched; 1 if it is fetched whole."""
        found = dict.fromkeys(self._taken.values(), 1)
        for part in _layer_parts.fetched(self.parts):
            if isinstance(part, ScannedLayers):
                found |= {self._taken[var]: part.parts.length for var in part.leaves}
        return {self._taken[var]: found[self._taken[var]] for var in self._cut.leaf_of}

    def as_segment(self) -> Segment:
        """The segment as one function, which does what the parts do: to be traced and compared."""
        return dataclasses.replace(
            self._segment, run=self._cut.programs.whole(self._segment, self.parts)
        )

    def set_sends(
        self, store: Callable[[Var], str], copies: int,
        updates: Mapping[int, Sequence[tuple[Update, bool]]],
    ) -> None:  # fmt: skip
        """Before the first run: where `sent` goes, and which updates start after a part or its iterations."""
        self._cut.store, self._cut.copies, self._cut.updates = store, copies, updates

    @functools.cached_property
    def section(self) -> Section:
        return Section(tuple(self._schedule.all()), self._cut.device_bytes, self._under_way)

    @functools.cached_property
    def _schedule(self) -> LayerSchedule:
        return LayerSchedule(self._cut)

    @property
    def outputs(self) -> list[Output | None]:
        """Where all outputs are when the list has run; None for what is written to files as it is made."""
        assert self.section  # Makes the list.
        return self._schedule.outputs

    def buffers(self) -> tuple[HostNeed, ...]:
        """Memory for parameters in transfer from files, for one of a process's devices."""
        mesh, nbytes = self._mesh, self.host_bytes
        num = len(mesh.local_devices) if isinstance(mesh, Mesh) else 1
        return (HostNeed("parameters on their way", PINNED, -(-nbytes // num)),) if nbytes else ()

    def arrivals(self) -> dict[Var, int]:
        """After which part each of `sent` is on the host; without those that arrive only at the end."""
        parts = enumerate(self.parts)
        return {self._cut.on_host[v]: i for i, part in parts for v in self._leaving(part)}

    @functools.cached_property
    def numbers(self) -> dict[Var, jax.Array]:
        """Those of `sent` that are constants, in pinned memory."""
        outvars = self._cut.inner.jaxpr.outvars
        with jax.transfer_guard("allow"):
            return {
                var: jax.device_put(_jaxpr.literal(outvars[i]), self._cut.out_shardings[i])
                for var, i in self.literals.items()
            }

    def last_reads(self) -> dict[Var, int]:
        """The last part that fetches each leaf; the number of parts for a leaf that is returned."""
        found: dict[Var, int] = {}
        last = {v: i for i, part in enumerate(self.parts) for v in (*part.reads, *part.leaves)}
        last |= dict.fromkeys(variables(self._cut.inner.jaxpr.outvars), len(self.parts))
        for v in self._cut.leaf_of:
            found[self._taken[v]] = max(found.get(self._taken[v], -1), last.get(v, -1))
        return found

    def sliced(self, index: int) -> tuple[int, set[Var]]:
        """How many iterations a part has, and the leaves and gradients that it has in slices."""
        part = self.parts[index]
        if not isinstance(part, ScannedLayers):
            return 1, set()
        fetched = {self._taken[v] for v in part.leaves}
        whole = {self._taken[v] for v in part.reads if v in self._taken}
        return part.parts.length, fetched - whole | {self._cut.on_host[v] for v in part.leaving}

    def send_slices(self, gradients: Collection[Var]) -> None:
        """Before the first run: sends each slice of these stacks by itself, and returns None for them."""
        cut = self._cut
        mine = {v for v, given in cut.on_host.items() if given in gradients}

        def sending(loop: ScannedLayers) -> ScannedLayers:
            made = zip(loop.results[1], loop.ys, strict=True)
            ys = tuple(SENT if y in mine else kind for y, kind in made)
            return dataclasses.replace(loop, ys=ys)

        cut.parts = tuple(sending(x) if isinstance(x, ScannedLayers) else x for x in cut.parts)
        loops = (part for part in cut.parts if isinstance(part, ScannedLayers))
        cut.passed_on = frozenset(y for loop in loops for y in loop.made(SENT))

    def send_to_files(self, gradients: Collection[Var]) -> dict[Var, int]:
        """Before the first run: these gradients go into files as they arrive on the host; None is returned.

        Stacks arrive slice by slice. What no stage and no loop over layers makes, as sums over microbatches,
        goes into files from the devices, at the end. Returns in how many slices each arrives; 1 for a whole
        one.
        """
        slices = {
            v: num
            for num, mine in map(self.sliced, range(len(self.parts)))
            for v in mine.intersection(gradients)
        }
        self.send_slices(slices)
        whole = {
            v for part in self.parts if isinstance(part, StraightStage) for v in self._leaving(part)
            if self._cut.on_host[v] in gradients
        }  # fmt: skip
        self._cut.passed_on |= whole
        arriving = {*slices, *(self._cut.on_host[v] for v in whole)}
        for i, var in enumerate(self._segment.gives):
            if var in gradients and var not in arriving:
                self._cut.out_shardings[i] = self._cut.out_shardings[i].with_memory_kind(DEVICE)
        # Bounds gradients on the devices, as it bounds activations.
        self._under_way = UNDER_WAY
        return dict.fromkeys(gradients, 1) | slices

    def arriving_bytes(self) -> int:
        """The most bytes on each device of gradients that arrive at a time, on their way into files."""
        cut, most = self._cut, 0
        for i, part in enumerate(cut.parts):
            made = part.made(SENT) if isinstance(part, ScannedLayers) else self._leaving(part)
            num, _ = self.sliced(i)
            arriving = [cut.gradients[cut.on_host[v]] for v in made if v in cut.passed_on]
            most = max(most, sum(x.nbytes // num for x in arriving))
        return most

    def _leaving(self, part: LayerPart) -> list[Var]:
        """What a part makes for the host, whole."""
        made = part.outputs if isinstance(part, StraightStage) else part.eqn.outvars
        sent = part.made(SENT) if isinstance(part, ScannedLayers) else []
        return [v for v in made if v in self._cut.on_host and v not in sent]

    def here(self, values: Values) -> dict[Value, Any]:
        """The values that the list begins with on the devices."""
        made, leaves = self._schedule, self._cut.leaves
        taken = {made.value(v): values[of] for v, of in self._taken.items() if v not in leaves}
        return self._known | taken

    def reading(
        self, there: Mapping[Any, Any]
    ) -> contextlib.AbstractContextManager[FileReader | None]:
        """Reads of those leaves that are in files, while the list runs; None if there are none."""
        leaves = {value: there[value] for value in self._cut.leaves.values()}
        in_files = {value: x for value, x in leaves.items() if isinstance(x, FileStorage)}
        return self._files.run(in_files) if self._files and in_files else NO_FILES

    @functools.cached_property
    def _known(self) -> dict[Value, Any]:
        """Constants, and zeros for device indices (programs compute their own), on the devices."""
        with jax.transfer_guard("allow"):
            return {
                self._schedule.value(var): jax.device_put(
                    _jaxpr.constant(x), self._cut.programs.sharding(var)
                )
                for var, x in self._cut.programs.known.items()
            }
