"""Small random train steps, each drawn from one integer seed, checked against one device.

`draw(seed)` makes a step: parameters, a random graph of operations over the rows of a batch, a loss
that is a mean over the rows, an optimizer, a state container, and features of whole steps (microbatches,
SAM, EMA, ...). `print(draw(seed))` lists it. `check(seed)` trains it with jzero and with plain
`jax.jit` on one device, and compares every leaf after every step.

Every operation treats rows one by one, so that a step over the whole batch on one device is what
the devices together must compute. A step that amplifies rounding noise (the sign of a gradient that
is zero but for rounding, a value at a kink) cannot be compared; `check` finds such by running the
reference again with the rows permuted and the parameters moved by an ulp, and draws another from
the same seed.
"""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
import small

ROWS = 16
NUM_STEPS = 2
MAX_DRAWS = 20
STAGES = {0: 2, 1: 5, 2: 4, 3: 9}
NUM_DEVICES = {1: 2, 2: 5, 4: 5, 8: 8}
DIMS = {1: 1, 2: 2, 3: 2, 4: 3, 8: 8, 16: 5}

# A dozen operations in a row let rounding grow further than one does; the probe rejects what needs
# more than a quarter of this. The absolute part is for leaves that are zero but for rounding.
RTOL, LEAF_RTOL, ATOL = 1e-4, 2e-5, 3e-8
# Where weights pass through bfloat16 (8 bits): a rounding the other way is one part in 256.
BFLOAT16_RTOL, BFLOAT16_LEAF_RTOL = 3e-2, 2e-2

Params = dict[str, jax.Array]
Values = dict[str, jax.Array]


class Context(NamedTuple):
    """What an operation may read besides parameters and earlier values."""

    batch: dict[str, jax.Array]
    step: jax.Array


Op = Callable[[Params, Values, Context], jax.Array]
Weight = Callable[[Params, Context], jax.Array]


@dataclasses.dataclass(frozen=True)
class Case:
    """One drawn step with its data; `str(case)` is a listing of it."""

    seed: int
    listing: str
    num_devices: int
    stage: int
    step: Callable[[Any, Any], tuple[Any, Any]]
    make_state: Callable[[], Any]
    batches: list[Any]
    bfloat16: bool
    features: frozenset[str]

    def __str__(self) -> str:
        axes, options = draw_options(self)
        head = f"seed {self.seed}: stage {self.stage} on devices {axes}, {options}"
        return f"{head}\n{self.listing}"


# ---------------------------------------------------------------- the check


def check(seed: int, shard_train_step: Callable[..., Any] = small.shard_train_step) -> Case:
    """Trains the seed's step on its devices and asserts that every leaf is one device's."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return _check(seed, shard_train_step)  # optax itself relies on JAX's default promotions


def _check(seed: int, shard_train_step: Callable[..., Any]) -> Case:
    case, expected = draw_well_conditioned(seed)
    axes, options = draw_options(case)
    devices = jax.devices()[: case.num_devices]
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices)
    train_step = shard_train_step(case.step, stage=case.stage, mesh=mesh, **options)
    try:
        state = train_step.shard(case.make_state(), case.batches[0])
    except jzero.StepError as error:
        if "accumulate > 1" not in str(error):
            raise
        case = dataclasses.replace(case, features=case.features | {"refused:accumulate"})
        train_step = shard_train_step(case.step, stage=case.stage, mesh=mesh)
        state = train_step.shard(case.make_state(), case.batches[0])
    for i, batch in enumerate(case.batches):
        state, metrics = train_step(state, batch)
        worst = worst_error((train_step.unshard(state), metrics), expected[i], case.bfloat16)
        assert worst[0] <= 1, f"step {i}: {worst[1]} is {worst[0]:.3g} tolerances off\n{case}"
    return case


def draw_options(case: Case) -> tuple[dict[str, int], dict[str, Any]]:
    """The mesh and the options of `shard_train_step` under which a case is checked; half have none."""
    rng = np.random.default_rng([case.seed, 1])
    axes = {"data": case.num_devices}
    options: dict[str, Any] = {}

    def one_in_two() -> bool:
        return bool(rng.integers(2))

    if one_in_two():
        return axes, options
    if case.num_devices >= 4 and one_in_two():
        axes = {"node": 2, "local": case.num_devices // 2}
        inner = str(rng.choice(["local", "node"]))
        if case.stage == 3 and one_in_two():
            options["param_axes"] = inner
        if case.stage > 0 and one_in_two():
            options["optimizer_axes"] = inner
            if case.stage == 3:
                options["param_axes"] = inner
    # A step's own microbatches cut what they get in two.
    own = any(feature.startswith("gradient:microbatch") for feature in case.features)
    fitting = [k for k in (2, 4, 8) if k * (1 + own) <= ROWS // case.num_devices]
    if fitting and one_in_two():
        options["accumulate"] = int(rng.choice(fitting))
    if case.stage == 3 and one_in_two():
        options["reduce"] = str(rng.choice(["once", "each"]))
    if case.stage == 3 and one_in_two():
        options["gather"] = str(rng.choice(["keep", "once_per_step"]))
    if one_in_two():
        options["reduce_dtype"] = jnp.float32
    return axes, options


def draw_well_conditioned(seed: int) -> tuple[Case, list[Any]]:
    """The seed's first drawing that can be compared, and its trajectory on one device."""
    for attempt in range(MAX_DRAWS):
        case = draw(seed, attempt)
        expected = well_conditioned(case)
        if expected is not None:
            return case, expected
    raise AssertionError(f"seed {seed}: no well-conditioned step in {MAX_DRAWS} drawings")


