# SPDX-License-Identifier: Apache-2.0
"""The options of `shard_train_step` as one frozen value, checked together at the boundary."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jzero._blocks import Blocks, code_name
from jzero._errors import MeshError, OptionError, message
from jzero._policy import NoOffload, PinnedHost, Policy
from jzero._quantities import make_int
from jzero.sharding.plan import _auto_specs
from jzero.sharding.plan._auto_specs import AutoPlace
from jzero.sharding.plan._offload import Backend
from jzero.sharding.plan._stages import STAGES, StageAxes
from jzero.tracing import _call

WHO = _call.WHO
GATHER = ("per_pass", "keep", "once_per_step")
# Under 0.4 % of a GPU's memory. A layer of up to 128 Mi bf16 parameters is gathered whole while the one
# before it computes; of a larger one, the rest while its own first part does. Of a layer of 192 Mi, twice
# the bound hid 85 and not 89 % of the gathered bytes (experiments/gather_policy).
PREFETCH_BYTES = 2**28
# Of one value of the batch. A batch of 1024 images of 256 x 256 takes 200 MB in bytes.
MAX_GATHER_BYTES = 2**28


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user chose; `shard_train_step` says what each means and costs."""

    stage: int = 3
    accumulate: int = 1
    reduce: str | None = None
    accumulate_dtype: Any = None
    reduce_dtype: Any = None
    gather: str | None = None
    prefetch_bytes: int | None = None
    min_shard_bytes: int = 1024
    full: str | None = None
    param_axes: tuple[str, ...] | None = None
    optimizer_axes: tuple[str, ...] | None = None
    auto_specs: tuple[tuple[str, Any], ...] = ()
    offload: Backend = dataclasses.field(kw_only=True)
    offload_activations: Policy | None = dataclasses.field(default=None, kw_only=True)
    max_gather_bytes: int = MAX_GATHER_BYTES
    tile_bytes: int | None = None
    layer_major: bool = False
    donate: bool = True
    gather_dtype: Any = None
    weight_dtype: Any = None
    who: str = dataclasses.field(default=WHO, compare=False)  # the function they were given to

    def __post_init__(self) -> None:
        for name in ("gather_dtype", "weight_dtype"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, self._codes(name, getattr(self, name)))
        if isinstance(self.reduce_dtype, Mapping):
            codes = tuple(
                (axis, None if x is None else self._codes(f"reduce_dtype[{axis!r}]", x))
                for axis, x in self.reduce_dtype.items()
            )
            object.__setattr__(self, "reduce_dtype", codes)
        elif isinstance(self.reduce_dtype, Blocks) or code_name(self.reduce_dtype) is not None:
            object.__setattr__(self, "reduce_dtype", self._codes("reduce_dtype", self.reduce_dtype))
        for name, least, most, rule, edit in _INTEGERS:
            if getattr(self, name) is not getattr(Options, name):  # Its default, which may be None.
                make_int(self, self.who, name, least, most, rule, edit)
        for broken, found, rule, edit in _RULES:
            if broken(self):
                raise OptionError(message(self.who, found.format(o=self), rule, edit))
        for name, patterns in (
            ("full", [self.full or ""]),
            ("auto_specs", [pattern for pattern, _ in self.auto_specs]),
        ):
            for pattern in patterns:
                _check_pattern(self.who, name, pattern)
        _auto_specs.check_specs(self.who, self.auto_specs)
        for name in ("accumulate_dtype", "reduce_float"):
            _check_dtype(self.who, name.replace("_float", "_dtype"), getattr(self, name))

    def _codes(self, option: str, value: Any) -> Blocks:
        if isinstance(value, Blocks):
            return value
        if code_name(value) is None:
            raise OptionError(message(
                self.who, f"{option}={value!r}", "It is a format of codes of 8 or 4 bits, or None: otherwise "
                "the dtype is the one to which the step casts.",
                "Use jnp.int8, jnp.int4 or jzero.Blocks, or drop it."))  # fmt: skip
        return Blocks(value)

    @property
    def reduce_float(self) -> Any:
        """The dtype in which gradients are reduced that do not travel as codes; None for their own."""
        return None if isinstance(self.reduce_dtype, tuple | Blocks) else self.reduce_dtype

    @property
    def reduces_codes(self) -> bool:
        """Whether `reduce_dtype` is codes, of all axes or of each."""
        chosen = self.reduce_dtype
        return isinstance(chosen, Blocks) or (
            isinstance(chosen, tuple) and any(x for _, x in chosen)
        )

    def reduce_codes(self, axes: Iterable[str]) -> dict[str, Blocks | None]:
        """Of each data axis the codes in which gradients travel over it, if they do; else no axis.

        Raises:
          MeshError: `reduce_dtype` names an axis that is none of them.
        """
        if isinstance(self.reduce_dtype, Blocks):
            return dict.fromkeys(axes, self.reduce_dtype)
        if not isinstance(self.reduce_dtype, tuple):
            return {}
        chosen = dict(self.reduce_dtype)
        unknown = set(chosen) - set(axes)
        if unknown:
            raise MeshError(message(
                self.who, f"reduce_dtype has {sorted(unknown, key=str)}, and the data axes are {tuple(axes)}",
                "Gradients are reduced over the data axes of the mesh.", "Correct reduce_dtype."
            ))  # fmt: skip
        return {axis: chosen.get(axis) for axis in axes}

    def stage_axes(self, axes: Mapping[str, int]) -> StageAxes:
        """The stage's row of the table on a mesh with these data axes.

        Raises:
          MeshError: `param_axes` or `optimizer_axes` do not fit.
        """
        row, names = STAGES[self.stage], tuple(axes)
        for option in ("param_axes", "optimizer_axes"):
            chosen = getattr(self, option) or ()
            if len(set(chosen)) < len(chosen):
                raise MeshError(message(
                    self.who, f"{option}={chosen!r}", "An axis of the mesh counts once.",
                    f"Name each axis of {option} once."))  # fmt: skip
            unknown = set(chosen) - set(names)
            if unknown:
                raise MeshError(message(
                    self.who, f"{option} has {sorted(unknown)}, and the data axes are {names}",
                    "Each role is sharded over data axes of the mesh.", f"Correct {option}."))  # fmt: skip
        params = names if self.param_axes is None else self.param_axes
        shards = names if self.optimizer_axes is None else self.optimizer_axes
        params, shards = params if row.parameters else (), shards if row.optimizer else ()
        if not set(params) <= set(shards):
            raise MeshError(message(
                self.who, f"parameters over {params} and optimizer state over {shards}",
                "A parameter's shard must be a union of shards of its optimizer state.",
                "Name the axes of param_axes in optimizer_axes too."))  # fmt: skip
        order = (*params, *(axis for axis in shards if axis not in params))
        return StageAxes(tuple(axes.items()), params, order, self.min_shard_bytes, self.full)

    def places(
        self, paths: Sequence[str], shapes: Sequence[Sequence[int]], sizes: Mapping[str, int],
        data_axes: Sequence[str],
    ) -> list[AutoPlace]:  # fmt: skip
        """How each leaf rests over the mesh's other axes, which have these sizes.

        Raises:
          OptionError: a pattern matches no leaf, or a spec does not fit a leaf it matches.
        """
        return _auto_specs.places(self.who, self.auto_specs, paths, shapes, sizes, data_axes)

    @property
    def not_of_several_dims(self) -> list[str]:
        """The options that need a step which splits one dim of the batch, as they are written."""
        asked = {
            "gather_dtype": self.gather_dtype is not None,
            "weight_dtype": self.weight_dtype is not None,
            "reduce_dtype of codes": self.reduces_codes,
        }
        return [name for name, is_so in asked.items() if is_so]

    @property
    def needs_masters(self) -> bool:
        """Whether it matters that a new parameter is made of its master, and not of the old one."""
        return self.offloads or self.gather_dtype is not None

    @property
    def offloads(self) -> bool:
        """Whether something rests in another memory than the devices'."""
        return self.offload.offloads

    @property
    def moves_activations(self) -> bool:
        """Whether activations wait for the backward pass in pinned memory of the host."""
        return isinstance(self.offload_activations, PinnedHost)

    @property
    def reduce_once(self) -> bool:
        """Whether gradients are summed up on each device and reduced after the last microbatch."""
        if self.layer_major:
            return True
        return STAGES[self.stage].reduce_once if self.reduce is None else self.reduce == "once"

    @property
    def rounds(self) -> int:
        """How often each pass of a step runs through the layers."""
        return 1 if self.layer_major else self.accumulate

    @property
    def keep_gathered(self) -> bool:
        """Whether one gather serves forward and backward pass; below stage 3 memory for it is there."""
        return self.stage < 3 or self.gather in ("keep", "once_per_step")

    @property
    def prefetch(self) -> int:
        """How many gathered bytes may be ahead of their use; below stage 3 nothing is gathered for one."""
        if self.stage < 3:
            return sys.maxsize
        if self.offload.streams:  # A part gathers what it fetched for itself.
            return 0
        return PREFETCH_BYTES if self.prefetch_bytes is None else self.prefetch_bytes

    @property
    def freed_first(self) -> int:
        """The most bytes of a matrix that may be there beside its whole gradient: what gathers may be ahead.

        A part of a streamed step has its own few matrices.
        """
        if self.keep_gathered or self.offload.streams:
            return sys.maxsize
        return self.prefetch or PREFETCH_BYTES

    @property
    def gather_once(self) -> bool:
        """Whether one gather serves all microbatches."""
        return self.stage < 3 or self.gather == "once_per_step"


