# SPDX-License-Identifier: Apache-2.0
"""How each output of an update is computed, decided in one pass over its equations.

From an output, elementwise equations are followed back to leaves of as many elements, and to scalars. If
these are all there is, a kernel computes the output in one loop; XLA computes the scalars, and all behind
them. Any other output (a factored moment, an orthogonalised update) is XLA's as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from jzero._components import grouped
from jzero._errors import describe_leaf
from jzero._folded import listed
from jzero.offload.kernels import _machine
from jzero.offload.kernels._ops import is_cheap, op_for, size_of
from jzero.offload.kernels._writer import TYPES, dtype_of, itemsize
from jzero.tracing import _jaxpr, _rewrite

KERNEL, XLA, KEPT = "kernel", "XLA", "kept"
# `(state, inputs) -> (new_state, outputs)`, all of them flat.
UpdateFn = Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Sequence[Any], Sequence[Any]]]
# Than XLA where llvmlite is not installed: experiments/offload/host_update/compilers.py.
KERNELS_ARE_FASTER = 5


class CodePath(NamedTuple):
    name: str
    # 'kernel' (a loop over elements), 'XLA' (as a whole), or 'kept' (a leaf that does not change)
    by: str
    # The first equation that a loop over elements cannot do; or, of a kernel, that XLA runs before it on
    # whole leaves.
    reason: str = ""


class Group(NamedTuple):
    """Outputs that one loop computes, over leaves of as many elements each."""

    size: int  # in elements
    eqns: list[_jaxpr.Eqn]  # elementwise, in order
    reads: list[_jaxpr.Var]
    scalars: list[_jaxpr.Var]  # values of one element that are read
    writes: list[tuple[int, _jaxpr.Atom]]  # the index of each output, and its value

    def nbytes(self) -> int:
        values = [*self.reads, *(atom for _, atom in self.writes)]
        return self.size * sum(itemsize(dtype_of(x)) for x in values)


class CodePathFinder:
    """What values depend on; the first `num_state` inputs and outputs are the old and new state."""

    def __init__(self, jaxpr: _rewrite.Flat, num_state: int):
        self.jaxpr = jaxpr
        self.num_state = num_state
        self._made_by: dict[_jaxpr.Var, int] = {}  # The index of its equation.
        # The first equation behind a value that is neither elementwise nor about scalars alone.
        self._first_read: dict[_jaxpr.Var, int] = {}
        # The first such equation that a value of several elements has behind it, scalars aside.
        self._first_block: dict[_jaxpr.Var, int] = {}
        for index, eqn in enumerate(jaxpr.eqns):
            self._read_equation(index, eqn)

    def _read_equation(self, index: int, eqn: _jaxpr.Eqn) -> None:
        operands = _jaxpr.variables_read(eqn)
        scalar = all(size_of(atom) == 1 for atom in [*eqn.invars, *eqn.outvars])
        own = [] if scalar or op_for(eqn) is not None else [index]
        reads = [self._first_read[var] for var in operands if var in self._first_read] + own
        blocks = [self._first_block[var] for var in operands if var in self._first_block] + own
        for out in eqn.outvars:
            self._made_by[out] = index
            if reads:
                self._first_read[out] = min(reads)
            if blocks and size_of(out) != 1:
                self._first_block[out] = min(blocks)

    def code_path(self, index: int, name: str) -> CodePath:
        atom = self.jaxpr.outvars[index]
        if index < self.num_state and atom is self.jaxpr.invars[index]:
            return CodePath(name, KEPT)
        read, block = (
            None if _jaxpr.is_literal(atom) else firsts.get(atom)
            for firsts in (self._first_read, self._first_block)
        )
        if block is not None:
            return CodePath(name, XLA, self._describe(block))
        if size_of(atom) == 1:
            return CodePath(name, XLA, "a scalar" if read is None else self._describe(read))
        if dtype_of(atom) not in TYPES:
            return CodePath(name, XLA, f"its dtype is {atom.aval.dtype}")
        return CodePath(name, KERNEL, "" if read is None else self._describe(read))

    def _describe(self, index: int) -> str:
        eqn = self.jaxpr.eqns[index]
        whole = max(eqn.invars, key=size_of, default=eqn.outvars[0]).aval
        return describe_leaf(f"{eqn.primitive.name} of", whole.shape, whole.dtype)

    def group(self, outputs: Sequence[int]) -> Group:
        outvars = self.jaxpr.outvars
        inside, leaves, scalars = self._reach([outvars[index] for index in outputs])
        return Group(
            size_of(outvars[outputs[0]]),
            [self.jaxpr.eqns[made_by] for made_by in sorted(self._made_by[var] for var in inside)],
            leaves,
            scalars,
            [(index, outvars[index]) for index in outputs],
        )

    def buffers(self, index: int) -> set[_jaxpr.Var]:
        """The leaves that a kernel's output reads, and the one that it replaces."""
        _, leaves, _ = self._reach([self.jaxpr.outvars[index]])
        return {*leaves, *self.jaxpr.invars[index : index + 1][: index < self.num_state]}

    def _reach(
        self, atoms: Sequence[_jaxpr.Atom]
    ) -> tuple[set[_jaxpr.Var], list[_jaxpr.Var], list[_jaxpr.Var]]:
        # Values that are computed in the loop; leaves and scalars that it reads, in order of use.
        inside: set[_jaxpr.Var] = set()
        leaves: dict[_jaxpr.Var, None] = {}
        scalars: dict[_jaxpr.Var, None] = {}
        todo = [atom for atom in reversed(atoms) if not _jaxpr.is_literal(atom)]
        while todo:
            var = todo.pop()
            if size_of(var) == 1:
                scalars[var] = None
            elif var not in self._made_by:
                leaves[var] = None
            elif var not in inside:
                inside.add(var)
                eqn = self.jaxpr.eqns[self._made_by[var]]
                todo += [atom for atom in reversed(eqn.invars) if not _jaxpr.is_literal(atom)]
        return inside, list(leaves), list(scalars)


