# SPDX-License-Identifier: Apache-2.0
"""The options of `shard_train_step` as one frozen value: groups, and what one group says of another."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jzero._blocks import Blocks
from jzero._errors import MeshError, OptionError, message
from jzero._given_fields import make_int
from jzero._option_groups import Axes, Comm, Microbatches, blocks_of
from jzero._policy import NoOffload, PinnedHost
from jzero.sharding.plan._backend import Backend
from jzero.sharding.plan._stages import STAGES, StageAxes
from jzero.tracing import _call

WHO = _call.WHO
# Under 0.4 % of a GPU's memory. A layer of up to 128 Mi bf16 parameters is gathered whole while the one
# before it computes; of a larger one, the rest while its own first part does. Of a layer of 192 Mi, twice
# the bound hid 85 and not 89 % of the gathered bytes (experiments/gather_policy).
PREFETCH_BYTES = 2**28
MIN_SHARD_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user chose; `shard_train_step` and the groups say what each means and costs."""

    stage: int = 3
    microbatches: Microbatches = Microbatches()
    comm: Comm = Comm()
    axes: Axes = Axes()
    offload: Backend = dataclasses.field(kw_only=True)  # obeys `Memory`
    donate: bool = True
    weight_dtype: Any = None
    who: str = dataclasses.field(default=WHO, compare=False)  # the function they were passed to

    def __post_init__(self) -> None:
        if self.weight_dtype is not None:
            codes = blocks_of(self.who, "weight_dtype", self.weight_dtype)
            object.__setattr__(self, "weight_dtype", codes)
        if self.stage is not Options.stage:
            make_int(
                self, self.who, "stage", 0, max(STAGES), "Stages are 0, 1, 2 and 3.",
                "Use 3 to shard parameters, gradients and optimizer state.")  # fmt: skip
        for broken, found, rule, edit in _RULES:
            if broken(self):
                raise OptionError(message(self.who, found.format(o=self), rule, edit))

    @property
    def by_layer(self) -> bool:
        return self.microbatches.order == "layer"

    @property
    def reduce_float(self) -> Any:
        """The dtype in which gradients are reduced that are not quantized; None for their own."""
        chosen = self.comm.reduce_dtype
        return None if isinstance(chosen, tuple | Blocks) else chosen

    @property
    def reduces_codes(self) -> bool:
        chosen = self.comm.reduce_dtype
        return isinstance(chosen, Blocks) or (
            isinstance(chosen, tuple) and any(x for _, x in chosen)
        )

    def reduce_codes(self, axes: Iterable[str]) -> dict[str, Blocks | None]:
        """For each data axis, how gradients are quantized over it, or None; empty if they are over none."""
        given = self.comm.reduce_dtype
        if isinstance(given, Blocks):
            return dict.fromkeys(axes, given)
        if not isinstance(given, tuple):
            return {}
        chosen = dict(given)
        unknown = set(chosen) - set(axes)
        if unknown:
            raise MeshError(message(
                self.who, f"Comm(reduce_dtype=) has {sorted(unknown, key=str)}, and the data axes are "
                f"{tuple(axes)}", "Gradients are reduced over the data axes of the mesh.",
                "Correct reduce_dtype."))  # fmt: skip
        return {axis: chosen.get(axis) for axis in axes}

    def stage_axes(self, axes: Mapping[str, int]) -> StageAxes:
        """The stage's row of the table on a mesh with these data axes."""
        row, names = STAGES[self.stage], tuple(axes)
        given = {"params": self.axes.params, "optimizer": self.axes.optimizer}
        for field, chosen in given.items():
            if len(set(chosen or ())) < len(chosen or ()):
                raise MeshError(message(
                    self.who, f"Axes({field}={chosen!r})", "An axis of the mesh counts once.",
                    "Name each axis once."))  # fmt: skip
            unknown = set(chosen or ()) - set(names)
            if unknown:
                raise MeshError(message(
                    self.who, f"Axes({field}=) has {sorted(unknown)}, and the data axes are {names}",
                    "Each role is sharded over data axes of the mesh.", f"Correct {field}."))  # fmt: skip
        params: Any = names if self.axes.params is None else self.axes.params
        shards: Any = names if self.axes.optimizer is None else self.axes.optimizer
        params, shards = params if row.parameters else (), shards if row.optimizer else ()
        if not set(params) <= set(shards):
            raise MeshError(message(
                self.who, f"parameters over {params} and optimizer state over {shards}",
                "A parameter's shard must be a union of shards of its optimizer state.",
                "Name the axes of Axes(params=) in Axes(optimizer=) too."))  # fmt: skip
        order = (*params, *(axis for axis in shards if axis not in params))
        least = self.axes.min_shard_bytes
        least = MIN_SHARD_BYTES if least is None else least
        return StageAxes(tuple(axes.items()), params, order, least, self.axes.replicate)

    @property
    def not_of_several_dims(self) -> list[str]:
        """Options that need a step with a single batch dim, as the user wrote them."""
        asked = {
            "gather_dtype": self.comm.gather_dtype is not None,
            "weight_dtype": self.weight_dtype is not None,
            "a quantized reduce_dtype": self.reduces_codes,
        }
        return [name for name, is_so in asked.items() if is_so]

    @property
    def needs_masters(self) -> bool:
        """Whether it matters that a new parameter depends on its master only, not on the old value."""
        return self.offloads or self.comm.gather_dtype is not None

    @property
    def offloads(self) -> bool:
        return self.offload.offloads

    @property
    def moves_activations(self) -> bool:
        return isinstance(self.activations, PinnedHost)

    @property
    def activations(self) -> Any:
        return self.offload.memory.activations

    @property
    def reduce_once(self) -> bool:
        """Whether gradients are accumulated on each device and reduced after the last microbatch."""
        if self.by_layer:
            return True
        chosen = self.microbatches.reduce
        return STAGES[self.stage].reduce_once if chosen is None else chosen == "once"

    @property
    def rounds(self) -> int:
        """How often each pass runs through the layers in a step."""
        return 1 if self.by_layer else self.microbatches.num

    @property
    def keep_gathered(self) -> bool:
        """Whether one gather serves forward and backward pass; below stage 3 it always does."""
        return self.stage < 3 or self.comm.gather in ("keep", "once_per_step")

    @property
    def prefetch(self) -> int:
        """How many bytes may be gathered ahead of their use; unlimited below stage 3."""
        if self.stage < 3:
            return sys.maxsize
        if self.offload.streams:  # A stage gathers what it fetched for itself.
            return 0
        chosen = self.comm.prefetch_bytes
        return PREFETCH_BYTES if chosen is None else chosen

    @property
    def freed_first(self) -> int:
        """The most bytes of a matrix beside its whole gradient: as many as gathers may be ahead."""
        if self.keep_gathered or self.offload.streams:
            return sys.maxsize
        return self.prefetch or PREFETCH_BYTES

    @property
    def gather_once(self) -> bool:
        return self.stage < 3 or self.comm.gather == "once_per_step"


