"""Report of measurements: medians, a Markdown table, verdicts in sentences, and a chart."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_pardist.planner.profiles import data_sheet_of

_MB = 1e6
#: Ratios within this distance of 1 count as equal; "faster" and "slower" need both quartiles beyond it.
_EQUAL = 0.01
#: Allowed relative difference of two candidates' last losses.
_LOSS_TOLERANCE = 0.01


def summarize(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Compute the numbers of the table for each candidate.

    Returns:
        ``step_ms`` is the median over all timed steps, ``step_ms_low`` and ``step_ms_high`` the quartiles,
        ``step_ms_least`` the fastest step, ``wire`` the bytes sent per rank and step over bytes of fp32 parameters,
        memory in bytes.
    """
    run = results["run"]
    summary = {}
    for name, result in results["candidates"].items():
        steps = [step for turn in result["rounds"] for step in turn["step_s"]]
        low, median, high = quartiles(steps)
        sent = [turn["sent_bytes_per_rank_and_step"] for turn in result["rounds"]]
        foreign = [turn["foreign_cores"] for turn in result["rounds"]]
        psi = result["held"]["num_parameters"]
        summary[name] = {
            "step_ms": median * 1e3,
            "step_ms_low": low * 1e3,
            "step_ms_high": high * 1e3,
            "step_ms_least": min(steps) * 1e3,
            "round_ms": [statistics.median(turn["step_s"]) * 1e3 for turn in result["rounds"]],
            "cpu_ms": statistics.median(turn["cpu_s_per_rank_and_step"] for turn in result["rounds"]) * 1e3,
            "faults": statistics.median(turn["faults_per_rank_and_step"] for turn in result["rounds"]),
            "samples_per_s": run["batch_size"] * replicas_of(result) / median,
            "wire": None if None in sent else statistics.median(sent) / (4 * psi),
            "num_parameters": psi,
            "held_bytes": result["held"]["total"],
            "peak_bytes": result["peak_bytes"],
            "imported_bytes": result["imported_bytes"],
            "setup_s": result["setup_s"],
            "world_size": result["world_size"],
            "replicas": replicas_of(result),
            "foreign_cores": None if None in foreign else statistics.median(foreign),
            "loss": result["rounds"][-1]["loss"],
            "device_peak_bytes": _most(turn["device_peak"] for turn in result["rounds"]),
            "device_reserved_bytes": _most(turn["device_reserved"] for turn in result["rounds"]),
            **_rates(run, result, median),
        }
    return summary


def _rates(run: dict[str, Any], result: dict[str, Any], step_s: float) -> dict[str, float | None]:
    """Return tokens and model FLOPs per second, and the latter's share of the data sheet's peak."""
    samples_per_s = run["batch_size"] * replicas_of(result) / step_s
    tokens, flops, utilisation = run["tokens_a_sample"], run["flops_a_sample"], None
    if flops is not None and result["device"] is not None:
        dtype = "bfloat16" if run["precision"].startswith("bf16") else "float32"
        promised = data_sheet_of(result["device"]).flops[dtype] * result["world_size"]
        utilisation = flops * samples_per_s / promised
    return {
        "tokens_per_s": None if tokens is None else tokens * samples_per_s,
        "flops_per_s": None if flops is None else flops * samples_per_s,
        "utilisation": utilisation,
    }


