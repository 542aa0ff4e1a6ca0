"""The report: one HTML file without outside links, from a fit and what else is known of its experiment."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sweeps import report_figures as figures
from sweeps import report_tables as tables
from sweeps import report_words as words
from sweeps.fit_report import FitReport
from sweeps.plots import Marker
from sweeps.report_style import STYLE
from sweeps.scaling.analysis import NOTE, Analysis
from sweeps.scaling.decided import decided

_FOLD = 12


@dataclass(frozen=True)
class Section:
    """A part of the page that other modules make: its title and its HTML."""

    title: str
    content: str


@dataclass(frozen=True)
class Extras:
    """What an experiment holds beside its fit; each part is left out where there is none.

    Attributes:
        title: of the page.
        first: before the decision (a forecast and its outcome).
        later: after the figures (learning rates, forecasts).
        markers: forecasts and measurements to draw beside the fit.
    """

    title: str = "Scaling report"
    first: tuple[Section, ...] = ()
    later: tuple[Section, ...] = ()
    markers: tuple[Marker, ...] = field(default=())


def page(report: FitReport, extras: Extras | None = None) -> str:
    """The whole report as HTML."""
    extras = extras or Extras()
    analysis = report.analysis
    sections = [
        *extras.first,
        Section("Decision", _decision(analysis)),
        Section("Curves", _curves(analysis)),
        Section("Optimum against compute", _optimum(analysis, extras.markers)),
        Section("Exponents", _exponents(analysis)),
        *([Section("Surface and residuals", _surface(analysis))] if analysis.results else []),
        *extras.later,
        Section("Runs and exclusions", _runs(analysis)),
        Section("Printed table", _printed(report)),
    ]
    links = "".join(f'<a href="#s{i}">{html.escape(s.title)}</a>' for i, s in enumerate(sections))
    body = "\n".join(
        f'<section id="s{i}"><h2>{html.escape(s.title)}</h2>\n{s.content}</section>' for i, s in enumerate(sections)
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(extras.title)}</title><style>{STYLE}</style></head><body><main>
<h1>{html.escape(extras.title)}</h1>
<p class="quiet">{html.escape(_source(report))}</p>
<nav>{links}</nav>
{body}
</main></body></html>
"""


def _printed(report: FitReport) -> str:
    text = html.escape(report.text())
    return f"<details><summary>What python -m sweeps.fit prints</summary><pre>{text}</pre></details>"


def _source(report: FitReport) -> str:
    table = report.analysis.table
    budgets = table.budgets
    return (
        f"{len(table)} runs of {report.source}, {words.power(budgets.min())} to {words.power(budgets.max())} FLOPs. "
        f"FLOPs counted as: {table.convention}; N as: {table.n_convention}. Intervals are 95%. {NOTE}"
    )


def figure_grid(items: Sequence[tuple[str | None, str]]) -> str:
    """Figures (inline SVG or img) with captions, side by side where there is room; None is left out."""
    shown = "".join(f"<figure>{drawn}<figcaption>{caption}</figcaption></figure>" for drawn, caption in items if drawn)
    return f'<div class="figures">{shown}</div>'


def _decision(analysis: Analysis) -> str:
    if not analysis.results:
        return f'<div class="box bad"><p><b>No approach gave an answer.</b></p></div>{tables.refusals(analysis)}'
    parts = []
    for i, decision in enumerate(decided(analysis)):
        parts.append(f"<p>{html.escape(words.decision_sentence(analysis, i))}</p>")
        cells = "".join(_tile(*map(html.escape, tile)) for tile in words.tiles(decision))
        parts.append(f'<div class="tiles">{cells}</div>')
    verdict = f"<p><b>Verdict: {html.escape(analysis.verdict)}.</b></p>"
    cautions = "".join(f"<li>{html.escape(line)}</li>" for line in words.cautions(analysis))
    parts.append(
        f'<div class="box {words.summary_class(analysis)}">{verdict}{f"<ul>{cautions}</ul>" if cautions else ""}</div>'
    )
    parts.append(tables.decisions(analysis))
    return "\n".join(parts)


def _tile(name: str, value: str, ends: str) -> str:
    return f'<div class="tile"><span>{name}</span><b>{value}</b><span>{ends}</span></div>'


def _curves(analysis: Analysis) -> str:
    return figure_grid(
        [
            (
                figures.compute(analysis),
                "Final loss of every run; runs of one size share a colour and a line. The dashed line is the loss at "
                "the optimal size: runs lie on or above it.",
            ),
            (
                figures.isoflop(analysis),
                "Each colour is one budget, each point one run. Stars are minima; a curve without a star was refused.",
            ),
        ]
    )


def _optimum(analysis: Analysis, markers: Sequence[Marker]) -> str:
    if not analysis.results:
        return "<p>No fit.</p>"
    captions = (
        "Size the budget should be spent on. Bands are 95%; the shaded part is beyond the measured budgets.",
        "Tokens the budget should be spent on.",
        "Loss at the optimum; a forecast and its measurement are drawn where there are any.",
    )
    return figure_grid([(figures.scaling(analysis, i, markers), text) for i, text in enumerate(captions)])


def _exponents(analysis: Analysis) -> str:
    rows = [(n, n, r.a, r.a_interval.low, r.a_interval.high) for n, r in analysis.results.items()]
    shown = [
        (
            figures.exponents(rows),
            "Exponent of the optimal size, with 95% intervals. Intervals that do not meet are a disagreement.",
        )
    ]
    parts = [tables.fits(analysis)]
    if analysis.conventions:
        every: list[Any] = list(analysis.conventions)
        lines = [(f"{r.approach}, {r.flops}, N {r.n}", r.approach, r.a, r.low, r.high) for r in every]
        shown.append(
            (
                figures.exponents(lines),
                "The same runs under other ways to count FLOPs and parameters: an exponent means little without them.",
            )
        )
        folded = tables.conventions(every)
        parts.append(f"<details><summary>Exponents by convention</summary>{folded}</details>")
    return "".join([*parts, figure_grid(shown), tables.refusals(analysis)])


def _surface(analysis: Analysis) -> str:
    return figure_grid(
        [
            (
                figures.surface(analysis),
                "Contours of the fitted loss over size and tokens. Points are runs: red ended above the surface, blue "
                "below. Colours that gather in one corner mean that the form does not hold there.",
            ),
            (
                figures.misfit(analysis),
                "The same for every approach, against how far the run is from the optimal size. A smile or a frown is "
                "misfit of the form, not noise.",
            ),
        ]
    )


def _runs(analysis: Analysis) -> str:
    excluded = analysis.table.excluded
    parts = []
    if not excluded:
        parts.append("<p>No row was excluded.</p>")
    else:
        counts = words.excluded_summary([e.reason for e in excluded])
        few = "".join(f"<li>{count}: {html.escape(reason)}</li>" for reason, count in counts[:_FOLD])
        more = f"<li>and {len(counts) - _FOLD} other reasons</li>" if len(counts) > _FOLD else ""
        fold = "" if len(excluded) > _FOLD else " open"
        parts.append(f"<p>{len(excluded)} rows were excluded:</p><ul>{few}{more}</ul>")
        parts.append(f"<details{fold}><summary>Excluded rows</summary>{tables.excluded(analysis)}</details>")
    parts.append(f"<details><summary>All {len(analysis.table)} runs</summary>{tables.runs(analysis)}</details>")
    return "\n".join(parts)
