"""What was found, as a page of Markdown."""

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from driver import FINAL, Result
from machine import PACKAGES

Found = dict[str, Result]
GB = 1e9


def text(groups: dict[tuple[str, str], Found], pending: Sequence[str], unreadable: int = 0) -> str:
    """Of each device and release of JAX that has results; `pending` is what was not measured yet."""
    parts = [f"# {device}, JAX {jax}\n\n{_of(found)}" for (device, jax), found in groups.items()]
    if pending:
        parts.append(f"## Not measured yet\n\n{'; '.join(pending)}\n")
    if unreadable:
        parts.append(f"{unreadable} lines of figures.jsonl are no results, and were left out.\n")
    return "\n".join(parts)


def brief(name: str, result: Result) -> str:
    """One line."""
    told = str(result.get("told", ""))
    for run in result.get("runs", [])[-1:]:
        told = (
            f"{1000 * run['step_seconds']:.0f} ms a step, {run['tokens_per_second']:,.0f} tokens/s, "
            f"{run['tflops']:.1f} TFLOP/s, peak {_gb(run['peak_bytes_in_use'])} GB, "
            f"third loss {run['third_loss']:.4f}"
        )
    if result["status"] not in FINAL and not told:
        told = " ".join(str(result.get("error", "")).split())[-300:]
    if "ended" in result:
        told += f" (then {result['ended']})"
    return f"{result['status']:<8} {name}, {result.get('seconds', 0):.0f} s  {told}"


def _of(found: Found) -> str:
    sections = {
        "": _machine, "Checks": _checks, "Speed and memory": _runs, "Link and disk": _links,
        "Largest models": _largest, "Peaks by preflight": _peaks, "Decoding": _decoding, "Tests": _tests,
        "Cut or failed": _failures,
    }  # fmt: skip
    told = {f"## {name}\n\n" * bool(name): _section(x, found) for name, x in sections.items()}
    return "\n".join(head + part for head, part in told.items() if part)


def _section(section: Callable[[Found], str], found: Found) -> str:
    """Of the results that it can be made of: another version may have written some."""

    def made(of: Found) -> str | None:
        with contextlib.suppress(Exception):
            return section(of)
        return None

    good = {name: x for name, x in found.items() if made({name: x}) is not None}
    bad = "; ".join(name for name in found if name not in good)
    return (made(good) or "") + f"\nNot shown, since they have another form: {bad}.\n" * bool(bad)


def _machine(found: Found) -> str:
    """It and its software, and how XLA compiled."""
    told, flags = "", collections.defaultdict(list)
    for name, result in found.items():
        if "flags" in result:
            flags[result["flags"]].append(name)
    (most, _), *others = sorted(flags.items(), key=lambda way: -len(way[1])) or [("", [])]
    ways = [f"`{most}`", *(f"`{way or 'none'}` for {'; '.join(names)}" for way, names in others)]
    if (m := found.get("machine")) is not None:
        names = [name for name in ("python", *PACKAGES) if name in m]
        versions = ", ".join(f"{name} {m[name] or 'MISSING'}" for name in names)
        told = (
            f"{m['at']}, {m['driver'] or m['kind']}, {m['processors']} x {m['processor']}, "
            f"{m['host_bytes'] / 2**30:.0f} GiB of host memory, "
            f"{m['host_available'] / 2**30:.0f} available, {_gb(m['disk_available'])} GB of disk; "
            f"{versions}; jzero's files {m['jzero files'] or 'of a copy without history'}.\n"
        )
    return told + f"\nXLA_FLAGS: {', but '.join(ways)}.\n" * bool(flags)


def _table(head: str, rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    lines = [head, "| --- |" + " ---: |" * (head.count("|") - 2)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]) + "\n"


def _gb(nbytes: float | None) -> str:
    return "?" if nbytes is None else f"{nbytes / GB:.2f}"


def _share(part: float, whole: float | None) -> str:
    return "?" if not whole else f"{part / whole:.0%}"


def _checks(found: Found) -> str:
    checks = {name: x for name, x in found.items() if name.startswith("check ")}
    told = {name: str(x.get("told", "")).replace("|", "/") for name, x in checks.items()}
    rows = [(name[6:], x["status"], told[name]) for name, x in checks.items()]
    return _table("| check | | |", rows).replace("---:", "---")


def _each(found: Found, runs: str = "runs") -> Iterator[tuple[str, Result, Result]]:
    """Name, result and run, of each number of sequences."""
    for name, result in found.items():
        for run in result.get(runs, []):
            yield name, result, run


