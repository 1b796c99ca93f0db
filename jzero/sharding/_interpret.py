"""Runs a step's jaxpr on one device's values: the loop, and the recursion into sub-jaxprs.

The loop reads an equation's operands, asks the rules whether it can run on shards, and otherwise gathers
first. Collectives are never bound here; `Devices` decides them value by value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero import _jaxpr
from jzero.sharding import _analyse, _collectives, _rules
from jzero.sharding._analyse import Frame, split
from jzero.sharding._values import Devices, FullValue, ShardValue, Unreduced, Value, token_of


@dataclasses.dataclass
class Interpreter:
    """One run of the step, while it is being traced inside `shard_map`.

    Attributes:
      links: which dims are sharded.
      devices: the data axes, and the current pass.
      mean: reductions that JAX's AD placed are means (the loss is the mean over devices).
      axis_names: the mesh axes behind each axis name that the step uses.
      reduce_once: a step's own loop over microbatches sums gradients locally and reduces after it.
    """

    links: _analyse.Links
    devices: Devices
    mean: bool
    axis_names: dict[str, tuple[str, ...]]
    reduce_once: bool = False
    seen_pass: str | None = None
    last_varying: Any = None

    def run(self, frame: Frame, args: Sequence[Value]) -> list[Value]:
        """Values of the frame's outputs, given those of its inputs."""
        env: dict[_jaxpr.Var, Value] = dict(zip(frame.jaxpr.invars, args, strict=True))
        consts = [FullValue(_jaxpr.constant(value)) for value in frame.consts]
        env |= zip(frame.jaxpr.constvars, consts, strict=True)

        means: dict[_jaxpr.Var, Value] = {}

        def read(eqn: _jaxpr.Eqn | None, atom: _jaxpr.Atom) -> Value:
            if _jaxpr.is_literal(atom):
                return FullValue(_jaxpr.literal(atom))
            if frame.averages(eqn, atom):
                return means.setdefault(atom, self.mean_of(env[atom].x))
            return env[atom]

        for index, eqn in enumerate(frame.jaxpr.eqns):
            with _jaxpr.source_of(eqn):
                self.enter_pass(frame, eqn)
                handler = HANDLERS.get(eqn.primitive.name, apply)
                outs = handler(self, frame, index, eqn, [read(eqn, atom) for atom in eqn.invars])
            env |= zip(eqn.outvars, outs, strict=True)
            self.note_varying(frame, eqn, outs)
        return [read(None, atom) for atom in frame.jaxpr.outvars]

    # -- layouts ---------------------------------------------------------------------------------

    def dim_of(self, frame: Frame, atom: _jaxpr.Atom) -> int | None:
        """The dim along which `atom` is sharded if it is sharded at all."""
        if self.devices.num == 1 or self.devices.divergent:
            return None
        return self.links.sharded_dim(frame, atom, self.devices.num)

    def full(self, frame: Frame, atom: _jaxpr.Atom, value: Value) -> Any:
        """The whole array of an operand."""
        return self.devices.full(value, self.dim_of(frame, atom))

    def settle(self, frame: Frame, atom: _jaxpr.Atom, value: Value) -> FullValue | ShardValue:
        """The operand with its reduction done."""
        return self.devices.settle(value, self.dim_of(frame, atom))

    def as_dim(self, frame: Frame, atom: _jaxpr.Atom, value: Value, dim: int | None) -> Any:
        """The operand's array in a given layout."""
        return self.full(frame, atom, value) if dim is None else self.devices.shard(value, dim)

    def carried_dim(self, frame: Frame, out: _jaxpr.Var, ins: Sequence[Value]) -> int | None:
        """The layout in which a loop carries, or a branch returns, `out`."""
        dim = self.dim_of(frame, out)
        if out in frame.needs_full and not any(isinstance(value, ShardValue) for value in ins):
            return None
        return dim

    # -- passes ----------------------------------------------------------------------------------

    def enter_pass(self, frame: Frame, eqn: _jaxpr.Eqn) -> None:
        """Starts a new scope for gathers when the equation belongs to another pass than the last."""
        current = frame.pass_of(eqn)
        if frame.outer.autodiff is not None or current is None or current == self.seen_pass:
            return
        if self.seen_pass is not None and self.last_varying is not None:
            self.devices = dataclasses.replace(
                self.devices, scope=object(), token=token_of(self.last_varying)
            )
        self.seen_pass = current

    def note_varying(self, frame: Frame, eqn: _jaxpr.Eqn, outs: Sequence[Value]) -> None:
        """Remembers the latest value of the current pass: the next pass's token comes from it."""
        for var, value in zip(eqn.outvars, outs, strict=True):
            if isinstance(value, FullValue) and frame.varies(var):
                if jnp.issubdtype(var.aval.dtype, jnp.number):
                    self.last_varying = value.x

    def mean_of(self, x: Any) -> Unreduced:
        """The mean over the devices of a local value, taken when first needed."""
        return Unreduced(x, 1 / self.devices.num, x.dtype)

    def inside(self, divergent: bool = False) -> Interpreter:
        """The interpreter for a loop body or a branch: its gathers are its own."""
        devices = dataclasses.replace(
            self.devices,
            scope=object(),
            token=None,
            divergent=divergent or self.devices.divergent,
        )
        return dataclasses.replace(self, devices=devices, seen_pass=None, last_varying=None)


