# SPDX-License-Identifier: Apache-2.0
"""Every key of a DeepSpeed configuration, and what becomes of it.

They are those of DeepSpeed 0.19.6: of the documentation of its configuration, and of the modules that read it
(`deepspeed.runtime.config`, `deepspeed.runtime.zero.config`, `deepspeed.runtime.precision_config`).
"""

from __future__ import annotations

from jzero.deepspeed._keys import Key, noted, off, only, read, section

_XLA = "Nothing to set: XLA {} by itself."
_BUCKETS = (
    "Nothing to set: there are no buckets. XLA combines small collectives, and a gradient is reduced where "
    "the backward pass makes it."
)
_GATHERS = (
    "Nothing to set: what stage 3 gathers is planned before the step is compiled; prefetch_bytes, gather "
    "and full are jzero's settings for it."
)
_MODULES = "Nothing to set: a JAX model has no modules at run time that could be hooked or patched."
_LOGGING = "Belongs to your training loop; describe says what rests and moves, jax.profiler when."
_CHECKPOINTS = ("Belongs to checkpoints: jzero.Checkpointer writes one that any stage, mesh and number of "
                "processes can restore.")  # fmt: skip
_NVME_ONLY = "Without effect: it is of offload to NVMe, which this configuration does not use."
_BUFFERS = "Nothing to set: NVMe(host_bytes=...) says how much memory buffers may take."
_ALWAYS = "Nothing to set: tiles are read ahead and written behind, always."
_CHECKED = "Nothing to set: it is checked before a step runs."
_TP = "Tensor parallelism is a mesh axis of your own: drop the section, and use auto_specs."


