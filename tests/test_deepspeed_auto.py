"""Values for "auto", and 38 public configurations: those that are translated, and why the others are not."""

import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

import jzero
from small import grouped
from test_cli import run
from test_deepspeed import (
    CONFIGS,
    HOST,
    PINNED,
    SMALL,
    assigned,
    executed,
    filled_in,
    in_groups,
    refused,
)

FILES = json.loads((CONFIGS.parent / "deepspeed_public.json").read_text())
CLIP = "optax.clip_by_global_norm(1.0)"
ADAM = "b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.0"
OWN = f"jzero.master_weights(optax.chain({CLIP}, make_optimizer()))"
FILLED = f"jzero.master_weights(optax.chain({CLIP}, optax.adamw(schedule, {ADAM})))"
OFFLOAD, PARAMS = {"offload": HOST}, {"offload_params": PINNED}

# File: the options on 8 devices, and the chain; `auto` is in the file beside the configuration.
TRANSLATED: dict[str, tuple[dict[str, Any], str]] = {
    "accelerate_ds_config_zero2": ({"stage": 2, **OFFLOAD}, FILLED),
    "accelerate_ds_config_zero2_model_only": ({"stage": 2, **OFFLOAD}, OWN),
    "accelerate_ds_config_zero3": ({"stage": 3, **OFFLOAD, **PARAMS}, FILLED),
    "accelerate_ds_config_zero3_model_only": (
        {"stage": 3, **PARAMS}, "jzero.master_weights(make_optimizer())"),
    "accelerate_zero_stage1_config": ({"stage": 1}, FILLED),
    "accelerate_zero_stage2_config": ({"stage": 2}, FILLED),
    "accelerate_zero_stage2_offload_config": ({"stage": 2, **OFFLOAD}, FILLED),
    "accelerate_zero_stage3_config": ({"stage": 3}, FILLED),
    "accelerate_zero_stage3_offload_config": ({"stage": 3, **OFFLOAD, **PARAMS}, FILLED),
    "dse_gan": ({"stage": 0}, "optax.adamw(0.0002, b1=0.5, b2=0.999, eps=1e-08, weight_decay=0.0)"),
    "dse_hf_z3": ({"stage": 3}, "make_optimizer()"),
    "dse_imagenet": ({"stage": 0}, "optax.adamw(0.001, b1=0.8, b2=0.999, eps=1e-08, weight_decay=3e-07)"),
    "dse_pipeline": ({"stage": 0, "accumulate": 4}, f"optax.adamw(0.001, {ADAM})"),
    "hf_tests_zero2": ({"stage": 2, **OFFLOAD}, FILLED),
    "hf_tests_zero3": (
        {"stage": 3, **OFFLOAD, **PARAMS},
        "jzero.master_weights(optax.adamw(schedule, b1=0.8, b2=0.999, eps=1e-08, weight_decay=3e-07))"),
    "llamafactory_ds_z0_config": ({"stage": 0}, OWN),
    "llamafactory_ds_z2_config": ({"stage": 2}, OWN),
    "llamafactory_ds_z2_offload_config": ({"stage": 2, **OFFLOAD}, OWN),
    "llamafactory_ds_z3_config": ({"stage": 3}, OWN),
    "llamafactory_ds_z3_fp8_config": ({"stage": 3, **OFFLOAD, "prefetch_bytes": 2 * 11560550}, OWN),
    "llamafactory_ds_z3_offload_config": ({"stage": 3, **OFFLOAD, **PARAMS}, OWN),
    "megds_llama": ({"stage": 0, "accumulate": 2}, "jzero.master_weights(make_optimizer())"),
    "zero1": ({"stage": 1}, OWN),
    "zero1_torch_compile": ({"stage": 1}, OWN),
    "zero2": ({"stage": 2, **OFFLOAD}, OWN),
    "zero2_torch_compile": ({"stage": 2, **OFFLOAD}, OWN),
    "zero3": ({"stage": 3}, OWN),
    "zero3_bf16": ({"stage": 3}, OWN),
    "zero3_bf16_cpuoffload_all": ({"stage": 3, **OFFLOAD, **PARAMS}, OWN),
    "zero3_bf16_cpuoffload_params": ({"stage": 3, **PARAMS}, OWN),
}  # fmt: skip
# File: what its message says.
REFUSED = {
    "accelerate_sp-alst.ds-config": (
        "seq_parallel_communication_data_type is 'bf16'. It is of a training whose sequences are divided",
        "drop it, and constrain activations over a mesh axis of your own."),
    "dse_lamb": ("sparse_attention is {", "write the sparse attention in the model."),
    "dse_ltd": ("data_efficiency is {", "It is a data loader's and a model's: drop the section"),
    "dse_squad": ("optimizer.params.bias_correction is false. optax always corrects Adam's moments",),
    "llamafactory_ds_z2_autotp_config": (
        "tensor_parallel.autotp_size is 2. Tensor parallelism is a mesh axis of your own",),
    "megds_moe_template": ("it is not JSON: Expecting value", "fill it in if it is a template."),
    "megds_sp_template": ("it is not JSON: Expecting value", "fill it in if it is a template."),
    "megds_zero1": ("optimizer.params.max_grad_norm is 1.0. DeepSpeed clips by", "if it is not there."),
}  # fmt: skip
RUN = [
    "accelerate_ds_config_zero3_model_only", "accelerate_zero_stage1_config", "dse_imagenet", "dse_pipeline",
    "hf_tests_zero2", "zero3",
]  # fmt: skip
AUTO = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0,
    "learning_rate": 5e-5, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
    "warmup_ratio": 0.1, "num_training_steps": 100, "bf16": True,
}  # fmt: skip
EVERY_AUTO = json.loads((CONFIGS / "hf_trainer_auto.json").read_text())


