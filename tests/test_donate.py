"""A state that a step has consumed says so, whoever uses it; with `donate=False` it stays as it was."""

import concurrent.futures
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
import small
from jzero._quantities import readable_bytes
from small import grouped

TX = optax.adam(1e-2)
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


def new_state() -> dict[str, Any]:
    params = {"w": jnp.ones((16, 8)), "v": jnp.full((8, 8), 0.1), "b": jnp.zeros(8)}
    return {"params": params, "opt": TX.init(params), "key": jax.random.key(0)}


def step(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    def loss_fn(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"][None]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "key": jax.random.split(state["key"])[0]}, loss


def sharded(num: int = 2, **options: Any) -> Any:
    return jzero.shard_train_step(
        step, mesh=small.auto_mesh(data=num), **grouped(min_shard_bytes=0, **options)
    )


def numbers(tree: Any) -> list[np.ndarray]:
    """Copies of all leaves."""
    leaves = jax.tree.leaves(tree)
    keys = [jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    return [np.array(jax.random.key_data(x) if k else x) for x, k in zip(leaves, keys, strict=True)]


def assert_equal(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(x, y)


# -- what was consumed -----------------------------------------------------------------------------


USES: list[Callable[[jax.Array], Any]] = [
    jax.jit(jnp.sin), np.asarray, str, jax.device_get, jnp.copy, jax.grad(jnp.sum),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a thread"])
def test_whoever_uses_a_consumed_leaf_is_told(beside):
    """JAX 0.10 ends the process; [Note: what JAX 0.10 leaves alive]. All uses were compiled before."""
    over = threading.Event()
    if beside:
        threading.Thread(target=over.wait, daemon=True).start()
    train_step = sharded(4)
    old, _ = train_step(train_step.init(new_state), X)
    new, _ = train_step(old, X)
    for use in USES:
        for name, leaf in old["params"].items():
            use(new["params"][name])
            with pytest.raises((RuntimeError, ValueError), match="has been deleted"):
                use(leaf)
    over.set()


def refused(call: Callable[[], Any], who: str, names: str) -> None:
    with pytest.raises(jzero.StateError, match=rf"^{who}: .* already donated: {names}") as found:
        call()
    assert "jax.tree.map(jnp.copy, state)" in str(found.value)
    assert "donate=False" in str(found.value)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"offload": jzero.HostCPU()}], ids=str)
def test_every_way_back_names_the_leaves_and_what_to_do(options, tmp_path):
    train_step = sharded(**options)
    evaluate = jzero.shard_eval_step(lambda s, x: (x @ s["params"]["w"]).sum(), like=train_step)
    old = train_step.init(new_state)
    old, _ = train_step(old, X)
    new, _ = train_step(old, X)
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        refused(lambda: checkpointer.save(1, old), "Checkpointer.save", r"state\['key'\]")
    refused(lambda: train_step(old, X), "shard_train_step", r"state\['key'\]")
    refused(
        lambda: train_step({**new, "key": old["key"]}, X), "shard_train_step", r"state\['key'\]"
    )
    refused(lambda: train_step.shard(old), "shard", r"state\['key'\]")
    refused(lambda: train_step.unshard(old), "unshard", r"state\['key'\]")
    refused(lambda: train_step.flush(old), "flush", r"state\['key'\]")
    refused(lambda: evaluate(old, X), "shard_eval_step", r"state\['params'\]\['w'\]")
    train_step.describe(old, X)
    train_step(new, X)


@pytest.mark.parametrize("rows", [16, 15], ids=["even", "padded"])
def test_an_argument_that_a_step_has_consumed_is_named(rows):
    """`ref = state`, as a reference model is begun: the first step consumes what it is given with it."""

    def pulled(w, ref):
        return w + 0.1 * (ref["old"] - w), jnp.sum(w)

    train = jzero.shard_train_step(
        pulled,
        mesh=small.auto_mesh(data=2),
        axes=jzero.Axes(min_shard_bytes=0),
        state=0,
        in_specs={"ref": jax.P()},
    )
    old = train.init(lambda: jnp.ones((rows, 8)))
    state, _ = train(old, {"old": np.ones((rows, 8), np.float32)})
    with pytest.raises(jzero.StateError, match=r"consumed 1 of 1 leaves: ref\['old'\]. .*jnp.copy"):
        train(state, {"old": old})
    evaluate = jzero.shard_eval_step(lambda w, ref: jnp.sum(w * ref), like=train)
    with pytest.raises(jzero.StateError, match="consumed 1 of 1 leaves: ref"):
        evaluate(state, old)


# -- donate=False ----------------------------------------------------------------------------------
PINNED = jzero.PinnedHost()
CASES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "pinned": {"offload": PINNED},
    "both pinned": {"offload": PINNED, "offload_params": PINNED, "accumulate": 2},
}


@pytest.mark.slow(but=["pinned"])
@pytest.mark.parametrize("name", CASES)
def test_the_old_state_stays_and_trains_alike(name):
    keeps, donates = sharded(donate=False, **CASES[name]), sharded(**CASES[name])
    state, other = keeps.init(new_state), donates.init(new_state)
    for _ in range(3):
        old, before = state, numbers(state)
        state, loss = keeps(old, X)
        other, expected = donates(other, X)
        assert not any(x.is_deleted() for x in jax.tree.leaves(old))
        assert_equal(numbers(old), before)
        assert_equal(numbers((state, loss)), numbers((other, expected)))
        again, _ = keeps(old, X)
        assert_equal(numbers(again), numbers(other))
    kinds = [x.sharding.memory_kind for x in jax.tree.leaves((state, old))]
    assert ("pinned_host" in kinds) == ("pinned" in name)


@pytest.mark.parametrize("options", [{}, {"offload": PINNED}], ids=str)
def test_two_threads_may_step_one_state(options):
    keeps = sharded(donate=False, **options)
    state = keeps.init(new_state)
    expected = numbers(keeps(state, X))
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for found in threads.map(functools.partial(keeps, state), [X] * 6):
            assert_equal(numbers(found), expected)


FILES = functools.partial(jzero.NVMe, "unused")


@pytest.mark.parametrize(
    "options",
    [
        {"offload": jzero.HostCPU()},
        {"offload": FILES(), "offload_params": FILES(device_bytes=2**20)},
    ],
    ids=["HostCPU", "NVMe, parameters too"],
)
def test_what_hosts_write_over_cannot_stay(options):
    with pytest.raises(jzero.OptionError, match=r"donate=False and .*update their state in place"):
        sharded(donate=False, **options)


def test_it_is_true_or_false():
    with pytest.raises(jzero.OptionError, match="donate='no'. It is True or False"):
        sharded(donate="no")


@pytest.mark.parametrize("options", [{}, {"offload": PINNED}], ids=str)
def test_describe_and_estimate_count_it(options):
    report = sharded(donate=False, **options).describe(jax.eval_shape(new_state), X)
    here = report.plan.nbytes_at_rest()
    assert not report.to_dict()["donates"]
    text = " ".join(str(report).split())
    assert f"which takes {readable_bytes(here)} of each device" in text
    assert ("of its host beside the new one" in text) == bool(options)
    assert "donate=False" not in str(sharded(**options).describe(jax.eval_shape(new_state), X))

    twice, once = (
        jzero.estimate("1B", devices=4, donate=d, **grouped(**options)) for d in (False, True)
    )
    assert twice.total - once.total == once.at_rest == twice.at_rest
    assert twice.on_host - once.on_host == sum(m.on_host for m in once.memory if m.at_rest)
