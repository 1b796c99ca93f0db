# SPDX-License-Identifier: Apache-2.0
"""The abstract step scaled to a model's bytes: leaves, collectives and schedule."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from jzero._blocks import Blocks
from jzero._memory_kinds import DEVICE
from jzero._numbers import Workload
from jzero.offload.schedule._folds import mapped
from jzero.offload.schedule._ops import Value
from jzero.offload.schedule._schedule import Schedule
from jzero.reports._abstract_step import AbstractStep, Types, abstract_step
from jzero.reports._sizes import ACTIVATION, GRADIENT, RoleBytes, as_dtype, transferred_gradients
from jzero.sharding.analysis._traffic import Collective
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._options import Options
from jzero.sharding.plan._stages import OPTIMIZER, PARAMETER, StageAxes
from jzero.sharding.plan._stored_layout import REPLICATED

_REDUCED = ("reduce-scatter", "all-reduce")


@dataclasses.dataclass(frozen=True)
class ScaledStep:
    """The abstract step scaled to a number of parameters: what it holds on each device, and moves."""

    num_params: int  # Psi
    options: Options  # as given
    sharding: StageAxes  # the stage on the mesh
    sizes: RoleBytes  # bytes per parameter
    workload: Workload  # what a step computes with
    model_parallel: int  # over how many devices each part of the batch divides the model

    @functools.cached_property
    def abstract(self) -> AbstractStep:
        options, sharding = self.options, self.sharding
        shards = self.sizes.parameters * self.each / sharding.count(sharding.param_axes)
        # Shards get half of the budget, since the size of gathered parameters is unknown. A loop over
        # microbatches that offloads activations is one program.
        fits = options.moves_activations or 2 * shards <= options.offload.window.device_bytes
        whole = options.rounds > 1 and fits
        recompute = self.workload.recompute
        types = Types.of(self.sizes)
        return abstract_step(options, sharding.axes, types, recompute, whole)

    @property
    def each(self) -> int:
        """Parameters per position along the model's axis."""
        return math.ceil(self.num_params / self.model_parallel)

    @property
    def share(self) -> Fraction:
        """The share of optimizer state that is offloaded."""
        backend = self.options.offload
        assert backend.share is not None, "estimate refuses what is measured"
        return backend.share if backend.updates_on_host else Fraction(1)

    @property
    def leaves(self) -> Iterator[LeafPlan]:
        """A leaf of bytes for each role and memory."""
        for leaf in self.abstract.report.plan.leaves:
            share = self.share if leaf.role == OPTIMIZER else Fraction(1)
            for tier, part in ((leaf.tier, share), (DEVICE, 1 - share)):
                if part:
                    size = part * self._size(leaf.role)
                    yield self.leaf(leaf.role, size, leaf.num_shards, tier)

    def leaf(self, role: str, size: Fraction, num_shards: int, tier: str = DEVICE) -> LeafPlan:
        """A leaf of `size` bytes per parameter, sharded over `num_shards` devices and the model's."""
        nbytes, num = math.ceil(size * self.num_params), num_shards * self.model_parallel
        return LeafPlan(role, (nbytes,), as_dtype(size), 1, role, REPLICATED, num, tier=tier)

    def _size(self, what: str) -> Fraction:
        sizes = self.sizes
        return {
            PARAMETER: sizes.parameters,
            OPTIMIZER: sizes.optimizer_state,
            GRADIENT: transferred_gradients(sizes),
            ACTIVATION: sizes.compute,
        }.get(what, Fraction(0))

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The schedule, without what is so small that it does not grow with the model."""
        found = dict[Value, Value | None]()

        def scaled(value: Value) -> Value | None:
            if value not in found:
                found[value] = self._scaled(value)
            return found[value]

        return Schedule(mapped(self.abstract.report.schedule.ops, scaled))

    def _scaled(self, value: Value) -> Value | None:
        size = self._size(value.what)
        if value.what == ACTIVATION:
            counts: Any = (self.workload.tokens, self.workload.layers, self.workload.width)
            elements = Fraction(value.elements * math.prod(counts), self.abstract.saved_elements)
        else:
            elements = Fraction(value.elements * self.each, self.abstract.num_params) * self.share
        if not size or not elements:
            return None
        return Value(value.what, as_dtype(size), math.ceil(elements), math.ceil(elements * size))

    @functools.cached_property
    def traffic(self) -> tuple[Collective, ...]:
        """Collectives as if all parameters were one leaf, which `times` counts."""
        groups = dict[tuple[str, tuple[str, ...], Blocks | None, str, str], list[Collective]]()
        for c in self.abstract.report.traffic:
            if c.elements > 1:
                groups.setdefault((c.op, c.axes, self._codes(c), c.dtype, c.autodiff), []).append(c)
        return tuple(itertools.starmap(self._merged, groups.items()))

    def _codes(self, c: Collective) -> Blocks | None:
        """The quantized format in which it is sent, or None."""
        if c.dtype != "uint8":
            return None
        reduced = self.options.reduce_codes([axis for axis, _ in self.sharding.axes])
        sums = c.op == "all-to-all" or not {*c.axes} & {*self.sharding.shard_axes}
        return reduced[c.axes[0]] if sums else self.options.comm.gather_dtype

    def _merged(
        self, key: tuple[str, tuple[str, ...], Blocks | None, str, str], group: list[Collective]
    ) -> Collective:
        (op, axes, codes, dtype, autodiff), abstract = key, self.abstract
        size = self._wire(op, dtype) if codes is None else codes.bytes_per_element
        packed = Fraction(1) if codes is None else codes.bytes_per_element
        total = Fraction(sum(c.total_elements for c in group), abstract.num_params) / packed
        one = Fraction(max(c.elements for c in group), abstract.num_params) / packed
        # A collective is of the leaf, a layer or a tile; or of its shards over the other axes.
        pieces = {1, abstract.layers, abstract.layers * abstract.tiles}
        sizes = [num for _, num in self.sharding.axes]
        chosen = itertools.chain.from_iterable(
            itertools.combinations(sizes, i) for i in range(len(sizes) + 1)
        )
        held = min(
            (num for num in map(math.prod, chosen) if (total * num).denominator == 1),
            key=lambda num: (1 / (one * num) not in pieces, num),
            default=1,
        )
        elements = math.ceil(Fraction(self.each, held))
        times = max(1, round(total * held))
        return Collective(
            op, axes, as_dtype(size), float(size), elements, times, "", autodiff=autodiff
        )

    def _wire(self, op: str, dtype: str) -> Fraction:
        """Bytes of an element that is not quantized."""
        chosen, types = self.options.reduce_float, self.abstract.types
        sizes = {types.compute: self.sizes.compute, types.params: self.sizes.parameters}
        if dtype in sizes and (chosen is None or op not in _REDUCED):
            return sizes[dtype]
        # The dtype of the options, or of sums over microbatches.
        return Fraction(jnp.dtype(dtype).itemsize)

    @functools.cached_property
    def accumulator(self) -> tuple[Fraction, int] | None:
        """For sums over microbatches: bytes per parameter, and over how many devices they are sharded."""
        plan, nbytes = self.abstract.report.plan, self.abstract.report.accumulator_bytes
        if plan.accumulate == 1 or plan.microbatches.by_layer:
            return None
        size = jnp.dtype(self.options.microbatches.dtype or jnp.float32).itemsize
        # Rounded, since a counter beside the leaf has some bytes, too.
        return Fraction(size), round(Fraction(size * self.abstract.num_params, nbytes))
