# SPDX-License-Identifier: Apache-2.0
"""`estimate`: memory and traffic of a training from its numbers alone, without a model or a device."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeVar

from jzero._errors import OptionError, called_as, counted, message
from jzero._numbers import BytesPerParam, Rates, Workload
from jzero._option_groups import Axes, Comm, Microbatches, refuse_fields
from jzero._options_of import options_of
from jzero._policy import Memory, Policy
from jzero._quantities import BYTES_RULE, parse_bytes, parse_count, readable_bytes, readable_count
from jzero._unknown_options import refuses_unknown_options
from jzero.offload.schedule._folds import Transfer, transfers, updated_bytes
from jzero.reports import _tables, _within
from jzero.reports._checks import WHO, check, check_offload, check_rates, check_workload, data_axes
from jzero.reports._hf_config import Model, read_model
from jzero.reports._scaled import ScaledStep
from jzero.reports._sizes import RoleBytes, role_bytes
from jzero.reports._step_time import StepTime, operations_of, step_time
from jzero.reports._tables import Block, Printed
from jzero.sharding.analysis._traffic import Collective
from jzero.sharding.plan._options import Options
from jzero.sharding.plan._stages import StageAxes

_Group = TypeVar("_Group", BytesPerParam, Workload, Rates)
_MOST_PARAMS = 10**18  # beyond which a model is taken to be unbounded


@refuses_unknown_options
def estimate(
    model: float | str | Mapping[str, Any] | os.PathLike[str],
    *,
    devices: int | Mapping[str, int] | Any,
    stage: int = 3,
    optimizer: str = "adam",
    precision: str = "mixed",
    bytes_per_param: BytesPerParam | None = None,
    model_parallel: int = 1,
    microbatches: int | Microbatches = 1,
    memory: Memory | Policy | str | None = None,
    comm: Comm | None = None,
    axes: Axes | str | Sequence[str] | None = None,
    donate: bool = True,
    workload: Workload | None = None,
    rates: Rates | None = None,
) -> Estimate:
    """What a training needs on each device and moves in a step, from numbers alone.

    It is what `describe` says of an abstract step, scaled to Psi parameters: a loop over layers of one matrix
    each is traced, planned and partitioned with the same options, in about 0.1 s, and no device is needed.
    Each role takes a number of bytes and is sharded over a number of devices::

        parameters       bytes of one   * Psi / devices of Axes.params      # stage 3, else / 1
        optimizer state  bytes of it    * Psi / devices of Axes.optimizer   # stage >= 1
        gradients        bytes of one   * Psi / devices of Axes.optimizer   # unless reduced once

    `memory` moves the optimizer state off the devices. With `PinnedHost` all of it is copied to the device
    and back in a step, at most `device_bytes` of it on a device at a time. With `HostCPU` gradients are
    copied to the host and new parameters to the device, through pinned memory (which holds the new parameters
    of two steps if delayed). An optimizer state without masters reads parameters, which are then copied to
    the host, too. With `NVMe` the same is copied, the optimizer state is read from the host's disk and
    written there, once each, and the host holds `host_bytes` of it, counted for each device as if each had a
    process. Gradients count as if all of a step's were on the device before the first has left it.

    With `Memory(params=)` parameters are in pinned memory, too, sharded. Each device fetches its own shard
    over its own link, once for each pass over the layers (with several microbatches once in a step, if all
    its shards fit into half of `device_bytes`), and at most `device_bytes` of parameters, gathered ones
    included, are on a device at a time. Gradients are sent to the host once, as the backward pass of each
    layer ends; one layer's, whole before they are reduced, are not counted, like one layer's gathered
    parameters without offload. What `HostCPU` updates is not copied again; what devices update is fetched
    once more, and new parameters are sent back. Parameters on `NVMe` are read from the disk for each pass,
    and read and written there with the optimizer state for the update; the host holds `host_bytes` of them,
    counted for each device as if it had a process. With `gradients=True` gradients are written to the disk in
    the backward pass and read for the update. They take no memory of the host, except those of a few layers
    in transfer, which are not counted. They take space on the disk only with `in_place`: otherwise they are
    written where the new state will be.

    With `Rates(peak=)` and `Workload(tokens=)` the estimate has the least time of a step. In each of its
    parts (forward pass, backward pass, update) compute and all links are taken to be busy at the same time,
    so that the slowest of them counts. Gradients that one program makes leave when it is over, and nothing
    hides their update, unless it is delayed. With parameters on the hosts or in files, updates run while the
    backward pass goes on, unless the files are `in_place` or have gradients. Operations are 6 for each
    parameter and token (2 forward, 4 backward), and 8 with `Workload.recompute`.

    With a configuration the parameters are those of a model of Hugging Face's transformers, counted exactly,
    and the layers and their width are the model's.

    The estimate assumes that the devices divide every leaf. It leaves out activations, temporary buffers and
    whatever else XLA allocates; `ShardedStep.describe` is exact about a real step's state and traffic.

    >>> import jzero
    >>> found = jzero.estimate("7.5B", devices=64, stage=3)
    >>> print(found)
    jzero: estimate of 7.5B parameters at stage 3 over 64 devices (data axes: 'data'
      of size 64)
    <BLANKLINE>
                                      on each
    memory                   whole     device
    parameter             14.0 GiB  223.5 MiB
    optimizer state       83.8 GiB    1.3 GiB
    stored                97.8 GiB    1.5 GiB
    gradient              14.0 GiB  223.5 MiB  sharded: reduced as they are produced
    total within a step  111.8 GiB    1.7 GiB
    <BLANKLINE>
    per step         dtype  axes        elements     bytes  times
    all-gather      16-bit  data  15,000,000,000  27.9 GiB      2
    reduce-scatter  16-bit  data   7,500,000,000  14.0 GiB      1
    <BLANKLINE>
    A device sends and receives 3 Psi elements for Psi parameters.
    >>> jzero.estimate("7.5B", devices=64, stage=1).total / 1e9     # ZeRO, Table 1: 31.4 GB
    31.40625
    >>> jzero.estimate(1, devices=64, stage=3).largest_model("32GB")
    128000000000
    >>> jzero.estimate(1, devices=64, stage=1, model_parallel=16).largest_model("32GB")   # Table 2: 121.6B
    122268656712

    Offloaded, a model with masters takes 2 bytes per parameter on one device:

    >>> print(jzero.estimate("10B", devices=1, memory="host"))
    jzero: estimate of 10B parameters at stage 3 over 1 device (data axes: 'data' of
      size 1)
    <BLANKLINE>
                                     on each     on its
    memory                   whole    device       host
    parameter             18.6 GiB  18.6 GiB        0 B
    optimizer state      111.8 GiB       0 B  111.8 GiB
    outgoing parameter    18.6 GiB       0 B   18.6 GiB  pinned
    stored               149.0 GiB  18.6 GiB  130.4 GiB
    gradient              18.6 GiB  18.6 GiB        0 B  sharded: reduced as they
                                                         are produced
    incoming gradient     18.6 GiB       0 B   18.6 GiB  pinned
    total within a step  186.3 GiB  37.3 GiB  149.0 GiB
    <BLANKLINE>
    A step moves nothing between devices.
    <BLANKLINE>
    per step, each device       what   dtype        elements     bytes
    to host                 gradient  16-bit  10,000,000,000  18.6 GiB
    to device              parameter  16-bit  10,000,000,000  18.6 GiB
    <BLANKLINE>
    A device sends and receives 0 Psi elements for Psi parameters.

    A model of 70B on 8 devices, of which none holds more than 2 GiB of parameters at a time:

    >>> memory = jzero.Memory(params=jzero.PinnedHost(2**31), optimizer="host")
    >>> rates = jzero.Rates(peak="989TFLOP/s", pcie="55GB/s", host_update="40GB/s")
    >>> found = jzero.estimate("70B", devices=8, memory=memory, rates=rates,
    ...                        workload=jzero.Workload(tokens="8K"))
    >>> found.total / 2**30, found.on_host / 2**30 < 131
    (2.0, True)
    >>> print(found.time)
    time of a step  compute  to device  to host  host update  not hidden
    forward pass     1.13 s     318 ms        -            -           -
    backward pass     3.4 s     318 ms   318 ms       2.62 s           -
    step             4.53 s     636 ms   318 ms       2.62 s           -
    <BLANKLINE>
    A step takes at least 4.53 s, and 100% of it is compute at 989 TFLOP/s; 56% if
      nothing overlapped.
    The forward pass hides its traffic with 2,248 or more tokens on each device.
    The backward pass hides its traffic with 6,182 or more tokens on each device.
    Rates: 55 GB/s in each direction between a device and its host; 40 GB/s of
      optimizer state updated by a device's share of its host.
    Not counted, because no rate was given: between devices.

    Args:
      model: Psi, a whole number or a string such as '350M', '7.5B', '1e9', '1T'; or a model's configuration:
        a dict, or the path of its config.json. Families: llama, mistral, mixtral, qwen2, qwen3, qwen2_moe,
        qwen3_moe, gemma, gemma2, gemma3_text, gpt2, t5, vit.
      devices: how many share the batch (one mesh axis, 'data'); or the data axes and their sizes, `{'node':
        8, 'local': 8}`, or a mesh.
      stage: 0 to 3, as in `shard_train_step`.
      optimizer: bytes of its state, by name: 'sgd', 'momentum', 'adam', 'adamw', 'lion', 'adafactor', 'muon'.
      precision: 'mixed' (the paper's: 2 bytes of parameter, 2 of gradient, 4 of float32 master in the
        optimizer state: `jzero.master_weights`), 'float32' (4, 4, 0), 'float32_masters' (the same, with
        compute in 16 bits), 'stochastic' (2, 2, 0: `jzero.stochastic_rounding`).
      bytes_per_param: a `jzero.BytesPerParam`, in place of what the two names say.
      model_parallel: over how many devices each of these divides the model (`Axes(auto_specs=)`, Megatron's
        MP): the training runs on as many times more devices. All leaves are taken to be divided, and traffic
        along this axis is not counted: numbers alone do not tell it.
      microbatches: as in `shard_train_step`, like the options that follow. A gradient that is reduced once is
        whole on each device until then.
      memory: where state is stored. A real step keeps leaves below `Axes.min_shard_bytes` on the devices, and
        at most `HostCPU.ratio` of the bytes on the host: leaves are not cut. The random bits of
        `precision='stochastic'` are not counted in the copies. Activations are copied twice, in the dtype
        of the compute: the inputs that a loop over layers saves for its backward loop.
      comm: with quantized formats all parameters and gradients are counted as such, though small leaves and
        those that no product reads stay exact. `gather='keep'` and 'once_per_step' keep a gathered copy of
        all parameters; 'per_pass' keeps one layer's, which these numbers do not tell, and which is not
        counted. `tile_bytes`: two tiles of a matrix and of its gradient are counted; the numbers do not tell
        which matrices are larger, and with `Workload.recompute` gathers are counted as if all were: up to 4
        Psi move, not 3.
      axes: which axes shard parameters and optimizer state (`Axes(params=, optimizer=)`, no other field).
      donate: False counts the old state in addition to the new one.
      workload: a `jzero.Workload`: tokens of a step, and the layers that save activations.
      rates: a `jzero.Rates`, of devices and links.

    Returns:
      An `Estimate`: `print` it.

    Raises:
      OptionError: an argument that is not what it should be, options that `shard_train_step` would refuse,
        or `ratio='auto'`, which is measured; rates of what does not move.
      MeshError: axes that the mesh does not have.

    Reference:
      Rajbhandari, Rasley, Ruwase, He: "ZeRO: Memory Optimizations Toward Training Trillion Parameter
      Models", 2020: section 3.1 (2 + 2 + K bytes, K = 12 for Adam), section 5 and Table 1 (stages),
      section 7 (traffic).
      Ren et al.: "ZeRO-Offload: Democratizing Billion-Scale Model Training", 2021: section 3 (2 bytes per
      parameter on the device, 4 that cross), section 5.2 (delayed update).
      Rajbhandari et al.: "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", 2021:
      section 3 (memory), section 4 (what must move, and how fast), section 5.1.3 (tiles), section 6.1 (each
      device's own link).
    """
    axes_of_devices = data_axes(devices)
    found = read_model(model) if _is_config(model) else None
    count = parse_count(model) if found is None else found.num_params
    check(model, count, devices, axes_of_devices, model_parallel, optimizer, precision)
    assert count is not None
    assert axes_of_devices is not None
    with called_as(WHO):
        options = options_of(WHO, stage, microbatches, memory, comm, axes, donate=donate)
    rule = "Numbers alone do not say what follows from it; describe() of a real step does."
    names = [x.name for x in dataclasses.fields(Axes) if x.name not in ("params", "optimizer")]
    refuse_fields(WHO, options.axes, names, rule)
    refuse_fields(WHO, options.comm, ("prefetch_bytes", "max_gather_bytes"), rule)
    sizes = role_bytes(
        optimizer, precision, _group(BytesPerParam, "bytes_per_param", bytes_per_param)
    )
    stage_axes = options.stage_axes(axes_of_devices)
    backend: Any = options.offload
    check_offload(backend, sizes, optimizer, math.prod(axes_of_devices.values()))
    with called_as(WHO):
        backend.check(stage_axes)
    work = _group(Workload, "workload", workload)
    if found is not None and options.moves_activations:
        layers = found.num_layers if work.layers is None else work.layers
        work = dataclasses.replace(
            work, layers=layers, width=found.width if work.width is None else work.width
        )
    check_workload(options, work)
    speeds = _group(Rates, "rates", rates)
    made = Estimate(count, options, stage_axes, sizes, work, speeds, model_parallel, found)
    check_rates(options, work, speeds, {
        "pcie": bool(made.transfers), "interconnect": bool(made.traffic),
        "host_update": bool(made.hosted_bytes), "disk": bool(made.on_disk),
    })  # fmt: skip
    return made


def _is_config(model: Any) -> bool:
    """Whether it is a configuration or the path of one, rather than a number."""
    if isinstance(model, str):
        return model.endswith(".json") or os.sep in model or not re.match(r"[-+]?\.?\d", model)
    return isinstance(model, Mapping | os.PathLike)


def _group(kind: type[_Group], name: str, given: Any) -> _Group:
    if not isinstance(given, kind | None):
        raise OptionError(message(
            WHO, f"{name}={given!r}", f"It is a jzero.{kind.__name__}.", "Write one, or drop it."
        ))  # fmt: skip
    return given or kind()


@dataclasses.dataclass(frozen=True)
class Estimate(Printed):
    """Memory and traffic of a training, in the words of `ShardedStep.describe`; `print` it.

    Attributes:
      num_params: Psi.
      options: the stage and the options, checked.
      sharding: the stage on the mesh.
      bytes_per_param: of each role.
      workload: what a step computes with.
      rates: of devices and links, as far as given.
      model_parallel: over how many devices each part of the batch divides the model.
      model: the layers and shapes, if a configuration was given.
    """

    num_params: int
    options: Options
    sharding: StageAxes
    bytes_per_param: RoleBytes
    workload: Workload = Workload()
    rates: Rates = Rates()
    model_parallel: int = 1
    model: Model | None = None

    @property
    def num_devices(self) -> int:
        """Devices of the training: those that share the batch, times `model_parallel`."""
        return self.model_parallel * math.prod(size for _, size in self.sharding.axes)

    @functools.cached_property
    def _step(self) -> ScaledStep:
        return ScaledStep(
            self.num_params, self.options, self.sharding, self.bytes_per_param, self.workload,
            self.model_parallel,
        )  # fmt: skip

    @functools.cached_property
    def memory(self) -> tuple[_tables.Memory, ...]:
        """Bytes of each role; those of gradients are the most that a step holds at a time."""
        found = tuple(_within.rows(self._step))
        return found if self.options.donate else (*found, _tables.old_state(found))

    @property
    def traffic(self) -> tuple[Collective, ...]:
        """The collectives of a step as if all parameters were one leaf, which `times` counts."""
        return self._step.traffic

    @functools.cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Copies between each device and its host in a step; of state, an element per parameter."""
        return transfers(self._step.schedule)

    @property
    def hosted_bytes(self) -> int:
        """Bytes of optimizer state that a device's share of its host updates in a step."""
        return sum(updated_bytes(self._step.schedule).values())

    @functools.cached_property
    def time(self) -> StepTime | None:
        """The least time of a step at the given rates; None if no peak was given."""
        if self.rates.peak is None:
            return None
        operations = operations_of(self._step.each, self.workload)
        tokens = self.workload.tokens or 0
        return step_time(self.rates, operations, tokens, self.traffic, self._step.schedule)

    @property
    def at_rest(self) -> int:
        """Bytes on each device between steps: parameters and optimizer state."""
        return sum(row.per_device for row in self.memory if row.at_rest)

    @property
    def total(self) -> int:
        """Bytes on each device, those within a step (gradients) included: the paper's model states."""
        return sum(row.per_device for row in self.memory)

    @property
    def on_host(self) -> int:
        """Bytes that each device's host holds for it, those within a step included.

        Devices of one process that are replicas of each other share the optimizer state of `HostCPU`.
        """
        return sum(row.on_host for row in self.memory)

    @property
    def on_disk(self) -> int:
        """Bytes that disks of each device's host hold for it."""
        return sum(row.on_disk for row in self.memory)

    @property
    def elements_moved(self) -> int:
        """Elements that a device sends and receives in a step: an all-reduce is two passes (section 7.1).

        The paper's count, for many devices; n devices move (n - 1) / n of it.
        """
        return sum(c.total_elements * (2 if c.op == "all-reduce" else 1) for c in self.traffic)

    def elements(self, op: str, dtype: str | None = None) -> int:
        """Elements that a step moves by `op` ('all-gather', 'reduce-scatter', 'all-reduce')."""
        return _tables.elements(self.traffic, op, dtype)

    def nbytes(self, role: str) -> int:
        """Bytes on each device of one role: 'parameter', 'gradient', 'optimizer state', ..."""
        return sum(row.per_device for row in self.memory if row.role == role)

    def largest_model(
        self, memory: float | str, host_memory: float | str | None = None,
        disk_memory: float | str | None = None,
    ) -> int:  # fmt: skip
        """The most parameters whose `total` fits into `memory`, with everything else as it is.

        An upper bound: activations and temporary buffers need memory too.

        Args:
          memory: bytes of one device, or a string such as '80GiB' (80 * 2**30) or '80GB' (80 * 10**9).
          host_memory: bytes of a host for each of its devices, into which `on_host` must fit; unbounded if
            left out.
          disk_memory: the same of its disks, for `on_disk`.

        Raises:
          OptionError: one is not a number of bytes, or nothing bounds the model.
        """
        others = {"host_memory": host_memory, "disk_memory": disk_memory}
        limits = {"memory": memory} | {name: x for name, x in others.items() if x is not None}
        found = {name: parse_bytes(value) for name, value in limits.items()}
        if bad := [f"{name}={limits[name]!r}" for name, n in found.items() if n is None]:
            raise OptionError(message(
                WHO, bad, f"The memory of a device, of a host, and of its disks, is {BYTES_RULE}.",
                "Write largest_model('80GiB').", things="arguments"))  # fmt: skip

        def fits(num_params: int) -> bool:
            other = dataclasses.replace(self, num_params=num_params)
            takes = {
                "memory": other.total,
                "host_memory": other.on_host,
                "disk_memory": other.on_disk,
            }
            return all(takes[name] <= (room or 0) for name, room in found.items())

        low, high = 0, 1
        while fits(high):
            low, high = high, 2 * high
            if high > _MOST_PARAMS:
                raise OptionError(message(
                    WHO, f"memory={memory!r} with all model states on the hosts",
                    "What is on a device does not grow with the model; the memory of its host bounds it.",
                    "Pass host_memory='1TB', bytes of the host for each of its devices."))  # fmt: skip
        # A search, since bytes of each role are rounded up, and those of some are bounded.
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def to_dict(self) -> dict[str, Any]:
        """The tables' rows and sums as plain types; bytes and elements are exact ints.

        Keys: num_params, axes, model_parallel, stage; memory, traffic and transfers as in `Report.to_dict`;
        at_rest, total, on_host and on_disk (bytes); elements_moved; time, as in `StepTime.to_dict`, if a
        peak was given; model, if a configuration was: model_type, layers, width, layer_params, largest_leaf
        (its name and shape).

        >>> import jzero
        >>> found = jzero.estimate("7.5B", devices=64).to_dict()
        >>> found["total"], found["elements_moved"], found["memory"][0]["per_device"]
        (1875000000, 22500000000, 234375000)
        """
        return {
            "num_params": self.num_params,
            "axes": dict(self.sharding.axes),
            "model_parallel": self.model_parallel,
            "stage": self.options.stage,
            "memory": [row._asdict() for row in self.memory],
            "at_rest": self.at_rest,
            "total": self.total,
            "on_host": self.on_host,
            "on_disk": self.on_disk,
            "traffic": _tables.traffic_rows(self.traffic),
            "transfers": _tables.transfer_rows(self.transfers),
            "elements_moved": self.elements_moved,
            **({} if self.time is None else {"time": self.time.to_dict()}),
            **({} if self.model is None else {"model": self.model.to_dict()}),
        }

    def blocks(self) -> Iterator[Block]:
        """Tables, and prose between them."""
        yield [self.header()]
        yield _tables.memory_table(self.memory)
        yield _tables.traffic_table(self.traffic) or ["A step moves nothing between devices."]
        yield _tables.transfer_table(self.transfers)
        moved = float(Fraction(self.elements_moved, self.num_params))
        sent = f"A device sends and receives {moved:.3g} Psi elements for Psi parameters."
        yield [sent, *self.model_lines()]
        if self.time is not None:
            yield from self.time.blocks()

    def header(self) -> str:
        """One line on the model, the stage and the devices."""
        axes = ", ".join(f"'{name}' of size {size}" for name, size in self.sharding.axes)
        devices = counted(self.num_devices, "device", "devices")
        if self.model_parallel > 1:
            devices += f", {self.model_parallel} for each part of the batch"
        return (
            f"jzero: estimate of {readable_count(self.num_params)} parameters at stage "
            f"{self.options.stage} over {devices} (data axes: {axes})"
        )

    def model_lines(self) -> list[str]:
        """For a configuration: its parameters, and the gathered bytes of a layer, which no total includes."""
        if self.model is None:
            return []
        counted = f"{self.model.model_type}: {self.num_params:,} parameters."
        if not self.sharding.param_axes:
            return [counted]
        size = self.bytes_per_param.compute / self.model_parallel
        name, shape = self.model.largest_leaf
        largest = f"{name} [{','.join(map(str, shape))}]"
        return [
            f"{counted} Gathered for compute, a layer (1 of {self.model.num_layers}) takes "
            f"{readable_bytes(float(size * self.model.layer_params))}, and the largest leaf, {largest}, "
            f"{readable_bytes(float(size * math.prod(shape)))}."
        ]


def roles_on_devices(found: Sequence[Estimate]) -> list[str]:
    """The roles of some estimates, except those that only hosts hold."""
    rows = [row for e in found for row in e.memory]
    return list(
        dict.fromkeys(
            row.role for row in rows if row.per_device or not (row.on_host or row.on_disk)
        )
    )
