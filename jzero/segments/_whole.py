"""`WholeStep`: a step as one program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jzero.sharding.analysis._traffic import Crossing
from jzero.sharding.run._run import Runner


class WholeStep:
    """All of a step in one `jax.jit`, the state donated.

    Attributes:
      run: the step as a function of whole arrays.
      jitted: the same, compiled.
    """

    def __init__(self, runner: Runner, shardings: Sequence[NamedSharding]):
        self.run: Callable[..., Any] = runner.whole_step()
        # Else XLA would choose over the automatic axes, and the next step would move the state back.
        options: dict[str, Any] = {"out_shardings": (list(shardings), None)}
        options = options if runner.plan.automatic else {}
        self.jitted = jax.jit(self.run, donate_argnums=0, **options)

    def __call__(
        self, state: Sequence[Any], arrays: Sequence[jax.Array]
    ) -> tuple[list[Any], list[jax.Array]]:
        """Runs one step; the state is consumed."""
        made: tuple[list[Any], list[jax.Array]] = self.jitted(state, arrays)
        return made

    def trace(self, state: Sequence[Any], arrays: Sequence[Any]) -> jax.stages.Traced:
        """The trace of its program."""
        return self.jitted.trace(state, arrays)

    def crossings(self) -> tuple[Crossing, ...]:
        """Nothing crosses between devices and hosts."""
        return ()

    def roads(self) -> str:
        """The host updates nothing."""
        return ""
