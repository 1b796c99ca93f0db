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
    _numbers,
    _option_groups,
    _policy,
    _shard_eval_step,
    _shard_train_step,
    _sharded_step,
    testing,
)
from jzero.checkpoint import _checkpointer, _restore
from jzero.deepspeed import _schedules, _transforms, _translate
from jzero.offload.memory import _leaf_array
from jzero.preflight import _preflight, _targets
from jzero.reports import _bandwidth, _describe, _estimate, _lines
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
    _numbers,
    _option_groups,
    _policy,
    _precision,
    _preflight,
    _restore,
    _schedules,
    _shard_eval_step,
    _shard_train_step,
    _sharded_step,
    _targets,
    _transforms,
    _translate,
    _keys,
    testing,
    _blocks,
]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_docstrings(module):
    if module in (_preflight, _targets):
        gpu_compiler.skip_without_it()
    results = doctest.testmod(module)
    # Of decorated functions `testmod` thinks that they are another module's.
    runner, finder = doctest.DocTestRunner(), doctest.DocTestFinder()
    decorated = [
        x for x in vars(module).values() if hasattr(x, "__wrapped__") and inspect.isfunction(x)
    ]
    for fn in [x for x in decorated if x.__module__ == module.__name__]:
        for test in finder.find(inspect.unwrap(fn), fn.__name__, globs=dict(vars(module))):
            runner.run(test)
    assert results.attempted + runner.tries > 0
    assert results.failed + runner.failures == 0


@pytest.mark.slow
def test_every_public_function_has_an_example():
    functions = [getattr(jzero, name) for name in dir(jzero) if name[0].islower()]
    functions = [f for f in functions if inspect.isfunction(f) and f.__module__.startswith("jzero")]
    assert len(functions) > 5
    assert [f.__name__ for f in functions if ">>>" not in f.__doc__] == []
