# SPDX-License-Identifier: Apache-2.0
"""Pallas kernels whose grid proves that rows are independent.

A program of the grid reads and writes the blocks that the index maps select. If one grid dim alone selects
the rows, and its programs share nothing, a device runs the programs of its own rows: a smaller grid.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jzero.ir import _rules
from jzero.ir._factors import Factor, Params
from jzero.ir._regions import variables
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn

# A kernel shares nothing with the programs of other blocks if it only computes, reads and writes its own
# blocks, and asks for its number along other grid dims. Semaphores, copies and stateful generators do share.
_CALLS = {"cond", "scan", "while", *_jaxpr.CALLS}
_NUMBERS = {"program_id", "num_programs"}
_IN_BLOCKS = {"get", "swap", "addupdate", "masked_load", "masked_swap"}
_HINTS = {"multiple_of", "max_contiguous", "broadcast_to", "reciprocal"}
_SHARES_NOTHING = frozenset(
    {*_CALLS, *_NUMBERS, *_IN_BLOCKS, *_HINTS, *_rules.RULES} - _rules.named(_rules.Cost.COLLECTIVE)
)


def factors(eqn: Eqn, promised: bool) -> list[Factor]:
    """Dims whose blocks are independent by the grid and, unless `promised`, by the kernel's body."""
    mapping = eqn.params["grid_mapping"]
    plain = (
        mapping.num_index_operands == 0
        and all(isinstance(size, int) for size in mapping.grid)
        and all(not blocks.transforms for blocks in mapping.block_mappings)
        and eqn.params.get("mesh") is None
    )
    if not plain or eqn.params["input_output_aliases"]:
        return []
    apart = [axis for axis in range(len(mapping.grid)) if _is_apart(eqn, axis, promised)]
    found = [_along(eqn, axis) for axis in apart]
    return [factor for factor in found if factor is not None]


def _is_apart(eqn: Eqn, axis: int, promised: bool) -> bool:
    """Whether programs along a grid dim share nothing but their operands.

    A promise covers scratch memory and the kernel's operations. It does not cover a kernel that asks for its
    number: this may select a row of a replicated operand, and each device numbers its programs anew.
    """
    mapping = eqn.params["grid_mapping"]
    # A kernel numbers the grid dims without those that `vmap` added; negative numbers count from the end.
    numbered = [dim for dim in range(len(mapping.grid)) if dim not in mapping.vmapped_dims]
    inside = [*_jaxpr.walk(_jaxpr.open_jaxpr(eqn.params["jaxpr"])[0])]
    if any(e.primitive.name in _NUMBERS and numbered[e.params["axis"]] == axis for e in inside):
        return False
    alone = all(e.primitive.name in _SHARES_NOTHING for e in inside)
    return promised or (alone and not len(mapping.scratch_avals))


def _along(eqn: Eqn, axis: int) -> Factor | None:
    """The factor of the dims whose block a grid dim selects; None if it does not select one dim's blocks."""
    mapping = eqn.params["grid_mapping"]
    dims: list[int | None] = []
    sizes: list[int] = []  # of the blocks
    for blocks in mapping.block_mappings:
        chosen = _chosen(blocks, axis)
        if len(chosen) > 1 or None in chosen.values():
            return None
        dims.append(next(iter(chosen), None))
        sizes += [size for size in chosen.values() if size is not None]
        if chosen and blocks.array_aval.shape[dims[-1]] != sizes[-1] * mapping.grid[axis]:
            return None
    ins, outs = dims[: mapping.num_inputs], dims[mapping.num_inputs :]
    if any(dim is None for dim in outs):
        return None
    single = set(sizes) == {1}

    def local(size: int, num: int) -> Params:
        programs = size if single else mapping.grid[axis] // num
        return _with_programs(eqn, axis, programs, dims)

    # Rows of a block stay together.
    return Factor(tuple(ins), tuple(outs), local=local, groups=0 if single else mapping.grid[axis])


def _chosen(blocks: Any, axis: int) -> dict[int, int | None]:
    """The dims of an array whose block a grid dim selects, with the block's size; None if not one for one."""
    jaxpr, _ = _jaxpr.open_jaxpr(blocks.index_map_jaxpr)
    index = jaxpr.invars[axis]
    depends = {index}
    for eqn in jaxpr.eqns:
        if not depends.isdisjoint(variables(eqn.invars)):
            depends.update(eqn.outvars)
    sizes = [_size(block) for block in blocks.block_shape]
    return {
        dim: sizes[dim] if atom is index else None
        for dim, atom in enumerate(jaxpr.outvars)
        if not _jaxpr.is_literal(atom) and atom in depends
    }


def _size(block: Any) -> int | None:
    kind = type(block).__name__
    return 1 if kind == "Squeezed" else block.block_size if kind == "Blocked" else None


def _with_programs(eqn: Eqn, axis: int, programs: int, dims: list[int | None]) -> Params:
    """The call's parameters with `programs` along a grid dim, and arrays of the matching size."""
    mapping = eqn.params["grid_mapping"]
    grid = (*mapping.grid[:axis], programs, *mapping.grid[axis + 1 :])
    all_blocks = []
    for blocks, dim in zip(mapping.block_mappings, dims, strict=True):
        shape = list(blocks.array_aval.shape)
        if dim is not None:
            shape[dim] = shape[dim] // mapping.grid[axis] * programs
        aval = _jaxpr.var_like(blocks.array_aval, shape).aval
        all_blocks.append(dataclasses.replace(blocks, array_aval=aval))
    local = dataclasses.replace(mapping, grid=grid, block_mappings=tuple(all_blocks))
    outs = all_blocks[mapping.num_inputs :]
    return {"grid_mapping": local, "out_avals": tuple(blocks.array_aval for blocks in outs)}
