"""Every file of the package says its licence, the one that the project and its LICENSE name."""

import pathlib
import runpy
import shutil
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "licence"
LICENCE = runpy.run_path(str(SCRIPT))


def test_every_file_has_its_licence():
    assert LICENCE["without"](ROOT) == [], "run .ci/licence"


def test_the_header_is_the_licence():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert LICENCE["header"](ROOT) == "# SPDX-License-Identifier: Apache-2.0\n"
    lines = (ROOT / "LICENSE").read_text().split("\n")
    assert [line.strip() for line in lines if line.strip()][:2] == [
        "Apache License", "Version 2.0, January 2004",
    ]  # fmt: skip


@pytest.fixture
def planted(tmp_path):
    """A repository with a file that has no licence, one that has, and one without text."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    package = tmp_path / "jzero" / "room"
    package.mkdir(parents=True)
    (package / "without.py").write_text('"""A file."""\n')
    (package / "with.py").write_text('# SPDX-License-Identifier: Apache-2.0\n"""Another."""\n')
    (package / "__init__.py").touch()
    return package


def run(planted: pathlib.Path, *options: str) -> subprocess.CompletedProcess[str]:
    script = planted.parents[1] / ".ci" / "licence"
    return subprocess.run([sys.executable, script, *options], capture_output=True, text=True)


def test_the_check_can_fail_and_the_script_mends_it(planted):
    found = run(planted, "--check")
    assert found.returncode == 1
    assert "1 files have no licence, the first is" in found.stderr
    assert found.stderr.rstrip().endswith("without.py")
    with_licence = (planted / "with.py").read_text()
    assert run(planted).returncode == run(planted, "--check").returncode == 0
    assert (planted / "without.py").read_text() == (
        '# SPDX-License-Identifier: Apache-2.0\n"""A file."""\n'
    )
    assert (planted / "with.py").read_text() == with_licence
    assert (planted / "__init__.py").read_text() == ""
