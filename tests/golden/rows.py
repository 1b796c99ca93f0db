"""The rows: steps of tests/zoo, each with options and a mesh.

Every family of steps but near relatives of others occurs once, in a setting that its name's checksum
chooses: a new family moves no other. The scanned and the unrolled transformer then occur with every option.
"""

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

import jzero
import zoo

# Options, given a folder for what rests in files.
Options = Callable[[str], dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A step, how it is sharded, and on which mesh.

    Attributes:
      theme: the file of tests/golden/stored that has it.
      name: unique in its theme.
      step: a family of tests/zoo.
      axes: sizes of the data axes by name.
      options: of `shard_train_step`, beside the family's own.
      evaluates: what the step returns beside the state, by `shard_eval_step` with these options; `like` is
        then the options of the train step whose state it reads, or None.
      model: devices along an axis that stays XLA's.
      dtype: of the state and the batch; state in files is updated by kernels, of which none knows float64.
    """

    theme: str
    name: str
    step: str
    axes: Mapping[str, int]
    options: Options
    evaluates: bool = False
    like: Options | None = None
    model: int = 1
    dtype: str = "float64"


def _given(**options: Any) -> Options:
    return lambda folder: options


def _in_files(**options: Any) -> Options:
    """`jzero.NVMe` of this folder for optimizer state; for parameters, too, if so many bytes are given.

    And for `gradients`.
    """
    params, gradients = options.pop("device_bytes", None), options.pop("gradients", False)

    def of(folder: str) -> dict[str, Any]:
        state = jzero.NVMe(folder, threads=1, host_bytes=2**20, gradients=gradients)
        found = {**options, "offload": state}
        if params is not None:
            found["offload_params"] = jzero.NVMe(
                folder, device_bytes=params, host_bytes=2**20, threads=1, gradients=gradients
            )
        return found

    return of


EIGHT, FOUR = {"data": 8}, {"data": 4}
TWO_BY_FOUR, FOUR_BY_TWO, THREE = {"node": 2, "local": 4}, {"node": 4, "local": 2}, {"data": 3}

# In one of these each family is trained: mesh and options.
_SETTINGS: tuple[tuple[Mapping[str, int], Options], ...] = (
    (EIGHT, _given()),
    (FOUR_BY_TWO, _given()),
    (FOUR, _given(prefetch_bytes=0)),
    (THREE, _given()),
    (EIGHT, _given(stage=2)),
    (TWO_BY_FOUR, _given(param_axes="local")),
    (EIGHT, _given(stage=1)),
    (FOUR, _given(accumulate=2)),
    (TWO_BY_FOUR, _given(gather="keep", optimizer_axes="local", param_axes="local")),
    (FOUR, _given(stage=1, accumulate=2)),
    (EIGHT, _given(stage=0)),
    (FOUR, _given(offload=jzero.PinnedHost(device_bytes=4096))),
    (FOUR, _given(offload=jzero.HostCPU(threads=1))),
)


# Near relatives of other families, whose operations no other row has.
_RARE = {"factors_of_a_matrix_for_each_row", "scans_and_windows_of_each_row"}


def _of_families() -> list[Row]:
    rows = []
    for name in zoo.NAMES:
        if name in zoo.SLOW - _RARE:
            continue
        family = zoo.get(name)
        axes, options = _SETTINGS[zlib.crc32(name.encode()) % len(_SETTINGS)]
        if family.automatic > 1:
            axes = FOUR
        rows.append(Row(
            theme=zoo.module_of(name), name=name, step=name, axes=axes, options=options,
            model=family.automatic,
        ))  # fmt: skip
    return rows


SCANNED, UNROLLED = "transformer_scanned", "transformer_unrolled"
_WHOLE = {"sequence": PartitionSpec(), "label": PartitionSpec()}
_COLUMNS = {r"\['(wq|up)'\]": PartitionSpec(None, None, "model")}

# By theme and name: the step, the mesh and the options.
_OPTIONS: dict[str, dict[str, tuple[str, Mapping[str, int], Options]]] = {
    "options_stages": {
        "stage 0": (SCANNED, EIGHT, _given(stage=0)),
        "stage 1": (SCANNED, EIGHT, _given(stage=1)),
        "stage 2": (SCANNED, EIGHT, _given(stage=2)),
        "stage 3": (SCANNED, EIGHT, _given(stage=3)),
        "stage 3, unrolled": (UNROLLED, EIGHT, _given()),
        "stage 3 of a mesh of two axes": (UNROLLED, TWO_BY_FOUR, _given()),
        "one device": (UNROLLED, {"data": 1}, _given()),
        "5 devices, which divide nothing": (UNROLLED, {"data": 5}, _given()),
        "7 devices, stage 1": (SCANNED, {"data": 7}, _given(stage=1)),
        "leaves below a floor stay full": (SCANNED, EIGHT, _given(min_shard_bytes=2048)),
        "full": (UNROLLED, EIGHT, _given(full="embed|head")),
        "param_axes": (SCANNED, TWO_BY_FOUR, _given(param_axes="local")),
        "optimizer_axes": (SCANNED, TWO_BY_FOUR, _given(stage=1, optimizer_axes="local")),
        "hybrid": (
            SCANNED, TWO_BY_FOUR, _given(param_axes="local", optimizer_axes="local")),
        "donate": (SCANNED, FOUR, _given(donate=False)),
        "donate, pinned": (
            SCANNED, FOUR, _given(donate=False, offload=jzero.PinnedHost(device_bytes=8192))),
        "in_specs": ("time_major", FOUR, _given(in_specs=_WHOLE)),
        "padded leaves are summed": ("measures_of_weights", THREE, _given()),
        "leaves of param_axes are summed": (
            "measures_of_weights", TWO_BY_FOUR, _given(param_axes="local")),
    },
    "options_gathers": {
        "gather per pass": (UNROLLED, EIGHT, _given(gather="per_pass")),
        "gather keep": (SCANNED, EIGHT, _given(gather="keep")),
        "gather once per step": (SCANNED, EIGHT, _given(gather="once_per_step")),
        "gather once per step, microbatches": (
            UNROLLED, FOUR, _given(gather="once_per_step", accumulate=2)),
        "gather keep, microbatches": (SCANNED, FOUR, _given(gather="keep", accumulate=2)),
        "no prefetch": (SCANNED, EIGHT, _given(prefetch_bytes=0)),
        "no prefetch, unrolled": (UNROLLED, EIGHT, _given(prefetch_bytes=0)),
        "some prefetch": (SCANNED, EIGHT, _given(prefetch_bytes=6000)),
        "some prefetch, unrolled": (UNROLLED, EIGHT, _given(prefetch_bytes=6000)),
        "prefetch of less than a matrix, unrolled": (UNROLLED, EIGHT, _given(prefetch_bytes=2000)),
        "tiles": (UNROLLED, EIGHT, _given(tile_bytes=2048)),
        "tiles, scanned": (SCANNED, FOUR, _given(tile_bytes=2048)),
        "tiles, stage 1": (UNROLLED, FOUR, _given(tile_bytes=2048, stage=1)),
        "most gathered rows": ("median_of_the_losses", EIGHT, _given(max_gather_bytes=2**20)),
    },
    "options_microbatches": {
        "2": (SCANNED, FOUR, _given(accumulate=2)),
        "2, unrolled": (UNROLLED, FOUR, _given(accumulate=2)),
        "2, reduced once": (SCANNED, FOUR, _given(accumulate=2, reduce="once")),
        "2, reduced each": (UNROLLED, FOUR, _given(accumulate=2, reduce="each")),
        "2, stage 2": (SCANNED, FOUR, _given(accumulate=2, stage=2)),
        "2, stage 0": (SCANNED, FOUR, _given(accumulate=2, stage=0)),
        "4, stage 1": (SCANNED, FOUR, _given(accumulate=4, stage=1)),
        "3, which do not divide the rows": (SCANNED, FOUR, _given(accumulate=3)),
        "accumulate_dtype": (SCANNED, FOUR, _given(accumulate=2, accumulate_dtype=jnp.float32)),
        "a loss that couples rows": ("simclr", FOUR, _given(accumulate=2)),
        "reduced once over two axes": (
            SCANNED, {"node": 2, "local": 2},
            _given(accumulate=2, reduce="once", param_axes="local", optimizer_axes="local")),
    },
    "options_wire": {
        "reduce_dtype float32": (SCANNED, EIGHT, _given(reduce_dtype=jnp.float32)),
        "reduce_dtype int8": (UNROLLED, EIGHT, _given(reduce_dtype=jnp.int8)),
        "reduce_dtype of each axis": (
            SCANNED, TWO_BY_FOUR, _given(reduce_dtype={"node": jnp.int4, "local": jnp.int8})),
        "gather_dtype int8": (UNROLLED, EIGHT, _given(gather_dtype=jnp.int8)),
        "gather_dtype int4": (SCANNED, EIGHT, _given(gather_dtype=jnp.int4)),
        "gather_dtype Blocks": (SCANNED, FOUR, _given(gather_dtype=jzero.Blocks(jnp.int8, 64))),
        "gather_dtype Blocks, many in a row": (
            UNROLLED, FOUR, _given(gather_dtype=jzero.Blocks(jnp.int8, 16))),
        "reduce_dtype of replicas": (
            SCANNED, TWO_BY_FOUR,
            _given(param_axes="local", optimizer_axes="local", reduce_dtype=jnp.int8)),
        "both": (UNROLLED, FOUR, _given(gather_dtype=jnp.int8, reduce_dtype=jnp.int8, stage=3)),
        "both, microbatches": (
            SCANNED, FOUR, _given(gather_dtype=jnp.int8, reduce_dtype=jnp.int8, accumulate=2)),
        "reduce_dtype float32, microbatches that are reduced once": (
            UNROLLED, FOUR, _given(reduce_dtype=jnp.float32, accumulate=2, reduce="once")),
        "not finite": (
            "elements_that_overflow", EIGHT,
            _given(gather_dtype=jnp.int8, reduce_dtype=jnp.int8)),
        "not finite, replicas, int4": (
            "elements_that_overflow", TWO_BY_FOUR,
            _given(param_axes="local", optimizer_axes="local", reduce_dtype=jnp.int4,
                   gather_dtype=jzero.Blocks(jnp.int4, 16))),
    },
    "options_pinned": {
        "optimizer state": (SCANNED, EIGHT, _given(offload=jzero.PinnedHost())),
        "optimizer state, stage 0": (SCANNED, FOUR, _given(stage=0, offload=jzero.PinnedHost())),
        "optimizer state in groups": (
            UNROLLED, EIGHT, _given(offload=jzero.PinnedHost(device_bytes=4096))),
        "optimizer state, stage 1": (
            UNROLLED, FOUR, _given(stage=1, offload=jzero.PinnedHost(device_bytes=8192))),
        "optimizer state, microbatches": (
            SCANNED, FOUR, _given(accumulate=2, offload=jzero.PinnedHost(device_bytes=8192))),
        "parameters": (SCANNED, EIGHT, _given(offload_params=jzero.PinnedHost(device_bytes=2**16))),
        "parameters, unrolled": (
            UNROLLED, EIGHT, _given(offload_params=jzero.PinnedHost(device_bytes=2**16))),
        "parameters, few bytes": (
            UNROLLED, EIGHT, _given(offload_params=jzero.PinnedHost(device_bytes=14_000))),
        "parameters and optimizer state": (
            SCANNED, FOUR, _given(offload_params=jzero.PinnedHost(device_bytes=2**16),
                                  offload=jzero.PinnedHost(device_bytes=2**16))),
        "parameters, microbatches": (
            SCANNED, FOUR,
            _given(accumulate=2, offload_params=jzero.PinnedHost(device_bytes=2**16))),
        "parameters, layer_major": (
            SCANNED, FOUR,
            _given(accumulate=2, layer_major=True,
                   offload_params=jzero.PinnedHost(device_bytes=2**16))),
        "parameters of replicas": (
            SCANNED, TWO_BY_FOUR,
            _given(param_axes="local", optimizer_axes="local",
                   offload_params=jzero.PinnedHost(device_bytes=2**16))),
        "parameters, tiles": (
            SCANNED, FOUR,
            _given(tile_bytes=2048, offload_params=jzero.PinnedHost(device_bytes=2**16))),
        "optimizer state of replicas, microbatches": (
            SCANNED, TWO_BY_FOUR,
            _given(param_axes="local", optimizer_axes="local", accumulate=2,
                   offload=jzero.PinnedHost(device_bytes=8192))),
        "activations": (SCANNED, FOUR, _given(offload_activations=jzero.PinnedHost())),
        "activations, unrolled, stage 1": (
            UNROLLED, FOUR, _given(stage=1, offload_activations=jzero.PinnedHost())),
        "activations, microbatches": (
            SCANNED, FOUR, _given(accumulate=2, offload_activations=jzero.PinnedHost())),
        "activations and parameters": (
            SCANNED, FOUR, _given(offload_activations=jzero.PinnedHost(),
                                  offload_params=jzero.PinnedHost(device_bytes=2**16))),
        "activations and parameters, unrolled": (
            UNROLLED, FOUR, _given(offload_activations=jzero.PinnedHost(),
                                   offload_params=jzero.PinnedHost(device_bytes=2**16))),
    },
    "options_host": {
        "HostCPU": (SCANNED, EIGHT, _given(offload=jzero.HostCPU(threads=1))),
        "HostCPU, unrolled, stage 1": (
            UNROLLED, FOUR, _given(stage=1, offload=jzero.HostCPU(threads=1))),
        "HostCPU, half": (UNROLLED, FOUR, _given(offload=jzero.HostCPU(threads=1, ratio=0.5))),
        "HostCPU, delayed": (
            UNROLLED, FOUR,
            _given(offload=jzero.HostCPU(threads=1, delayed_update=True, delay_after=0))),
        "HostCPU, microbatches": (
            SCANNED, FOUR, _given(accumulate=2, offload=jzero.HostCPU(threads=1))),
        "HostCPU of replicas": (
            SCANNED, TWO_BY_FOUR,
            _given(param_axes="local", optimizer_axes="local", offload=jzero.HostCPU(threads=1))),
        "HostCPU, tiles, microbatches": (
            SCANNED, FOUR,
            _given(tile_bytes=2048, accumulate=2, offload=jzero.HostCPU(threads=1))),
        "HostCPU, parameters pinned": (
            SCANNED, FOUR, _given(offload=jzero.HostCPU(threads=1),
                                  offload_params=jzero.PinnedHost(device_bytes=2**16))),
        "HostCPU, parameters pinned, layer_major": (
            SCANNED, FOUR, _given(offload=jzero.HostCPU(threads=1), accumulate=2, layer_major=True,
                                  offload_params=jzero.PinnedHost(device_bytes=2**16))),
        "HostCPU, parameters and activations pinned, layer_major": (
            UNROLLED, FOUR, _given(offload=jzero.HostCPU(threads=1), accumulate=2, layer_major=True,
                                   offload_activations=jzero.PinnedHost(),
                                   offload_params=jzero.PinnedHost(device_bytes=2**16))),
        "NVMe": (SCANNED, FOUR, _in_files()),
        "NVMe of replicas": (
            SCANNED, TWO_BY_FOUR, _in_files(param_axes="local", optimizer_axes="local")),
        "NVMe, unrolled, stage 1": (UNROLLED, FOUR, _in_files(stage=1)),
        "NVMe, microbatches": (SCANNED, FOUR, _in_files(accumulate=2)),
        "NVMe, parameters": (SCANNED, FOUR, _in_files(device_bytes=2**16)),
        "NVMe, parameters, unrolled": (UNROLLED, FOUR, _in_files(device_bytes=2**16)),
        "NVMe, gradients": (SCANNED, FOUR, _in_files(device_bytes=2**16, gradients=True)),
    },
}  # fmt: skip


def _of_options() -> list[Row]:
    return [
        Row(theme=theme, name=name, step=step, axes=axes, options=options,
            dtype="float32" if name.startswith("NVMe") else "float64")
        for theme, rows in _OPTIONS.items()
        for name, (step, axes, options) in rows.items()
    ]  # fmt: skip


def _of_models() -> list[Row]:
    """Beside an axis that stays XLA's."""
    more: dict[str, dict[str, Any]] = {
        "stage 3": {},
        "auto_specs": {"auto_specs": _COLUMNS},
        "auto_specs, stage 1": {"auto_specs": _COLUMNS, "stage": 1},
        "auto_specs, microbatches": {"auto_specs": _COLUMNS, "accumulate": 2},
        "auto_specs, pinned": {
            "auto_specs": _COLUMNS,
            "offload": jzero.PinnedHost(device_bytes=4096),
        },
        "auto_specs, HostCPU, stage 1": {
            "auto_specs": _COLUMNS,
            "stage": 1,
            "offload": jzero.HostCPU(threads=1),
        },
        "auto_specs, HostCPU, parameters pinned, layer_major": {
            "auto_specs": _COLUMNS,
            "offload": jzero.HostCPU(threads=1),
            "accumulate": 2,
            "layer_major": True,
            "offload_params": jzero.PinnedHost(device_bytes=2**16),
        },
    }
    return [
        Row(theme="options_model_axis", name=name, step=SCANNED, axes=FOUR, model=2,
            options=_given(**options))
        for name, options in more.items()
    ]  # fmt: skip


def _of_evaluations() -> list[Row]:
    pinned = jzero.PinnedHost(device_bytes=2**16)
    found: dict[str, tuple[str, Mapping[str, int], Options, Options | None]] = {
        "without a train step": (SCANNED, EIGHT, _given(), None),
        "per pass": (SCANNED, EIGHT, _given(gather="per_pass"), None),
        "once per step": (UNROLLED, EIGHT, _given(gather="once_per_step"), None),
        "tiles": (UNROLLED, EIGHT, _given(tile_bytes=2048), None),
        "codes at rest": (SCANNED, EIGHT, _given(weight_dtype=jnp.int8), None),
        "two axes": (UNROLLED, TWO_BY_FOUR, _given(), None),
        "odd devices": ("sorted_rows", THREE, _given(), None),
        "rows that couple": ("median_of_the_losses", EIGHT, _given(), None),
        "most gathered rows": ("median_of_the_losses", EIGHT, _given(max_gather_bytes=8), None),
        "like stage 1": (SCANNED, FOUR, _given(), _given(stage=1)),
        "like stage 3": (UNROLLED, FOUR, _given(), _given()),
        "like param_axes": (SCANNED, TWO_BY_FOUR, _given(), _given(param_axes="local")),
        "like pinned parameters": (SCANNED, FOUR, _given(), _given(offload_params=pinned)),
        "like pinned parameters, copied": (
            SCANNED, FOUR, _given(offload_params=jzero.NoOffload()), _given(offload_params=pinned)),
        "like parameters in files": (SCANNED, FOUR, _given(), _in_files(device_bytes=2**16)),
        "gather sometimes": (SCANNED, FOUR, _given(gather="sometimes"), None),
        "codes of 16 bits": (SCANNED, FOUR, _given(weight_dtype=jnp.bfloat16), None),
    }  # fmt: skip
    return [
        Row(theme="evaluations", name=name, step=step, axes=axes, options=options, like=like,
            evaluates=True)
        for name, (step, axes, options, like) in found.items()
    ]  # fmt: skip


ROWS = {
    f"{row.theme}: {row.name}": row
    for row in (*_of_families(), *_of_options(), *_of_models(), *_of_evaluations())
}
