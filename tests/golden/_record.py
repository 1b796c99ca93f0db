"""The text of a row: what jzero says of the step, the program that it makes, and what that computes."""

import contextlib
import inspect
import math
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

import jzero
import zoo
from jzero.sharding.analysis import _residuals
from jzero.sharding.plan import _quantized_leaves
from small import grouped
from zoo import configured

from ._watch import aliased, watched
from .rows import Row

NUM_STEPS = 2
Record = dict[str, list[str]]
# By their names in a jaxpr, those that move values between devices.
_COLLECTIVES = {
    "all_gather": "all-gather", "all_gather_invariant": "all-gather", "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce", "psum_invariant": "all-reduce", "pmax": "all-reduce (max)",
    "pmin": "all-reduce (min)", "all_to_all": "all-to-all", "ppermute": "collective-permute",
}  # fmt: skip
_PRODUCTS = {"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"}
_REPORTED = (
    "saved",
    "loops",
    "repeats",
    "num",
    "reduce",
    "order",
    "accumulator_bytes",
    "handed_bytes",
)


def record(row: Row) -> Record:
    """Everything of a row, by section; a section without lines is left out."""
    jax.clear_caches()  # Which programs are compiled is then the same whatever ran before.
    family = zoo.get(row.step)
    found: Record = {"row": [_title(row)]}
    with (
        configured(family),
        # Else all leaves of these models travel exact, and their activations stay on the devices.
        mock.patch.object(_quantized_leaves, "LEAST", 1),
        mock.patch.object(_residuals, "LEAST_BYTES", 0),
        warnings.catch_warnings(record=True) as caught,
        tempfile.TemporaryDirectory() as folder,
    ):
        warnings.simplefilter("always")
        try:
            found |= _recorded(row, family, folder)
        except jzero.JzeroError as error:
            found["refused"] = _refusal(error)
    found["warnings"] = sorted({
        f"{each.category.__name__}: {str(each.message).splitlines()[0]}" for each in caught
    })  # fmt: skip
    return {section: lines for section, lines in found.items() if lines}


def _title(row: Row) -> str:
    axes = " x ".join(f"{name} {size}" for name, size in row.axes.items())
    axes += f" x model {row.model}" if row.model > 1 else ""
    parts = [f"{row.step} on {axes}", options_text(row.options("/FOLDER"))]
    if row.evaluates:
        parts[0] = f"evaluation of {parts[0]}"
        parts.append(
            "no train step" if row.like is None else f"like {options_text(row.like('/FOLDER'))}"
        )
    return "; ".join(filter(None, parts))


def options_text(options: Mapping[str, Any]) -> str:
    def of(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {of(v)}" for k, v in value.items()) + "}"
        return getattr(value, "__name__", None) or repr(value)

    return ", ".join(f"{name}={of(value)}" for name, value in sorted(options.items())) or "defaults"


def _refusal(error: jzero.JzeroError) -> list[str]:
    """Class, function, subject and the options that are named; the rest may be worded anew.

    Of a message of several lines (one for each leaf) the subject is the first.
    """
    who, _, text = str(error).partition(": ")
    subject = re.sub(r"\(.*?:\d+\)|/\S+", "...", text.strip().splitlines()[0].partition(". ")[0])
    faces = (jzero.shard_train_step, jzero.shard_eval_step)
    options = {name for face in faces for name in [*inspect.signature(face).parameters][1:]}
    # As an argument, or as its group: `comm=`, `Comm(`.
    named = sorted(
        name for name in options if re.search(rf"\b({name}=|{name.capitalize()}\()", str(error))
    )
    return [
        f"{type(error).__name__} by {who}",
        f"subject: {subject}",
        f"options named: {', '.join(named) or 'none'}",
    ]


def _recorded(row: Row, family: zoo.Program, folder: str) -> Record:
    sharded = _sharded(row, family, folder)
    batches = family.batches(NUM_STEPS, jnp.dtype(row.dtype))
    state = family.init(jnp.dtype(row.dtype))
    if "weight_dtype" in row.options("/FOLDER"):
        state = sharded.shard(state, *batches[0])
    report = sharded.describe(state, *batches[0])
    alone = _program(sharded, state, batches[0])
    found = described(report)
    if alone is None:
        found["collectives in order"] = [_collective(each) for each in report.traffic]
    else:
        jaxpr, memory = alone
        found["program"] = events(jaxpr)
        found["temporaries"] = [f"{memory.temp_size_in_bytes:,} bytes"]
        found["aliased"] = aliased("step", memory)
    with contextlib.nullcontext() if alone else watched() as seen:
        trained = _train(row, sharded, state, batches)
    if seen is not None:
        found["programs and copies"] = seen.started
        found["aliased"] = seen.aliased
        found["streamed"] = seen.streamed
    found["values"] = values(trained, family.rounded_to)
    return found