_TOP = {
    "train_batch_size": read("int", "`batch_size`, the rows of a call", tuning=True),
    "train_micro_batch_size_per_gpu": read(
        "int", "with the batch and the devices, `accumulate`", tuning=True),
    "gradient_accumulation_steps": read("int", "`accumulate`", tuning=True),
    "managed_gradient_accumulation": only(
        "bool", (True,), "As in jzero: one call of the step is one update.",
        "A call of jzero's step is one update, with all its microbatches: drop the key."),
    "gradient_clipping": read("number", "`optax.clip_by_global_norm`"),
    "optimizer": section(),
    "scheduler": section(),
    "zero_optimization": section(),
    "fp16": section(),
    "bf16": section(),
    "data_types": section(),
    "activation_checkpointing": section(),
    "compile": section(),
    "communication_data_type": read("text", "`reduce_dtype`"),
    "seq_parallel_communication_data_type": Key(
        "text", accepts=(),
        refused="It is of a training whose sequences are divided over devices: drop it, and constrain "
        "activations over a mesh axis of your own."),
    "gradient_allreduce_op": only(
        "text", ("mean",), "The mean over the batch is the one that your loss takes.",
        "The gradients are those of your loss over the whole batch: drop the key, and let it be a sum."),
    "prescale_gradients": noted(
        "bool", "Nothing to set: the mean of the loss divides before anything is summed over devices."),
    "gradient_predivide_factor": noted(
        "number", "Nothing to set: the mean of the loss divides before anything is summed over devices."),
    "sparse_gradients": noted(
        "bool", "Nothing to set: gradients of embeddings are dense in JAX, and reduced as such."),
    "disable_allgather": only(
        "bool", (False,), "Off, as in jzero.",
        "Updated parameters are always gathered where they are read: drop the key."),
    "zero_allow_untested_optimizer": noted("bool", "Nothing to set: any optax optimizer is taken."),
    "zero_force_ds_cpu_optimizer": noted(
        "bool", "Nothing to set: with offload the host updates by kernels made from the optimizer itself."),
    "amp": off("Apex chooses dtypes operation by operation: drop the section, and cast in the model."),
    "torch_autocast": section(),
    "sparse_attention": Key(
        "object", accepts=(), inside="anything",
        refused="Attention is the model's: drop the section, and write the sparse attention in the model."),
    "tensor_parallel": section(),
    "expert_parallel": off(
        "Experts are the model's: drop the section; see jzero.groups for routers by group."),
    "sequence_parallel_size": only(
        "int", (0, 1), "Off.",
        "Sequence parallelism is a mesh axis of your own: drop it, and constrain activations over the axis."),
    "pipeline": Key(
        "object", accepts=(), inside="anything",
        refused="jzero has no pipeline scheduler: drop the section."),
    "elasticity": off(
        "It chooses batch sizes by the number of devices: drop the section, and write the sizes."),
    "autotuning": off("It searches for a configuration: drop the section, and translate what it found."),
    "compression_training": Key(
        "object", "Off.", accepts=(), inside="parts",
        refused="Compression changes the model: drop the section, and write it in the step."),
    "quantize_training": off("Quantisation changes the model: drop the section, and write it in the step."),
    "weight_quantization": Key(
        "object", accepts=(), inside="anything",
        refused="Quantisation changes the model: drop the section, and write it in the step."),
    "data_efficiency": off("It is a data loader's and a model's: drop the section, and do it there."),
    "curriculum_learning": off("It is a data loader's: drop the section, and do it there."),
    "progressive_layer_drop": off("It changes the model: drop the section, and write it in the step."),
    "eigenvalue": off("It is of quantised training: drop the section."),
    "hybrid_engine": off("It changes between training and generation: drop the section, and use "
                          "jzero.shard_eval_step for the second."),
    "nebula": noted("object", _CHECKPOINTS),
    "datastates_ckpt": noted("any", _CHECKPOINTS),
    "checkpoint": noted("object", _CHECKPOINTS),
    "aio": noted("object", "Nothing to set: files are read and written past the page cache, tile by tile."),
    "graph_harvesting": noted("bool", _XLA.format("compiles the whole step")),
    "use_data_before_expert_parallelism": noted("bool", "Without effect: no experts are placed."),
    "vocabulary_size": noted(
        "int", "Nothing to set: it only warns. Rows that devices do not divide are padded."),
    "dataloader_drop_last": noted(
        "bool", "Belongs to your data loader; the last batch may have any number of rows."),
    "data_parallel_group": noted("any", "Nothing to set: the mesh says it."),
    "allgather_size": noted("int", _BUCKETS),
    "steps_per_print": noted(  # Accelerate writes infinity.
        "any", "The program prints its loss as often, and every 10 steps if it is no number of steps."),
    **dict.fromkeys(("wall_clock_breakdown", "memory_breakdown", "dump_state"), noted("bool", _LOGGING)),
    **dict.fromkeys(
        ("tensorboard", "wandb", "comet", "csv_monitor", "monitor_config", "flops_profiler", "comms_logger",
         "comms_config", "timers"), noted("object", _LOGGING)),
    "cuda_visible_devices": noted("any", "Belongs to what launches: the variable CUDA_VISIBLE_DEVICES."),
    "log_level": noted("any", _LOGGING),
}  # fmt: skip

