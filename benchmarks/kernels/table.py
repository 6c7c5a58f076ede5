"""The Markdown tables of a results file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.kernels.cases import WIDTH

_PEERS = ("torch", "flashinfer sparse", "flashinfer dense")
_ABSENT = "–"


def tables(report: dict[str, Any]) -> str:
    """The tables of a report that benchmarks.report has written, with what they were measured on.

    The first shape's stages beside the peers; every shape against every setting; how many times faster than the peers.
    """
    figures, machine, versions = report["figures"], report["machine"], report["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "flashinfer-python") if name in versions)
    head = (
        f"{machine['gpu']}, driver {machine['driver']}, {packages}, {report['date']}, commit {report['commit']}; "
        f"a copy on the device moves {figures['copy_bytes_a_second'] / 1e12:.2f} TB/s, an empty graph takes "
        f"{figures['empty_graph_us']:.1f} us. Microseconds a round, medians."
    )
    cases = figures["cases"]
    first = [case for case in cases if _shape(case)[1:] == _shape(cases[0])[1:]]
    parts = [head, "", *_against_peers(first), "", *_settings(cases)]
    return "\n".join([*parts, "", *faster] if (faster := _times_faster(cases)) else parts)


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

    def cell(case: dict[str, Any]) -> str:
        last = _last(case["specmask"])
        return f"{_time(last)} ({last / case['floor_us']:.1f})" if last else _ABSENT

    return _grid("whole round, us (x floor)", cases, cell)


def _times_faster(cases: list[dict[str, Any]]) -> list[str]:
    """Every shape against every setting that the peers ran too: their faster order's time over the library's."""

    def cell(case: dict[str, Any]) -> str:
        last = _last(case["specmask"])
        peers = {peer: time for peer in _PEERS if (time := _last(case.get(peer, {})))}
        in_torch = peers.pop("torch", None)
        faster = [
            f"{time / last:.1f}" if time and last else _ABSENT for time in (min(peers.values(), default=None), in_torch)
        ]
        return " / ".join(faster)

    measured = [case for case in cases if any(_last(case.get(peer, {})) for peer in _PEERS)]
    return _grid("times faster than FlashInfer / torch", measured, cell) if measured else []


def _grid(title: str, cases: list[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> list[str]:
    settings = list(dict.fromkeys(_setting(case) for case in cases))
    lines = [f"| {title} | " + " | ".join(settings) + " |", "|---|" + "---|" * len(settings)]
    for shape in dict.fromkeys(_shape(case) for case in cases):
        found = {_setting(case): cell(case) for case in cases if _shape(case) == shape}
        cells = [f"{shape[0] * WIDTH} x {shape[1]:,}, {shape[2]}", *(found.get(one, _ABSENT) for one in settings)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _shape(case: dict[str, Any]) -> tuple[int, int, str]:
    return case["batch"], case["vocabulary"], case["dtype"] + (", peaked" if case.get("logits") == "peaked" else "")


def _rows(case: dict[str, Any]) -> str:
    return f"{case['batch'] * WIDTH} x {case['vocabulary']:,}"


def _setting(case: dict[str, Any]) -> str:
    return f"{case['top_k'] or 'none'}, {case['top_p']:g}"


def _last(measured: dict[str, Any]) -> float | None:
    """The time of all its stages."""
    return next(reversed(measured.get("graph_us", {}).values()), None)


def _time(time: float | None) -> str:
    return _ABSENT if time is None else f"{time:.1f}" if time < 100 else f"{time:,.0f}"
