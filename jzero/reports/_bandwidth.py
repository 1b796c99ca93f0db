# SPDX-License-Identifier: Apache-2.0
"""`bandwidth`: how fast devices, their host and the links between them are on the machine it runs on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from jzero._errors import OptionError, counted, message
from jzero._quantities import BYTES_RULE, parse_bytes, readable_bytes, readable_rate
from jzero.offload import _bandwidth
from jzero.offload.kernels._code_paths import no_kernels
from jzero.reports._checks import is_size
from jzero.reports._tables import Block, Printed, Table

WHO = "bandwidth"


class LinkRate(NamedTuple):
    """How fast devices copied to pinned memory of their host and back, in bytes per second of each device."""

    devices: tuple[int, ...]  # which of them copied, all at the same time: their numbers
    # whether both directions were busy at the same time; both rates are then the slower's
    both_ways: bool
    to_host: float  # the rate of each device's copies to the host
    to_device: float  # ... from the host.


def bandwidth(*, nbytes: int | str = 2**27, threads: int | None = None) -> BandwidthReport:
    """Measures the rates that `estimate` needs: links to the host, collectives, and the host's update.

    It copies between each device of this process and pinned memory of its host, one device alone and all at
    once (each has a link of its own, and all share the host's memory), gathers and scatters among them, and
    updates Adam's state on the host and on a device. Nothing else should run meanwhile; it takes some seconds
    and, on each device, some times `nbytes`. Rates are per second and for each device, in decimal GB.

    >>> import jzero
    >>> found = jzero.bandwidth(nbytes="1MiB")
    >>> found.num_devices, [len(link.devices) for link in found.links][-2:]
    (8, [8, 8])
    >>> rates = jzero.Rates(peak="989TFLOP/s", pcie=found.pcie)
    >>> jzero.estimate("7B", devices=8, memory="pinned_host", rates=rates,
    ...                workload=jzero.Workload(tokens="8K")).time.efficiency < 1
    True

    Args:
      nbytes: of each copy, and of the whole value of a collective: a number, or a string such as '128MiB'.
        Small ones measure how long it takes to start a copy.
      threads: how many update on the host; all processors that this process may use by default.

    Returns:
      A `BandwidthReport`: `print` it.

    Raises:
      OptionError: `nbytes` is not a number of bytes, or `threads` is not an int from 1.
    """
    size = parse_bytes(nbytes)
    if size is None:
        raise OptionError(message(
            WHO, f"nbytes={nbytes!r}", f"The size of a copy is {BYTES_RULE}.", "Write nbytes='128MiB'."
        ))  # fmt: skip
    if not (threads is None or is_size(threads)):
        raise OptionError(message(
            WHO, f"threads={threads!r}", "It is how many threads update, an int from 1.",
            "Drop it to use all processors that this process may use."))  # fmt: skip
    with jax.set_mesh(None):  # A mesh of the caller may have other devices.
        return _measured(size, threads)


def _measured(size: int, threads: int | None) -> BandwidthReport:
    devices = jax.local_devices()
    numbers = tuple(range(len(devices)))
    groups: list[tuple[tuple[int, ...], bool]] = [((i,), False) for i in numbers]
    groups += [(numbers, False)] * (len(devices) > 1) + [(numbers, True)]
    links = [
        LinkRate(group, both, *_bandwidth.copied([devices[i] for i in group], size, both))
        for group, both in groups
    ]
    ops = _bandwidth.COLLECTIVES if len(devices) > 1 else ()
    return BandwidthReport(
        devices[0].device_kind, len(devices), size, tuple(links),
        {op: _bandwidth.collective(op, devices, size) for op in ops},
        _bandwidth.host_update(threads) / len(devices), _bandwidth.device_update(devices[0]),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class BandwidthReport(Printed):
    """What was measured, in bytes per second and for each device; `print` it.

    Attributes:
      kind: of the devices.
      num_devices: of this process.
      nbytes: of each copy.
      links: to the host and back; of each device alone, of all at once, and of all in both directions.
      collectives: by name, bytes of the whole value that all devices gather, or reduce and scatter.
      host_update: of optimizer state that the host updates, divided by the devices.
      device_update: of optimizer state that a device updates.
    """

    kind: str
    num_devices: int
    nbytes: int
    links: tuple[LinkRate, ...]
    collectives: dict[str, float]
    host_update: float
    device_update: float

    @property
    def pcie(self) -> int:
        """`Rates(pcie=)` for `estimate`: the slower direction, all devices at once, both directions busy."""
        return int(min(self.links[-1].to_host, self.links[-1].to_device))

    @property
    def interconnect(self) -> int | None:
        """`Rates(interconnect=)` for `estimate`: the slower collective; None for one device."""
        return int(min(self.collectives.values())) if self.collectives else None

    def to_dict(self) -> dict[str, Any]:
        """All that the text says, in bytes per second, as plain types of JSON."""
        return {
            "kind": self.kind, "num_devices": self.num_devices, "nbytes": self.nbytes,
            "links": [{**link._asdict(), "devices": list(link.devices)} for link in self.links],
            "collectives": dict(self.collectives), "host_update": self.host_update,
            "device_update": self.device_update, "pcie": self.pcie, "interconnect": self.interconnect,
        }  # fmt: skip

    def blocks(self) -> Iterator[Block]:
        """Tables, and prose around them."""
        yield [self.header()]
        yield from self.tables()
        yield [*self.remarks()]

    def header(self) -> str:
        """One line on what was measured."""
        devices = counted(self.num_devices, "device", "devices")
        return (
            f"jzero: bandwidth of {devices} ({self.kind}) and their host, by copies of "
            f"{readable_bytes(self.nbytes)}; rates are of each device"
        )

    def tables(self) -> Iterator[Table]:
        """A table of the links to the host, and one of the other rates."""
        rows = [
            (self._whose(x), readable_rate(x.to_host), readable_rate(x.to_device))
            for x in self.links
        ]
        yield Table(("pinned memory of the host", "to host", "to device"), rows)
        others = {
            **{f"{op}, bytes of the whole value": rate for op, rate in self.collectives.items()},
            "update on the host, bytes of optimizer state": self.host_update,
            "update on a device, bytes of optimizer state": self.device_update,
        }
        yield Table(
            ("other", "rate"), [(name, readable_rate(rate)) for name, rate in others.items()]
        )

    def remarks(self) -> Iterator[str]:
        """The rates as flags of `jzero estimate`, and how they were measured."""
        flags = {
            "pcie": self.pcie,
            "interconnect": self.interconnect,
            "host-update": self.host_update,
        }
        given = [f"--{name} {readable_rate(n).replace(' ', '')}" for name, n in flags.items() if n]
        yield f"For jzero estimate: {' '.join(given)}"
        if reason := no_kernels():
            yield f"The host's update was XLA's, as {reason}."
        if self.kind == "cpu":
            yield "These devices are the host: all of them share its memory, and copies stay in it."

    def _whose(self, link: LinkRate) -> str:
        if len(link.devices) == 1:
            return f"device {link.devices[0]}{', both directions at once' if link.both_ways else ' alone'}"
        return f"all {len(link.devices)} at once{', both directions' if link.both_ways else ''}"