# --------------------------------------------------------------------------------------------------
# Ordinary equations.


def apply(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    """Runs an equation: pending if linear, on shards if its rule allows, else on whole values."""
    pending = _apply_linear(interp, eqn, ins)
    if pending is not None:
        return [pending]
    settled = [interp.settle(frame, a, v) for a, v in zip(eqn.invars, ins, strict=True)]
    rule = _rules.rule_for(eqn)
    if rule is not None and not any(frame.varies(out) for out in eqn.outvars):
        known = _known_view(interp, eqn, rule, settled)
        if known is not None and known[1] in known[0].views:
            return [known[0].views[known[1]]]
        outs = _apply_on_shards(interp, frame, eqn, rule, settled)
        if outs is not None:
            name = next((v.name for v in settled if isinstance(v, ShardValue)), "")
            outs = [dataclasses.replace(out, name=name) for out in outs]
            if known is not None and isinstance(outs[0], ShardValue):
                known[0].views[known[1]] = outs[0]
            return outs
    whole = [interp.devices.full(value) for value in settled]
    return [FullValue(out) for out in _jaxpr.bind(eqn, *whole)]


def _known_view(
    interp: Interpreter, eqn: _jaxpr.Eqn, rule: _rules.Rule, ins: list[FullValue | ShardValue]
) -> tuple[ShardValue, object] | None:
    """The shard of which the equation makes a view, and the key under which it is remembered."""
    if not (rule.linear and len(ins) == 1 and isinstance(ins[0], ShardValue)):
        return None
    return ins[0], (interp.devices.scope, eqn.primitive.name, str(eqn.params))


def _apply_linear(interp: Interpreter, eqn: _jaxpr.Eqn, ins: list[Value]) -> Unreduced | None:
    """The result before its reduction, if every operand still waits for one and may go on waiting."""
    name = eqn.primitive.name
    scalar_sum = name == "add" and eqn.outvars[0].aval.ndim == 0
    collects = name == "add" and any(isinstance(v, Unreduced) and v.collecting for v in ins)
    rule = _rules.RULES.get(name)
    if not (scalar_sum or collects or (rule is not None and rule.linear)):
        return None
    # Python's sum() starts from a literal 0, which adds nothing to wait for.
    zeros = [scalar_sum and _jaxpr.is_literal(a) and a.val == 0 for a in eqn.invars]
    terms = [value for value, zero in zip(ins, zeros, strict=True) if not zero]
    waiting = [v for v in terms if isinstance(v, Unreduced) and v.reduced is None]
    if not waiting or len(waiting) < len(terms):
        return None
    first, *rest = waiting
    if scalar_sum and not rest:
        return first
    if name == "convert_element_type":
        dtype = eqn.params["new_dtype"]
        floats = [jnp.issubdtype(d, jnp.floating) for d in (dtype, first.dtype, first.x.dtype)]
        return dataclasses.replace(first, dtype=dtype) if all(floats) else None
    scales = {value.scale for value in waiting} - {None}
    if len(scales) > 1 or any(value.dtype != first.dtype for value in rest):
        return None
    wire = jnp.result_type(*(value.x.dtype for value in waiting))
    xs = [value.x if not rest else value.x.astype(first.dtype) for value in waiting]
    (x,) = _jaxpr.bind(eqn, *xs)
    scale = scales.pop() if scales else None
    return dataclasses.replace(first, x=x.astype(wire), scale=scale, collecting=collects)


def _apply_on_shards(
    interp: Interpreter, frame: Frame, eqn: _jaxpr.Eqn, rule: _rules.Rule,
    ins: list[FullValue | ShardValue],
) -> list[Value] | None:  # fmt: skip
    """The result computed from shards, or None if the operands must be gathered."""
    maps, num = rule.dims(eqn), interp.devices.num
    reduced = _apply_reduction(interp, eqn, rule, maps, ins)
    if reduced is not None:
        return [reduced]
    dim = _output_dim(interp, frame, eqn, maps, ins)
    if dim is None:
        return None
    out_shapes = [out.aval.shape for out in eqn.outvars]
    if any(shape[dim] % num for shape in out_shapes):
        return None
    args = []
    for atom, value, dims in zip(eqn.invars, ins, maps, strict=True):
        # Dims of size 1 that the operation broadcasts stay as they are.
        own = dims.index(dim) if dim in dims else None
        if own is not None and atom.aval.shape[own] % num:
            return None
        args.append((value, own))
    arrays = [
        interp.devices.full(value) if own is None else interp.devices.shard(value, own)
        for value, own in args
    ]
    outs = _jaxpr.bind(eqn, *arrays, **rule.local(eqn, dim, num))
    return [ShardValue(out, dim, view_of=_view(eqn, rule, ins)) for out in outs]


def _view(
    eqn: _jaxpr.Eqn, rule: _rules.Rule, ins: list[FullValue | ShardValue]
) -> tuple[ShardValue, Callable[[Any], Any]] | None:
    """The operand, if the equation only rearranges it: a table and its transpose share a gather."""
    first, (operand, *rest) = eqn.invars[0], ins
    same_dtype = first.aval.dtype == eqn.outvars[0].aval.dtype
    if rest or not (rule.linear and same_dtype and isinstance(operand, ShardValue)):
        return None
    return operand, lambda whole: _jaxpr.bind(eqn, whole)[0]


def _apply_reduction(
    interp: Interpreter, eqn: _jaxpr.Eqn, rule: _rules.Rule, maps: _rules.DimMaps,
    ins: list[FullValue | ShardValue],
) -> Value | None:  # fmt: skip
    """Sum, maximum or minimum over a sharded dim: local first, then over the devices."""
    if rule.reduces is None or not isinstance(ins[0], ShardValue):
        return None
    if maps[0][ins[0].dim] is not None:
        return None
    (local,) = _jaxpr.bind(eqn, ins[0].x)
    if rule.reduces == "sum":
        return Unreduced(local, 1.0, local.dtype)
    return FullValue(_collectives.all_reduce(local, interp.devices.axes, rule.reduces))


def _output_dim(
    interp: Interpreter, frame: Frame, eqn: _jaxpr.Eqn, maps: _rules.DimMaps,
    ins: list[FullValue | ShardValue],
) -> int | None:  # fmt: skip
    """The dim along which the output is computed in shards; None for whole."""
    out = eqn.outvars[0]
    needs_full = any(out in frame.needs_full for out in eqn.outvars)
    wanted = interp.dim_of(frame, out)
    shards = [(value, dims) for value, dims in zip(ins, maps, strict=True)
              if isinstance(value, ShardValue)]  # fmt: skip
    if not shards:
        comes_from = eqn.primitive.name == "broadcast_in_dim" or any(
            wanted in dims for dims in maps
        )
        return wanted if comes_from and not needs_full else None
    survivors = [dims[value.dim] for value, dims in shards if dims[value.dim] is not None]
    if not survivors:
        return None
    sharded_bytes = max(
        _rules.size_in_bytes(atom.aval)
        for atom, value in zip(eqn.invars, ins, strict=True)
        if isinstance(value, ShardValue)
    )
    # Gather before growing: a bias is gathered, not its broadcast over the batch; bf16, not its upcast.
    if needs_full and _rules.size_in_bytes(out.aval) > sharded_bytes:
        return None
    return wanted if wanted in survivors else survivors[0]


# --------------------------------------------------------------------------------------------------
# Reductions and the step's own collectives.


def _identity(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    return ins


def _mark(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    cotangent, _ = ins
    if not (frame.reads(eqn)[0] and not frame.varies(eqn.outvars[0])):
        return [cotangent]
    x = interp.full(frame, eqn.invars[0], cotangent)
    leaf = interp.links.leaf_of(frame, eqn.outvars[0])
    return [Unreduced(x, 1 / interp.devices.num, x.dtype, leaf)]


def _psum(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    everywhere = set(_analyse.axes_of(eqn)) == set(interp.axis_names)
    if not everywhere or eqn.params.get("axis_index_groups"):
        return _collective(interp, frame, index, eqn, ins)
    num = interp.devices.num
    scale = 1 / num if interp.mean else 1.0
    outs: list[Value] = []
    operands = zip(eqn.invars, eqn.outvars, frame.reads(eqn), ins, strict=True)
    for atom, out, axes, value in operands:
        x = interp.full(frame, atom, value)
        if axes:
            outs.append(Unreduced(x, scale, x.dtype, interp.links.leaf_of(frame, out)))
        else:  # The sum of what all devices have in common.
            outs.append(FullValue(x * jnp.asarray(num * scale, x.dtype)))
    return outs


def _collective(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    names: dict[str, Any] = {}
    for param in ("axes", "axis_name"):
        if param in eqn.params:
            axes = tuple(axis for name in _analyse.axes_of(eqn) for axis in interp.axis_names[name])
            names[param] = axes
    if eqn.primitive.name == "axis_index":
        return [FullValue(lax.axis_index(names["axis_name"]))]
    whole = [interp.full(frame, a, v) for a, v in zip(eqn.invars, ins, strict=True)]
    if eqn.primitive.name in _analyse.REDUCTIONS:
        return [FullValue(lax.psum(x, names["axes"])) for x in whole]
    return [FullValue(out) for out in _jaxpr.bind(eqn, *whole, **names)]


# --------------------------------------------------------------------------------------------------
# Calls, branches and loops. Bodies are traced by JAX's own functions, with shards going in and out.


def _call(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    (child,) = frame.children[index]
    return interp.run(child, ins)


def _remat(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    if not _jaxpr.is_rematted(eqn):
        return _call(interp, frame, index, eqn, ins)
    # One gather serves recomputation and backward pass. Activations are held back until the backward
    # pass arrives, as JAX does; shards are not, so that gathers can start early (they wait for the
    # pass's token instead).
    if _jaxpr.prevents_cse(eqn):
        held = [
            i for i, (atom, value) in enumerate(zip(eqn.invars, ins, strict=True))
            if isinstance(value, FullValue) and frame.varies(atom)
        ]  # fmt: skip
        if held:
            arrays = lax.optimization_barrier([ins[i].x for i in held])
            for i, x in zip(held, arrays, strict=True):
                ins[i] = FullValue(x, ins[i].name)
    devices = interp.devices
    interp.devices = dataclasses.replace(devices, scope=object())
    with jax.named_scope("checkpoint"):
        outs = _call(interp, frame, index, eqn, ins)
    interp.devices = devices
    return outs


def _cond(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    choice, *operands = ins
    divergent = bool(frame.reads(eqn)[0])
    if divergent:
        operands = [
            FullValue(interp.full(frame, atom, value), value.name)
            for atom, value in zip(eqn.invars[1:], operands, strict=True)
        ]
    settled = [
        interp.settle(frame, atom, v) for atom, v in zip(eqn.invars[1:], operands, strict=True)
    ]
    dims = [None if divergent else interp.carried_dim(frame, out, settled) for out in eqn.outvars]
    pending = [divergent and _analyse.is_unreduced(frame, out) for out in eqn.outvars]

    def branch(child: Frame) -> Callable[[list[Any]], list[Any]]:
        def body(arrays: list[Any]) -> list[Any]:
            inner = interp.inside(divergent)
            values = [_like(v)(x) for v, x in zip(settled, arrays, strict=True)]
            outs = inner.run(child, values)
            return [
                value.x.astype(out.aval.dtype)
                if wait and isinstance(value, Unreduced)
                else inner.as_dim(child, atom, value, dim)
                for atom, value, dim, wait, out in zip(
                    child.jaxpr.outvars, outs, dims, pending, eqn.outvars, strict=True
                )
            ]

        return body

    arrays = lax.switch(
        interp.full(frame, eqn.invars[0], choice).astype(jnp.int32),
        [branch(child) for child in frame.children[index]],
        [value.x for value in settled],
    )
    scale = 1 / interp.devices.num
    return [
        Unreduced(x, scale, x.dtype) if wait else _value(x, dim)
        for x, dim, wait in zip(arrays, dims, pending, strict=True)
    ]


def _scan(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    scan, (child,) = _jaxpr.scan_parts(eqn), frame.children[index]
    differentiated = frame.pass_of(eqn) is not None
    consts, init, xs = split(ins, scan.num_consts, scan.num_carry)
    const_atoms, init_atoms, xs_atoms = split(eqn.invars, scan.num_consts, scan.num_carry)
    consts = _loop_consts(interp, frame, child, const_atoms, consts, differentiated)
    carry_out, ys_out = split(eqn.outvars, scan.num_carry)
    sums = (
        _analyse.running_sums(child, scan.num_consts, scan.num_carry)
        if (differentiated or interp.reduce_once) and interp.devices.num > 1
        else frozenset()
    )
    init = [interp.settle(frame, a, v) for a, v in zip(init_atoms, init, strict=True)]
    dims = [interp.carried_dim(frame, out, [v]) for out, v in zip(carry_out, init, strict=True)]
    starts = [
        jnp.zeros(atom.aval.shape, atom.aval.dtype) if i in sums
        else interp.as_dim(frame, atom, value, dim)
        for i, (atom, value, dim) in enumerate(zip(init_atoms, init, dims, strict=True))
    ]  # fmt: skip
    slices = [
        _scanned(interp.settle(frame, a, v), interp) for a, v in zip(xs_atoms, xs, strict=True)
    ]
    y_forms: list[Callable[[Any], Value]] = []
    scales: dict[int, float] = {}

    def body(carry: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any]]:
        inner = interp.inside()
        carried = [
            Unreduced(x, None, x.dtype, collecting=True)
            if i in sums
            else _value(x, dims[i], init[i].name)
            for i, x in enumerate(carry)
        ]
        sliced = [_like(v, -1)(x) for v, x in zip(slices, arrays, strict=True)]
        outs = inner.run(child, [*consts, *carried, *sliced])
        carry_outs, y_outs = split(outs, scan.num_carry)
        carry_atoms, y_atoms = split(child.jaxpr.outvars, scan.num_carry)
        scales.update((i, carry_outs[i].scale) for i in sums)
        new_carry = [
            value.x if i in sums else inner.as_dim(child, atom, value, dims[i])
            for i, (atom, value) in enumerate(zip(carry_atoms, carry_outs, strict=True))
        ]
        ys = [inner.settle(child, a, v) for a, v in zip(y_atoms, y_outs, strict=True)]
        y_forms[:] = [_like(v, 1) for v in ys]
        return new_carry, [value.x for value in ys]

    carry, ys = lax.scan(
        body, starts, [value.x for value in slices],
        length=scan.length, reverse=scan.reverse, unroll=scan.unroll,
    )  # fmt: skip
    outs: list[Value] = []
    for i, x in enumerate(carry):
        if i in sums:
            leaf = interp.links.leaf_of(frame, carry_out[i])
            total = interp.devices.settle(Unreduced(x, scales[i], x.dtype, leaf), dims[i])
            before = interp.as_dim(frame, init_atoms[i], init[i], dims[i])
            outs.append(dataclasses.replace(total, x=total.x + before))
        else:
            outs.append(_value(x, dims[i], init[i].name))
    return outs + [form(y) for form, y in zip(y_forms, ys, strict=True)]


def _while(
    interp: Interpreter, frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Value]
) -> list[Value]:
    loop, (cond, body) = _jaxpr.while_parts(eqn), frame.children[index]
    divergent = any(cond.out_varying)
    differentiated = divergent or frame.pass_of(eqn) is not None
    cond_atoms, body_atoms, init_atoms = split(
        eqn.invars, loop.num_cond_consts, loop.num_body_consts
    )
    cond_ins, body_ins, init = split(ins, loop.num_cond_consts, loop.num_body_consts)
    cond_ins = _loop_consts(interp, frame, cond, cond_atoms, cond_ins, True)
    body_ins = _loop_consts(interp, frame, body, body_atoms, body_ins, differentiated)
    init = [interp.settle(frame, a, v) for a, v in zip(init_atoms, init, strict=True)]
    dims = [
        None if divergent else interp.carried_dim(frame, out, [value])
        for out, value in zip(eqn.outvars, init, strict=True)
    ]

    def run(child: Frame, consts: list[Value], carry: list[Any]) -> tuple[Interpreter, list[Value]]:
        inner = interp.inside(divergent)
        carried = [_value(x, dim) for x, dim in zip(carry, dims, strict=True)]
        return inner, inner.run(child, [*consts, *carried])

    def keep_going(carry: list[Any]) -> Any:
        inner, (again,) = run(cond, cond_ins, carry)
        return inner.full(cond, cond.jaxpr.outvars[0], again)

    def step(carry: list[Any]) -> list[Any]:
        inner, outs = run(body, body_ins, carry)
        return [
            inner.as_dim(body, atom, value, dim)
            for atom, value, dim in zip(body.jaxpr.outvars, outs, dims, strict=True)
        ]

    starts = [interp.as_dim(frame, *args) for args in zip(init_atoms, init, dims, strict=True)]
    arrays = lax.while_loop(keep_going, step, starts)
    return [_value(x, dim) for x, dim in zip(arrays, dims, strict=True)]


def _loop_consts(
    interp: Interpreter, frame: Frame, child: Frame, atoms: list[_jaxpr.Atom],
    consts: list[Value], differentiated: bool,
) -> list[Value]:  # fmt: skip
    """What a loop closes over: gathered before it if every iteration is part of one pass.

    A time loop would else gather its weights at every time step. A loop *of* train steps or microbatches
    holds whole passes, and gathers inside them, so that no more than a pass needs is alive.
    """
    settled = [interp.settle(frame, a, v) for a, v in zip(atoms, consts, strict=True)]
    return [
        FullValue(interp.devices.full(value), value.name)
        if differentiated and var in child.needs_full
        else value
        for var, value in zip(child.jaxpr.invars, settled, strict=False)
    ]


def _scanned(value: FullValue | ShardValue, interp: Interpreter) -> FullValue | ShardValue:
    """A value a scan takes slices of; one sharded along the looped dim is gathered whole."""
    if isinstance(value, ShardValue) and value.dim == 0:
        return FullValue(interp.devices.full(value), value.name)
    return value


def _value(x: Any, dim: int | None, name: str = "") -> FullValue | ShardValue:
    return FullValue(x, name) if dim is None else ShardValue(x, dim, name)


def _like(value: FullValue | ShardValue, offset: int = 0) -> Callable[[Any], Value]:
    """Wraps an array in the layout and name of `value`, `dim` moved by `offset`."""
    dim = value.dim + offset if isinstance(value, ShardValue) else None
    name = value.name  # Not the value itself: its tracer must not outlive the loop's trace.
    return lambda x: _value(x, dim, name)


Handler = Callable[[Interpreter, Frame, int, _jaxpr.Eqn, list[Value]], list[Value]]

HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(_analyse.COLLECTIVES, _collective),
    **dict.fromkeys(_analyse.REDUCTIONS, _psum),
    **dict.fromkeys(_rules.IDENTITIES, _identity),
    **dict.fromkeys(_jaxpr.CALLS, _call),
    _analyse.MARK: _mark,
    "remat2": _remat,
    "checkpoint": _remat,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
