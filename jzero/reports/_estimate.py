# SPDX-License-Identifier: Apache-2.0
"""`estimate`: memory and traffic of a training from its numbers alone, without a model or a device."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from jzero._errors import OptionError, called_as, message
from jzero._policy import NO_OFFLOAD, PinnedHost, Policy
from jzero._quantities import (
    BYTES_RULE,
    parse_bytes,
    parse_count,
    readable_bytes,
    readable_count,
)
from jzero.offload._backends import backend_of
from jzero.offload.schedule._folds import Crossing
from jzero.reports import _as_dict, _formulas, _host_traffic, _step_time, _tables
from jzero.reports._checks import WHO, check, check_offload, check_tile, data_axes
from jzero.reports._hf_config import Model, read_model
from jzero.reports._host_tiers import HostTiers
from jzero.reports._host_traffic import Haul
from jzero.reports._lines import WIDTH, wrapped
from jzero.reports._presets import OPTIMIZERS, PRECISIONS
from jzero.reports._sizes import BytesPerParam
from jzero.reports._step_time import Rates, StepTime
from jzero.reports._tables import Memory
from jzero.reports._tier_checks import check_rates, check_tiers, host_tiers, rates
from jzero.sharding.analysis._traffic import Collective
from jzero.sharding.plan._options import Options, axis_tuple
from jzero.sharding.plan._stages import StageAxes

_MOST_PARAMS = 10**18  # beyond which a model is taken to be unbounded


def estimate(
    num_params: float | str | None = None,
    *,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    devices: int | None = None,
    mesh: Any = None,
    model_parallel: int = 1,
    stage: int = 3,
    optimizer: str = "adam",
    precision: str = "mixed",
    param_bytes: float | None = None,
    gradient_bytes: float | None = None,
    optimizer_bytes: float | None = None,
    accumulate: int = 1,
    reduce: str | None = None,
    accumulate_dtype: Any = None,
    reduce_dtype: Any = None,
    gather_dtype: Any = None,
    gather: str | None = None,
    param_axes: str | Sequence[str] | None = None,
    optimizer_axes: str | Sequence[str] | None = None,
    offload: Policy = NO_OFFLOAD,
    offload_params: Policy = NO_OFFLOAD,
    offload_activations: Policy = NO_OFFLOAD,
    tile_bytes: float | str | None = None,
    layer_major: bool = False,
    donate: bool = True,
    tokens: float | str | None = None,
    layers: float | str | None = None,
    width: float | str | None = None,
    recompute: bool = True,
    peak: float | str | None = None,
    pcie: float | str | None = None,
    interconnect: float | str | None = None,
    host_update: float | str | None = None,
    disk: float | str | None = None,
) -> Estimate:
    """What a training needs on each device and moves in a step, from numbers alone.

    For Psi parameters, of which each role takes a number of bytes and rests on a number of devices::

        parameters       param_bytes     * Psi / devices of param_axes       # stage 3, else / 1
        optimizer state  optimizer_bytes * Psi / devices of optimizer_axes   # stage >= 1
        gradients        gradient_bytes  * Psi / devices of optimizer_axes   # unless reduced once

    `offload` takes the optimizer state off the devices. With `PinnedHost` at most `device_bytes` of it visit
    each, and all of it crosses to the device and back in a step. With `HostCPU` gradients cross to the host
    and new parameters to the device, which wait in pinned memory (those of two steps if delayed); the
    optimizer state without masters reads parameters, which then cross to the host, too. With `NVMe` the same
    crosses, the optimizer state is read from the host's disk and written there, once each, and the host has
    `host_bytes` of it, which count for each device as if each had a process. Gradients count as
    if all of a step's were on the device before the first has left it.

    With `offload_params` parameters rest in pinned memory, in shards, too. Each device fetches its own shard
    over its own link, once for each pass over the layers, and at most `device_bytes` of parameters, gathered
    ones included, are on a device at a time. Gradients leave as layers end, and go down once; one layer's,
    whole before they are reduced, are not counted, like one layer's gathered parameters without offload.
    What `HostCPU` updates crosses no more; what devices update comes once more, and new parameters go back.
    With parameters on `NVMe` they are read from the disk for each pass, and read and written there with the
    optimizer state for the update; of them the host has `host_bytes`, for each device as if it had a process.
    With `gradients=True` gradients are written there in the backward pass and read for the update. They take
    no memory of the host, but for those of a few layers on their way, which are not counted; and space with
    `in_place` alone, for else they are where the new state will be.

    With `peak` and `tokens` the estimate has the least time of a step. In each of its parts (forward pass,
    backward pass, update) compute and all ways are taken to be busy at the same time, so that the slowest
    of them counts. An update hides behind nothing, unless it is delayed; operations are 6 for each parameter
    and token (2 forward, 4 backward), and 8 with `recompute`.

    With `config` in place of `num_params` the parameters are those of a model of Hugging Face's transformers,
    counted exactly, and `layers` and `width` are the model's.

    Every leaf is taken to divide by the devices. Activations, temporary buffers and what XLA keeps beside
    them are not in it; `ShardedTrainStep.describe` is exact about a real step's state and traffic.

    >>> import jzero
    >>> found = jzero.estimate("7.5B", devices=64, stage=3)
    >>> print(found)
    jzero: estimate of 7.5B parameters at stage 3 over 64 devices (data axes: 'data'
      of size 64)
    <BLANKLINE>
                                           on each
    memory                        whole     device
    parameter                  14.0 GiB  223.5 MiB
    optimizer state            83.8 GiB    1.3 GiB
    at rest                    97.8 GiB    1.5 GiB
    gradient                   14.0 GiB  223.5 MiB  in shards: reduced as they are
                                                    produced
    with those within a step  111.8 GiB    1.7 GiB
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

    Offloaded, a model with masters rests in 2 bytes per parameter on one device:

    >>> print(jzero.estimate("10B", devices=1, offload=jzero.HostCPU()))
    jzero: estimate of 10B parameters at stage 3 over 1 device (data axes: 'data' of
      size 1)
    <BLANKLINE>
                                          on each     on its
    memory                        whole    device       host
    parameter                  18.6 GiB  18.6 GiB        0 B
    optimizer state           111.8 GiB       0 B  111.8 GiB
    leaving parameter          18.6 GiB       0 B   18.6 GiB  pinned
    at rest                   149.0 GiB  18.6 GiB  130.4 GiB
    gradient                   18.6 GiB  18.6 GiB        0 B  in shards: reduced as
                                                              they are produced
    arriving gradient          18.6 GiB       0 B   18.6 GiB  pinned
    with those within a step  186.3 GiB  37.3 GiB  149.0 GiB
    <BLANKLINE>
    A step moves nothing between devices.
    <BLANKLINE>
    per step, each device       what   dtype        elements     bytes
    to host                 gradient  16-bit  10,000,000,000  18.6 GiB
    to device              parameter  16-bit  10,000,000,000  18.6 GiB
    <BLANKLINE>
    A device sends and receives 0 Psi elements for Psi parameters.

    A model of 70B on 8 devices, of which none holds more than 2 GiB of parameters at a time:

    >>> found = jzero.estimate("70B", devices=8, offload=jzero.HostCPU(),
    ...                        offload_params=jzero.PinnedHost(2**31), tokens="8K",
    ...                        peak="989TFLOP/s", pcie="55GB/s", host_update="40GB/s")
    >>> found.total / 2**30, found.on_host / 2**30 < 131
    (2.0, True)
    >>> print(found.time)
    time of a step  compute  to device  to host  host update  not hidden
    forward pass     1.13 s     318 ms        -            -           -
    backward pass     3.4 s     318 ms   318 ms            -           -
    update                -          -        -       2.62 s      2.62 s
    step             4.53 s     636 ms   318 ms       2.62 s      2.62 s
    <BLANKLINE>
    A step takes at least 7.15 s, and 63% of it is compute at 989 TFLOP/s; 56% if
      nothing hid.
    The forward pass hides what it moves from 2,248 tokens on each device on.
    The backward pass hides what it moves from 750 tokens on each device on.
    Rates: 55 GB/s each way between a device and its host; 40 GB/s of optimizer
      state updated by a device's share of its host.
    No time is counted for: between devices. No rate is given for it.

    Args:
      num_params: Psi, a whole number or a string such as '350M', '7.5B', '1e9', '1T'.
      config: instead of `num_params`, the model's configuration: a dict, or the path of its config.json.
        Families: llama, mistral, mixtral, qwen2, qwen3, qwen2_moe, qwen3_moe, gemma, gemma2, gemma3_text,
        gpt2, t5, vit.
      devices: how many share the batch; one mesh axis, 'data'.
      mesh: instead of `devices`, the data axes and their sizes: `{'node': 8, 'local': 8}`, or a mesh.
      model_parallel: over how many devices each of these divides the model (`auto_specs`, Megatron's MP): the
        training runs on so many times as many. All leaves are taken to be divided, and what moves along this
        axis is not counted: numbers do not tell it.
      stage: 0 to 3, as in `shard_train_step`.
      optimizer: bytes of its state, by name: 'sgd', 'momentum', 'adam', 'adamw', 'lion', 'adafactor', 'muon'.
      precision: 'mixed' (the paper's: 2 bytes of parameter, 2 of gradient, 4 of float32 master in the
        optimizer state: `jzero.master_weights`), 'float32' (4, 4, 0), 'float32_masters' (the same, with
        compute in 16 bits), 'stochastic' (2, 2, 0: `jzero.stochastic_rounding`).
      param_bytes: bytes per parameter at rest, instead of the precision's; above 0.
      gradient_bytes: bytes of its gradient, instead of the precision's.
      optimizer_bytes: bytes of its optimizer state, masters included, instead of the two names'; the K of
        the paper.
      accumulate: microbatches, as in `shard_train_step`, like the options that follow.
      reduce: 'once' or 'each'. A gradient that is reduced once is whole on each device until then.
      accumulate_dtype: of the accumulator; by default float32.
      reduce_dtype: in which gradients travel; as codes, all of them are counted as such, though small leaves
        and those that no product reads stay exact.
      gather_dtype: codes in which passes gather parameters, counted alike.
      gather: 'per_pass', 'keep' or 'once_per_step'. The latter two keep a gathered copy of all parameters;
        'per_pass' keeps one layer's, which these numbers do not tell, and which is not counted.
      param_axes: the axes over which parameters rest.
      optimizer_axes: the axes over which gradients and optimizer state are sharded.
      offload: where optimizer state rests: `jzero.PinnedHost(device_bytes=...)`, `jzero.HostCPU(ratio=...,
        delayed_update=...)` or `jzero.NVMe(path, host_bytes=..., in_place=...)`. A real step keeps leaves
        below `min_shard_bytes` on the devices, and at most `ratio` of the bytes on the host: leaves are not
        cut. The random bits of `precision='stochastic'` are not in what crosses.
      offload_params: where parameters rest: `jzero.PinnedHost(device_bytes=...)`, or with `NVMe` for
        `offload`, `jzero.NVMe(path, device_bytes=...)`.
      offload_activations: where a forward loop over layers keeps their inputs for its backward loop:
        `jzero.PinnedHost()`. They cross twice, in the dtype of the compute.
      tile_bytes: of a matrix as it is gathered, and of its gradient: an int, or a string such as '64MiB'.
        Larger ones are never whole; two tiles of each are counted. The numbers do not tell which matrices
        are larger, and with `recompute` gathers are counted as if all were: up to 4 Psi move, not 3.
      layer_major: whether a layer is fetched and gathered once per pass for all microbatches, and its
        gradient reduced once; with `offload_params` and `accumulate`.
      donate: False counts the state that a step is given beside the new one.
      tokens: of a step on each device, those of all microbatches: rows times their length; with
        `model_parallel` of each such group of devices.
      layers: how many the loop has; with `offload_activations`.
      width: elements of a layer's input for each token, the hidden size; with `offload_activations`.
      recompute: whether the backward pass computes layers again.
      peak: operations per second of a device, '989TFLOP/s', or what it reaches.
      pcie: bytes per second between each device and its host, each way, while all devices do so: '55GB/s',
        decimal, as makers state it. `jzero.bandwidth` measures this rate, and the two that follow.
      interconnect: bytes per second of the whole value that an all-gather or a reduce-scatter moves; of
        several axes, the slowest.
      host_update: bytes per second of optimizer state that the host updates for each of its devices.
      disk: bytes per second that the host's disks read and write for each of its devices, both together:
        '6GB/s'.

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
    given = {
        "param_bytes": param_bytes,
        "gradient_bytes": gradient_bytes,
        "optimizer_bytes": optimizer_bytes,
    }
    axes = data_axes(devices, mesh)
    model = None if config is None else read_model(config)
    count = parse_count(num_params) if model is None else model.num_params
    if model is not None and num_params is not None:
        raise OptionError(message(
            WHO, f"num_params={num_params!r} and config", "The model's parameters are counted.",
            "Drop one or the other."))  # fmt: skip
    check(num_params, count, devices, mesh, axes, model_parallel, optimizer, precision, given)
    assert count is not None
    assert axes is not None
    with called_as(WHO):
        backend = backend_of(WHO, offload, offload_params)
    options = Options(
        stage=stage, accumulate=accumulate, reduce=reduce, accumulate_dtype=accumulate_dtype,
        reduce_dtype=reduce_dtype, gather=gather, param_axes=axis_tuple(param_axes),
        optimizer_axes=axis_tuple(optimizer_axes), offload=backend, tile_bytes=check_tile(tile_bytes),
        layer_major=layer_major, donate=donate, gather_dtype=gather_dtype, who=WHO,
    )  # fmt: skip
    sizes = _bytes_per_param(optimizer, precision, **given)
    stage_axes = options.stage_axes(axes)
    check_offload(backend, sizes, optimizer, math.prod(axes.values()))
    with called_as(WHO):
        backend.check(stage_axes)
    if model is not None and isinstance(offload_activations, PinnedHost):
        layers = model.num_layers if layers is None else layers
        width = model.width if width is None else width
    shape = {"tokens": tokens, "layers": layers, "width": width}
    tiers = host_tiers(offload_activations, shape, recompute)
    check_tiers(options, tiers)
    given_rates = rates(
        peak=peak, pcie=pcie, interconnect=interconnect, host_update=host_update, disk=disk
    )
    found = Estimate(count, options, stage_axes, sizes, tiers, given_rates, model_parallel, model)
    check_rates(tiers, given_rates, {
        "pcie": bool(found.crossings), "interconnect": bool(found.traffic),
        "host_update": bool(found.hosted_bytes), "disk": bool(found.on_disk),
    })  # fmt: skip
    return found


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory and traffic of a training, in the words of `ShardedTrainStep.describe`; `print` it.

    Attributes:
      num_params: Psi.
      options: the stage and the options, checked.
      sharding: the stage on the mesh.
      bytes_per_param: of each role.
      tiers: where activations rest, checked; and the shape of the batch.
      rates: of devices and links, as far as given.
      model_parallel: over how many devices each part of the batch divides the model.
      model: the layers and shapes, if a configuration was given.
    """

    num_params: int
    options: Options
    sharding: StageAxes
    bytes_per_param: BytesPerParam
    tiers: HostTiers = HostTiers()
    rates: Rates = Rates()
    model_parallel: int = 1
    model: Model | None = None

    @property
    def num_devices(self) -> int:
        """Devices of the training: those that share the batch, times `model_parallel`."""
        return self.model_parallel * math.prod(size for _, size in self.sharding.axes)

    @property
    def _each(self) -> int:
        """Parameters of one place along the model's axis."""
        return math.ceil(self.num_params / self.model_parallel)

    @property
    def memory(self) -> tuple[Memory, ...]:
        """Bytes of each role; those of gradients are the most that a step holds at a time, not at rest."""
        rows = _formulas.needs(self.options, self.sharding, self.bytes_per_param)
        found = _formulas.memory(self.num_params, rows, self.model_parallel)
        if self.tiers.offloads_activations:
            found += (_formulas.activations(self.options, self.tiers, self.bytes_per_param),)
        return found if self.options.donate else (*found, _tables.old_state(found))

    @property
    def traffic(self) -> tuple[Collective, ...]:
        """The collectives of a step as if all parameters were one leaf, which `times` counts."""
        return tuple(
            _formulas.traffic(
                self._each, self.options, self.tiers, self.sharding, self.bytes_per_param
            )
        )

    @property
    def crossings(self) -> tuple[Crossing, ...]:
        """What crosses between each device and its host in a step; of state, an element per parameter."""
        return tuple(_host_traffic.crossings(self._hauls()))

    @property
    def hosted_bytes(self) -> int:
        """Bytes of optimizer state that a device's share of its host updates in a step."""
        return _host_traffic.hosted_bytes(
            self._each, self.options, self.sharding, self.bytes_per_param
        )

    @property
    def time(self) -> StepTime | None:
        """The least time of a step at the given rates; None if no peak was given."""
        if self.rates.peak is None:
            return None
        done = _step_time.work(
            self._each, self.options, self.tiers, self.sharding, self._hauls(), self.traffic,
            self.hosted_bytes,
        )  # fmt: skip
        return _step_time.step_time(done, self.rates)

    def _hauls(self) -> Iterator[Haul]:
        return _host_traffic.hauls(
            self._each, self.options, self.tiers, self.sharding, self.bytes_per_param
        )

    @property
    def at_rest(self) -> int:
        """Bytes on each device between steps: parameters and optimizer state."""
        return _tables.at_rest(self.memory)

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

        Of each collective the paper's count for many devices; n devices move (n - 1) / n of it.
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

        An upper bound: activations and temporary buffers need room too.

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
                    "Give host_memory='1TB', bytes of the host for each of its devices."))  # fmt: skip
        # By search: the bytes of each role are rounded up, and those of some are bounded.
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def to_dict(self) -> dict[str, Any]:
        """The tables' rows and sums as plain types; bytes and elements are exact ints.

        Keys: num_params, axes, model_parallel, stage; memory, traffic and crossings as in `Report.to_dict`;
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
            "memory": _as_dict.memory(self.memory),
            "at_rest": self.at_rest,
            "total": self.total,
            "on_host": self.on_host,
            "on_disk": self.on_disk,
            "traffic": _as_dict.traffic(self.traffic),
            "crossings": _as_dict.crossings(self.crossings),
            "elements_moved": self.elements_moved,
            **({} if self.time is None else {"time": self.time.to_dict()}),
            **({} if self.model is None else {"model": self.model.to_dict()}),
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def header(self, width: int = WIDTH) -> list[str]:
        """What the numbers are of."""
        axes = ", ".join(f"'{name}' of size {size}" for name, size in self.sharding.axes)
        devices = "1 device" if self.num_devices == 1 else f"{self.num_devices} devices"
        if self.model_parallel > 1:
            devices += f", {self.model_parallel} for each part of the batch"
        return wrapped(
            f"jzero: estimate of {readable_count(self.num_params)} parameters at stage "
            f"{self.options.stage} over {devices} (data axes: {axes})", "  ", width)  # fmt: skip

    def model_lines(self) -> list[str]:
        """Of a configuration: its parameters, and what stage 3 gathers of them, which no total has."""
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

    def lines(self, width: int = WIDTH) -> list[str]:
        """The text, for a terminal of so many columns."""
        table = _tables.traffic_table(self.traffic)
        crossing = _tables.crossing_table(self.crossings)
        moved = float(Fraction(self.elements_moved, self.num_params))
        sent = f"A device sends and receives {moved:.3g} Psi elements for Psi parameters."
        return [
            *self.header(width),
            "",
            *_tables.memory_table(self.memory).text(width),
            "",
            *(table.text(width) if table else ["A step moves nothing between devices."]),
            "",
            *([*crossing.text(width), ""] if crossing else []),
            *wrapped(sent, "  ", width),
            *(line for text in self.model_lines() for line in wrapped(text, "  ", width)),
            *([] if self.time is None else ["", *self.time.lines(width)]),
        ]


def roles_on_devices(found: Sequence[Estimate]) -> list[str]:
    """The roles of some estimates, but for those that only hosts hold."""
    rows = [row for e in found for row in e.memory]
    return list(
        dict.fromkeys(
            row.role for row in rows if row.per_device or not (row.on_host or row.on_disk)
        )
    )


def _bytes_per_param(
    optimizer: str, precision: str, *, param_bytes: float | None, gradient_bytes: float | None,
    optimizer_bytes: float | None,
) -> BytesPerParam:  # fmt: skip
    row = PRECISIONS[precision]
    params = row.parameters if param_bytes is None else param_bytes
    grads = row.gradients if gradient_bytes is None else gradient_bytes
    state = row.masters + OPTIMIZERS[optimizer] if optimizer_bytes is None else optimizer_bytes
    # By way of text: 0.01 is to be a hundredth, not the nearest binary fraction.
    return BytesPerParam(
        *(
            Fraction(str(n))
            for n in (params, grads, state, min(params, row.compute), min(state, row.masters))
        )
    )