_ZERO = {
    "stage": read("int", "`stage`"),
    "offload_optimizer": section(),
    "offload_param": section(),
    "cpu_offload": read("bool", "`offload=jzero.HostCPU()`"),
    "cpu_offload_param": read("bool", "`offload_params=jzero.PinnedHost()`"),
    "cpu_offload_use_pin_memory": noted("bool", "Nothing to set: what crosses goes through pinned memory."),
    "zero_hpz_partition_size": read("int", "`param_axes='local'` and `mesh_axes`"),
    "mics_shard_size": read("whole", "`param_axes='local'`, `optimizer_axes='local'` and `mesh_axes`"),
    "mics_hierarchical_params_gather": noted(
        "bool", "Nothing to set: gathers stay within the axis 'local'."),
    "stage3_prefetch_bucket_size": read(
        "int", "`prefetch_bytes`, of 2 bytes with bf16 and else of 4 each", tuning=True),
    "zero_quantized_weights": read("bool", "`gather_dtype=jnp.int8`"),
    "zero_quantized_gradients": read("bool", "`reduce_dtype=jnp.int4`"),
    "zero_quantized_nontrainable_weights": only(
        "bool", (False,), "Off, as in jzero.",
        "Gathers of all weights that products read travel in one format: drop the key, or use "
        "zero_quantized_weights."),
    "zeropp_loco_param": Key(
        "object", accepts=(), inside="anything",
        refused="What gradients lose on their way is not kept for the next step: drop the key."),
    "zenflow": Key(
        "object", accepts=(), inside="anything",
        refused="It updates most of the parameters late: drop the section; "
        "jzero.HostCPU(delayed_update=True) delays all by one step."),
    "overlap_comm": noted("bool", _XLA.format("runs collectives beside compute")),
    "contiguous_gradients": noted("bool", _XLA.format("plans all memory")),
    "reduce_scatter": noted("bool", "Nothing to set: from stage 1 on gradients are reduce-scattered."),
    **dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), noted("int", _BUCKETS)),
    "use_multi_rank_bucket_allreduce": noted("bool", _BUCKETS),
    "allgather_partitions": noted(
        "bool", "Nothing to set: new parameters are all-gathered, never broadcast."),
    "round_robin_gradients": noted("bool", "Nothing to set: each host has the gradients of its own shards."),
    "grad_hooks": noted(
        "bool", "Nothing to set: a gradient is reduced where the backward pass makes it."),
    "ignore_unused_parameters": noted(
        "bool", "Nothing to set: parameters that a loss does not read are allowed."),
    "legacy_stage1": noted("bool", "Nothing to set: there is one stage 1."),
    "sub_group_size": noted(
        "int", "Nothing to set: PinnedHost(device_bytes=...) and HostCPU cut the update by bytes."),
    "stage3_max_live_parameters": noted(
        "int", "Nothing to set: gathered parameters are freed after their use. With offload_params, "
        "PinnedHost(device_bytes=...) bounds all that is on a device."),
    "stage3_max_reuse_distance": noted(
        "int", "Nothing to set: gather='keep' keeps what the forward pass gathered for the backward pass."),
    "stage3_param_persistence_threshold": noted(
        "int", "Nothing to set: leaves below min_shard_bytes (1 KiB) rest whole, as do those that "
        "full='...' names; small gathers go beside the compute of others."),
    "stage3_model_persistence_threshold": noted("int", _GATHERS),
    "stage3_module_granularity_threshold": noted("int", _GATHERS),
    "stage3_use_all_reduce_for_fetch_params": noted("bool", _GATHERS),
    "stage3_allgather_sequential": noted("bool", _GATHERS),
    **dict.fromkeys(
        ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
        noted("bool", "Belongs to checkpoints: `jzero export checkpoints model.safetensors --dtype bf16`.")),
    "elastic_checkpoint": noted("bool", _CHECKPOINTS),
    "load_from_fp32_weights": noted("bool", _CHECKPOINTS),
    "pipeline_loading_checkpoint": noted("bool", _CHECKPOINTS),
    "memory_efficient_linear": noted("bool", _MODULES),
    "override_module_apply": noted("bool", _MODULES),
    "leaf_module": noted("object", _MODULES),
    "log_trace_cache_warnings": noted("bool", "Nothing to set: there is no trace that could become wrong."),
    "enable_sanity_checks": noted("bool", _CHECKED),
    "save_muon_momentum_buffer_in_memory": noted("bool", _NVME_ONLY),
}  # fmt: skip

