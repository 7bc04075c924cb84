"""The page itself: facts as JSON, plots and tables drawn by a script that asks nobody."""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

import tilewise
from tilewise.core.model import load_model
from tilewise.core.problem import spell_problem
from tilewise.core.sealed import SealedFolder
from tilewise.core.strict_json import finite
from tilewise.core.telling import Tell, silent
from tilewise.errors import InputError, ModelError, why_missing
from tilewise.learn.dataset import from_stores
from tilewise.problems.lines import replace_text
from tilewise.report.choices import Judged, choices
from tilewise.report.facts import Facts, gather
from tilewise.report.plots import plots

MOST_ROWS = 2000
"""Rows of a table; of more problems the worst are shown."""
MOST_HOLES = 16
"""Combinations without a problem that are named."""

SECTIONS = {
    "efficiency": (
        "Efficiency",
        "The chosen kernel's speed as a percentage of the fastest one's; 100 is perfect. Each "
        "problem is judged by a model that was not trained on it.",
    ),
    "oracle": (
        "Chosen against oracle",
        "One point per problem. Points on the line are perfect choices; the higher above it, the "
        "more was lost.",
    ),
    "problems": ("Problems", "Click a column to sort, type to filter."),
    "roofline": (
        "Roofline",
        "The fastest kernel for each problem, below the limit set by the device's listed bandwidth "
        "and clock. Points lie above it if operands come from a cache or the clock runs faster.",
    ),
    "kernels": ("Kernels", "How often each one was tried, failed, and was the fastest."),
    "coverage": (
        "Coverage and its holes",
        "How many problems there are in each range of sizes; 0 is a hole.",
    ),
    "failures": ("Failures by kind", "Readings without a time, by engine and reason."),
    "importances": (
        "What the model looks at",
        "How much each feature contributes: its share of the gain of all splits in the trees.",
    ),
    "calibration": (
        "Predicted against measured",
        "Predicted time divided by measured time; 1 is exact.",
    ),
}
"""Place on the page -> heading, and one line on how to read it."""


def write_report(
    stores: list[Path],
    target: Path,
    *,
    model: Path | None = None,
    op: str = "",
    dtype: str = "",
    tell: Tell = silent,
) -> Facts:
    """Writes the page of stores, and of the model that chooses by them where one is given."""
    library = plotly_script()
    known = load_model(model) if model is not None else None
    tell("reading measurements")
    data = from_stores(
        stores,
        op=known.op if known else op,
        arch=known.trained_on if known else "",
        dtype=dtype,
    )
    tell("judging choices")
    chosen = choices(model, data) if model is not None else None
    tell("drawing")
    facts = gather(stores, data, known, chosen, importances_of(model))
    text = page(facts, library)
    replace_text(target, text)
    return facts


def importances_of(folder: Path | None) -> dict[str, float] | None:
    """What a model's features contribute, where its folder says so."""
    if folder is None:
        return None
    sealed = SealedFolder(folder)
    if not sealed.holds("importances.json"):
        return None
    found = sealed.json("importances.json")
    try:
        wrong = [gain for gain in found.values() if not 0 <= gain <= 1]
    except (TypeError, AttributeError):
        wrong = [found]
    if wrong:
        raise ModelError(
            f"{folder} is damaged: importances.json holds {str(wrong[0])[:60]}, which is no share"
        )
    return dict(found)


def plotly_script() -> str:
    """The plotting library's own script."""
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise InputError(why_missing(error) or str(error)) from None
    return str(get_plotlyjs())


def page(facts: Facts, library: str) -> str:
    """The whole document; everything that was read from files is data in it, never markup."""
    content = {
        "plots": plots(facts),
        "tables": tables(facts),
        "notes": notes(facts),
    }
    given = {*content["plots"], *content["tables"], *content["notes"]}
    shown = [(name, *words) for name, words in SECTIONS.items() if name in given]
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in shown)
    body = "".join(_section(content, *words) for words in shown)
    title, foot = headline(facts), f"tilewise {tilewise.__version__}; {', '.join(facts.stores)}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_asset('report.css')}</style></head><body>"
        f"<header><h1>{escape(title)}</h1><p class='lead'>{escape(lead(facts))}</p>"
        f"<div class='cards'>{cards(facts)}</div></header>"
        f"<nav>{links}</nav><main>{body}</main>"
        f"<footer>{escape(foot)}</footer>"
        f'<script type="application/json" id="content">{_data(content)}</script>'
        f"<script>{library}</script><script>{_asset('report.js')}</script></body></html>"
    )


def _section(content: dict[str, Any], name: str, title: str, how: str) -> str:
    plot = f'<div id="{name}-plot"></div>' if name in content["plots"] else ""
    rows = f'<div class="rows" id="{name}-table"></div>' if name in content["tables"] else ""
    return (
        f'<section id="{name}"><h2>{escape(title)}</h2><p class="how">{escape(how)}</p>'
        f'<p class="note" id="{name}-note"></p>{plot}{rows}</section>'
    )


