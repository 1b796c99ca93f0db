"""Rooms: the packages of jzero import downward only, and one file alone imports JAX's internals."""

import ast
import graphlib
import pathlib
from collections.abc import Iterator, Mapping

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "jzero"

# From the bottom up. A room is a package's own files, or a file of jzero itself, and imports from rooms on
# floors below its own. Within a room files import each other in any order but a circle.
FLOORS = (
    ("_components", "_errors", "_folded", "_in_turn", "_memory_kinds", "_thread_group", "_version"),
    ("_given_fields", "_json", "_quantities", "_tested", "targets"),
    ("_blocks", "_policy"),
    ("_numbers", "_option_groups", "tracing", "offload/nvme", "offload/schedule"),
    ("_groups", "ir"),
    ("_moved_options",),
    ("_unknown_options",),
    ("processes", "sharding/analysis", "_compare"),
    ("sharding/cut", "sharding/passes"),
    ("sharding/partition",),
    ("sharding/plan",),
    ("offload/memory", "offload/execute"),
    ("segments", "offload/kernels"),
    ("offload",),
    ("_options_of",),
    ("_in_use", "_placement", "reports", "_step_types"),
    ("_sharded_step",),
    ("_shard_train_step", "_shard_eval_step", "preflight", "checkpoint"),
    ("testing", "deepspeed", "weights"),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
INTERNALS = ("jax._src", "jax.extend", "jax.interpreters")
MAY_USE_INTERNALS = "tracing/_internals"  # and its own room alone imports that
DEPENDENTS = ("tests", "experiments", "examples")
# What few users need is imported in one file alone.
FOR_ONE_FILE = {"matplotlib": "cli/_plot", "llvmlite": "offload/kernels/_machine"}


def files_of(package: pathlib.Path) -> dict[str, str]:
    """`{"sharding/_plan": its source}`: every file of the package, without its suffix."""
    paths = sorted(package.rglob("*.py"))
    return {p.relative_to(package).with_suffix("").as_posix(): p.read_text() for p in paths}


def imported_names(file: str, source: str) -> Iterator[str]:
    """The dotted absolute names of what a file imports, wherever in it, and every `jax.x.y`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                # `from .. import x` starts from the folder `level - 1` above the file's own.
                folder = ["jzero", *file.split("/")[:-1]]
                base = [*folder[: len(folder) - level + 1], *([module] if module else [])]
                start = ".".join(base) if level else module
                yield from (f"{start}.{alias.name}" for alias in names)
            case ast.Attribute():
                yield from filter(None, [dotted(node)])


def dotted(node: ast.expr) -> str | None:
    """`jax.interpreters.ad` of an attribute chain that starts at the name `jax`, else None."""
    if isinstance(node, ast.Name):
        return "jax" if node.id == "jax" else None
    if isinstance(node, ast.Attribute) and (start := dotted(node.value)):
        return f"{start}.{node.attr}"
    return None


def file_of(name: str, files: Mapping[str, str]) -> str | None:
    """The file of jzero that an absolute dotted name lies in; None for a name outside jzero."""
    parts = name.split(".")
    if parts[0] != "jzero":
        return None
    # Longest first: `jzero.sharding._plan.Plan` is in sharding/_plan, `jzero.grad` in __init__.
    for end in range(len(parts), 1, -1):
        path = "/".join(parts[1:end])
        for candidate in (path, f"{path}/__init__"):
            if candidate in files:
                return candidate
    return "__init__"


def is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def is_empty_init(file: str, source: str) -> bool:
    """A subpackage's `__init__` that imports nothing is in no room."""
    return file.endswith("/__init__") and not list(imported_names(file, source))


def room_of(file: str) -> str:
    """`sharding/plan` of `sharding/plan/_stored_layout`; a file of jzero itself is a room of its own."""
    return file.rpartition("/")[0] or file


def imported_files(file: str, files: Mapping[str, str]) -> set[str]:
    """The files of jzero that a file imports, itself and empty packages left out."""
    names = set(imported_names(file, files[file]))
    targets = {target for name in names if (target := file_of(name, files))} - {file}
    return {target for target in targets if not is_empty_init(target, files.get(target, ""))}


def broken_rules(file: str, files: Mapping[str, str]) -> list[str]:
    """One sentence for each rule that a file breaks; `files` are all files of the package."""
    if is_empty_init(file, files[file]):
        return []
    if room_of(file) not in FLOOR:
        return [f"{file} is in no room: add {room_of(file)} to FLOORS"]
    names = sorted(set(imported_names(file, files[file])))
    return [
        *(
            broken
            for target in sorted(imported_files(file, files))
            if (broken := broken_order(file, target))
        ),
        *(
            f"{file} uses {name}: only {MAY_USE_INTERNALS} may"
            for name in names
            if file != MAY_USE_INTERNALS and any(is_within(name, module) for module in INTERNALS)
        ),
        *(
            f"{file} imports {target}: only tracing may"
            for target in sorted(imported_files(file, files))
            if target == MAY_USE_INTERNALS and room_of(file) != "tracing"
        ),
        *(
            f"{file} imports {name}, which depends on jzero"
            for name in names
            if name.split(".")[0] in DEPENDENTS
        ),
        *(
            f"{file} imports {name}: only {FOR_ONE_FILE[name.split('.')[0]]} may"
            for name in names
            if FOR_ONE_FILE.get(name.split(".")[0], file) != file
        ),
    ]


def broken_order(file: str, target: str) -> str | None:
    room, other = room_of(file), room_of(target)
    if other not in FLOOR:
        return f"{file} imports {target}, which is in no room"
    if room == other or FLOOR[other] < FLOOR[room]:
        return None
    where = "is above it" if FLOOR[other] > FLOOR[room] else "is on its own floor"
    return f"{file} imports {target}, which {where}"


def circle(files: Mapping[str, str]) -> list[str]:
    """Files that import each other in a circle; none if there is no such."""
    try:
        graphlib.TopologicalSorter({f: imported_files(f, files) for f in files}).prepare()
    except graphlib.CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


FILES = files_of(PACKAGE)


@pytest.mark.parametrize("file", FILES)
def test_file_keeps_the_rules(file: str):
    assert broken_rules(file, FILES) == []


@pytest.mark.slow
def test_no_files_import_each_other_in_a_circle():
    assert circle(FILES) == []


def test_floors_name_existing_rooms():
    assert set(FLOOR) <= set(map(room_of, FILES))


# The checks above can fail: each rule, broken by a planted import.
@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("_errors", "def f():\n    import jzero._sharded_step", "_sharded_step, which is above it"),
        ("tracing/_call", "from jzero.sharding.plan import _plan", "_plan, which is above it"),
        ("tracing/_call", "from ..sharding.plan._plan import Plan", "_plan, which is above it"),
        ("tracing/_call", "from .. import _sharded_step", "_sharded_step, which is above it"),
        ("_sharded_step", "import jzero", "__init__, which is above it"),
        ("_sharded_step", "from jzero import grad", "__init__, which is above it"),
        ("sharding/cut/_min_cut", "from ..passes._waits import x", "is on its own floor"),
        (
            "_sharded_step",
            "from jax._src import core",
            "jax._src.core: only tracing/_internals may",
        ),
        ("tracing/_jaxpr", "import jax._src.core", "jax._src.core: only tracing/_internals may"),
        ("_sharded_step", "from jzero.tracing._internals import xla", "only tracing may"),
        ("_sharded_step", "from jax import extend", "_sharded_step uses jax.extend: only"),
        ("_sharded_step", "import jax\njax.interpreters.ad", "_sharded_step uses jax.interpreters"),
        ("_sharded_step", "from experiments import x", "experiments.x, which depends on jzero"),
        ("_sharded_step", "def f():\n    import matplotlib.figure", "only cli/_plot may"),
        ("attic/_new", "import math", "attic/_new is in no room"),
        ("attic/__init__", "import math", "attic/__init__ is in no room"),
        ("_sharded_step", "from jzero.attic import _new", "_new, which is in no room"),
    ],
)
def test_planted_import_is_found(file: str, source: str, expected: str):
    files = {**FILES, "attic/_new": "", file: source}
    assert any(expected in broken for broken in broken_rules(file, files))


@pytest.mark.slow
def test_planted_circle_is_found():
    sources = "from ._rewrite import x", "from . import _call"
    files = dict(zip(("tracing/_call", "tracing/_rewrite"), sources, strict=True))
    assert set(circle(FILES | files)) == set(files)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("_sharded_step", "import jax\nfrom jzero.sharding.plan._plan import Plan"),
        ("tracing/_internals", "from jax._src import core\nfrom jax.interpreters import ad"),
        ("tracing/_jaxpr", "from jzero.tracing._internals import core"),
        ("sharding/plan/_plan", "from . import _layout\nfrom ... import _errors"),
        ("sharding/__init__", '"""What it holds."""'),
    ],
)
def test_allowed_import_passes(file: str, source: str):
    assert broken_rules(file, {**FILES, file: source}) == []
