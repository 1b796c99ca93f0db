"""Every program of the table trains what `jax.jit` trains with the whole batch, or is refused by name.

Each at stage 3 on 8 devices, those of `zoo.CORE` in each stage and on each number of devices, and a sample of
the other settings; `run_zoo.py table` has all of them (experiments/exactness). Whole scripts run twice: as
their author wrote them on one device, and with jzero on several. What differs between the two is the line in
which the author wrote `jax.jit`, `nnx.jit` or `eqx.filter_jit`, which no longer says `donate_argnums`.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import random
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
import run_zoo
import small
import zoo
from jzero._compare import TOLERANCES
from zoo import Setting, scripts_pmap

PROGRAMS = [name for name in zoo.NAMES if not zoo.module_of(name).startswith("scripts")]
MESHES = ((1,), (2,), (4,), (8,), (2, 2), (2, 4))
# Where each of a program's items is written: findings A1 to A10 and B1 to B6, and the points of
# issue 13 as I1 to I5.
ITEMS = {f"{kind}{i}" for kind, num in (("A", 10), ("B", 6), ("I", 5)) for i in range(1, num + 1)}


@contextlib.contextmanager
def precision(dtype):
    """JAX's, for all threads, and not in a context: callbacks run in XLA's threads."""
    jax.config.update("jax_enable_x64", dtype == "float64")
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


def default(name):
    """The widest dtype on 8 devices."""
    program = zoo.get(name)
    return Setting(3, (8 // program.automatic,), program.exact_dtypes[-1])


def table():
    """A case's id, its program, and its setting or what differs from the default one.

    Programs are built when a case runs: every worker of pytest would build all of them to collect it.
    """
    for name in zoo.NAMES:
        yield name, name, {}
    for i, name in enumerate(zoo.CORE):
        # Each stage and each number of devices, and both in all pairs over four programs.
        for stage in range(4):
            num = 2 ** ((stage + i) % 4)
            yield f"{name}, stage {stage}, {num} devices", name, {"stage": stage, "axes": (num,)}
    more = {"stage": 2, "axes": (4,), "accumulate": 2}
    yield "pmap_style, stage 2, 4 devices, 2 microbatches", "pmap_style", more
    draw = random.Random(13)
    found = 0
    while found < 5:  # of those that are not slow, the same in every run
        name = draw.choice([name for name in zoo.NAMES if name not in zoo.SLOW])
        dtype = zoo.get(name).exact_dtypes[-1]
        setting = Setting(draw.randrange(4), draw.choice(MESHES), dtype, draw.choice((1, 1, 2)))
        if zoo.applies(zoo.get(name), setting):
            found += 1
            yield f"{name}, {setting}", name, dataclasses.asdict(setting)


TABLE = {case: (name, changes) for case, name, changes in table()}
FAST = [
    "own_shard_map", "convolutions_of_every_kind", "td3_in_microbatches", "mlp, stage 1, 2 devices",
    "pmap_style, stage 2, 4 devices, 2 microbatches", "tied_embeddings", "nlp_seq",
]  # fmt: skip


@pytest.mark.slow(but=FAST)
@pytest.mark.parametrize("case", TABLE)
def test_trains_as_on_one_device(case):
    name, changes = TABLE[case]
    setting = dataclasses.replace(default(name), **changes)
    with precision(setting.dtype):
        assert zoo.verdict(name, setting) is None


# Those whose programs XLA's simplifications change most: of slices, gathers, sorts, scans and look-ups.
OPTIMIZED = (
    "slice_of_rows_at_a_moving_place", "minibatch_from_a_table", "table_of_positions",
    "window_behind_the_largest_loss", "windows_under_vmap", "hardest_rows", "sorted_rows",
    "median_of_the_losses", "own_microbatches", "discounted_returns", "state_space_model", "moco_queue",
    "moe_with_a_capacity",
)  # fmt: skip


@pytest.mark.slow
def test_trains_so_when_compiled_as_users_compile(tmp_path):
    """In a process of its own, since XLA reads its flags once; all programs are in experiments/exactness."""
    options = ["--stages", "3", "--meshes", "8", "--dtypes", "float64", "--microbatches", "1"]
    where = ["--name", "x", "--out", str(tmp_path), "--names", *OPTIMIZED]
    subprocess.run([sys.executable, run_zoo.__file__, "table", *options, *where], check=True)
    lines = map(json.loads, (tmp_path / "x.jsonl").read_text().splitlines())
    found = {line["family"]: line for line in lines}
    assert all(line["optimized"] for line in found.values())
    assert {name: x["result"] for name, x in found.items()} == dict.fromkeys(OPTIMIZED, "equal")


# -- the programs by themselves, on one device --------------------------------------------------------------
@pytest.mark.slow(but=["cond_on_gradients", "per_example_outputs"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_is_deterministic_finite_and_sensitive_to_its_last_rows(name):
    program = zoo.get(name)
    run = zoo.reference(program)
    batches = program.batches(zoo.NUM_STEPS)

    once, again = (zoo.train_on(program, run, batches, "float32") for _ in range(2))
    assert bits(once) == bits(again)
    assert zoo.differences(once, again, program) == []
    floats = [x for x in jax.tree.leaves((once.outputs, once.state)) if x.dtype.kind in "fc"]
    assert all(np.isfinite(leaf).all() for leaf in floats if not has_bad_rows(batches))

    other = zoo.train_on(program, run, with_other_rows(program, batches), "float32")
    pairs = zoo.Training([], once.state, []), zoo.Training([], other.state, [])
    assert zoo.differences(*pairs, program), "the last rows do not reach the state"


def bits(training: zoo.Training) -> list[bytes]:
    return [x.tobytes() for x in jax.tree.leaves((training.outputs, training.state))]


def has_bad_rows(batches: list[Any]) -> bool:
    """Some programs feed rows that are not finite, and return losses that are not."""
    rows = [leaf for leaf in jax.tree.leaves(batches) if isinstance(leaf, np.ndarray)]
    return any(leaf.dtype.kind == "f" and not np.isfinite(leaf).all() for leaf in rows)


def with_other_rows(program: zoo.Program, batches: list[Any]) -> list[Any]:
    """The last eighth of each batch's rows, at least one, are rows of the batch before it."""
    names = list(inspect.signature(program.step).parameters)[1:]
    dims = [program.row_dims.get(name, 0) for name in names[: len(batches[0])]]

    def mixed(rows: Any, others: Any, dim: int | None) -> Any:
        if not isinstance(rows, np.ndarray) or dim is None or rows.ndim <= dim:
            return rows
        num = max(1, rows.shape[dim] // 8)
        kept = np.take(rows, range(rows.shape[dim] - num), axis=dim)
        return np.concatenate([kept, np.take(others, range(num), axis=dim)], axis=dim)

    return [
        tuple(
            jax.tree.map(functools.partial(mixed, dim=dim), *pair)
            for *pair, dim in zip(args, batches[i - 1], dims, strict=True)
        )
        for i, args in enumerate(batches)
    ]


@pytest.mark.slow(but=7)
@pytest.mark.parametrize("name", PROGRAMS)
def test_state_and_inputs_keep_their_types_in_each_dtype(name):
    program = zoo.get(name)
    for dtype in program.exact_dtypes:
        with jax.enable_x64(dtype == "float64"), zoo.configured(program):
            state = jax.eval_shape(lambda dtype=dtype: program.init(dtype))
            (args,) = program.batches(1, dtype)
            found = jax.eval_shape(zoo.reference(program), state, *args)
        new = found[0] if program.returns_metrics else found
        assert jax.tree.map(type_of, new) == jax.tree.map(type_of, state)
        assert all(is_on_the_host(leaf) for leaf in jax.tree.leaves(args))


def type_of(leaf: Any) -> tuple[Any, ...]:
    return leaf.shape, leaf.dtype


def is_on_the_host(leaf: Any) -> bool:
    """NumPy stands for the whole batch on every process; keys can only be JAX's."""
    typed = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return not isinstance(leaf, jax.Array) or typed or leaf.shape == (2,)


def test_every_item_has_a_program():
    """Also among those that are not slow."""
    names = set(zoo.NAMES) - zoo.SLOW
    assert {item for name in names for item in zoo.get(name).covers.split()} >= ITEMS


def test_differences_name_the_place_and_the_size():
    def training(loss: float, count: int) -> zoo.Training:
        outputs = [{"loss": np.float64(loss), "count": np.int32(count)}]
        return zoo.Training(outputs, {"params": np.ones(3)}, [])

    program = zoo.get("rmse")
    assert zoo.differences(training(1.0, 3), training(1.0 + 1e-12, 3), program) == []
    problems = zoo.differences(training(1.0, 3), training(1.0 + 1e-8, 4), program)
    assert len(problems) == 2
    assert re.search(
        r"step 0 outputs\['loss'\].*1\.00000001 instead of 1\.0", problems[0] + problems[1]
    )
    assert any("outputs['count']" in p and "4 instead of 3" in p for p in problems)


def test_one_call_too_many_is_a_difference():
    def training(num: int) -> zoo.Training:
        return zoo.Training([{}], {}, [{"values": [np.zeros(2)] * num, "printed": ""}])

    (problem,) = zoo.differences(training(1), training(8), zoo.get("debug_print"))
    assert problem == "step 0 has 8 calls of the host instead of 1"


# -- scripts ------------------------------------------------------------------------------------------------
@pytest.mark.slow(but=["3-8-haiku_classifier", "3-8-nnx_loop"])
@pytest.mark.parametrize("name", zoo.SCRIPTS)
@pytest.mark.parametrize(("stage", "num_devices"), [(3, 8), (1, 4)])
def test_trains_as_its_author_does(name, stage, num_devices):
    """All that a script is left with: states, keys, metrics, what it evaluated, sampled or read back."""
    actual = run(name, sharding(stage, num_devices, **zoo.SCRIPTS[name].options))
    if stage == 3:  # At stage 1 what a script is left with may be parameters alone.
        assert any(is_sharded(leaf, num_devices) for leaf in jax.tree.leaves(actual))
    tolerance = TOLERANCES[zoo.SCRIPTS[name].rounded_to]
    zoo.assert_trees_close(zoo.to_host(actual), as_written(name), tolerance, name)


@pytest.mark.slow
def test_a_wrong_batch_is_noticed():
    def forgetful(step):
        calls = []

        def call(state, *batch):
            calls.append(batch)
            return jax.jit(step)(state, *calls[max(0, len(calls) - 2)])

        return call

    actual = zoo.to_host(run("svi_class", forgetful))
    with pytest.raises(AssertionError, match="elements differ"):
        zoo.assert_trees_close(actual, as_written("svi_class"), zoo.FP32, "svi_class")


def sharding(stage: int, num_devices: int, **options: Any) -> Any:
    """What a script takes in place of `jax.jit`; jzero donates by itself."""
    mesh = small.mesh(data=num_devices)

    def jit(
        step: Any = None, *, donate_argnums: Any = (), donate_argnames: Any = (), **said: Any
    ) -> Any:
        return small.shard_train_step(step, stage=stage, mesh=mesh, **said, **options)

    return jit


def run(name: str, jit: Any) -> Any:
    with jax.numpy_rank_promotion("allow"):  # JAX's default, for which scripts are written
        return zoo.SCRIPTS[name].run(jit)


@functools.cache
def as_written(name: str) -> Any:
    return zoo.to_host(run(name, zoo.SCRIPTS[name].author))


def is_sharded(leaf: Any, num_devices: int) -> bool:
    sharding = getattr(leaf, "sharding", None)
    return (
        sharding is not None
        and not sharding.is_fully_replicated
        and len(sharding.device_set) == num_devices
    )


@pytest.mark.slow
def test_metrics_that_pmap_stacks_are_refused():
    """nlp_seq's step as it is: each device's sums, one beside the other in what pmap returns."""
    program = zoo.get("nlp_seq")
    step = small.shard_train_step(scripts_pmap.nlp_seq_step, axes=jzero.Axes(axis_name="batch"))
    with pytest.raises(jzero.StepError, match=r"output\[1\]\['accuracy'\].* differ"):
        step(program.init(), *program.batches(1)[0])
