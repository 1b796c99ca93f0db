"""Products of scaled 8-bit numbers and of sparse arrays move no rows; mxfp8 as `jax.nn` has it, trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scaled_products  # noqa: F401 (it is what runs jax.nn.scaled_matmul here)
import small
import zoo
from zoo import _parts

ROWS, WIDTH = 8 * 32, 64  # Gradients of weights sum over rows, with a scale for each 32 of them.


def mxfp8():
    def product(x, w):
        configs = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3
        return jax.nn.scaled_dot_general(
            x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32, configs=configs
        )

    def step(state, x, wanted):
        def loss_fn(params):
            found = product(jax.nn.relu(product(x, params["up"])), params["down"])
            return jnp.square(found - wanted).mean(), {}

        return _parts.learn(state, loss_fn)

    state = _parts.start(
        {name: _parts.kernel(len(name), (WIDTH, WIDTH), jnp.float32) for name in ("up", "down")}
    )
    return step, state, _parts.normals((ROWS, WIDTH), (ROWS, WIDTH))(3, np.float32)


def of_family(name):
    family, dtype = zoo.get(name), jnp.dtype("float32")
    return family.step, family.init(dtype), family.batches(3, dtype)


STEPS = {
    "mxfp8": mxfp8,
    "scaled_products": lambda: of_family("scaled_products"),
    "sparse_arrays": lambda: of_family("sparse_arrays"),
    "sparse_arrays_made_in_the_step": lambda: of_family("sparse_arrays_made_in_the_step"),
}


def moved(name):
    step, state, batches = STEPS[name]()
    return {
        m.operation for m in small.shard_train_step(step).describe(state, *batches[0]).movements
    }


@pytest.mark.parametrize("name", STEPS)
def test_no_rows_are_moved(name):
    assert not moved(name)


@pytest.mark.slow(but=[0, 2])
@pytest.mark.parametrize(
    ("name", "num_rows", "options"),
    [
        # 16 rows of each device are half a block, and gathered.
        ("mxfp8", ROWS, {"accumulate": 2}),
        ("sparse_arrays", 27, {}),
        ("sparse_arrays", 32, {"accumulate": 2}),
        ("sparse_arrays_made_in_the_step", 27, {"accumulate": 2}),
    ],
    ids=str,
)
def test_trains_as_on_one_device(name, num_rows, options):
    step, state, batches = STEPS[name]()
    expected, train_step = state, small.shard_train_step(step, stage=3, **options)
    for k, args in enumerate(batches):
        args = jax.tree.map(lambda x: x[:num_rows], args)
        expected, metrics = jax.jit(step)(expected, *args)
        if name == "mxfp8" and options and not k:  # Every device multiplies what is gathered.
            (extra,) = train_step.describe(state, *args).extra_work
            assert "scaled_matmul_wrapper" in extra.what
        state, actual = train_step(state, *args)
        zoo.assert_trees_close(zoo.to_host(actual), zoo.to_host(metrics), zoo.FP32, "metrics")
    zoo.assert_trees_close(zoo.to_host(state), zoo.to_host(expected), zoo.FP32, "state")
