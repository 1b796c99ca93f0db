"""Optimizer state on the host, updated by its processors: every optimizer trains the same."""

import functools
from typing import Any

import jax
import pytest

import jzero
import optimizers
import parity
import small
import test_optimizers
from optimizers import ENTRIES
from test_offload import WITH_STATE

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")

# Their updates need sums over all devices.
NEEDS_OTHER_DEVICES = {
    "adafactor", "adafactor(momentum, decay)", "lamb", "lbfgs", "sm3", "dadapt_adamw", "dog",
    "dog(learning_rate)", "dowg", "galore", "momo", "momo(large)", "momo_adam", "muon",
    "muon(adaptive, 3-D)", "prodigy", "scale_by_distance_over_gradients",
    "MultiSteps(gradient_transformation)", "flatten", "mechanize", "multi_transform", "partition",
}  # fmt: skip
# XLA keeps more bits of intermediate values than their dtype has, and the host does not.
ROUNDED = {"adam(bfloat16 moment)"}


def rounded(name: str) -> list[Any]:
    """As `test_optimizers.one_device`, each value rounded to its dtype."""
    entry, state, found = ENTRIES[name], optimizers.make_state(ENTRIES[name]), []
    step = jax.jit(
        optimizers.make_step(entry), compiler_options={"xla_allow_excess_precision": False}
    )
    for batch in optimizers.make_batches(entry.poisoned):
        state, metrics = step(state, batch)
        found.append(test_optimizers.to_numpy((state, metrics)))
    return found


def train(name: str, num: int) -> None:
    entry, mesh = ENTRIES[name], small.mesh(data=num)
    step_fn, batches = optimizers.make_step(entry), optimizers.make_batches(entry.poisoned)
    train_step = small.shard_train_step(step_fn, mesh=mesh, memory=jzero.HostCPU())
    state: Any = train_step.shard(optimizers.make_state(entry), batches[0])
    expected = rounded(name) if name in ROUNDED else test_optimizers.one_device(name)
    for i, (batch, wanted) in enumerate(zip(batches, expected, strict=True)):
        state, metrics = train_step(state, batch)
        test_optimizers.assert_same((state, metrics), wanted, f"{name}, step {i}")
    assert any(
        getattr(leaf, "where", "") == "in host memory" for leaf in jax.tree.leaves(state["opt"])
    )


@pytest.mark.slow(but=["flatten"])
@pytest.mark.parametrize("name", WITH_STATE)
@pytest.mark.usefixtures("optax_promotions")
def test_optimizers_train_as_on_one_device(name: str):
    if name in NEEDS_OTHER_DEVICES:
        with pytest.raises(jzero.OptionError, match=r"between the devices(.|\n)*PinnedHost"):
            train(name, 8)
        train(name, 1)
    else:
        train(name, 8)


def test_replicas_in_microbatches():
    """Other options are rows of tests/golden."""
    options = {"param_axes": "local", "optimizer_axes": "local", "accumulate": 2}
    policy = jzero.HostCPU(ratio=0.5, threads=1)
    sharded = functools.partial(small.shard_train_step, offload=policy, **options)
    parity.check("mlp", {"node": 2, "local": 2}, sharded, options)
