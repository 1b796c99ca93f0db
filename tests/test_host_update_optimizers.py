"""Every optimizer that optax exports updates state on the host as under `jax.jit`, to a few ULPs."""

import jax.numpy as jnp
import numpy as np
import pytest

import host_updates
from host_updates import Problem, problem
from jzero.offload.kernels._code_paths import XLA
from jzero.offload.kernels._host_update import HostUpdate
from optimizers import ENTRIES

# Some of optax's optimizers are deprecated, some call what is.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
    pytest.mark.usefixtures("optax_promotions"),
]

NUM_STEPS = 3
# Each step starts from the same state. XLA fuses a product into the sum that follows it and rounds once where
# the kernel rounds twice; most optimizers stay below 2.
KERNEL_ULPS = 16
# XLA against itself: it fuses a part of the update otherwise than the whole, and orthogonalising a matrix
# (Muon) multiplies that.
XLA_ULPS = 512


# What keeps leaves of more than one element from the kernels: the first equation that no loop over elements
# does. All others are updated in one pass, some after XLA has computed a norm.
BY_XLA: dict[str, set[str]] = {
    "adafactor": {"reduce_sum"},
    "adafactor(momentum, decay)": {"reduce_sum"},
    "lbfgs": {"scatter"},
    "noisy_sgd": {"random_bits", "random_unwrap"},
    "sm3": {"min"},
    "galore": {"cond"},
    "muon": {"scan"},
    "muon(adaptive, 3-D)": {"scan", "transpose"},
    "sophia": {"cond"},
    "adaptive_grad_clip": {"reduce_sum"},
    "add_noise": {"random_bits", "random_unwrap"},
    "centralize": {"reduce_sum"},
    "scale_by_zoom_linesearch": {"while"},
    "MultiSteps(gradient_transformation)": {"cond"},
    "flatten": {"concatenate"},
    "differentially_private_aggregate": {"add", "random_unwrap"},
    "dpsgd": {"add", "random_unwrap"},
    "average_incrementally_updates": {"reduce_sum"},
    "add_mean_variance_to_opt": {"reduce_sum"},
    "multi_transform": {"scan"},
    "sam(opaque)": {"dot_general"},
    "split_real_and_imaginary": {"imag", "real"},
}


@pytest.mark.slow(but=[30, 35, 45, 111])
@pytest.mark.parametrize("name", ENTRIES)
def test_updates_as_xla_does(name: str):
    given = problem(ENTRIES[name], jnp.float32)
    leaves = zip(assert_same(given, name).code_paths, given.state, strict=True)
    reasons = {
        code_path.reason for code_path, leaf in leaves if leaf.size > 1 and code_path.by == XLA
    }
    assert {reason.split(" of ")[0] for reason in reasons} == BY_XLA.get(name, set())


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
def test_bfloat16_comes_in_and_goes_out(name: str):
    assert_same(problem(ENTRIES[name], jnp.bfloat16, jnp.bfloat16), name)


def assert_same(given: Problem, title: str) -> HostUpdate:
    rng = np.random.default_rng(0)
    state = [host_updates.on_host(leaf) for leaf in given.state]
    update = HostUpdate(given.update, state, given.inputs)
    outputs = update.make_outputs()
    for step in range(NUM_STEPS):
        inputs = [host_updates.random(rng, aval) for aval in given.inputs]
        expected = host_updates.reference(given.update, state, inputs)
        host_updates.call(update, state, inputs, outputs)
        for code_path, got, want in zip(
            update.code_paths, [*state, *outputs], expected, strict=True
        ):
            limit = XLA_ULPS if code_path.by == XLA else KERNEL_ULPS
            assert host_updates.ulps(got, want) <= limit, (title, step, code_path)
    return update
