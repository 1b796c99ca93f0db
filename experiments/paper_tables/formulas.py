"""The formulas of ZeRO, ZeRO-Offload and ZeRO-Infinity as they are printed, to which estimates are held."""


def model_states(num_params: float, stage: int, devices: int, k: float = 12) -> float:
    """Bytes on each device: 2 + 2 + K for each parameter (ZeRO, section 5 and figure 1)."""
    shards = [num_params / devices if stage >= s else num_params for s in (3, 2, 1)]
    return 2 * shards[0] + 2 * shards[1] + k * shards[2]


def volume(stage: int) -> int:
    """Elements that a device sends and receives in a step, for each parameter (ZeRO, section 7.2)."""
    return 3 if stage == 3 else 2


def offloaded(num_params: float, devices: int, k: float = 12) -> tuple[float, float]:
    """Bytes on each host, and across each link in either direction (ZeRO-Offload, sections 3 and 4.2)."""
    return k * num_params / devices, 2 * num_params / devices


def efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """The share of its time that a device computes, if it waits for all that it moves.

    `intensity * bandwidth / (intensity * bandwidth + peak)`, for a workload of `intensity` operations per
    byte moved, a link of `bandwidth` bytes per second and a device of `peak` operations per second.

    Reference:
      Rajbhandari et al.: "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning",
      2021, section 4; the intensities below are its equations for a Transformer whose blocks are computed
      again in the backward pass: 8 operations per parameter and token.
    """
    return intensity * bandwidth / (intensity * bandwidth + peak)


def bandwidth_for(efficiency: float, intensity: float, peak: float) -> float:
    """Bytes per second at which a device is so efficient: `efficiency`, solved for the bandwidth."""
    return peak * efficiency / ((1 - efficiency) * intensity)


def intensity_of_parameters(batch: int, sequence: int) -> float:
    """Of parameters and gradients in 16 bits: loaded three times and stored once, 8 bytes a parameter."""
    return float(sequence * batch)


def intensity_of_optimizer_state(batch: int, sequence: int) -> float:
    """Of optimizer state, gradients and masters, read and written: 2 * 16 bytes a parameter."""
    return sequence * batch / 4


def intensity_of_activations(hidden: int, interval: int = 1) -> float:
    """Of inputs of every `interval`-th block in 16 bits, stored once and loaded once."""
    return 24.0 * hidden * interval
