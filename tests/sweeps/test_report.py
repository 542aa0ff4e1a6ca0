"""The report as a page: the fit's own numbers, every part, nothing from outside."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sweeps import report_words
from sweeps.fit import fit_experiment
from sweeps.fit_report import FitReport, quantity
from sweeps.report import main
from sweeps.report_page import Extras, Section, page
from sweeps.scaling.decided import decided
from sweeps.scaling.table import Excluded, RunTable
from tests.sweeps.scaling_helpers import HOFFMANN, grid, surface

BUDGET = 1e21
VOID = {"meta", "img", "br", "path", "use", "link"}


class Balance(HTMLParser):
    """Tags that were opened and not closed, and every address the page points to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def fitted() -> FitReport:
    table = grid(surface(*HOFFMANN), noise=0.003, sizes=6)
    excluded = (Excluded("<b>bad & run</b>", "loss is NaN (diverged)"),)
    return fit_experiment(RunTable(table.runs, excluded, "6ND", "total"), budgets=[BUDGET], bootstrap=60)


@pytest.fixture(scope="module")
def html(fitted: FitReport) -> str:
    return page(fitted, Extras("A <title>", later=(Section("Later", "<p>later part</p>"),)))


def test_the_page_is_whole_and_points_nowhere(html: str) -> None:
    parsed = Balance()
    parsed.feed(html)
    assert parsed.open == []
    assert all(address.startswith(("#", "data:")) for address in parsed.addresses)
    assert "http" not in html and "@import" not in html and not re.search(r"url\((?!#)", html)
    assert html.count("<svg ") == 8 and len(html) < 3_000_000
    for used in re.findall(r'(?:href="|url\()#([\w-]+)', html):
        assert f'id="{used}"' in html
    assert "<b>bad & run</b>" not in html and "&lt;b&gt;bad &amp; run&lt;/b&gt;" in html
    assert "<title>A &lt;title&gt;</title>" in html and "later part" in html


def test_the_decision_is_the_fits_own(fitted: FitReport, html: str) -> None:
    decision = fitted.best.decisions[0]
    words = report_words.decision_sentence(fitted.analysis, 0)
    assert f"{quantity(decision.n_opt)} parameters" in words and fitted.best.approach in words
    assert words in html and fitted.analysis.verdict.replace("*", "*") in html
    (acted,) = decided(fitted.analysis)
    assert f"95%: {quantity(acted.n_interval.low)} to {quantity(acted.n_interval.high)}" in html
    for result in fitted.analysis.results.values():
        assert f"{result.a:.3f} ({result.a_interval.low:.3f} to {result.a_interval.high:.3f})" in html


def test_cautions_name_reach_and_width(fitted: FitReport) -> None:
    far = fit_experiment(fitted.analysis.table, budgets=[1e25], bootstrap=0, approach="parametric")
    cautions = report_words.cautions(far.analysis)
    assert any("times the largest budget measured" in line for line in cautions)
    assert not any("times the largest budget" in line for line in report_words.cautions(fitted.analysis))
    assert report_words.summary_class(far.analysis) == "warn"


def test_lines_that_differ_in_numbers_are_counted() -> None:
    lines = [f"{i}e+18 FLOPs refused: 1 sizes" for i in range(1, 9)]
    assert report_words.grouped([*lines, "else"]) == [*lines[:2], "… and 6 more like the line above", "else"]
    assert report_words.plain(1e30, 3) == "1e30"


def test_the_command_reads_a_csv(fitted: FitReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["N_params,D_tokens,loss,C_budget"]
    lines += [f"{r.n_params},{r.d_tokens},{r.loss},{r.budget}" for r in fitted.analysis.table.runs]
    (tmp_path / "runs.csv").write_text("\n".join(lines))
    out = tmp_path / "page.html"
    line = ["--runs", str(tmp_path / "runs.csv"), "--bootstrap", "0", "--approach", "parametric", "--out", str(out)]
    assert main([*line, "--budget", "1e21", "2e21"]) == 0
    assert "verdict: only parametric gave an answer" in capsys.readouterr().out
    assert out.read_text().count('class="tiles"') == 2
    assert main(["--out", str(out)]) == 2
    assert "give either --runs FILE.csv|mlflow:EXPERIMENT or --decision DIR" in capsys.readouterr().err


def test_a_late_forecast_is_never_called_good() -> None:
    from sweeps.forecast import Check
    from sweeps.outcome import outcome_section

    class Written:
        def text(self) -> str:
            return "3.2 [3.1, 3.3]"

    outcome = Check(measured=3.2, relative_error=0.0, inside=True, text="inside")
    in_time = outcome_section(Written(), outcome, {"val_loss": 3.2}).content  # type: ignore[arg-type]
    late = outcome_section(Written(), outcome, {"val_loss": 3.2}, late=True).content  # type: ignore[arg-type]
    assert 'class="box good"' in in_time and "before the run" in in_time
    assert 'class="box good"' not in late and "it is late, and not scored" in late
