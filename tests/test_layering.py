"""Imports within jzero go down only, and one file alone knows JAX's internals."""

import ast
import pathlib
from collections.abc import Iterator

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "jzero"

# From the bottom up. A file imports from the layers below its own.
LAYERS = (
    ("_errors", "_in_turn", "_memories", "_padded", "_presets", "_quantities"),
    (
        "_jaxpr",
        "_call_log",
        "_unlike",
        "batch/_rows",
        "sharding/_layout",
        "sharding/_min_cut",
        "offload/_policy",
        "offload/_pinned",
        "_targets",
        "_host_memory",
        "checkpoint/_chunks",
        "checkpoint/_files",
        "checkpoint/_json",
        "checkpoint/_match",
        "checkpoint/_orbax",
        "offload/_writer",
        "offload/_machine",
        "offload/_loops",
        "offload/_memory",
    ),
    (
        "sharding/_collectives",
        "sharding/_queue",
        "sharding/_rules",
        "sharding/_traffic",
        "_call",
        "_rewrite",
        "_local",
        "_precision",
        "_schedule",
        "_forks",
        "_watch",
        "_host_array",
        "checkpoint/_iterators",
        "checkpoint/_lock",
        "checkpoint/_private",
        "checkpoint/_safetensors",
        "checkpoint/_seal",
        "checkpoint/_together",
        "offload/_ops",
    ),
    ("checkpoint/_ocdbt", "checkpoint/_reading", "batch/_writer"),
    ("checkpoint/_fragments",),
    ("checkpoint/_writing",),
    (
        "_differences",
        "_processes",
        "batch/_body",
        "batch/_factors",
        "sharding/_values",
        "sharding/_frames",
        "sharding/_pipeline",
        "checkpoint/_handlers",
        "checkpoint/_savable",
        "checkpoint/_steps",
        "offload/_roads",
    ),
    (
        "sharding/_links",
        "sharding/_needs",
        "sharding/_kinds",
        "sharding/_products",
        "sharding/_crossing",
        "_whole",
        "_tables",
        "batch/_cheapest",
        "batch/_cudnn",
        "batch/_pallas",
        "_compare",
        "_batch",
        "checkpoint/_saver",
        "checkpoint/_stored",
        "offload/_kernel",
    ),
    ("batch/_equations",),
    (
        "sharding/_plan",
        "sharding/_interpret",
        "sharding/_kept",
        "sharding/_pieces",
        "batch/_along",
        "batch/_control",
        "batch/_effects",
        "batch/_opaque",
        "batch/_ranks",
        "batch/_sums",
        "_nnx",
        "checkpoint/_stream",
        "offload/_host_update",
    ),
    ("sharding/_cut", "sharding/_elementwise", "offload/_bandwidth", "batch/_lookups"),
    ("batch/_localize",),
    ("_trace",),
    (
        "sharding/_ordinary",
        "sharding/_control",
        "sharding/_microbatch",
        "_options",
        "_outputs",
        "_placing",
    ),
    ("_setting", "_formulas"),
    ("_run", "_report", "_tiers", "_local_step"),
    ("_parts",),
    ("_slices", "_host_part"),
    ("_offloaded", "_host_engine"),
    ("_hosted",),
    ("_program",),
    ("_identity",),
    ("_programs",),
    ("_step", "_estimate"),
    (
        "_preflight",
        "checkpoint/_restore",
        "checkpoint/_export",
        "checkpoint/_import",
        "checkpoint/_inspect",
    ),
    ("checkpoint/_checkpointer", "checkpoint/_commands"),
    ("__init__", "_plot", "testing"),
    ("_cli",),
    ("__main__",),
)
LEVEL = {file: level for level, files in enumerate(LAYERS) for file in files}
# (importer, imported) within one layer.
SAME_LAYER: frozenset[tuple[str, str]] = frozenset()
# Neither imports the other: what crosses between them is a function.
STRANGERS = ("sharding", "offload")
INTERNALS = ("jax._src", "jax.extend", "jax.interpreters")
MAY_USE_INTERNALS = "_jaxpr"
DEPENDENTS = ("tests", "experiments")
# What few users need is imported in one file alone.
FOR_ONE_FILE = {"rich": "_cli", "matplotlib": "_plot", "llvmlite": "offload/_machine"}


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


def file_of(name: str, files: dict[str, str]) -> str | None:
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
    """A subpackage's `__init__` that imports nothing has no layer."""
    return file.endswith("/__init__") and not list(imported_names(file, source))


