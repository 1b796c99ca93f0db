"""The examples in public docstrings run, and print what they say."""

import doctest

import pytest

import jzero
from jzero import _grad, _nnx, _step, _trace


@pytest.mark.parametrize("module", [_grad, _nnx, _step, _trace], ids=lambda m: m.__name__)
def test_docstrings(module):
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


def test_every_public_function_has_an_example():
    functions = ["shard_train_step", "value_and_grad", "grad", "from_nnx", "fold_device_index"]
    assert all(">>>" in getattr(jzero, name).__doc__ for name in functions)
