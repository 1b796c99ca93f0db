"""Which leaves of a state rest where, as `offload=` has it, and the cut of the step that follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.sharding import Mesh

from jzero._components import grouped
from jzero._errors import OptionError, describe_leaf, message
from jzero._memory_kinds import DEVICE, HOST
from jzero.offload import _bandwidth
from jzero.offload._policy import HostCPU, NoOffload
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.cut import _pieces
from jzero.sharding.cut._pieces import Piece, UpdatePart
from jzero.sharding.plan import _plan
from jzero.sharding.plan._plan import OPTIMIZER, PARAMETER, LeafPlan
from jzero.sharding.plan._setting import Setting
from jzero.tracing import _call

WHO = _call.WHO
Leaves = tuple[LeafPlan, ...]


def decide(leaves: Leaves, frame: Frame, setting: Setting) -> tuple[Leaves, UpdatePart]:
    """The leaves with their tiers, and the update part: what follows from those that may be offloaded.

    Raises:
      OptionError: the policy cannot be obeyed.
    """
    options = setting.options
    policy = options.offload
    if isinstance(policy, NoOffload):
        return leaves, UpdatePart((), {})
    feeding = _pieces.feeds_grad_part(frame)
    invars = frame.jaxpr.invars[: len(leaves)]
    staying = [i for i, var in enumerate(invars) if var in feeding]
    resting = _plan.offload(leaves, policy.tier, options.min_shard_bytes, staying)
    offloaded = [i for i, leaf in enumerate(resting) if leaf.tier != DEVICE]
    update = _pieces.cut_update(frame, offloaded)
    if not update.pieces:
        raise OptionError(message(
            WHO, f"offload={policy}, and the state has no optimizer state that is worth it",
            "Leaves of min_shard_bytes that only the update reads are offloaded: moments, averages, masters.",
            "Drop offload."))  # fmt: skip
    if isinstance(policy, HostCPU):
        _check_hosted(policy, leaves, frame, update, staying, setting)
        together = _connected(update.pieces)
        share = _share(policy, resting, setting)
        resting = _shared(resting, together, share, policy.ratio == "auto")
        there = {i for i, leaf in enumerate(resting) if leaf.tier == HOST}
        hosted = [p for group in together if there & set(_pieces.leaves_of(group)) for p in group]
        update = dataclasses.replace(update, hosted=tuple(hosted))
    return resting, update


def _check_hosted(
    policy: HostCPU, leaves: Leaves, frame: Frame, update: UpdatePart, staying: Sequence[int],
    setting: Setting,
) -> None:  # fmt: skip
    if setting.automatic:
        raise OptionError(message(
            WHO, f"offload={policy}, and XLA shards over the mesh axes {list(setting.automatic)}",
            "The host updates shards over data axes.", "Use jzero.PinnedHost(), or drop the other axes."
        ))  # fmt: skip
    if not policy.delayed_update:
        return
    read = [describe_leaf(leaf.path, leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)
            if i in staying and leaf.role == OPTIMIZER]  # fmt: skip
    if read:
        raise OptionError(message(
            WHO, [f"{path} is read with the batch" for path in read],
            "A delayed update happens after the next gradients were computed, which must not depend on it.",
            "Drop delayed_update."))  # fmt: skip
    outs = sorted(i - len(leaves) for i in update.outs if i >= len(leaves))
    if outs:
        raise OptionError(message(
            WHO, [f"output {i} beside the state follows from optimizer state" for i in outs],
            "A delayed update happens after the step has returned.",
            "Return it from the state, or drop delayed_update.", things="outputs"))  # fmt: skip


def _share(policy: HostCPU, leaves: Leaves, setting: Setting) -> float:
    """The share of optimizer state that rests on the host."""
    if policy.ratio != "auto":
        return float(policy.ratio)
    mesh = setting.mesh
    local = list(mesh.local_devices) if isinstance(mesh, Mesh) else []
    if len(local) != mesh.size:
        why = (
            "some of the mesh's devices are other processes'"
            if local
            else "the mesh has no devices"
        )
        raise OptionError(message(
            WHO, f"offload=HostCPU(ratio='auto'), and {why}",
            "Host and devices are measured in one process, so that all go by one number.",
            "Use a number, such as describe() reports it for one process."))  # fmt: skip
    moving = sum(leaf.nbytes_per_device for leaf in leaves if leaf.tier != DEVICE)
    # They cross in shards, whole as they may rest.
    num_shards = setting.sharding.count(setting.sharding.shard_axes)
    params = sum(leaf.nbytes for leaf in leaves if leaf.role == PARAMETER) // num_shards
    found = _bandwidth.measure(local[0], len(local), policy.threads)
    return _bandwidth.share(found, moving, params)


def _shared(
    leaves: Leaves, together: Sequence[Sequence[Piece]], ratio: float, measured: bool
) -> Leaves:
    """The leaves with those back on the devices that `ratio`, a share of all bytes, leaves there."""
    if ratio == 1:
        return leaves
    sizes = [leaf.nbytes for leaf in leaves]
    most = ratio * sum(_pieces.nbytes_of(group, sizes) for group in together)
    host: set[int] = set()
    held = 0
    for group in sorted(together, key=lambda group: -_pieces.nbytes_of(group, sizes)):
        nbytes = _pieces.nbytes_of(group, sizes)
        if held + nbytes <= most:
            host |= set(_pieces.leaves_of(group))
            held += nbytes
    smallest = min(together, key=lambda group: _pieces.nbytes_of(group, sizes))
    if not host and measured:
        host = set(_pieces.leaves_of(smallest))
    if not host:
        least = _pieces.nbytes_of(smallest, sizes) / (most / ratio)
        paths = [leaves[i].path for i in _pieces.leaves_of(smallest)]
        more = ", ..." if len(paths) > 3 else ""
        raise OptionError(message(
            WHO, f"offload=HostCPU(ratio={ratio:g}), and {', '.join(paths[:3])}{more} are the fewest "
            f"leaves that are updated together: {least:.3f} of all bytes",
            "Leaves whose updates depend on each other rest in one place.",
            f"Use ratio={min(least + 0.0005, 1):.3f} or more, or drop offload."))  # fmt: skip
    return tuple(
        leaf if i in host else dataclasses.replace(leaf, tier=DEVICE)
        for i, leaf in enumerate(leaves)
    )


def _connected(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces in groups between which nothing passes, and that have no leaf in common."""
    given = {var for piece in pieces for var in piece.gives}
    return grouped(
        pieces, lambda piece: {*piece.leaves, *piece.gives, *given.intersection(piece.reads)}
    )
