"""Which of the planted faults (tests/planted) the tests find, each in a copy of the repository.

    python tests/run_planted.py                  # all of them, by the tests that run by default; hours
    python tests/run_planted.py 07 23 -- -m ""   # two of them; what follows -- is pytest's

A fault is found if a test fails. The exit status is the number of those that none finds. Who wrote them had
not seen the tests; a patch that no longer applies is written anew, or goes with the code that it was about.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
PATCHES = sorted((ROOT / "tests" / "planted").glob("*.patch"))


def main() -> int:
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("numbers", nargs="*", help="of patches; all by default")
    args = parser.parse_args(sys.argv[1:end])
    missed = 0
    for patch in PATCHES:
        if not args.numbers or patch.name[:2] in args.numbers:
            found = found_by(patch, sys.argv[end + 1 :])
            missed += not found
            print(f"{patch.stem}: {found or 'NOT FOUND'}", flush=True)
    return missed


def found_by(patch: pathlib.Path, arguments: list[str]) -> str:
    """The first test that fails with the fault; '' if none does."""
    with tempfile.TemporaryDirectory() as folder:
        run(["git", "clone", "-q", str(ROOT), folder])
        run(["git", "apply", str(patch)], cwd=folder)
        environment = os.environ | {"PYTHONPATH": folder}
        # Programs that the fault does not touch are compiled already.
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "worksteal"]
        done = subprocess.run(
            [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True
        )
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        return failed[1] if failed else ""


def run(command: list[str], **options: str) -> None:
    subprocess.run(command, check=True, **options)  # type: ignore[call-overload]


if __name__ == "__main__":
    sys.exit(main())
