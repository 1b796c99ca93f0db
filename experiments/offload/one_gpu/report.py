"""What was found, as Markdown: `report.py results/<date>.json`."""

import json
import sys
from pathlib import Path
from typing import Any

GB = 1e9


def tables(found: dict[str, Any]) -> str:
    parts = [_machine(found), _runs(found), _delayed(found), _largest(found), _failures(found)]
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


def _largest(found: dict[str, Any]) -> str:
    lines, most = [], {}
    for policy in ("jit", "host"):
        result = found.get(f"largest {policy}")
        if result is None:
            continue
        trains, fails = result["trains"], result["fails"]
        if trains:
            most[policy] = found[f"largest {policy} {trains} layers"]["parameters"]
        why = next((p["status"] for p in result["probes"] if p["layers"] == fails), "not reached")
        size = f"{most[policy] / 1e9:.2f}B" if trains else "none"
        lines.append(f"* largest with {policy}: {size} ({trains} layers; {fails}: {why})")
    if len(most) == 2:
        lines.append(f"* {most['host'] / most['jit']:.1f} times as many parameters with offload")
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
