"""An expert's annotations, written by a pass: a step's jaxpr becomes the same with sharding constraints.

A value is *of the state* if it follows from the state alone, else *of the batch*; an activation is of the
batch and its dim 0 is the batch's. Three rules, at each equation, also in loops and in what is recomputed:

* activations are sharded as the batch is;
* what is of the state and meets an activation is replicated there;
* what is of the batch, and has the shape of a parameter or of a layer's slice of one, is sharded as that is.

Constraints change no value, so a wrong guess costs traffic and nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.tracing._jaxpr import open_jaxpr, scan_parts

_BODIES = {"scan", "checkpoint", "remat2"}
_CALLS = {"jit", "pjit", "custom_jvp_call", "custom_vjp_call"}
_REDUCES = {"dot_general", "conv_general_dilated", "reduce_sum", "scatter-add", "transpose"}

Kinds = list[bool]  # of values: whether they are of the batch


def with_constraints(
    step: Callable[..., Any], mesh: Mesh, shards: Mapping[tuple[int, ...], P], rows: set[int],
    *, stored_whole: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """`step(state, batch)` with constraints; `rows` are the sizes that the batch's dim has in it.

    Gradients are sharded as `shards` says by shape; so are the parameters, if they are not stored whole.
    """

    def constrained(state: Any, batch: Any) -> Any:
        closed, shapes = jax.make_jaxpr(step, return_shape=True)(state, batch)
        leaves, of_state = jax.tree.leaves((state, batch)), len(jax.tree.leaves(state))
        kinds = [i >= of_state for i in range(len(leaves))]
        outs = _Writer(mesh, shards, rows, stored_whole).run(
            closed.jaxpr, closed.consts, leaves, kinds
        )
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return constrained


class _Writer:
    def __init__(
        self, mesh: Mesh, shards: Mapping[tuple[int, ...], P], rows: set[int], stored_whole: bool
    ):
        self._mesh, self._shards, self._rows = mesh, shards, rows
        self._stored = {} if stored_whole else shards

    def run(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], kinds: Kinds
    ) -> list[Any]:
        """Evaluates a jaxpr, and writes constraints."""
        found = _kinds(jaxpr, kinds)
        gathered: dict[Any, Any] = {}
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(v: Any) -> Any:
            return v.val if isinstance(v, core.Literal) else values[v]

        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            ins_kinds = [found.get(v, False) for v in _hashable(eqn.invars)]
            mine = [found[v] for v in eqn.outvars]
            if eqn.primitive.name in _BODIES | _CALLS and any(ins_kinds):
                outs = self._inside(eqn, ins, ins_kinds)
            else:
                if self._meets_rows(eqn, ins_kinds):
                    for i, v in enumerate(_hashable(eqn.invars)):
                        if v is not None and not ins_kinds[i]:
                            if v not in gathered:  # Once in a body: XLA would gather for each use.
                                gathered[v] = self._gathered(ins[i])
                            ins[i] = gathered[v]
                outs = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(eqn.params))
                outs = outs if eqn.primitive.multiple_results else [outs]
            outs = [self._settled(eqn, x, b) for x, b in zip(outs, mine, strict=True)]
            values.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _inside(self, eqn: Any, ins: list[Any], kinds: Kinds) -> list[Any]:
        name = "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"
        inner = eqn.params[name]
        jaxpr, consts = open_jaxpr(inner)
        if eqn.primitive.name == "scan":
            parts = scan_parts(eqn)
            kinds = _carried(jaxpr, kinds, parts.num_consts, parts.num_carry)

        def body(*args: Any) -> list[Any]:
            return self.run(jaxpr, consts, args, kinds)

        if eqn.primitive.name not in _BODIES:
            return body(*ins)  # Calls are inlined: their derivatives have been taken.
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
        new = jax.make_jaxpr(body)(*shapes)
        params = {name: new if isinstance(new, type(inner)) else new.jaxpr}
        return eqn.primitive.bind(*ins, **eqn.params | params)

    def _meets_rows(self, eqn: Any, kinds: Kinds) -> bool:
        """Whether what is of the state meets an activation here, or is repeated for each row."""
        if all(kinds):
            return False
        made = any(self._has_rows(v.aval) for v in eqn.outvars)
        if eqn.primitive.name == "broadcast_in_dim":
            return made
        met = any(b and self._has_rows(v.aval) for v, b in zip(eqn.invars, kinds, strict=True))
        return any(kinds) and (made or met)

    def _settled(self, eqn: Any, x: Any, of_batch: bool) -> Any:
        if self._has_rows(x) and (of_batch or eqn.primitive.name == "broadcast_in_dim"):
            return self._constrain(x, P("data"))
        spec = self._shards.get(x.shape) if of_batch and eqn.primitive.name in _REDUCES else None
        return x if spec is None else self._constrain(x, spec)

    def _gathered(self, x: Any) -> Any:
        # Pinned twice, or XLA may gather first and cast then.
        stored = self._stored.get(getattr(x, "shape", ()))
        return self._constrain(x if stored is None else self._constrain(x, stored), P())

    def _has_rows(self, x: Any) -> bool:
        return len(x.shape) > 1 and x.shape[0] in self._rows and x.shape not in self._shards

    def _constrain(self, x: Any, spec: P) -> Any:
        if not getattr(x, "ndim", 0) or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, spec))


def _hashable(variables: Sequence[Any]) -> list[Any]:
    return [None if isinstance(v, core.Literal) else v for v in variables]


def _kinds(jaxpr: Any, kinds: Kinds) -> dict[Any, bool]:
    """Of every value of a jaxpr; `kinds` are those of its arguments."""
    found = dict(zip(jaxpr.invars, kinds, strict=True)) | dict.fromkeys(jaxpr.constvars, False)
    for eqn in jaxpr.eqns:
        ins = [found.get(v, False) for v in _hashable(eqn.invars)]
        found.update(dict.fromkeys(eqn.outvars, any(ins)))
    return found


def _carried(jaxpr: Any, kinds: Kinds, num_consts: int, num_carry: int) -> Kinds:
    """Of the arguments of a scan's body: a carry is of the batch if it is so in any iteration."""
    while True:
        found = _kinds(jaxpr, kinds)
        outs = [found.get(v, False) for v in _hashable(jaxpr.outvars)]
        carries = [a or b for a, b in zip(kinds[num_consts:], outs[:num_carry], strict=False)]
        new = [*kinds[:num_consts], *carries, *kinds[num_consts + num_carry :]]
        if new == kinds:
            return kinds
        kinds = new