def headline(facts: Facts) -> str:
    """What the page is about."""
    device = facts.data.device or facts.arch.name
    return f"{facts.data.op} {', '.join(facts.data.dtypes)} on {device}"


def lead(facts: Facts) -> str:
    """What the page comes to, in a sentence or two."""
    sentences = []
    if facts.choices is not None:
        percent = 100 * facts.choices.efficiency
        sentences.append(
            f"On average the chosen kernel runs at {percent.mean():.1f} % of the fastest kernel's "
            f"speed, and nine choices in ten reach {np.percentile(percent, 10):.1f} %."
        )
    vendor = facts.vendor
    if vendor is not None:
        sentences.append(
            f"The vendor's own routine reaches {100 * vendor.mean:.1f} % on average and is the "
            f"fastest for {vendor.won:,} of {vendor.problems:,} problems."
        )
    return " ".join(sentences).replace(" %", "\N{NO-BREAK SPACE}%")


def cards(facts: Facts) -> str:
    """The figures that one wants first."""
    figures = [
        ("problems", f"{len(facts.data.problems):,}"),
        ("kernels", f"{len(facts.data.kernels):,}"),
        ("readings", f"{facts.readings:,}"),
        ("failed", f"{sum(sum(kinds.values()) for kinds in facts.failures.values()):,}"),
    ]
    if facts.choices is not None:
        percent = 100 * facts.choices.efficiency
        figures += [
            ("mean efficiency", f"{percent.mean():.2f} %"),
            ("P10 efficiency", f"{np.percentile(percent, 10):.1f} %"),
            ("worst", f"{percent.min():.1f} %"),
        ]
    return "".join(
        f"<div class='card'><b>{escape(value)}</b><span>{escape(name)}</span></div>"
        for name, value in figures
    )


def tables(facts: Facts) -> dict[str, Any]:
    """Columns and rows of every table."""
    found = {"kernels": _table(facts.kernels)}
    if facts.choices is not None and facts.choices.rows:
        rows = facts.choices.rows[:MOST_ROWS]
        found["problems"] = _table([_problem_row(row) for row in rows])
    elif facts.choices is None:
        found["problems"] = _table(_fastest_rows(facts))
    buckets = [
        {"axis": axis, "range": bucket, "problems": count}
        for axis, counts in facts.coverage.axes.items()
        for bucket, count in counts.items()
    ]
    found["coverage"] = _table(buckets)
    return found


def notes(facts: Facts) -> dict[str, str]:
    """What is said about a section, in words."""
    holes = [*facts.coverage.holes, *facts.coverage.pair_holes]
    notes = {
        "coverage": (
            f"{facts.coverage.pair_share:.0%} of the pairs of ranges hold a problem. "
            + (f"Empty: {', '.join(holes[:MOST_HOLES])}" if holes else "No range is empty.")
            + (f" and {len(holes) - MOST_HOLES} more" if len(holes) > MOST_HOLES else "")
        ),
    }
    if not facts.failures:
        notes["failures"] = "No reading failed."
    if facts.choices is not None:
        notes["efficiency"] = f"Model {_name(facts)}, {facts.choices.how}."
        notes |= _cut(facts.choices)
    return notes


def _cut(chosen: Judged) -> dict[str, str]:
    if len(chosen.rows) > MOST_ROWS:
        return {"problems": f"The {MOST_ROWS:,} worst of {len(chosen.rows):,} choices."}
    return {"problems": "The worst choices come first."} if chosen.rows else {}


def _name(facts: Facts) -> str:
    return facts.model.name if facts.model is not None else ""


def _problem_row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "%": row["efficiency"],
        "problem": row["words"],
        "why": row["why"],
        "chosen us": row["chosen_us"],
        "best us": row["best_us"],
        "chosen": row["chosen"],
        "best": row["best"],
    }


def _fastest_rows(facts: Facts) -> list[dict[str, Any]]:
    problems = facts.data.problems
    return [
        {
            "problem": spell_problem(problems[point.problem]),
            "dtype": problems[point.problem].dtype,
            "fastest": point.kernel,
            "us": round(problems[point.problem].flops / point.tflops * 1e-6, 3),
            "TFLOPS": round(point.tflops, 3),
        }
        for point in facts.points[:MOST_ROWS]
    ]


def _table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Columns in which nothing is known are left out."""
    names = rows[0] if rows else ()
    columns = [name for name in names if any(row[name] not in ("", None) for row in rows)]
    return {"columns": columns, "rows": [[row[name] for name in columns] for row in rows]}


def _data(value: Any) -> str:
    """JSON that no parser of HTML takes for markup; what overflowed is left out of plots."""
    text = json.dumps(finite(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (resources.files("tilewise.report") / "assets" / name).read_text(encoding="utf-8")
