"""Every family of steps trains what `jax.jit` trains with the whole batch, or is refused by name.

Each that is no near relative of another at stage 3 on 8 devices, and a sample of the other settings;
`make exactness` runs all of them (experiments/exactness).
"""

import random

import jax
import pytest

import exactness
from exactness._check import Setting, applies, verdict

# Near relatives of others, too, or slow to compile.
LONG = {
    "dp_sgd_by_map", "dp_sgd_by_map_in_batches", "dp_sgd_by_scan", "maml_by_scan", "maml_by_map",
    "transformer_scanned", "transformer_unrolled", "rope", "jax_nn_attention", "sliding_window_and_alibi",
    "jax_nn_attention_bias_and_mask", "mezo_with_adam", "optax_backtracking_linesearch", "accept_or_reject",
    "conjugate_gradients", "sophia_g", "clip", "simclr", "memory_bank", "gradient_noise", "cumulated_rows",
    "rows_27", "affinities_between_rows", "time_major_without_a_word", "class_weights", "jitted_step",
    "while_over_parameters", "switch_on_a_count", "sum_over_global_batch", "pure_callback_on_a_scalar",
    "sorts_over_features", "selects_and_windows", "embeddings", "lstm", "reshapes_of_the_batch",
    "quantised_products", "hardest_rows", "slice_of_rows_at_a_moving_place", "windows_of_rows", "sorted_rows",
    "reversed_rows", "halves_of_the_batch", "first_rows_as_pictures", "ttt_layer", "moe_with_balance_loss",
    "loss_weights_from_a_vector_of_losses", "rmse", "masked_mean", "returned_key", "one_raw_key_for_each_row",
    "dropout_raw_key", "dropout_rbg_key", "sam", "loss_scaling", "schedules_and_clipping", "polyak_step_size",
    "histogram", "welford",
}  # fmt: skip
assert set(exactness.NAMES) > LONG
SLOW = exactness.SLOW | LONG
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
    return pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())


@pytest.mark.parametrize("name", list(map(marked, exactness.NAMES)))
def test_trains_as_on_one_device(name):
    axes = (8 // exactness.get(name).automatic,)
    assert verdict(name, Setting(3, axes, widest(name))) is None


def sample(num):
    """Settings of families that are not slow, the same in every run."""
    draw = random.Random(13)
    found: list[tuple[str, Setting]] = []
    while len(found) < num:
        name = draw.choice([name for name in exactness.NAMES if name not in SLOW])
        setting = Setting(
            draw.randrange(4), draw.choice(MESHES), widest(name), draw.choice((1, 1, 2))
        )
        if applies(exactness.get(name), setting):
            found.append((name, setting))
    return found


@pytest.mark.parametrize(("name", "setting"), sample(8), ids=str)
def test_trains_so_in_other_settings(name, setting):
    assert verdict(name, setting) is None
