"""What a log of operations says of a power cut: what was on the disk when, as far as it was made sure of.

Without syncs a file system may write data and names in any order, or never.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from ._library import WRITES, Operation


@dataclasses.dataclass
class _Node:
    """A file or a directory.

    Attributes:
      data: the last change of a file that was not synced since.
      names: the same of each entry of a directory.
      children: the entries that are known.
    """

    data: Operation | None = None
    names: dict[str, Operation] = dataclasses.field(default_factory=dict)
    children: dict[str, _Node] = dataclasses.field(default_factory=dict)

    def sync(self, operation: Operation) -> None:
        """Forgets what had ended when the sync began."""
        if self.data is not None and self.data.end < operation.begin:
            self.data = None
        late = {name: op for name, op in self.names.items() if op.end > operation.begin}
        self.names = late

    def unsynced(self, path: str) -> Iterator[str]:
        """What at and below it is not on the disk."""
        if self.data is not None:
            yield f"{path}: {self.data.name}"
        for name, child in self.children.items():
            yield from self.unsynced_name(path, name)
            yield from child.unsynced(f"{path}/{name}")

    def unsynced_name(self, path: str, name: str) -> Iterator[str]:
        if name in self.names:
            yield f"the name {name} in {path or 'the root'}: {self.names[name].name}"


class Disk:
    """Follows a log, and knows what has not been synced."""

    def __init__(self) -> None:
        self._root = _Node()

    @classmethod
    def after(cls, log: Iterable[Operation]) -> Disk:
        disk = cls()
        for operation in log:
            disk._follow(operation)
        return disk

    @classmethod
    def before(cls, log: Sequence[Operation], last: Operation) -> Disk:
        """As it is when the operation begins."""
        return cls.after(log[: log.index(last)])

    def unsynced(self, path: str, with_name: bool = False) -> list[str]:
        """What at and below the path is not on the disk; `with_name`, also that it is there."""
        folder, _, name = path.rpartition("/")
        own = self._node(folder).unsynced_name(folder, name) if with_name else ()
        return [*own, *self._node(path).unsynced(path)]

    def _follow(self, operation: Operation) -> None:
        name, path = operation.name, operation.path
        if operation.result < 0:
            return
        if name in ("mkdir", "symlink") or (name == "create" and not self._has(path)):
            self._enter(path, _Node(), operation)
        elif name in (*WRITES, "ftruncate", "ftruncate64", "truncate"):
            self._node(path).data = operation
        elif name in ("fsync", "fdatasync"):
            self._node(path).sync(operation)
        elif name in ("unlink", "rmdir"):
            self._leave(path, operation)
        elif name == "rename":
            self._enter(operation.other, self._leave(path, operation), operation)
        elif name == "link":
            self._enter(operation.other, self._node(path), operation)

    def _has(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return name in self._node(folder).children

    def _node(self, path: str) -> _Node:
        node = self._root
        for name in filter(None, path.split("/")):
            node = node.children.setdefault(name, _Node())
        return node

    def _enter(self, path: str, node: _Node, operation: Operation) -> None:
        folder, _, name = path.rpartition("/")
        parent = self._node(folder)
        parent.children[name], parent.names[name] = node, operation

    def _leave(self, path: str, operation: Operation) -> _Node:
        folder, _, name = path.rpartition("/")
        parent = self._node(folder)
        parent.names[name] = operation
        return parent.children.pop(name, _Node())


def unsynced_when_renamed(log: Sequence[Operation], target: str) -> list[str]:
    """What was not on the disk when something got the name `target`, with all that is below it."""
    renames = [op for op in log if (op.name, op.other, op.result) == ("rename", target, 0)]
    if not renames:
        return [f"nothing was renamed to {target}"]
    return Disk.before(log, renames[-1]).unsynced(renames[-1].path)
