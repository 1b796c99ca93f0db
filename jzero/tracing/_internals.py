# SPDX-License-Identifier: Apache-2.0
"""All names of JAX outside its public API, imported once. Only files of `jzero/tracing` use them.

Behind each is the release in which its definition changed last, by JAX's history from 0.4.30 on and the
sources of 0.11.2 and 0.12.0.1.
"""
# ruff: noqa: F401

import importlib.util
from typing import Any

from jzero._tested import lacks_of_jax

try:
    import jax._src.core as internal
    from jax import core as public
    from jax._src import (
        api,  # _post_hook_state: 0.8
        config,  # trace_context: 0.8.1
        distributed,  # global_state: not since 0.4.30
        dtypes,  # register_canonicalize_value_handler: 0.11.0
        xla_bridge,  # _backends: not since 0.4.30
    )
    from jax._src import effects as internal_effects  # ordered_effects: not since 0.4.30
    from jax._src import source_info_util as internal_source_info  # Transform, user_frames: 0.7.0
    from jax._src.ad_checkpoint import name_p  # the same in 0.10.2 to 0.12
    from jax._src.array import ArrayImpl  # 0.12
    from jax._src.interpreters.partial_eval import DynamicJaxprTrace  # emit_eqn: 0.10.2
    from jax._src.lax.lax import empty2  # 0.8.0
    from jax._src.lax.parallel import reduce_scatter_p  # 0.4.36
    from jax._src.lib import _jax as xla  # batched_copy_array_to_devices_with_sharding: 0.10.2 only
    from jax._src.random.prng import PRNGKeyArray  # moved here in 0.10.2; 0.11.0
    from jax.experimental.hijax import AbstractRef
    from jax.extend import core as extended_core
    from jax.extend import source_info_util
    from jax.extend.random import threefry2x32_p
    from jax.interpreters import ad, batching, mlir  # register_lowering: 0.7.0
except ImportError as error:
    raise lacks_of_jax(error) from error

# `_types.py` has what jzero reads of their classes.
core: Any = public
flattree: Any = None  # 0.11.0; JAX 0.10 has none.
if importlib.util.find_spec("jax._src.flattree"):
    flattree = importlib.import_module("jax._src.flattree")
extended: Any = extended_core
AxisEnv: Any = internal.AxisEnv  # 0.10.0
NamedAxisEffect: Any = internal.NamedAxisEffect  # 0.10.2
