"""The figures as the paper prints them, and how it rounds.

Rajbhandari, Rasley, Ruwase, He: "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
Rajbhandari, Ruwase, Rasley, Smith, He: "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep
Learning", 2021, section 4: names that begin with INFINITY.
Data only. Each table maps what was asked to what was printed; who computes it is not said here.
"""

import math
from fractions import Fraction
from typing import NamedTuple

STAGES = {0: "baseline", 1: "P_os", 2: "P_os+g", 3: "P_os+g+p"}

# Table 1: GB of model states on each device; {devices: {model: (stage 1, stage 2, stage 3)}}.
TABLE_1 = {
    1: {"7.5B": ("120", "120", "120"), "128B": ("2048", "2048", "2048"), "1T": ("16000", "16000", "16000")},
    4: {"7.5B": ("52.5", "41.3", "30"), "128B": ("896", "704", "512"), "1T": ("7000", "5500", "4000")},
    16: {"7.5B": ("35.6", "21.6", "7.5"), "128B": ("608", "368", "128"), "1T": ("4750", "2875", "1000")},
    64: {"7.5B": ("31.4", "16.6", "1.88"), "128B": ("536", "284", "32"), "1T": ("4187", "2218", "250")},
    256: {"7.5B": ("30.4", "15.4", "0.47"), "128B": ("518", "263", "8"), "1T": ("4046", "2054", "62.5")},
    1024: {"7.5B": ("30.1", "15.1", "0.12"), "128B": ("513", "257", "2"), "1T": ("4011", "2013", "15.6")},
}  # fmt: skip

# Table 2: the largest model on 64 GPUs of 32 GB for each degree of model parallelism, {degree: {stage: it}}.
# The paper multiplies what it has rounded in the first row by the degree.
TABLE_2_DEVICES, TABLE_2_MEMORY = 64, "32GB"
TABLE_2_THEORY = {
    1: {0: "2B", 1: "7.6B", 2: "14.4B", 3: "128B"},
    2: {0: "4B", 1: "15.2B", 2: "28.8B", 3: "256B"},
    4: {0: "8B", 1: "30.4B", 2: "57.6B", 3: "0.5T"},
    8: {0: "16B", 1: "60.8B", 2: "115.2B", 3: "1T"},
    16: {0: "32B", 1: "121.6B", 2: "230.4B", 3: "2T"},
}
TABLE_2_MEASURED = {
    1: {0: "1.3B", 1: "6.2B"},
    2: {0: "2.5B", 1: "12.5B"},
    4: {0: "5B", 1: "25B"},
    8: {0: "10B", 1: "50B"},
    16: {0: "20B", 1: "100B"},
}

# The largest model that was trained on 8 GPUs of 32 GB, as the authors report it.
EIGHT_REPORTED = {0: "1.4B", 1: "6B", 2: "8B", 3: "13B"}

# Figure 1: GB of model states on each of 64 devices; 7.5B parameters, K = 12.
FIGURE_1_MODEL, FIGURE_1_DEVICES = "7.5B", 64
FIGURE_1 = {0: "120", 1: "31.4", 2: "16.6", 3: "1.9"}


class Statement(NamedTuple):
    """A bandwidth (bytes per second, for each GPU) that suffices for an efficiency.

    `size` is the batch of each GPU, or, of activations, the hidden size.
    """

    kind: str
    size: int
    bandwidth: float
    efficiency: float


# Section 4.2, V100s that reach 70 TFLOP/s, sequences of 1024 tokens. "Over 70 GB/s" for parameters and
# gradients, "nearly 4 times" that for optimizer state, which needs "nearly 1.5 TB/s" for 90 %; 2 GB/s for
# activations, and less than 1 GB/s where the hidden size is beyond 8K.
INFINITY_PEAK, INFINITY_SEQUENCE = 70e12, 1024
INFINITY_STATEMENTS = (
    Statement("parameters and gradients", 1, 70e9, 0.5),
    Statement("optimizer state", 1, 4 * 70e9, 0.5),
    Statement("optimizer state", 2, 1.5e12, 0.9),
    Statement("activations", 2048, 2e9, 0.5),
    Statement("activations", 8192, 1e9, 0.5),
)


def as_table_1_prints(gigabytes: float) -> str:
    """From 100 on cut off (257.75 is '257'), below it rounded half up to three digits (41.25 is '41.3')."""
    exact = Fraction(gigabytes)
    if exact >= 100:
        return str(math.floor(exact))
    return rounded(exact, 1 if exact >= 10 else 2)


def rounded(number: float | Fraction, decimals: int) -> str:
    """Half up, without trailing zeros: '7.6' of 7.64."""
    scale = 10**decimals
    units = math.floor(Fraction(number) * scale + Fraction(1, 2))
    return f"{float(Fraction(units, scale)):.{decimals}f}".rstrip("0").rstrip(".")


def as_table_2_prints(billions: float, degree: int) -> str:
    """What `degree` times the first row's figure, rounded, is: '60.8B' of 8 * 7.64, '0.5T' of 4 * 128."""
    each = Fraction(rounded(Fraction(billions) / degree, 1))
    found = each * degree
    return f"{rounded(found, 1)}B" if found < 500 else f"{rounded(found / 1000, 1)}T"
