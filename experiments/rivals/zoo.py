"""Nine models as their authors write them, what is compiled of them, and the ways to train each."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from experiments.rivals.annotations import Annotated, shards_of
from experiments.rivals.constraints import with_constraints
from experiments.rivals.models.dit import DiT
from experiments.rivals.models.flax_gpt import FlaxGPT
from experiments.rivals.models.gpt import GPT
from experiments.rivals.models.llama import Llama
from experiments.rivals.models.mamba import Mamba
from experiments.rivals.models.moe import DroplessMoE, MoE
from experiments.rivals.models.t5 import T5
from experiments.rivals.models.unet import UNet


class Row(NamedTuple):
    """One model, and how it is trained.

    Attributes:
      model: of 7 to 8 billion parameters if it is scanned and one of the three that grow, else as it is.
      rows: of the batch, on each device.
      small: of half a billion, for 8 devices; None for a model of one size.
      stage: of ZeRO.
      microbatches: of a batch, on each device.
      scanned: its layers are a loop.
    """

    model: Any
    rows: int = 1
    small: Any = None
    stage: int = 3
    microbatches: int = 1
    scanned: bool = True


_llama = Llama(layers=32, dim=4096, heads=32, kv_heads=8, hidden=14336)
_small_llama = Llama(layers=16, dim=1024, heads=16, kv_heads=4, hidden=3584)
_chunked = dataclasses.replace(_llama, loss_chunks=4)
_gpt: dict[str, Any] = {"layers": 36, "dim": 4096, "heads": 32}
_small_gpt: dict[str, Any] = {"layers": 24, "dim": 1280, "heads": 20}
ROWS = {
    "Flax GPT": Row(FlaxGPT(**_gpt), small=FlaxGPT(**_small_gpt)),
    "Llama": Row(_llama, small=_small_llama),
    "our GPT": Row(GPT(**_gpt), small=GPT(**_small_gpt)),
    "T5": Row(T5(layers=24, dim=2048, heads=32, head_size=64, hidden=5120)),
    "MoE": Row(MoE(layers=24, dim=2048, heads=16, hidden=5632)),
    "MoE without dropped tokens": Row(DroplessMoE(layers=24, dim=2048, heads=16, hidden=5632)),
    "Mamba": Row(Mamba(layers=48, dim=2048)),
    "DiT": Row(DiT(layers=12, dim=3072, heads=24), rows=4, scanned=False),
    "UNet": Row(
        UNet(widths=(512, 1024, 2048), depth=1, attends=(False, True, True)), rows=4, scanned=False
    ),
    "Llama, loss in chunks": Row(_chunked),
    "Llama, 4 sequences": Row(_llama, rows=4),
    "Llama, 4 sequences, loss in chunks": Row(_chunked, rows=4),
    "Llama, accumulate=4": Row(_llama, rows=4, microbatches=4),
    "Llama, stage 2": Row(_llama, stage=2),
}


class Rival(NamedTuple):
    """A way to train, ready to be called or lowered with a state and a batch.

    Attributes:
      step: `step(state, batch) -> (state, loss)`, of global arrays.
      state: shapes of the state, in its shardings.
      batch: shapes of the batch, in its shardings.
    """

    step: Any
    state: Any
    batch: Any

    def lower(self) -> jax.stages.Lowered:
        return self.step.lower(self.state, self.batch)


RIVALS = ("jzero", "expert", "jit", "constraints")


def rival(name: str, row: Row, model: Any, mesh: Mesh, **options: Any) -> Rival:
    """One of `RIVALS`; all have the state at rest in the same shards.

    * jzero: the author's step, given to `jzero.shard_train_step`.
    * expert: annotated, given to `jax.jit`.
    * jit: the author's step, given to `jax.jit`: XLA's partitioner decides.
    * constraints: the author's step, annotated by a pass (`constraints.py`), given to `jax.jit`.
    """
    state = jax.eval_shape(model.init, jax.random.key(0))
    batch = model.batch(row.rows * mesh.size)
    train_step = jzero.shard_train_step(
        model.step, stage=row.stage, microbatches=row.microbatches, mesh=mesh, **options
    )
    if name == "jzero":
        return Rival(train_step, state, batch)
    at_rest = train_step.state_shardings(state, batch)
    shards = shards_of(state, at_rest)
    if row.microbatches > 1:
        model = dataclasses.replace(model, microbatches=row.microbatches)
    if name == "expert":
        model = dataclasses.replace(model, annotate=Annotated(mesh, shards, row.stage < 3))
    step = model.step
    if name == "constraints":
        rows = {num * mesh.size for num in (row.rows, row.rows // row.microbatches)}
        step = with_constraints(step, mesh, shards, rows, stored_whole=row.stage < 3)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(at_rest, None))
    on_rows = jax.tree.map(lambda _: NamedSharding(mesh, P("data")), batch)
    return Rival(jitted, _placed(state, at_rest), _placed(batch, on_rows))


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes, shardings,
    )  # fmt: skip
