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

from jzero import _json
from jzero._errors import OptionError, message
from jzero._json import shown
from jzero.weights._axes import Dims, axes_of, parse

LAYER, PART = "i", "n"  # axes that count layers, and the tensors (or leaves) of a rule
TensorShape = tuple[int, ...]
TensorKey = tuple[int | None, int]  # a layer, or None for all or none; which of the rule's names


class Matched(NamedTuple):
    """For each rule the names that match; names that no rule matches; and the number of layers."""

    found: list[dict[TensorKey, str]]
    left: list[str]
    num_layers: int  # numbered from 0


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
        names = f"{' + '.join(self.tensor_names)} = {' + '.join(self.leaf_names)}"
        return "; ".join([names, *filter(None, notes)])

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return (self.tensors,) if isinstance(self.tensors, str) else tuple(self.tensors)

    @property
    def leaf_names(self) -> tuple[str, ...]:
        return (self.leaves,) if isinstance(self.leaves, str) else tuple(self.leaves)

    @property
    def is_layer(self) -> bool:
        return "{i}" in self.tensor_names[0]

    def tensors_of(self, layer: int | None) -> list[str]:
        return [numbered(name, layer) for name in self.tensor_names]

    def leaves_of(self, layer: int | None, prefix: str) -> list[str]:
        """Their names by default."""
        return [
            "/".join(filter(None, [prefix, numbered(next(_spellings(path)), layer)]))
            for path in self.leaf_names
        ]

    def dims(self) -> tuple[Dims, Dims]:
        """The dims of its tensors, concatenated along the first dim if there are several; and of a leaf."""
        left, right = parse(self.axes)
        if len(self.tensor_names) > 1 and PART in axes_of(right) and left:
            left = ((PART, *left[0]), *left[1:])
        return left, right


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
        base = str(changes.get("base", self.base))

        def renamed(name: str) -> str:
            return base + name.removeprefix(self.base) if name.startswith(self.base) else name

        own = (
            rule._replace(
                tensors=renamed(rule.tensors) if isinstance(rule.tensors, str)
                else tuple(map(renamed, rule.tensors)),
                tied=rule.tied and renamed(rule.tied),
            )
            for rule in self.rules
        )  # fmt: skip
        changes = {"ignored": tuple(map(renamed, self.ignored)), **changes}
        return dataclasses.replace(self, rules=(*rules, *own), **changes)  # type: ignore[arg-type]

    def other_base(self, names: Iterable[str]) -> str | None:
        """The base with which most of these names would be the layout's."""
        ends = [
            "." + name.removeprefix(self.base)
            for rule in self.rules if rule.is_layer for name in rule.tensors_of(0)
        ]  # fmt: skip
        bases = Counter(x.removesuffix(end) + "." for x in names for end in ends if x.endswith(end))
        return bases.most_common(1)[0][0] if bases else None

    def check(self, who: str) -> None:
        """Refuses a layout with invalid rules or fields."""
        ignored = [*self.ignored] if isinstance(self.ignored, tuple) else self.ignored
        own = {"name": self.name, "base": self.base, "ignored": ignored}
        if odd := _json.check(own, {"name": str, "base": str, "ignored": [str]}):
            raise OptionError(message(
                who, [f"layout {shown(self.name)}: {x}" for x in odd],
                "A layout has a name and a base, and a tuple of patterns that are ignored.",
                "Write ignored=('vision_tower.*',), with its comma, and base='model.'.", "entries"
            ))  # fmt: skip
        texts = [rule for rule in self.rules if _has_texts(rule)]
        names = {rule.tensors for rule in texts}
        bad = [
            f"{rule!r:.200}: it is no WeightRule of texts"
            for rule in self.rules
            if rule not in texts
        ]
        bad += [f"{rule}: {found}" for rule in texts if (found := _problem(rule, names))]
        if bad:
            raise OptionError(message(
                who, [f"layout {self.name}: {found}" for found in bad],
                "A rule has a tensor for a leaf, several for one, or one for several.",
                "Correct the rule.", "rules"))  # fmt: skip

    def match_tensors(self, names: Collection[str]) -> Matched:
        base = "" if any(name.startswith(self.base) for name in names) else self.base
        called = {base + name: name for name in names} | {name: name for name in names}
        matched = _match([rule.tensor_names for rule in self.rules], called, names)
        left = [x for x in matched.left if not (self._ignores(x) or self._ignores(base + x))]
        return matched._replace(left=left)

    def match_leaves(self, names: Collection[str]) -> Matched:
        """Matches leaves of one tree, wherever it is in the state, each to the first rule that names it."""
        end = "/value" if all(name.endswith("/value") for name in names) else ""  # NNX's Variables
        folders = [name.rpartition("/")[0] for name in names]
        common = os.path.commonpath(folders).split("/") if folders and all(folders) else []
        roots = ["".join(f"{x}/" for x in common[:i]) for i in range(len(common) + 1)]
        given = [rule.leaf_names for rule in self.rules]
        called = [{x.removeprefix(root).removesuffix(end): x for x in names} for root in roots]
        return min(
            (_match(given, each, names, once=True) for each in called), key=lambda x: len(x.left)
        )

    def _ignores(self, name: str) -> bool:
        template = re.sub(r"\.\d+(?=\.)", ".{i}", name)
        return any(fnmatch.fnmatchcase(x, each) for x in (name, template) for each in self.ignored)


