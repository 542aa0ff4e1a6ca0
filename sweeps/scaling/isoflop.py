"""Approach 2 of Hoffmann et al. 2022 (arXiv 2203.15556, section 3.2): IsoFLOP parabolas, then log-log lines.

Per budget C, loss is a parabola in ln N (and in ln D) near its lowest point; the vertex is N*(C) (and D*(C)).
Over budgets, N* = k_N C^a and D* = k_D C^b by ordinary least squares in logs, and the loss at the vertex is a law in C.

Known bias: the parabola is symmetric and the true curve is not, so wide or off-centre grids shift the vertex
("Problems with Chinchilla Approach 2", Open Athena). Fewer points near the minimum mean less bias and more noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sweeps.scaling.laws import LossLaw, PowerLine, fit_loss_law, fit_power_line
from sweeps.scaling.table import Array, FitError, RunTable

NEAREST = 5  # 4 miss N* by 1.3 to 2 times as much, more have more bias: docs/scaling.md
MIN_POINTS = 3
ONE_LOSS = 1e-9  # losses that differ by less than this share have no lowest one
NOTHING = (float("nan"), float("nan"), float("nan"))  # coefficients of a curve that has no parabola


@dataclass(frozen=True)
class Minimum:
    """One budget's IsoFLOP curve.

    Attributes:
        budget: FLOPs.
        n_opt, d_opt: vertex in parameters and tokens; NaN when refused.
        loss: loss at the vertex in ln N, nats per token; NaN when refused.
        coefficients: (q2, q1, q0) of loss = q2 x^2 + q1 x + q0 with x = ln N - x_mean.
        x_mean: centre of x.
        rows: indices into the table of the points the parabola used.
        reason: why the curve was refused, empty when it was not.
    """

    budget: float
    n_opt: float
    d_opt: float
    loss: float
    coefficients: tuple[float, float, float]
    x_mean: float
    rows: tuple[int, ...]
    reason: str = ""

    @property
    def ok(self) -> bool:
        return not self.reason

    def at(self, n_params: Array) -> Array:
        """Parabola's loss at N, [...] -> [...]."""
        x = np.log(n_params) - self.x_mean
        q2, q1, q0 = self.coefficients
        return (q2 * x + q1) * x + q0


@dataclass(frozen=True)
class LineFit:
    """Lines through the minima of budgets: what approaches 1 and 2 end in.

    Attributes:
        minima: one per budget, ascending, refused ones included with their reasons.
        n_line, d_line: N* and D* against C; exponents are a and b.
        loss_law: loss at the optimum against C.
        curvature: mean of q2 / loss over the budgets' parabolas: relative loss per (ln N - ln N*)^2.
    """

    minima: tuple[Minimum, ...]
    n_line: PowerLine
    d_line: PowerLine
    loss_law: LossLaw
    curvature: float

    @property
    def a(self) -> float:
        """Exponent of N* in C."""
        return self.n_line.exponent

    @property
    def b(self) -> float:
        """Exponent of D* in C."""
        return self.d_line.exponent

    @property
    def e(self) -> float:
        """Irreducible loss of the loss law, nats per token; 0 where it has none."""
        return self.loss_law.e

    @property
    def flags(self) -> tuple[str, ...]:
        """What limits the fit, in words."""
        refused = [f"{m.budget:.3g} FLOPs refused: {m.reason}" for m in self.minima if not m.ok]
        if len([m for m in self.minima if m.ok]) < 3:
            refused.append("2 minima: the exponent has no residual to judge it by")
        return tuple(refused)

    @property
    def parameters(self) -> dict[str, float | str]:
        """The fit's constants, for reports."""
        return {
            "k_n": float(np.exp(self.n_line.log_coefficient)),
            "k_d": float(np.exp(self.d_line.log_coefficient)),
            "loss_gamma": self.loss_law.gamma,
            "loss_form": self.loss_law.form,
        }

    def n_opt(self, c_flops: float) -> float:
        """N*, parameters."""
        return float(self.n_line(np.float64(c_flops)))

    def d_opt(self, c_flops: float) -> float:
        """D*, tokens."""
        return float(self.d_line(np.float64(c_flops)))

    def loss_opt(self, c_flops: float) -> float:
        """Loss at the optimum, nats per token."""
        return float(self.loss_law(np.float64(c_flops)))

    def loss_at(self, n_params: float, d_tokens: float, c_flops: float) -> float:
        """Loss of a shape off the optimum: law at C times 1 + curvature (ln N - ln N*)^2. D follows from N and C."""
        distance = np.log(n_params) - np.log(self.n_opt(c_flops))
        return self.loss_opt(c_flops) * (1 + self.curvature * float(distance) ** 2)


@dataclass(frozen=True)
class IsoFlopFit(LineFit):
    """Approach 2 by parabolas. near: points nearest the minimum each parabola used; None means all."""

    near: int | None

    @property
    def parameters(self) -> dict[str, float | str]:
        """The fit's constants, for reports."""
        return super().parameters | {"curvature": self.curvature}


def fit_isoflop(table: RunTable, near: int | None = NEAREST, loss_form: str = "auto") -> IsoFlopFit:
    """Fits approach 2.

    Args:
        near: points nearest (in ln N) to the lowest one that each parabola uses; None uses all of the budget.
            4 was best on small ragged grids; use all on clean grids of many points, to compare with publications.
        loss_form: `power`, `saturating` or `auto`, see `laws.fit_loss_law`.

    Raises:
        FitError: fewer than two budgets have an acceptable minimum; the message gives each refusal.
    """
    minima = tuple(_fit_budget(table, budget, near) for budget in table.budgets)
    good = [m for m in minima if m.ok]
    if len(good) < 2:
        why = refusals(minima) or "no other budgets"
        raise FitError(f"isoflop needs minima at 2 budgets or more, {len(good)} found ({why})")
    return lines_through(good, minima, near, loss_form)