def described(report: Any) -> Record:
    """What `describe` says."""
    facts = report.to_dict()
    return {
        "layouts at rest": [_layout(leaf) for leaf in facts["leaves"]],
        "bytes at rest": _at_rest(facts["leaves"]),
        "traffic": _traffic(report.traffic),
        "host transfers": [_transfer(each) for each in facts["transfers"]],
        "rows moved": [
            f"{m['operation']}: {m['reason']}, {m['nbytes']:,} bytes x {m['times']}"
            for m in facts["movements"]
        ],
        "said": _said(facts),
    }


def _sharded(row: Row, family: zoo.Program, folder: str) -> Any:
    sizes = (*row.axes.values(), *((row.model,) if row.model > 1 else ()))
    names = (*row.axes, *(("model",) if row.model > 1 else ()))
    mesh = jax.make_mesh(sizes, names, devices=jax.devices()[: math.prod(sizes)])
    axes = tuple(row.axes)
    given = {"mesh": mesh, "axis_names": axes}
    specs = family.in_specs(axes[0] if len(axes) == 1 else axes)

    def train_step(options: dict[str, Any]) -> Any:
        defaults = {**given, "min_shard_bytes": 0, "in_specs": specs, **family.options}
        return jzero.shard_train_step(family.step, **grouped(**{**defaults, **options}))

    if not row.evaluates:
        return train_step(row.options(folder))
    options = {"in_specs": specs, **row.options(folder)}
    if row.like is None:
        options |= given
    else:
        options["like"] = train_step(row.like(folder))
    return jzero.shard_eval_step(
        lambda state, *args: family.step(state, *args)[1], **grouped(**options)
    )


def _train(row: Row, sharded: Any, state: Any, batches: list[Any]) -> Any:
    if row.evaluates:
        return {"outputs": [sharded(state, *batch) for batch in batches]}
    outputs: Any = None
    for batch in batches:
        state, outputs = sharded(state, *batch)
    if row.options("/FOLDER").get("offload") == jzero.HostCPU(
        threads=1, delayed_update=True, delay_after=0
    ):
        state = sharded.flush(state)
    return {"outputs": outputs, "state": sharded.unshard(state)}


def _layout(leaf: dict[str, Any]) -> str:
    how = "full" if leaf["dim"] is None else f"dim {leaf['dim']} over {', '.join(leaf['axes'])}"
    if leaf["padded_shape"] != leaf["shape"]:
        how += f", padded to {leaf['padded_shape']}"
    what = f"{leaf['path']}  {leaf['role']}  {leaf['dtype']}{leaf['shape']}"
    why = f" ({leaf['why_full']})" if leaf["why_full"] else ""
    return f"{what}: {how}{why}, {leaf['nbytes_per_device']:,} bytes, {leaf['memory']}"


def _at_rest(leaves: list[dict[str, Any]]) -> list[str]:
    sums = Counter[str]()
    for leaf in leaves:
        sums[leaf["memory"]] += leaf["nbytes_per_device"]
    return [f"{memory}: {num:,}" for memory, num in sorted(sums.items())]


def _traffic(found: Any) -> list[str]:
    """Sums, from which a better row is told from a worse one."""
    nbytes, nums = Counter[str](), Counter[str]()
    for each in found:
        nums[each.op] += each.times
        for axis in each.axes:
            nbytes[axis] += each.nbytes
    return [
        *(f"bytes over {axis}: {num:,}" for axis, num in sorted(nbytes.items())),
        *(f"{op}: {num}" for op, num in sorted(nums.items())),
    ]


def _collective(each: Any) -> str:
    times = f" x {each.times}" * (each.times > 1) + " in each iteration" * each.each_iteration
    size = math.ceil(each.elements * each.itemsize)
    return (
        f"{each.op} over {', '.join(each.axes)}: {each.dtype} {size:,} bytes {each.leaf}".rstrip()
        + times
    )


