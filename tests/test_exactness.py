"""Every family of steps trains what `jax.jit` trains with the whole batch, or is refused by name.

One of each kind at stage 3 on 8 devices, and a sample of the other settings; `make exactness` runs all of
them (experiments/exactness).
"""

import json
import pathlib
import random
import subprocess
import sys

import jax
import pytest

import exactness
from exactness._check import Setting, applies, verdict

ROOT = pathlib.Path(__file__).parents[1]
# By default, each item of the findings and each kind of step among them; the seeds of test_sampled.py draw
# most of what the others do.
BY_DEFAULT = {
    "time_major", "nested_arguments", "rows_27_that_couple", "pallas_kernel", "fft_in_the_update",
    "lookup_in_microbatches_beside_an_automatic_axis", "own_shard_map", "written_for_pmap",
    "written_for_pmap_and_not_named", "coupled_loss_in_2_microbatches", "state_alone", "cond_on_the_loss",
    "while_until_all_rows_converge", "cond_for_each_row", "own_microbatches", "integer_metrics",
    "bits_of_the_batch", "python_step_outputs", "debug_print", "io_callback_in_order",
    "io_callback_with_a_result", "nnx_functional", "equinox_filter_jit", "haiku", "maml_on_the_whole_batch",
    "custom_vjp_that_couples_rows", "custom_jvp_and_reversed_gradients", "ghost_batch_norm",
    "experts_in_groups", "host_function_of_each_row", "resnet_with_batch_norm",
    "convolutions_of_every_kind", "state_space_model", "moe_with_a_capacity", "ppo", "float8_products",
    "median_of_the_losses", "worst_row", "discounted_returns", "dp_sgd_by_vmap", "maml_by_vmap",
    "one_row_at_a_time", "weighted_sum_over_sum_of_weights", "clip_where_rows_equal_features", "moco_queue",
    "dropout_typed_key",
    "dropout_key_in_the_state", "one_typed_key_for_each_row", "rng_bit_generator",
    "accept_or_reject_in_microbatches", "reduce_on_plateau", "custom_linear_solve", "td3_in_microbatches",
    "bf16_moments_on_the_host", "batch_norm", "float8_amax_history", "grouped_queries",
    "scaled_products", "sparse_arrays",
}  # fmt: skip
MESHES = ((1,), (2,), (4,), (8,), (2, 2), (2, 4))


@pytest.fixture(autouse=True, scope="module")
def _double():
    """For all threads, and not for a context: callbacks run in XLA's threads."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def widest(name):
    return exactness.get(name).exact_dtypes[-1]


def marked(name):
    return pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow)


@pytest.mark.slow(but=["own_shard_map", "convolutions_of_every_kind", "td3_in_microbatches"])
@pytest.mark.parametrize("name", list(map(marked, exactness.NAMES)))
def test_trains_as_on_one_device(name):
    axes = (8 // exactness.get(name).automatic,)
    assert verdict(name, Setting(3, axes, widest(name))) is None


def sample(num):
    """Settings of families that are not slow, the same in every run."""
    draw = random.Random(13)
    found: list[tuple[str, Setting]] = []
    while len(found) < num:
        name = draw.choice([name for name in exactness.NAMES if name not in exactness.SLOW])
        setting = Setting(
            draw.randrange(4), draw.choice(MESHES), widest(name), draw.choice((1, 1, 2))
        )
        if applies(exactness.get(name), setting):
            found.append((name, setting))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "setting"), sample(5), ids=str)
def test_trains_so_in_other_settings(name, setting):
    assert verdict(name, setting) is None


# Those whose programs XLA's simplifications change most: of slices, gathers, sorts, scans and look-ups.
OPTIMIZED = (
    "slice_of_rows_at_a_moving_place", "minibatch_from_a_table", "table_of_positions",
    "window_behind_the_largest_loss", "windows_under_vmap", "hardest_rows", "sorted_rows",
    "median_of_the_losses", "every_other_row", "own_microbatches", "discounted_returns",
    "state_space_model", "moco_queue", "moe_with_a_capacity",
)  # fmt: skip


@pytest.mark.slow
def test_trains_so_when_compiled_as_users_compile(tmp_path):
    """In a process of its own, since XLA reads its flags once; all families are in experiments/exactness."""
    script = ROOT / "experiments" / "exactness" / "run.py"
    options = ["--stages", "3", "--meshes", "8", "--dtypes", "float64", "--microbatches", "1"]
    command = [
        sys.executable,
        script,
        *options,
        "--name",
        "x",
        "--out",
        tmp_path,
        "--families",
        *OPTIMIZED,
    ]
    subprocess.run(command, check=True, cwd=ROOT)
    lines = map(json.loads, (tmp_path / "x.jsonl").read_text().splitlines())
    found = {line["family"]: line for line in lines}
    assert all(line["optimized"] for line in found.values())
    assert {name: line["result"] for name, line in found.items()} == dict.fromkeys(
        OPTIMIZED, "equal"
    )
