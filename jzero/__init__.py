# SPDX-License-Identifier: Apache-2.0
"""ZeRO for JAX: train steps whose parameters, gradients and optimizer state are sharded."""

import types as _types
import typing as _typing

# JAX's own functions: early scripts import them from here.
from jax import grad as grad
from jax import value_and_grad as value_and_grad

from jzero._blocks import Blocks as Blocks
from jzero._errors import BatchError as BatchError
from jzero._errors import CheckpointError as CheckpointError
from jzero._errors import JzeroError as JzeroError
from jzero._errors import MeshError as MeshError
from jzero._errors import MismatchError as MismatchError
from jzero._errors import OptionError as OptionError
from jzero._errors import ProcessError as ProcessError
from jzero._errors import StateError as StateError
from jzero._errors import StepError as StepError
from jzero._numbers import BytesPerParam as BytesPerParam
from jzero._numbers import Rates as Rates
from jzero._numbers import Workload as Workload
from jzero._option_groups import Axes as Axes
from jzero._option_groups import Comm as Comm
from jzero._option_groups import Microbatches as Microbatches
from jzero._policy import HostCPU as HostCPU
from jzero._policy import Memory as Memory
from jzero._policy import NoOffload as NoOffload
from jzero._policy import NVMe as NVMe
from jzero._policy import PinnedHost as PinnedHost
from jzero._shard_eval_step import shard_eval_step as shard_eval_step
from jzero._shard_train_step import shard_train_step as shard_train_step
from jzero._sharded_step import ShardedStep as ShardedStep
from jzero._version import __version__ as __version__
from jzero.checkpoint._checkpointer import Checkpointer as Checkpointer
from jzero.checkpoint._restore import restore as restore
from jzero.deepspeed._translate import from_deepspeed as from_deepspeed
from jzero.offload.memory._leaf_array import LeafArray as LeafArray
from jzero.preflight._preflight import Preflight as Preflight
from jzero.preflight._preflight import preflight as preflight
from jzero.preflight._targets import target_mesh as target_mesh
from jzero.reports._bandwidth import BandwidthReport as BandwidthReport
from jzero.reports._bandwidth import bandwidth as bandwidth
from jzero.reports._estimate import Estimate as Estimate
from jzero.reports._estimate import estimate as estimate
from jzero.tracing._eqx import from_eqx as from_eqx
from jzero.tracing._keys import fold_device_index as fold_device_index
from jzero.tracing._local import groups as groups
from jzero.tracing._local import per_example as per_example
from jzero.tracing._nnx import from_nnx as from_nnx
from jzero.tracing._precision import master_weights as master_weights
from jzero.tracing._precision import stochastic_rounding as stochastic_rounding
from jzero.weights._export import export_weights as export_weights
from jzero.weights._families import LAYOUTS as LAYOUTS
from jzero.weights._import import import_weights as import_weights
from jzero.weights._layout import WeightLayout as WeightLayout
from jzero.weights._layout import WeightRule as WeightRule


def __dir__() -> list[str]:
    """The public names; packages are where they are implemented, but for two that are imported by name."""
    own = {"testing", "deepspeed", "__version__", "__doc__"}
    return sorted(
        name
        for name, value in globals().items()
        if name in own or not (name.startswith("_") or isinstance(value, _types.ModuleType))
    )


if not _typing.TYPE_CHECKING:  # A type checker would take any name to exist.

    def __getattr__(name: str) -> _typing.NoReturn:
        """Says where a name went; for one that never was there, what Python says."""
        if name in ("ShardedTrainStep", "ShardedEvalStep"):
            raise AttributeError(
                f"jzero.{name} is gone. Train steps and evaluations are of one class. Write "
                "jzero.ShardedStep, and ask x.trains.", name=name)  # fmt: skip
        if name in ("PaddedArray", "CodedArray", "HostArray", "NVMeArray"):
            raise AttributeError(
                f"jzero.{name} is gone. One class has all leaves that are no plain arrays. Write "
                "isinstance(x, jzero.LeafArray), and ask x.where ('in host memory', 'in files') and x.codes.",
                name=name)  # fmt: skip
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
