"""DeepSpeed configurations: what each becomes, what is said of each key, and what is refused by name."""

import json
import pathlib
import re
import runpy
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jzero
from jzero._option_groups import microbatches_of
from jzero._policy import memory_of
from jzero.deepspeed import _table
from small import grouped
from test_cli import run

CONFIGS = pathlib.Path(__file__).parent / "deepspeed_configs"
DOCS = CONFIGS.parents[1] / "docs"
PINNED, HOST = jzero.PinnedHost(), jzero.HostCPU()
SMALL = {"train_batch_size": 8}
HALF_ON_HOSTS = {
    **SMALL, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "bf16": {"enabled": True},
}  # fmt: skip
ADAM = {**SMALL, "optimizer": {"type": "Adam", "params": {}}}

# File: the options on 8 devices, and the chain, as it is printed without its schedule.
BETAS = "b1=0.9, b2=0.999, eps=1e-08"
ADAMW = f"optax.adamw(0.0001, {BETAS}, weight_decay=0.0)"
TRANSLATED: dict[str, tuple[dict[str, Any], str]] = {
    "stage_0": ({"stage": 0}, "optax.chain(optax.add_decayed_weights(0.0001), "
                "optax.sgd(0.1, momentum=0.9, nesterov=True))"),
    "stage_1_fp32_adam_l2": (
        {"stage": 1, "accumulate": 2}, "optax.chain(optax.clip_by_global_norm(1.0), "
        "optax.add_decayed_weights(0.01), optax.adam(0.0003, b1=0.8, b2=0.999, eps=1e-08))"),
    "stage_2_bf16": (
        {"stage": 2, "accumulate": 4}, "jzero.master_weights(optax.chain(optax.clip_by_global_norm(1.0), "
        f"optax.adamw(2e-05, {BETAS}, weight_decay=0.1)))"),
    "stage_3_bf16_everything": (
        {"stage": 3, "accumulate": 8, "prefetch_bytes": 100_000_000, "reduce_dtype": jnp.float32,
         "accumulate_dtype": jnp.bfloat16},
        "jzero.master_weights(optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(0.5), "
        "optax.adamw(schedule, b1=0.9, b2=0.95, eps=1e-08, weight_decay=0.1)), 2147483647))"),
    "offload_optimizer_cpu": ({"stage": 2, "offload": HOST}, f"jzero.master_weights({ADAMW})"),
    "offload_twin_flow": (
        {"stage": 3, "offload": jzero.HostCPU(ratio=0.3)}, f"jzero.master_weights({ADAMW})"),
    "offload_param_cpu": (
        {"stage": 3, "offload": HOST, "offload_params": PINNED}, f"jzero.master_weights({ADAMW})"),
    "cpu_offload_deprecated": (
        {"stage": 2, "offload": HOST},
        "optax.chain(optax.add_decayed_weights(0.001), jzero.deepspeed.adagrad(0.01))"),
    "offload_optimizer_nvme": (
        {"stage": 2, "offload": jzero.NVMe("/local_nvme")}, f"jzero.master_weights({ADAMW})"),
    "infinity_nvme": (
        {"stage": 3, "offload": jzero.NVMe("/local_nvme"), "offload_params": jzero.NVMe("/local_nvme")},
        "jzero.master_weights(make_optimizer())"),
    "activation_checkpointing_on_cpu": (
        {"stage": 3, "offload_activations": PINNED},
        "optax.lion(0.0001, b1=0.9, b2=0.99, weight_decay=0.3)"),
    "hpz": ({"stage": 3, "param_axes": "local"}, f"jzero.master_weights({ADAMW})"),
    "zero_plus_plus": (
        {"stage": 3, "param_axes": "local", "gather_dtype": jnp.int8, "reduce_dtype": jnp.int4}, ADAMW),
    "mics": ({"stage": 3, "param_axes": "local", "optimizer_axes": "local"}, ADAMW),
    "lamb_one_cycle": (
        {"stage": 1},
        "optax.inject_hyperparams(jzero.deepspeed.lamb)(schedule, b1=jzero.deepspeed.one_cycle_momentum("
        "cycle_first_step_size=4, cycle_second_step_size=6, decay_step_size=2, cycle_min_mom=0.85, "
        "cycle_max_mom=0.99, decay_mom_rate=0), b2=0.99, eps=1e-08, weight_decay=0.01, max_coeff=0.5, "
        "min_coeff=0.08)"),
    "lr_range_test": ({"stage": 0}, f"optax.adamw(schedule, {BETAS}, weight_decay=0.01)"),
    "warmup_cosine": (
        {"stage": 1}, f"jzero.master_weights(optax.adamw(schedule, {BETAS}, weight_decay=0.0))"),
    "own_optimizer": ({"stage": 2}, "optax.chain(optax.clip_by_global_norm(1.0), make_optimizer())"),
    "fp16_dynamic_loss_scale": ({"stage": 2}, f"jzero.master_weights({ADAMW})"),
    "logging_and_more": ({"stage": 1}, f"optax.adamw(0.001, {BETAS}, weight_decay=0.0)"),
    "hf_trainer_filled": (
        {"stage": 3, "accumulate": 2}, "jzero.master_weights(optax.chain(optax.clip_by_global_norm(1.0), "
        f"optax.adamw(schedule, {BETAS}, weight_decay=0.0)))"),
}  # fmt: skip
# File: what its message says.
REFUSED = {
    "hf_trainer_auto": (
        "from_deepspeed: 10 keys fail:", '- train_micro_batch_size_per_gpu is "auto"',
        '- optimizer.params.lr is "auto"', '- scheduler.params.total_num_steps is "auto"',
        '- gradient_clipping is "auto"', "The Hugging Face Trainer fills it from its own arguments",
        'Write auto={"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "learning_rate": 5e',
        '"num_training_steps": ..., "max_grad_norm": 1.0}, with the values of your run. Those that you did'),
    "one_bit_adam": ("optimizer.type is 'OneBitAdam'", "Its compressed communication has no"),
    "sparse_attention_and_misspelt": (
        "2 keys fail", "sparse_attention is {'block': 16, 'mode': 'fixed'}. Attention is the model's",
        "zero_optimisation is no key (perhaps 'zero_optimization')", "The keys are those of DeepSpeed 0.19"),
    "contradicting_batches": (
        "train_batch_size is 100, with train_micro_batch_size_per_gpu 4, gradient_accumulation_steps 4, "
        "devices 8. In DeepSpeed, train_batch_size = ",),
}  # fmt: skip


