"""The Markdown tables of a results file."""

from __future__ import annotations

from typing import Any

from benchmarks.kernels.cases import WIDTH

_PEERS = ("torch", "flashinfer sparse", "flashinfer dense")
_ABSENT = "–"


def tables(report: dict[str, Any]) -> str:
    """Both tables of a report that benchmarks.report has written, with what they were measured on."""
    figures, machine, versions = report["figures"], report["machine"], report["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "flashinfer-python") if name in versions)
    head = (
        f"{machine['gpu']}, driver {machine['driver']}, {packages}, {report['date']}, commit {report['commit']}; "
        f"a copy on the device moves {figures['copy_bytes_a_second'] / 1e12:.2f} TB/s, an empty graph takes "
        f"{figures['empty_graph_us']:.1f} us. Microseconds a round, medians."
    )
    cases = figures["cases"]
    return "\n".join([head, "", *_against_peers(cases), "", *_settings(cases)])


def _against_peers(cases: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| rows x vocabulary, top_k, top_p | floor | filter | + verify | + capture | + pack | x floor | alone | eager "
        "| torch | FlashInfer sparse | dense | x faster |",
        "|---|" + "---|" * 12,
    ]
    for case in cases:
        if not any(peer in case for peer in _PEERS):
            continue
        mine = case["specmask"]
        graph, last = mine.get("graph_us", {}), _last(mine)
        peers = [_last(case.get(peer, {})) for peer in _PEERS]
        flashinfer = [time for time in peers[1:] if time]
        faster = f"{min(flashinfer) / last:.0f}" if flashinfer and last else _ABSENT
        cells = [
            f"{_rows(case)}, {_setting(case)}",
            _time(case["floor_us"]),
            *(_time(graph.get(stage)) for stage in ("filter", "verify", "capture", "pack")),
            f"{last / case['floor_us']:.2f}" if last else _ABSENT,
            _time(mine.get("alone_us")),
            _time(mine.get("eager_us")),
            *(_time(peer) for peer in peers),
            faster,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _settings(cases: list[dict[str, Any]]) -> list[str]:
    """Every shape against every setting: the whole round, and how many times the floor it is."""
    shapes = list(dict.fromkeys((_rows(case), _logits(case)) for case in cases))
    settings = list(dict.fromkeys(_setting(case) for case in cases))
    lines = ["| whole round, us (x floor) | " + " | ".join(settings) + " |", "|---|" + "---|" * len(settings)]
    for rows, logits in shapes:
        cells = [f"{rows}, {logits}"]
        for setting in settings:
            found = [c for c in cases if (_rows(c), _logits(c), _setting(c)) == (rows, logits, setting)]
            last = _last(found[0]["specmask"]) if found else None
            cells.append(f"{_time(last)} ({last / found[0]['floor_us']:.1f})" if last else _ABSENT)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _rows(case: dict[str, Any]) -> str:
    return f"{case['batch'] * WIDTH} x {case['vocabulary']:,}"


def _logits(case: dict[str, Any]) -> str:
    return case["dtype"] + (", peaked" if case.get("logits") == "peaked" else "")


def _setting(case: dict[str, Any]) -> str:
    return f"{case['top_k'] or 'none'}, {case['top_p']:g}"


def _last(measured: dict[str, Any]) -> float | None:
    """The time of all its stages."""
    return next(reversed(measured.get("graph_us", {}).values()), None)


def _time(time: float | None) -> str:
    return _ABSENT if time is None else f"{time:.1f}" if time < 100 else f"{time:,.0f}"
