"""What every result is recorded with, and how it is written. Imports no JAX until it is asked for devices."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def versions(*packages: str) -> dict[str, str | None]:
    """The date, and versions of Python and of packages; None for one that is not installed."""
    today = datetime.date.today().isoformat()
    python = platform.python_version()
    return {"date": today, "python": python, **{name: version(name) for name in packages}}


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The model of this machine's processors."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def environment(*packages: str, num_devices: int | None = None) -> dict[str, Any]:
    """The date, versions, processors and JAX's devices, or how many of them were used."""
    import jax

    return {
        **versions(*packages),
        "cpu": f"{os.cpu_count()} x {processor()}",
        "devices": f"{num_devices or jax.device_count()} x {jax.devices()[0].device_kind}",
    }


def library(root: Path | None = None) -> str:
    """The hash that git gives the files of jzero, with a mark if they are not all committed.

    Of the jzero that is imported, or of the one in a checkout.
    """
    if root is None:
        import jzero

        root = Path(jzero.__file__).parents[1]
    changed = git("status", "--porcelain", "jzero", root=root)
    return git("rev-parse", "--short", "HEAD:jzero", root=root) + "+" * bool(changed)


def git(*args: str, root: Path = ROOT) -> str:
    done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def percent(share: float | None) -> str:
    """A cell of a table; a dash for what was not measured, or not in that way."""
    return "-" if share is None else f"{100 * share:.0f} %"


def write(path: Path, result: Any) -> None:
    """Writes one result, and the folder that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def latest(folder: Path, name: str) -> Any:
    """The last result that was written as `<date>-<name>.json`."""
    return json.loads(max(folder.glob(f"*-{name}.json")).read_text())


def append(path: Path, line: Any) -> None:
    """Adds one of many results: a line of a `.jsonl`; on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The results of a `.jsonl`, but for a last line that is cut off; none if it is not there yet."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