def well_conditioned(case: Case) -> list[Any] | None:
    """State and metrics after each step on one device; None where rounding noise shows in them."""
    step = jax.jit(case.step)
    expected = _trajectory(step, case.make_state(), case.batches)
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected) if _is_float(leaf)):
        return None
    for probe in range(3):
        moved = _trajectory(step, *_jittered(case, probe))
        if worst_error(moved, expected, case.bfloat16)[0] > 0.25:
            return None
    return expected


def _trajectory(step: Any, state: Any, batches: list[Any]) -> list[Any]:
    results = []
    for batch in batches:
        state, metrics = step(state, batch)
        results.append(jax.tree.map(_to_numpy, (state, metrics)))
    return results


def _jittered(case: Case, probe: int) -> tuple[Any, list[Any]]:
    rng = np.random.default_rng(probe)
    rows = rng.permutation(ROWS)

    def jitter(leaf):
        if not _is_float(leaf):
            return leaf
        ulps = np.float32(1.2e-7) * rng.integers(-1, 2, leaf.shape).astype(np.float32)
        return jnp.asarray(np.array(leaf) * (1 + ulps))

    batches = jax.tree.map(lambda leaf: leaf[rows] if leaf.ndim else leaf, case.batches)
    return jax.tree.map(jitter, case.make_state()), batches


def worst_error(actual: Any, expected: Any, bfloat16: bool = False) -> tuple[float, str]:
    """The largest error of all leaves, in units of the tolerance, and where it is."""
    assert str(jax.tree.structure(actual)) == str(jax.tree.structure(expected))
    worst = (0.0, "no leaf")
    leaves = zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, leaf), other in leaves:
        name = jax.tree_util.keystr(path)
        got, want = _to_numpy(leaf), _to_numpy(other)
        assert (got.shape, got.dtype) == (want.shape, want.dtype), name
        worst = max(worst, (_error(got, want, bfloat16), name))
    return worst


def _error(got: np.ndarray, want: np.ndarray, bfloat16: bool) -> float:
    if np.array_equal(got, want):
        return 0.0
    if not _is_float(want) or not np.isfinite(got).all():
        return np.inf
    rtol, leaf_rtol = (BFLOAT16_RTOL, BFLOAT16_LEAF_RTOL) if bfloat16 else (RTOL, LEAF_RTOL)
    got, want = got.astype(np.float64), want.astype(np.float64)
    size = np.abs(want)
    return float(np.max(np.abs(got - want) / (rtol * size + leaf_rtol * size.max() + ATOL)))


