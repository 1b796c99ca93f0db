"""Loops that XLA compiles where llvmlite is not installed: kernels' numbers to the bit, in little memory."""

import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import host_updates
import test_host_update_ops as ops
from host_updates import call, on_host, problem
from jzero.offload.kernels import _xla_loops
from jzero.offload.kernels._host_update import HostUpdate
from jzero.offload.kernels._loops import KernelLoops
from jzero.offload.kernels._xla_loops import XlaLoops
from optimizers import ENTRIES

pytestmark = pytest.mark.usefixtures("optax_promotions")

NUM_STEPS = 3
# Functions of the C library for kernels, of its own for XLA.
OTHER_FUNCTIONS = {name for name, case in ops.CASES.items() if case.ulps} - {"rsqrt", "integer_pow"}
# optimizer: an element's distance after all steps, in ULPs. All others are the same to the bit.
APART = {"scale_by_lion(smooth)": 16}  # tanh


def by_both(*args: Any, **kwargs: Any) -> list[HostUpdate]:
    pytest.importorskip("llvmlite")
    return [HostUpdate(*args, **kwargs, by=compiler) for compiler in (KernelLoops, XlaLoops)]


def outputs_of_both(fn: Any, args: list[np.ndarray]) -> list[np.ndarray]:
    results = []
    for update in by_both(lambda state, inputs: ((), (fn(*inputs),)), (), args):
        (out,) = update.make_outputs()
        call(update, (), args, [out])
        results.append(out)
    return results


def assert_equal(x: np.ndarray, y: np.ndarray, where: Any) -> None:
    """To the bit, but for the payload and the sign of NaN."""
    numbers = ~np.isnan(x) if jnp.issubdtype(x.dtype, jnp.inexact) else np.ones(x.shape, bool)
    np.testing.assert_array_equal(np.isnan(x[~numbers]), np.isnan(y[~numbers]), err_msg=where)
    assert x[numbers].tobytes() == y[numbers].tobytes(), where


@pytest.mark.slow(but=["16-flatten"])
@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("bits", [32, 16])
def test_steps_are_the_same_to_the_bit(name: str, bits: int):
    """XLA fuses no product into a sum, and takes no reciprocal, that kernels do not."""
    dtypes = (jnp.bfloat16, jnp.bfloat16) if bits == 16 else (jnp.float32, None)
    given, results = problem(ENTRIES[name], *dtypes), []
    for update in by_both(given.update, given.state, given.inputs):
        rng, state = np.random.default_rng(0), [*map(on_host, given.state)]
        outputs = update.make_outputs()
        for _ in range(NUM_STEPS):
            call(update, state, [host_updates.random(rng, aval) for aval in given.inputs], outputs)
        results.append([*state, *outputs])
    for code_path, x, y in zip(update.code_paths, *results, strict=True):
        if name in APART:
            assert host_updates.ulps(x, y) <= APART[name]
        else:
            assert_equal(x, y, code_path.name)


@pytest.mark.slow(but=45)
@pytest.mark.parametrize(("name", "dtype"), ops.ROWS)
def test_primitive(name: str, dtype: str):
    """Of numbers that are not normal, XLA keeps some where kernels do not, or the other way round."""
    case = ops.CASES[name]
    args = ops.operands(dtype, case.num_operands)
    if dtype in ops.FLOATS:
        args = [ops.flushed(x) for x in args]
    x, y = outputs_of_both(case.fn, args)
    if name in OTHER_FUNCTIONS:
        assert host_updates.ulps(x, y) <= case.ulps
    else:
        assert_equal(x, y, name)


@pytest.mark.parametrize("divisor", [*ops.DIVISORS, *ops.UNUSUAL])
def test_division_by_one_number(divisor: float):
    args = [ops.dividends(), np.array(divisor, np.float32)]
    x, y = outputs_of_both(lambda x, y: x / y, args)
    assert_equal(x, y, divisor)


STEPS = """if True:
    import sys
    sys.modules["llvmlite"] = {module}
    import jax, jax.numpy as jnp, numpy as np, optax, jzero
    tx = jzero.master_weights(optax.adamw(1e-2))
    def step_fn(state, batch):
        w, opt_state = state
        grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
        updates, opt_state = tx.update(grads, opt_state, w)
        return optax.apply_updates(w, updates), opt_state
    train_step = jzero.shard_train_step(step_fn, memory=jzero.HostCPU())
    w, batch = jnp.ones((64, 640), jnp.bfloat16) / 8, jnp.ones((8, 64), jnp.bfloat16)
    state = w, tx.init(w)
    for _ in range(3):
        state = train_step(state, batch)
    print([np.asarray(x, np.float32).tobytes().hex() for x in jax.tree.leaves(state)])
    print(train_step.describe(state, batch))
"""


def printed(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_without_llvmlite():
    """Nothing is refused: the same numbers; `describe` names the code path, and what would be faster."""
    pytest.importorskip("llvmlite")
    found = []
    for module in ('__import__("llvmlite")', "None"):
        found.append(printed(STEPS.format(module=module)).split("\n", 1))
    (with_llvm, says), (without, says_why) = found
    assert with_llvm == without
    why = "as llvmlite is not installed: pip install 'jzero[offload]' for kernels, about 5 times as fast"
    assert why in " ".join(says_why.split())
    assert "llvmlite" not in says


PEAK = """if True:
    import sys
    sys.modules["llvmlite"] = None
    import jax, jax.numpy as jnp, numpy as np
    from jzero.offload.kernels._host_update import HostUpdate
    from jzero.offload.memory._addresses import host_empty
    def update(state, inputs):
        (w, m), (g,) = state, inputs
        m = 0.9 * m + g
        return (w - m, m), ((w - m).astype(jnp.bfloat16),)
    state, grad = [host_empty((2 ** 25,), np.float32) for _ in range(2)], host_empty((2 ** 25,), np.float32)
    engine = HostUpdate(update, state, [grad])
    outputs = engine.make_outputs()
    for x in (*state, grad, *outputs):
        x[:] = 1
    def step():
        engine.prepare([state], [[grad]])
        for _ in engine.run([outputs]):
            pass
    def peak():
        return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith("VmHWM")) << 10
    engine.prepare([state], [[grad]])
    open("/proc/self/clear_refs", "w").write("5")  # The peak is what is there now.
    before = peak()
    step(), step()
    assert np.all(state[1][::4096] == np.float32(0.9) * (np.float32(0.9) * 1 + 1) + 1)
    print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the peak")
def test_the_state_is_not_there_twice():
    """256 MiB of it; beside it are a block's results, and what XLA needs to make them."""
    assert int(printed(PEAK)) < 8 << 20


def test_a_failure_in_the_other_thread_is_raised(monkeypatch: pytest.MonkeyPatch):
    def fail(self: Any, operands: Any) -> None:
        raise MemoryError("no room for a block")

    state = [on_host(np.ones(100, np.float32))]
    update = HostUpdate(lambda state, _: ((state[0] * 2,), ()), state, (), by=XlaLoops)
    monkeypatch.setattr(_xla_loops.XlaProgram, "run", fail)
    with pytest.raises(MemoryError, match="no room for a block"):
        call(update, state, ())