def test_every_configuration_has_its_outcome():
    names = {path.stem for path in CONFIGS.iterdir()}
    assert names == TRANSLATED.keys() | REFUSED.keys()
    assert len(names) >= 20


def translated(config: Mapping[str, Any], devices: int | None = 8) -> jzero.deepspeed.Translation:
    return jzero.from_deepspeed(config, devices=devices)


def refused(config: Any, devices: Any = 8, auto: Any = None) -> str:
    with pytest.raises(jzero.OptionError) as caught:
        jzero.from_deepspeed(config, devices=devices, auto=auto)
    return str(caught.value)


def in_groups(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with no short forms."""
    found = dict(options)
    if "microbatches" in found:
        found["microbatches"] = microbatches_of("", found["microbatches"])
    if "memory" in found:
        found["memory"] = memory_of("", found["memory"])
    return found


@pytest.mark.parametrize("name", TRANSLATED)
def test_configuration_is_translated(name: str):
    found = jzero.from_deepspeed(CONFIGS / f"{name}.json", devices=8)
    options, chain = TRANSLATED[name]
    assert in_groups(found.options) == grouped(**options)
    assert assigned(found.python(), "tx") == chain
    assert (found.optimizer is None) == ("make_optimizer" in chain)
    assert (found.schedule is None) == ('"scheduler"' not in (CONFIGS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", REFUSED)
def test_configuration_is_refused(name: str):
    text = refused(CONFIGS / f"{name}.json")
    assert [part for part in REFUSED[name] if part not in text] == []


def assigned(program: str, name: str) -> str:
    """What a printed program assigns to a name, in one line."""
    text = re.search(rf"^{name} = (.*?)(?=^\w|^$|\Z)", program, re.MULTILINE | re.DOTALL)
    assert text
    line = " ".join(text[1].split("#")[0].split())
    return line.replace("( ", "(").replace(", )", ")").replace(",)", ")").strip()


# What somebody writes in place of each hole of a program, by how its message begins.
FILLED = {
    "the optimizer": "optax.sgd(0.1)",
    "the parameters": '{"w": jax.random.normal(key, (64, 32))}',
    "the loss": "((batch @ params['w'].astype(batch.dtype)) ** 2).mean()",
    "batches of": "[jax.random.normal(jax.random.key(i), (batch_size, 64)) for i in range(3)]",
}


def filled_in(program: str) -> str:
    for hole, value in FILLED.items():
        program = re.sub(rf'raise NotImplementedError\("{hole}[^"]*"\)', f"return {value}", program)
    return program


def executed(program: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of a program, and the arguments of `shard_train_step` as `options`."""
    program = filled_in(program)
    given: dict[str, Any] = {}
    monkeypatch.setattr(jzero, "shard_train_step", lambda fn, **options: given.update(options))
    names: dict[str, Any] = {}
    exec(compile(program, "train.py", "exec"), names)
    return {**names, "options": given}


@pytest.mark.parametrize("name", TRANSLATED)
def test_program_is_the_translation(name: str, monkeypatch: pytest.MonkeyPatch):
    found = jzero.from_deepspeed(CONFIGS / f"{name}.json", devices=8)
    program = found.python()
    names = executed(program, monkeypatch)
    mesh = names["options"].pop("mesh", None)
    assert names["options"] == dict(found.options)
    assert (dict(mesh.shape) if mesh else {}) == dict(found.mesh_axes)
    assert names.get("batch_size") == found.batch_size
    comments = " ".join(line.lstrip("# ") for line in program.splitlines() if line.startswith("#"))
    assert [key for key in found.notes if not re.search(rf"\b{key}[:,] ", comments)] == []
    assert [note for note in found.notes.values() if f": {note}" not in comments] == []
    assert str(found).splitlines() == [f"{key}: {note}" for key, note in found.notes.items()]
    if found.schedule is not None:
        assert [names["schedule"](n).item() for n in range(5)] == [
            found.schedule(n).item() for n in range(5)
        ]
    if found.optimizer is not None:
        dtype = jnp.bfloat16 if "master_weights" in program else jnp.float32
        params = {"w": jnp.linspace(-1, 1, 6, dtype=dtype)}
        ours, theirs = (str(tx.init(params)) for tx in (found.optimizer, names["tx"]))
        assert ours == theirs


def test_sizes_and_mesh():
    found = translated({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3})
    assert found.batch_size == 48
    assert found.options["microbatches"] == 3
    assert translated({"train_micro_batch_size_per_gpu": 2}, None).batch_size is None
    found = translated({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4})
    assert found.options["microbatches"] == 2
    assert "microbatches=2" in found.notes["gradient_accumulation_steps"]
    found = translated({**SMALL, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}})
    assert found.mesh_axes == {"node": 2, "local": 4}
    assert (
        "on a mesh {'node': 2, 'local': 4}"
        in found.notes["zero_optimization.zero_hpz_partition_size"]
    )


