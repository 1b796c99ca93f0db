# SPDX-License-Identifier: Apache-2.0
"""The command `jzero estimate`."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from jzero._errors import OptionError, message
from jzero._groups import grouped
from jzero._option_groups import GATHER, REDUCE
from jzero._policy import Memory, NoOffload, NVMe, PinnedHost, Policy
from jzero._quantities import readable_bytes, readable_count, readable_seconds
from jzero.cli import _flags, _plot
from jzero.cli._command import JSON, Command, Shown
from jzero.cli._flags import in_flags
from jzero.offload.schedule._folds import WAYS
from jzero.reports import _tables
from jzero.reports._checks import WHO
from jzero.reports._estimate import Estimate, estimate, roles_on_devices
from jzero.reports._sizes import OPTIMIZERS, PRECISIONS
from jzero.reports._tables import Table
from jzero.sharding.plan._stages import STAGES


def _estimate(
    json: bool = False, plot: str | None = None, memory: str | None = None, host_memory: str | None = None,
    disk_memory: str | None = None, **arguments: Any,
) -> Shown:  # fmt: skip
    for name, given in (("host_memory", host_memory), ("disk_memory", disk_memory)):
        if given and not memory:
            raise OptionError(message(
                WHO, f"{name} without memory", "Both bound the largest model.",
                f"Drop {name}, or add memory='80GB'."))  # fmt: skip
    stages = [arguments.pop("stage")] if "stage" in arguments else list(STAGES)
    arguments["memory"] = _memory(arguments)
    found, refused = _of_stages(stages, arguments)
    largest = [e.largest_model(memory, host_memory, disk_memory) if memory else None for e in found]
    if plot:
        _plot.plot_stages(found, plot, memory)
    if json:
        yield _as_dict(found, largest) | ({"refused": refused} if refused else {})
        return
    if len(found) == 1:
        yield from _show_one(found[0], largest[0], memory)
    else:
        yield from _show_stages(found, largest, memory)
    for stage, why in refused.items():
        yield f"Not at stage {stage}: {why}"


def _of_stages(
    stages: Sequence[int], arguments: dict[str, Any]
) -> tuple[list[Estimate], dict[int, str]]:
    """Estimates of the stages that accept these arguments, and why others do not; raises if none does."""
    found, refused = list[Estimate](), dict[int, str]()
    for stage in stages:
        try:
            found.append(estimate(**grouped(arguments, _call), stage=stage))
        except OptionError as error:
            refused[stage] = in_flags(str(error), COMMAND.flag_of)
            if stage == stages[-1] and not found:
                raise
    return found, refused


def _call(kind: type[Any], *args: Any, **fields: Any) -> Any:
    return kind(*args, **fields)


def _config(text: str) -> str | pathlib.Path:
    """A path, whatever its name looks like; an address stays text, and is refused."""
    return text if "://" in text else pathlib.Path(text)


def _policy(arguments: dict[str, Any]) -> Policy:
    """The policy of optimizer state; removes its flags from the arguments."""
    kind = arguments.pop("offload", None)
    policy, own = _flags.OFFLOADS.get(kind, (NoOffload, ()))
    fields = [field for _, fields in _flags.OFFLOADS.values() for field in fields]
    given = {field: arguments.pop(field) for field in fields if field in arguments}
    if others := [COMMAND.flag_of[field] for field in given if field not in own]:
        raise OptionError(message(
            WHO, f"{' and '.join(others)} with {'no offload' if kind is None else f'--offload {kind}'}",
            "--device-bytes is for --offload pinned; --ratio and --delayed are for --offload host; "
            "--host-bytes, --in-place and --gradients-in-files are for --offload nvme.",
            "Drop one or the other."))  # fmt: skip
    return NVMe(".", **given) if policy is NVMe else policy(**given)


def _memory(arguments: dict[str, Any]) -> Memory:
    """The policies of all flags; removes these from the arguments."""
    state, params = _policy(arguments), arguments.pop("offload_params", None)
    in_files = arguments.pop("params_in_files", None)
    if in_files and not (params and isinstance(state, NVMe)):
        raise OptionError(message(
            WHO, "--params-in-files", "Parameters in files are updated beside their optimizer state.",
            "Add --offload nvme and --offload-params 2GiB, or drop it."))  # fmt: skip
    there: Policy = PinnedHost(params) if params else NoOffload()
    if in_files and isinstance(state, NVMe):
        there = dataclasses.replace(state, host_bytes=2**30, device_bytes=params)
    activations = PinnedHost() if arguments.pop("offload_activations", None) else NoOffload()
    return Memory(params=there, optimizer=state, activations=activations)


def _as_dict(found: Sequence[Estimate], largest: Sequence[int | None]) -> dict[str, Any]:
    """The tables' rows; bytes and elements are exact."""
    shared = ("num_params", "axes", "model")
    dicts = [e.to_dict() for e in found]
    whole = {name: dicts[0][name] for name in shared if name in dicts[0]}
    stages = [
        {name: value for name, value in row.items() if name not in shared}
        | ({} if num is None else {"largest_model": num})
        for row, num in zip(dicts, largest, strict=True)
    ]
    return {**whole, "stages": stages}


