"""The command line: `python -m jzero estimate --params 7.5B --devices 64`, and what checkpoints have."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table as RichTable

from jzero._errors import CheckpointError, JzeroError, OptionError, message
from jzero._quantities import BYTES_RULE, parse_bytes, readable_bytes, readable_count
from jzero.cli import _checkpoints, _plot
from jzero.cli._checkpoints import Shown
from jzero.offload._policy import HostCPU, NoOffload, Offload, PinnedHost
from jzero.reports import _tables
from jzero.reports._estimate import WHO, Estimate, estimate, roles_on_devices
from jzero.reports._formulas import WAYS
from jzero.reports._presets import OPTIMIZERS, PRECISIONS
from jzero.reports._tables import Table
from jzero.sharding.plan._options import GATHER
from jzero.sharding.plan._stages import STAGES

_UNWRAPPED = 200  # columns of a table that is written to a file or a pipe
# By the name that --offload has for it: the policy, and the flags that are its fields.
_POLICIES: dict[str | None, tuple[type[Offload], dict[str, str]]] = {
    None: (NoOffload, {}),
    "pinned": (PinnedHost, {"device_bytes": "--device-bytes"}),
    "host": (HostCPU, {"ratio": "--ratio", "delayed_update": "--delayed"}),
}
_OFFLOAD = tuple(filter(None, _POLICIES))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `python -m jzero <arguments>`.

    Wrong ones end with a message and exit status 2, a checkpoint that is not as it should be with 1.
    """
    parser = argparse.ArgumentParser(prog="python -m jzero", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    command = commands.add_parser(
        "estimate", allow_abbrev=False, help="memory and traffic from numbers alone",
        description="What a training needs on each device and moves in a step: jzero.estimate.",
    )  # fmt: skip
    _add_estimate(command)
    runs = {"estimate": _estimate, **_checkpoints.add(commands)}
    given = vars(parser.parse_args(arguments))
    jax.config.update("jax_platforms", "cpu")  # Accelerators are not needed, and may be training.
    name = given.pop("command")
    try:
        for shown in runs[name](**given):
            _print(shown)
    except CheckpointError as error:
        sys.exit(f"python -m jzero {error}")
    except JzeroError as error:
        commands.choices[name].error(str(error))


def _add_estimate(command: argparse.ArgumentParser) -> None:
    """Flags whose destinations are the arguments of `estimate`; those left out stay its defaults."""
    names = "name[,name]"
    flags: dict[str, dict[str, Any]] = {
        "--params": dict(dest="num_params", required=True, help="such as 350M, 7.5B, 1T"),
        "--devices": dict(type=int, help="how many share the batch"),
        "--mesh": dict(type=_mesh, help="instead of --devices: axes and sizes, node=8,local=8"),
        "--stage": dict(type=int, choices=STAGES, help="by default all of them"),
        "--optimizer": dict(choices=OPTIMIZERS, help="adam by default"),
        "--precision": dict(choices=PRECISIONS, help="mixed by default"),
        "--param-bytes": dict(type=float, help="bytes per parameter at rest"),
        "--gradient-bytes": dict(type=float, help="bytes per parameter of the gradient"),
        "--optimizer-bytes": dict(type=float, help="bytes per parameter of the optimizer state"),
        "--accumulate": dict(type=int, help="microbatches on each device"),
        "--reduce": dict(choices=("once", "each"), help="when gradients are reduced"),
        "--accumulate-dtype": dict(help="such as float32"),
        "--reduce-dtype": dict(help="such as bfloat16"),
        "--gather": dict(choices=GATHER, help="how long gathered parameters live"),
        "--param-axes": dict(type=_names, metavar=names, help="axes over which parameters rest"),
        "--optimizer-axes": dict(type=_names, metavar=names, help="... and optimizer state"),
        "--offload": dict(choices=_OFFLOAD, help="where optimizer state rests"),
        "--device-bytes": dict(type=_bytes, help="of it on a device at a time, 1GiB (pinned)"),
        "--ratio": dict(type=_ratio, help="share of it that rests on the host (host)"),
        "--delayed": dict(action="store_const", const=True, dest="delayed_update",
                          help="gradients are applied while the next are computed (host)"),
    }  # fmt: skip
    for flag, settings in flags.items():
        command.add_argument(flag, default=argparse.SUPPRESS, **settings)
    command.add_argument("--memory", help="of a device, 80GB or 80GiB: tells the largest model")
    command.add_argument("--json", action="store_true", help="numbers instead of a table")
    command.add_argument("--plot", metavar="FILE", help="a picture, such as out.png")


def _estimate(json: bool, plot: str | None, memory: str | None, **arguments: Any) -> Shown:
    stages = [arguments.pop("stage")] if "stage" in arguments else list(STAGES)
    arguments["offload"] = _policy(arguments)
    found = [
        estimate(arguments["num_params"], **_without_params(arguments), stage=s) for s in stages
    ]
    largest = [e.largest_model(memory) if memory else None for e in found]
    if plot:
        _plot.plot_stages(found, plot, memory)
    if json:
        yield _as_json(found, largest)
    elif len(found) == 1:
        yield from _show_one(found[0], largest[0], memory)
    else:
        yield from _show_stages(found, largest, memory)


def _policy(arguments: dict[str, Any]) -> Offload:
    """The policy that the flags say; takes them out of the arguments."""
    kind = arguments.pop("offload", None)
    policy, fields = _POLICIES[kind]
    flags = {field: flag for _, flags in _POLICIES.values() for field, flag in flags.items()}
    given = {field: arguments.pop(field) for field in flags if field in arguments}
    if others := [flags[field] for field in given if field not in fields]:
        raise OptionError(message(
            WHO, f"{' and '.join(others)} with {'no offload' if kind is None else f'--offload {kind}'}",
            "--device-bytes is for --offload pinned; --ratio and --delayed are for --offload host.",
            "Drop one or the other."))  # fmt: skip
    return policy(**given)


def _without_params(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "num_params"}


def _as_json(found: Sequence[Estimate], largest: Sequence[int | None]) -> str:
    """The tables' rows; bytes and elements are exact."""
    first = found[0]
    whole = {"num_params": first.num_params, "axes": dict(first.sharding.axes)}
    stages = [
        {
            "stage": e.options.stage,
            "memory": [row._asdict() for row in e.memory],
            "at_rest": e.at_rest,
            "total": e.total,
            "on_host": e.on_host,
            "traffic": [
                {"op": c.op, "dtype": c.dtype, "axes": c.axes, "elements": c.total_elements,
                 "bytes": c.nbytes} for c in e.traffic
            ],
            "crossings": [row._asdict() for row in e.crossings],
            "elements_moved": e.elements_moved,
            **({} if num is None else {"largest_model": num}),
        }
        for e, num in zip(found, largest, strict=True)
    ]  # fmt: skip
    return json.dumps({**whole, "stages": stages}, indent=2)


def _show_one(found: Estimate, largest: int | None, memory: str | None) -> Shown:
    title, *_ = str(found).splitlines()
    yield title
    yield _tables.memory_table(found.memory)
    moved = _tables.traffic_table(found.traffic)
    yield moved or "A step moves nothing between devices."
    if crossing := _tables.crossing_table(found.crossings):
        yield crossing
    if largest is not None:
        yield f"The largest model whose total fits into {memory}: {readable_count(largest)}."


def _show_stages(
    found: Sequence[Estimate], largest: Sequence[int | None], memory: str | None
) -> Shown:
    first = found[0]
    axes = ", ".join(f"'{name}' of size {size}" for name, size in first.sharding.axes)
    yield f"{readable_count(first.num_params)} parameters; data axes: {axes}; on each device:"
    roles = roles_on_devices(found)
    offloads = first.options.offloads
    host = ["on its host", *WAYS] * offloads
    title = [] if memory is None else [f"largest in {memory}"]
    rows = [
        (
            str(e.options.stage),
            *(readable_bytes(e.nbytes(role)) for role in roles),
            f"{readable_bytes(e.total)} = {e.total / 1e9:.4g} GB",
            *_on_hosts(e) * offloads,
            f"{e.elements_moved / e.num_params:.3g} Psi",
            *([] if num is None else [readable_count(num)]),
        )
        for e, num in zip(found, largest, strict=True)
    ]
    yield Table(("stage", *roles, "total", *host, "moved per step", *title), rows)
    yield "Parameters and optimizer state rest; the others live within a step. Activations are not in it."
    if offloads:
        yield "To host, to device: what crosses in a step. On its host: what waits for that, too."
    yield "Psi: as many elements as there are parameters. More of one stage: --stage."


def _on_hosts(found: Estimate) -> list[str]:
    """What each device's host holds, and what crosses to it and back."""
    crossing = [sum(c.nbytes for c in found.crossings if c.direction == way) for way in WAYS]
    return list(map(readable_bytes, [found.on_host, *crossing]))


def _rich(table: Table) -> RichTable:
    out = RichTable()
    for column, title in enumerate(table.header):
        out.add_column(title, justify="left" if table.is_text(column) else "right", no_wrap=True)
    for row in table.rows:
        out.add_row(*row)
    return out


def _print(what: str | Table) -> None:
    if isinstance(what, str):
        print(what)  # As it is: rich would break long lines, also of JSON.
        return
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = _UNWRAPPED
    console.print(_rich(what))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _bytes(text: str) -> int:
    num = parse_bytes(text)
    if num is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not {BYTES_RULE}")
    return num


def _ratio(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # The policy says what it may be.


def _mesh(text: str) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and size.isdecimal() for name, _, size in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form node=8,local=8")
    return {name: int(size) for name, _, size in pairs}
