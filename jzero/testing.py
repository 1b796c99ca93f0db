# SPDX-License-Identifier: Apache-2.0
"""jzero's two promises as assertions for your own test suite: the same training, and exact traffic.

They run on any devices, such as 8 virtual CPU devices. For those, put into the environment before JAX is
imported (tests/conftest.py of a project is the place)::

    JAX_PLATFORMS=cpu
    XLA_FLAGS="--xla_force_host_platform_device_count=8
               --xla_cpu_enable_concurrency_optimized_scheduler=false"
    PJRT_NPROC=32

The second flag and PJRT_NPROC keep virtual devices from waiting for each other for ever: XLA:CPU may reach
independent collectives in different orders, and each device that waits holds a thread of its pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jzero import _compare
from jzero._compare import Tolerance as Tolerance
from jzero._errors import MeshError, MismatchError, OptionError, a_type, message
from jzero._option_groups import axes_of
from jzero._shard_train_step import shard_train_step
from jzero._sharded_step import ShardedStep
from jzero.sharding.analysis._traffic import Collective
from jzero.tracing._returned import find_state

SAME, COLLECTIVES = "assert_same_training", "assert_collectives"
_SHOWN = 8  # leaves that a message names
_STATIC = ("static_argnums", "static_argnames")


def assert_same_training(
    step_fn: Callable[..., Any],
    init_fn: Callable[[], Any],
    batches: Iterable[Any],
    *,
    stage: int = 3,
    reference: Callable[..., Any] | None = None,
    tolerance: Tolerance | None = None,
    **options: Any,
) -> None:
    """Asserts that a sharded step trains as it does on one device.

    Both start from one state and see the same batches, in one process::

        for batch in batches:
            sharded = shard_train_step(step_fn, stage=stage, ...)(sharded state, batch)
            plain = jax.jit(step_fn)(plain state, batch)
            every leaf of state and outputs is equal, within the tolerance

    >>> import jax, jax.numpy as jnp
    >>> from jzero.testing import assert_same_training
    >>> def step_fn(w, x):
    ...     loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    ...     return w - 0.1 * grad, {"loss": loss}
    >>> batches = [jax.random.normal(jax.random.key(i), (16, 8)) for i in range(3)]
    >>> assert_same_training(step_fn, lambda: jnp.ones((8, 8)), batches, stage=3)

    A step with collectives of its own (`Axes(axis_name=)`) does not run on one device, and means what its
    devices do, with keys and statistics of their own: it needs a `reference`. No other step does.

    Quantized communication (`gather_dtype`, `reduce_dtype`) trains near to one device, and no tolerance
    follows from its format: an error is a share of what a device sends, most of which may cancel in a sum,
    and an optimizer may divide the rest by itself. For a step that sends something quantized, pass a
    `tolerance` that you have measured, or a `reference` that rounds alike. Without the two options the step
    is checked like any other, which finds every difference that is not rounding. Whether rounding harms
    training is a question for losses of several seeds: `experiments/wire/quality.py` compares them.

    Args:
      step_fn: `step_fn(state, *args) -> (state, metrics)`, or the state alone.
      init_fn: `init_fn() -> state`; called once. With a state of several arguments, the tuple of them.
      batches: for each step, a tuple of the arguments that follow the state, or the one argument if it
        is not a tuple.
      stage: as for `shard_train_step`.
      reference: what one device must do instead of `step_fn`, with the whole batch.
      tolerance: for all floating leaves. By default by dtype, for sums taken in another order: float64
        1e-11 of the element plus 1e-12 of the leaf's largest, float32 2e-5 and 1e-5, float16 4e-3 and
        2e-3, bfloat16 2e-2 and 1e-2; there is no default for quantized formats. Everything else must be
        equal.
      **options: the other options of `shard_train_step`. Leaves are sharded however small they are:
        `Axes(min_shard_bytes=)` is 0 by default here.

    Raises:
      MismatchError: leaves differ; it names those of the first step in which any does, with index, both
        values, and their distance in units in the last place.
      MeshError: there is one device, and nothing to compare.
      OptionError: there are no batches, `Axes(axis_name=)` is given without `reference`, or something is sent
        quantized without `tolerance` and `reference`.
    """
    axes = axes_of(options.pop("axes", None))
    if axes.axis_name is not None and reference is None:
        raise OptionError(message(
            SAME, f"Axes(axis_name={axes.axis_name!r}) without reference",
            "A step with collectives of its own does not run on one device.",
            "Pass reference=, the step without them."))  # fmt: skip
    if axes.min_shard_bytes is None:
        axes = dataclasses.replace(axes, min_shard_bytes=0)
    train_step = shard_train_step(step_fn, stage=stage, axes=axes, **options)
    static = {name: options[name] for name in _STATIC if name in options}
    plain_step = jax.jit(reference or step_fn, **static)
    plain: Any = jax.tree.map(jnp.array, init_fn())
    sharded: Any = None
    num_batches = 0
    for num_batches, batch in enumerate(batches, 1):
        args = _args(batch)
        if num_batches == 1:
            sharded = _place_copy(train_step, plain, args)
            if tolerance is None and reference is None:
                _check_exact(train_step, plain, args)
        sharded, outs = _step(train_step, train_step, sharded, args)
        plain, plain_outs = _step(train_step, plain_step, plain, args)
        found = [
            *_differences(sharded, plain, "state", tolerance),
            *_differences(outs, plain_outs, "output", tolerance),
        ]
        if found:
            raise MismatchError(message(
                f"{SAME}, batches[{num_batches - 1}]", found,
                f"At stage {stage} a step must train on several devices as on one.",
                "In a step with collectives of its own: is some result still device-varying? What its "
                "devices are to do differently needs another reference=; other rounding needs "
                "tolerance=jzero.testing.Tolerance(...).", shown=_SHOWN))  # fmt: skip
    if not num_batches:
        raise OptionError(message(
            SAME, "batches is empty", "Each batch is one step.", "Pass at least one."))  # fmt: skip


def assert_collectives(
    train_step: ShardedStep,
    state: Any,
    batch: Any,
    expected: Mapping[Any, Any],
) -> None:
    """Asserts what a step moves between devices: all of it, to the element.

    Nothing runs: it is the traffic of `train_step.describe(state, batch)`, loops multiplied out, for
    arrays or shapes, and on a `jax.sharding.AbstractMesh` of any size.

    >>> import jax, jax.numpy as jnp, jzero
    >>> from jzero.testing import assert_collectives
    >>> def step_fn(w, x):
    ...     loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    ...     return w - 0.1 * grad, {"loss": loss}
    >>> train_step = jzero.shard_train_step(step_fn, stage=1, axes=jzero.Axes(min_shard_bytes=0))
    >>> w, x = jnp.ones((8, 8)), jnp.ones((16, 8))
    >>> assert_collectives(train_step, w, x, {
    ...     ("reduce-scatter", "float32", "data"): 64,      # the gradient
    ...     "all-gather": (64, 1),                          # the new parameters, in one collective
    ...     "all-reduce": 1,                                # the loss
    ... })

    Args:
      train_step: what `shard_train_step` returned.
      state: the step's state, arrays or shapes.
      batch: a tuple of the arguments that follow it, or the one argument if it is not a tuple.
      expected: elements by kind of collective. A kind is an op ('all-gather', 'reduce-scatter',
        'all-reduce', ...), or a tuple of op, dtype and axes, the latter optional ('node',
        or 'node,local' for both at once; None for any). Elements are an int, or `(elements, times)` with
        how many collectives run. A kind that is not listed must not occur.

    Raises:
      MismatchError: a kind moves something else, or is not in `expected`; it names the leaves.
      OptionError: `train_step` or `expected` are not of that form, or two kinds overlap.
    """
    if not isinstance(train_step, ShardedStep):
        raise OptionError(message(
            COLLECTIVES, f"train_step is {a_type(train_step)}",
            "Only jzero's own steps say what they move.",
            "Pass what jzero.shard_train_step returned."))  # fmt: skip
    kinds = {_kind(key): _amount(key, value) for key, value in expected.items()}
    groups: dict[tuple[str | None, ...], list[Collective]] = {kind: [] for kind in kinds}
    beside = train_step._beside(state, _args(batch))
    args, kwargs = train_step._programs.with_state(COLLECTIVES, state, beside, {})
    for c in train_step.unbound().describe(*args, **kwargs).traffic:
        own = (c.op, c.dtype, ",".join(c.axes))
        matches = [
            kind for kind in kinds if all(k in (None, o) for k, o in zip(kind, own, strict=True))
        ]
        if len(matches) > 1:
            raise OptionError(message(
                COLLECTIVES, f"{' and '.join(map(_name, matches))} both mean {_name(own)}",
                "A collective is counted once.", "Drop one of them."))  # fmt: skip
        groups.setdefault(matches[0] if matches else own, []).append(c)
    found = [
        f"{_name(kind)}: {wrong}"
        for kind, group in groups.items()
        if (wrong := _wrong_amount(group, *kinds.get(kind, (0, None))))
    ]
    if found:
        raise MismatchError(message(
            COLLECTIVES, found, "Elements are of whole values, times how often a step moves them.",
            "Correct expected, or read print(train_step.describe(...)).", things="kinds"))  # fmt: skip


def _args(batch: Any) -> tuple[Any, ...]:
    return batch if isinstance(batch, tuple) else (batch,)


def _place_copy(train_step: ShardedStep, state: Any, beside: tuple[Any, ...]) -> Any:
    """A copy of the state in the plan's layout, which the step may consume."""
    args, kwargs = train_step._programs.with_state(SAME, state, beside, {})
    if train_step.plan(*args, **kwargs).num_devices == 1:
        raise MeshError(message(
            SAME, "the mesh has 1 device", "Several devices are compared with one.",
            "Set XLA_FLAGS=--xla_force_host_platform_device_count=8 before JAX is imported (see "
            "jzero.testing), or pass mesh=."))  # fmt: skip
    return train_step.shard(jax.tree.map(jnp.array, state), *beside)