def _show_one(found: Estimate, largest: int | None, memory: str | None) -> Shown:
    yield found.header()
    yield _tables.memory_table(found.memory)
    moved = _tables.traffic_table(found.traffic)
    yield moved or "A step moves nothing between devices."
    if transfers := _tables.transfer_table(found.transfers):
        yield transfers
    if found.time is not None:
        yield found.time.table()
        yield from found.time.remarks()
    yield from found.model_lines()
    if largest is not None:
        yield f"The largest model whose total fits into {memory}: {readable_count(largest, at_most=True)}."


def _show_stages(
    found: Sequence[Estimate], largest: Sequence[int | None], memory: str | None
) -> Shown:
    first = found[0]
    axes = ", ".join(f"'{name}' of size {size}" for name, size in first.sharding.axes)
    if first.model_parallel > 1:
        axes += f"; {first.num_devices} devices in all, {first.model_parallel} for each part of the batch"
    yield f"{readable_count(first.num_params)} parameters; data axes: {axes}; on each device:"
    roles = roles_on_devices(found)
    offloads = bool(first.on_host)
    host = ["on its host", *WAYS] * offloads + ["on its disk"] * bool(first.on_disk)
    timed = ["step", "compute"] * (first.time is not None)
    title = [] if memory is None else [f"largest in {memory}"]
    rows = [
        (
            str(e.options.stage),
            *(readable_bytes(e.nbytes(role)) for role in roles),
            f"{readable_bytes(e.total)} = {e.total / 1e9:.4g} GB",
            *_on_hosts(e) * offloads,
            *[readable_bytes(e.on_disk)] * bool(first.on_disk),
            f"{e.elements_moved / e.num_params:.3g} Psi",
            *_times(e),
            *([] if num is None else [readable_count(num, at_most=True)]),
        )
        for e, num in zip(found, largest, strict=True)
    ]
    yield Table(("stage", *roles, "total", *host, "moved per step", *timed, *title), rows)
    yield (
        "Parameters and optimizer state are stored between steps; the others live within a step. "
        "Activations are not included."
    )
    if offloads:
        yield "To host, to device: copies in a step. On its host: includes the buffers of these copies."
    yield "Psi: as many elements as there are parameters. More of one stage: --stage."
    yield from found[-1].model_lines()


def _times(found: Estimate) -> list[str]:
    """The least time of a step, and the share of it that is compute."""
    if found.time is None:
        return []
    return [readable_seconds(found.time.seconds), f"{found.time.efficiency:.0%}"]


def _on_hosts(found: Estimate) -> list[str]:
    """Bytes that each device's host holds, and bytes that cross to it and back."""
    transfers = [sum(c.nbytes for c in found.transfers if c.direction == way) for way in WAYS]
    return list(map(readable_bytes, [found.on_host, *transfers]))