# Name, least, most, what it is, and what to do.
_INTEGERS: tuple[tuple[str, int, int | None, str, str], ...] = (
    ("stage", 0, max(STAGES), "Stages are 0, 1, 2 and 3.",
     "Use 3 to shard parameters, gradients and optimizer state."),
    ("accumulate", 1, None, "It is the number of microbatches that each device works through, an int from 1.",
     "Use accumulate=1 to run the batch whole."),
    ("prefetch_bytes", 0, None,
     "It is how many gathered bytes may be ahead of the compute that uses them, an int from 0.",
     "Use prefetch_bytes=0 to gather only what is used next, or drop it."),
    ("min_shard_bytes", 0, None, "It is the number of bytes below which a leaf stays full, an int from 0.",
     "Use min_shard_bytes=0 to shard every leaf that can be."),
    ("max_gather_bytes", 0, None,
     "It is how many bytes of the batch's rows one operation may gather, an int from 0.",
     "Drop it for 256 MiB."),
    ("tile_bytes", 1, None,
     "It is how many bytes of a matrix are gathered, and of its gradient made, at a time, an int from 1.",
     "Use tile_bytes=2**28, or drop it to gather whole matrices."),
)  # fmt: skip
_REDUCED = "Stage 2 is stage 1 with gradients reduced for each microbatch; stage 3 can do either."
_ACTIVATIONS = "Use offload_activations=jzero.PinnedHost(), or drop it."
# What must not be, what is then found, the rule, and what to do; the first that holds is said.
_RULES: tuple[tuple[Callable[[Options], bool], str, str, str], ...] = (
    (lambda o: not isinstance(o.offload, Backend), "offload={o.offload!r}",
     "It is a policy: where optimizer state rests.", "Use offload=jzero.PinnedHost(), or drop it."),
    (lambda o: o.reduce not in (None, "once", "each"), "reduce={o.reduce!r}",
     "Gradients are reduced 'once' or for 'each' microbatch.", "Drop it to let the stage decide."),
    (lambda o: o.stage < 2 and o.reduce == "each", "stage={o.stage} and reduce={o.reduce!r}",
     _REDUCED, "Drop reduce, or use stage=2."),
    (lambda o: o.stage == 2 and o.reduce == "once", "stage={o.stage} and reduce={o.reduce!r}",
     _REDUCED, "Drop reduce, or use stage=1."),
    (lambda o: o.accumulate_dtype is not None and o.accumulate == 1, "accumulate_dtype without accumulate",
     "It is the dtype in which the gradients of microbatches are summed up.",
     "Drop it, or say how many microbatches with accumulate=k."),
    (lambda o: o.gather not in (None, *GATHER), "gather={o.gather!r}",
     f"Parameters are gathered {', '.join(map(repr, GATHER))}.", "Drop it for 'per_pass'."),
    (lambda o: o.gather is not None and o.stage < 3, "stage={o.stage} and gather={o.gather!r}",
     "Below stage 3 parameters rest whole on every device, and nothing is gathered.",
     "Drop gather, or use stage=3."),
    (lambda o: o.prefetch_bytes is not None and o.stage < 3,
     "stage={o.stage} and prefetch_bytes={o.prefetch_bytes}",
     "Below stage 3 parameters rest whole on every device, and nothing is gathered ahead.",
     "Drop prefetch_bytes, or use stage=3."),
    (lambda o: o.gather_dtype is not None and o.stage == 0, "stage=0 and gather_dtype={o.gather_dtype}",
     "At stage 0 parameters are whole on every device, and updated there.",
     "Drop gather_dtype, or use stage=3."),
    (lambda o: o.reduces_codes and o.stage == 0,
     "stage=0 and reduce_dtype={o.reduce_dtype}",
     "At stage 0 gradients are whole on every device, and reduced as they are.",
     "Use a float dtype, drop reduce_dtype, or use stage=1."),
    (lambda o: o.tile_bytes is not None and o.stage == 0, "stage=0 and tile_bytes={o.tile_bytes}",
     "At stage 0 nothing is sharded: every device has matrices and their gradients whole.",
     "Drop tile_bytes, or use stage=3."),
    (lambda o: o.tile_bytes is not None and o.gather in ("keep", "once_per_step"),
     "gather={o.gather!r} and tile_bytes={o.tile_bytes}",
     "A tile is freed when it was used, and gathered again by the next pass that uses it.",
     "Drop gather, or tile_bytes."),
    (lambda o: o.prefetch_bytes is not None and o.offload.streams,
     "prefetch_bytes={o.prefetch_bytes} and offload={o.offload}",
     "Of parameters that rest on the hosts at most device_bytes are on a device, fetched and gathered.",
     "Drop prefetch_bytes, or offload_params."),
    (lambda o: o.gather in ("keep", "once_per_step") and o.offload.streams,
     "gather={o.gather!r} and offload={o.offload}",
     "Parameters that rest on the hosts are fetched and gathered for each pass.",
     "Drop gather, or offload_params."),
    (lambda o: o.full is not None and o.stage < 3, "stage={o.stage} and full={o.full!r}",
     "Below stage 3 all parameters rest full.", "Drop full, or use stage=3."),
    (lambda o: o.param_axes is not None and o.stage < 3, "stage={o.stage} and param_axes={o.param_axes}",
     "Below stage 3 parameters are not sharded.", "Drop param_axes, or use stage=3."),
    (lambda o: o.optimizer_axes is not None and o.stage == 0, "stage=0 and optimizer_axes={o.optimizer_axes}",
     "At stage 0 nothing is sharded.", "Drop optimizer_axes, or use stage=1."),
    (lambda o: not isinstance(o.offload_activations, Policy | None),
     "offload_activations={o.offload_activations!r}",
     "It is a policy: where activations wait for the backward pass.", _ACTIVATIONS),
    (lambda o: not isinstance(o.offload_activations, NoOffload | PinnedHost | None),
     "offload_activations={o.offload_activations!r}",
     "A program of the devices reads and writes pinned memory of their host, and no other.", _ACTIVATIONS),
    (lambda o: o.offload_activations not in (None, NoOffload(), PinnedHost()),
     "offload_activations={o.offload_activations!r}",
     "What it sets is of optimizer state. Of activations, one turn of a loop, or 128 MiB, are on their way.",
     _ACTIVATIONS),
    (lambda o: not isinstance(o.layer_major, bool), "layer_major={o.layer_major!r}", "It is True or False.",
     "Drop it."),
    (lambda o: o.layer_major and not o.offload.streams, "layer_major without offload_params",
     "It is for layers that come from the host one after the other.",
     "Drop it, or use offload_params=jzero.PinnedHost()."),
    (lambda o: o.layer_major and o.accumulate == 1, "layer_major without accumulate",
     "A layer then works through all microbatches before the next one comes.",
     "Drop it, or say how many microbatches with accumulate=k."),
    (lambda o: o.layer_major and o.reduce == "each", "layer_major and reduce='each'",
     "A layer's gradient is reduced when all microbatches have passed the layer.",
     "Drop reduce, or layer_major."),
    (lambda o: not isinstance(o.donate, bool), "donate={o.donate!r}", "It is True or False.", "Drop it."),
    (lambda o: not o.donate and o.offload.updates_on_host, "donate=False and offload={o.offload}",
     "What hosts update, in memory or in files, they write over: there is no old state to keep.",
     "Drop donate, and keep train_step.unshard(state) or a checkpoint; or use offload=jzero.PinnedHost()."),
)  # fmt: skip


def axis_tuple(names: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """`("local",)` of `"local"`; None stays None, which means all axes.

    Raises:
      MeshError: it is no name, and no sequence of names.
    """
    if names is None:
        return None
    found = (names,) if isinstance(names, str) or not isinstance(names, Iterable) else tuple(names)
    if not all(isinstance(name, str) for name in found):
        raise MeshError(message(
            "shard_train_step", f"axes are named {names!r}", "A mesh axis is called by a text.",
            "Write axis_names='data', or ('node', 'local')."))  # fmt: skip
    return found


def _check_pattern(who: str, name: str, pattern: Any) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise OptionError(message(
            who, f"{name}: {pattern!r} is not a regular expression ({error})",
            "It is searched in the paths of leaves.", "Escape it with re.escape."
        )) from None  # fmt: skip


def _check_dtype(who: str, name: str, dtype: Any) -> None:
    try:
        fits = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        fits = False
    if not fits:
        codes = " Codes are jnp.int8, jnp.int4 or a jzero.Blocks." * (name == "reduce_dtype")
        raise OptionError(message(
            who, f"{name}={dtype!r}", f"Gradients are floating point numbers.{codes}",
            "Use jnp.float32 or jnp.bfloat16, or drop it."))  # fmt: skip
