"""What an MLflow experiment holds beside the sweep's cells, as sections of the report: learning rates, forecasts."""

from __future__ import annotations

from collections.abc import Sequence

from sweeps.fit_report import FitReport
from sweeps.plots import Marker
from sweeps.report_page import Extras, Section


def extras_of(
    report: FitReport,
    experiment: str | None,
    title: str,
    first: tuple[Section, ...] = (),
    markers: Sequence[Marker] = (),
    tracking_uri: str | None = None,
) -> Extras:
    """Sections for a page on `report`.

    Args:
        experiment: MLflow experiment to look in; None for a CSV, which holds runs only.
        first: sections before the decision.
    """
    later: list[Section] = []
    return Extras(title, first, tuple(later), tuple(markers))
