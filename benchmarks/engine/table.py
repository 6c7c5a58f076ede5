"""The Markdown tables of the engine's results."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.engine.plan import ORDINARY

_ABSENT = "–"


def tables(report: dict[str, Any]) -> str:
    """The arms of a report that benchmarks.report has written, and what stands beside them."""
    figures, machine, versions = report["figures"], report["machine"], report["versions"]
    asked = figures["prompts"] if isinstance(figures["prompts"], str) else f"prompts of {', '.join(figures['prompts'])}"
    head = (
        f"{machine['gpu']}, driver {machine['driver']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}, {report['date']}, commit {report['commit']}; target {figures['target']} in "
        f"{figures['dtype'].removeprefix('torch.')}, {asked}, at most {figures['tokens']} tokens each."
    )
    parts = _arms(figures["arms"]), _costs(figures["arms"], figures["peak_gb"]), _beside(figures)
    return "\n\n".join([head, *("\n".join(lines) for lines in parts if lines)])


def _arms(arms: dict[str, Any]) -> list[str]:
    """A row for each policy and batch size, a column for each method."""
    rows: dict[str, dict[str, str]] = {}
    rates: dict[tuple[str, str], float] = {}
    for name, arm in arms.items():
        method, policy = name.split(", ", 1)
        of_policy = rows.setdefault(policy, {})
        if arm.get("tokens_per_second"):
            rate = rates[method, policy] = statistics.median(arm["tokens_per_second"])
            of_policy[method] = f"{rate:,.0f} ({arm['tokens_a_round']:.2f}, {arm['ms_a_round']:.2f})"
    methods = list(dict.fromkeys(method for of_policy in rows.values() for method in of_policy))
    speculative = [method for method in methods if method != ORDINARY]
    titles = ["tokens/s (tokens a round, ms a round)", *methods, *(f"{method} x" for method in speculative)]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for policy, of_policy in rows.items():
        cells = [of_policy.get(method, _ABSENT) for method in methods]
        for method in speculative:
            own, base = rates.get((method, policy)), rates.get((ORDINARY, policy))
            cells.append(f"{own / base:.2f}" if own and base else _ABSENT)
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    return lines


def _costs(arms: dict[str, Any], peak_gb: dict[str, float]) -> list[str]:
    """What a round costs the host, how busy the device is, and the memory: a row for each policy and batch size."""
    rows: dict[str, dict[str, str]] = {}
    for name, arm in arms.items():
        method, policy = name.split(", ", 1)
        if "in_rounds" in arm:
            host, busy = arm.get("host_ms_a_round"), arm.get("kernels_in_rounds")
            cells = [_ABSENT if host is None else f"{host:.2f}", f"{arm['in_rounds']:.0%}"]
            rows.setdefault(policy, {})[method] = ", ".join(cells if busy is None else [*cells, f"{busy:.0%}"])
    if not rows:
        return []
    methods = list(dict.fromkeys(method for of_policy in rows.values() for method in of_policy))
    titles = ["host, ms a round; in rounds; kernels in rounds, at least", *methods]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for policy, of_policy in rows.items():
        lines.append(f"| {policy} | {' | '.join(of_policy.get(method, _ABSENT) for method in methods)} |")
    for batch in dict.fromkeys(name.rsplit(", ", 1)[1] for name in peak_gb):
        peaks = [f"{peak_gb[at]:.2f}" if (at := f"{method}, {batch}") in peak_gb else _ABSENT for method in methods]
        lines.append(f"| peak memory, GB, {batch} | {' | '.join(peaks)} |")
    return lines


def _beside(figures: dict[str, Any]) -> list[str]:
    """A line each for transformers' modes, recording on against off, and the soak, as far as they ran."""
    lines = []
    if figures["peers"]:
        medians = {name.rsplit(", ", 1)[0]: statistics.median(rates) for name, rates in figures["peers"].items()}
        names = [f"{name} {rate:,.0f}" for name, rate in medians.items()]
        batch = next(iter(figures["peers"])).rsplit(", ", 1)[1]
        lines.append(
            f"- Beside transformers' generate, {batch}, greedy, {figures['peer_tokens']} tokens each, in tokens/s: "
            f"{'; '.join(names)}."
        )
    if figures["masks_on_over_off"]:
        found = [
            f"{method} {one['ratio']:.4f} ({one['ratio_of_rounds']:.4f} in the time of rounds)"
            for method, one in figures["masks_on_over_off"].items()
        ]
        lines.append(f"- Masks on over off in tokens/s, batch 32, 512 tokens: {'; '.join(found)}.")
    if figures["unbounded_over_bounded"]:
        found = [
            f"{method} {one['ratio']:.4f} ({one['ratio_of_rounds']:.4f}; supports of {one['support_mean']:.0f})"
            for method, one in figures["unbounded_over_bounded"].items()
        ]
        lines.append(f"- The same of masks of top_p alone over those with a top_k of 1,024, T=0.7: {'; '.join(found)}.")
    if figures["soak"]:
        counts = ", ".join(f"{count:,} {name}" for name, count in figures["soak"].items() if name != "method")
        lines.append(f"- Soak, {figures['soak']['method']}: {counts}.")
    return lines