def numbered(name: str, layer: int | None) -> str:
    return name if layer is None else name.replace("{i}", str(layer))


def _match(
    given: Sequence[tuple[str, ...]], called: Mapping[str, str], names: Iterable[str], once: bool = False
) -> Matched:  # fmt: skip
    """`called` maps names that rules may use to actual ones; with `once` each matches one rule only."""
    spelled = [
        [(part, x) for part, path in enumerate(paths) for x in _spellings(path)] for paths in given
    ]
    layered = [x for each in spelled for _, x in each if "{i}" in x]
    num = next(
        i for i in itertools.count() if not any(numbered(x, i) in called for x in layered)
    )  # fmt: skip
    found, taken = [], set[str]()
    for each in spelled:
        hits: dict[TensorKey, str] = {}
        for part, spelling in each:
            for layer in range(num) if "{i}" in spelling else [None]:
                name = called.get(numbered(spelling, layer))
                if name is not None and not (once and name in taken):
                    hits.setdefault((layer, part), name)
        taken |= {*hits.values()}
        found.append(hits)
    return Matched(found, [name for name in names if name not in taken], num)


def _spellings(path: str) -> Iterator[str]:
    """All forms of a rule's path in a tree, the default first."""
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


def _has_texts(rule: object) -> bool:
    return isinstance(rule, WeightRule) and all(
        isinstance(x, str)
        for names in (rule.tensors, rule.leaves, rule.axes, rule.tied)
        for x in (names if isinstance(names, tuple) else [names])
    )


def _problem(rule: WeightRule, names: Collection[object]) -> str | None:
    tensors, leaves = rule.tensor_names, rule.leaf_names
    if not tensors or not leaves or not all([*tensors, *leaves]):
        return "it has no tensor, or no leaf"
    if len(tensors) > 1 and len(leaves) > 1:
        return "it has several tensors and several leaves"
    layers = [{x.count("{i}") for x in each} for each in (leaves, tensors)]
    if layers not in ([{0}, {0}], [{0}, {1}], [{1}, {1}]):
        return "its tensors have {i} once each, or none has it; and leaves only if tensors have it"
    if rule.tied and rule.tied not in names:
        return f"no rule is for {rule.tied} alone"
    if not rule.axes:
        several = len(tensors) + len(leaves) > 2
        return "several need axes that say where each is" if several else None
    try:
        left, right = map(axes_of, rule.dims())
    except ValueError as error:
        return str(error)
    if LAYER in (left if rule.is_layer else [*left, *right]):
        return f"{LAYER} is the axis of layers, in one leaf for all: call this one otherwise"
    if len(leaves) > 1:
        right = [*right, PART]  # It counts the leaves.
    if any(sides.count(PART) > 1 for sides in (left, right)):
        return f"{PART} is an axis of one side, and counts the several of the other"
    if odd := {*left} ^ {*right} - {LAYER}:
        return f"{' '.join(sorted(odd))} is on one side only"
    return None
