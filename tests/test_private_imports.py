"""Private modules that tests import: each with a reason, none without being listed, and none too many.

Tests call what users call. What is listed as going goes with those modules; a new test needs a reason.
"""

import ast
import pathlib

import pytest

pytestmark = pytest.mark.one_release

TESTS = pathlib.Path(__file__).parent
ENGINE, EXECUTOR = "goes with the engine", "goes with the executor"
IR = "tests the IR, or a pass on it, by itself"
CONSTANT = "sets a threshold that only large models reach"
FORMAT = "tests a format, a protocol or what it does after a fault by itself"
KERNEL = "tests kernels by themselves"
PARSER = "tests what reads text, numbers or compiled programs by itself"
SHARED = "compares or formats as jzero does"
DOCTESTS = "runs the examples in docstrings"

# Why a module may be imported: of the names that it begins with, the longest says it.
WHY = {
    "sharding.analysis": ENGINE, "sharding.partition": IR,
    "sharding.analysis._residuals": CONSTANT, "sharding.analysis._traffic": IR,
    "sharding.cut._layer_parts": CONSTANT,
    "sharding.cut": IR, "sharding.passes": IR, "sharding.plan": IR, "ir": IR,
    "tracing": IR, "_components": IR,
    "segments": EXECUTOR, "offload": EXECUTOR, "offload.memory": EXECUTOR,
    "offload._bandwidth": PARSER, "offload._links": PARSER, "offload._policy": DOCTESTS,
    "offload.kernels": KERNEL, "offload.nvme": FORMAT, "offload.schedule": IR, "_memory_kinds": CONSTANT,
    "checkpoint": FORMAT, "weights": FORMAT, "processes": FORMAT, "_json": FORMAT,
    "cli": PARSER, "preflight": PARSER, "reports": PARSER, "targets": PARSER, "deepspeed": PARSER,
    "_compare": SHARED, "_folded": SHARED, "_quantities": SHARED, "_tested": SHARED,
    "_placement": SHARED, "_step": DOCTESTS, "_step_types": SHARED,
}  # fmt: skip

