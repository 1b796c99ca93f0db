"""The Protocols of `tracing/_types.py` describe what this JAX gives, here and on the newest release."""

import jax
import jax.numpy as jnp

from jzero.tracing import _jaxpr, _rewrite, _types


def _traced():
    def step(x):
        return jnp.sin(x) + 1.0, jax.lax.psum(x, ())

    return _jaxpr.trace_here(step, jax.ShapeDtypeStruct((3,), jnp.float32))


def test_protocols_hold_what_jax_gives():
    jaxpr = _traced().jaxpr
    assert isinstance(jaxpr, _types.Jaxpr)
    assert all(isinstance(eqn, _types.Eqn) for eqn in jaxpr.eqns)
    assert all(isinstance(eqn.primitive, _types.Primitive) for eqn in jaxpr.eqns)
    atoms = [atom for eqn in jaxpr.eqns for atom in eqn.invars]
    assert all(isinstance(atom.aval, _types.Aval) for atom in atoms)
    assert {_jaxpr.is_literal(atom) for atom in atoms} == {True, False}


def test_variables_can_be_keys_and_literals_cannot():
    atoms = [atom for eqn in _traced().jaxpr.eqns for atom in eqn.invars]
    hashable = [isinstance(atom, _types.Var) for atom in atoms]
    assert hashable == [not _jaxpr.is_literal(atom) for atom in atoms]


def test_jaxprs_of_jzero_are_read_like_those_of_jax():
    flat, _ = _rewrite.flatten_calls(_traced().jaxpr, ())
    assert isinstance(flat, _types.Jaxpr)