def lines_through(good: list[Minimum], minima: tuple[Minimum, ...], near: int | None, loss_form: str) -> IsoFlopFit:
    """Log-log lines through accepted minima."""
    c = np.array([m.budget for m in good])
    loss = np.array([m.loss for m in good])
    return IsoFlopFit(
        minima=minima,
        n_line=fit_power_line(c, np.array([m.n_opt for m in good])),
        d_line=fit_power_line(c, np.array([m.d_opt for m in good])),
        loss_law=fit_loss_law(c, loss, loss_form),
        curvature=float(np.mean([m.coefficients[0] / m.loss for m in good])),
        near=near,
    )


def _fit_budget(table: RunTable, budget: float, near: int | None) -> Minimum:
    rows = np.flatnonzero(np.isclose(table.budget, budget, rtol=1e-9))
    log_n, log_d, loss = np.log(table.n[rows]), np.log(table.d[rows]), table.loss[rows]
    return fit_curve(float(budget), rows, log_n, log_d, loss, near)


def nearest_to_lowest(x: Array, y: Array, near: int | None) -> np.ndarray:
    """Indices of the points to fit: `near` distinct x nearest to the x with the lowest mean y; None takes all.

    Where two are as far as each other both are in, or rounding would choose between them. Repeats at one x (seeds)
    count once, so that three seeds of one size are not three points of a curve.
    """
    values, inverse = np.unique(np.round(x, 9), return_inverse=True)
    if near is None or len(values) <= near:
        return np.arange(len(x))
    mean = np.bincount(inverse, weights=y) / np.bincount(inverse)
    distance = np.round(np.abs(values - values[np.argmin(mean)]), 6)
    return np.flatnonzero(distance[inverse] <= np.sort(distance)[near - 1])


def fit_curve(budget: float, rows: np.ndarray, log_n: Array, log_d: Array, loss: Array, near: int | None) -> Minimum:
    """One budget's parabola in ln N and in ln D.

    Args:
        rows: [points] int, the points' indices in the table.
        log_n, log_d, loss: [points] fp64.

    Returns:
        A `Minimum`, refused (with its reason) when it has fewer than 3 sizes, opens downwards or is flat, or has
        its vertex outside the sizes that were run.
    """
    use = nearest_to_lowest(log_n, loss, near)
    used = tuple(int(r) for r in rows[use])
    sizes = np.unique(np.round(log_n[use], 9))
    x_mean = float(log_n[use].mean())
    if len(sizes) < MIN_POINTS:
        reason = f"{len(sizes)} sizes, a parabola needs {MIN_POINTS}"
        return Minimum(budget, np.nan, np.nan, np.nan, NOTHING, x_mean, used, reason)
    if np.ptp(loss[use]) <= ONE_LOSS * loss[use].min():
        return Minimum(
            budget, np.nan, np.nan, np.nan, NOTHING, x_mean, used, "all sizes have one loss; check its column"
        )
    coefficients, log_n_opt, loss_opt, reason = _vertex(log_n[use], loss[use], log_n, "N")
    log_d_opt = np.nan
    if not reason:
        _, log_d_opt, _, reason = _vertex(log_d[use], loss[use], log_d, "D")
    if reason:
        return Minimum(budget, np.nan, np.nan, np.nan, coefficients, x_mean, used, reason)
    return Minimum(budget, float(np.exp(log_n_opt)), float(np.exp(log_d_opt)), loss_opt, coefficients, x_mean, used)


def refusals(minima: Sequence[Minimum]) -> str:
    """Each kind of refusal with the first two budgets it met; empty where none was refused."""
    kinds: dict[str, list[str]] = {}
    for m in minima:
        if not m.ok:
            kinds.setdefault(m.reason.partition("(")[0], []).append(f"{m.budget:.3g} FLOPs: {m.reason}")
    told = [
        line
        for lines in kinds.values()
        for line in (*lines[:2], *([f"{len(lines) - 2} more alike"] if lines[2:] else []))
    ]
    return "; ".join(told)


def _vertex(x: Array, y: Array, grid: Array, name: str) -> tuple[tuple[float, float, float], float, float, str]:
    """Least-squares parabola of y over x: coefficients around mean(x), vertex x, vertex y, reason to refuse."""
    mean = x.mean()
    centred = x - mean
    basis = np.stack([centred**2, centred, np.ones_like(x)], axis=1)
    solution = np.linalg.lstsq(basis, y, rcond=None)[0]
    q2, q1, q0 = (float(q) for q in solution)
    if q2 <= 0:
        return (q2, q1, q0), np.nan, np.nan, f"the parabola in ln {name} opens downwards"
    vertex = float(mean - q1 / (2 * q2))
    low, high = float(grid.min()), float(grid.max())
    if not low < vertex < high:
        side = "below" if vertex <= low else "above"
        more = "smaller" if side == "below" else "larger"
        reason = (
            f"the minimum in {name} lies {side} the grid ({np.exp(low):.3g} to {np.exp(high):.3g}); add {more} {name}"
        )
        return (q2, q1, q0), np.nan, np.nan, reason
    lowest = q0 - q1**2 / (4 * q2)
    if lowest <= 0:
        return (q2, q1, q0), np.nan, np.nan, f"the parabola in ln {name} has its minimum at a loss of {lowest:.3g}"
    return (q2, q1, q0), vertex, lowest, ""
