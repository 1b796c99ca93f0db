"""What was found, as Markdown: `report.py results/<date>.json`."""

import json
import sys
from pathlib import Path
from typing import Any

GB = 1e9


def tables(found: dict[str, Any]) -> str:
    parts = [
        _machine(found), _runs(found), _delayed(found), _link(found), _decoding(found), _largest(found),
        _failures(found),
    ]  # fmt: skip
    return "\n".join(filter(None, parts))


def _machine(found: dict[str, Any]) -> str:
    m = found["machine"]
    versions = ", ".join(f"{name} {m[name]}" for name in ("python", "jax", "optax", "llvmlite"))
    rates = ", ".join(f"{k} {v / GB:.1f}" for k, v in m.get("bytes_per_second", {}).items())
    host = (m.get("host_bytes") or 0) / 2**30
    text = (
        f"{found['began']}, {m.get('nvidia_smi') or m['device']}, {versions}, {m['processors']} x "
    )
    text += f"{m['processor']}, {host:.0f} GiB of host memory. GB/s measured: {rates}.\n"
    if "tests" in found:
        text += f"\nTests: {found['tests'].get('summary', found['tests']['status'])}\n"
    return text


def _runs(found: dict[str, Any]) -> str:
    lines = [
        "| run | parameters | rows | tokens/s | TFLOP/s | step, ms | peak GB | bytes per parameter "
        "| host GB | first step, s | third loss |",
        "| --- |" + " ---: |" * 10,
    ]
    for name, result in found.items():
        if not isinstance(result, dict):
            continue
        for run in result.get("runs", []):
            peak, params = run["peak_bytes_in_use"], result["parameters"]
            cells = [
                name, f"{params / 1e9:.3g}B", run["rows"], f"{run['tokens_per_second']:,.0f}",
                f"{run['tflops']:.1f}", f"{1000 * run['step_seconds']:.0f}",
                f"{peak / GB:.2f}" if peak else "?", f"{peak / params:.2f}" if peak else "?",
                f"{run['host_peak_bytes'] / GB:.1f}", f"{run['first_step_seconds']:.0f}",
                f"{run['third_loss']:.4f}",
            ]  # fmt: skip
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def _delayed(found: dict[str, Any]) -> str:
    """What a delayed update gains, for each size and batch that has both."""
    lines = []
    for name, result in found.items():
        if not name.endswith(" delayed") or not isinstance(result, dict):
            continue
        plain = found.get(name.replace(" delayed", " host"), {})
        before = {run["rows"]: run["tokens_per_second"] for run in plain.get("runs", [])}
        for run in result.get("runs", []):
            if run["rows"] in before:
                gain = run["tokens_per_second"] / before[run["rows"]] - 1
                what = f"{result['parameters'] / 1e9:.3g}B, {run['rows']} rows"
                lines.append(f"* delayed update, {what}: {gain:+.0%}")
    return "\n".join(lines) + "\n" if lines else ""


def _rates(found: dict[str, Any]) -> dict[str, float]:
    """Of the one device alone, one way at a time, as `jzero.bandwidth()` measured; none if it did not."""
    links = found.get("bandwidth", {}).get("links", [])
    return {"to host": links[0]["to_host"], "to device": links[0]["to_device"]} if links else {}


def _link(found: dict[str, Any]) -> str:
    """Bytes that cross in a step over its time, and over what the link can do."""
    rates, lines = _rates(found), []
    for name, result in found.items():
        for run in result.get("runs", []) if isinstance(result, dict) else []:
            crossed = run.get("crossing_bytes", {})
            if not any(crossed.values()):
                continue
            cells = [name, str(run["rows"]), f"{1000 * run['step_seconds']:.0f}"]
            for way in ("to device", "to host"):
                rate = crossed[way] / run["step_seconds"]
                share = f"{rate / rates[way]:.0%}" if rates else "?"
                cells += [f"{crossed[way] / GB:.3g}", f"{rate / GB:.1f}", share]
            lines.append("| " + " | ".join(cells) + " |")
    if not lines:
        return ""
    measured = ", ".join(f"{way} {rate / GB:.1f}" for way, rate in rates.items()) or "not measured"
    head = [
        f"The link, one way at a time, GB/s: {measured}. *Share* is of that.\n",
        "| run | rows | step, ms | GB to device | GB/s | share | GB to host | GB/s | share |",
        "| --- |" + " ---: |" * 8,
    ]
    return "\n".join(head + lines) + "\n"


def _decoding(found: dict[str, Any]) -> str:
    """Beside the ceiling: rows, times the link's bytes per second, over bytes that a turn fetches."""
    rates = _rates(found)
    lines = [
        "| run | parameters | rows | tokens/s | GB per turn | ceiling | share | ms per turn | peak GB |",
        "| --- |" + " ---: |" * 8,
    ]
    for name, result in found.items():
        for run in result.get("decodes", []) if isinstance(result, dict) else []:
            peak, speed = run["peak_bytes_in_use"], run["tokens_per_second"]
            turn = run.get("crossing_bytes", {}).get("to device", 0) / run["turns"]
            ceiling = run["rows"] * rates["to device"] / turn if turn and rates else None
            cells = [
                name, f"{result['parameters'] / 1e9:.3g}B", run["rows"], f"{speed:,.0f}",
                f"{turn / GB:.3g}", f"{ceiling:,.0f}" if ceiling else "-",
                f"{speed / ceiling:.0%}" if ceiling else "-",
                f"{1000 * run['call_seconds'] / run['turns']:.0f}", f"{peak / GB:.2f}" if peak else "?",
            ]  # fmt: skip
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def _largest(found: dict[str, Any]) -> str:
    lines, most = [], {}
    for policy in ("jit", "host", "layers", "activations"):
        result = found.get(f"largest {policy}")
        if result is None:
            continue
        trains, fails = result["trains"], result["fails"]
        if trains:
            most[policy] = found[f"largest {policy} {trains} layers"]["parameters"]
        why = next((p["status"] for p in result["probes"] if p["layers"] == fails), "not reached")
        size = f"{most[policy] / 1e9:.2f}B" if trains else "none"
        runs = found[f"largest {policy} {trains} layers"]["runs"] if trains else [{}]
        peak = runs[-1].get("peak_bytes_in_use")
        used = f", {peak / GB:.1f} GB of the device" if peak else ""
        lines.append(f"* largest with {policy}: {size}{used} ({trains} layers; {fails}: {why})")
    for policy in ("host", "layers", "activations"):
        if policy in most and "jit" in most:
            times = most[policy] / most["jit"]
            lines.append(f"* {times:.1f} times as many parameters with {policy} as with jit")
    return "\n".join(lines) + "\n" if lines else ""


def _failures(found: dict[str, Any]) -> str:
    lines = []
    for name, result in found.items():
        status = result.get("status", "ok") if isinstance(result, dict) else "ok"
        searched = name.startswith("largest") and status.endswith("memory")
        if status != "ok" and not searched:
            lines.append(f"* {name}: {status}")
    lines += [f"* {line}" for line in found.get("tests", {}).get("failures", [])]
    return "What did not run or failed:\n\n" + "\n".join(lines) + "\n" if lines else ""


if __name__ == "__main__":
    print(tables(json.loads(Path(sys.argv[1]).read_text())))