def _transfer(each: dict[str, Any]) -> str:
    iterations = " in each iteration" if each["each_iteration"] else ""
    return f"{each['direction']}: {each['what']}, {each['dtype']}, {each['nbytes']:,} bytes{iterations}"


def _said(facts: dict[str, Any]) -> list[str]:
    """What else `describe` says, without the lines of source that it names."""
    lines = []
    batches = {
        name: facts["microbatches"][name] for name in _REPORTED if name in facts["microbatches"]
    }
    batches["saved"] = [[each["what"], each["nbytes"]] for each in batches.get("saved", [])]
    if batches["num"] > 1 or facts["microbatches"]["handed_bytes"]:
        lines += [f"microbatches: {batches}"]
    for name in ("arguments", "outputs"):
        each = [f"{x['path']} dim {x['dim']}" for x in facts[name]]
        lines += [f"{name}: {', '.join(each)}"]
    for name in ("whole_arguments", "looped", "keys", "unread"):
        lines += [f"{name}: {', '.join(facts[name])}"] * bool(facts[name])
    lines += [f"exact on the wire: {path}, {why}" for path, why in facts["wire"]["exact"]]
    lines += [f"exact at rest: {path}, {why}" for path, why in facts["weights"]["exact"]]
    lines += [f"in codes: {each['path']} {each['format']}" for each in facts["weights"]["coded"]]
    lines += [f"owners: {each}" for each in facts["owners"]]
    lines += [
        f"larger than a tile: {each['leaf']} {each['what']}, {each['nbytes']:,} bytes, {each['why']}"
        for each in facts["untiled"]
    ]
    lines += [f"groups of offloaded leaves: {facts['buckets']}"] * (facts["buckets"] > 1)
    return lines


def _program(sharded: Any, state: Any, batch: Any) -> tuple[Any, Any] | None:
    """The jaxpr of a step that is one program, and the memory of that program; None of several."""
    try:
        jaxpr = jax.make_jaxpr(sharded)(state, *batch)
        return jaxpr, sharded.lower(state, *batch).compile().memory_analysis()
    except jzero.JzeroError as error:
        if "outer jax.jit" in str(error) or "lowered" in str(error):
            return None
        raise


def events(closed: Any) -> list[str]:
    """Collectives, products, copies between memories and callbacks of a program, in order, in their loops.

    Of each but products it says what it waits for: of all that its operands depend on, by data or by a
    barrier, the latest of these lines in the same body, a product counted as one, and how many back that is.
    """
    return _Events().of(closed)


class _Events:
    """Of one body."""

    def __init__(self, depth: int = 0):
        self.indent = "  " * depth
        self.depth = depth
        self.lines: list[str] = []
        self.kinds: list[str] = []  # Of what has been met in this body.
        self.products = 0  # How many since the last other line.
        # By variable: how many of `kinds` there were when the latest of them was met that it depends on.
        self.latest: dict[Any, int] = {}

    def of(self, closed: Any, leaf: str = "") -> list[str]:
        self.walk(getattr(closed, "jaxpr", closed), leaf)
        self.flush()
        return self.lines

    def walk(self, jaxpr: Any, leaf: str) -> None:
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            scope = re.search(r"jzero\.\w+\[(.*)\]", str(eqn.source_info.name_stack))
            around = scope.group(1) if scope else leaf
            after = max(map(self.at, eqn.invars), default=0)
            inner = list(_inner(eqn))
            if name in _COLLECTIVES:
                after = self.meet(_COLLECTIVES[name], _bound(eqn, around), after)
            elif name in _PRODUCTS:
                after = self.meet("product")
            elif name == "device_put" and (kinds := _memories(eqn)):
                copy = f"copy to {kinds}: {_types(eqn.outvars)} {around}".rstrip()
                after = self.meet("copy", copy, after)
            elif "callback" in name or name == "ffi_call":
                after = self.meet(name, name, after)
            elif name in ("scan", "while", "cond"):
                after = self.loop(eqn, inner, around, after)
            elif len(inner) == 1 and self.called(eqn, inner[0], around):
                continue
            else:
                for each in inner:
                    self.walk(getattr(each, "jaxpr", each), around)
                after = max(after, len(self.kinds)) if inner else after
            self.latest |= dict.fromkeys(eqn.outvars, after)

    def at(self, atom: Any) -> int:
        return 0 if isinstance(atom, jax.extend.core.Literal) else self.latest.get(atom, 0)

    def meet(self, kind: str, line: str = "", after: int = 0) -> int:
        if kind == "product":
            self.products += 1
        else:
            self.flush()
            back = len(self.kinds) + 1 - after
            waits = f"; waits for the {self.kinds[after - 1]} {back} back" if after else ""
            self.lines.append(self.indent + line + waits)
        self.kinds.append(kind)
        return len(self.kinds)

    def flush(self) -> None:
        if self.products:
            self.lines.append(f"{self.indent}product{'s' * (self.products > 1)} {self.products}")
            self.products = 0

    def loop(self, eqn: Any, inner: list[Any], leaf: str, after: int) -> int:
        name = eqn.primitive.name
        bodies = [_Events(self.depth + 1).of(body, leaf) for body in inner]
        if not any(bodies):
            return after
        self.flush()
        for i, lines in enumerate(bodies):
            if lines:
                of_loop = f" x {eqn.params['length']}" if name == "scan" else ""
                which = f", branch {i}" if name == "cond" else of_loop
                self.lines += [f"{self.indent}{name}{which}:", *lines]
        self.kinds.append(name)
        return len(self.kinds)

    def called(self, eqn: Any, closed: Any, leaf: str) -> bool:
        """Walks a function that is called, as if it were written here; False if its operands are others."""
        jaxpr = getattr(closed, "jaxpr", closed)
        shapes = [len(eqn.invars), len(eqn.outvars)]
        if shapes != [len(jaxpr.invars), len(jaxpr.outvars)]:
            return False
        self.latest |= {v: self.at(x) for v, x in zip(jaxpr.invars, eqn.invars, strict=True)}
        self.walk(jaxpr, leaf)
        self.latest |= {v: self.at(x) for v, x in zip(eqn.outvars, jaxpr.outvars, strict=True)}
        return True


