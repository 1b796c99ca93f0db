# SPDX-License-Identifier: Apache-2.0
"""Every key of a DeepSpeed configuration, and what becomes of it.

They are those of DeepSpeed 0.19.6: of the documentation of its configuration, and of the modules that read it
(`deepspeed.runtime.config`, `deepspeed.runtime.zero.config`, `deepspeed.runtime.precision_config`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import optax

from jzero._policy import PinnedHost
from jzero.deepspeed import _chain, _rules, _schedules, _transforms
from jzero.deepspeed._config import Form, Row
from jzero.deepspeed._python import called


def _noted(note: str, **names: str) -> dict[str, Row]:
    """Keys that change nothing here, by the kinds of their values."""
    return {name: Row(kind, note, tuning=True, inside="anything")
            for kind, those in names.items() for name in those.split()}  # fmt: skip


def _unset(why: str, **names: str) -> dict[str, Row]:
    return _noted(f"Nothing to set: {why}", **names)


def _only(kind: str, accepts: tuple[Any, ...], note: str, refused: str) -> Row:
    """A key with values that change nothing here; others are refused."""
    return Row(kind, note, accepts=accepts, refused=refused)


def _false(note: str, refused: str) -> Row:
    return _only("bool", (False,), note, refused)


def _off(refused: str) -> Row:
    """A section that must be off."""
    return Row("object", "Off.", refused=refused, inside="enabled")


def _never(refused: str) -> Row:
    """A section that must be empty."""
    return Row("object", accepts=(), refused=refused, inside="anything")


_SECTION = Row("object")
_COMPILED, _MEMORY = "XLA compiles the whole step by itself.", "XLA plans all memory by itself."
_BUCKETS = (
    "there are no buckets. XLA combines small collectives, and a gradient is reduced where "
    "the backward pass makes it.")  # fmt: skip
_GATHERS = (
    "what stage 3 gathers is planned before the step is compiled; Comm(prefetch_bytes=, gather=) "
    "and Axes(replicate=) are jzero's options for it.")  # fmt: skip
_MODULES = "a JAX model has no modules at run time that could be hooked or patched."
_LOGGING = (
    "Belongs to your training loop; describe says what is stored and moved, jax.profiler when."
)
_CHECKPOINTS = (
    "Belongs to checkpoints: jzero.Checkpointer writes one that any stage, mesh and number of processes can "
    "restore.")  # fmt: skip
_MEAN = "the mean of the loss divides before anything is summed over devices."
_PINNED = "what is transferred goes through pinned memory."
_QUANTISED = "Quantisation changes the model: drop the section, and write it in the step."
_TP = "Tensor parallelism is a mesh axis of your own: drop the section, and use auto_specs."

_TOP = {
    "train_batch_size": Row("count", _rules.rows, "`batch_size`, the rows of a call", tuning=True),
    "train_micro_batch_size_per_gpu": Row("count", "Follows from the batch, the devices and microbatches: "
        "jzero cuts the batch itself.", becomes="with the batch and the devices, `microbatches`",
        tuning=True),
    "gradient_accumulation_steps": Row("count", _rules.accumulate, "`microbatches`", tuning=True,
        missing=True),
    "managed_gradient_accumulation": _only("bool", (True,), "As in jzero: one call of the step is one "
        "update.", "A call of jzero's step is one update, with all its microbatches: drop the key."),
    "gradient_clipping": Row("size", _rules.clip, "`optax.clip_by_global_norm`", missing=True),
    "optimizer": Row("object", _rules.no_optimizer, missing=True),
    "scheduler": Row("object", _rules.no_scheduler, missing=True),
    **dict.fromkeys(("zero_optimization", "fp16", "bf16", "data_types", "activation_checkpointing", "compile",
        "torch_autocast", "tensor_parallel"), _SECTION),
    "communication_data_type": Row("dtype", _rules.wire, "`Comm(reduce_dtype=)`"),
    "seq_parallel_communication_data_type": Row("text", accepts=(), refused="It is of a training whose "
        "sequences are divided over devices: drop it, and constrain activations over a mesh axis of your "
        "own."),
    "gradient_allreduce_op": _only("text", ("mean",), "The mean over the batch is the one that your loss "
        "takes.", "The gradients are those of your loss over the whole batch: drop the key, and let it be a "
        "sum."),
    **_unset(_MEAN, bool="prescale_gradients", number="gradient_predivide_factor"),
    **_unset("gradients of embeddings are dense in JAX, and reduced as such.", bool="sparse_gradients"),
    "disable_allgather": _false("Off, as in jzero.", "Updated parameters are always gathered where they are "
        "read: drop the key."),
    **_unset("any optax optimizer is taken.", bool="zero_allow_untested_optimizer"),
    **_unset("with offload the host updates by kernels made from the optimizer itself.",
        bool="zero_force_ds_cpu_optimizer"),
    "amp": _off("Apex chooses dtypes operation by operation: drop the section, and cast in the model."),
    "sparse_attention": _never("Attention is the model's: drop the section, and write the sparse attention "
        "in the model."),
    "expert_parallel": _off("Experts are the model's: drop the section; see jzero.groups for routers by "
        "group."),
    "sequence_parallel_size": _only("int", (0, 1), "Off.", "Sequence parallelism is a mesh axis of your own: "
        "drop it, and constrain activations over the axis."),
    "pipeline": _never("jzero has no pipeline scheduler: drop the section."),
    "elasticity": _off("It chooses batch sizes by the number of devices: drop the section, and write the "
        "sizes."),
    "autotuning": _off("It searches for a configuration: drop the section, and translate what it found."),
    "compression_training": Row("object", "Off.", accepts=(), inside="parts", refused="Compression changes "
        "the model: drop the section, and write it in the step."),
    "quantize_training": _off(_QUANTISED),
    "weight_quantization": _never(_QUANTISED),
    "data_efficiency": _off("It is a data loader's and a model's: drop the section, and do it there."),
    "curriculum_learning": _off("It is a data loader's: drop the section, and do it there."),
    "progressive_layer_drop": _off("It changes the model: drop the section, and write it in the step."),
    "eigenvalue": _off("It is of quantised training: drop the section."),
    "hybrid_engine": _off("It changes between training and generation: drop the section, and use "
        "jzero.shard_eval_step for the second."),
    **_noted(_CHECKPOINTS, object="nebula checkpoint", any="datastates_ckpt"),
    **_unset("files are read and written past the page cache, tile by tile.", object="aio"),
    **_unset(_COMPILED, bool="graph_harvesting"),
    **_noted("Without effect: no experts are placed.", bool="use_data_before_expert_parallelism"),
    **_unset("it only warns. Rows that devices do not divide are padded.", int="vocabulary_size"),
    **_noted("Belongs to your data loader; the last batch may have any number of rows.",
        bool="dataloader_drop_last"),
    **_unset("the mesh says it.", any="data_parallel_group"),
    **_unset(_BUCKETS, int="allgather_size"),
    **_noted("The program prints its loss as often, and every 10 steps if it is no number of steps.",
        any="steps_per_print"),
    **_noted("Belongs to what launches: the variable CUDA_VISIBLE_DEVICES.", any="cuda_visible_devices"),
    **_noted(_LOGGING, bool="wall_clock_breakdown memory_breakdown dump_state", object="tensorboard wandb "
        "comet csv_monitor monitor_config flops_profiler comms_logger comms_config timers", any="log_level"),
}  # fmt: skip

_ZERO = {
    "stage": Row("stage", _rules.stage, "`stage`", default=0, missing=True),
    **dict.fromkeys(("offload_optimizer", "offload_param"), _SECTION),
    "cpu_offload": Row("bool", _rules.offload, "`memory=jzero.HostCPU()`"),
    "cpu_offload_param": Row("bool", _rules.offload, "`Memory(params=jzero.PinnedHost())`"),
    **_unset(_PINNED, bool="cpu_offload_use_pin_memory"),
    "zero_hpz_partition_size": Row(
        "int", _rules.groups, "`Axes(params='local')` and `mesh_axes`", default=1),
    "mics_shard_size": Row("whole", _rules.groups, default=-1, becomes="`Axes(params='local', "
        "optimizer='local')` and `mesh_axes`"),
    **_unset("gathers stay within the axis 'local'.", bool="mics_hierarchical_params_gather"),
    "stage3_prefetch_bucket_size": Row("int", _rules.prefetch, "`Comm(prefetch_bytes=)`, of 2 bytes with "
        "bf16 and else of 4 each", tuning=True),
    "zero_quantized_weights": Row(
        "bool", "Comm(gather_dtype=jnp.int8): quantized with a scale for each block, of weights that passes "
        "gather.", off="Off, as in jzero.", options={"comm.gather_dtype": jnp.int8}),
    "zero_quantized_gradients": Row(
        "bool", "Comm(reduce_dtype=jnp.int4): quantized with a scale for each block, of gradients, one mesh "
        "axis after the other.", off="Off, as in jzero.",
        options={"comm.reduce_dtype": jnp.int4}),
    "zero_quantized_nontrainable_weights": _false("Off, as in jzero.", "All weights that products read are "
        "gathered in one format: drop the key, or use zero_quantized_weights."),
    "zeropp_loco_param": _never("What gradients lose by quantization is not kept for the next step: drop the "
        "key."),
    "zenflow": _never("It updates most of the parameters late: drop the section; "
        "jzero.HostCPU(delayed_update=True) delays all by one step."),
    **_unset("XLA runs collectives beside compute by itself.", bool="overlap_comm"),
    **_unset(_MEMORY, bool="contiguous_gradients"),
    **_unset("from stage 1 on gradients are reduce-scattered.", bool="reduce_scatter"),
    **_unset(
        _BUCKETS, int="reduce_bucket_size allgather_bucket_size", bool="use_multi_rank_bucket_allreduce"),
    **_unset("new parameters are all-gathered, never broadcast.", bool="allgather_partitions"),
    **_unset("each host has the gradients of its own shards.", bool="round_robin_gradients"),
    **_unset("a gradient is reduced where the backward pass makes it.", bool="grad_hooks"),
    **_unset("parameters that a loss does not read are allowed.", bool="ignore_unused_parameters"),
    **_unset("there is one stage 1.", bool="legacy_stage1"),
    **_unset("PinnedHost(device_bytes=...) and HostCPU cut the update by bytes.", int="sub_group_size"),
    **_unset("gathered parameters are freed after their use. With Memory(params=), "
        "PinnedHost(device_bytes=...) bounds all that is on a device.", int="stage3_max_live_parameters"),
    **_unset("Comm(gather='keep') keeps what the forward pass gathered for the backward pass.",
        int="stage3_max_reuse_distance"),
    **_unset("leaves below Axes(min_shard_bytes=), 1 KiB, are replicated, as are those that "
        "Axes(replicate='...') names; small gathers go beside the compute of others.",
        int="stage3_param_persistence_threshold"),
    **_unset(_GATHERS, int="stage3_model_persistence_threshold stage3_module_granularity_threshold",
        bool="stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential"),
    **_noted("Belongs to checkpoints: `jzero export checkpoints model.safetensors --dtype bf16`.",
        bool="stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save"),
    **_noted(_CHECKPOINTS, bool="elastic_checkpoint load_from_fp32_weights pipeline_loading_checkpoint"),
    **_unset(_MODULES, bool="memory_efficient_linear override_module_apply", object="leaf_module"),
    **_unset("there is no trace that could become wrong.", bool="log_trace_cache_warnings"),
    **_unset("it is checked before a step runs.", bool="enable_sanity_checks"),
    **_noted(_rules.UNUSED, bool="save_muon_momentum_buffer_in_memory"),
}  # fmt: skip

_DEVICES: dict[str, Any] = dict(
    accepts=("none", "cpu", "nvme"), refused="Use 'cpu', 'nvme' or 'none'.", default="none")  # fmt: skip
_PATH = Row("any", _rules.nvme, "`jzero.NVMe(nvme_path)`, with the device `nvme`")
_BUFFER = "`NVMe(host_bytes=...)`, as many elements of 2 bytes, with the device `nvme`"
_OFFLOAD_OPTIMIZER = {
    "device": Row("text", _rules.offload, **_DEVICES, becomes="`memory=jzero.HostCPU()`; with `nvme`, "
        "`memory=jzero.NVMe(nvme_path)`"),
    "ratio": Row("share", _rules.offload, "`jzero.HostCPU(ratio=...)`", default=1),
    **_unset(_PINNED, bool="pin_memory"),
    "super_offload": _false("Off, as in jzero.", "It is DeepSpeed's own schedule of CPU updates: drop it; "
        "see HostCPU(delayed_update=True)."),
    **_unset("HostCPU(threads=...) says how many threads update.", number="cpuadam_cores_perc"),
    **_unset("NVMe(host_bytes=...) bounds the memory of buffers.", int="buffer_count"),
    "nvme_path": _PATH,
    **_unset("tiles are read ahead and written behind, always.", bool="pipeline_read pipeline_write"),
    **_unset("files are filled once, when a state is placed.", bool="fast_init"),
}  # fmt: skip
_OFFLOAD_PARAM = {
    "device": Row("text", _rules.offload, **_DEVICES, becomes="`Memory(params=jzero.PinnedHost())`; "
        "with `nvme`, `Memory(params=jzero.NVMe(nvme_path))`"),
    **_unset(_PINNED, bool="pin_memory"),
    "buffer_count": Row("int", _rules.nvme, _BUFFER, default=5),
    "buffer_size": Row("int", _rules.nvme, _BUFFER, default=10**8),
    **_unset("NVMe(host_bytes=...) bounds what is in transfer; nothing stays.", int="max_in_cpu"),
    "nvme_path": _PATH,
}  # fmt: skip

_LOW = "Masters are float32 in jzero: drop it, or write jzero.stochastic_rounding(tx), which needs none."
_SCALING = "bfloat16 has the range of float32, and needs no loss scale."
_FP16 = {
    "enabled": Row("bool", _rules.half, "as `bf16.enabled`: bfloat16 needs no loss scale", tuning=True),
    **_noted("Belongs to the model: it casts its inputs.", bool="auto_cast"),
    "fp16_master_weights_and_grads": _false("Off: masters are float32.", _LOW),
    **_unset(_SCALING, bool="consecutive_hysteresis", number="loss_scale initial_scale_power "
        "loss_scale_window hysteresis min_loss_scale", any="opt_level"),
}  # fmt: skip
_BF16 = {
    "enabled": Row("bool", _rules.half, "`jzero.master_weights` around the optimizer", tuning=True),
    "check_grad_overflow": Row("bool", _rules.overflow, "`optax.apply_if_finite`", missing=True),
    **_unset("a gradient is added up when it is made.", bool="immediate_grad_update"),
    "bf16_master_weights_and_grads": _false("Off: masters are float32.", _LOW),
    "bf16_optimizer_states": _false("Off: moments are float32.", _LOW),
}  # fmt: skip
_AUTOCAST = {
    "enabled": Row("bool", _rules.autocast, "a note: your model casts"),
    "dtype": Row(
        "text", _rules.autocast, "a note: your model casts; float16 is refused", default="bfloat16"),
    **_noted("Belongs to the model: it says where its layers cast.", list="lower_precision_safe_modules"),
}  # fmt: skip
_DATA_TYPES = {
    "grad_accum_dtype": Row("dtype", _rules.sums, "`Microbatches(dtype=)`, if there are microbatches"),
    **_noted("Belongs to the model: parameters have the dtype in which it makes them.", text="param_dtype"),
    **_noted("Belongs to the model: buffers are leaves of your state.", text="buffer_dtype"),
}  # fmt: skip

_ACTIVATIONS = Row(
    "bool", "Memory(activations=jzero.PinnedHost()), with jax.checkpoint around each layer.",
    off="Off: activations stay on the devices.",
    options={"memory.activations": called(PinnedHost)})  # fmt: skip
_RECOMPUTED = "Belongs to the model: jax.checkpoint around each layer says what is recomputed."
_CHECKPOINTED = {
    "cpu_checkpointing": _ACTIVATIONS,
    "partition_activations": _false("Off.", "It divides activations over the devices of a model-parallel "
        "group: set it to false, and constrain them over a mesh axis of your own with "
        "jax.lax.with_sharding_constraint."),
    **_unset(_MEMORY, bool="contiguous_memory_optimization"),
    **_noted(_RECOMPUTED, int="number_checkpoints", bool="synchronize_checkpoint_boundary"),
    **_noted(_LOGGING, bool="profile"),
}  # fmt: skip
_COMPILE = {
    "offload_activation": _ACTIVATIONS,
    **_unset(_PINNED, bool="offload_activation_pin_memory"),
    "passes": Row("list", f"Nothing to set: {_COMPILED}", accepts=([],), refused="They split sequences or "
        "layers: drop them, and use a mesh axis of your own."),
    **dict.fromkeys(("offload_opt_states", "offload_parameters"), _false("Off.", "Drop it, and use "
        "zero_optimization.offload_optimizer or offload_param.")),
    **_unset(_COMPILED, int="free_activation_threshold", any="backend kwargs mode options",
        bool="enabled disable dynamic fullgraph deepcompile free_activation double_buffer symmetric_memory "
        "debug_log sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather "
        "keep_int_input_tensors keep_all_input_tensors"),
}  # fmt: skip
_TENSOR_PARALLEL = {
    "autotp_size": _only("int", (0, 1), "Off.", _TP),
    **_noted("Off: nothing is tensor parallel.", bool="tp_overlap_comm"),
    **dict.fromkeys(("tp", "tensor_parallel"), _never(_TP)),
    **_noted("Off: nothing is tensor parallel.", any="preset_model partition_config dtype "
        "injection_policy_tuple keep_module_on_host replace_with_kernel_inject"),
}  # fmt: skip

_FUSED, _AS_JZERO = "XLA fuses the update.", "As in jzero."


def _takes(**names: str) -> dict[str, Row]:
    """Parameters of an optimizer or a scheduler, by the kinds of their values."""
    return {name: _argument(kind) for kind, those in names.items() for name in those.split()}


def _argument(kind: str, default: Any = None, **more: Any) -> Row:
    return Row(kind, _chain.argument, default=default, **more)


_COMMON = {
    "amsgrad": _false(_AS_JZERO, "jzero translates no AMSGrad: use optax.amsgrad."),
    "maximize": _false(_AS_JZERO, "Negate the loss."),
    "fp32_optimizer_states": _only(
        "bool", (True,), _AS_JZERO, "Moments have the dtype of the masters, float32."),
    "max_grad_norm": Row("any", accepts=(), refused="DeepSpeed clips by gradient_clipping, and so does "
        "jzero: drop it, and write gradient_clipping if it is not there."),
    **_unset(_FUSED, any="set_grad_none fused foreach capturable differentiable"),
}  # fmt: skip
_LR, _DECAY = {"lr": _argument("size", 1e-3)}, {"weight_decay": _argument("size", 0.0)}
_MOMENTS = {**_LR, "betas": _argument("betas", (0.9, 0.999))}
_EPS = {"eps": _argument("size", 1e-8)}
_ADAM = {
    **_MOMENTS, **_EPS, **_takes(size="weight_decay"), "torch_adam": _argument("bool", False),
    "adam_w_mode": _argument("bool", True), "bias_correction": _only(
        "bool", (True,), _AS_JZERO, "optax always corrects Adam's moments for their start at 0."), **_COMMON,
}  # fmt: skip
OPTIMIZERS = {
    "adam": Form(optax.adamw, _ADAM),
    "adamw": Form(optax.adamw, {**_ADAM, "adam_w_mode": _only(
        "bool", (True,), _AS_JZERO, "DeepSpeed's AdamW is AdamW all the same: write Adam, or drop it.")}),
    "lamb": Form(_transforms.lamb, {
        **_MOMENTS, **_EPS, **_DECAY, **_takes(size="max_coeff min_coeff", bool="bias_correction"),
        "eps_inside_sqrt": _false(_AS_JZERO, "jzero.deepspeed.lamb adds eps to the root."), **_COMMON}),
    "lion": Form(optax.lion, {**_MOMENTS, **_DECAY, **_COMMON}),
    "adagrad": Form(_transforms.adagrad, {
        "lr": _argument("size", 1e-2), **_DECAY, **_takes(size="eps initial_accumulator_value"),
        "lr_decay": _only("size", (0,), _AS_JZERO, "Say it with a schedule."), **_COMMON}, is_l2=True),
    "sgd": Form(optax.sgd, {
        **_LR, **_DECAY, **_takes(size="momentum", bool="nesterov"),
        "dampening": _only("size", (0,), _AS_JZERO, "optax.sgd has none."), **_COMMON}, is_l2=True),
}  # fmt: skip
_ONE_BIT = "Its compressed communication has no counterpart: use Adam or Lamb, which train alike without it."
_MUP = "It scales the learning rate by the width of each layer, which the model knows: use optax."
_OURS = (
    "jzero translates Adam, AdamW, Lamb, Lion, Adagrad and SGD: write one of them, or drop the section, and "
    "use your own.")  # fmt: skip
_PARAMS = Row("object", inside="anything", becomes="its arguments: see above")
_OPTIMIZER = {
    "type": Row(
        "text", _chain.optimizer_type, "`optimizer`, an optax transformation: see above",
        accepts=tuple(OPTIMIZERS), required=_OURS, refused=_OURS, refusals={
            **dict.fromkeys(("onebitadam", "zerooneadam", "onebitlamb"), _ONE_BIT),
            **dict.fromkeys(("muadam", "muadamw", "musgd"), _MUP),
            "muon": "Which parameters are Muon's is marked in the model and not here, and optax.contrib.muon "
            "differs (it corrects the momentum for its start, and its Adam has Nesterov's momentum, too): "
            "drop the section, and write optax.contrib.muon."}),
    "params": _PARAMS,
    **_unset(_FUSED, bool="legacy_fusion"),
}  # fmt: skip

_NO_DEFAULT = _argument("size", required="It has no default: write it.")
_RESUMED = {"last_batch_iteration": _only(
    "number", (-1,), _AS_JZERO, "A schedule counts the updates of the optimizer's state.")}  # fmt: skip
_WARMUP = {
    **_takes(int="warmup_num_steps"), **_RESUMED,  # Below 2 steps count as 2.
    "warmup_type": _argument("text", accepts=("log", "linear"), refused="It is 'log' or 'linear'."),
}  # fmt: skip
_RATES = _takes(size="warmup_min_lr warmup_max_lr")
_TOTAL = {"total_num_steps": dataclasses.replace(_NO_DEFAULT, kind="count")}


SCHEDULERS = {
    "LRRangeTest": Form(_schedules.lr_range_test, {
        **_RESUMED, **_takes(
            size="lr_range_test_min_lr lr_range_test_step_rate", count="lr_range_test_step_size",
            bool="lr_range_test_staircase")}),
    "OneCycle": Form(_schedules.one_cycle, {
        **dict.fromkeys(("cycle_min_lr", "cycle_max_lr"), _NO_DEFAULT), **_RESUMED, **_takes(
            length="cycle_first_step_size", int="cycle_first_stair_count cycle_second_stair_count",
            size="cycle_second_step_size decay_step_size decay_lr_rate cycle_min_mom cycle_max_mom "
            "decay_mom_rate"), "cycle_momentum": _argument("bool", True)}),
    "WarmupLR": Form(_schedules.warmup_lr, {**_RATES, **_WARMUP, "warmup_max_lr": _argument(
        "size", required="It is the optimizer's lr in new versions of DeepSpeed, and 0.001 in old ones: "
        "write the one you mean.")}),
    "WarmupDecayLR": Form(_schedules.warmup_decay_lr, {**_TOTAL, **_RATES, **_WARMUP}),
    "WarmupCosineLR": Form(_schedules.warmup_cosine_lr, {
        **_TOTAL, **_takes(size="warmup_min_ratio cos_min_ratio"), **_WARMUP}),
}  # fmt: skip
_SCHEDULES = (
    f"jzero has {', '.join(SCHEDULERS)}: write one of them, or drop the section and give your optimizer an "
    "optax schedule.")  # fmt: skip
_SCHEDULER = {
    "type": Row("text", _chain.scheduler_type, "`schedule`, an optax schedule: see above",
        accepts=tuple(SCHEDULERS), required=_SCHEDULES, refused=_SCHEDULES),
    "params": _PARAMS,
}  # fmt: skip

KEYS = {
    f"{section}.{name}".lstrip("."): row
    for section, rows in {
        "": _TOP, "zero_optimization": _ZERO, "zero_optimization.offload_optimizer": _OFFLOAD_OPTIMIZER,
        "zero_optimization.offload_param": _OFFLOAD_PARAM, "fp16": _FP16, "bf16": _BF16,
        "torch_autocast": _AUTOCAST, "data_types": _DATA_TYPES, "activation_checkpointing": _CHECKPOINTED,
        "compile": _COMPILE, "tensor_parallel": _TENSOR_PARALLEL, "optimizer": _OPTIMIZER,
        "scheduler": _SCHEDULER,
    }.items()
    for name, row in rows.items()
}  # fmt: skip

# Other names that DeepSpeed takes for a key.
ALIASES = {
    "bfloat16": "bf16",
    **{f"zero_optimization.{name}": f"zero_optimization.stage3_{name}" for name in (
        "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold",
        "max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save",
        "module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential")},
}  # fmt: skip