def groups(analysis: CodePathFinder, outputs: Sequence[int]) -> list[Group]:
    """Puts outputs that share a leaf into one group, so no group reads what another one overwrites."""
    return [analysis.group(together) for together in grouped(outputs, analysis.buffers)]


class TracedUpdate:
    """An update as equations, without calls and cheap branches, and how each of its outputs is computed."""

    def __init__(
        self, update: UpdateFn, state: Sequence[Any], inputs: Sequence[Any],
        names: Sequence[str] | None = None,
    ):  # fmt: skip
        self.state = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in state)
        self.inputs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs)
        traced = _jaxpr.trace_here(update, self.state, self.inputs)
        self.new_state, self.outputs = map(
            tuple, jax.tree.unflatten(traced.out_tree, traced.out_avals)
        )
        # Of the leaves of the state, then of the outputs.
        self.names = names or numbered("state", self.state) + numbered("outputs", self.outputs)
        calls = _rewrite.flatten_calls(traced.jaxpr, traced.consts)
        self.flat, self.consts = _rewrite.select_branches(*calls, is_cheap)
        # To be run, where `flat` is to be read: JAX 0.12 makes arguments of its constants.
        self.jaxpr = _jaxpr.replaced(traced.jaxpr, **self.flat._asdict())
        finder = CodePathFinder(self.flat, len(self.state))
        # `HostUpdate` refuses a new state of more or fewer leaves.
        named = zip(range(len(self.flat.outvars)), self.names, strict=False)
        self.code_paths = tuple(finder.code_path(i, name) for i, name in named)
        self.groups = groups(finder, self._by(KERNEL))

    def _by(self, by: str) -> list[int]:
        return [i for i, code_path in enumerate(self.code_paths) if code_path.by == by]

    @functools.cached_property
    def _read_whole(self) -> set[_jaxpr.Var]:
        """What XLA reads, and kernels read as numbers."""
        scalars = [var for group in self.groups for var in group.scalars]
        by_xla = [self.flat.outvars[i] for i in self._by(XLA)]
        return {*_rewrite.excerpt(self.jaxpr, [*scalars, *by_xla]).reads}

    def untiled(self, resident: Collection[int] = ()) -> list[str]:
        """What of the state cannot be updated in tiles, and why; `resident` leaves may be read whole."""
        leaves = self.code_paths[: len(self.state)]
        by_xla = [f"{x.name} is updated by XLA ({x.reason})" for x in leaves if x.by == XLA]
        return by_xla + [
            f"{x.name} is read whole, by XLA"
            for i, (x, var) in enumerate(zip(leaves, self.flat.invars, strict=False))
            if x.by != XLA and var in self._read_whole and i not in resident
        ]

    def inputs_in_tiles(self, resident: Collection[int] = ()) -> set[int]:
        """The indices of inputs that kernels alone read, beside state that comes in tiles."""
        num = len(self.state)
        leaves, inputs = self.flat.invars[:num], self.flat.invars[num:]
        in_tiles = {var for i, var in enumerate(leaves) if i not in resident}
        mine = set[_jaxpr.Var]()
        for group in self.groups:
            renewed = {leaves[i] for i, _ in group.writes if i < num}
            if in_tiles & {*group.reads, *renewed}:
                mine.update(group.reads)
        return {i for i, var in enumerate(inputs) if var in mine - self._read_whole}


def numbered(name: str, values: Sequence[Any]) -> list[str]:
    return [f"{name}[{i}]" for i in range(len(values))]


def no_kernels() -> str:
    """Why XLA compiles all loops, and what to do about it; '' if LLVM does."""
    if _machine.llvm() is not None:
        return ""
    return (
        "llvmlite is not installed: pip install 'jzero[offload]' for kernels, "
        f"about {KERNELS_ARE_FASTER} times as fast"
    )


def code_paths_text(code_paths: Sequence[CodePath]) -> str:
    by = [code_path.by for code_path in code_paths]
    lines = [f"{by.count(KERNEL)} of {len(by)} leaves in one pass each"]
    if KERNEL in by and (reason := no_kernels()):
        lines.append(f"these by XLA, a block at a time, as {reason}")
    why: dict[str, list[str]] = {}
    for code_path in code_paths:
        if code_path.reason:
            how = "by XLA" if code_path.by == XLA else "by a kernel, after XLA"
            why.setdefault(f"{how} ({code_path.reason})", []).append(code_path.name)
    for reason, names in why.items():
        lines.append(f"{reason}: {listed(names)}")
    return "\n".join(lines)
