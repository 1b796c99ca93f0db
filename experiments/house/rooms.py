"""Rooms of a checkout, by the rules of tests/test_layering.py: floors, arrows between rooms, circles."""

import functools
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from test_layering import files_of, imported_files, is_empty_init, room_of

Graph = dict[str, frozenset[str]]  # room: the other rooms that it imports from


def numbers(checkout: Path) -> dict[str, int]:
    rooms = graph_of(checkout / "jzero")
    reached = {room: reachable(rooms, room) for room in rooms}
    circles = {
        frozenset(other for other in reached[room] if room in reached[other])
        for room in rooms
        if room in reached[room]
    }

    @functools.cache
    def floor(room: str) -> int:
        """The least; rooms of a circle share one."""
        beside = {room, *(other for other in reached[room] if room in reached[other])}
        below = {other for one in beside for other in rooms[one]} - beside
        return 1 + max(map(floor, below), default=0)

    return {
        "rooms": len(rooms),
        "floors": max(map(floor, rooms)),
        "arrows between rooms": sum(map(len, rooms.values())),
        "circles of rooms": len(circles),
        "rooms in circles": sum(map(len, circles)),
        "arrows upward": sum(upward(rooms, circle) for circle in circles),
    }


def graph_of(package: Path) -> Graph:
    files = files_of(package)
    found: dict[str, set[str]] = {}
    for file, source in files.items():
        if not is_empty_init(file, source):
            found.setdefault(room_of(file), set()).update(map(room_of, imported_files(file, files)))
    return {room: frozenset(others - {room}) for room, others in found.items()}


def reachable(rooms: Graph, start: str) -> set[str]:
    """What a room imports from, directly or not; itself only in a circle."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = rooms[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def upward(rooms: Graph, circle: frozenset[str]) -> int:
    """The fewest arrows of a circle that point upward, in whatever order its rooms are stacked."""

    @functools.cache
    def fewest(below: frozenset[str]) -> int:
        # One of these rooms is the topmost: what imports it from below points upward.
        return min(
            (fewest(below - {top}) + sum(top in rooms[r] for r in below - {top}) for top in below),
            default=0,
        )

    return fewest(circle)
