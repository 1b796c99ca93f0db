"""Callbacks that raise: the step ends with their error on all devices, and none waits for another."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import io_callback

import jzero
import small

SGD = optax.sgd(0.1, momentum=0.9)


class Alarm:
    armed = False

    def __call__(self, x):
        if self.armed:
            raise ValueError(f"a user's error at {x.shape}")

    def renewed(self, x):
        self(x)
        return x + 1


def new_state():
    params = jnp.ones((4, 16, 16)) / 16
    return params, SGD.init(params)


def make_step(alarm, how):
    def layer(x, w):
        if how == "io_callback":
            x += 0 * io_callback(alarm.renewed, jax.ShapeDtypeStruct((), x.dtype), x.mean())
        else:
            jax.debug.callback(alarm, x.mean(), ordered=how == "ordered")
        return jnp.tanh(x @ w), None

    def step(state, x):
        params, opt_state = state
        loss = jnp.mean(jnp.square(jax.lax.scan(layer, x, params)[0]))
        updates, opt_state = SGD.update(params, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


@pytest.mark.slow(but=["{}-ordered"])
@pytest.mark.parametrize(
    ("options", "how"),
    [({}, "ordered"), ({"offload_params": jzero.PinnedHost(device_bytes=2**14)}, "io_callback"),
     ({"offload": jzero.HostCPU()}, "unordered")],
    ids=str,
)  # fmt: skip
def test_all_devices_fail_together(options, how):
    alarm = Alarm()
    train_step = small.shard_train_step(
        make_step(alarm, how), mesh=small.mesh(data=4), min_shard_bytes=0, **options
    )
    x = jnp.ones((8, 16))
    state, loss = train_step(train_step.init(new_state), x)
    expected, one = jax.jit(make_step(Alarm(), how))(new_state(), x)
    assert abs(float(loss) - float(one)) < 1e-6
    alarm.armed = True
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"a user's error at \(\)"):
        jax.block_until_ready(train_step(state, x))
    alarm.armed = False
    state, loss = train_step(train_step.init(new_state), x)
    assert abs(float(loss) - float(one)) < 1e-6
