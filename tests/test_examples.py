"""The examples in public docstrings run, and print what they say."""

import doctest
import importlib
import inspect
import pathlib

import pytest

import gpu_compiler
import jzero

FOLDER = pathlib.Path(jzero.__file__).parent
MODULES = [
    ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)
    for path in sorted(FOLDER.rglob("*.py"))
    if ">>>" in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name, tmp_path, monkeypatch):
    if name.startswith("jzero.preflight."):
        gpu_compiler.skip_without_it()
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
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