def test_the_page_has_the_table():
    page = runpy.run_path(str(DOCS / "from_deepspeed.py"))["page"]()
    text = (DOCS / "from-deepspeed.md").read_text()
    assert text == page, "run `python docs/from_deepspeed.py`"


def test_the_example_of_the_page_is_translated():
    text = (DOCS / "from-deepspeed.md").read_text()
    config = json.loads(text.partition("```json")[2].partition("```")[0])
    found = translated(config, 64)
    assert dict(found.options) == {"stage": 3, "microbatches": 2, "memory": HOST}


def test_null_is_as_if_missing_and_comments_are_no_keys():
    found = translated(
        {**SMALL, "gradient_clipping": None, "scheduler": None, "_comment": 1, "// a": 2}
    )
    assert not {"_comment", "// a"} & found.notes.keys()
    assert found.schedule is None
    assert found.notes["gradient_clipping"].startswith("Missing: ")


ZERO = "zero_optimization"
PREFETCH, OFFLOADED = f"{ZERO}.stage3_prefetch_bucket_size", f"{ZERO}.offload_optimizer"
OFF_IN_PARTS = {
    "layer_reduction": {"enabled": False, "keep": 3},
    "weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {}},
}
OLD = {"compile": {"enabled": True, "backend": "inductor", "kwargs": {"mode": "x"}},
       "monitor_config": {"enabled": True}, "comms_config": {"verbose": False}}  # fmt: skip
