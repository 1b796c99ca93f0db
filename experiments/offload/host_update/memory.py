"""What an update adds to a process's memory: the peak of its steps over what was resident before them.

.venv-host-update/bin/python experiments/offload/host_update/memory.py jzero AdamW
"""

import argparse
import re
from pathlib import Path

import sides
from problem import MOMENTS, Config, Memory

WAYS = {"jzero": sides.by_jzero, "xla": sides.by_xla}


def resident(what: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at the peak."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(rf"{what}:\s+(\d+) kB", status)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("optimizer", choices=MOMENTS)
    parser.add_argument("--millions", type=int, default=64)
    parser.add_argument("--leaves", type=int, default=1)
    args = parser.parse_args()
    memory = Memory(Config(args.optimizer, args.millions, args.leaves, "bfloat16", copy=True))
    WAYS[args.way](
        Memory(Config(args.optimizer, 1, 1, "bfloat16", copy=True))
    )()  # JAX and LLVM start.
    before = resident("VmRSS")
    side = WAYS[args.way](memory)
    for _ in range(3):
        side()
    state = 4 * memory.size * (1 + MOMENTS[args.optimizer])
    extra = resident("VmHWM") - before
    print(
        f"{args.way}, {args.optimizer}, {args.millions}M in {args.leaves} leaves: "
        f"{extra / 1e6:.0f} MB beyond the {state / 1e6:.0f} MB of state, gradients and copies"
    )


if __name__ == "__main__":
    main()