def of(name: str) -> jzero.deepspeed.Translation:
    return jzero.from_deepspeed(FILES[name]["config"], devices=8, auto=FILES[name].get("auto"))


def test_there_are_30_and_8():
    assert FILES.keys() == TRANSLATED.keys() | REFUSED.keys()
    assert (len(TRANSLATED), len(REFUSED)) == (30, 8)


@pytest.mark.parametrize("name", TRANSLATED)
def test_public_configuration_is_translated(name: str, monkeypatch: pytest.MonkeyPatch):
    found = of(name)
    options, chain = TRANSLATED[name]
    assert in_groups(found.options) == grouped(**options)
    program = found.python()
    assert assigned(program, "tx") == chain
    config = FILES[name]["config"]
    if config.get("fp16", {}).get("enabled") is True:
        assert found.notes["fp16.enabled"].startswith("bfloat16 instead of float16: ")
    assert in_groups(executed(program, monkeypatch)["options"]) == grouped(**options)


@pytest.mark.parametrize("name", REFUSED)
def test_public_configuration_is_refused(name: str, tmp_path: pathlib.Path):
    file = FILES[name]
    path = tmp_path / f"{name}.json"
    path.write_text(file["text"] if "text" in file else json.dumps(file["config"]))
    text = refused(path)
    assert [part for part in REFUSED[name] if part not in text] == []


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[] if x in RUN else [pytest.mark.slow]) for x in TRANSLATED],
)
def test_a_program_trains_what_jit_trains(name: str, capsys: pytest.CaptureFixture[str]):
    program = filled_in(of(name).python())
    names: dict[str, Any] = {"__name__": "train"}
    exec(compile(program.replace(" % ", " * 0 % "), "train.py", "exec"), names)
    names["main"]()
    printed = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    state, losses = names["init_fn"](jax.random.key(0)), []
    for batch in names["batches"]():
        state, metrics = jax.jit(names["step_fn"])(state, batch)
        losses.append(metrics["loss"])
    np.testing.assert_allclose(printed, losses, rtol=1e-2)
    assert len(printed) == 3


def test_auto_is_as_if_written():
    found = jzero.from_deepspeed(EVERY_AUTO, devices=8, auto=AUTO)
    written = jzero.from_deepspeed(CONFIGS / "hf_trainer_filled.json", devices=8)
    assert dict(found.options) == dict(written.options)
    assert found.batch_size == written.batch_size
    for name in ("tx", "schedule"):
        assert assigned(found.python(), name) == assigned(written.python(), name)


@pytest.mark.parametrize(
    ("auto", "key"),
    [
        ({"optimizer.params.lr": 1e-4}, "optimizer.params.lr"),
        ({"lr": 1e-4}, "optimizer.params.lr"),
        ({"warmup_max_lr": 1e-4}, "scheduler.params.warmup_max_lr"),
        ({"learning_rate": 1e-4, "lr": 1e-4}, "optimizer.params.lr"),
    ],
)
def test_names_of_deepspeed(auto: dict[str, float], key: str):
    auto = {**AUTO, "learning_rate": None, **auto}  # type: ignore[dict-item]
    program = jzero.from_deepspeed(EVERY_AUTO, devices=8, auto=auto).python()
    assert "warmup_max_lr=0.0001" in assigned(program, "schedule")


def test_what_follows_needs_no_value():
    """Sizes from each other, rates from each other, the least rate, float16 from bfloat16."""
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
              "total_num_steps": 50}  # fmt: skip
    found = jzero.from_deepspeed({
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}}, "fp16": {"enabled": "auto"},
        "scheduler": {"type": "WarmupDecayLR", "params": params},
    }, devices=8, auto={"warmup_steps": 0, "warmup_ratio": 0.1})  # fmt: skip
    assert found.options["microbatches"] == 2
    schedule = assigned(found.python(), "schedule")
    assert "warmup_min_lr=0, warmup_max_lr=0.1, warmup_num_steps=5" in schedule
    assert found.notes["fp16.enabled"].startswith(
        "Off, because nothing sets it: parameters have the dtype"
    )
    found = jzero.from_deepspeed({
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2
    })  # fmt: skip
    assert (found.batch_size, found.options["microbatches"]) == (64, 2)


