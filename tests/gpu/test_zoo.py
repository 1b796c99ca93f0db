"""Steps whose rows depend on each other, on all GPUs that there are, against one with the whole batch."""

import jax
import pytest

from zoo import Setting, verdict


@pytest.mark.parametrize(
    "name",
    ["clip", "batch_norm", "dp_sgd_by_scan", "dropout_typed_key", "moe_with_balance_loss"],
)
def test_trains_as_on_one_device(name: str):
    assert verdict(name, Setting(3, (jax.device_count(),), "float32")) is None