def _check_exact(train_step: ShardedStep, state: Any, beside: tuple[Any, ...]) -> None:
    """Refuses a step that communicates quantized values."""
    args, kwargs = train_step._programs.with_state(SAME, state, beside, {})
    coded = {leaf.path for leaf in train_step.plan(*args, **kwargs).leaves if leaf.coded}
    if coded:
        traffic = train_step.describe(*args, **kwargs).traffic
        coded &= {c.leaf for c in traffic if c.dtype == "uint8"}
    if coded:
        raise OptionError(message(
            SAME, [f"{path} is sent quantized" for path in sorted(coded)],
            "Quantized values train near to one device, and how near does not follow from the format.",
            "Drop gather_dtype and reduce_dtype to check every leaf; with them pass "
            "tolerance=jzero.testing.Tolerance(...), measured, or a reference= that rounds alike. Losses of "
            "several seeds tell whether rounding harms (docs/guide/precision.md).", shown=4))  # fmt: skip


def _step(
    train_step: ShardedStep, step: Callable[..., Any], state: Any, beside: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Calls `step` as `train_step` is called; returns the new state, and the other results."""
    args, kwargs = train_step._programs.with_state(SAME, state, beside, {})
    outs = step(*args, **kwargs)
    signature = train_step._programs.signature
    named = signature.named(state, SAME)
    if signature.declared:
        return find_state(outs, named).apart(named)
    tree: Any = jax.tree.structure(state)
    return (outs, None) if jax.tree.structure(outs) == tree else (outs[0], (None, *outs[1:]))


def _differences(actual: Any, desired: Any, name: str, tolerance: Tolerance | None) -> list[str]:
    hosts = _compare.to_host(actual), _compare.to_host(desired)
    return list(_compare.differences(*hosts, name, tolerance))


def _kind(key: Any) -> tuple[str | None, ...]:
    parts = (key,) if isinstance(key, str) else key
    fits = isinstance(parts, tuple) and 1 <= len(parts) <= 3 and isinstance(parts[0], str)
    if not fits or not all(isinstance(part, str | None) for part in parts[1:]):
        raise OptionError(message(
            COLLECTIVES, f"expected has the kind {key!r}", "A kind is an op, or (op, dtype, axes).",
            "Write 'all-gather' or ('all-gather', 'bfloat16', 'data')."))  # fmt: skip
    return (*parts, *[None] * (3 - len(parts)))


def _amount(key: Any, value: Any) -> tuple[int, int | None]:
    amount = value if isinstance(value, tuple) else (value, None)
    if len(amount) != 2 or not isinstance(amount[0], int) or not isinstance(amount[1], int | None):
        raise OptionError(message(
            COLLECTIVES, f"expected[{key!r}] is {value!r}", "It is elements, or (elements, times).",
            "Write an int, or a tuple of two."))  # fmt: skip
    return amount


def _name(kind: tuple[str | None, ...]) -> str:
    op, dtype, axes = kind
    return " ".join(filter(None, [op, dtype, axes and f"over {axes}"]))


def _wrong_amount(group: list[Collective], elements: int, times: int | None) -> str | None:
    moved, ran = sum(c.total_elements for c in group), sum(c.times for c in group)
    if moved == elements and times in (None, ran):
        return None
    expected = f"{elements:,} elements" + (f" in {times}" if times is not None else "")
    leaves: dict[str, int] = {}
    for c in group:
        leaf = c.leaf or "no leaf's"
        leaves[leaf] = leaves.get(leaf, 0) + c.total_elements
    largest = sorted(leaves.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{leaf} {num:,}" for leaf, num in largest[:4])
    more = ", ..." if len(largest) > 4 else ""
    return f"{moved:,} elements in {ran}, expected {expected}" + (
        f" ({shown}{more})" if shown else ""
    )
