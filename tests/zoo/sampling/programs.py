"""Whole programs: a step as source, with its state and its data, drawn from a seed."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ._draw import Draw
from ._helpers import NAMESPACE, OPTIMIZERS
from .couplings import COUPLINGS, EVEN_ROWS, ROWS_AT_ONCE
from .gradients import AFTERWARDS, GRADIENTS, HALVES, PER_EXAMPLE
from .losses import EXTRA_TERMS, LOSSES, METRICS, ROW_LOSSES
from .rowwise import LAYERS
from .state import EXTRAS

NUM_STEPS = 2
CONTAINERS = {"dict": 4, "tuple": 1, "named tuple": 1, "dataclass": 1, "nested": 1}


class Tuple(NamedTuple):
    """A state that is a named tuple."""

    fields: tuple[Any, ...]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["fields"], meta_fields=["names"])
@dataclasses.dataclass
class Data:
    """A state that is a registered dataclass."""

    names: tuple[str, ...]
    fields: list[Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """One drawn step.

    Attributes:
      seed: what it was drawn from, with the number of rows.
      source: the step, which is also its listing.
      features: names of what was drawn.
      narrow: the narrowest float that a value passes through.
      wide: the same program without its casts to narrower floats, if it has any.
      step: `step(state, b, t, w) -> (state, outputs)`; rows along dim 0 of `b`, along dim 1 of `t`.
      make_state: makes the state, anew, as it is before the first step.
      batches: `(b, t, w)` for each step, NumPy arrays (keys apart).
    """

    seed: int
    source: str
    features: frozenset[str]
    narrow: str
    step: Callable[..., Any]
    make_state: Callable[[], Any]
    batches: list[tuple[Any, Any, Any]]
    wide: "Program | None" = None


def draw(seed: int, rows: int, gentle: bool = False, dtype: str = "float64") -> Program:
    """A random train step over so many rows, of floats of this dtype; the same seed gives the same one.

    A gentle one has fewer couplings of rows and an optimizer that treats all elements alike: updates
    on the host refuse most others.
    """
    d = Draw(np.random.default_rng([seed, rows]), rows, gentle=gentle)
    d.per_example = d.chance(0.08)
    n = d.choose({1: 1, 3: 2, 4: 4, 6: 1})
    d.emit(d.data("b", "x", lambda rng: rng.normal(size=(rows, n))), n)
    for _ in range(d.rng.integers(1, 4)):
        _feature(d)
    if d.dims[h := list(d.dims)[-1]] < 2:
        h = d.emit(d.fill("{h} @ {rect}", h, m=3), 3)
    by_rows = d.per_example or d.chance(0.9 if d.gentle else 0.25)
    losses = ROW_LOSSES if by_rows else LOSSES
    d.lines.append(f"loss = {d.fill(losses[_chosen(d, losses, 'loss')][0], h)}")
    if not d.per_example:
        d.lines.append(
            f"loss = loss + {d.fill(EXTRA_TERMS[_chosen(d, EXTRA_TERMS, 'term')][0], h)}"
        )
    d.lines.append(f"aux['h'] = lax.stop_gradient({h})")
    most = 0 if d.per_example else 1 if d.gentle else 3
    for metric in _several(d, METRICS, "metric", most):
        d.lines.append(f"aux['{metric}'] = {d.fill(METRICS[metric][0], h)}")
    if not d.params:
        d.lines[0] += f"\n    h0 = h0 @ {d.param(n, n)}"
    body = _update(d, h)
    container = d.choose(CONTAINERS)
    d.features.add(f"container: {container}")
    return _program(d, seed, _source(d, body), container, dtype)


def _feature(d: Draw) -> None:
    """One more value of features, most often made of the latest."""
    by_rows = d.per_example or d.chance(0.97 if d.gentle else 0.45)
    table = LAYERS if by_rows else COUPLINGS
    name = _chosen(d, table, "layer" if by_rows else "coupling")
    if name in EVEN_ROWS and d.rows % 2:
        return
    h, text, m = d.value(), table[name][0], d.choose({1: 1, 2: 3, 3: 3, 4: 6, 5: 1, 8: 2})
    d.emit(d.fill(text, h, m=m), m if "{rect}" in text else d.dims[h])


def _chosen(d: Draw, table: dict[str, Any], kind: str) -> str:
    weights = {name: entry[-1] for name, entry in table.items()}
    if d.gentle and d.chance(0.95):
        weights = {name: weight for name, weight in weights.items() if name not in ROWS_AT_ONCE}
    name: str = d.choose(weights)
    d.features.add(f"{kind}: {name}")
    return name


def _several(d: Draw, table: dict[str, Any], kind: str, most: int) -> list[str]:
    return sorted({_chosen(d, table, kind) for _ in range(d.rng.integers(most + 1))})


def _update(d: Draw, h: str) -> list[str]:
    """The lines of one update, from gradients to the new state."""
    table: dict[str, Any] = GRADIENTS
    by_name = any("perm" in name for name in d.batch)
    if d.per_example and not by_name:
        table = PER_EXAMPLE
    elif d.rows % 4 == 0 and not d.timed and not by_name and not d.gentle and d.chance(0.15):
        table = HALVES
    gradient = _chosen(d, table, "gradient")
    if gradient == "adversarial" and len(d.params) < 2:
        gradient = "plain"
    afterwards = _chosen(d, AFTERWARDS, "grads")
    if afterwards == "by rate":
        d.state["rate"] = np.asarray(0.5)
    elementwise = {"nesterov": 5, "adamw": 2, "clip, adam": 1, "lion": 1, "every second": 1}
    every = {**dict.fromkeys(OPTIMIZERS, 1), "sgd": 8, "nesterov": 4, "adamw": 2}
    optimizer = d.choose(elementwise if d.gentle else every)
    d.features.add(f"optimizer: {optimizer}")
    lines = [d.fill(line, h) for line in table[gradient][0]]
    lines += ["h = aux.pop('h')", AFTERWARDS[afterwards][0]]
    lines += [
        f"tx = OPTIMIZERS['{optimizer}']()",
        "apply = lambda opt, p: tx.update(grads, opt, p)[::-1]",
    ]
    if d.chance(0.02 if d.gentle else 0.1):
        d.features.add("guard")
        lines += ["s['opt'], updates = lax.cond(jnp.isfinite(loss), apply, lambda opt, p: (opt, jax.tree.map("
                  "jnp.zeros_like, p)), s['opt'], p)"]  # fmt: skip
    else:
        lines += ["s['opt'], updates = apply(s['opt'], p)"]
    lines += ["p = s['p'] = optax.apply_updates(p, updates)"]
    for extra in _several(d, EXTRAS, "state", 2):
        init, renewal, _ = EXTRAS[extra]
        d.state[extra] = d.fill(init, h)
        d.updates.append(f"s['{extra}'] = {d.fill(renewal, h, s=f's[{extra!r}]')}")
    return [line for line in (*lines, *d.updates) if line]


def _source(d: Draw, body: list[str]) -> str:
    num = d.num_keys + 1
    keys = {
        "state": f"keys = random.split(s['key'], {num}); s['key'] = keys[0]",
        "argument": f"keys = random.split(w['key'], {num})",
        "step": f"keys = random.split(random.fold_in(random.key(3), s['step']), {num})",
        "": "keys = None",
    }
    head = [
        "s = dict(s)", "p, frozen, aux = s['p'], s['frozen'], {}",
        keys[d.key_kind.partition(" ")[2] or d.key_kind],
        "f = lambda p, b, t, s=dict(s): loss_fn(p, b, t, w, s, frozen, keys)",
    ]  # fmt: skip
    tail = ["s['step'] = s['step'] + 1", "return s, (loss, aux)"]
    text = "def loss_fn(p, b, t, w, s, frozen, keys):\n    aux = {}\n    "
    text += "\n    ".join([*d.lines, "return loss, aux"])
    text += "\n\ndef step(s, b, t, w):\n    " + "\n    ".join([*head, *body, *tail])
    if not d.gentle and d.chance(0.06):
        d.features.add("twice")
        text += (
            "\n\nonce = step\n\ndef step(s, b, t, w):\n"
            "    s, outs = lax.scan(lambda s, _: once(s, b, t, w), s, length=2)\n"
            "    return s, jax.tree.map(lambda x: x[-1], outs)"
        )
    return text + "\n"


def _program(d: Draw, seed: int, source: str, container: str, dtype: str) -> Program:
    optimizer = next(f for f in d.features if f.startswith("optimizer: ")).partition(": ")[2]
    names = sorted(["p", "frozen", "opt", "step", *d.state, *["key"] * ("state" in d.key_kind)])

    def array(leaf: Any) -> np.ndarray:
        leaf = np.asarray(leaf)
        return np.array(leaf, dtype if np.issubdtype(leaf.dtype, np.floating) else leaf.dtype)

    def make_state() -> Any:
        fields = {
            "p": {name: array(leaf) for name, leaf in d.params.items()},
            "frozen": {name: array(leaf) for name, leaf in d.frozen.items()},
            "step": np.zeros((), np.int32),
        }
        fields["opt"] = OPTIMIZERS[optimizer]().init(fields["p"])
        for name, value in d.state.items():
            value = eval(value, {"np": np, "p": fields["p"]}) if isinstance(value, str) else value
            fields[name] = jax.tree.map(array, value)
        if "state" in d.key_kind:
            fields["key"] = _key(d.key_kind, 1)
        return _pack(container, fields)

    # Jitted, it is traced once, for the reference and for jzero; a few are not.
    traced_once = not d.chance(0.1)

    def make_step(**meanings: Any) -> Callable[..., Any]:
        namespace = {**NAMESPACE, "np": np, **meanings}
        exec(compile(source, f"<program {seed}>", "exec"), namespace)

        def packed(state: Any, b: Any, t: Any, w: Any) -> Any:
            new, outputs = namespace["step"](_unpack(container, names, state), b, t, w)
            return _pack(container, new), outputs

        return jax.jit(packed) if traced_once else packed

    def make_batch(i: int) -> tuple[Any, Any, Any]:
        groups = [
            {
                k: array(make(np.random.default_rng([seed, i, *k.encode()])))
                for k, make in group.items()
            }
            for group in (d.batch, d.timed, d.whole)
        ]
        if "argument" in d.key_kind:
            groups[2]["key"] = _key(d.key_kind, 5 + i)
        return groups[0], groups[1], groups[2]

    narrow = next((name for name in ("bfloat16", "float32") if f"'{name}')" in source), dtype)
    program = Program(
        seed, source, frozenset(d.features), narrow, make_step(), make_state,
        [make_batch(i) for i in range(NUM_STEPS)],
    )  # fmt: skip
    if narrow == dtype:
        return program
    step = make_step(through=lambda x, narrow: x)
    return dataclasses.replace(program, wide=dataclasses.replace(program, step=step, narrow=dtype))


def _key(kind: str, seed: int) -> Any:
    if "raw" in kind:
        return np.array([0, seed], np.uint32)
    return jax.random.key(seed, impl="rbg" if "rbg" in kind else "threefry2x32")


def _pack(container: str, fields: dict[str, Any]) -> Any:
    fields = dict(sorted(fields.items()))
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