def _bound(eqn: Any, leaf: str) -> str:
    op, params = _COLLECTIVES[eqn.primitive.name], eqn.params
    axes = params.get("axis_name", params.get("axes"))
    axes = (axes,) if isinstance(axes, str) else axes
    values = eqn.outvars if op == "all-gather" else eqn.invars
    dims = [params[x] for x in ("all_gather_dimension", "scatter_dimension") if x in params]
    along = f" along {dims[0]}" if dims else ""
    return f"{op} over {', '.join(map(str, axes))}{along}: {_types(values)} {leaf}".rstrip()


def _types(values: Any) -> str:
    nbytes = sum(_nbytes(v.aval) for v in values)
    return f"{', '.join(v.aval.str_short(short_dtypes=True) for v in values)}, {nbytes:,} bytes"


def _nbytes(aval: Any) -> int:
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 8)


def _memories(eqn: Any) -> str:
    """The kinds of memory that it names."""
    kinds = [
        getattr(device, "memory_kind", None) or getattr(device, "name", None)
        for device in eqn.params["devices"]
        if device is not None
    ]
    return ", ".join(sorted({str(kind) for kind in kinds if kind}))


def _inner(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for each in value if isinstance(value, list | tuple) else [value]:
            if hasattr(getattr(each, "jaxpr", each), "eqns"):
                yield each


def values(tree: Any, rounded_to: str | None = None) -> list[str]:
    """Of each leaf its norm, and a sum with weights that no two elements share: one wrong element shows.

    Elements that are not finite are 0 in both, and counted. Of a step that itself sums in a narrow float all
    floats are as exact as that: processors differ in the order of its sums.
    """
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        x = np.asarray(leaf)
        is_rounded = rounded_to is not None and jnp.issubdtype(x.dtype, jnp.floating)
        kind = f"{rounded_to if is_rounded else x.dtype}[{','.join(map(str, x.shape))}]"
        flat = x.reshape(-1)
        flat = np.concatenate([flat.real, flat.imag]) if np.iscomplexobj(flat) else flat
        flat = flat.astype(np.float64)
        is_finite = np.isfinite(flat)
        counts = Counter(str(x) for x in flat[~is_finite])
        others = "".join(f", {each} {num}" for each, num in sorted(counts.items()))
        flat = np.where(is_finite, flat, 0.0)
        weights = np.cos(1.0 + 0.7 * np.arange(flat.size))
        norm, mixed = float(np.sqrt(np.sum(flat**2))), float(np.sum(flat * weights))
        found.append(f"{name}  {kind}: norm {norm:.13g}, mixed {mixed:.13g}{others}")
    return found