_NAMES = "name[,name]"
# Where flags are left out, arguments of `estimate` keep its defaults.
COMMAND = Command(
    _estimate, "memory and traffic from numbers alone",
    "Memory that a training needs on each device, and its traffic per step: jzero.estimate.",
    "jzero estimate --params 7.5B --devices 64 --memory 80GB",
    {
        "--params": dict(type=_flags.num_params, dest="model",
                         metavar="NUMBER", help="such as 350M, 7.5B, 1e9, 1T"),
        "--config": dict(type=_config, dest="model", metavar="FILE",
                         help="instead of --params: config.json of a model of Hugging Face's (llama, "
                         "mistral, mixtral, qwen2, qwen3, gemma, gpt2, t5, vit, ...)"),
        "--devices": dict(type=_flags.positive, metavar="NUMBER", help="how many share the batch"),
        "--mesh": dict(type=_flags.mesh, dest="devices", metavar="name=size[,name=size]",
                       help="instead of --devices: axes and sizes, node=8,local=8"),
        "--model-parallel": dict(type=_flags.positive, metavar="NUMBER",
                                 help="devices that divide the model for each of those"),
        "--stage": dict(type=int, choices=STAGES, help="by default all of them"),
        "--optimizer": dict(choices=OPTIMIZERS, help="adam by default"),
        "--precision": dict(choices=PRECISIONS, help="mixed by default"),
        "--param-bytes": dict(type=float, dest="bytes_per_param.params", metavar="BYTES",
                              help="bytes per parameter as stored"),
        "--gradient-bytes": dict(type=float, dest="bytes_per_param.gradients", metavar="BYTES",
                                 help="... of the gradient"),
        "--optimizer-bytes": dict(type=float, dest="bytes_per_param.optimizer", metavar="BYTES",
                                  help="... of the optimizer state"),
        "--microbatches": dict(type=_flags.positive, dest="microbatches.num", metavar="NUMBER",
                               help="that each device works through in a step"),
        "--reduce": dict(choices=REDUCE, dest="microbatches.reduce", help="when gradients are reduced"),
        "--accumulator-dtype": dict(dest="microbatches.dtype", metavar="DTYPE", help="such as float32"),
        "--reduce-dtype": dict(dest="comm.reduce_dtype", metavar="DTYPE",
                               help="such as bfloat16, or quantized: int8, int4"),
        "--gather": dict(choices=GATHER, dest="comm.gather", help="how long gathered parameters live"),
        "--param-axes": dict(type=_flags.names, dest="axes.params", metavar=_NAMES,
                             help="axes over which parameters are sharded"),
        "--optimizer-axes": dict(type=_flags.names, dest="axes.optimizer", metavar=_NAMES,
                                 help="... and optimizer state"),
        "--offload": dict(choices=_flags.OFFLOADS, help="where optimizer state is stored"),
        "--device-bytes": dict(type=_flags.size, metavar="SIZE",
                               help="of it on a device at a time, 1GiB (pinned)"),
        "--ratio": dict(type=_flags.ratio, help="share of it that is stored on the host (host)"),
        "--delayed": dict(action="store_const", const=True, dest="delayed_update",
                          help="gradients are applied while the next are computed (host)"),
        "--host-bytes": dict(type=_flags.size, metavar="SIZE",
                             help="of it in a process's memory at a time, 1GiB (nvme)"),
        "--in-place": dict(action="store_const", const=True, dest="in_place",
                           help="the new state is written over the old one (nvme)"),
        "--offload-params": dict(type=_flags.size, metavar="SIZE",
                                 help="parameters are stored on the host, at most SIZE on a device"),
        "--params-in-files": dict(action="store_const", const=True,
                                  help="... and in files instead of its memory (nvme)"),
        "--gradients-in-files": dict(action="store_const", const=True, dest="gradients",
                                     help="... and so are gradients, until the update (nvme)"),
        "--offload-activations": dict(action="store_const", const=True,
                                      help="what a loop saves for its backward loop is stored on the host"),
        "--tile-bytes": dict(type=_flags.size, dest="comm.tile_bytes", metavar="SIZE",
                             help="larger matrices are gathered in tiles of this size, 64MiB"),
        "--layers": dict(type=_flags.count, dest="workload.layers", metavar="NUMBER",
                         help="of that loop; with --config not needed, as --width"),
        "--width": dict(type=_flags.count, dest="workload.width", metavar="NUMBER",
                        help="elements of a layer's input for a token"),
        "--layer-major": dict(action="store_const", const="layer", dest="microbatches.order",
                              help="a layer is fetched once per pass for all microbatches"),
        "--no-donate": dict(action="store_const", const=False, dest="donate",
                            help="a step keeps the state passed to it"),
        "--tokens": dict(type=_flags.count, dest="workload.tokens", metavar="NUMBER",
                         help="of a step on each device, such as 8K"),
        "--no-recompute": dict(action="store_const", const=False, dest="workload.recompute",
                               help="the backward pass recomputes nothing"),
        "--peak": dict(type=_flags.flops, dest="rates.peak", metavar="RATE",
                       help="of a device, 989TFLOP/s: prints the time of a step"),
        "--pcie": dict(type=_flags.rate, dest="rates.pcie", metavar="RATE",
                       help="between device and host, in each direction, 55GB/s"),
        "--interconnect": dict(type=_flags.rate, dest="rates.interconnect", metavar="RATE",
                               help="all-gathers, 350GB/s"),
        "--host-update": dict(type=_flags.rate, dest="rates.host_update", metavar="RATE",
                              help="of optimizer state by the host, for each device"),
        "--disk": dict(type=_flags.rate, dest="rates.disk", metavar="RATE",
                       help="read and written by the host's disks, for each device, 6GB/s"),
        "--memory": dict(type=_flags.num_bytes, metavar="SIZE",
                         help="of a device, 80GB or 80GiB: prints the largest model"),
        "--host-memory": dict(type=_flags.num_bytes, metavar="SIZE",
                              help="of the host, for each device: bounds the largest model, too"),
        "--disk-memory": dict(type=_flags.num_bytes, metavar="SIZE",
                              help="of its disks, for each device: the same"),
        "--json": {**JSON, "help": "numbers instead of a table"},
        "--plot": dict(metavar="FILE", help="a picture, such as out.png"),
    },
    one_of=(("--params", "--config"), ("--devices", "--mesh")),
)  # fmt: skip