def _most(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def differing_losses(results: dict[str, Any]) -> list[str]:
    """Return a sentence for each single-rank candidate whose last loss differs from the first baseline's.

    Candidates on several ranks are not compared: rank zero's loss is that of its own samples only.
    """
    summary, run = summarize(results), results["run"]
    alone = {name: row["loss"] for name, row in summary.items() if row["world_size"] == 1 and row["loss"] is not None}
    first = next((name for name in [*run["baselines"], *alone] if name in alone), None)
    return [
        f"{name}: the last loss is {loss:.4f}, {first} has {alone[first]:.4f}. The candidates do not train alike."
        for name, loss in alone.items()
        if first is not None and not abs(loss - alone[first]) <= _LOSS_TOLERANCE * abs(alone[first])
    ]


def replicas_of(result: dict[str, Any]) -> int:
    """Return the number of ranks with different samples: ranks of one pipeline or tensor group share theirs."""
    return int(result["held"].get("replicas", result["world_size"]))


def compare(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare every strategy with every baseline: ratio of throughputs, round by round.

    Rounds are adjacent in time: the ratio within one suffers less from a drift of the load than that of medians.
    """
    summary, run = summarize(results), results["run"]
    rows = []
    for name in run["strategies"]:
        for other in run["baselines"]:
            if name == other:
                continue
            low, middle, high = _ratios(summary, name, other)
            rows.append(
                {
                    "strategy": name,
                    "baseline": other,
                    "by_medians": summary[name]["samples_per_s"] / summary[other]["samples_per_s"],
                    "by_rounds": middle,
                    "low": low,
                    "high": high,
                }
            )
    return rows


def _ratios(summary: dict[str, dict[str, Any]], name: str, other: str) -> tuple[float, float, float]:
    """Return the quartiles over rounds of the ratio of two candidates' throughputs."""
    factor = summary[name]["replicas"] / summary[other]["replicas"]
    pairs = zip(summary[name]["round_ms"], summary[other]["round_ms"], strict=True)
    return quartiles([factor * theirs / ours for ours, theirs in pairs])


def sentence(row: dict[str, Any]) -> str:
    """Return one comparison as a sentence."""
    ratio = row["by_rounds"]
    if row["low"] > 1.0 + _EQUAL:
        verdict = "is **faster** than"
    elif row["high"] < 1.0 - _EQUAL:
        verdict = "is **slower** than"
    elif row["high"] - row["low"] <= 4 * _EQUAL:
        verdict = "is as fast as"
    else:
        verdict = "was not told apart, in this run, from"
    return (
        f"`{row['strategy']}` {verdict} `{row['baseline']}`: {ratio:.3f}x its samples/s (median over rounds; quartiles"
        f" {row['low']:.3f} to {row['high']:.3f}; {row['by_medians']:.3f}x by the medians of all steps)."
    )


def markdown(results: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    run, summary = results["run"], summarize(results)
    psi = next(iter(summary.values()))["num_parameters"] / 1e6
    ranks = f"{run['devices']} rank{'s' if run['devices'] > 1 else ''}"
    head = f"{run['model'].upper()}, {psi:.1f} million parameters, {ranks} ({run['date'][:10]})"
    verdicts = [f"- **{text}**" for text in differing_losses(results)]
    verdicts += [f"- **{name} failed.**" for name in run["failed"]]
    if run["accelerator"] != "cpu":
        notes = [*verdicts, *(f"- {note}" for note in _device_notes(run, results))]
        return "\n".join([f"# {head}", "", *_device_table(results, summary), "", *notes, ""])
    verdicts = [*(f"- {sentence(row)}" for row in compare(results)), *verdicts]
    notes = [f"- {note}" for note in _notes(run, summary)]
    return "\n".join([f"# {head}", "", *_table(summary), "", *verdicts, "", *notes, ""])


def _table(summary: dict[str, dict[str, Any]]) -> list[str]:
    columns = (
        "candidate",
        "step, ms (quartiles; least)",
        "samples/s",
        "CPU per rank and step, ms (page faults)",
        "sent per rank and step, Psi",
        "model states per rank, MB",
        "peak resident, MB",
        "set-up, s",
    )
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for name, row in summary.items():
        cells = (
            f"`{name}`",
            f"{row['step_ms']:.1f} ({row['step_ms_low']:.1f}-{row['step_ms_high']:.1f}; {row['step_ms_least']:.1f})",
            f"{row['samples_per_s']:.2f}",
            f"{row['cpu_ms']:.1f} ({row['faults']:.0f})",
            "not counted" if row["wire"] is None else f"{row['wire']:.3f}",
            f"{row['held_bytes'] / _MB:.1f}",
            f"{row['peak_bytes'] / _MB:.0f}",
            f"{row['setup_s']:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _device_table(results: dict[str, Any], summary: dict[str, dict[str, Any]]) -> list[str]:
    """Return the table for ranks on devices, without traffic, which is not counted there."""
    baselines = results["run"]["baselines"]
    first = baselines[0] if baselines else next(iter(summary))
    columns = (
        "candidate",
        "step, ms (quartiles; least)",
        "tokens/s" if results["run"]["tokens_a_sample"] else "samples/s",
        f"of `{first}` (quartiles over rounds)",
        "model FLOPs utilisation",
        "peak in tensors (kept by allocator), GB",
        "model states, MB",
        "last loss",
        "set-up, s",
    )
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for name, row in summary.items():
        low, middle, high = _ratios(summary, name, first)
        cells = (
            f"`{name}`",
            f"{row['step_ms']:.2f} ({row['step_ms_low']:.2f}-{row['step_ms_high']:.2f}; {row['step_ms_least']:.2f})",
            f"{row['tokens_per_s'] or row['samples_per_s']:,.0f}",
            f"{middle:.3f}x ({low:.3f}-{high:.3f})",
            "unknown" if row["utilisation"] is None else f"{row['utilisation']:.1%}",
            f"{row['device_peak_bytes'] / 1e9:.2f} ({row['device_reserved_bytes'] / 1e9:.2f})",
            f"{row['held_bytes'] / _MB:.0f}",
            "unknown" if row["loss"] is None else f"{row['loss']:.4f}",
            f"{row['setup_s']:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _device_notes(run: dict[str, Any], results: dict[str, Any]) -> list[str]:
    about = run["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    sizes = ", ".join(f"{name} {size}" for name, size in run["sizes"].items())
    device = next(iter(results["candidates"].values()))["device"]
    sheet = data_sheet_of(device)
    return [
        f"Model: {run['model']} ({sizes}), fused AdamW, {run['precision']} (autocast, in loops by hand too),"
        f" {run['batch_size']} samples a rank and step, made once in pinned memory.",
        f"{run['rounds']} rounds in turns, {run['steps']} timed steps each after {run['warmup']} dropped ones, timed by"
        " events on the device; the median over all timed steps, and over rounds where two candidates are compared.",
        f"Model FLOPs: {(run['flops_a_sample'] or 0) / 1e12:.3f} T a sample, 6 N + 12 L d T a token, of the"
        f" {sheet.flops['bfloat16'] / 1e12:.1f} T/s (bf16) on the data sheet of {sheet.name}.",
        "Peak: what tensors take most in a timed step, and what the allocator keeps for that; the context and"
        " libraries come on top.",
        f"Device: {device}; {about['cpu']}, {about['cores']} cores, {about['memory_gb']} GB, {about['system']};"
        f" OMP_NUM_THREADS={run['threads']}.",
        f"Load average before {_numbers(run['load_before'])}, after {_numbers(run['load_after'])} (1, 5, 15 minutes).",
        f"{versions}; commit {about['commit']}.",
        f"Command: `{run['command']}`",
    ]


def _notes(run: dict[str, Any], summary: dict[str, dict[str, Any]]) -> list[str]:
    about = run["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    sizes = ", ".join(f"{name} {size}" for name, size in run["sizes"].items())
    imported = next(iter(summary.values()))["imported_bytes"] / _MB
    return [
        f"Model: {run['model']} ({sizes}), AdamW, {run['precision']}, {run['batch_size']} samples a rank and step.",
        f"{run['rounds']} rounds in turns, {run['steps']} timed steps each after {run['warmup']} dropped ones; the"
        " median over all timed steps, and over rounds where two candidates are compared.",
        f"Sent: {_wire_note(run)}",
        "Model states: parameters, gradients or the buckets they live in (both, where gradients are copied into"
        " buckets), optimizer state. Peak resident memory and set-up (from imports done to first step): the largest"
        f" rank's; {imported:.0f} MB were resident after the imports.",
        f"Machine: {about['cpu']}, {about['cores']} cores, {about['memory_gb']} GB, {about['system']}; ranks with"
        " OMP_NUM_THREADS=1.",
        f"Load average before {_numbers(run['load_before'])}, after {_numbers(run['load_after'])} (1, 5, 15 minutes)."
        f" Cores that other programs used meanwhile, median of the turns: {_foreign(summary)}.",
        f"{versions}; commit {about['commit']}"
        + "".join(f"; {name}={value}" for name, value in about["allocator"].items())
        + ".",
        f"Command: `{run['command']}`",
    ]


def write(results: dict[str, Any], folder: Path, stem: str) -> list[Path]:
    """Write ``stem``.json, .md and .png into ``folder``, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.{ending}" for ending in ("json", "md", "png")]
    full = {**results, "summary": summarize(results), "comparisons": compare(results)}
    paths[0].write_text(json.dumps(_rounded(full), indent=1) + "\n")
    paths[1].write_text(markdown(results) + f"\n![The same as a picture]({paths[2].name})\n")
    plot(results, paths[2])
    return paths


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw throughput, step times, traffic (or FLOPs utilisation on a device) and memory as bar charts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    run, summary = results["run"], summarize(results)
    names = list(summary)
    colors = ["#d95f02" if name in run["strategies"] else "#7f8fa6" for name in names]
    figure, axes = plt.subplots(1, 4, figsize=(15, 0.9 + 0.55 * len(names) + 0.6), sharey=True)
    axes[0].barh(names, [summary[name]["samples_per_s"] for name in names], color=colors)
    axes[0].set_title("samples/s")
    for position, name in enumerate(names):
        times = [step * 1e3 for turn in results["candidates"][name]["rounds"] for step in turn["step_s"]]
        axes[1].boxplot(times, orientation="horizontal", positions=[position], widths=0.6, showfliers=False)
    axes[1].set_title("step, ms (box: quartiles)")
    on_device = run["accelerator"] != "cpu"
    if on_device:
        axes[2].barh(names, [100 * (summary[name]["utilisation"] or 0.0) for name in names], color=colors)
        axes[2].set_title("model FLOPs utilisation, %")
    else:
        axes[2].barh(names, [summary[name]["wire"] or 0.0 for name in names], color=colors)
        axes[2].set_title("sent per rank and step, Psi")
    held = [summary[name]["held_bytes"] / _MB for name in names]
    peak = [summary[name]["device_peak_bytes" if on_device else "peak_bytes"] / _MB for name in names]
    axes[3].barh(names, peak, color="#dcdde1")
    axes[3].barh(names, held, color=colors, height=0.4)
    axes[3].set_title(f"memory per rank, MB (grey: peak {'on the device' if on_device else 'resident'})")
    for axis in axes:
        axis.set_yticks(range(len(names)), names)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    psi = summary[names[0]]["num_parameters"] / 1e6
    figure.suptitle(f"{run['model']}, {psi:.1f} M parameters, {run['devices']} ranks, {run['machine']['cpu']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return first quartile, median and third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def _wire_note(run: dict[str, Any]) -> str:
    if run["idle_bytes_per_s"] is None:
        return "not counted, since this system has no /proc/net/dev."
    where = "a loopback interface of the ranks' own" if run["own_network"] else "the host's loopback interface"
    return (
        f"bytes counted on {where}, headers included, less the {run['idle_bytes_per_s']:.0f} bytes/s counted while all"
        " ranks waited, over 4 bytes a parameter."
    )


def _foreign(summary: dict[str, dict[str, Any]]) -> str:
    values = {name: row["foreign_cores"] for name, row in summary.items()}
    return ", ".join("unknown" if value is None else f"`{name}` {value:.2f}" for name, value in values.items())


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
