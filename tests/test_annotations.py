"""What a trace of jax.profiler tells of a step on the host; experiments/offload/timeline draws it."""

import jax
import optax
import pytest

import jzero
import small
from test_offload import BATCH, make_step, new_state

pytest.importorskip("llvmlite")


def spans_of(folder) -> dict[str, list[tuple[float, float]]]:
    (path,) = folder.rglob("*.xplane.pb")
    found: dict[str, list[tuple[float, float]]] = {}
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                span = event.start_ns, event.start_ns + event.duration_ns
                found.setdefault(event.name, []).append(span)
    return found


@pytest.mark.slow
def test_a_trace_says_when_the_host_waits_updates_and_sends(tmp_path):
    tx = optax.adam(1e-2)
    train_step = small.shard_train_step(make_step(tx), memory=jzero.HostCPU())
    state, _ = train_step(new_state(tx), BATCH)
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(train_step(state, BATCH))
    found = spans_of(tmp_path)
    waits, updates, sends = (
        found[f"jzero: {name}"] for name in ("wait for gradients", "update", "send parameters")
    )
    assert len(waits) == 1
    assert waits[0][1] <= min(updates)[0]
    assert min(updates)[0] < min(sends)[0]
