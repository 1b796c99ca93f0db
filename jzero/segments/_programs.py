# SPDX-License-Identifier: Apache-2.0
"""`Programs`: builds a step's program for each set of shapes, on which all processes agree before it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jzero._errors import JzeroError, StateError, escaped, message, warn
from jzero._memory_kinds import DEVICE, HOST, NVME, PINNED
from jzero._option_groups import Comm, Microbatches
from jzero.offload.memory._file_storage import FileStorage
from jzero.offload.memory._leaf_array import is_coded, storage_of
from jzero.processes import _agreement
from jzero.segments import _identity, _program
from jzero.segments._program import Program
from jzero.sharding.plan import _config
from jzero.sharding.plan._backend import StepProgram
from jzero.sharding.plan._config import StepConfig
from jzero.sharding.plan._extra_work import AT_ONCE, LEAST_AT_ONCE, UNEVEN, at_once_warning
from jzero.sharding.plan._leaves import LeafPlan, StoredLeaf
from jzero.sharding.plan._options import Options
from jzero.tracing import _call, _reading
from jzero.tracing._batch import Batch
from jzero.tracing._reading import Elsewhere
from jzero.tracing._signature import Call, Signature
from jzero.tracing._state_arguments import StateArguments, parts

WHO = _call.WHO
_SHOWN = 3  # failures that a note lists
_JAX_KINDS = {HOST: "unpinned_host", NVME: "unpinned_host"}


class Programs:
    """The programs of one step.

    `signature` learns which arguments are the state when a call is traced. `mesh` is None for the current
    one. An evaluation (`evaluates`) reads its state and returns none.
    """

    def __init__(
        self, step_fn: Callable[..., Any], signature: Signature, options: Options, mesh: Any,
        evaluates: bool = False, trained_by: Programs | None = None,
    ):  # fmt: skip
        _config.check_mesh(mesh)
        self._step_fn, self.signature, self.options = step_fn, signature, options
        self.mesh, self.evaluates, self._trained_by = mesh, evaluates, trained_by
        # Shapes of the state of the last program, or of one that was placed before any.
        self._trained: Any = None
        self._config: tuple[Any, StepConfig] | None = None
        self.built: dict[Any, Program] = {}
        # By a key that is quick to compute; an array and its shape are two keys of one program.
        self._seen: dict[Any, Program] = {}
        self._layouts: dict[Any, tuple[LeafPlan, ...]] = {}
        self._shared: Any = weakref.WeakValueDictionary()
        # Programs on which all processes have agreed, by id; `built` keeps them alive.
        self._agreed: dict[int, _agreement.Agreement] = {}
        self._warned: set[str] = set()  # Causes of extra work.
        self._most_rows = 0  # Of a batch so far.

    def on_mesh(self, mesh: Any) -> Programs:
        return self._with(mesh, self.options)

    def with_comm(self, comm: Comm) -> Programs:
        return self._with(self.mesh, dataclasses.replace(self.options, comm=comm))

    def _with(self, mesh: Any, options: Options) -> Programs:
        other = Programs(
            self._step_fn, self.signature, options, mesh, self.evaluates, self._trained_by
        )
        other._trained = self._trained
        other._warned, other._most_rows = self._warned, self._most_rows
        return other

    def to_evaluate(
        self, eval_step: Callable[..., Any], signature: Signature, changed: Mapping[str, Any]
    ) -> Programs:
        """The programs of a function that reads this step's state, with its options but for `changed`."""
        axes = dataclasses.replace(self.options.axes, replicate=None, auto_specs=None)
        options = dataclasses.replace(
            self.options, microbatches=Microbatches(), axes=axes, donate=True, **changed
        )
        return Programs(eval_step, signature, options, self.mesh, True, self)

    @property
    def config(self) -> StepConfig:
        """The config of a call made now; the same object as long as the mesh is the same."""
        around = _config.around(self.mesh, self.options.axes.axis_name)
        if self._config is None or self._config[0] != around:
            config = _config.config_of(self.options, self.mesh, self.evaluates)
            self._config = around, config
        return self._config[1]

    @property
    def known_mesh(self) -> Any:
        """`mesh`, or that of the last call; None before one."""
        return self.mesh if self._config is None else self._config[1].mesh

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Takes a call apart, after finding out which arguments are the state."""
        call = self.signature.bind(args, kwargs)
        if self.evaluates and not self.signature.declared:
            with contextlib.suppress(Elsewhere):
                self._read_where_trained(call)
            return self.signature.bind(args, kwargs)
        while not self.evaluates and self.signature.may_change:
            with contextlib.suppress(Elsewhere):
                self.of(call)
                break
            call = self.signature.bind(args, kwargs)
        return call

    def _read_where_trained(self, call: Call) -> None:
        """Finds the arguments of an evaluation that are the training's state, or a part of it."""
        if self._trained_by is None or self._trained_by._trained is None or self.signature.settled:
            return
        trained = self._trained_by._trained
        try:
            _reading.read_trained(self.signature, trained, call.state, call.arrays)
        except Elsewhere as found:
            self.signature = self.signature.of_state(found.names)
            raise
        self.signature = dataclasses.replace(self.signature, settled=bool(self._trained_by.built))

    def with_state(
        self, who: str, state: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call with this state and the other arguments.

        If the state's place is not known yet, tries all places. If the step fails with each of them, raises
        the error of the one with which it gets furthest.
        """
        before, failures = self.signature, dict[tuple[str, ...], Exception]()
        if not (before.declared or before.settled or self.evaluates):
            for names in before.places(state, args, kwargs):
                guess = before.of_state(names)
                try:
                    given = guess.with_state(guess.named(state, who), args, kwargs)
                    self.bind(*given)
                except Exception as error:
                    failures[names] = error
                else:
                    if self.signature.state_names == names:
                        return given
                self.signature = before
            if failures:
                raise self._furthest(failures)
        return before.with_state(before.named(state, who), args, kwargs)

    def _furthest(self, failures: Mapping[tuple[str, ...], Exception]) -> Exception:
        """The error at the step's last line, with notes of the errors for other places of the state."""
        code = getattr(inspect.unwrap(self._step_fn), "__code__", None)

        def reached(names: tuple[str, ...]) -> float:
            error = failures[names]
            lines = [
                n for frame, n in traceback.walk_tb(error.__traceback__) if frame.f_code is code
            ]
            # jzero refuses only steps that were traced to the end.
            return math.inf if isinstance(error, JzeroError) else max(lines, default=0)

        last = max(failures, key=reached)
        others = [
            f"with {', '.join(names)} it raises {type(error).__name__}: {error}"
            for names, error in failures.items()
            if names != last
        ]
        if others:
            failures[last].add_note(
                f"jzero: that is with {', '.join(last)} for the state, as nobody has said what it is; "
                + escaped("; ".join(others[:_SHOWN]))
            )
        return failures[last]

    def of(self, call: Call) -> Program:
        """The program for a call's shapes.

        Raises:
          Elsewhere: other arguments are the state; `signature` is updated.
        """
        return self._of(call, self.config)

    def batch_of(self, who: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
        """The shapes of a call, in which the number of rows can be changed."""
        call, config = self.bind(args, kwargs), self.config
        plan = self.of(call).plan
        dims, parts = plan.microbatches.dims, [0 for _ in plan.arguments]
        for k, (spec, dim) in enumerate(zip(plan.arguments, dims, strict=True)):
            names = () if dim is None else _call.spec_axes(spec[dim])
            parts[k] = plan.accumulate * math.prod(config.axes[axis] for axis in names)
        return Batch.of(who, self.signature, call, dims, parts)

    def _of(self, call: Call, config: StepConfig) -> Program:
        seen = self._dispatch_key(call, config)
        if seen not in self._seen:
            self._seen[seen] = self._of_shapes(call, config)
        return self._seen[seen]

    def _dispatch_key(self, call: Call, config: StepConfig) -> Any:
        shapes = _call.signature_of((call.state, call.arrays))
        return config, call.static_key, shapes, self._stored_leaves(call, config)

    def _stored_leaves(self, call: Call, config: StepConfig) -> tuple[StoredLeaf | None, ...]:
        """How each leaf of the state is stored that an evaluation reads."""
        if not self.evaluates:
            return ()
        in_files = self.options.offload.tier == NVME
        leaves = jax.tree.leaves(call.state)
        return tuple([_stored_as(leaf, config.mesh, in_files) for leaf in leaves])

    def _of_shapes(self, call: Call, config: StepConfig) -> Program:
        state, arrays = _call.abstract(call.state, "state"), {
            name: _call.abstract(value, name) for name, value in call.arrays.items()
        }  # fmt: skip
        leaves, tree = jax.tree.flatten((state, arrays))
        stored = self._stored_leaves(call, config)
        key = (config, tree, call.static_key, _avals_key(leaves), stored)
        if key not in self.built:
            try:
                program = _program.build(
                    self._step_fn, self.signature, config, state, arrays, call.static,
                    self._shared, stored,
                )  # fmt: skip
            except Elsewhere as found:
                self.signature = self.signature.of_state(found.names)
                raise
            if not (self.signature.settled or self.evaluates):
                self.signature = dataclasses.replace(self.signature, settled=True)
            values = tuple([value for _, value in parts(state)])
            self._trained = values if isinstance(state, StateArguments) else state
            self.built[key] = program
            # A state that the step has returned may be promoted: [Note: weak types].
            later = [*program.state, *leaves[len(program.state) :]]
            self.built.setdefault((*key[:3], _avals_key(later), stored), program)
            new = jax.tree.unflatten(jax.tree.structure(state), program.state)
            self._layouts[_state_key(new, config)] = program.plan.leaves
            self._warn_of(program, arrays)
        return self.built[key]

    def _warn_of(self, program: Program, arrays: Mapping[str, Any]) -> None:
        """Warns once of each cause of repeated work, and of microbatches that save no memory."""
        rows = max((x.shape[0] for x in jax.tree.leaves(arrays) if x.shape), default=0)
        # A smaller batch than before is the last of an epoch, one step of many.
        is_rest, self._most_rows = rows < self._most_rows, max(rows, self._most_rows)
        for extra in program.extra_work:
            is_new = extra.cause not in self._warned
            if extra.costs and is_new and not (is_rest and extra.cause == UNEVEN):
                self._warned.add(extra.cause)
                warn(extra.warning(self.signature.name))
        loops = program.plan.microbatches.loops
        made = () if loops is None else loops.at_once
        if sum(x.nbytes for x in made) >= LEAST_AT_ONCE and AT_ONCE not in self._warned:
            self._warned.add(AT_ONCE)
            warn(at_once_warning(self.signature.name, program.plan.accumulate, made))

    def agreed(self, call: Call, config: StepConfig) -> Program:
        """The program for a call that is about to run, after all processes agreed to run the same."""
        program = self._seen.get(self._dispatch_key(call, config))
        if program is None or id(program) not in self._agreed:
            return self._agreed_first(call, config)
        self.agree_again(program, config)
        return program

    def agree_again(self, program: Program, config: StepConfig) -> None:
        """Records a call of a program that has run before; processes meet if the last call was of another."""
        before = self._agreed[id(program)]
        if before.name and not _agreement.goes_on(config.mesh, before.name):
            _agreement.agree_again(WHO, config.mesh, before)

    def _agreed_first(self, call: Call, config: StepConfig) -> Program:
        failures: list[Exception] = []
        if self.signature.may_change:
            # Before processes compare anything, because another one may know already where the state is.
            try:
                self._of(call, config)
            except Elsewhere:
                raise
            except Exception as error:
                failures.append(error)

        def sections() -> _agreement.Sections:
            try:
                if failures:
                    raise failures.pop()
                program = self._of(call, config)
            except Exception as error:
                if self._agreed:  # The others may run a known program, and not come.
                    raise
                failures.append(error)
                return {"call": [f"failed with {type(error).__name__}: {error}"]}
            traced = program.step.trace(*placed_inputs(call, program))
            return _identity.of_program(config, call, program, traced)

        agreement = _agreement.agree(
            WHO, config.mesh, sections, about=lambda: _identity.of_call(call)
        )
        if failures:
            raise failures[0]
        program = self._of(call, config)
        self._agreed[id(program)] = agreement
        return program

    def step_of(self, plans: tuple[LeafPlan, ...]) -> StepProgram | None:
        """The step of the last program whose plan has these leaves, the same object."""
        found = [x.step for x in self.built.values() if x.plan.leaves is plans]
        return found[-1] if found else None

    def layout_of(self, state: Any, config: StepConfig) -> tuple[LeafPlan, ...] | None:
        """The plans of a state's leaves (`ShapeDtypeStruct`s) in the last program for it."""
        # Before there is a program, evaluations read a state that was placed.
        if not self.built:
            self._trained = state
        return self._layouts.get(_state_key(state, config))


def placed_inputs(call: Call, program: Program) -> tuple[list[Any], list[Any]]:
    """The program's inputs as `ShapeDtypeStruct`s with shardings, all in device memory."""
    arrays = [
        leaf
        for name, value in call.arrays.items()
        for leaf in jax.tree.leaves(_call.abstract(value, name))
    ]
    shapes = [leaf.padded_shape for leaf in program.plan.leaves]
    state = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if leaf.codes else aval
        for aval, leaf in zip(program.state, program.plan.leaves, strict=True)
    ]
    return (
        _with_shardings(state, shapes, program.state_shardings),
        _with_shardings(arrays, [leaf.shape for leaf in arrays], program.argument_shardings),
    )


def stored_inputs(call: Call, program: Program) -> tuple[list[Any], list[Any]]:
    """`placed_inputs` in the memories where leaves are stored; streamed ones come from pinned memory."""
    state, arrays = placed_inputs(call, program)
    kinds = [
        PINNED if leaf.is_streamed else _JAX_KINDS.get(leaf.tier, leaf.tier)
        for leaf in program.plan.leaves
    ]
    kinds += [DEVICE] * len(arrays)
    pairs = zip([*state, *arrays], kinds, strict=True)
    found = [x.update(sharding=x.sharding.with_memory_kind(kind)) for x, kind in pairs]
    return found[: len(state)], found[len(state) :]


def _with_shardings(
    avals: Sequence[Any], shapes: Sequence[tuple[int, ...]], shardings: Sequence[NamedSharding]
) -> list[Any]:
    return [
        # Programs take all values in device memory; offloaded leaves are copied there.
        jax.ShapeDtypeStruct(
            shape, a.dtype, weak_type=a.weak_type, sharding=NamedSharding(s.mesh, s.spec)
        )
        for a, shape, s in zip(avals, shapes, shardings, strict=True)
    ]


def _avals_key(avals: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((aval.shape, aval.dtype, aval.weak_type) for aval in avals)


def _state_key(state: Any, config: StepConfig) -> Any:
    leaves, tree = jax.tree.flatten(state)
    return config, tree, tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)


def _stored_as(leaf: Any, mesh: Any, in_files: bool = False) -> StoredLeaf | None:
    """How a leaf is stored on a mesh; None if it is not.

    A leaf in host memory, or in files unless `in_files`, is as if on the devices.
    """
    if isinstance(leaf, jax.core.Tracer):  # Under an outer jax.jit XLA decides.
        return None
    if is_coded(leaf):
        rows = _stored_as(leaf.storage, mesh, in_files)
        if rows is None:
            other = leaf.storage.sharding.mesh
            raise StateError(message(
                WHO, f"{leaf!r} was quantized on the mesh {dict(other.shape)}, and is read "
                f"on {dict(mesh.shape)}", "Each device has quantized its own shard, over the data axes.",
                "Shard the original weights on this mesh; jnp.asarray(leaf) dequantizes it."
            ))  # fmt: skip
        return rows._replace(codes=leaf.codes)
    leaf = storage_of(leaf)
    sharding, shape = getattr(leaf, "sharding", None), getattr(leaf, "shape", ())
    if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
        return None
    spec = list(sharding.spec)
    while spec and not spec[-1]:
        spec.pop()
    tier = NVME if in_files and isinstance(leaf, FileStorage) else DEVICE
    return StoredLeaf(tuple(spec), tuple(shape), tier)
