# SPDX-License-Identifier: Apache-2.0
"""Side effects (prints, callbacks) as calls of the host by one device.

Otherwise every device would call, and a host function whose result depends on more than its arguments would
return a different one to each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.typing import ArrayLike

from jzero.ir._writer import JaxprWriter
from jzero.tracing import _jaxpr, _lines
from jzero.tracing._types import Atom, Eqn

Shapes = list[jax.ShapeDtypeStruct]
WHOLE_ONCE = "a callback gets whole values, once"
_FAILED = jax.ShapeDtypeStruct((), np.int32)


class HostCall:
    """An equation's side effect, as a call of the host.

    If only the calling device failed, the others would wait for it at their next collective, and XLA would
    end the process. So unless `raises`, a failed call returns 1 as its first result, and `write_fail` raises
    its error on every device.
    """

    def __init__(self, eqn: Eqn, raises: bool):
        self._eqn, self._raises = eqn, raises
        self.shapes: Shapes = [_FAILED]
        self.shapes += [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.outvars]
        self._error: Exception | None = None

    def write(
        self, writer: JaxprWriter, first: Atom, token: Atom, ins: Sequence[Atom]
    ) -> list[Atom]:
        """Writes the call, by the device where `first` is true. Returns `failed` and the results, or zeros.

        The call waits for `token`, any value: JAX keeps effects in order on one device only.
        """
        return _written(writer, self._called, self.shapes, first, [token, *ins])

    def write_fail(self, writer: JaxprWriter, failed: Atom) -> Atom:
        """Writes the raise of the error if the call has `failed`. Returns 0, available only afterwards."""
        (has_failed,) = writer.add(lax.ne_p, [failed, _jaxpr.scalar(0, np.int32)])
        return _written(writer, self._fail, [_FAILED], has_failed, [failed])[0]

    def _called(self, token: np.ndarray, *arrays: np.ndarray) -> list[ArrayLike]:
        primitive, params = self._eqn.primitive, self._eqn.params
        try:
            if primitive.name == "io_callback":
                return [np.int32(0), *params["callback"](*arrays)]
            primitive.impl(*arrays, **params)
        except Exception as error:
            if self._raises:
                raise
            self._error = error
            failed, *others = self.shapes
            return [np.ones((), failed.dtype), *(np.zeros(x.shape, x.dtype) for x in others)]
        return [np.int32(0)]

    def _fail(self, failed: np.ndarray) -> list[ArrayLike]:
        raise self._error or RuntimeError("a callback failed in the process of the first device")


def _written(
    writer: JaxprWriter, host: Callable[..., list[ArrayLike]], shapes: Shapes, test: Atom,
    operands: Sequence[Atom],
) -> list[Atom]:  # fmt: skip
    def run(test: jax.Array, *xs: jax.Array) -> list[jax.Array]:
        def call(*xs: jax.Array) -> list[jax.Array]:
            found: list[jax.Array] = io_callback(host, shapes, *xs)
            return found

        def zeros(*_: jax.Array) -> list[jax.Array]:
            return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]

        found: list[jax.Array] = lax.cond(test, call, zeros, *xs)
        return found

    types = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in [test, *operands]]
    traced = _jaxpr.trace_here(run, *types)
    jaxpr = _lines.written_for(traced.jaxpr, writer.source)
    return writer.write(jaxpr, traced.consts, [test, *operands], writer.source)


def without_calls(eqn: Eqn) -> Eqn:
    """The equation in which no device calls the host: each `HostCall` returns zeros."""
    if not _jaxpr.has_side_effects(eqn):
        return eqn
    branches = _jaxpr.cond_parts(eqn) if eqn.primitive.name == "cond" else []
    if any(inner.primitive.name == "io_callback" for body, _ in branches for inner in body.eqns):
        never = _jaxpr.scalar(0, eqn.invars[0].aval.dtype)
        return eqn.replace(invars=[never, *eqn.invars[1:]])
    return _jaxpr.with_inner(
        eqn, lambda body: _jaxpr.replaced(body, eqns=[*map(without_calls, body.eqns)])
    )
