"""The examples in public docstrings run, and print what they say."""

import doctest
import inspect

import pytest

import jzero
from jzero import _estimate, _grad, _nnx, _precision, _step, _whole, testing


@pytest.mark.parametrize(
    "module", [_estimate, _grad, _nnx, _precision, _step, _whole, testing], ids=lambda m: m.__name__
)
def test_docstrings(module):
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


def test_every_public_function_has_an_example():
    functions = [getattr(jzero, name) for name in dir(jzero) if name[0].islower()]
    functions = [f for f in functions if inspect.isfunction(f)]
    assert len(functions) > 5
    assert [f.__name__ for f in functions if ">>>" not in f.__doc__] == []
