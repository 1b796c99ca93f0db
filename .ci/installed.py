"""What `.ci/wheel` asks of an installed jzero: is it whole, is it the one, does the README's example train?

python -I installed.py README.md FOLDER_OF_WHEEL_AND_SDIST
"""

import importlib.metadata
import io
import pathlib
import re
import sys
import sysconfig
import tarfile
from contextlib import redirect_stdout

import jzero


def main(readme: pathlib.Path, dist: pathlib.Path) -> None:
    package = pathlib.Path(jzero.__file__).parent
    assert package.parent == pathlib.Path(sysconfig.get_paths()["purelib"]), package
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    assert wheel.name.split("-")[1] == jzero.__version__ == importlib.metadata.version("jzero")
    checkout = readme.parent / "jzero"
    assert files(package) == files(checkout), files(package) ^ files(checkout)
    assert "py.typed" in files(package)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "tests/conftest.py",
        "examples/linen_gpt.py",
    ):
        assert name in names, f"the sdist lacks {name}"

    out, space = io.StringIO(), {}
    with redirect_stdout(out):
        for code in re.findall(
            r"^```python\n(.*?)^```", readme.read_text(), re.DOTALL | re.MULTILINE
        ):
            if code.startswith("import "):  # another program
                space = {"__name__": "__main__"}
            exec(code, space)
    losses = [float(loss) for loss in re.findall(r"^loss ([\d.]+)$", out.getvalue(), re.MULTILINE)]
    assert [loss < 1 for loss in losses] == [True, True], losses
    print(
        f"{wheel.name}: {len(files(package))} files; the README's programs train to losses of {losses}"
    )


def files(folder: pathlib.Path) -> set[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if "__pycache__" not in path.parts}


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