def _to_numpy(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.array(leaf)


def _fresh(leaf: Any) -> Any:
    """A copy that may be donated, made without compiling a program for its shape."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jnp.copy(leaf) if is_key else jnp.asarray(np.array(leaf))


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


# ---------------------------------------------------------------- drawing the forward pass


class Sampler:
    """Draws operations one by one; each appends a line to the listing and a function to `ops`."""

    def __init__(self, seed: int, attempt: int):
        self.rng = np.random.default_rng([seed, attempt])
        self.lines: list[str] = []
        self.ops: list[tuple[str, Op]] = []
        self.params: dict[str, np.ndarray] = {}
        self.batch: dict[str, Callable[[], np.ndarray]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}  # of each value, without the rows
        self.features: set[str] = set()
        self.bfloat16 = False
        # Varying-axes typing refuses the step as it is; only jax.grad and jax.value_and_grad will do.
        self.untyped = False

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def choose(self, options: Any) -> Any:
        """One of a collection; a dict's values are weights, unless they are functions."""
        weights = None
        if isinstance(options, dict) and not callable(next(iter(options.values()))):
            weights = np.array(list(options.values()), float)
            weights /= weights.sum()
        options = list(options)
        return options[self.rng.choice(len(options), p=weights)]

    def dim(self) -> int:
        return self.choose(DIMS)

    def value(self, accept: Callable[[tuple[int, ...]], bool] = lambda shape: True) -> str:
        """An earlier value, most often the latest; raises LookupError where none fits."""
        names = [name for name, shape in self.shapes.items() if accept(shape)]
        if not names:
            raise LookupError
        return names[-1] if self.chance(0.7) else self.choose(names)

    def param(self, shape: tuple[int, ...], scale: float, offset: float = 0.0) -> str:
        """A parameter's name: a new one, or (a quarter of the time) one that is already in use."""
        used = [name for name, leaf in self.params.items() if leaf.shape == shape]
        if used and offset == 0 and self.chance(0.25):
            self.features.add("tied")
            return self.choose(used)
        name = f"p{len(self.params)}"
        self.params[name] = (offset + scale * self.rng.normal(size=shape)).astype(np.float32)
        self.lines.append(f"  {name} = float32{list(shape)}")
        return name

    def data(self, name: str, make: Callable[[np.random.Generator], np.ndarray]) -> str:
        rng_seed = int(self.rng.integers(2**31))
        calls = iter(range(10**9))
        self.batch.setdefault(name, lambda: make(np.random.default_rng([rng_seed, next(calls)])))
        return name

    def emit(self, text: str, shape: tuple[int, ...], op: Op) -> str:
        name = f"h{len(self.ops)}"
        self.ops.append((name, op))
        self.shapes[name] = shape
        self.lines.append(f"  {name}{list(shape)} = {text}")
        return name

    def weight(self, n: int, m: int) -> tuple[str, Weight]:
        """A matrix made of parameters in one of many ways."""
        scale = n**-0.5
        kind = self.choose(WEIGHT_KINDS)
        if kind in ("halves", "split") and m % 2:
            kind = "plain"
        if kind == "bfloat16":
            self.bfloat16 = True
        self.features.add(f"weight:{kind}")
        if kind == "transposed":
            a = self.param((m, n), scale)
            return f"{a}.T", lambda p, c: p[a].T
        if kind == "reshaped":
            a = self.param((n * m,), scale)
            return f"{a}.reshape({n}, {m})", lambda p, c: p[a].reshape(n, m)
        if kind == "halves":
            a, b = self.param((n, m // 2), scale), self.param((n, m // 2), scale)
            return f"concat({a}, {b}, 1)", lambda p, c: jnp.concatenate([p[a], p[b]], 1)
        if kind == "split":
            a = self.param((n, 2, m // 2), scale)
            return (
                f"flip({a}, 1).reshape({n}, {m})",
                lambda p, c: jnp.flip(p[a], 1).reshape(n, m),
            )
        if kind == "sliced":
            a = self.param((2 * n, m), scale)
            return f"{a}[{n}:]", lambda p, c: p[a][n:]
        if kind == "low rank":
            a, b, d = self.param((n, m), scale), self.param((n, 2), scale), self.param((2, m), 0.5)
            return (
                f"stop_gradient({a}) + {b} @ {d}",
                lambda p, c: jax.lax.stop_gradient(p[a]) + p[b] @ p[d],
            )
        if kind == "normalized":
            a, g = self.param((n, m), 1.0), self.param((m,), 0.1, offset=1.0)
            return (
                f"{g} * {a} / norm({a}, axis=0)",
                lambda p, c: p[g][None] * p[a] * jax.lax.rsqrt(jnp.sum(p[a] ** 2, 0) + 0.1)[None],
            )
        if kind == "picked":
            a = self.param((3, n, m), scale)
            return f"{a}[step % 3]", lambda p, c: p[a][c.step % 3]
        if kind == "summed":
            a, b = self.param((n, m), 0.7 * scale), self.param((n, 1), 0.7 * scale)
            return f"{a} + {b}", lambda p, c: p[a] + jnp.broadcast_to(p[b], (n, m))
        a = self.param((n, m), scale)
        if kind == "triangular":
            return f"tril({a})", lambda p, c: jnp.tril(p[a])
        if kind == "squashed":
            return f"tanh({a})", lambda p, c: jnp.tanh(p[a])
        if kind == "frozen":
            return f"stop_gradient({a})", lambda p, c: jax.lax.stop_gradient(p[a])
        if kind == "bfloat16":
            return f"bfloat16({a})", lambda p, c: p[a].astype(jnp.bfloat16).astype(jnp.float32)
        return a, lambda p, c: p[a]

    def mlp(self, n: int) -> tuple[str, Callable[[Params, Context, jax.Array], jax.Array]]:
        """A small block from n features to n, for bodies of loops and branches."""
        text, w = self.weight(n, n)
        b = self.param((n,), 0.1)

        def block(p, c, h):
            weight, bias = w(p, c), p[b]
            return jnp.tanh(h @ weight + bias.reshape((1,) * (h.ndim - 1) + (n,)))

        return f"tanh(h @ {text} + {b})", block

    # ------------------------------------------------------------ operations

    def dense(self) -> None:
        h, m = self.value(), self.dim()
        shape = self.shapes[h]
        text, w = self.weight(shape[-1], m)
        self.emit(f"{h} @ {text}", (*shape[:-1], m), lambda p, v, c: v[h] @ w(p, c))

    def heads(self) -> None:
        h = self.value(lambda shape: len(shape) == 1)
        n, k, d = self.shapes[h][0], self.choose((2, 4, 8)), self.choose((2, 3, 8))
        w = self.param((n, k, d), n**-0.5)
        self.emit(
            f"einsum('bn,nkd->bkd', {h}, {w})",
            (k, d),
            lambda p, v, c: jnp.einsum("bn,nkd->bkd", v[h], p[w]),
        )

    def affine(self) -> None:
        h = self.value()
        shape = self.shapes[h]
        scale, bias = self.param(shape[-1:], 0.1, offset=1.0), self.param(shape, 0.1)

        def op(p, v, c):
            broadcast = p[scale].reshape((1,) * len(shape) + shape[-1:])
            return v[h] * broadcast + p[bias][None]

        self.emit(f"{h} * {scale} + {bias}", shape, op)

    def temperature(self) -> None:
        h, a = self.value(), self.param((), 0.1, offset=1.0)
        self.emit(f"{h} / {a}", self.shapes[h], lambda p, v, c: v[h] / p[a])

    def activation(self) -> None:
        h = self.value()
        name = self.choose(ACTIVATIONS)
        function = ACTIVATIONS[name]
        self.emit(f"{name}({h})", self.shapes[h], lambda p, v, c: function(v[h]))

    def layer_norm(self) -> None:
        h = self.value(lambda shape: shape[-1] > 1)
        g = self.param(self.shapes[h][-1:], 0.1, offset=1.0)

        def op(p, v, c):
            centered = v[h] - jnp.mean(v[h], -1, keepdims=True)
            scale = jax.lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + 0.1)
            return centered * scale * p[g].reshape((1,) * (centered.ndim - 1) + (-1,))

        self.emit(f"layer_norm({h}) * {g}", self.shapes[h], op)

    def transpose(self) -> None:
        h = self.value(lambda shape: len(shape) == 2)
        a, b = self.shapes[h]
        self.emit(f"{h}.mT", (b, a), lambda p, v, c: jnp.swapaxes(v[h], 1, 2))

    def reshape(self) -> None:
        h = self.value()
        shape = self.shapes[h]
        size = int(np.prod(shape))
        splits = [(k, size // k) for k in (2, 4, 8) if size % k == 0]
        new = (size,) if len(shape) == 2 else self.choose([*splits, (size, 1)])
        self.emit(f"{h}.reshape({new})", new, lambda p, v, c: v[h].reshape(-1, *new))

    def slice(self) -> None:
        h = self.value(lambda shape: shape[-1] >= 4)
        shape = self.shapes[h]
        stop = int(self.rng.integers(2, shape[-1]))
        self.emit(f"{h}[..., 1:{stop}]", (*shape[:-1], stop - 1), lambda p, v, c: v[h][..., 1:stop])

    def concatenate(self) -> None:
        h = self.value()
        other = self.value(lambda shape: shape[:-1] == self.shapes[h][:-1])
        last = self.shapes[h][-1] + self.shapes[other][-1]
        self.emit(
            f"concat({h}, {other})",
            (*self.shapes[h][:-1], last),
            lambda p, v, c: jnp.concatenate([v[h], v[other]], -1),
        )

    def reduce(self) -> None:
        h = self.value(lambda shape: len(shape) == 2)
        shape = self.shapes[h]
        name, dim = self.choose(("mean", "sum", "max")), self.choose((1, 2))
        function = getattr(jnp, name)
        scale = shape[dim - 1] ** -0.5 if name == "sum" else 1.0
        self.emit(
            f"{name}({h}, {dim}) * {scale:.3f}",
            (shape[2 - dim],),
            lambda p, v, c: function(v[h], dim) * jnp.float32(scale),
        )

    def cumsum(self) -> None:
        h = self.value()
        scale = self.shapes[h][-1] ** -0.5
        self.emit(
            f"cumsum({h}) * {scale:.3f}",
            self.shapes[h],
            lambda p, v, c: jnp.cumsum(v[h], -1) * jnp.float32(scale),
        )

    def combine(self) -> None:
        h = self.value()
        other = self.value(lambda shape: shape == self.shapes[h])
        gated = self.chance(0.5)

        def op(p, v, c):
            return v[h] * jax.nn.sigmoid(v[other]) if gated else 0.7 * (v[h] + v[other])

        text = f"{h} * sigmoid({other})" if gated else f"0.7 * ({h} + {other})"
        self.emit(text, self.shapes[h], op)

    def where(self) -> None:
        h = self.value()
        a = self.param(self.shapes[h], 0.5)
        self.emit(
            f"where({h} > 0, {h} * {a}, {h})",
            self.shapes[h],
            lambda p, v, c: jnp.where(v[h] > 0, v[h] * p[a][None], v[h]),
        )

    def attention(self) -> None:
        h = self.value(lambda shape: len(shape) == 2 and shape[0] > 1)
        scale = jnp.float32(self.shapes[h][1] ** -0.5)

        def op(p, v, c):
            scores = jnp.einsum("btd,bsd->bts", v[h], v[h]) * scale
            return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), v[h])

        self.emit(f"attention({h})", self.shapes[h], op)

    def convolution(self) -> None:
        h = self.value(lambda shape: len(shape) == 2)
        channels, m = self.shapes[h][1], self.choose((2, 8))
        w = self.param((2, channels, m), (2 * channels) ** -0.5)

        def op(p, v, c):
            return jax.lax.conv_general_dilated(
                v[h], p[w], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
            )

        self.emit(f"conv({h}, {w})", (self.shapes[h][0], m), op)

    def embedding(self) -> None:
        vocabulary, d = self.choose((8, 10, 16)), self.dim()
        sequence = self.chance(0.5)
        shape = (ROWS, 3) if sequence else (ROWS,)
        ids = self.data(
            f"ids{len(self.ops)}", lambda rng: rng.integers(vocabulary, size=shape, dtype=np.int32)
        )
        table = self.param((vocabulary, d), 1.0)
        self.emit(
            f"{table}[{ids}]", (3, d) if sequence else (d,), lambda p, v, c: p[table][c.batch[ids]]
        )
        if self.chance(0.4):
            h = f"h{len(self.ops) - 1}"
            scale = jnp.float32(d**-0.5)
            self.features.add("tied")
            self.emit(
                f"{h} @ {table}.T",
                (*self.shapes[h][:-1], vocabulary),
                lambda p, v, c: (v[h] @ p[table].T) * scale,
            )

    def layers(self) -> None:
        """A scan over stacked layers, with or without remat."""
        h = self.value()
        n, depth = self.shapes[h][-1], self.choose({1: 1, 2: 3, 3: 3, 4: 2, 8: 1})
        w, b = self.param((depth, n, n), n**-0.5), self.param((depth, n), 0.1)
        remat = self.choose(REMAT)
        reverse, collect = self.chance(0.2), self.chance(0.3)

        def body(h, layer):
            weight, bias = layer
            out = jnp.tanh(h @ weight + bias.reshape((1,) * (h.ndim - 1) + (n,)))
            return out, jnp.mean(out, -1)

        def op(p, v, c):
            last, means = jax.lax.scan(REMAT[remat](body), v[h], (p[w], p[b]), reverse=reverse)
            return last + jnp.sum(means, 0)[..., None] / depth if collect else last

        self.emit(
            f"scan({remat}(tanh(h @ {w}[i] + {b}[i])), {h}, {reverse=}, {collect=})",
            self.shapes[h],
            op,
        )

    def repeated(self) -> None:
        """A loop that uses one layer several times."""
        h = self.value()
        text, block = self.mlp(self.shapes[h][-1])
        kind = self.choose(("fori", "zero carry", "unrolled"))
        self.untyped |= kind == "zero carry"

        def op(p, v, c):
            if kind == "unrolled":
                return block(p, c, block(p, c, v[h]))
            if kind == "fori":
                return jax.lax.fori_loop(0, 2, lambda i, h: block(p, c, h), v[h])
            total = jnp.zeros_like(v[h])
            return jax.lax.scan(lambda s, _: (block(p, c, s + v[h]), None), total, length=2)[0]

        self.features.add(f"repeated:{kind}")
        self.emit(f"{kind}(2, {text}, {h})", self.shapes[h], op)

    def branches(self) -> None:
        """A branch that all devices take alike: chosen by the step or by a scalar in the batch."""
        h = self.value()
        text, block = self.mlp(self.shapes[h][-1])
        other_text, other = self.mlp(self.shapes[h][-1])
        kind = self.choose(("cond", "flag", "switch", "constant"))
        self.untyped |= kind == "constant"
        if kind == "flag":
            self.data("flag", lambda rng: rng.integers(2, size=(), dtype=np.int32))

        def op(p, v, c):
            index = c.batch["flag"] if kind == "flag" else c.step
            first, second = functools.partial(block, p, c), functools.partial(other, p, c)
            if kind == "switch":
                return jax.lax.switch(index % 3, [first, second, lambda h: h], v[h])
            if kind == "constant":
                return jax.lax.cond(index % 2 == 0, first, jnp.zeros_like, v[h])
            return jax.lax.cond(index % 2 == 0, first, second, v[h])

        self.features.add(f"branches:{kind}")
        self.emit(f"{kind}(step, {text}, {other_text}, {h})", self.shapes[h], op)

    def branch_per_row(self) -> None:
        """A branch on the data, row by row: devices take different ones."""
        h = self.value()
        text, block = self.mlp(self.shapes[h][-1])
        kind = self.choose(("map", "vmap"))

        def one(p, c, row):
            predicate = jnp.sum(row) > 0
            return jax.lax.cond(
                predicate, lambda r: block(p, c, r[None])[0], lambda r: 0.5 * r, row
            )

        def op(p, v, c):
            if kind == "map":
                return jax.lax.map(lambda row: one(p, c, row), v[h])
            return jax.vmap(lambda row: one(p, c, row))(v[h])

        self.features.add(f"branch_per_row:{kind}")
        self.emit(f"{kind}(cond(sum(row) > 0, {text}, row / 2), {h})", self.shapes[h], op)

    def undifferentiated(self) -> None:
        """A loop whose number of turns depends on the data or on the parameters; no gradients."""
        h = self.value()
        a = self.param(self.shapes[h][-1:], 1.0)
        kind = self.choose(("rows", "params"))

        def halve(x):
            small = jax.lax.while_loop(
                lambda s: jnp.max(jnp.abs(s)) > 0.7, lambda s: s * 0.5, jax.lax.stop_gradient(x)
            )
            return small

        def op(p, v, c):
            if kind == "rows":
                return v[h] + jax.vmap(halve)(v[h])
            return v[h] * (1 + halve(p[a])).reshape((1,) * (v[h].ndim - 1) + (-1,))

        self.features.add(f"undifferentiated:{kind}")
        self.emit(f"{h} with while_loop over {kind} ({a})", self.shapes[h], op)

    def wrapped(self) -> None:
        """A block inside jit, checkpoint, vmap or a custom derivative."""
        h = self.value()
        text, block = self.mlp(self.shapes[h][-1])
        kind = self.choose(("jit", "checkpoint", "vmap", "custom_jvp", "custom_vjp"))
        self.untyped |= kind == "custom_vjp"

        def op(p, v, c):
            def call(p, h):
                return block(p, c, h)

            if kind == "jit":
                return jax.jit(call)(p, v[h])
            if kind == "checkpoint":
                return jax.checkpoint(call)(p, v[h])
            if kind == "vmap":
                return jax.vmap(lambda row: call(p, row[None])[0])(v[h])
            if kind == "custom_jvp":
                return _custom_square(call(p, v[h]))
            return _with_custom_vjp(call)(p, v[h])

        self.features.add(f"wrapped:{kind}")
        self.emit(f"{kind}({text}, {h})", self.shapes[h], op)

    def input_gradient(self) -> None:
        """A gradient with respect to data, inside the loss: second derivatives, never reduced."""
        h = self.value(lambda shape: len(shape) == 1)
        text, block = self.mlp(self.shapes[h][0])

        def op(p, v, c):
            return jax.vmap(jax.grad(lambda row: jnp.sum(block(p, c, row[None]))))(v[h])

        self.emit(f"vmap(grad(sum({text})))({h})", self.shapes[h], op)

    def buffer(self) -> None:
        """A constant integer leaf among the parameters."""
        h = self.value()
        n = self.shapes[h][-1]
        name = f"p{len(self.params)}"
        self.params[name] = self.rng.permutation(n).astype(np.int32)
        self.lines.append(f"  {name} = int32[{n}]")
        self.emit(f"{h}[..., {name}]", self.shapes[h], lambda p, v, c: v[h][..., p[name]])

    # ------------------------------------------------------------ the loss

    def loss(self) -> Callable[[Params, Context], tuple[jax.Array, dict[str, jax.Array]]]:
        """Draws the graph and a loss; returns `loss(params, context) -> (loss, auxiliary)`."""
        n = self.choose((3, 4, 8, 16))
        self.data("x", lambda rng: rng.normal(size=(ROWS, n)).astype(np.float32))
        self.emit("x", (n,), lambda p, v, c: c.batch["x"])
        for _ in range(self.rng.integers(1, 5)):
            self.operation(self.choose(OPERATIONS))
            last = list(self.shapes)[-1]
            if np.prod(self.shapes[last]) > 64:  # keep programs tiny
                shape = self.shapes[last]
                self.emit(f"mean({last}, 1)", shape[1:] or (1,), _row_mean(last, len(shape)))
        return self.head(list(self.shapes)[-1])

    def operation(self, name: str) -> None:
        try:
            getattr(self, name)()
        except LookupError:  # no value has the shape for it yet
            with contextlib.suppress(LookupError):
                self.heads()
                getattr(self, name)()
                self.features.add(name)
        else:
            self.features.add(name)

    def head(self, h: str) -> Callable[[Params, Context], tuple[jax.Array, dict[str, jax.Array]]]:
        size = int(np.prod(self.shapes[h]))
        kind = self.choose(("squares", "cross entropy", "huber", "logistic"))
        k = {"logistic": 1, "cross entropy": self.choose((3, 8))}.get(kind, self.dim())
        text, w = self.weight(size, k)
        decay = self.chance(0.15)
        decayed = [name for name, leaf in self.params.items() if _is_float(leaf)][0]
        if kind == "cross entropy":
            y = self.data("labels", lambda rng: rng.integers(k, size=(ROWS,), dtype=np.int32))
        elif kind == "logistic":
            y = self.data("labels", lambda rng: rng.integers(2, size=(ROWS,), dtype=np.int32))
        else:
            y = self.data("y", lambda rng: rng.normal(size=(ROWS, k)).astype(np.float32))
        note = f" + 0.01 * sum({decayed} ** 2)" if decay else ""
        self.features |= {f"loss:{kind}"} | ({"loss:decay"} if decay else set())
        self.lines.append(f"  loss = mean({kind}({h}.flat @ {text}, {y})){note}")

        def loss(params, context):
            values: Values = {}
            for name, op in self.ops:
                values[name] = op(params, values, context)
            out = values[h].reshape(-1, size) @ w(params, context)
            value = jnp.mean(_row_losses(kind, out, context.batch[y]))
            if decay:
                value = value + 0.01 * jnp.sum(params[decayed] ** 2)
            return value, {"out": jnp.mean(out, 0)}

        return loss


def _row_mean(h: str, ndim: int) -> Op:
    return lambda p, v, c: jnp.mean(v[h], 1, keepdims=ndim == 1)


def _row_losses(kind: str, out: jax.Array, y: jax.Array) -> jax.Array:
    if kind == "squares":
        return jnp.mean(jnp.square(out - y), -1)
    if kind == "huber":
        return jnp.mean(optax.huber_loss(out, y), -1)
    if kind == "logistic":
        return optax.sigmoid_binary_cross_entropy(out[:, 0], y.astype(jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(out, y)


@jax.custom_jvp
def _custom_square(x):
    return 0.5 * x * x


@_custom_square.defjvp
def _custom_square_jvp(primals, tangents):
    return _custom_square(*primals), primals[0] * tangents[0]


def _with_custom_vjp(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The function with its own derivative written out as a custom one."""
    wrapped = jax.custom_vjp(function)
    wrapped.defvjp(lambda *args: jax.vjp(function, *args), lambda vjp, cotangent: vjp(cotangent))
    return wrapped


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "softmax": jax.nn.softmax,
    "sin": jnp.sin,
    "exp": lambda x: jnp.exp(-jnp.square(x)),
}
REMAT: dict[str, Callable[[Any], Any]] = {
    "plain": lambda body: body,
    "remat": jax.checkpoint,
    "remat, saving dots": functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable
    ),
}
WEIGHT_KINDS = {
    "plain": 40,
    "transposed": 10,
    "reshaped": 7,
    "halves": 5,
    "split": 4,
    "sliced": 5,
    "low rank": 7,
    "normalized": 6,
    "picked": 4,
    "summed": 4,
    "triangular": 3,
    "squashed": 3,
    "frozen": 4,
    "bfloat16": 2,
}
OPERATIONS = {
    "dense": 20,
    "heads": 5,
    "affine": 6,
    "temperature": 3,
    "activation": 14,
    "layer_norm": 6,
    "transpose": 4,
    "reshape": 5,
    "slice": 4,
    "concatenate": 4,
    "reduce": 4,
    "cumsum": 3,
    "combine": 6,
    "where": 4,
    "attention": 4,
    "convolution": 3,
    "embedding": 8,
    "layers": 12,
    "repeated": 6,
    "branches": 6,
    "branch_per_row": 4,
    "undifferentiated": 4,
    "wrapped": 7,
    "input_gradient": 2,
    "buffer": 3,
}


# ---------------------------------------------------------------- drawing the rest of the step

# Adam's epsilon is large, so that what is zero but for rounding stays there.
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "nesterov": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(1e-2, eps=1e-2, weight_decay=1e-2),
    "clip, adam": lambda: optax.chain(
        optax.clip_by_global_norm(0.3), optax.adam(optax.linear_schedule(1e-2, 0, 9), eps=1e-2)
    ),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, eps=1e-4),
    "lamb": lambda: optax.lamb(1e-2, eps=1e-2),
    "lion": lambda: optax.lion(1e-3),
    "rms": lambda: optax.chain(
        optax.clip_by_block_rms(0.1),
        optax.scale_by_rms(eps=1e-2),
        optax.add_decayed_weights(1e-2),
        optax.trace(0.9),
        optax.scale(-1e-2),
    ),
    "accumulate": lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
}
OPTIMIZER_WEIGHTS = {name: 3 if name in ("sgd", "nesterov") else 1 for name in OPTIMIZERS}
# How the gradient is taken.
GRADIENTS = {
    "plain": 40,
    "microbatch scan": 8,
    "microbatch scan, zero carry": 6,
    "microbatch unrolled": 6,
    "sam": 10,
    "inner scan": 8,
    "vjp": 6,
    "subset": 8,
    "forward over reverse": 3,
}
EXTRAS = {
    "ema": 0.25,
    "statistics": 0.2,
    "guard": 0.15,
    "noise": 0.12,
    "rate": 0.15,
    "norms": 0.4,
    "counts": 0.2,
}


class Tuple(NamedTuple):
    """A state that is a named tuple."""

    fields: tuple[Any, ...]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["fields"], meta_fields=["names"])
@dataclasses.dataclass
class Data:
    """A state that is a registered dataclass."""

    names: tuple[str, ...]
    fields: list[Any]


def _pack(container: str, names: list[str], fields: dict[str, Any]) -> Any:
    fields = {name: fields[name] for name in names}
    if container == "tuple":
        return tuple(fields.values())
    if container == "named tuple":
        return Tuple(tuple(fields.values()))
    if container == "dataclass":
        return Data(tuple(fields), list(fields.values()))
    if container == "nested":
        return {"outer": [{name: leaf} for name, leaf in fields.items()], "none": None}
    return fields


def _unpack(container: str, names: list[str], packed: Any) -> dict[str, Any]:
    if container in ("named tuple", "dataclass"):
        packed = packed.fields
    if container == "nested":
        return {name: part[name] for name, part in zip(names, packed["outer"], strict=True)}
    return packed if container == "dict" else dict(zip(names, packed, strict=True))


CONTAINERS = ("dict", "tuple", "named tuple", "dataclass", "nested")


def draw(seed: int, attempt: int = 0) -> Case:
    """A random train step; the same seed and attempt give the same one."""
    sampler = Sampler(seed, attempt)
    loss_fn = sampler.loss()
    has_integers = any(not _is_float(leaf) for leaf in sampler.params.values())
    plan = _draw_plan(sampler)
    containers = [sampler.choose(CONTAINERS) for _ in range(3)]
    param_names, batch_names = list(sampler.params), list(sampler.batch)
    plan["trained"] = [name for name in param_names if _is_float(sampler.params[name])]
    if plan["gradient"] == "subset" or has_integers:
        plan["gradient"] = "subset"
        keep = max(1, int(0.7 * len(plan["trained"])))
        plan["trained"] = sorted(sampler.rng.permutation(plan["trained"]).tolist()[:keep])
    step, make_fields = _make_step(loss_fn, sampler.params, plan)
    state_names = list(jax.eval_shape(make_fields))

    def packed_step(state, batch):
        fields = _unpack(containers[0], state_names, state)
        fields["params"] = _unpack(containers[1], param_names, fields["params"])
        fields, metrics = step(dict(fields), _unpack(containers[2], batch_names, batch))
        fields["params"] = _pack(containers[1], param_names, fields["params"])
        return _pack(containers[0], state_names, fields), metrics

    def make_state():
        fields = make_fields()
        fields["params"] = _pack(containers[1], param_names, fields["params"])
        state = _pack(containers[0], state_names, fields)
        return jax.tree.map(_fresh, state)

    def make_batch():
        arrays = {name: make() for name, make in sampler.batch.items()}
        return _pack(containers[2], batch_names, arrays)

    lines = [*sampler.lines, f"  {plan}", f"  containers: {containers}"]
    features = sampler.features | {f"gradient:{plan['gradient']}", f"optimizer:{plan['optimizer']}"}
    features |= {f"extra:{extra}" for extra in plan["extras"]}
    features |= {f"container:{container}" for container in containers}
    return Case(
        seed=seed,
        listing="\n".join(lines),
        num_devices=sampler.choose(NUM_DEVICES),
        stage=sampler.choose(STAGES),
        step=packed_step,
        make_state=make_state,
        batches=[make_batch() for _ in range(NUM_STEPS)],
        bfloat16=sampler.bfloat16,
        features=frozenset(features),
    )


def _draw_plan(sampler: Sampler) -> dict[str, Any]:
    gradient = sampler.choose(GRADIENTS)
    if gradient in ("vjp", "forward over reverse") and sampler.untyped:
        gradient = "plain"  # only jax.grad and jax.value_and_grad can mark a reduction
    optimizers = ("sgd", "nesterov") if sampler.bfloat16 else OPTIMIZER_WEIGHTS
    return {
        "gradient": gradient,
        "optimizer": sampler.choose(optimizers),
        "extras": [extra for extra, chance in EXTRAS.items() if sampler.chance(chance)],
        "old-style key": sampler.chance(0.5),
    }


def _make_step(loss_fn, params, plan):
    """`step(fields, batch)` on dicts, and a function that makes the fields of a fresh state."""
    tx = OPTIMIZERS[plan["optimizer"]]()
    extras, trained = plan["extras"], plan["trained"]

    def make_fields():
        leaves = {name: jnp.asarray(leaf) for name, leaf in params.items()}
        fields = {
            "params": leaves,
            "opt": tx.init({name: leaves[name] for name in trained}),
            "step": jnp.zeros((), jnp.int32),
        }
        if "ema" in extras:
            fields["ema"] = {name: leaves[name] for name in trained}
        if "statistics" in extras:
            fields["statistics"] = jnp.zeros((), jnp.float32)
        if "noise" in extras:
            key = jax.random.PRNGKey(1) if plan["old-style key"] else jax.random.key(1)
            fields["key"] = key
        if "rate" in extras:
            fields["rate"] = jnp.float32(0.5)
        return fields

    def split(fields):
        return {name: fields["params"][name] for name in trained}

    def one_update(fields, batch):
        def loss_of(trained_params, rows):
            params = {**fields["params"], **trained_params}
            return loss_fn(params, Context(rows, fields["step"]))

        (loss, aux), grads = _gradient(plan["gradient"], loss_of, split(fields), batch)
        if "noise" in extras:
            fields["key"], key = jax.random.split(fields["key"])
            keys = dict(zip(trained, jax.random.split(key, len(trained)), strict=True))
            grads = {
                name: grad + 1e-2 * jax.random.normal(keys[name], grad.shape)
                for name, grad in grads.items()
            }
        if "rate" in extras:
            grads = jax.tree.map(lambda grad: grad * fields["rate"], grads)
            fields["rate"] = 0.9 * fields["rate"]
        _apply(tx, fields, grads, trained, guarded="guard" in extras)
        if "ema" in extras:
            fields["ema"] = optax.incremental_update(split(fields), fields["ema"], 0.1)
        if "statistics" in extras:
            mean = jnp.mean(aux["out"])
            fields["statistics"] = 0.9 * fields["statistics"] + 0.1 * mean
        return fields, {"loss": loss, **_metrics(extras, aux, grads, split(fields))}

    def step(fields, batch):
        if plan["gradient"] == "inner scan":
            fields, stacked = jax.lax.scan(
                lambda carry, _: one_update(dict(carry), batch), fields, length=2
            )
            metrics = jax.tree.map(lambda values: values[-1], stacked)
        else:
            fields, metrics = one_update(fields, batch)
        fields["step"] = fields["step"] + 1
        return fields, metrics

    return step, make_fields


def _apply(tx, fields, grads, trained, guarded):
    old = {name: fields["params"][name] for name in trained}

    def apply(operand):
        params, opt = operand
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt

    operand = (old, fields["opt"])
    if guarded:
        finite = jnp.isfinite(optax.tree.norm(grads))
        new, fields["opt"] = jax.lax.cond(finite, apply, lambda operand: operand, operand)
    else:
        new, fields["opt"] = apply(operand)
    fields["params"] = {**fields["params"], **new}


def _metrics(extras, aux, grads, params) -> dict[str, jax.Array]:
    metrics = {}
    if "norms" in extras:
        metrics["grad_norm"] = optax.tree.norm(grads)
        metrics["param_norms"] = {name: jnp.sqrt(jnp.sum(leaf**2)) for name, leaf in params.items()}
        metrics["out"] = aux["out"]
    if "counts" in extras:
        metrics["num_params"] = jnp.int32(len(params))
        metrics["largest"] = jnp.max(jnp.stack([jnp.max(leaf) for leaf in params.values()]))
    return metrics


def _gradient(kind: str, loss_of: Any, params: Params, batch: dict[str, jax.Array]) -> Any:
    """`((loss, aux), grads)`, taken in one of many ways that all give the mean over the batch."""
    value_and_grad = jax.value_and_grad(loss_of, has_aux=True)
    if kind == "sam":
        grads = jax.grad(lambda p: loss_of(p, batch)[0])(params)
        norm = optax.tree.norm(grads) + 0.1
        params = jax.tree.map(lambda p, g: p + 0.05 * g / norm, params, grads)
    elif kind == "vjp":
        loss, vjp, aux = jax.vjp(lambda p: loss_of(p, batch), params, has_aux=True)
        return (loss, aux), vjp(jnp.ones_like(loss))[0]
    elif kind == "forward over reverse":
        grad = jax.grad(lambda p: loss_of(p, batch)[0])
        grads, curvature = jax.jvp(grad, (params,), (params,))
        return loss_of(params, batch), jax.tree.map(lambda g, h: g + 0.01 * h, grads, curvature)
    elif kind.startswith("microbatch"):
        return _microbatches(kind, value_and_grad, params, batch)
    return value_and_grad(params, batch)


def _microbatches(kind: str, value_and_grad: Any, params: Params, batch: dict[str, jax.Array]):
    parts = {
        name: leaf.reshape(2, -1, *leaf.shape[1:]) for name, leaf in batch.items() if leaf.ndim
    }
    whole = {name: leaf for name, leaf in batch.items() if not leaf.ndim}

    def part(index):
        return {**whole, **{name: leaf[index] for name, leaf in parts.items()}}

    if kind == "microbatch scan, zero carry":
        results = jax.eval_shape(value_and_grad, params, part(0))
        start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), results)
        rest = parts
    else:
        start = value_and_grad(params, part(0))
        rest = {name: leaf[1:] for name, leaf in parts.items()}

    def add(total, rows):
        return jax.tree.map(jnp.add, total, value_and_grad(params, {**whole, **rows})), None

    if kind == "microbatch unrolled":
        total, _ = add(start, {name: leaf[1] for name, leaf in parts.items()})
    else:
        total, _ = jax.lax.scan(add, start, rest)
    return jax.tree.map(lambda leaf: leaf / 2, total)


def feature_counts(seeds: Iterable[int]) -> dict[str, int]:
    """How often each operation and feature is drawn."""
    return collections.Counter(feature for seed in seeds for feature in draw(seed).features)
