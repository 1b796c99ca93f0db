"""What an expert writes into a model for XLA's partitioner. A model asks for it where it would be written."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class Unannotated:
    """The model as its author wrote it: every hook returns what it is given."""

    def rows(self, x: Any) -> Any:
        """Activations, whose dim 0 is the batch."""
        return x

    def weights(self, params: Any, dtype: Any = None) -> Any:
        """The weights of a layer, where the layer uses them."""
        return params

    def gradients(self, grads: Any) -> Any:
        """What the optimizer is given."""
        return grads

    def linen(self, module: Any, dtype: Any = None) -> Any:
        """A Linen class whose `weights` are annotated."""
        return module

    def nnx(self, module: Any, dtype: Any = None) -> Any:
        """An NNX module whose `weights` are annotated."""
        return module


@dataclasses.dataclass(frozen=True, eq=False)
class Annotated(Unannotated):
    """Activations in the batch's shards, weights gathered in the layer, their gradients reduced there.

    Attributes:
      mesh: of one axis, "data".
      shards: how the gradient of a parameter of some shape is sharded.
      stored_whole: parameters are, as at stages 1 and 2; else they are sharded as their gradients.
    """

    mesh: Mesh
    shards: Mapping[tuple[int, ...], P]
    stored_whole: bool = False

    def rows(self, x: Any) -> Any:
        return jax.tree.map(lambda x: self._constrain(x, P("data")), x)

    def weights(self, params: Any, dtype: Any = None) -> Any:
        return jax.tree.map(lambda w: self._gathered(w, dtype), params)

    def gradients(self, grads: Any) -> Any:
        return jax.tree.map(lambda g: self._constrain(g, self._shard(g)), grads)

    def linen(self, module: Any, dtype: Any = None) -> Any:
        mapped = nn.map_variables(module, "params", lambda params: self.weights(params, dtype))
        mapped.__name__ = module.__name__  # which names its parameters
        return mapped

    def nnx(self, module: Any, dtype: Any = None) -> Any:
        graphdef, params = nnx.split(module)
        return nnx.merge(graphdef, self.weights(params, dtype))

    def _shard(self, x: jax.Array) -> P:
        """That of the parameter, or of the stack of layers of which this is a slice."""
        return self.shards.get(x.shape, P())

    def _constrain(self, x: jax.Array, spec: P) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def _gathered(self, w: jax.Array, dtype: Any) -> jax.Array:
        # Cast in shards, so that both the gather and the reduction move the narrow dtype.
        if dtype is not None and w.ndim > 1 and jnp.issubdtype(w.dtype, jnp.floating):
            w = w.astype(dtype)
        shard = self._shard(w)
        stored = P() if self.stored_whole else shard

        @jax.custom_vjp
        def gather(w: jax.Array) -> jax.Array:
            # Pinned twice, or XLA may gather first and cast then.
            return self._constrain(self._constrain(w, stored), P())

        # The transpose of a constraint is itself: without this, gradients would be all-reduced.
        gather.defvjp(lambda w: (gather(w), None), lambda _, g: (self._constrain(g, shard),))
        return gather(w)


def shards_of(state: Any, shardings: Any) -> dict[tuple[int, ...], P]:
    """Specs by shape: Adam's first moments', which gradients meet; also of slices of stacked layers."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    found: dict[tuple[int, ...], P] = {}
    for (path, leaf), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
        if ".mu" in jax.tree_util.keystr(path):
            spec = tuple(sharding.spec)
            if spec[:1] == (None,):
                found.setdefault(leaf.shape[1:], P(*spec[1:]))
            found[leaf.shape] = sharding.spec
    return found