_PIN = noted("bool", "Nothing to set: what crosses goes through pinned memory.")
_OFFLOAD_OPTIMIZER = {
    "device": Key(
        "text", accepts=("none", "cpu", "nvme"), refused="Use 'cpu', 'nvme' or 'none'.",
        becomes="`offload=jzero.HostCPU()`; with `nvme`, `offload=jzero.NVMe(nvme_path)`"),
    "ratio": read("number", "`jzero.HostCPU(ratio=...)`"),
    "pin_memory": _PIN,
    "super_offload": only(
        "bool", (False,), "Off, as in jzero.",
        "It is DeepSpeed's own schedule of CPU updates: drop it; see HostCPU(delayed_update=True)."),
    "cpuadam_cores_perc": noted(
        "number", "Nothing to set: HostCPU(threads=...) says how many threads update."),
    "buffer_count": noted("int", _BUFFERS),
    "nvme_path": read("any", "`jzero.NVMe(nvme_path)`, with the device `nvme`"),
    **dict.fromkeys(("pipeline_read", "pipeline_write"), noted("bool", _ALWAYS)),
    "fast_init": noted("bool", "Nothing to set: files are filled once, when a state is placed."),
}  # fmt: skip

_OFFLOAD_PARAM = {
    "device": Key(
        "text", accepts=("none", "cpu", "nvme"), refused="Use 'cpu', 'nvme' or 'none'.",
        becomes="`offload_params=jzero.PinnedHost()`; with `nvme`, `offload_params=jzero.NVMe(nvme_path)`"),
    "pin_memory": _PIN,
    **dict.fromkeys(
        ("buffer_count", "buffer_size"),
        read("int", "`NVMe(host_bytes=...)`, as many elements of 2 bytes, with the device `nvme`")),
    "max_in_cpu": noted("int", "Nothing to set: what NVMe(host_bytes=...) holds is on its way; none stays."),
    "nvme_path": read("any", "`jzero.NVMe(nvme_path)`, with the device `nvme`"),
}  # fmt: skip

_LOW = "Masters are float32 in jzero: drop it, or write jzero.stochastic_rounding(tx), which needs none."
_SCALING = "Nothing to set: bfloat16 has the range of float32, and needs no loss scale."
_FP16 = {
    "enabled": read("bool", "as `bf16.enabled`: bfloat16 needs no loss scale", tuning=True),
    "auto_cast": noted("bool", "Belongs to the model: it casts its inputs."),
    "fp16_master_weights_and_grads": only("bool", (False,), "Off: masters are float32.", _LOW),
    "consecutive_hysteresis": noted("bool", _SCALING),
    **dict.fromkeys(
        ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
        noted("number", _SCALING)),
    "opt_level": noted("any", _SCALING),
}  # fmt: skip

_BF16 = {
    "enabled": read("bool", "`jzero.master_weights` around the optimizer", tuning=True),
    "check_grad_overflow": read("bool", "`optax.apply_if_finite`"),
    "immediate_grad_update": noted(
        "bool", "Nothing to set: a gradient is added up when it is made."
    ),
    "bf16_master_weights_and_grads": only("bool", (False,), "Off: masters are float32.", _LOW),
    "bf16_optimizer_states": only("bool", (False,), "Off: moments are float32.", _LOW),
}

