"""estimate(offload=...) against describe() and the programs of real steps, what they hold, and the paper."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jzero
import small
from jzero._quantities import parse_bytes
from small import grouped

WIDTH = 64
PSI = 2 * WIDTH * WIDTH
TX = optax.adamw(1e-3)
PRECISIONS = {
    "mixed": (jnp.bfloat16, jnp.bfloat16, jzero.master_weights(TX)),
    "float32": (jnp.float32, jnp.float32, TX),
    "float32_masters": (jnp.float32, jnp.bfloat16, TX),
}


def make_step(precision="mixed"):
    """A step with two equal matrices, so that half of the bytes are half of the leaves; and its state."""
    dtype, compute, tx = PRECISIONS[precision]

    def step_fn(state, x):
        params, opt_state = state

        def loss_fn(params):
            y = x.astype(compute) @ params["a"].astype(compute) @ params["b"].astype(compute)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        grads = jax.grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = {name: jnp.eye(WIDTH, dtype=dtype) for name in "ab"}
    return step_fn, (params, tx.init(params))


BATCH = jnp.ones((WIDTH, WIDTH))


def by_way(transfers):
    """`{(direction, what): bytes}`, scalars aside."""
    totals: dict[tuple[str, str], int] = {}
    for c in transfers:
        if c.elements > 1:
            totals[c.direction, c.what] = totals.get((c.direction, c.what), 0) + c.nbytes
    return totals


@pytest.mark.parametrize(("precision", "delayed_update"), [("mixed", True), ("float32", False)])
def test_what_the_host_holds_beside_the_state(precision, delayed_update):
    """A step that runs: its memory for parameters, and the gradients that wait for the next step."""
    pytest.importorskip("llvmlite")
    after = 0 if delayed_update else None
    policy = jzero.HostCPU(delayed_update=delayed_update, delay_after=after)
    step_fn, state = make_step(precision)
    train_step = small.shard_train_step(step_fn, stage=3, memory=policy)
    state = train_step.shard(state)
    for _ in range(2):
        state = train_step(state, BATCH)
    expected = {
        row.role: row.on_host
        for row in jzero.estimate(PSI, devices=8, precision=precision, memory=policy).memory
    }
    (program,) = train_step._programs.built.values()
    engine = program.step.updates._engine
    kept = [x for outputs in engine._sets for x in outputs.arrays]
    assert {x.sharding.memory_kind for x in kept} == {"pinned_host"}
    assert sum(x.nbytes for x in kept) // 8 == expected["outgoing parameter"]
    leaves = [x for x in jax.tree.leaves(state) if getattr(x, "where", "") == "in host memory"]
    (pending,) = {leaf.storage.pending for leaf in leaves}
    waiting = [x for x in pending.reads.values() if x.size > 1] if pending else []
    assert sum(x.nbytes for x in waiting) // 8 == expected.get("delayed gradient", 0)
    assert bool(waiting) == delayed_update


# -- the paper -------------------------------------------------------------------------------------


def test_bytes_per_parameter_of_zero_offload():
    """Ren et al., 2021, section 3: from 16 bytes per parameter to 2 at rest; 2 cross each way."""
    whole, found = (
        jzero.estimate("10B", devices=1, memory=policy)
        for policy in (jzero.NoOffload(), jzero.HostCPU())
    )
    assert whole.total == 16 * 10**10
    assert found.at_rest == 2 * 10**10
    assert found.total == 4 * 10**10  # with gradients, if none left before the last was made
    assert found.on_host == (12 + 2 + 2) * 10**10
    assert by_way(found.transfers) == {
        ("to host", "gradient"): 2 * 10**10,
        ("to device", "parameter"): 2 * 10**10,
    }
    delayed = jzero.estimate("10B", devices=1, memory=jzero.HostCPU(delayed_update=True))
    assert delayed.on_host == found.on_host + (2 + 2) * 10**10
    assert delayed.total == found.total + 2 * 10**10


# -- the largest model -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [jzero.HostCPU(), jzero.HostCPU(ratio=0.3, delayed_update=True), jzero.PinnedHost(10_000)],
    ids=str,
)
@pytest.mark.parametrize("memory", [1, 12_345, "80GiB"])
def test_the_largest_model_fits_and_no_larger_one(policy, memory):
    options = {"devices": 3, "stage": 2, "offload": policy}
    num, num_bytes = (
        jzero.estimate(1, **grouped(**options)).largest_model(memory),
        parse_bytes(memory),
    )
    assert num_bytes is not None
    assert jzero.estimate(num + 1, **grouped(**options)).total > num_bytes
    assert num == 0 or jzero.estimate(num, **grouped(**options)).total <= num_bytes


# -- what is printed, and messages -----------------------------------------------------------------


def test_what_crosses_is_printed():
    lines = str(jzero.estimate("1B", devices=8, memory=jzero.PinnedHost(2**20))).splitlines()
    rows = [" ".join(line.split()) for line in lines]
    assert rows[3:5] == ["on each on its", "memory whole device host"]
    assert "optimizer state 11.2 GiB 0 B 1.4 GiB" in rows
    assert "streamed optimizer state 8.0 MiB 1.0 MiB 0 B at a time" in rows
    assert "to host optimizer state 96-bit 125,000,000 1.4 GiB" in rows


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"offload": jzero.HostCPU(ratio="auto")},
         "estimate: HostCPU(ratio='auto'). It is measured on the devices, and there are none"),
        ({"offload": jzero.HostCPU(), "optimizer": "sgd", "precision": "float32"},
         "memory=HostCPU(), and the optimizer has no state. Moments, averages and masters"),
        ({"offload": jzero.PinnedHost(), "optimizer_bytes": 0},
         "estimate: memory=PinnedHost(), and the optimizer has no state."),
        ({"offload": "cpu"}, "Memory: optimizer='cpu'. It is a policy"),
        ({"offload": jzero.HostCPU(), "optimizer": "muon"},
         "optimizer='muon' and 8 devices. Its update needs the shards of other devices"),
    ],
    ids=str,
)  # fmt: skip
def test_offload_that_cannot_be_estimated(args, text):
    with pytest.raises(jzero.OptionError) as caught:
        jzero.estimate("1B", devices=8, **grouped(**args))
    assert text in str(caught.value)
