"""The examples in public docstrings run, and print what they say."""

import doctest
import inspect

import pytest

import gpu_compiler
import jzero
from jzero import (
    _blocks,
    _components,
    _folded,
    _option_groups,
    _shard_eval_step,
    _shard_train_step,
    _sharded_step,
    testing,
)
from jzero.checkpoint import _checkpointer, _restore
from jzero.deepspeed import _schedules, _transforms, _translate
from jzero.offload import _policy
from jzero.offload.memory import _leaf_array
from jzero.preflight import _preflight, _targets
from jzero.reports import _bandwidth, _describe, _estimate, _lines, _numbers
from jzero.tracing import _eqx, _keys, _local, _nnx, _precision

MODULES = [
    _bandwidth,
    _components,
    _checkpointer,
    _describe,
    _eqx,
    _estimate,
    _folded,
    _leaf_array,
    _lines,
    _local,
    _nnx,
    _policy,
    _precision,
    _preflight,
    _restore,
    _schedules,
    _sharded_step,
    _targets,
    _transforms,
    _translate,
    _keys,
    testing,
    _blocks,
    _numbers,
    _option_groups,
    _shard_eval_step,
    _shard_train_step,
]


@pytest.mark.slow(but=13)
@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_docstrings(module):
    if module in (_preflight, _targets):
        gpu_compiler.skip_without_it()
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.slow
def test_every_public_function_has_an_example():
    functions = [getattr(jzero, name) for name in dir(jzero) if name[0].islower()]
    functions = [f for f in functions if inspect.isfunction(f) and f.__module__.startswith("jzero")]
    assert len(functions) > 5
    assert [f.__name__ for f in functions if ">>>" not in f.__doc__] == []