CHEAP = "Stage 1 communicates the same, and divides optimizer state by the devices."


@pytest.mark.parametrize(
    ("config", "key", "note"),
    [
        ({ZERO: {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}},
         PREFETCH, "Not set: prefetch_bytes is 256 MiB by default."),
        ({ZERO: {"stage": 2, "stage3_prefetch_bucket_size": 10}}, PREFETCH, "Without effect at stage 2"),
        ({ZERO: {"stage": 3, "stage3_prefetch_bucket_size": 10}},
         PREFETCH, "prefetch_bytes=40): that number of elements of 4"),
        *(({ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0}}},
           f"{OFFLOADED}.{key}", "Without effect: a ratio of 0 offloads nothing.")
          for key in ("device", "ratio")),
        ({**HALF_ON_HOSTS, "gradient_clipping": 1}, "bf16.check_grad_overflow",
         "jzero cannot with gradient_clipping and offload_optimizer."),
        (HALF_ON_HOSTS, "bf16.check_grad_overflow", "write it to say which."),
        (HALF_ON_HOSTS, "scheduler",
         "Missing: the learning rate is constant, 0.001. The Hugging Face Trainer would"),
        (HALF_ON_HOSTS, "scheduler", "WarmupDecayLR"),
        ({"compression_training": OFF_IN_PARTS}, "compression_training", "Off."),
        (OLD, "compile.backend", "XLA compiles the whole step"),
        *((OLD, key, "Belongs to your training loop") for key in ("monitor_config", "comms_config")),
        *((config, f"{ZERO}.stage", CHEAP) for config in ({}, {ZERO: {"stage": 0}})),
    ],
)  # fmt: skip
def test_note(config: dict[str, Any], key: str, note: str):
    assert note in translated({**SMALL, **config}).notes[key]


def test_notes_that_are_not_there():
    assert "scheduler" not in translated(SMALL).notes
    assert CHEAP not in translated({**SMALL, ZERO: {"stage": 1}}).notes[f"{ZERO}.stage"]
    offloaded = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0}}
    assert dict(translated({**SMALL, ZERO: offloaded}).options) == {"stage": 3}


# What an entry of the table may be given, where a value of its kind is not any.
SAMPLES = {
    "gradient_allreduce_op": "mean", "communication_data_type": "bf16", "optimizer.type": "Lion",
    "scheduler.type": "LRRangeTest", "data_types.grad_accum_dtype": "fp32",
    "torch_autocast.dtype": "bfloat16",
    "zero_optimization.offload_optimizer.device": "cpu", "zero_optimization.offload_param.device": "none",
    "zero_optimization.mics_shard_size": -1, "zero_optimization.offload_optimizer.ratio": 0.5,
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,
    "managed_gradient_accumulation": True,
}  # fmt: skip
OF_KIND = {
    "bool": False, "int": 1, "whole": 1, "count": 8, "stage": 1, "number": 1.0, "size": 1.0, "share": 1.0,
    "text": "x", "dtype": "bf16", "object": {}, "list": [], "any": "x",
}  # fmt: skip


