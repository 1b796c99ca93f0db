# SPDX-License-Identifier: Apache-2.0
"""`Microbatches`, `Comm` and `Axes`: options of a step that belong together, each checked by itself."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jzero._blocks import Blocks, code_name
from jzero._errors import MeshError, OptionError, a_type, message
from jzero._given_fields import GivenFields, given_fields, shown

GATHER = ("per_pass", "keep", "once_per_step")
REDUCE = ("once", "each")
ORDER = ("microbatch", "layer")
# Of one value of the batch. A batch of 1024 images of 256 x 256 takes 200 MB in bytes.
MAX_GATHER_BYTES = 2**28


@dataclasses.dataclass(frozen=True, repr=False)
class Microbatches(GivenFields):
    """How each device works through its part of a batch; `microbatches=4` is `Microbatches(4)`.

    The step does not change, and trains what it trains with the whole batch: only the activations of one
    microbatch are alive at a time. What needs all rows before it goes on (a count, the embeddings of a
    contrastive loss, a median) runs in several loops, of which the later ones recompute what they need or
    read what was saved (`describe` lists both). Refused are steps that gather rows inside a loop or branch,
    and steps whose products would run more than four times as often (BatchNorm in every layer).

    >>> import jax.numpy as jnp, jzero
    >>> jzero.Microbatches(4, reduce="once", dtype=jnp.bfloat16).num
    4

    Attributes:
      num: microbatches k on each device in a step, an int from 1.
      reduce: 'once' sums gradients on each device and reduces them after the last microbatch: Psi elements
        of traffic per step for Psi parameters, and a replicated gradient on each device. 'each' reduces the
        gradients of each microbatch: k Psi elements, and a sharded gradient. None: stages 0 and 1 reduce
        once, stages 2 and 3 each; stage 3 can do either. It applies to a step's own loop over microbatches
        too.
      dtype: in which the gradients of microbatches are summed up; by default float32 (float64 for float64
        gradients). It costs 4 bytes per element of the gradient that `reduce` leaves on a device.
      order: 'microbatch' (default): one microbatch after the other passes all layers. 'layer': all pass a
        layer before the next layer comes (layered gradient accumulation), for parameters that are not on
        the devices (`Memory(params=...)`). A layer is then fetched and gathered once per pass, so 2 passes of
        parameters move in a step, and its gradient is reduced once. Memory: one layer's parameters and
        its whole gradient, and what layers pass on for all k microbatches (with `jax.checkpoint` around
        each layer, its inputs for the device's whole part of the batch). Refused where microbatches print
        or call back.

    Raises:
      OptionError: a field that cannot be obeyed.

    Reference:
      Lamy-Poirier: "Layered gradient accumulation and modular pipeline parallelism: fast and efficient
      training of large language models", 2021 (`order='layer'`).
    """

    num: int = 1
    _: dataclasses.KW_ONLY
    reduce: str | None = None
    dtype: Any = None
    order: str = "microbatch"

    def __post_init__(self) -> None:
        self._make_int("num", 1, "It is how many microbatches each device works through, an int from 1.",
                       "Use microbatches=1 to run the batch whole.")  # fmt: skip
        _check_choice(self, "reduce", (None, *REDUCE), "Drop it to let the stage decide.")
        _check_choice(self, "order", ORDER, "Drop it for 'microbatch'.")
        _make_float_dtype(self, "dtype")
        only = {name: x for name, x in given_fields(self).items() if name in ("dtype", "order")}
        if self.num == 1 and only:
            found = " and ".join(f"{name}={shown(x)}" for name, x in only.items())
            raise self._refused(
                f"{found} and num=1", "It is about several microbatches.",
                "Drop it, or say how many: Microbatches(4, ...).")  # fmt: skip
        if self.order == "layer" and self.reduce == "each":
            raise self._refused(
                "order='layer' and reduce='each'",
                "A layer's gradient is reduced when all microbatches have passed the layer.",
                "Drop reduce, or order.")  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Comm(GivenFields):
    """How parameters are gathered and gradients reduced: in which dtypes, when, and how much at a time.

    >>> import jax.numpy as jnp, jzero
    >>> jzero.Comm(gather_dtype=jnp.int8, reduce_dtype={"local": jnp.int8, "node": jnp.int4}).gather_dtype
    Blocks(dtype='int8', size=256, rotate=False, stochastic=False)

    Attributes:
      gather_dtype: quantized format in which parameters are gathered, at stage 3 for each pass: `jnp.int8`,
        `jnp.int4` or a `jzero.Blocks`. Each element is rounded by at most half a step of its block's scale:
        near to what `jax.jit` trains, the same on all devices, but not equal. Traffic of gathers: about half
        of bfloat16's for int8, a quarter for int4. Small leaves and those that no matrix product reads
        (norms, biases, tables that are only looked up) stay exact; `describe` lists them. Where a gathered
        copy is stored (stages 1 and 2, and the axes other than `Axes.params`), the difference of the new
        parameters to this copy is gathered in that format, for those that have masters. None: parameters are
        gathered as the step reads them.
      reduce_dtype: dtype in which gradients are sent and summed over the devices: bfloat16 halves the
        bytes of float32 gradients, float32 sums bfloat16 ones more exactly. From stage 1 on also a quantized
        format as for `gather_dtype`, or a dict with one per data axis, `{'local': jnp.int8, 'node':
        jnp.int4}`: gradients are then sent quantized over one axis after the other, the mesh's last one
        first, and are summed in float32. Leaves that `gather_dtype` leaves exact stay exact. None: as the
        step has them.
      gather: how long gathered parameters live at stage 3. 'per_pass' (default): gathered for the forward
        pass, freed, and gathered again for the backward pass: 2 Psi elements per microbatch for Psi
        parameters, memory of one layer. 'keep': the forward pass's copy serves the backward pass: Psi per
        microbatch, Psi elements alive in between. 'once_per_step': one gather serves all microbatches: Psi
        elements, alive throughout. In an evaluation see `shard_eval_step`.
      prefetch_bytes: at stage 3, how many gathered bytes may be on each device ahead of the matrix products
        that first use them, so that gathers hide behind compute. Traffic does not change; memory is up to
        these bytes more. None: 256 MiB, a layer of 128 Mi bfloat16 parameters. Larger layers are gathered
        beside the product before theirs; with 0 a gather waits for all products before its use. Gradients
        are reduced together in buckets of up to the smaller of these bytes, `tile_bytes`, and 2 MiB per
        device (4 MiB at least).
      tile_bytes: a matrix that has more bytes as it is gathered, or its gradient (from stage 1 on), is never
        whole on a device: each product gathers and uses it, or computes and reduces it, in tiles of one dim
        of up to this size (memory-centric tiling), gathering the next tile while it uses this one. Memory: a
        few tiles instead of the largest matrices and their gradients. A matrix that several products of a
        pass read is gathered for each. What no product reads (a table's look-up, a convolution's kernel) is
        gathered whole; `describe` names it. None: no tiles.
      max_gather_bytes: the most bytes of a value with the batch dim that one operation may gather on every
        device. An operation along the batch that has no rule (a callback without `jzero.per_example`) is
        exact and not free; `describe` lists each, and one above this bound is refused.

    Raises:
      OptionError: a field that cannot be obeyed.

    Reference:
      Wang et al.: "ZeRO++", 2023 (quantized formats). Rajbhandari et al.: "ZeRO-Infinity", 2021, section
      5.1.3 (`tile_bytes`).
    """

    gather_dtype: Any = None
    reduce_dtype: Any = None
    gather: str | None = None
    prefetch_bytes: int | None = None
    tile_bytes: int | None = None
    max_gather_bytes: int = MAX_GATHER_BYTES

    def __post_init__(self) -> None:
        if self.gather_dtype is not None:
            object.__setattr__(
                self, "gather_dtype", blocks_of("Comm", "gather_dtype", self.gather_dtype)
            )
        object.__setattr__(self, "reduce_dtype", _reduce_dtype(self.reduce_dtype))
        if not isinstance(self.reduce_dtype, tuple | Blocks):
            _make_float_dtype(
                self, "reduce_dtype", " Quantized: jnp.int8, jnp.int4 or a jzero.Blocks."
            )
        _check_choice(self, "gather", (None, *GATHER), "Drop it for 'per_pass'.")
        self._make_int(
            "prefetch_bytes", 0,
            "It is how many gathered bytes may be ahead of the compute that uses them, an int from 0.",
            "Use prefetch_bytes=0 to gather only what is used next, or drop it.")  # fmt: skip
        self._make_int(
            "tile_bytes", 1,
            "It is how many bytes of a matrix are gathered, and of its gradient computed, at a time, an int "
            "from 1.", "Use tile_bytes=2**28, or drop it to gather whole matrices.")  # fmt: skip
        self._make_int(
            "max_gather_bytes", 0,
            "It is how many bytes of a value with the batch dim one operation may gather, an int from 0.",
            "Drop it for 256 MiB.")  # fmt: skip
        if self.tile_bytes is not None and self.gather in ("keep", "once_per_step"):
            raise self._refused(
                f"gather={self.gather!r} and tile_bytes={self.tile_bytes}",
                "A tile is freed after its use, and the next pass that uses it gathers it again.",
                "Drop gather, or tile_bytes.")  # fmt: skip


@dataclasses.dataclass(frozen=True, repr=False)
class Axes(GivenFields):
    """Which mesh axes shard what; `axes="data"` is `Axes("data")`.

    >>> import jax, jzero
    >>> jzero.Axes(("node", "local"), params="local").params
    ('local',)

    Attributes:
      batch: the data axes: mesh axes over which the batch, and with it the state, is sharded; all of the
        mesh's by default. Other axes stay XLA's. Explicit axes are treated as Auto.
      params: the data axes over which parameters are sharded at stage 3, all by default. With
        `params='local'` they are gathered within a node; new ones are gathered over the other axes of
        `optimizer` once per step (ZeRO-3 inside a node, ZeRO-1 over all of them).
      optimizer: the data axes over which gradients and optimizer state are sharded, all by default.
        `params='local', optimizer='local'` is hybrid sharding (HSDP, MiCS): shards within a node, gradients
        all-reduced between nodes, as shards and once per step.
      axis_name: the name by which the step itself calls the data axis, if it was written for
        `jax.pmap(..., axis_name=...)`. To such a step each microbatch is a device: with `microbatches=k` it
        trains what it would on k times as many devices. Refused with a step that has no collectives.
      auto_specs: `{regular expression: PartitionSpec}`, how state leaves are stored over mesh axes that are
        not in `batch` (tensor parallelism): the first expression found in a leaf's path counts, for moments
        too, as far as they have such dims. ZeRO shards another dim of such a leaf. Inside the step, say it
        with `jax.lax.with_sharding_constraint(x, PartitionSpec(...))`; XLA places those collectives, and
        `describe` does not count them.
      replicate: a regular expression, searched in the paths of parameters at stage 3; those that match stay
        replicated and are never gathered, while their gradients and optimizer state are sharded (as at
        stage 2). It costs their bytes on every device.
      min_shard_bytes: leaves smaller than this, 1 KiB by default, stay replicated, because a collective costs
        more time than they cost memory; 0 shards whatever can be. Neither are leaves sharded that would have
        to be padded (no dim divides by the devices) to save less than 1 MiB on each device, as long as all
        of these are at most 1 % of the device's share of the state; 0 pads these too. At stage 0 there is no
        such bound.

    Raises:
      OptionError: a field that cannot be obeyed.
      MeshError: axes that are no names.

    Reference:
      Zhang et al.: "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud", 2022, section 3
      (`params`, `optimizer`).
    """

    batch: str | Sequence[str] | None = None
    _: dataclasses.KW_ONLY
    params: str | Sequence[str] | None = None
    optimizer: str | Sequence[str] | None = None
    axis_name: str | None = None
    auto_specs: Any = ()
    replicate: str | None = None
    min_shard_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "params", "optimizer"):
            object.__setattr__(self, name, _axis_tuple(name, getattr(self, name)))
        if self.axis_name is not None and not (isinstance(self.axis_name, str) and self.axis_name):
            raise MeshError(message(
                "Axes", f"axis_name={self.axis_name!r}",
                "It is the one name by which a step calls the data axis.",
                "Write axis_name='batch', or name axes of the mesh with Axes(batch=...)."))  # fmt: skip
        specs = self.auto_specs
        if isinstance(specs, Mapping | None):
            specs = tuple((specs or {}).items())
        if not isinstance(specs, tuple):
            raise self._refused(
                f"auto_specs={specs!r}", "It maps regular expressions to PartitionSpecs.",
                "Write {'regular expression': jax.P(None, 'model')}.")  # fmt: skip
        object.__setattr__(self, "auto_specs", specs)
        _check_specs(specs)
        _check_pattern("replicate", self.replicate or "")
        for pattern, _ in specs:
            _check_pattern("auto_specs", pattern)
        self._make_int(
            "min_shard_bytes", 0,
            "It is the number of bytes below which a leaf stays replicated, an int from 0.",
            "Use min_shard_bytes=0 to shard every leaf that can be.")  # fmt: skip


def blocks_of(who: str, option: str, value: Any) -> Blocks:
    """The quantized format that a dtype, its name or a `Blocks` stands for."""
    if isinstance(value, Blocks):
        return value
    if code_name(value) is None:
        raise OptionError(message(
            who, f"{option}={value!r}", "It is a quantized format of 8 or 4 bits, or None: otherwise the "
            "dtype is the one to which the step casts.",
            "Use jnp.int8, jnp.int4 or jzero.Blocks, or drop it."))  # fmt: skip
    return Blocks(value)


def microbatches_of(who: str, given: Any) -> Microbatches:
    if isinstance(given, Microbatches):
        return given
    try:
        return Microbatches(given)
    except OptionError:
        raise OptionError(message(
            who, f"microbatches={given!r}",
            "It is how many microbatches each device works through, an int from 1, or a jzero.Microbatches.",
            "Use microbatches=1 to run the batch whole.")) from None  # fmt: skip


def comm_of(who: str, given: Any, evaluates: bool = False) -> Comm:
    """`comm=` as a `Comm`; refuses what an evaluation does not do."""
    if not isinstance(given, Comm | None):
        raise OptionError(message(
            who, f"comm={given!r}", "It is a jzero.Comm.", "Write comm=jzero.Comm(gather_dtype=jnp.int8)."
        ))  # fmt: skip
    comm = given or Comm()
    if evaluates:
        rule = "It is for training; weight_dtype= quantizes stored weights."
        refuse_fields(who, comm, ("gather_dtype", "reduce_dtype"), rule)
        if comm.gather == "keep":
            raise OptionError(message(
                who, "Comm(gather='keep')", "An evaluation has no backward pass: parameters are gathered "
                "'per_pass' or 'once_per_step'.", "Drop it to gather them where they are used."))  # fmt: skip
    return comm


def refuse_fields(who: str, group: Any, names: Sequence[str], rule: str) -> None:
    """Refuses fields that would have no effect, unless they have their defaults."""
    if given := {name: x for name, x in given_fields(group).items() if name in names}:
        fields = ", ".join(f"{name}={shown(x)}" for name, x in given.items())
        raise OptionError(message(who, f"{type(group).__name__}({fields})", rule, "Drop it."))


def axes_of(given: Any) -> Axes:
    return given if isinstance(given, Axes) else Axes(given)


def _axis_tuple(field: str, names: Any) -> tuple[str, ...] | None:
    """`("local",)` for `"local"`; None, for all axes, stays None."""
    if names is None:
        return None
    found = tuple(names) if isinstance(names, list | tuple) else (names,)
    if not all(isinstance(name, str) for name in found):
        raise MeshError(message(
            "Axes", f"{field}={names!r}", "A mesh axis is called by a text.",
            f"Write Axes({field}='data'), or ('node', 'local')."))  # fmt: skip
    return found


def _reduce_dtype(given: Any) -> Any:
    """A float dtype unchanged; quantized formats as `Blocks`, and a dict of them as pairs."""
    pairs = given.items() if isinstance(given, Mapping) else given
    if isinstance(given, Mapping | tuple):
        return tuple(
            (axis, None if x is None else blocks_of("Comm", f"reduce_dtype[{axis!r}]", x))
            for axis, x in pairs
        )
    if isinstance(given, Blocks) or code_name(given) is not None:
        return blocks_of("Comm", "reduce_dtype", given)
    return given


def _check_choice(group: Any, name: str, known: Sequence[Any], edit: str) -> None:
    if getattr(group, name) not in known:
        names = " or ".join(repr(x) for x in known if x is not None)
        raise OptionError(message(
            type(group).__name__, f"{name}={getattr(group, name)!r}", f"It is {names}.", edit
        ))  # fmt: skip


def _make_float_dtype(group: Any, name: str, more: str = "") -> None:
    """Makes a field a NumPy dtype, whatever it was named by, so that equal groups compare equal."""
    if (given := getattr(group, name)) is None:
        return
    rule, edit = (
        f"Gradients are floating point numbers.{more}",
        "Use jnp.float32 or jnp.bfloat16, or drop it.",
    )
    try:
        dtype = jnp.dtype(given)
    except (TypeError, ValueError):
        dtype = jnp.dtype(bool)
    if jnp.issubdtype(dtype, jnp.floating):
        if dtype.itemsize <= 4 or jax.config.read("jax_enable_x64"):
            object.__setattr__(group, name, dtype)
            return
        rule = "JAX has no 64-bit types without jax_enable_x64."
        edit = "Use jnp.float32, or jax.config.update('jax_enable_x64', True) before."
    raise OptionError(message(type(group).__name__, f"{name}={given!r}", rule, edit))


def _check_pattern(name: str, pattern: Any) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise OptionError(message(
            "Axes", f"{name}: {pattern!r} is not a regular expression ({error})",
            "It is searched in the paths of leaves.", "Escape it with re.escape."
        )) from None  # fmt: skip


def _check_specs(auto_specs: Sequence[tuple[str, Any]]) -> None:
    """Refuses specs by which no leaf can be stored on any mesh."""
    bad = [
        f"auto_specs[{p!r}] is {a_type(s)}"
        for p, s in auto_specs
        if not isinstance(s, PartitionSpec)
    ]
    if bad:
        raise OptionError(message(
            "Axes", bad, "How leaves are stored is a PartitionSpec.",
            "Write {'regular expression': jax.P(None, 'model')}.", things="patterns"))  # fmt: skip
    for pattern, spec in auto_specs:
        entries = [x if isinstance(x, tuple) else (x,) for x in spec if x is not None]
        axes = [axis for entry in entries for axis in entry]
        rule = edit = ""
        if PartitionSpec.UNCONSTRAINED in axes:
            rule = "A stored dim is sharded over axes, or it is not."
            edit = "Write None instead of UNCONSTRAINED, or the axes."
        elif len(set(axes)) < len(axes):
            rule, edit = "An axis shards one dim of a leaf.", "Name each axis once."
        if rule:
            raise OptionError(message("Axes", f"auto_specs[{pattern!r}] is {spec}", rule, edit))