MAY = {
    "exactness/_compare": "_compare",
    "facts": "ir._dataflow ir._regions ir._rules sharding.analysis._product_reads tracing._jaxpr",
    "faults/_buckets": "checkpoint._bucket checkpoint._lock",
    "faults/_scenarios": "checkpoint._bucket",
    "faults/_scripts": "checkpoint._bucket checkpoint._lock checkpoint._mirror checkpoint._seal cli._main",
    "golden/_record": "sharding.plan._wire",
    "golden/_watch": "offload.execute._stream",
    "gpu/test_checks": "sharding.plan._host_memory",
    "gpu/test_host": "offload._bandwidth offload.kernels._host_update",
    "gpu/test_layers": "sharding.analysis._residuals",
    "handing_over": "offload.kernels._host_update",
    "host_updates":
        "offload._host_engine offload._host_step offload.kernels._host_update offload.kernels._machine "
        "offload.memory._addresses",
    "hostile_checkpoints": "checkpoint._inspect checkpoint._seal weights._export",
    "nvme_damage": "offload.memory._filling",
    "nvme_state":
        "offload.nvme._aligned offload.nvme._files offload.nvme._header offload.nvme._layout "
        "offload.nvme._sweep",
    "partitioned":
        "ir._layout ir._regions ir._starts sharding.partition._partition tracing._jaxpr tracing._rewrite",
    "process_worker": "checkpoint._chunks offload.memory._available processes._agreement",
    "refuse_like_a_gpu": "offload.memory._pinned_leaf",
    "sampling/noise": "tracing._jaxpr",
    "sampling/settings": "sharding.passes._codes sharding.plan._wire",
    "test_activations":
        "ir._regions offload.execute._executor offload.schedule._ops segments._programs "
        "sharding.analysis._residuals sharding.cut._layer_parts sharding.plan._host_memory tracing._jaxpr",
    "test_activations_on_gpus": "sharding.analysis._residuals",
    "test_bandwidth":
        "cli._main offload._bandwidth offload._links offload.kernels._machine reports._bandwidth",
    "test_bench": "targets._target",
    "test_blocks": "sharding.passes._codes",
    "test_bucket": "checkpoint._bucket",
    "test_bucket_faults": "checkpoint._bucket",
    "test_buckets":
        "checkpoint._bucket checkpoint._bucket_steps checkpoint._lock checkpoint._reading checkpoint._seal "
        "checkpoint._temporary cli._main",
    "test_call_log": "processes._call_log",
    "test_checkpoint": "checkpoint._restore checkpoint._saver",
    "test_checkpoint_faults":
        "checkpoint._inspect checkpoint._reading checkpoint._stored checkpoint._writing weights._export",
    "test_checkpoint_memory":
        "checkpoint._chunks checkpoint._inspect checkpoint._ocdbt checkpoint._reading checkpoint._writing",
    "test_checkpoint_writers": "checkpoint._lock checkpoint._seal checkpoint._writing cli._main",
    "test_cli": "checkpoint._lock cli._main",
    "test_clocks":
        "preflight._clocks preflight._hlo preflight._kernels preflight._schedule targets._links "
        "targets._target",
    "test_coded_weights": "sharding.plan._make",
    "test_collected_rows": "ir._products ir._regions",
    "test_components": "_components",
    "test_data_on_processes": "checkpoint._grain checkpoint._iterators",
    "test_dataflow":
        "ir._dataflow ir._regions sharding.analysis._new_leaves sharding.analysis._product_reads "
        "sharding.plan._make tracing._jaxpr",
    "test_deepspeed": "deepspeed._table",
    "test_describe": "_folded _quantities reports._lines reports._tables",
    "test_differences": "tracing._differences tracing._jaxpr tracing._rewrite",
    "test_dims": "segments._partitioned sharding.analysis._residuals sharding.partition._movement",
    "test_dispatches":
        "offload.execute._stream preflight._dispatches preflight._examined "
        "segments._programs",
    "test_donate": "_quantities",
    "test_early_updates":
        "offload._early_turns offload._host_step offload._layer_schedule offload.execute._executor "
        "offload.kernels._host_update offload.schedule._ops sharding.cut._layer_parts",
    "test_eqx": "_compare",
    "test_estimate": "_quantities reports._presets",
    "test_estimate_infinity": "_quantities reports._formulas reports._step_time",
    "test_estimate_offload": "_quantities",
    "test_eval_step": "_compare",
    "test_examples":
        "_components _folded _step checkpoint._checkpointer checkpoint._restore deepspeed._schedules "
        "deepspeed._transforms deepspeed._translate offload._policy offload.memory._leaf_array "
        "preflight._preflight preflight._targets reports._bandwidth reports._describe reports._estimate "
        "reports._lines tracing._eqx tracing._keys tracing._local tracing._nnx tracing._precision",
    "test_export": "cli._main weights._export weights._safetensors weights._sources",
    "test_export_faults": "checkpoint._stream weights._export weights._import weights._publish",
    "test_first_hour": "reports._tables",
    "test_fused_loops":
        "segments._planned sharding.cut._fused_loops sharding.cut._growing_loop tracing._jaxpr "
        "tracing._rewrite",
    "test_golden":
        "_step_types ir._rules ir._writer offload._layer_programs offload.execute._stream "
        "segments._partitioned sharding.passes._codes",
    "test_growth": "preflight._preflight",
    "test_hf_config": "reports._hf_config",
    "test_host_array": "offload.memory._available offload.memory._placing",
    "test_host_beside_tensor_axes": "offload._file_layout",
    "test_host_cpu_step":
        "_quantities offload._bandwidth offload._host_engine offload._host_step offload.memory._available "
        "offload.memory._pinned_leaf sharding.plan._layout",
    "test_host_interrupted": "offload._host_step",
    "test_host_memory": "offload.memory._available",
    "test_host_update":
        "offload.kernels._host_update offload.kernels._kernel offload.kernels._loops "
        "offload.kernels._machine offload.kernels._roads offload.memory._addresses",
    "test_host_update_ops":
        "offload.kernels._host_update offload.kernels._kernel offload.kernels._ops offload.kernels._roads "
        "offload.kernels._writer",
    "test_host_update_optimizers": "offload.kernels._host_update offload.kernels._roads",
    "test_host_update_xla":
        "offload.kernels._compilers offload.kernels._host_update offload.kernels._xla_loops",
    "test_hostile_checkpoints": "checkpoint._inspect checkpoint._seal cli._main weights._export",
    "test_hostile_files":
        "_json checkpoint._inspect weights._export weights._import weights._safetensors weights._sources",
    "test_hostile_tiles": "offload.nvme._layout",
    "test_infer_from_host": "_compare offload.execute._stream sharding.cut._layer_parts",
    "test_inputs_first": "_compare segments._partitioned segments._programs tracing._jaxpr",
    "test_interchange":
        "ir._loops sharding.analysis._traffic sharding.cut._interchange sharding.cut._layer_parts "
        "sharding.cut._layers tracing._jaxpr tracing._rewrite",
    "test_ir_analysis": "ir._dataflow ir._regions",
    "test_ir_layout": "ir._layout targets._links targets._target tracing._jaxpr",
    "test_ir_loops": "ir._loops ir._writer tracing._jaxpr",
    "test_ir_rules":
        "ir._factors ir._layout ir._products ir._rules sharding.analysis._frames tracing._jaxpr "
        "tracing._rewrite",
    "test_jaxpr_types": "tracing._jaxpr tracing._rewrite tracing._types",
    "test_layer_major": "sharding.analysis._residuals sharding.cut._layer_parts sharding.passes._order",
    "test_layers_on_gpus": "ir._regions preflight._schedule sharding.cut._layer_parts targets._target",
    "test_leaf_array": "sharding.plan._wire",
    "test_memory": "segments._partitioned",
    "test_messages": "segments._program sharding.plan._options targets._target",
    "test_microbatches_in_time":
        "ir._layout ir._loops segments._partitioned sharding.partition._time tracing._jaxpr",
    "test_min_cut": "sharding.cut._min_cut",
    "test_nnx": "_compare",
    "test_nvme": "checkpoint._writing offload.nvme._aligned",
    "test_nvme_faults":
        "offload.kernels._tiled_update offload.memory._filling offload.nvme._aligned offload.nvme._files",
    "test_nvme_file":
        "offload.nvme._aligned offload.nvme._checksum offload.nvme._direct offload.nvme._file "
        "offload.nvme._files offload.nvme._header offload.nvme._layout offload.nvme._sweep",
    "test_nvme_folders":
        "offload.nvme._direct offload.nvme._file offload.nvme._files offload.nvme._folders "
        "offload.nvme._header offload.nvme._making",
    "test_nvme_gradients": "offload._gradient_writes offload.nvme._files offload.nvme._gradients",
    "test_nvme_params": "offload._file_reads offload._file_run offload.memory._pinned_pool",
    "test_nvme_params_faults": "offload.memory._file_storage offload.nvme._job_threads",
    "test_nvme_starts": "offload.memory._leaf_array offload.nvme._folders",
    "test_nvme_store":
        "offload.kernels._tiles offload.memory._file_storage offload.memory._filling "
        "offload.memory._leaf_array offload.memory._nvme_store offload.memory._storage offload.nvme._aligned "
        "offload.nvme._files offload.nvme._header",
    "test_nvme_sweep": "offload.nvme._aligned offload.nvme._sweep",
    "test_objects": "_compare",
    "test_offload": "_quantities offload.execute._stream",
    "test_offload_params":
        "offload.execute._stream segments._programs sharding.analysis._residuals "
        "sharding.analysis._traffic sharding.cut._layer_parts",
    "test_offload_schedule":
        "_memory_kinds offload.schedule._folds offload.schedule._ops offload.schedule._schedule "
        "preflight._dispatches sharding.analysis._residuals",
    "test_one_order": "segments._planned sharding.analysis._residuals",
    "test_options": "sharding.analysis._residuals",
    "test_partition": "ir._layout tracing._jaxpr",
    "test_partition_choices": "ir._layout",
    "test_partition_conversions": "ir._layout sharding.partition._writer tracing._jaxpr tracing._types",
    "test_partition_costs":
        "ir._layout sharding.analysis._traffic sharding.partition._partition tracing._jaxpr "
        "tracing._rewrite",
    "test_partition_rules":
        "ir._layout sharding.partition._movement sharding.partition._partition sharding.partition._writer "
        "tracing._jaxpr tracing._rewrite",
    "test_partitioned_step":
        "segments._partitioned sharding.analysis._traffic sharding.passes._inputs_first "
        "sharding.passes._waits tracing._jaxpr",
    "test_passes":
        "sharding.passes._after_loops sharding.passes._before_loops sharding.passes._in_place "
        "sharding.passes._inputs_first sharding.passes._late_sums sharding.passes._one_order "
        "sharding.passes._order sharding.passes._prefetch sharding.passes._waits "
        "sharding.passes._whole_stacks tracing._jaxpr",
    "test_plan_of_whole": "sharding.plan._trace",
    "test_prefetch": "segments._planned tracing._jaxpr",
    "test_preflight": "_quantities sharding.passes._waits targets._target",
    "test_processes": "checkpoint._inspect",
    "test_program": "tracing._jaxpr tracing._printed",
    "test_reductions":
        "sharding.passes._before_loops sharding.passes._order sharding.plan._layout tracing._jaxpr",
    "test_repeats": "_placement",
    "test_rivals": "_compare",
    "test_sampled": "sharding.passes._gather_codes sharding.passes._reduce_codes",
    "test_scaled_and_sparse": "ir._rules",
    "test_schedule": "preflight._schedule targets._target",
    "test_starts": "ir._starts tracing._jaxpr",
    "test_targets":
        "preflight._bandwidth preflight._wires sharding.passes._turns targets._links targets._target",
    "test_tensor_axes": "segments._partitioned sharding.passes._order sharding.plan._wire tracing._jaxpr",
    "test_tested": "_tested",
    "test_testing": "_compare",
    "test_tiled_update":
        "offload.kernels._host_update offload.kernels._loops offload.kernels._tiled_update "
        "offload.kernels._tiles offload.memory._addresses",
    "test_tiles": "sharding.passes._cuts tracing._jaxpr",
    "test_tpu": "preflight._schedule preflight._targets preflight._tpu_text targets._target",
    "test_typed": "_step_types",
    "test_views_of_pinned": "offload.memory._pinned_leaf sharding.plan._layout sharding.plan._leaves",
    "test_weight_buckets":
        "checkpoint._bucket checkpoint._seal checkpoint._stream cli._main weights._publish",
    "test_weight_layouts": "checkpoint._stored checkpoint._stream cli._main weights._axes weights._sources",
    "test_wire": "sharding.passes._codes",
    "test_wire_passes":
        "sharding.passes._codes sharding.passes._gather_codes sharding.passes._keep_gathered "
        "sharding.passes._loop_gathers sharding.passes._reduce_codes sharding.passes._reduce_dtype "
        "sharding.passes._waits sharding.passes._weight_codes tracing._jaxpr",
    "test_wires":
        "_quantities preflight._bandwidth preflight._hlo preflight._kernels preflight._schedule "
        "preflight._wires targets._target",
    "whole_programs/_program": "_compare",
    "zoo/__init__": "_compare",
    "zoo/_compare": "_compare",
    "zoo/_entry": "_compare",
    "zoo/scripts_eqx": "_compare",
    "zoo/scripts_nnx": "_compare",
}  # fmt: skip