_REDUCED = "Stage 2 is stage 1 with gradients reduced for each microbatch; stage 3 can do either."
_ACTIVATIONS = "Use Memory(activations=jzero.PinnedHost()), or drop it."
# What must not be, what is found then, the rule, and what to do; the first that holds is raised.
_RULES: tuple[tuple[Callable[[Options], bool], str, str, str], ...] = (
    (lambda o: o.stage < 2 and o.microbatches.reduce == "each",
     "stage={o.stage} and Microbatches(reduce='each')", _REDUCED, "Drop reduce, or use stage=2."),
    (lambda o: o.stage == 2 and o.microbatches.reduce == "once", "stage=2 and Microbatches(reduce='once')",
     _REDUCED, "Drop reduce, or use stage=1."),
    (lambda o: o.comm.gather is not None and o.stage < 3,
     "stage={o.stage} and Comm(gather={o.comm.gather!r})",
     "Below stage 3 parameters are replicated, and nothing is gathered.",
     "Drop gather, or use stage=3."),
    (lambda o: o.comm.prefetch_bytes is not None and o.stage < 3,
     "stage={o.stage} and Comm(prefetch_bytes={o.comm.prefetch_bytes})",
     "Below stage 3 parameters are replicated, and nothing is gathered ahead.",
     "Drop prefetch_bytes, or use stage=3."),
    (lambda o: o.comm.gather_dtype is not None and o.stage == 0,
     "stage=0 and Comm(gather_dtype={o.comm.gather_dtype})",
     "At stage 0 parameters are replicated, and updated on every device.",
     "Drop gather_dtype, or use stage=3."),
    (lambda o: o.reduces_codes and o.stage == 0, "stage=0 and Comm(reduce_dtype={o.comm.reduce_dtype})",
     "At stage 0 gradients are replicated, and reduced as they are.",
     "Use a float dtype, drop reduce_dtype, or use stage=1."),
    (lambda o: o.comm.tile_bytes is not None and o.stage == 0,
     "stage=0 and Comm(tile_bytes={o.comm.tile_bytes})",
     "At stage 0 nothing is sharded: every device has matrices and their gradients whole.",
     "Drop tile_bytes, or use stage=3."),
    (lambda o: o.comm.prefetch_bytes is not None and o.offload.streams,
     "Comm(prefetch_bytes={o.comm.prefetch_bytes}) and {o.offload}",
     "Of parameters that are stored on the hosts at most device_bytes are on a device, fetched and gathered.",
     "Drop prefetch_bytes, or Memory(params=)."),
    (lambda o: o.comm.gather in ("keep", "once_per_step") and o.offload.streams,
     "Comm(gather={o.comm.gather!r}) and {o.offload}",
     "Parameters that are stored on the hosts are fetched and gathered for each pass.",
     "Drop gather, or Memory(params=)."),
    (lambda o: o.axes.replicate is not None and o.stage < 3,
     "stage={o.stage} and Axes(replicate={o.axes.replicate!r})",
     "Below stage 3 all parameters are replicated.", "Drop replicate, or use stage=3."),
    (lambda o: o.axes.params is not None and o.stage < 3, "stage={o.stage} and Axes(params={o.axes.params})",
     "Below stage 3 parameters are not sharded.", "Drop Axes(params=), or use stage=3."),
    (lambda o: o.axes.optimizer is not None and o.stage == 0,
     "stage=0 and Axes(optimizer={o.axes.optimizer})",
     "At stage 0 nothing is sharded.", "Drop Axes(optimizer=), or use stage=1."),
    # With 0 there is no such bound, as at stage 0.
    (lambda o: bool(o.axes.min_shard_bytes) and o.stage == 0,
     "stage=0 and Axes(min_shard_bytes={o.axes.min_shard_bytes})",
     "At stage 0 nothing is sharded.", "Drop min_shard_bytes, or use stage=1."),
    (lambda o: not isinstance(o.activations, NoOffload | PinnedHost),
     "Memory(activations={o.activations!r})",
     "A program of the devices reads and writes pinned memory of their host, and no other.", _ACTIVATIONS),
    (lambda o: o.activations != type(o.activations)(),
     "Memory(activations={o.activations!r})",
     "Its fields are about optimizer state. Of activations, one iteration of a loop, or 128 MiB, are in "
     "transfer.", _ACTIVATIONS),
    (lambda o: o.by_layer and not o.offload.streams, "Microbatches(order='layer') without Memory(params=)",
     "It is for layers that come from the host one after the other.",
     "Drop it, or use Memory(params=jzero.PinnedHost())."),
    (lambda o: not isinstance(o.donate, bool), "donate={o.donate!r}", "It is True or False.", "Drop it."),
    (lambda o: not o.donate and o.offload.updates_on_host, "donate=False and {o.offload}",
     "Hosts update their state in place, in memory or in files: there is no old state to keep.",
     "Drop donate, and keep train_step.unshard(state) or a checkpoint; or use memory=jzero.PinnedHost()."),
)  # fmt: skip
