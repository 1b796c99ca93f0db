"""Draws the parts of one program: choices, parameters, data, and lines of source."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

DIMS = {1: 1, 2: 3, 3: 3, 4: 6, 5: 1, 6: 2, 8: 4}
# How a weight of shape (n, m) is made of parameters. {a(n, m)} is a parameter of that shape.
WEIGHTS = {
    "plain": ("{0}", ["n,m"], 30),
    "transposed": ("{0}.T", ["m,n"], 8),
    "reshaped": ("{0}.reshape({n}, {m})", ["n*m"], 5),
    "halves": ("jnp.concatenate([{0}, {1}], 1)", ["n,m//2", "n,m-m//2"], 4),
    "flipped": ("jnp.flip({0}, 1).reshape({n}, {m})", ["n,m,1"], 3),
    "sliced": ("{0}[{n}:]", ["2*n,m"], 4),
    "low rank": ("(lax.stop_gradient({0}) + {1} @ {2})", ["n,m", "n,2", "2,m"], 4),
    "normalized": ("(0.7 * {0} * lax.rsqrt(jnp.sum({0} ** 2, 0) + 0.1))", ["n,m"], 4),
    "picked": ("{0}[s['step'] % 3]", ["3,n,m"], 4),
    "summed": ("({0} + {1})", ["n,m", "n,1"], 3),
    "triangular": ("jnp.tril({0})", ["n,m"], 2),
    "squashed": ("jnp.tanh({0})", ["n,m"], 2),
    "frozen": ("lax.stop_gradient({0})", ["n,m"], 3),
    "bfloat16": ("through({0}, 'bfloat16')", ["n,m"], 1),
    "float32": ("through({0}, 'float32')", ["n,m"], 1),
}
KEYS = {
    "typed state": 3,
    "raw state": 3,
    "typed argument": 2,
    "raw argument": 2,
    "rbg argument": 1,
    "step": 2,
}


@dataclasses.dataclass
class Draw:
    """What one program has drawn so far.

    Attributes:
      rng: all choices come from it.
      rows: B, the rows of the whole batch.
      params, frozen: trained and other parameters.
      batch, timed, whole: makers of data with rows along dim 0, along dim 1, and without rows.
      state: initial values of what else the step keeps.
      updates: lines that renew that state.
      lines: of the loss function.
      dims: the number of features of each value `[B, n]`.
      features: names of what was drawn, so that a test can count them.
      gentle: whether few things couple rows, or elements of the update.
      per_example: whether the loss must be a mean over rows that know nothing of each other.
    """

    rng: np.random.Generator
    rows: int
    params: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    frozen: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    batch: dict[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    timed: dict[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    whole: dict[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    updates: list[str] = dataclasses.field(default_factory=list)
    lines: list[str] = dataclasses.field(default_factory=list)
    dims: dict[str, int] = dataclasses.field(default_factory=dict)
    features: set[str] = dataclasses.field(default_factory=set)
    gentle: bool = False
    per_example: bool = False
    key_kind: str = ""
    num_keys: int = 0

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def choose(self, options: Any) -> Any:
        """One of a collection; a dict's values are weights."""
        names = list(options)
        weights = np.array([options[name] if isinstance(options, dict) else 1 for name in names])
        return names[self.rng.choice(len(names), p=weights / weights.sum())]

    def param(self, *shape: int, scale: float | None = None, offset: float = 0.0) -> str:
        """An expression for a parameter: a new one, or (some of the time) one already in use."""
        used = [name for name, leaf in self.params.items() if leaf.shape == shape]
        if used and not offset and self.chance(0.2):
            self.features.add("tied")
            return f"p['{self.choose(used)}']"
        scale = shape[-2] ** -0.5 if scale is None and len(shape) > 1 else scale or 0.3
        group = self.frozen if self.params and self.chance(0.06) else self.params
        name = f"w{len(self.params) + len(self.frozen)}"
        group[name] = offset + scale * self.rng.normal(size=shape)
        return f"{'p' if group is self.params else 'frozen'}['{name}']"

    def weight(self, n: int, m: int) -> str:
        """An expression for a matrix `[n, m]`, made of parameters in one of many ways."""
        kind = self.choose({kind: weight for kind, (_, _, weight) in WEIGHTS.items()})
        if kind == "halves" and m < 2:
            kind = "plain"
        self.features.add(f"weight: {kind}")
        text, shapes, _ = WEIGHTS[kind]
        sizes = [eval(f"({shape},)", {"n": n, "m": m}) for shape in shapes]
        return text.format(*(self.param(*s, scale=n**-0.5) for s in sizes), n=n, m=m)

    def data(self, kind: str, name: str, make: Callable[[np.random.Generator], Any]) -> str:
        """An expression for an argument, drawn anew for each step; `kind` is 'b', 't' or 'w'."""
        group = {"b": self.batch, "t": self.timed, "w": self.whole}[kind]
        name = f"{name}{len(group)}"
        group[name] = make
        return f"{kind}['{name}']"

    def key(self) -> str:
        """An expression for a random key of its own."""
        self.num_keys += 1
        self.key_kind = self.key_kind or self.choose(KEYS)
        self.features.add(f"key: {self.key_kind}")
        return f"keys[{self.num_keys}]"

    def value(self) -> str:
        """An earlier value, most often the latest."""
        names = list(self.dims)
        return names[-1] if self.chance(0.8) else self.choose(names)

    def emit(self, text: str, n: int) -> str:
        name = f"h{len(self.dims)}"
        self.dims[name] = n
        self.lines.append(f"{name} = {text}  # [{self.rows}, {n}]")
        return name

    def fill(self, template: str, h: str, **given: Any) -> str:
        """The template with its holes filled: parameters and data are made where it asks for them."""
        return template.format_map(Holes(self, h, given))