@pytest.mark.parametrize(
    "key",
    # In order: a set's order is another one in each of xdist's processes.
    sorted(_table.KEYS.keys() - {"train_batch_size", "seq_parallel_communication_data_type"}),
)
def test_every_key_of_the_table_has_one_note(key: str):
    config: dict[str, Any] = {"train_batch_size": 8}
    *sections, name = key.split(".")
    inside = config
    for section in sections:
        inside = inside.setdefault(section, {})
    inside[name] = SAMPLES.get(key, OF_KIND[_table.KEYS[key].kind])
    if sections[:1] == ["zero_optimization"]:
        config["zero_optimization"].setdefault("stage", 1)
    if sections[:1] in (["optimizer"], ["scheduler"]):
        kind = "Adam" if sections[0] == "optimizer" else "LRRangeTest"
        config[sections[0]].setdefault("type", kind)
    if key in ("optimizer", "scheduler"):
        assert f"{key}.type is missing" in refused(config)
        return
    found = translated(config)
    assert found.notes[key]
    assert found.notes[key].endswith((".", "`"))


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (8, ["from_deepspeed: config is 8. It is a dict, or the path of a JSON file."]),
        ("nowhere.json", ["nowhere.json cannot be read: No such file or directory", "Correct the path."]),
        ({}, ["neither train_batch_size nor train_micro_batch_size_per_gpu is given",
              'Write one of them, or auto={"train_batch_size": 64}.']),
        ({"train_batch_size": "64", "zero_optimization": 2, "bf16": {"enabled": 1}},
         ["3 keys fail", "train_batch_size is '64', not a whole number from 1",
          "zero_optimization is 2, not an object", "bf16.enabled is 1, not true or false",
          "each of one type;", "Correct or drop them."]),
        ({"overlap_comm": True}, ["overlap_comm is no key (it is 'zero_optimization.overlap_comm')"]),
        ({**SMALL, "bf16": {"enabled": True}, "bfloat16": {"enabled": False}},
         ["bf16 is there twice, by two names", "Drop one of them."]),
        ({**SMALL, "bf16": {"enabled": True}, "fp16": {"enabled": True}},
         ["bf16.enabled is true", "fp16.enabled is true", "Parameters have one dtype."]),
        ({**SMALL, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 2}}},
         ["zero_optimization.offload_optimizer.ratio is 2, not a share, from 0 to 1."]),
        ({**SMALL, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
          "activation_checkpointing": {"cpu_checkpointing": True}},
         ["activation_checkpointing.cpu_checkpointing is true", "zero_optimization.offload_param is on"]),
        ({**SMALL, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},
                                         "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
         ["zero_optimization.offload_param is on", "zero_optimization.offload_optimizer.ratio is 0.5"]),
        ({**SMALL, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
         ["offload_optimizer.device is 'nvme'", "offload_optimizer.nvme_path is missing", "a folder of an"]),
        ({**SMALL, "zero_optimization": {
            "stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "x", "ratio": 0.5}}},
         ["offload_optimizer.device is 'nvme'", "ratio is 0.5", "Drop ratio, or use 'cpu'."]),
        ({**SMALL, "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "x"},
            "offload_param": {"device": "nvme", "nvme_path": "y"}}},
         ["offload_param.device is 'nvme', in y", "in x", "the same nvme_path for both"]),
        ({**SMALL, "zero_optimization": {
            "stage": 3, "offload_param": {"device": "cpu"}, "zero_hpz_partition_size": 2}},
         ["zero_optimization.offload_param is on", "zero_optimization.zero_hpz_partition_size is 2"]),
        ({**SMALL, "zero_optimization": {"stage": 3, "mics_shard_size": 3}},
         ["mics_shard_size is 3", "there are 8 devices", "groups of one size"]),
        *(({**ADAM, "zero_optimization": {"stage": 2, key: True}},
           [f"{key} is true", "zero_optimization.stage is 2", "It is a part of stage 3 in DeepSpeed.",
            "Use stage 3, or set it to false."])
          for key in ("zero_quantized_weights", "zero_quantized_gradients")),
        ({**ADAM, "zero_optimization": {"stage": 3, "zero_quantized_gradients": True},
          "communication_data_type": "bf16"},
         ["zero_quantized_gradients is true", "communication_data_type is 'bf16'",
          "Gradients are communicated in one of the two. Drop one of them."]),
        ({**ADAM, "zero_optimization": {"stage": 3, "zeropp_loco_param": {"err_beta": 0.8}}},
         ["What gradients lose by quantization is not kept for the next step"]),
        ({**SMALL, "zero_optimization": "auto", "bf16": "auto"},
         ['zero_optimization is "auto", not an object', 'bf16 is "auto", not an object', "Write its keys"]),
        ({**SMALL, "k" * 5000: 1, "a\nb": 1}, [f"{'k' * 100}...{'k' * 100} is no key", "a\\nb is no key"]),
        ({**HALF_ON_HOSTS, "optimizer": {"type": "Lamb", "params": {}}},
         ["optimizer.type is 'Lamb'", "zero_optimization.offload_optimizer is on", "or use AdamW."]),
        ({**HALF_ON_HOSTS, "gradient_clipping": 1, "bf16": {"enabled": True, "check_grad_overflow": True}},
         ["gradient_clipping is 1", "bf16.enabled is true", "bf16.check_grad_overflow is true", "Drop one"]),
        ({**SMALL, "compression_training": {"layer_reduction": {"enabled": True}}},
         ["compression_training is {", "Compression changes the model"]),
        ({**SMALL, "gradient_clipping": -1}, ["gradient_clipping is -1, not a number from 0"]),
        ({**SMALL, "torch_autocast": {"enabled": True, "dtype": "float16"}},
         ["torch_autocast.dtype is 'float16'", "Write 'bfloat16'."]),
        ({**SMALL, "optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}},
         ["optimizer.params.max_grad_norm", "write gradient_clipping if it is not there."]),
        ({**SMALL, "optimizer": {"type": "Adam", "params": {
            "lrr": 1, "betas": [1, 2], "eps": "x", "weight_decay": -1, "amsgrad": True}}},
         ["5 keys fail", "optimizer.params.lrr is no key (perhaps 'optimizer.params.lr')",
          "optimizer.params.betas is [1, 2], not two numbers from 0 and below 1",
          "optimizer.params.eps is 'x', not a number",
          "optimizer.params.weight_decay is -1, not a number from 0",
          "optimizer.params.amsgrad is true. jzero translates no AMSGrad"]),
        ({**SMALL, "optimizer": {"type": "SGD", "params": {"nesterov": True}}},
         ["optimizer.params.nesterov is true", "optimizer.params.momentum is missing"]),
        ({**ADAM, "scheduler": {"type": "WarmupLR"}},
         ["scheduler.params.warmup_max_lr is missing", "write the one you mean."]),
        ({**SMALL, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}}},
         ["scheduler.params.cycle_momentum is true", "there is no optimizer"]),
    ],
    ids=lambda x: x[0][:40] if isinstance(x, list) else "",
)  # fmt: skip
def test_what_is_wrong_is_said(config: Any, parts: list[str]):
    text = refused(config)
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize("devices", [0, True, 1.5, "8"])
def test_devices_are_a_number(devices: Any):
    assert f"from_deepspeed: devices={devices!r}. It is how many" in refused(SMALL, devices)


