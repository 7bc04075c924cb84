"""Plots of a report, as Plotly takes them: traces and a layout, without colours of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.core.arch import Arch
from tilewise.core.problem import spell_problem
from tilewise.report.choices import Judged
from tilewise.report.facts import Facts

Plot = dict[str, Any]
_BINS = 30


def plots(facts: Facts) -> dict[str, Plot]:
    """Every plot that the facts allow, by the name of its place on the page."""
    found = {"roofline": roofline(facts)} if facts.points else {}
    if facts.choices is not None:
        found["efficiency"] = distribution(facts.choices)
        if any(row["chosen_us"] for row in facts.choices.rows):
            found["oracle"] = chosen_against_oracle(facts.choices)
        if len(facts.choices.ratio):
            found["calibration"] = calibration(facts.choices)
    if facts.importances:
        found["importances"] = importances(facts.importances)
    if facts.failures:
        found["failures"] = failures(facts.failures)
    return found


def distribution(chosen: Judged) -> Plot:
    """How many problems reach which share of the best."""
    # One step a value: many equal ones would draw a line straight down.
    percent, counts = np.unique(_short(100 * chosen.efficiency), return_counts=True)
    share = 100 * np.cumsum(counts[::-1])[::-1] / max(counts.sum(), 1)
    layout = _axes("chosen kernel's speed, % of the fastest", "% of problems that reach it")
    low = float(percent.min()) if len(percent) else 0.0
    layout["xaxis"]["range"] = [low, 100 + 0.02 * (100 - low) + 0.01]  # so that 100 has its tick
    layout["yaxis"]["rangemode"] = "tozero"
    return {
        "data": [
            {
                "x": _short(percent),
                "y": _short(share),
                "mode": "lines",
                "line": {"shape": "vh"},
                "hovertemplate": "%{y:.1f} % of problems reach %{x:.1f} %<extra></extra>",
            }
        ],
        "layout": layout,
    }


def chosen_against_oracle(chosen: Judged) -> Plot:
    """The chosen kernel's time over the best one's, a point a problem."""
    rows = [row for row in chosen.rows if row["chosen_us"]]
    best = [row["best_us"] for row in rows]
    return {
        "data": [
            {
                "x": best,
                "y": [row["chosen_us"] for row in rows],
                "text": [_hover(row) for row in rows],
                "mode": "markers",
                "type": "scatter",
                "marker": {"size": 6, "opacity": 0.75},
                "hovertemplate": "%{text}<extra></extra>",
                "name": "problems",
            },
            _line([min(best), max(best)], [min(best), max(best)], "the oracle"),
        ],
        "layout": _axes("best, us", "chosen, us", log=True),
    }


def roofline(facts: Facts) -> Plot:
    """The fastest kernel of each problem, under what the device's figures allow."""
    traces = []
    for engine in sorted({point.engine for point in facts.points}):
        own = [point for point in facts.points if point.engine == engine]
        problems = facts.data.problems
        traces.append(
            {
                "x": _short([point.intensity for point in own]),
                "y": _short([point.tflops for point in own]),
                "text": [f"{spell_problem(problems[p.problem])}<br>{p.kernel}" for p in own],
                "mode": "markers",
                "type": "scatter",
                "name": engine,
                "marker": {"size": 6, "opacity": 0.75},
                "hovertemplate": "%{text}<br>%{y:.4g} TFLOPS<extra></extra>",
            }
        )
    intensities = [point.intensity for point in facts.points]
    for dtype in facts.data.dtypes:
        traces.append(_roof(facts.arch, dtype, min(intensities), max(intensities)))
    return {"data": traces, "layout": _axes("FLOP per byte", "TFLOPS", log=True)}


def _roof(arch: Arch, dtype: str, low: float, high: float) -> dict[str, Any]:
    x = np.geomspace(max(low, 1e-3), max(high, 2e-3), 60)
    peak = arch.peak_tflops.get(dtype)
    slope = x * arch.memory_gb_s * 1e-3
    return _line(_short(x), _short(np.minimum(slope, peak) if peak else slope), f"{dtype} roof")


def calibration(chosen: Judged) -> Plot:
    """Predicted over measured time, by how long a kernel takes: median and the middle 80 %."""
    log = np.log10(chosen.measured_us)
    edges = np.linspace(log.min(), log.max() + 1e-9, _BINS + 1)
    place = np.clip(np.digitize(log, edges) - 1, 0, _BINS - 1)
    used = [b for b in range(_BINS) if (place == b).sum() >= 5] or [int(place[0])]
    middle = [10 ** float((edges[b] + edges[b + 1]) / 2) for b in used]
    bands = {
        q: [float(np.percentile(chosen.ratio[place == b], q)) for b in used] for q in (10, 50, 90)
    }
    band = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    return {
        "data": [
            {"x": _short(middle), "y": _short(bands[10]), **band},
            {
                "x": _short(middle),
                "y": _short(bands[90]),
                **band,
                "fill": "tonexty",
                "name": "80 % of readings",
                "showlegend": True,
            },
            {
                "x": _short(middle),
                "y": _short(bands[50]),
                "mode": "lines+markers",
                "name": "median",
            },
        ],
        "layout": _axes("measured, us", "predicted over measured", log=True),
    }


def importances(gains: dict[str, float], most: int = 25) -> Plot:
    """What the features that matter most contribute."""
    top = sorted(gains.items(), key=lambda item: -item[1])[:most][::-1]
    return {
        "data": [
            {
                "x": [100 * gain for _, gain in top],
                "y": [name for name, _ in top],
                "type": "bar",
                "orientation": "h",
                "hovertemplate": "%{y}: %{x:.2f} %<extra></extra>",
            }
        ],
        "layout": {
            **_axes("% of the gain", ""),
            "height": 140 + 20 * len(top),
            "margin": {"l": 190, "t": 20, "r": 10, "b": 50},
        },
    }


def failures(found: dict[str, dict[str, int]]) -> Plot:
    """Failures by engine and kind."""
    kinds = sorted({kind for counts in found.values() for kind in counts})
    engines = sorted(found)
    traces = [
        {"x": engines, "y": [found[e].get(kind, 0) for e in engines], "name": kind, "type": "bar"}
        for kind in kinds
    ]
    return {"data": traces, "layout": {**_axes("engine", "readings"), "barmode": "stack"}}


def _axes(x: str, y: str, *, log: bool = False) -> dict[str, Any]:
    kind = {"type": "log", "exponentformat": "none"} if log else {}
    return {"xaxis": {"title": {"text": x}, **kind}, "yaxis": {"title": {"text": y}, **kind}}


def _line(x: Any, y: Any, name: str) -> dict[str, Any]:
    return {"x": x, "y": y, "mode": "lines", "name": name, "hoverinfo": "name"}


def _hover(row: dict[str, Any]) -> str:
    return f"{row['words']}<br>{row['efficiency']:.1f} % by {row['chosen']}"


def _short(values: Any) -> list[float]:
    """Four digits: what a plot can show."""
    return [float(f"{value:.4g}") for value in values]