_AUTOCAST = {
    "enabled": read("bool", "a note: your model casts"),
    "dtype": read("text", "a note: your model casts; float16 is refused"),
    "lower_precision_safe_modules": noted(
        "list", "Belongs to the model: it says where its layers cast."
    ),
}
_DATA_TYPES = {
    "grad_accum_dtype": read("text", "`accumulate_dtype`, if there are microbatches"),
    "param_dtype": noted(
        "text", "Belongs to the model: parameters rest in the dtype in which it makes them."
    ),
    "buffer_dtype": noted("text", "Belongs to the model: buffers are leaves of your state."),
}
_RECOMPUTED = "Belongs to the model: jax.checkpoint around each layer says what is computed again."
_CHECKPOINTED = {
    "cpu_checkpointing": read("bool", "`offload_activations=jzero.PinnedHost()`"),
    "partition_activations": only(
        "bool", (False,), "Off.",
        "It divides activations over the devices of a model-parallel group: set it to false, and constrain "
        "them over a mesh axis of your own with jax.lax.with_sharding_constraint."),
    "contiguous_memory_optimization": noted("bool", _XLA.format("plans all memory")),
    "number_checkpoints": noted("int", _RECOMPUTED),
    "synchronize_checkpoint_boundary": noted("bool", _RECOMPUTED),
    "profile": noted("bool", _LOGGING),
}  # fmt: skip
_COMPILED = _XLA.format("compiles the whole step")
_COMPILE = {
    "offload_activation": read("bool", "`offload_activations=jzero.PinnedHost()`"),
    "offload_activation_pin_memory": _PIN,
    "passes": Key("list", _COMPILED, accepts=([],),
                  refused="They split sequences or layers: drop them, and use a mesh axis of your own."),
    **dict.fromkeys(
        ("offload_opt_states", "offload_parameters"),
        only("bool", (False,), "Off.",
              "Drop it, and use zero_optimization.offload_optimizer or offload_param.")),
    "free_activation_threshold": noted("int", _COMPILED),
    **dict.fromkeys(("backend", "kwargs", "mode", "options"), noted("any", _COMPILED)),  # torch.compile's
    **dict.fromkeys(
        ("enabled", "disable", "dynamic", "fullgraph", "deepcompile", "free_activation", "double_buffer",
         "symmetric_memory", "debug_log", "sync_before_reduce", "sync_after_reduce", "sync_before_allgather",
         "sync_after_allgather", "keep_int_input_tensors", "keep_all_input_tensors"),
        noted("bool", _COMPILED)),
}  # fmt: skip
_TENSOR_PARALLEL = {
    "autotp_size": only("int", (0, 1), "Off.", _TP),
    "tp_overlap_comm": noted("bool", "Off: nothing is tensor parallel."),
    **dict.fromkeys(("tp", "tensor_parallel"),
                    Key("object", accepts=(), inside="anything", refused=_TP)),
    **dict.fromkeys(
        ("preset_model", "partition_config", "dtype", "injection_policy_tuple", "keep_module_on_host",
         "replace_with_kernel_inject"), noted("any", "Off: nothing is tensor parallel.")),
}  # fmt: skip
_PARAMS = Key("object", inside="anything", becomes="its arguments: see above")
_OPTIMIZER = {
    "type": read("text", "`optimizer`, an optax transformation: see above"),
    "params": _PARAMS,
    "legacy_fusion": noted("bool", "Nothing to set: XLA fuses the update."),
}
_SCHEDULER = {
    "type": read("text", "`schedule`, an optax schedule: see above"),
    "params": _PARAMS,
}

_SECTIONS = {
    "": _TOP, "zero_optimization": _ZERO, "zero_optimization.offload_optimizer": _OFFLOAD_OPTIMIZER,
    "zero_optimization.offload_param": _OFFLOAD_PARAM, "fp16": _FP16, "bf16": _BF16,
    "torch_autocast": _AUTOCAST, "data_types": _DATA_TYPES, "activation_checkpointing": _CHECKPOINTED,
    "compile": _COMPILE, "tensor_parallel": _TENSOR_PARALLEL, "optimizer": _OPTIMIZER,
    "scheduler": _SCHEDULER,
}  # fmt: skip
KEYS = {
    f"{section}.{name}".lstrip("."): key
    for section, keys in _SECTIONS.items()
    for name, key in keys.items()
}

# Other names that DeepSpeed takes for a key, for what it is called above.
_SHORT = ("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold",
          "max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save",
          "module_granularity_threshold", "use_all_reduce_for_fetch_params",
          "allgather_sequential")  # fmt: skip
ALIASES = {
    "bfloat16": "bf16",
    **{f"zero_optimization.{name}": f"zero_optimization.stage3_{name}" for name in _SHORT},
}