def test_hidden_size_says_how_much_is_fetched_ahead():
    zero = {"stage": 3, "stage3_prefetch_bucket_size": "auto", "reduce_bucket_size": 7}
    config = {"train_batch_size": 8, "zero_optimization": zero}
    found = jzero.from_deepspeed(config, devices=8, auto={"hidden_size": 100})
    assert found.options["comm"].prefetch_bytes == 9000 * 4


ADAM_OF = {**SMALL, "optimizer": {"type": "Adam", "params": {"lr": 0.1, "weight_decay": "auto"}}}


@pytest.mark.parametrize(
    ("config", "auto", "parts"),
    [
        (SMALL, 8, ["auto is 8. It has values by names", 'Write auto={"learning_rate": 1e-4}.']),
        (ADAM_OF, {"learnin_rate": 1},
         ["learnin_rate is no name of the Trainer that fills a key, and no key here (perhaps 'learning"]),
        (ADAM_OF, {"weight_decay": 0, "warmup_steps": 100},
         ["warmup_steps fills nothing: it is of scheduler.params.warmup_num_steps",
          "Without a scheduler the learning rate is constant.", '"type": "WarmupDecayLR"']),
        (ADAM_OF, {"weight_decay": 0, "lr_scheduler_type": "linear", "tf32": True, "num_train_epochs": 3,
                   "optim": "adamw_torch", "gradient_checkpointing": True},
         ["lr_scheduler_type of the Trainer fills nothing: the section scheduler sets it",
          "tf32 of the Trainer fills nothing: jax.config.update('jax_default_matmul_precision', ",
          "num_train_epochs of the Trainer fills nothing: your loop sets it",
          "optim of the Trainer fills nothing: the section optimizer sets it",
          "gradient_checkpointing of the Trainer fills nothing: jax.checkpoint"]),
        (ADAM_OF, {"weight_decay": 0, "learning_rate": 0.2, "adam_beta1": 0.9, "bf16": True},
         ["3 keys fail", "learning_rate is 0.2, and optimizer.params.lr is 0.1",
          "adam_beta1 fills nothing: it is of optimizer.params.betas, with adam_beta2",
          "bf16 fills nothing: it is of bf16.enabled\n", "Correct or drop them."]),
        ({**SMALL, "fp16": {"enabled": False}, "bf16": {"enabled": False}}, {"enabled": True},
         ["enabled is the name of fp16.enabled, bf16.enabled: write one of them"]),
        (EVERY_AUTO, {**AUTO, "adam_beta2": None},
         ["adam_beta1 fills nothing: it is of optimizer.params.betas, with adam_beta2"]),
        (EVERY_AUTO, {**AUTO, "gradient_accumulation_steps": None},
         ['gradient_accumulation_steps is "auto"',
          'Write auto={"per_device_train_batch_size": 2, "max_grad_norm": 1.0,',
          '"bf16": True, "gradient_accumulation_steps": 1}, with the values of your run.']),
        ({**SMALL, "amp": {"enabled": "auto"}}, None, ['auto={"amp.enabled": ...}, with the values of']),
        (EVERY_AUTO, {**AUTO, "train_batch_size": 100}, ["train_batch_size is 100, with train_micro_batch"]),
    ],
    ids=lambda x: x[0][:40] if isinstance(x, list) else "",
)  # fmt: skip
def test_what_is_wrong_with_auto_is_said(config: Any, auto: Any, parts: list[str]):
    text = refused(config, auto=auto)
    assert [part for part in parts if part not in text] == []


def test_the_command_takes_and_asks_for_values(tmp_path: pathlib.Path):
    path = CONFIGS / "hf_trainer_auto.json"
    flags = [f"{name}={json.dumps(value)}" for name, value in AUTO.items() if "beta" not in name]
    of_8 = ("deepspeed", str(path), "--devices", "8")
    done = run(*of_8, "--auto", ",".join(flags), "--auto", "betas=[0.9,0.999]")
    assert done.returncode == 0
    written = jzero.from_deepspeed(path, devices=8, auto=AUTO)
    assert done.stdout == written.python() + "\n"
    done = run(*of_8)
    assert done.returncode == 2
    asked = "Write --auto per_device_train_batch_size=8,gradient_accumulation_steps=1,learning"
    assert asked in done.stderr
    done = run("deepspeed", str(path), "--auto", "lr=1", "--auto", "lr=2")
    assert "--auto has a name twice. It has one value for each. Drop one of them." in done.stderr
    done = run("deepspeed", str(path), "--auto", "lr")
    assert "--auto: 'lr' is not of the form learning_rate=1e-4,bf16=true" in done.stderr


def test_fractional_warmup_steps_are_a_ratio():
    """As in transformers 5."""
    auto = {**AUTO, "warmup_ratio": None, "warmup_steps": 0.1}
    found, written = (
        jzero.from_deepspeed(EVERY_AUTO, devices=8, auto=x).python() for x in (auto, AUTO)
    )
    assert assigned(found, "schedule") == assigned(written, "schedule")
