# SPDX-License-Identifier: Apache-2.0
"""The command `jzero preflight`."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jzero._errors import _PACKAGE, JzeroError, OptionError, message, named
from jzero._shard_train_step import shard_train_step
from jzero._sharded_step import ShardedStep
from jzero.cli import _flags
from jzero.cli._command import JSON, Command, Shown, Verbatim
from jzero.preflight._preflight import WHO, preflight

_RULE = "It is MODULE:FUNCTION; the function returns (step, init, batch)."


def _preflight(function: str, json: bool = False, **options: Any) -> Shown:
    step, *arguments = _arguments(function)
    try:
        with _named_failures(f"the step of {function}()", but=(JzeroError, ImportError)):
            found = preflight(step, *arguments, **options)
    except ImportError as error:  # XLA's compiler is not installed.
        raise OptionError(str(error)) from error
    yield found.to_dict() if json else Verbatim(found)


def _arguments(function: str) -> tuple[Any, ...]:
    """The sharded step, its abstract state, and its other arguments, as the user's function returns them."""
    found = _function(function)
    with _named_failures(f"{function}()"):
        returned = found()
    if not isinstance(returned, tuple | list) or len(returned) < 2:
        kind = type(returned).__name__
        what = f"a {kind} of {len(returned)}" if isinstance(returned, tuple | list) else kind
        raise _refused(f"{function}() returns {what}, not (step, init, batch)", "Return these.")
    step, init, *others = returned
    if not callable(step):
        kind = type(step).__name__
        raise _refused(
            f"{function}() returns {kind} first, not a step", "Return (step, init, batch)."
        )
    if not others:
        raise _refused(f"{function}() returns no batch", "Return (step, init, batch).")
    if takes := _takes_other(step, (init, *others)):
        raise _refused(
            f"the first that {function}() returns is no step of a state and the batch: it takes {takes}",
            "Return (step, init, batch).")  # fmt: skip
    # A model may be a state that can be called; a function is no pytree.
    if callable(init) and jax.tree_util.all_leaves([init]):
        if takes := _takes_other(init, ()):
            raise _refused(
                f"init of {function}() takes {takes}",
                "It takes none: return functools.partial(init_fn, jax.random.key(0)), say.")  # fmt: skip
        with _named_failures(f"init of {function}()"):
            init = jax.eval_shape(init)
    return step if isinstance(step, ShardedStep) else shard_train_step(step), init, *others


def _takes_other(function: Callable[..., Any], given: tuple[Any, ...]) -> str | None:
    """The signature of a function that cannot be called with these arguments, as text; else None."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*given)
    except TypeError:
        return f"the arguments {signature}" if signature.parameters else "no arguments"
    return None


def _function(text: str) -> Callable[[], Any]:
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise _refused(f"function={text!r}", "Write train:setup for setup of train.py.")
    path = Path(module_name)
    if path.suffix == ".py" or len(path.parts) > 1:
        right = ".".join(path.with_suffix("").parts)
        raise _refused(
            f"function={text!r} names a file", f"Write {right}:{name}, a module from here."
        )
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        with _named_failures(f"import of {module_name}", but=ModuleNotFoundError):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if f"{module_name}.".startswith(f"{error.name}."):
            raise _refused(f"there is no module {module_name} in {here}, nor among those installed",
                           "Correct its name, or go to its folder.") from None  # fmt: skip
        raise _refused(f"{module_name} imports {error.name}, which is not installed",
                       "Install it.") from error  # fmt: skip
    found = getattr(module, name, None)
    if not callable(found):
        like = difflib.get_close_matches(
            name, [x for x, y in vars(module).items() if callable(y)], 1
        )
        edit = f"Did you mean {module_name}:{like[0]}?" if like else "Correct its name."
        raise _refused(f"{module_name} has no function {name}", edit)
    return found


@contextlib.contextmanager
def _named_failures(
    what: str, but: type[Exception] | tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turns an error of the user's code into one with its line; a script without a main may exit."""
    try:
        yield
    except but:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [x for x in frames if "site-packages" not in x.filename]
        own = [x for x in theirs if not x.filename.startswith(_PACKAGE)]
        frame = (own or theirs)[-1]
        found = f"{what} raises {type(error).__name__} in line {frame.lineno} of {frame.filename}"
        raise _refused(f"{found}: {named(str(error), 2000).rstrip('.')}", "Correct it.") from error


def _refused(found: str, edit: str) -> OptionError:
    return OptionError(message(WHO, found, _RULE, edit))


COMMAND = Command(
    _preflight, "a step compiled for GPUs or TPUs that are not there",
    "Compiles a train step for devices that are not there, and reports memory, traffic and time: "
    "jzero.preflight. FUNCTION has no arguments and returns (step, init, batch): the step, of "
    "jzero.shard_train_step or else sharded at stage 3; a function without arguments that makes the state, "
    "of which only shapes are used, or the state as jax.ShapeDtypeStructs; and the batch as "
    "jax.ShapeDtypeStructs. Further arguments of the step follow the batch.",
    "jzero preflight train:setup --target h200 --topology 8x8",
    {
        "function": dict(metavar="MODULE:FUNCTION", help="such as train:setup, of train.py here"),
        "--target": dict(help="h100, h200, tpu-v5e ...; h200 by default"),
        "--topology": dict(metavar="HOSTSxDEVICES", help="8x8 are 64 devices; 1x8 by default"),
        "--axes": dict(type=_flags.mesh, metavar="name=size[,name=size]",
                       help="of the mesh, hosts first: node=8,local=8"),
        "--memory-fraction": dict(type=float, metavar="SHARE",
                                  help="of a device's memory that the process uses, 0.75 by default"),
        "--bandwidth": dict(type=_flags.bandwidths, metavar="name=RATE[,name=RATE]",
                            help="of each device along an axis: node=100Gb/s,local=450GB/s"),
        "--search-batch": dict(action="store_true", help="also find the most rows of the batch that fit"),
        "--search-wire": dict(action="store_true", help="also compare quantized gathers and reductions"),
        "--json": JSON,
    },
)  # fmt: skip