def _runs(found: Found) -> str:
    rows = []
    for name, result, run in _each(found):
        peak, params, mfu = run["peak_bytes_in_use"], result["parameters"], run["mfu"]
        rows.append((
            name, f"{params / 1e9:.3g}B", run["rows"], f"{run['tokens_per_second']:,.0f}",
            f"{run['tflops']:.1f}", "?" if mfu is None else f"{mfu:.1%}", f"{1000 * run['step_seconds']:.0f}",
            _gb(peak), "?" if peak is None else f"{peak / params:.2f}", _gb(run["host_peak_bytes"]),
            f"{run['first_step_seconds']:.0f}", f"{run['third_loss']:.4f}",
        ))  # fmt: skip
    return _table(
        "| run | parameters | rows | tokens/s | TFLOP/s | MFU | step, ms | peak GB | bytes per parameter "
        "| host GB | first step, s | third loss |", rows,
    )  # fmt: skip


def _links(found: Found) -> str:
    """Bytes that cross in a step over its time, and over what link and disk can do."""
    rates = found.get("links", {}) | found.get("disk", {})
    known = [(name, rate) for name, rate in rates.items() if isinstance(rate, float) and rate > 1e6]
    text = "GB/s: " + ", ".join(f"{name} {rate / GB:.1f}" for name, rate in known) + "\n"
    rate_of = ("to_device", "to_host", "disk_read", "disk_write")
    ways = dict(zip(("to device", "to host", "from disk", "to disk"), rate_of, strict=True))
    rows = []
    for name, _, run in _each(found):
        crossed, seconds = run.get("transfer_bytes", {}), run["step_seconds"]
        if any(crossed.values()):
            cells = [name, run["rows"], f"{1000 * seconds:.0f}"]
            for way, rate in ways.items():
                moved = crossed[way]
                share = _share(moved / seconds, rates.get(rate))
                cells += [_gb(moved), share] if moved else ["-", "-"]
            rows.append(cells)
    head = "".join(f" GB {way} | share |" for way in ways)
    table = _table(f"| run | rows | step, ms |{head}", rows)
    return f"{text}\n{table}" if known or table else ""


def _largest(found: Found) -> str:
    lines = []
    searches = sorted({tuple(x.split()[1:4]) for x in found if x.startswith("largest ")})
    for gib, _, policy in searches:
        prefix = f"largest {gib} GiB {policy} "
        tried = {name: x for name, x in found.items() if name.startswith(prefix)}
        most = max((x["parameters"] for x in tried.values() if x["status"] == "ok"), default=0)
        told = ", ".join(f"{name.split()[-2]} layers {x['status']}" for name, x in tried.items())
        lines.append(f"* within {gib} GiB of the device, {policy}: {most / 1e9:.2f}B ({told})")
    return "\n".join(lines) + "\n" if lines else ""


def _peaks(found: Found) -> str:
    rows = []
    for name, result in found.items():
        if name.startswith("preflight ") and "preflight_peak_bytes" in result:
            speed = found.get(name.replace("preflight", "speed"), {})
            runs = [run for run in speed.get("runs", []) if run["rows"] == result["rows"][0]]
            measured = runs[0]["peak_bytes_in_use"] if runs else None
            peak = result["preflight_peak_bytes"]
            rows.append((name[10:], _gb(measured), _gb(peak), _share(peak, measured)))
    head = "| run | measured GB, making the state included | preflight GB | of measured |"
    return _table(head, rows)


def _decoding(found: Found) -> str:
    """Beside the ceiling: rows, times the link's bytes per second, over bytes that a turn fetches."""
    rate, rows = found.get("links", {}).get("to_device"), []
    for name, result, run in _each(found, "decodes"):
        speed = run["tokens_per_second"]
        turn = run.get("transfer_bytes", {}).get("to device", 0) / run["turns"]
        ceiling = run["rows"] * rate / turn if turn and rate else None
        rows.append((
            name, f"{result['parameters'] / 1e9:.3g}B", run["rows"], f"{speed:,.0f}", _gb(turn),
            f"{ceiling:,.0f}" if ceiling else "-", _share(speed, ceiling), _gb(run["peak_bytes_in_use"]),
        ))  # fmt: skip
    head = "| run | parameters | rows | tokens/s | GB per turn | ceiling | share | peak GB |"
    return _table(head, rows)


def _tests(found: Found) -> str:
    tests = {name: x["status"] for name, x in found.items() if name.startswith("tests/")}
    if not tests:
        return ""
    counts = {status: list(tests.values()).count(status) for status in sorted(set(tests.values()))}
    return ", ".join(f"{count} {status}" for status, count in counts.items()) + "\n"


def _failures(found: Found) -> str:
    lines = []
    for name, result in found.items():
        if "ended" in result:
            lines.append(f"* {name}: {result['status']}, then {result['ended']}")
        if result["status"] not in FINAL:
            told = result.get("told") or result.get("error") or ""
            error = " ".join(str(told).split())[-400:]
            lines.append(f"* {name}: {result['status']}. {error}".rstrip(". "))
    return "\n".join(lines) + "\n" if lines else ""
