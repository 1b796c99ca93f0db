# SPDX-License-Identifier: Apache-2.0
"""Rules for keys whose outcome depends on values or other keys, and contradictions between keys."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax

from jzero._policy import HostCPU, NVMe, PinnedHost
from jzero.deepspeed import _schedules, _transforms
from jzero.deepspeed._python import SCHEDULE, Expression, called, name_of
from jzero.deepspeed._table import AUTO, DTYPES, Config, Form, refuse, rows_of
from jzero.tracing._precision import master_weights

Made = str | tuple[str, Mapping[str, Any]]  # the note of a key, or that and options by name

ROWS, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
ACCUMULATE, CLIP = "gradient_accumulation_steps", "gradient_clipping"
WIRE, OVERFLOW = "communication_data_type", "bf16.check_grad_overflow"
_ZERO = "zero_optimization"
_STAGE, _HPZ, _MICS, _OPTIMIZER, _PARAM, _WEIGHTS, _GRADIENTS = (f"{_ZERO}.{name}" for name in (
    "stage", "zero_hpz_partition_size", "mics_shard_size", "offload_optimizer", "offload_param",
    "zero_quantized_weights", "zero_quantized_gradients"))  # fmt: skip
_RATIO = f"{_OPTIMIZER}.ratio"
_OLD = {_OPTIMIZER: f"{_ZERO}.cpu_offload", _PARAM: f"{_ZERO}.cpu_offload_param"}
_OPTIONS = {_OPTIMIZER: "memory.optimizer", _PARAM: "memory.params"}
_BUFFERS = f"{_PARAM}.buffer_count", f"{_PARAM}.buffer_size"
_ACTIVATIONS = "activation_checkpointing.cpu_checkpointing", "compile.offload_activation"
_QUANTIZED: dict[str, tuple[str, Any]] = {
    _WEIGHTS: ("comm.gather_dtype", jnp.int8), _GRADIENTS: ("comm.reduce_dtype", jnp.int4)}  # fmt: skip
_HALVES = "bf16.enabled", "fp16.enabled"
_AUTOCAST, _AUTOCAST_DTYPE = "torch_autocast.enabled", "torch_autocast.dtype"
LR, CYCLES = "optimizer.params.lr", "scheduler.params.cycle_momentum"

_NEVER = 2**31 - 1  # apply_if_finite applies what is not finite after so many errors in a row
_INSTEAD, _WHICH = "bfloat16 instead of float16", "write it to say which."
LINEAR = (
    "The Hugging Face Trainer would decay it linearly, after warmup_steps: for that write "
    '"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", '
    '"warmup_num_steps": "auto", "warmup_max_lr": "auto", "warmup_type": "linear"}}.'
)
_OFFLOADED = {
    (_OPTIMIZER, "cpu"): "Memory(optimizer=jzero.HostCPU(...)). Masters and moments are in the hosts' "
    "memory, and are updated there (pip install 'jzero[offload]').",
    (_OPTIMIZER, "nvme"): "Memory(optimizer=jzero.NVMe(nvme_path)). Masters and moments are in files, and "
    "the hosts update them tile by tile (pip install 'jzero[offload]').",
    (_PARAM, "cpu"): "Memory(params=jzero.PinnedHost()): parameters are in pinned memory of the hosts, and "
    "one layer at a time is on a device.",
    (_PARAM, "nvme"): "Memory(params=jzero.NVMe(nvme_path)). Parameters are in files, too, and one layer at "
    "a time is on a device.",
}  # fmt: skip


def batch(c: Config) -> tuple[int | None, int]:
    """The rows of the whole batch, None if unknown, and the number of microbatches."""
    rows, micro, accumulate = (c.get(key) for key in (ROWS, MICRO, ACCUMULATE))
    if rows and micro and c.devices and not accumulate:
        accumulate = max(1, rows // (micro * c.devices))
    accumulate = int(accumulate or 1)
    if micro and c.devices and not rows:
        rows = micro * accumulate * c.devices
    return rows and int(rows), accumulate


def mesh_axes(c: Config) -> dict[str, int]:
    """The mesh of hpZ and MiCS, `{"node": 2, "local": 8}`; empty without them."""
    size = _group(c)
    on = c.get(_HPZ) > 1 or c.get(_MICS) > 0
    return {"node": c.devices // size, "local": size} if on and c.devices else {}


def _group(c: Config) -> int:
    return int(max(c.get(_HPZ), c.get(_MICS), 1))


def _device(c: Config, section: str) -> str:
    """The device of a section, or of the key that DeepSpeed had before it: 'none', 'cpu' or 'nvme'."""
    if c.get(_OLD[section]):
        return "cpu"
    off = section == _OPTIMIZER and c.get(_RATIO) == 0
    return "none" if off else str(c.get(f"{section}.device")).lower()


def check(c: Config) -> None:
    """Refuses keys that contradict each other, by the first row of conflicts.tsv that is found."""
    found = _findings(c)
    for names, rule, edit in rows_of("conflicts.tsv"):
        texts = [found[name] for name in names.split(" & ")]
        if all(texts):
            refuse(texts, rule, edit)


def _findings(c: Config) -> dict[str, str]:
    """Texts of findings by name; "" for what is not found."""
    get, says = c.get, c.says
    rows, micro, devices = get(ROWS), get(MICRO), c.devices
    hpz, mics = says(_HPZ, get(_HPZ) > 1), says(_MICS, get(_MICS) > 0)
    nesterov, momentum = "optimizer.params.nesterov", "optimizer.params.momentum"
    dtype = get(_AUTOCAST_DTYPE).removeprefix("torch.")
    function, schedule = (form and form.function for form in (c.optimizer, c.scheduler))
    found = {
        "no size": f"neither {ROWS} nor {MICRO} is given" * (rows is None and micro is None),
        "no accumulation": f"{ROWS} and {MICRO} are given, and not {ACCUMULATE}"
        * bool(rows and micro and not get(ACCUMULATE) and not devices),
        "wrong product": _wrong_product(c),
        "hpZ": hpz, "MiCS": mics, "groups": hpz or mics,
        "no devices": "devices is not given" * (devices is None),
        "uneven": f"there are {devices} devices" * bool((devices or 0) % _group(c)),
        "stage 0": says(_STAGE, c.stage == 0), "below stage 3": says(_STAGE, c.stage < 3),
        "ratio": says(_RATIO, get(_RATIO) not in (0, 1)),
        "communication dtype": says(WIRE, WIRE in c.given),
        "autocast to float16": says(_AUTOCAST_DTYPE, dtype not in ("bfloat16", "bf16")),
        "Lamb": says("optimizer.type", function is _transforms.lamb),
        "no momentum": says(momentum, not get(momentum)),
        "WarmupCosineLR": says("scheduler.type", schedule is _schedules.warmup_cosine_lr),
        "no optimizer": "there is no optimizer" * (c.optimizer is None),
    }  # fmt: skip
    for name, key in {
        "quantized weights": _WEIGHTS, "quantized gradients": _GRADIENTS, "clipping": CLIP,
        "overflow check": OVERFLOW, "autocast": _AUTOCAST, "Nesterov": nesterov, "cycle_momentum": CYCLES,
        **{key.rpartition(".")[2]: key for key in (*_ACTIVATIONS, *_OLD.values())},
        **{key.partition(".")[0]: key for key in _HALVES},
    }.items():  # fmt: skip
        found[name] = says(key, get(key))
    paths = {section: get(f"{section}.nvme_path") for section in _OLD}
    in_files = {section: _device(c, section) == "nvme" for section in _OLD}
    apart = in_files[_PARAM] and not (
        in_files[_OPTIMIZER] and len({*map(str, paths.values())}) == 1
    )
    for what, section in (("state", _OPTIMIZER), ("params", _PARAM)):
        device, path = _device(c, section), paths[section]
        found |= {
            section.rpartition(".")[2]: f"{section} is there" * (section in c.given),
            f"{what} offloaded": f"{section} is on" * (device != "none"),
            f"{what} in files": f"{section}.device is 'nvme'" * in_files[section],
            f"no {what} path": says(f"{section}.nvme_path", not isinstance(path, str) or not path),
            f"{what} elsewhere": f"{section}.device is {device!r}, in {path}" * apart,
        }
    return found


def _wrong_product(c: Config) -> str:
    rows, known = c.get(ROWS), {MICRO: c.get(MICRO), ACCUMULATE: batch(c)[1], "devices": c.devices}
    sizes = {name: int(size) for name, size in known.items() if size}
    product = math.prod(sizes.values())
    if not rows or (rows == product if len(sizes) == len(known) else rows % product == 0):
        return ""
    return f"{ROWS} is {int(rows)}, with {', '.join(f'{name} {n}' for name, n in sizes.items())}"


def rows(c: Config, key: str) -> Made:
    return f"Give each call of the step the whole batch, {batch(c)[0]} rows."


def accumulate(c: Config, key: str) -> Made:
    num, follows = batch(c)[1], "Follows from the sizes: " * (key not in c.given)
    if num == 1:
        return "" if follows else "microbatches=1."
    note = "DeepSpeed takes the mean of the microbatches' means; jzero trains the loss of the whole batch."
    return f"{follows}microbatches={num}. {note}", {"microbatches.num": num}


def stage(c: Config, key: str) -> Made:
    missing = "Missing, as if 0 in DeepSpeed: " * (key not in c.given)
    cheap = " Stage 1 communicates the same, and divides optimizer state by the devices."
    return f"{missing}stage={c.stage}.{cheap * (c.stage == 0)}", {"stage": c.stage}


def groups(c: Config, key: str) -> Made:
    size = c.get(key)
    if size <= (1 if key == _HPZ else 0):
        return "Off: parameters are sharded over all devices."
    fields = ("params", "optimizer") if key == _MICS else ("params",)
    named = ", ".join(f"{field}='local'" for field in fields)
    note = (
        f"make {int(size)} devices with fast links between them neighbours, best those of a node."
    )
    return f"Axes({named}), on a mesh {mesh_axes(c)}: {note}", {
        f"axes.{field}": "local" for field in fields
    }


def offload(c: Config, key: str) -> Made:
    section = _PARAM if key.startswith((_PARAM, _OLD[_PARAM])) else _OPTIMIZER
    device = _device(c, section)
    if device == "none":
        is_undone = c.get(f"{section}.device").lower() != "none"
        nothing = "Without effect: a ratio of 0 offloads nothing."
        return nothing if is_undone else "Off: it stays on the devices."
    if device == "nvme":
        more = {}
        if section == _PARAM and any(buffer in c.given for buffer in _BUFFERS):
            # DeepSpeed's buffers have 16-bit parameters.
            more["host_bytes"] = max(int(c.get(_BUFFERS[0]) * c.get(_BUFFERS[1]) * 2), 2**16)
        policy = called(NVMe, c.get(f"{section}.nvme_path"), **more)
    elif section == _PARAM:
        policy = called(PinnedHost)
    else:
        ratio = {} if c.get(_RATIO) == 1 else {"ratio": float(c.get(_RATIO))}
        policy = called(HostCPU, **ratio)
    return _OFFLOADED[section, device], {_OPTIONS[section]: policy}


def nvme(c: Config, key: str) -> Made:
    section, _, name = key.rpartition(".")
    if _device(c, section) != "nvme":
        return "Without effect: it is of offload to NVMe, which this configuration does not use."
    field = _OPTIONS[section].removeprefix("memory.")
    return f"Memory({field}=jzero.NVMe({name if name == 'nvme_path' else 'host_bytes=...'}))."


def prefetch(c: Config, key: str) -> Made:
    if c.get(key) is None:
        return "Not set: prefetch_bytes is 256 MiB by default."
    if c.stage < 3:
        return f"Without effect at stage {c.stage}: nothing is gathered ahead."
    if _device(c, _PARAM) != "none":
        return "Not set: PinnedHost(device_bytes=...) bounds what is fetched ahead."
    size = 2 if c.is_half else 4
    num = int(c.get(key)) * size
    note = f"Comm(prefetch_bytes={num}): that number of elements of {size} bytes."
    return note, {"comm.prefetch_bytes": num}


def switch(c: Config, key: str) -> Made:
    if c.get(key):
        option, value = _QUANTIZED.get(key, ("memory.activations", called(PinnedHost)))
        return c.rows[key].note, {option: value}
    return "Off, as in jzero." if key in _QUANTIZED else "Off: activations stay on the devices."


def wire(c: Config, key: str) -> Made:
    dtype, instead = _dtype(c, key)
    note = f"Comm(reduce_dtype={name_of(dtype)}), in which gradients are reduced.{instead}"
    return note, {"comm.reduce_dtype": dtype}


def sums(c: Config, key: str) -> Made:
    dtype, instead = _dtype(c, key)
    if batch(c)[1] == 1:
        return "Without effect: there is one microbatch."
    if dtype != jnp.float32:
        instead += " The loss that the step returns is added up in it, too, and has its few digits."
    return f"Microbatches(dtype={name_of(dtype)}).{instead}", {"microbatches.dtype": dtype}


def _dtype(c: Config, key: str) -> tuple[Any, str]:
    written = c.get(key).lower()
    small = f" {_INSTEAD}: without a loss scale, small gradients would be 0 in float16."
    return DTYPES[written], small if written in ("fp16", "float16") else ""


def half(c: Config, key: str) -> Made:
    name = key.partition(".")[0]
    if c.get(key):
        scale = f"{_INSTEAD}: it has the range of float32, and needs no loss scale. "
        return (scale if name == "fp16" else "") + (
            "jzero.master_weights(...) keeps float32 masters in the optimizer's state: make the "
            "parameters bfloat16, `jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)`.")  # fmt: skip
    if c.is_half or c.given.get(key) != AUTO:
        return "Off."
    return (
        f"Off, because nothing sets it: parameters have the dtype of your model. {name}=True among auto "
        "makes them bfloat16, with float32 masters.")  # fmt: skip


def overflow(c: Config, key: str) -> Made:
    if key in c.given:
        skips = "optax.apply_if_finite: a step whose gradients are not finite changes nothing."
        return skips if c.is_half and c.get(key) else "Off."
    refused = _device(c, _OPTIMIZER) != "none" and c.get(CLIP)
    edit = "jzero cannot with gradient_clipping and offload_optimizer." if refused else _WHICH
    return (
        "Missing: gradients that are not finite are applied, too. New versions of DeepSpeed skip such a step "
        f"by default, old ones did not: {edit}") * c.is_half  # fmt: skip


def autocast(c: Config, key: str) -> Made:
    said = "In your model: parameters are float32, and its layers cast them and their inputs to bfloat16."
    return said if c.get(_AUTOCAST) else "Off."


def clip(c: Config, key: str) -> Made:
    if key not in c.given:
        return (
            "Missing: nothing is clipped. New versions of DeepSpeed clip at 1.0 by default, old ones did "
            f"not: {_WHICH}")  # fmt: skip
    place = "The chain of the program begins with it. " * (c.optimizer is None)
    return (
        f"optax.clip_by_global_norm({float(c.get(key))}). {place}DeepSpeed divides a gradient of a larger "
        "norm by norm + 1e-6, optax by norm.") if c.get(key) else "Off."  # fmt: skip


def no_optimizer(c: Config, key: str) -> Made:
    wrap = ", which the program wraps in jzero.master_weights" * c.is_half
    return "" if c.optimizer else f"Missing: write your own in optax{wrap}."


def no_scheduler(c: Config, key: str) -> Made:
    constant = f"Missing: the learning rate is constant, {c.get(LR)}. {LINEAR}"
    return constant if c.optimizer and not c.scheduler else ""


def chain(c: Config) -> tuple[Expression, Expression | None]:
    """The optax chain of updates, and the schedule of its learning rate.

    Without an optimizer the chain has no value: it contains the program's own `make_optimizer()`.
    """
    schedule = None if c.scheduler is None else _scheduled(c, c.scheduler, c.scheduler.function)
    parts = [called(optax.clip_by_global_norm, float(c.get(CLIP)))] if c.get(CLIP) else []
    if c.optimizer is None:
        parts += [Expression(None, "make_optimizer", ())]
    else:
        parts += _optimizer(c, c.optimizer, schedule)
    tx = parts[0] if len(parts) == 1 else called(optax.chain, *parts)
    if c.is_half and c.get(OVERFLOW):
        tx = called(optax.apply_if_finite, tx, _NEVER)
    return called(master_weights, tx) if c.is_half else tx, schedule


def _scheduled(c: Config, scheduler: Form, function: Callable[..., Any]) -> Expression:
    given = {"lr": c.get(LR), **c.arguments("scheduler", scheduler)}
    takes = inspect.signature(function).parameters
    return called(function, **{name: x for name, x in given.items() if name in takes})


def _sets_betas(c: Config) -> bool:
    return bool(c.get(CYCLES)) and c.optimizer is not None and "betas" in c.optimizer.takes


def _optimizer(c: Config, form: Form, schedule: Expression | None) -> list[Expression]:
    """The optimizer, and before it weight decay, if that is added to the gradients."""
    function, given, decay = _function(c, form)
    rate = given.pop("lr")
    if "betas" in given:
        b1, b2 = given.pop("betas")
        given = {"b1": b1, "b2": b2, **given}
    if c.scheduler is not None and _sets_betas(c):
        # DeepSpeed's OneCycle sets the second beta, too.
        given |= {"b1": _scheduled(c, c.scheduler, _schedules.one_cycle_momentum), "b2": 0.99}
        function = called(optax.inject_hyperparams, function)
    if schedule is not None:
        rate = Expression(schedule.value, SCHEDULE)
    before = [called(optax.add_decayed_weights, decay)] if decay else []
    return [*before, called(function, rate, **given)]


def _function(c: Config, form: Form) -> tuple[Any, dict[str, Any], float]:
    """An optimizer, its arguments, and the weight decay that is added to the gradients before it."""
    function, given = form.function, c.arguments("optimizer", form)
    # torch has weight decay in these by an L2 term.
    is_l2 = function in (_transforms.adagrad, optax.sgd)
    if function is optax.adamw:
        # In DeepSpeed Adam is AdamW unless it says otherwise; only torch's AdamW decays by default.
        torch, decoupled = given.pop("torch_adam"), given.pop("adam_w_mode", True)
        given.setdefault("weight_decay", 0.01 if torch and decoupled else 0.0)
        if not decoupled:
            function, is_l2 = optax.adam, True
    if not given.get("momentum", True):
        given = {key: x for key, x in given.items() if key not in ("momentum", "nesterov")}
    return function, given, given.pop("weight_decay") if is_l2 else 0.0


def optimizer_type(c: Config, key: str) -> Made:
    assert c.optimizer is not None
    function, _, decay = _function(c, c.optimizer)
    return " ".join(filter(None, [
        f"{name_of(function)}, with DeepSpeed's defaults for what is not given.",
        "In DeepSpeed Adam is AdamW, unless adam_w_mode is false."
        * (c.get(key).lower() == "adam" and function is optax.adamw),
        "Decay is added to the gradients, before the moments." * bool(decay),
        "The scheduler sets the learning rate." * (c.scheduler is not None),
        "OneCycle sets both betas, the second to 0.99, unless cycle_momentum is false." * _sets_betas(c),
        "It has no betas for OneCycle to set." * bool(c.get(CYCLES) and not _sets_betas(c)),
    ]))  # fmt: skip


def scheduler_type(c: Config, key: str) -> Made:
    assert c.scheduler is not None
    return f"{name_of(c.scheduler.function)}, by the number of updates made before."


def argument(c: Config, key: str) -> Made:
    """The note on a parameter of the optimizer or the scheduler; one may overrule the other's."""
    section, _, name = key.partition(".params.")
    scheduler = c.scheduler and c.scheduler.function
    if key == LR and scheduler not in (None, _schedules.warmup_cosine_lr):
        return "Without effect: the scheduler sets the learning rate."
    if name == "betas" and _sets_betas(c):
        return "Without effect: OneCycle sets them."
    if name in ("cycle_min_mom", "cycle_max_mom", "decay_mom_rate") and not _sets_betas(c):
        why = "the optimizer has no betas." if c.get(CYCLES) else "cycle_momentum is false."
        return f"Without effect: {why}"
    return f"{c.get(key)!r}, of {c.get(f'{section}.type')}."
