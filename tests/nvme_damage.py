"""State in files, whose headers are damaged, given to a new start: resumed bit for bit, or refused by name.

python tests/nvme_damage.py --cases 40      # of each way to have state in files, on one and two devices
"""

import argparse
import collections
import contextlib
import gc
import os
import pathlib
import random
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import jzero
import small
from jzero.offload.memory import _filling
from test_offload_params import CLIPPED, batch, make_step, new_state

NUM_STEPS, PAGE = 3, 4096
# Of the policies: whether parameters are in files, in place, and gradients.
WAYS = {
    "moments": (False, False, False),
    "moments in place": (False, True, False),
    "parameters": (True, False, False),
    "parameters in place": (True, True, False),
    "parameters and gradients": (True, False, True),
    "parameters and gradients in place": (True, True, True),
}
MOMENTS = ("placed", "trained", "killed in a step")


def train_step_on(mesh: Any, folder: pathlib.Path, way: str, resume: bool) -> Any:
    params, in_place, gradients = WAYS[way]
    own = {"in_place": in_place, "resume": resume, "gradients": gradients}
    options: dict[str, Any] = {"offload": jzero.NVMe(folder, host_bytes=2**16, **own)}
    if params:
        window = jzero.NVMe(folder, host_bytes=2**17, device_bytes=2**14, **own)
        options["offload_params"] = window
    return small.shard_train_step(make_step(True, CLIPPED), mesh=mesh, **options)


def start() -> Any:
    return new_state(True, 4, CLIPPED)


def end_of_process() -> None:
    """What is left of this process's states when it has ended: their files."""
    gc.collect()
    for store in list(_filling._alive.values()):
        store.files.close()
    for registry in (_filling._alive, _filling._made, _filling._gone_on):
        registry.clear()


def meet(what: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def content(folder: pathlib.Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class Left:
    """What a run leaves: files at some moments, checkpoints, and what its state was after each step."""

    def __init__(self, folder: pathlib.Path, mesh: Any, way: str) -> None:
        self.folder, self.mesh, self.way = folder, mesh, way
        self.files = folder / "nvme"
        self.own = self.files / f"process-{jax.process_index()}"
        self.moments: dict[str, dict[str, bytes]] = {}
        self.states: list[Any] = []
        train_step = train_step_on(mesh, self.files, way, False)
        state = train_step.shard(start(), batch(0))
        with (
            jzero.Checkpointer(folder / "whole", train_step, asynchronous=False) as whole,
            jzero.Checkpointer(folder / "rest", train_step, asynchronous=False) as rest,
        ):
            for step in range(NUM_STEPS + 1):
                if step:
                    state, _ = train_step(state, batch(step))
                self.states.append(self.on_host(train_step, state))
                whole.save(step, state)
                rest.save(step, without_files(state))
                if step == 0:
                    self.moments["placed"] = content(self.own)
        self.moments["trained"] = content(self.own)
        leaf = next(x for x in jax.tree.leaves(state) if getattr(x, "where", "") == "in files")
        leaf.storage.store.begin()
        self.moments["killed in a step"] = content(self.own)
        leaf.storage.store.files.abort()
        del leaf, state
        end_of_process()

    def on_host(self, train_step: Any, state: Any) -> Any:
        return jax.tree.map(np.array, train_step.unshard(state))

    def case(self, rng: random.Random) -> str:
        """Damages a header, and starts again; what came of it. All processes draw the same."""
        moment, resume = rng.choice(MOMENTS), rng.random() < 0.9
        given, step = rng.choice(["whole", "rest"] * 4 + ["fresh"]), rng.randint(0, NUM_STEPS)
        if rng.random() < 0.9:  # one that the files have, unless it is damaged
            step = 0 if moment == "placed" else NUM_STEPS - (rng.random() < 0.3)
        process = rng.randrange(jax.process_count())
        there = self.moments[moment]
        name = rng.choice(sorted(there))
        start_of_page = rng.randrange(2) * PAGE
        some = [rng.randrange(8 * 420) for _ in range(4)]
        bit = rng.choice([None, rng.randrange(8 * PAGE), *some])
        if rng.random() < 0.1:
            bit = -1  # nothing is damaged
        shutil.rmtree(self.own)
        for path, data in there.items():
            (self.own / path).parent.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == process and path == name:
                data = damaged(data, start_of_page, bit)
            (self.own / path).write_bytes(data)
        before = content(self.own)
        meet("damaged")
        damage = f"{name} {start_of_page} {bit}"
        what = f"{self.way}, {moment}, resume={resume}, {given} {step}: {damage}"
        train_step = train_step_on(self.mesh, self.files, self.way, resume)
        try:
            state = self.given(train_step, given, step)
        except jzero.JzeroError as error:
            assert content(self.own) == before, f"{what}: refused, and files are others"
            if os.environ.get("NVME_DAMAGE_TELL"):
                print(f"{what}: {error}", flush=True)
            return self.called("refused", bit)
        finally:
            meet("tried")
        assert resume, f"{what}: not refused"
        assert given != "fresh", f"{what}: not refused"
        small.assert_same(self.on_host(train_step, state), self.states[step], what)
        if step < NUM_STEPS:
            state, _ = train_step(state, batch(step + 1))
            small.assert_same(self.on_host(train_step, state), self.states[step + 1], what)
        return self.called("resumed", bit)

    @staticmethod
    def called(what: str, bit: int | None) -> str:
        return what if bit != -1 else f"{what}, undamaged"

    def given(self, train_step: Any, given: str, step: int) -> Any:
        if given == "fresh":
            return train_step.shard(start(), batch(0))
        path = self.folder / given / str(step)
        state = jzero.restore(path, train_step, jax.eval_shape(start))
        return train_step.shard(state, batch(0))


def damaged(data: bytes, at: int, bit: int | None) -> bytes:
    there = bytearray(data)
    if bit == -1:
        return data
    if bit is None:
        there[at : at + PAGE] = bytes(PAGE)
    else:
        there[at + bit // 8] ^= 1 << bit % 8
    return bytes(there)


def without_files(state: Any) -> Any:
    """What is not in files; zeros stand for the rest."""
    return jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype) if getattr(x, "where", "") == "in files" else x, state
    )


def run(folder: pathlib.Path, way: str, num_devices: int, cases: int, seed: int) -> dict[str, int]:
    """So many cases of one way to have state in files; how many were refused, and resumed."""
    mesh = small.mesh(data=num_devices)
    folder = folder / f"{way}, {num_devices}"
    left, rng = Left(folder, mesh, way), random.Random(f"{seed} {way}")
    tally = collections.Counter[str]()
    for _ in range(cases):
        tally[left.case(rng)] += 1
        end_of_process()
    meet("ended")
    if jax.process_index() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return dict(tally)


@contextlib.contextmanager
def root() -> Iterator[pathlib.Path]:
    """A folder; the same in all processes, if there are several."""
    if shared := os.environ.get("NVME_DAMAGE_ROOT"):
        yield pathlib.Path(shared)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if "JAX_NUM_PROCESSES" in os.environ:
        jax.distributed.initialize(
            num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
            process_id=int(os.environ["JAX_PROCESS_ID"]),
        )
    with root() as folder:
        for way in WAYS:
            for num in args.devices:
                tally = run(folder, way, num, args.cases, args.seed)
                print(f"{way}, {num} devices of {jax.process_count()} processes: {tally}")


if __name__ == "__main__":
    main()