def broken_rules(file: str, source: str, files: dict[str, str]) -> list[str]:
    """One sentence for each rule that a file breaks; `files` are all files of the package."""
    if is_empty_init(file, source):
        return []
    if file not in LEVEL:
        return [f"{file} is in no layer: add it to LAYERS"]
    names = sorted(set(imported_names(file, source)))
    imported = {target for name in names if (target := file_of(name, files))}
    imported = {t for t in imported if not is_empty_init(t, files.get(t, ""))}
    return [
        *(broken for target in sorted(imported) if (broken := broken_order(file, target))),
        *(
            f"{file} uses {name}: only {MAY_USE_INTERNALS} may"
            for name in names
            if file != MAY_USE_INTERNALS and any(is_within(name, module) for module in INTERNALS)
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
    if {file.split("/")[0], target.split("/")[0]} == set(STRANGERS):
        return f"{file} imports {target}: {' and '.join(STRANGERS)} never import each other"
    if target not in LEVEL:
        return f"{file} imports {target}, which is in no layer"
    if LEVEL[target] > LEVEL[file]:
        return f"{file} imports {target}, which is above it"
    if LEVEL[target] == LEVEL[file] and (file, target) not in SAME_LAYER:
        return f"{file} imports {target}, which is in its own layer"
    return None


FILES = files_of(PACKAGE)


@pytest.mark.parametrize("file", FILES)
def test_file_keeps_the_rules(file: str):
    assert broken_rules(file, FILES[file], FILES) == []


def test_layers_name_existing_files():
    assert set(LEVEL) <= set(FILES)


# The checks above can fail: each rule, broken by a planted import.
LISTED = dict.fromkeys(LEVEL, "")


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("_errors", "from jzero._step import shard_train_step", "_step, which is above it"),
        ("_errors", "def f():\n    import jzero._step", "_step, which is above it"),
        ("_errors", "if TYPE_CHECKING:\n    from jzero import _step", "_step, which is above it"),
        ("sharding/_layout", "from jzero.sharding import _plan", "_plan, which is above it"),
        ("sharding/_layout", "from . import _plan", "_plan, which is above it"),
        ("sharding/_layout", "from ._plan import Plan", "_plan, which is above it"),
        ("sharding/_layout", "from .. import _step", "_step, which is above it"),
        ("sharding/_layout", "from .._step import x", "_step, which is above it"),
        ("_step", "import jzero", "__init__, which is above it"),
        ("_step", "from jzero import grad", "__init__, which is above it"),
        ("_jaxpr", "from jzero.sharding._layout import FULL", "in its own layer"),
        ("_step", "from jax._src import core", "_step uses jax._src.core: only _jaxpr may"),
        ("_step", "import jax._src.core as core", "_step uses jax._src.core: only _jaxpr may"),
        ("_step", "from jax import extend", "_step uses jax.extend: only _jaxpr may"),
        ("_step", "from jax.interpreters import ad", "only _jaxpr may"),
        ("_step", "import jax\njax.interpreters.ad", "_step uses jax.interpreters"),
        ("_step", "import tests.zoo", "tests.zoo, which depends on jzero"),
        ("_step", "from experiments import x", "experiments.x, which depends on jzero"),
        ("_step", "def f():\n    import matplotlib.figure", "only _plot may"),
        ("_report", "from rich.table import Table", "only _cli may"),
        ("sharding/_new", "import math", "sharding/_new is in no layer"),
        ("sharding/__init__", "import math", "sharding/__init__ is in no layer"),
        ("_step", "from jzero.sharding import _new", "_new, which is in no layer"),
        ("sharding/_plan", "from jzero.offload import _nvme", "never import each other"),
        ("sharding/_plan", "from ..offload._nvme import x", "never import each other"),
    ],
)
def test_planted_import_is_found(file: str, source: str, expected: str):
    files = {
        **FILES,
        "sharding/_new": "",
        "offload/__init__": "",
        "offload/_nvme": "",
        file: source,
    }
    assert any(expected in broken for broken in broken_rules(file, source, files))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "_step",
            "import jax\nfrom jzero._errors import message\nfrom jzero.sharding import _plan",
        ),
        ("_step", "from jzero.sharding._plan import Plan"),
        ("_jaxpr", "from jax._src import core\nfrom jax.interpreters import ad"),
        ("sharding/_plan", "from . import _layout\nfrom .. import _errors"),
        ("sharding/__init__", '"""What it holds."""'),
    ],
)
def test_allowed_import_passes(file: str, source: str):
    assert broken_rules(file, source, {**LISTED, file: source}) == []
