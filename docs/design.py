"""Writes the printed blocks of design.md: its own step is run, and what the program prints is put in.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python docs/design.py
"""

import os
import pathlib
import re
import runpy
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import jzero

Names = dict[str, Any]
Block = Callable[[Names], str]
PAGE = pathlib.Path(__file__).parent / "design.md"
COLUMNS = 80
FENCED = re.compile(
    r"(<!-- design\.py: (?P<name>.*?) -->\n+```text\n).*?(^```$)", re.DOTALL | re.MULTILINE
)
OPENS = re.compile(r"^(?P<indent> *)(?P<eqn>.* = \w+)\[(?P<rest>.*)$")
COMMENT = re.compile(r" *# \S*?(\w+\.py:\d+)\S*(?: \([^#]*?\))?(, in [^#]*?\))?(?=,|$)")
COMMENTS_AT = 54  # the column


def page() -> str:
    """The page, with what its blocks print now."""
    text = PAGE.read_text()
    names = run(text)
    with mock.patch.dict(os.environ, COLUMNS=str(COLUMNS)):
        blocks = {name: block(names) for name, block in BLOCKS.items()}
    assert set(blocks) == {found["name"] for found in FENCED.finditer(text)}
    return FENCED.sub(lambda found: f"{found[1]}{blocks[found['name']]}\n{found[3]}", text)


def run(text: str) -> Names:
    """The names that the page's Python makes, as `step.py`."""
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "step.py"
        file.write_text(code)
        return runpy.run_path(str(file))


def program(
    after: str,
    keep: str,
    step: str = "train_step",
    begin: str = "",
    end: str = "^}",
    **options: Any,
) -> Block:
    """Of a step after a pass, from a line to another, those in which `keep` is found."""

    def block(names: Names) -> str:
        text = str(sharded(names, step, options).program(*given(names, step), after=after))
        lines = list(shortened(text.splitlines()))
        first = next(i for i, line in enumerate(lines) if re.search(begin, line))
        last = next(i for i, line in enumerate(lines) if re.search(end, line) and i > first)
        return "\n".join(excerpt(lines[first : last + 1], keep))

    return block


def described(names: Names) -> str:
    return str(sharded(names, "train_step", {}).describe(*given(names, "train_step")))


def schedule(**options: Any) -> Block:
    """The operations of the deep step."""

    def block(names: Names) -> str:
        step = sharded(names, "deep_step", options)
        text = str(step.describe(*given(names, "deep_step")).schedule)
        return re.sub(r" at \S*?(step\.py:\d+)\S* \(\S+\)", r" at \1", text)

    return block


def sharded(names: Names, step: str, options: Mapping[str, Any]) -> Any:
    return jzero.shard_train_step(names[step], **options)


def given(names: Names, step: str) -> tuple[Any, Any]:
    """The state and the batch of a step."""
    return names["deep_state" if step == "deep_step" else "state"], names["batch"]


def shortened(lines: Iterable[str]) -> Iterator[str]:
    """Without the parameters of equations, but for the programs in them; of a place the file and its line."""
    lines = list(lines)
    while lines:
        line = lines.pop(0)
        opens = OPENS.match(line)
        if opens is None or "]" in opens["rest"].split(" # ")[0]:
            yield placed(re.sub(r"( = \w+)\[[^#]*?\] ", r"\1 ", line))
            continue
        end = next(i for i, each in enumerate(lines) if each.startswith(f"{opens['indent']}] "))
        inside, last = lines[:end], lines[end].strip().removeprefix("]")
        del lines[: end + 1]
        yield placed(f"{opens['indent']}{opens['eqn']}{last}{opens['rest']}")
        programs = [i for i, each in enumerate(inside) if "jaxpr={" in each]
        if programs:
            yield from shortened(inside[programs[0] :])


def placed(line: str) -> str:
    """With its comment in a column, without what it says of a library, and with few scopes."""
    found = COMMENT.search(line)
    if found is None:
        return line.rstrip()
    scopes = re.sub(
        ", rematted_computation|, jzero.gather.*(?=, jzero.prefetch)", "", line[found.end() :]
    )
    return f"{line[: found.start()]:<{COMMENTS_AT}}  # {found[1]}{scopes}".rstrip()


def excerpt(lines: Iterable[str], keep: str) -> Iterator[str]:
    """`...` stands for lines that are left out."""
    skipped = False
    for line in lines:
        if not re.search(keep, line):
            skipped = True
            continue
        if skipped:
            yield f"{' ' * (len(line) - len(line.lstrip()))}..."
        yield line
        skipped = False


# Of a program: its title, the leaves that it takes, and its collectives.
TITLE, TAKES = "^#", r"^ +\w+:\S+ +# (state|batch)"
COLLECTIVES = "all_gather|reduce_scatter|psum|optimization_barrier"
BLOCKS: dict[str, Block] = {
    "trace": program("trace", f"{TITLE}|{TAKES}|dot_general|reduce_sum"),
    "describe": described,
    "partition": program(
        "partition",
        f"{TITLE}|{TAKES}|{COLLECTIVES}|dot_general|reduce_sum|bf16.*convert.* [ab] |= add (a|b) ",
    ),
    "order": program("order", f"{COLLECTIVES}|dot_general", begin="psum"),
    "prefetch": program(
        "prefetch",
        r"all_gather|scan|jaxpr=|\]\. let$|dynamic_slice|dot_general|length",
        "deep_step",
        begin="^{",
        end="last_iteration",
    ),
    "microbatches": program(
        "microbatches",
        "all_gather|reduce_scatter|psum|f32.* add .*jzero|scan .*jzero",
        "deep_step",
        microbatches=4,
    ),
    "host": schedule(memory="host"),
    "all on hosts": schedule(
        memory=jzero.Memory(params=jzero.PinnedHost(device_bytes=2**20), optimizer="host")
    ),
}

if __name__ == "__main__":
    PAGE.write_text(page())