def private_imports(source: str) -> set[str]:
    """Modules of jzero that begin with an underscore, or are in one that does."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            within = is_private(node.module)
            names = [node.module if within else f"{node.module}.{a.name}" for a in node.names]
        else:
            continue
        found |= {name.removeprefix("jzero.") for name in names if is_private(name)}
    return found


def is_private(name: str) -> bool:
    package, *rest = name.split(".")
    return package == "jzero" and any(part.startswith("_") for part in rest)


def why(module: str) -> str:
    known = [name for name in WHY if module == name or module.startswith(f"{name}.")]
    return WHY[max(known, key=len)]


def imports_of_tests() -> dict[str, set[str]]:
    paths = sorted(TESTS.rglob("*.py"))
    found = {
        p.relative_to(TESTS).with_suffix("").as_posix(): private_imports(p.read_text())
        for p in paths
    }
    return {file: modules for file, modules in found.items() if modules}


def test_private_modules_are_imported_for_a_reason_and_no_more():
    found, listed = imports_of_tests(), {file: set(text.split()) for file, text in MAY.items()}
    pairs = [(file, module) for file, modules in found.items() for module in modules]
    wanted = [(file, module) for file, modules in listed.items() for module in modules]
    assert sorted({*pairs} - {*wanted}) == [], "not listed: call what users call, or say why"
    assert sorted({*wanted} - {*pairs}) == [], "listed, and no longer imported"


def test_every_module_has_a_reason_and_every_reason_a_module():
    used = {max((n for n in WHY if f"{m}.".startswith(f"{n}.")), key=len)
            for text in MAY.values() for m in text.split() if why(m)}  # fmt: skip
    assert used == {*WHY}


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("import jzero\nfrom jzero import testing\nfrom jzero import grad", set()),
        ("from jzero import _compare, testing", {"_compare"}),
        ("from jzero.sharding.passes._order import order", {"sharding.passes._order"}),
        ("def f():\n    import jzero.sharding.passes._order as q", {"sharding.passes._order"}),
        ("from jzero.ir import _rows, _work", {"ir._rows", "ir._work"}),
    ],
)  # fmt: skip
def test_what_counts_as_a_private_import(source, modules):
    assert private_imports(source) == modules
