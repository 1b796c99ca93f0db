"""Runs measurements as processes of their own, within the time there is, and keeps what they find."""

import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
GIB = 2**30
# Of the device's memory, where nothing else is said.
FRACTION = 0.92


class Runner:
    """Runs processes within the time there is.

    Attributes:
      path: of the file with everything that was found.
      cap: bytes of device memory, for what is measured with few.
      tiny: whether models are toys.
      found: what was found, by name.
    """

    def __init__(self, path: Path, minutes: float, cap: float, cache: str, tiny: bool):
        self.path, self.cap, self.tiny = path, cap, tiny
        began = datetime.datetime.now().isoformat(timespec="seconds")
        self.found: dict[str, Any] = {"began": began}
        self._end = time.monotonic() + 60 * minutes
        self._env = environment(cache)
        if tiny:
            self._env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"  # It compiles twice as fast.
            # By default, what compiles in less than a second is not kept.
            self._env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def keep(self, name: str, value: Any) -> Any:
        """Puts a value into `found`, and all of it on disk."""
        self.found[name] = value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # In one step: whoever stops this process finds the whole of it, or of what was there before.
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps(self.found, indent=1) + "\n")
        beside.replace(self.path)
        return value

    def run(
        self, name: str, command: list[str], *, limit: float, least: float, keep_output: bool = False,
        **env: str,
    ) -> Any:  # fmt: skip
        """One process: its last line of JSON, with a status in any case.

        Args:
          name: under which the result is kept.
          command: Python's arguments.
          limit: seconds, if so many are left.
          least: seconds without which it is not begun, unless models are toys.
          keep_output: as 'output' of the result; else only the end of what a failure wrote.
          **env: variables of its environment.
        """
        if self.left < (1 if self.tiny else least):
            return self.keep(name, {"status": f"no time: {self.left:.0f} s left of {least:.0f}"})
        start = time.monotonic()
        code, out, err = call([sys.executable, *command], min(limit, self.left), self._env | env)
        seconds = round(time.monotonic() - start, 1)
        result = last_json(out)
        if code is None:
            result["status"] = f"stopped after {seconds:.0f} s"
        elif code != 0:
            killed = -code == signal.SIGKILL
            result["status"] = "killed: host memory?" if killed else f"failed, exit {code}"
        result = {"status": "ok"} | result | {"seconds": seconds}
        if result["status"] != "ok" and "error" not in result:
            result["error"] = (err or out)[-2000:]
        if keep_output:
            result["output"] = out + err
        print(f"{name}: {result['status']}, {seconds:.0f} s, {self.left:.0f} s left", flush=True)
        return self.keep(name, result)

    def decode(self, name: str, layers: int, dim: int, policy: str, *, batch: list[int]) -> Any:
        """One policy's decoding; see decode.py."""
        command = [str(HERE / "decode.py"), "--layers", str(layers), "--dim", str(dim)]
        command += ["--policy", policy, "--rows", *map(str, batch)]
        command += ["--vocab", "256", "--context", "4"] * self.tiny
        return self.run(
            name, command, limit=120, least=40, XLA_CLIENT_MEM_FRACTION=f"{FRACTION:.4f}"
        )

    def measure(
        self, name: str, layers: int, dim: int, policy: str, *, batch: list[int], limit: float = 110,
        least: float = 25, cap: float | None = None, seconds: float = 6, unrolled: bool = False,
    ) -> Any:  # fmt: skip
        """One policy at one size; see worker.py."""
        command = [str(HERE / "worker.py"), "--layers", str(layers), "--dim", str(dim)]
        command += ["--policy", policy, "--seconds", str(0.3 if self.tiny else seconds)]
        command += ["--rows", *map(str, batch), *["--unrolled"] * unrolled]
        command += ["--vocab", "256", "--context", "64"] * self.tiny
        total = self.found["machine"].get("device_bytes")
        share = min(FRACTION, cap / total) if cap and total else FRACTION
        return self.run(
            name, command, limit=limit, least=least, XLA_CLIENT_MEM_FRACTION=f"{share:.4f}"
        )


def environment(cache: str) -> dict[str, str]:
    """Of every process: this checkout, one cache of compiled programs, as much pinned memory as there is."""
    env = dict(os.environ)
    # JAX refuses to have both names.
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"):
        env.pop(name, None)
    platforms = env.get("JAX_PLATFORMS")
    if platforms and "cpu" not in platforms:
        env["JAX_PLATFORMS"] = f"{platforms},cpu"  # for what XLA computes on the host
    host = machine.host()["host_bytes"] or 64 * GIB
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    env |= {
        "JAX_COMPILATION_CACHE_DIR": cache,
        # 64 by default (XLA's GPU client, GetGpuHostAllocator); the machine may grow beyond what it has now.
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": str(max(120, round(0.95 * host / GIB))),
        "PYTHONUNBUFFERED": "1",
    }
    return env


def call(command: list[str], limit: float, env: dict[str, str]) -> tuple[int | None, str, str]:
    """Exit code, None if the limit ended it with all that it had started; and what it wrote."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, stdout=out, stderr=err, env=env, cwd=ROOT, start_new_session=True
        )
        try:
            code: int | None = process.wait(max(1.0, limit))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # It, if it still runs, and what it leaves: memory of the GPU among it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return code, texts[0], texts[1]


def last_json(text: str) -> dict[str, Any]:
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                return json.loads(line)
    return {}
