"""The families of exactness by themselves, on one device: each is a training that rows can change."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import exactness
import test_exactness
from exactness import _compare

# Where each of a family's items is written: findings A1 to A10 and B1 to B6, and the points of
# issue 13 as I1 to I5.
ITEMS = {f"A{i}" for i in range(1, 11)} | {f"B{i}" for i in range(1, 7)} | {
    f"I{i}" for i in range(1, 6)
}  # fmt: skip


# Each trains in tests/test_exactness.py by default; these ask whether that would notice a wrong training.
DEFAULT = set(exactness.NAMES[::20]) - exactness.SLOW
MARKED = [
    pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow)
    for name in exactness.NAMES
]


def _bits(training: _compare.Training) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(_parts(training))]


def _parts(training: _compare.Training) -> Any:
    return training.outputs, training.state


@pytest.mark.slow
@pytest.mark.parametrize("name", MARKED)
def test_each_family_is_deterministic_finite_and_sensitive_to_its_last_rows(name):
    family = exactness.get(name)
    run = _compare.reference(family)
    batches = family.batches(_compare.NUM_STEPS, "float32")

    once, again = (_compare.train_on(family, run, batches, "float32") for _ in range(2))
    assert _bits(once) == _bits(again)
    assert _compare.differences(once, again, "float32") == []
    floats = [leaf for leaf in jax.tree.leaves(_parts(once)) if leaf.dtype.kind in "fc"]
    assert all(np.isfinite(leaf).all() for leaf in floats if not _has_bad_rows(batches))

    other = _compare.train_on(family, run, _with_other_rows(family, batches), "float32")
    changed = _compare.Training([], other.state, [])
    kept = _compare.Training([], once.state, [])
    assert _compare.differences(kept, changed, "float32"), "the last rows do not reach the state"


@pytest.mark.slow(but=[0, 20, 40, 100, 120, 140, 220])
@pytest.mark.parametrize("name", MARKED)
def test_state_and_inputs_keep_their_types_in_both_dtypes(name):
    family = exactness.get(name)
    for dtype in family.exact_dtypes:
        with jax.enable_x64(dtype == "float64"), _compare.configured(family):
            state = jax.eval_shape(lambda dtype=dtype: family.init(dtype))
            (args,) = family.batches(1, dtype)
            step = family.reference or family.step
            new, _ = jax.eval_shape(step, state, *args)
        assert jax.tree.map(_type, new) == jax.tree.map(_type, state)
        assert all(_is_on_the_host(leaf) for leaf in jax.tree.leaves(args))


def test_every_item_has_a_family():
    """Also among those that run every time."""
    names = test_exactness.BY_DEFAULT
    covered = {item for name in names for item in exactness.get(name).covers.split()}
    assert covered == ITEMS


def test_differences_name_the_place_and_the_size():
    def training(loss: float, count: int) -> _compare.Training:
        outputs = [{"loss": np.float64(loss), "count": np.int32(count)}]
        return _compare.Training(outputs, {"params": np.ones(3)}, [])

    assert _compare.differences(training(1.0, 3), training(1.0 + 1e-12, 3), "float64") == []
    problems = _compare.differences(training(1.0, 3), training(1.0 + 1e-8, 4), "float64")
    assert len(problems) == 2
    assert re.search(
        r"step 0 outputs\['loss'\].*1\.00000001 instead of 1\.0", problems[0] + problems[1]
    )
    assert any("outputs['count']" in p and "4 instead of 3" in p for p in problems)


def test_one_call_too_many_is_a_difference():
    def training(num: int) -> _compare.Training:
        return _compare.Training([{}], {}, [{"values": [np.zeros(2)] * num, "printed": ""}])

    (problem,) = _compare.differences(training(1), training(8), "float32")
    assert problem == "step 0 has 8 calls of the host instead of 1"


def _type(leaf: Any) -> tuple[Any, ...]:
    return leaf.shape, leaf.dtype


def _is_on_the_host(leaf: Any) -> bool:
    """NumPy stands for the whole batch on every process; keys can only be JAX's."""
    is_key = isinstance(leaf, jax.Array) and (_is_key(leaf) or leaf.shape == (2,))
    return is_key or not isinstance(leaf, jax.Array)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _has_bad_rows(batches: list[Any]) -> bool:
    """Some families feed rows that are not finite, and return losses that are not."""
    rows = [leaf for leaf in jax.tree.leaves(batches) if isinstance(leaf, np.ndarray)]
    return any(leaf.dtype.kind == "f" and not np.isfinite(leaf).all() for leaf in rows)


def _with_other_rows(family: exactness.Family, batches: list[Any]) -> list[Any]:
    """The last eighth of each batch's rows, at least one, are rows of the batch before it."""
    names = _argument_names(family.step)
    dims = [family.row_dims.get(name, 0) for name in names[: len(batches[0])]]

    def mixed(args: tuple[Any, ...], others: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            jax.tree.map(lambda a, b, d=dim: _mixed(a, b, d), arg, other)
            for arg, other, dim in zip(args, others, dims, strict=True)
        )

    return [mixed(args, batches[i - 1]) for i, args in enumerate(batches)]


def _argument_names(step: Any) -> list[str]:
    import inspect

    return list(inspect.signature(step).parameters)[1:]


def _mixed(rows: Any, others: Any, dim: int | None) -> Any:
    is_rows = isinstance(rows, np.ndarray) and rows.ndim > (dim or 0) and dim is not None
    if not is_rows:
        return rows
    num = max(1, rows.shape[dim] // 8)
    kept = np.take(rows, range(rows.shape[dim] - num), axis=dim)
    return np.concatenate([kept, np.take(others, range(num), axis=dim)], axis=dim)