class Holes(dict[str, Any]):
    """What a template may ask for: `{h}` is a value `[B, n]`, `{mat}` a weight `[n, n]`, and so on."""

    def __init__(self, draw: Draw, h: str, given: dict[str, Any]):
        super().__init__(h=h, n=draw.dims[h], B=f"{h}.shape[0]", **given)
        self.draw = draw

    def __missing__(self, hole: str) -> Any:
        # Not kept: each mention asks for another one.
        if hole == "rect":
            return self.draw.weight(self["n"], self["m"])
        if hole == "queue":
            return _queue(self.draw, self["h"])
        if hole in ROWS:
            rows, make = self.draw.rows, ROWS[hole]
            return self.draw.data("b", hole, lambda rng: make(rng, rows, self["n"]))
        return HOLES[hole](self.draw, self["n"])


def _layers(d: Draw, n: int) -> str:
    depth = d.choose({1: 1, 2: 3, 3: 3, 4: 2, 8: 1})
    weights = d.param(depth, n, n, scale=n**-0.5)
    return f"({weights}, {d.param(depth, n, scale=0.1)})"


def _buffer(d: Draw, n: int) -> str:
    """A constant integer leaf among the parameters."""
    name = f"w{len(d.params) + len(d.frozen)}"
    d.frozen[name] = d.rng.permutation(n).astype(np.int32)
    return f"frozen['{name}']"


def _queue(d: Draw, h: str) -> str:
    """A memory bank of rows of earlier batches."""
    name, kind = f"queue{len(d.state)}", d.choose(("last", "ring"))
    d.state[name] = d.rng.normal(size=(6, d.dims[h]))
    d.lines.append(f"aux['{name}'] = lax.stop_gradient({h})")
    new = {
        "last": f"jnp.concatenate([s['{name}'], aux['{name}']])[-6:]",
        "ring": f"lax.dynamic_update_slice_in_dim(s['{name}'], aux['{name}'][:2], 2 * s['step'] % 4, 0)",
    }[kind]
    d.updates.append(f"s['{name}'] = {new}")
    d.features.add(f"state: queue, {kind}")
    return f"s['{name}']"


# Data with a row for each of the batch, by its number of rows and features.
ROWS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "y": lambda rng, rows, n: rng.normal(size=(rows, n)),
    "ids": lambda rng, rows, n: rng.integers(8, size=rows, dtype=np.int32),
    "labels": lambda rng, rows, n: rng.integers(n, size=rows, dtype=np.int32),
    "perm": lambda rng, rows, n: rng.permutation(rows).astype(np.int32),
    "mask": lambda rng, rows, n: np.arange(rows) % 5 != rng.integers(5),
    "weights": lambda rng, rows, n: rng.uniform(0.1, 2.0, size=rows),
}
# Parameters, other data and choices, by the number of features.
HOLES: dict[str, Callable[[Draw, int], str]] = {
    "mat": lambda d, n: d.weight(n, n),
    "vec": lambda d, n: d.param(n, scale=0.2),
    "gain": lambda d, n: d.param(n, scale=0.1, offset=1.0),
    "scalar": lambda d, n: d.param(scale=0.1, offset=1.0),
    "layers": _layers,
    "gates": lambda d, n: d.param(n, 3),
    "experts": lambda d, n: d.param(3, n, n, scale=n**-0.5),
    "table": lambda d, n: d.param(8, n, scale=0.7),
    "codes": lambda d, n: d.param(5, n, scale=1.0),
    "heads": lambda d, n: d.param(n, 2, n, scale=n**-0.5),
    "kernel": lambda d, n: d.param(3, 1, 2, scale=0.5),
    "stencil": lambda d, n: d.param(3, n, n, scale=(3 * n) ** -0.5),
    "buffer": _buffer,
    "other": lambda d, n: d.choose([name for name, m in d.dims.items() if m == n]),
    "remat": lambda d, n: d.choose(("plain", "remat", "dots")),
    "loop": lambda d, n: d.choose(("map", "vmap")),
    "flag": lambda d, n: d.data("w", "flag", lambda rng: rng.integers(3, size=(), dtype=np.int32)),
    "rate": lambda d, n: d.data("w", "rate", lambda rng: rng.uniform(0.1, 1.0, size=())),
    "seq": lambda d, n: d.data("t", "seq", lambda rng: rng.normal(size=(3, d.rows, n))),
    "key": lambda d, n: d.key(),
}
