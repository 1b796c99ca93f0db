# SPDX-License-Identifier: Apache-2.0
"""`WeightLayout`: which tensors of Hugging Face's files are which leaves of a tree, as a table of rules."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jzero._errors import OptionError, message
from jzero.weights import _moves

LAYER, PART = "i", "n"  # axes: of layers, and of the tensors (or leaves) of a rule
_NUMBER = re.compile(r"(?<![0-9A-Za-z])(0|[1-9][0-9]{0,8})(?![0-9A-Za-z])")
TensorShape = tuple[int, ...]
NameKey = tuple[int | None, int]  # a layer, or None for all or none; and which of the rule's names


class WeightRule(NamedTuple):
    """Some tensors, and the leaves that have the same values.

    Attributes:
      tensors: a name in the files, or several; `{i}` stands for the number of a layer.
      leaves: a path in the tree, or several. `[x/]` may be missing, of `a|b` one is there, and `x/{i}` is
        also `x_{i}`, or `x` with all layers in one leaf, its first dim or the axis `i`.
      axes: dims of a tensor and of a leaf as in einops: `(h k) d -> d h k`. Where `h` and `k` are together on
        both sides, a leaf may have one dim for both. `n` counts several tensors, or leaves; tensors without
        it are one after the other along their first dim. Empty for the same dims.
      optional: whether a model may be without.
      tied: the tensor that has the same values where files have none of these.
    """

    tensors: str | tuple[str, ...]
    leaves: str | tuple[str, ...]
    axes: str = ""
    optional: bool = False
    tied: str = ""

    def __str__(self) -> str:
        notes = [self.axes, "optional" * self.optional, self.tied and f"or as {self.tied}"]
        return f"{' + '.join(_each(self.tensors))} = {' + '.join(_each(self.leaves))}" + "".join(
            f"; {note}" for note in notes if note
        )

    @property
    def is_layer(self) -> bool:
        return "{i}" in _each(self.tensors)[0]

    def tensor_names(self, layers: int) -> list[str]:
        """Of all layers, in the order of their grid."""
        return [
            name.replace("{i}", str(i))
            for i in range(layers if self.is_layer else 1)
            for name in _each(self.tensors)
        ]

    @property
    def num_parts(self) -> int:
        """Its tensors of a layer, or its leaves."""
        return max(len(_each(self.tensors)), len(_each(self.leaves)))

    @property
    def is_unrolled(self) -> bool:
        """Whether each layer has a leaf of its own, if nothing else is known."""
        return "{i}" in _each(self.leaves)[0]

    def leaf_names(self, layers: int) -> list[str]:
        """As they are called if nothing else is known."""
        first = [next(_spellings(path)) for path in _each(self.leaves)]
        return [
            name.replace("{i}", str(i))
            for i in range(layers if self.is_unrolled else 1)
            for name in first
        ]


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """How Hugging Face's files of a family of models, and a tree of Flax, name and shape the same values.

    >>> import jzero
    >>> print(jzero.LAYOUTS["llama"].rules[0])
    model.embed_tokens.weight = [model/]embed_tokens/embedding

    Attributes:
      name: of it, for messages.
      rules: of several for the same tensors that counts of which the tree has the leaves, or else the first.
      base: what names in files may begin with, or not; an export writes it.
      ignored: tensors that are left out; in patterns `*` stands for any characters.
    """

    name: str
    rules: tuple[WeightRule, ...]
    base: str = ""
    ignored: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([self.name, *(f"  {rule}" for rule in self.rules)])

    def extended(self, *rules: WeightRule, **changes: object) -> WeightLayout:
        """The same with more rules, which come before its own; and with other attributes.

        With another base, the names of its own rules begin with that.
        """
        own = self
        if (base := changes.get("base", self.base)) != self.base:
            own = self._rebased(str(base))
        return dataclasses.replace(own, rules=(*rules, *own.rules), **changes)  # type: ignore[arg-type]

    def _rebased(self, base: str) -> WeightLayout:
        def renamed(name: str) -> str:
            return base + name.removeprefix(self.base) if name.startswith(self.base) else name

        def all_renamed(names: str | tuple[str, ...]) -> str | tuple[str, ...]:
            return renamed(names) if isinstance(names, str) else tuple(map(renamed, names))

        rules = tuple(
            rule._replace(tensors=all_renamed(rule.tensors), tied=rule.tied and renamed(rule.tied))
            for rule in self.rules
        )
        return dataclasses.replace(self, rules=rules, ignored=tuple(map(renamed, self.ignored)))

    def other_base(self, names: Iterable[str]) -> str | None:
        """What names begin with where most would be the layout's with its base in place of that."""
        wanted = tuple(
            "." + name.removeprefix(self.base)
            for rule in self.rules if rule.is_layer for name in _each(rule.tensors)
        )  # fmt: skip
        templates = {t for name in names for t, layer in _templates(name) if layer is not None}
        bases = Counter(
            template.removesuffix(end) + "."
            for template in sorted(templates) for end in dict.fromkeys(wanted) if template.endswith(end)
        )  # fmt: skip
        return bases.most_common(1)[0][0] if bases else None

    def check(self, who: str) -> None:
        """That every rule is one.

        Raises:
          OptionError: those that are none.
        """
        names = {rule.tensors for rule in self.rules if isinstance(rule, WeightRule)}
        bad = [
            f"{rule!r:.200}: it is no WeightRule of texts" for rule in self.rules if not _is_rule(rule)
        ] or [
            f"{rule}: {found}" for rule in self.rules if (found := _problem(rule))
        ] or [
            f"{rule}: no rule is for {rule.tied} alone" for rule in self.rules
            if rule.tied and rule.tied not in names
        ]  # fmt: skip
        if bad:
            raise OptionError(message(
                who, [f"layout {self.name}: {found}" for found in bad],
                "A rule has a tensor for a leaf, several for one, or one for several.",
                "Correct the rule.", "rules", shown=20))  # fmt: skip

    def match_tensors(self, names: Collection[str]) -> tuple[list[dict[NameKey, str]], list[str]]:
        """For each rule, the tensors that it names; and those that no rule names."""
        prefix = "" if any(name.startswith(self.base) for name in names) else self.base
        index: dict[str, list[tuple[int, int]]] = {}
        for number, rule in enumerate(self.rules):
            for part, name in enumerate(_each(rule.tensors)):
                index.setdefault(name, []).append((number, part))
        found: list[dict[NameKey, str]] = [{} for _ in self.rules]
        left = []
        for name in names:
            hits = [
                (hit, layer)
                for full in dict.fromkeys((name, prefix + name))
                for template, layer in _templates(full)
                for hit in index.get(template, ())
            ]
            for (number, part), layer in hits:
                found[number][layer, part] = name
            if not hits and not (self._ignores(name) or self._ignores(prefix + name)):
                left.append(name)
        return found, left

    def _ignores(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(t, x) for t, _ in _templates(name) for x in self.ignored)

    def match_leaves(self, names: Collection[str]) -> tuple[list[dict[NameKey, str]], list[str]]:
        """For each rule, the leaves that it names, all in one tree; and those that no rule names."""
        end = "/value" if all(name.endswith("/value") for name in names) else ""  # NNX's Variables
        folders = [name.rpartition("/")[0] for name in names]
        common = os.path.commonpath(folders).split("/") if all(folders) else []
        roots = ["".join(f"{x}/" for x in common[:i]) for i in range(len(common) + 1)]
        index: dict[str, tuple[int, int]] = {}
        for number, rule in enumerate(self.rules):
            for part, path in enumerate(_each(rule.leaves)):
                for template in _spellings(path):
                    index.setdefault(template, (number, part))
        tried = [_match(names, root, end, index, len(self.rules)) for root in roots]
        return min(tried, key=lambda each: len(each[1]))