@pytest.mark.parametrize(
    ("config", "text"),
    [({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, "and not gradient_accumulation_steps"),
     ({**SMALL, "zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "devices is not given")],
)  # fmt: skip
def test_devices_are_needed_where_sizes_follow_from_them(config: Any, text: str):
    assert text in (found := refused(config, None))
    assert "devices=8" in found


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("{", "is not JSON"),
        ('{"a": 1, "a": 2}', "'a' is there twice"),
        ("[1]", "has [1]. A configuration is one JSON object."),
        (" " * 1_000_001, "it has more than 1000000 bytes"),
    ],
    ids=["no JSON", "twice", "a list", "large"],
)
def test_files_are_json_objects(data: str, text: str, tmp_path: pathlib.Path):
    path = tmp_path / "ds_config.json"
    path.write_text(data)
    found = refused(path)
    assert text in found
    assert "ds_config.json" in found


def test_long_lists_are_cut():
    text = refused({f"key{i}": 1 for i in range(50)})
    assert "50 keys fail" in text
    assert "and 30 more" in text


def test_the_command_prints_the_program(monkeypatch: pytest.MonkeyPatch):
    path = CONFIGS / "stage_3_bf16_everything.json"
    monkeypatch.setenv("COLUMNS", "40")  # The lines of a program are not cut.
    done = run("deepspeed", str(path), "--devices", "8")
    found = jzero.from_deepspeed(path, devices=8)
    assert done.returncode == 0
    assert done.stdout == found.python() + "\n"
    assert executed(done.stdout, monkeypatch)["options"] == dict(found.options)


def test_the_command_refuses_in_words_of_its_flags(tmp_path: pathlib.Path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}')
    done = run("deepspeed", str(path))
    assert done.returncode == 2
    assert "jzero deepspeed: train_batch_size and" in done.stderr
    assert "with --devices 8" in done.stderr


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_no_gradient_travels_or_adds_up_in_float16(half: str):
    """There is no loss scale here, without which small gradients are 0 in float16."""
    found = jzero.from_deepspeed({
        **SMALL, half: {"enabled": True}, "gradient_accumulation_steps": 2, "communication_data_type": "fp16",
        "data_types": {"grad_accum_dtype": "FP16"},
    })  # fmt: skip
    assert found.options["comm"].reduce_dtype == jnp.bfloat16
    assert found.options["microbatches"].dtype == jnp.bfloat16
    for key in ("communication_data_type", "data_types.grad_accum_dtype"):
        assert "bfloat16 instead of float16: without a loss scale" in found.notes[key]
    said = "The loss that the step returns is added up in it, too"
    assert said in found.notes["data_types.grad_accum_dtype"]


def test_a_file_may_have_infinite_steps_per_print(tmp_path: pathlib.Path):
    """As Accelerate writes them; nothing else may be infinite, and no number is NaN."""
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "steps_per_print": Infinity}')
    assert "if step % 10 == 0" in jzero.from_deepspeed(path).python()
    path.write_text('{"train_batch_size": 8, "gradient_clipping": Infinity}')
    assert "gradient_clipping is inf, not a number from 0" in refused(path)
    path.write_text('{"train_batch_size": 8, "steps_per_print": NaN}')
    assert "NaN is no number" in refused(path)


def test_numbers_of_numpy_are_numbers():
    """A program is printed without NumPy's names."""
    config = {"train_batch_size": np.int64(8), "gradient_clipping": np.float32(0.5), "optimizer": {
        "type": "Adam", "params": {"lr": "auto", "betas": (np.float64(0.5), 0.75)}}}  # fmt: skip
    found = jzero.from_deepspeed(config, auto={"learning_rate": np.float64(0.25)})
    assert found.batch_size == 8
    chain = (
        "optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.25, b1=0.5, b2=0.75, eps=1e-08,"
    )
    assert assigned(found.python(), "tx").startswith(chain)


def test_a_program_has_jnp_for_whoever_fills_it_in():
    assert "\nimport jax.numpy as jnp\n" in jzero.from_deepspeed(SMALL).python()