def _match(
    names: Collection[str], root: str, end: str, index: Mapping[str, tuple[int, int]], num: int
) -> tuple[list[dict[NameKey, str]], list[str]]:
    found: list[dict[NameKey, str]] = [{} for _ in range(num)]
    left = []
    for name in names:
        hits = [
            (index[template], layer)
            for template, layer in _templates(name.removeprefix(root).removesuffix(end))
            if template in index
        ]
        for (number, part), layer in hits[:1]:
            found[number][layer, part] = name
        if not hits:
            left.append(name)
    return found, left


def _templates(name: str) -> Iterator[tuple[str, int | None]]:
    """A name, and the same with `{i}` for a number in it."""
    yield name, None
    for number in _NUMBER.finditer(name):
        yield f"{name[: number.start()]}{{i}}{name[number.end() :]}", int(number[0])


def _spellings(path: str) -> Iterator[str]:
    """All that a path of a rule may be in a tree, the default first."""
    parts = [
        ["", x[1:-1]] if x[0] == "[" else x.split("|")
        for x in re.findall(r"\[[^]]*\]|[^/\[]+|/", path)
    ]
    for x in itertools.product(*parts):
        text = "".join(x)
        yield text
        if "/{i}" in text:
            yield text.replace("/{i}", "_{i}")
            yield text.replace("/{i}", "")


def _each(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _is_rule(rule: object) -> bool:
    return isinstance(rule, WeightRule) and all(
        isinstance(x, str)
        for names in (rule.tensors, rule.leaves, rule.axes, rule.tied)
        for x in (names if isinstance(names, tuple) else [names])
    )


def _problem(rule: WeightRule) -> str | None:
    tensors, leaves = _each(rule.tensors), _each(rule.leaves)
    if not tensors or not leaves or not all([*tensors, *leaves]):
        return "it has no tensor, or no leaf"
    if len(tensors) > 1 and len(leaves) > 1:
        return "it has several tensors and several leaves"
    if len({"{i}" in x for x in tensors}) > 1 or len({"{i}" in x for x in leaves}) > 1:
        return "some of its names have {i}, and others not"
    if "{i}" in leaves[0] and not rule.is_layer:
        return "its leaf has {i}, and its tensor has not"
    if any(x.count("{i}") > 1 for x in (*tensors, *leaves)):
        return "a name has {i} twice"
    if not rule.axes:
        several = len(tensors) + len(leaves) > 2
        return "several need axes that say where each is" if several else None
    try:
        left, right = _moves.parse(rule.axes)
    except ValueError as error:
        return str(error)
    if any(LAYER in group for group in (left if rule.is_layer else (*left, *right))):
        return f"{LAYER} is the axis of layers, in one leaf for all: call this one otherwise"
    sides = [{*_moves.Side((), dims).axes} - {LAYER} for dims in (left, right)]
    if len(tensors) > 1:
        sides = [sides[0], sides[1] - {PART}]
        return f"{PART} is an axis of its tensors" if PART in sides[0] else _unequal(*sides)
    if len(leaves) > 1:
        if PART not in sides[0] or PART in sides[1]:
            return f"{PART} is an axis of its tensor, and counts its leaves"
        sides = [sides[0] - {PART}, sides[1]]
    return _unequal(*sides)


def _unequal(left: set[str], right: set[str]) -> str | None:
    return None if left == right else f"{' '.join(sorted(left ^ right))} is on one side only"
