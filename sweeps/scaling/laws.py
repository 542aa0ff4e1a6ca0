"""One-dimensional laws in compute: log-log lines, and the loss at the optimum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sweeps.scaling.table import Array, FitError

SATURATING_MIN_POINTS = 5
PROFILE_POINTS, PROFILE_ZOOMS = 60, 5


@dataclass(frozen=True)
class PowerLine:
    """y = exp(log_coefficient) x^exponent, fitted by ordinary least squares of ln y on ln x.

    Attributes:
        log_x: [points] fp64, ln x of the points fitted.
        residuals: [points] fp64, of ln y.
        variance: residual variance of ln y, points - 2 degrees of freedom; NaN with two points.
    """

    log_coefficient: float
    exponent: float
    log_x: Array
    residuals: Array
    variance: float

    def __call__(self, x: Array | np.float64) -> Array:
        return np.exp(self.log_coefficient + self.exponent * np.log(x))


def fit_power_line(x: Array, y: Array) -> PowerLine:
    """Log-log line, [points] fp64 each.

    Raises:
        FitError: fewer than two distinct x.
    """
    if len(np.unique(x)) < 2:
        raise FitError(f"a log-log line needs 2 distinct abscissae, got {len(np.unique(x))}")
    log_x, log_y = np.log(x), np.log(y)
    x_mean = float(log_x.mean())
    centred = log_x - x_mean
    exponent = float(centred @ log_y / (centred @ centred))
    residuals = log_y - log_y.mean() - exponent * centred
    dof = len(x) - 2
    variance = float(residuals @ residuals / dof) if dof > 0 else float("nan")
    return PowerLine(float(log_y.mean()) - exponent * x_mean, exponent, log_x, residuals, variance)


@dataclass(frozen=True)
class LossLaw:
    """L*(C) = e + exp(log_k) C^-gamma, nats per token.

    Attributes:
        form: `power` (e = 0) or `saturating`.
        e: irreducible loss of this law; 0 for `power`.
        reason: why the form was chosen.
    """

    form: str
    e: float
    log_k: float
    gamma: float
    reason: str

    def __call__(self, c_flops: Array | np.float64) -> Array:
        return self.e + np.exp(self.log_k - self.gamma * np.log(c_flops))


def fit_loss_law(c_flops: Array, loss: Array, form: str = "auto") -> LossLaw:
    """Loss at the optimum against compute, least squares of ln loss.

    Args:
        c_flops, loss: [budgets] fp64, at the minima.
        form: `power`; `saturating`; `auto` takes `saturating` only with 5 minima or more, an irreducible loss
            inside its bounds, and a smaller error when it predicts the last minimum from the others.

    Raises:
        FitError: `saturating` asked for with fewer than 4 minima, or its irreducible loss is at its bound.
        ValueError: unknown form.
    """
    if form == "power":
        return _power(c_flops, loss, "asked for")
    if form == "saturating":
        law = _saturating(c_flops, loss)
        if law is None:
            raise FitError("these minima do not identify an irreducible loss; use loss form power")
        return law
    if form != "auto":
        raise ValueError(f"unknown loss form {form!r}; choose power, saturating or auto")
    if len(c_flops) < SATURATING_MIN_POINTS:
        return _power(c_flops, loss, f"{len(c_flops)} minima cannot show an irreducible loss")
    law = _saturating(c_flops, loss)
    if law is None:
        return _power(c_flops, loss, "the irreducible loss is at its bound")
    order = np.argsort(c_flops)
    rest, last = order[:-1], order[-1]
    shorter = _saturating(c_flops[rest], loss[rest])
    if shorter is None:
        return _power(c_flops, loss, "without the last budget the irreducible loss is at its bound")
    straight = _power(c_flops[rest], loss[rest], "")
    error_saturating = abs(float(shorter(c_flops[last])) - loss[last])
    error_power = abs(float(straight(c_flops[last])) - loss[last])
    if error_saturating < error_power:
        return law
    return _power(c_flops, loss, "predicts the last budget better than a saturating law")


def _power(c_flops: Array, loss: Array, reason: str) -> LossLaw:
    line = fit_power_line(c_flops, loss)
    return LossLaw("power", 0.0, line.log_coefficient, -line.exponent, reason)


def _saturating(c_flops: Array, loss: Array) -> LossLaw | None:
    """Profile over e; None when the best e is at a bound (not identified) or there are fewer than 4 minima."""
    if len(c_flops) < 4:
        return None
    log_c = np.log(c_flops)
    low, high = 0.0, float(loss.min()) * 0.999
    for zoom in range(PROFILE_ZOOMS):
        grid = np.linspace(low, high, PROFILE_POINTS)
        misfit, log_k, slope = _profile(log_c, loss, grid)
        best = int(np.argmin(misfit))
        if zoom == 0 and best in (0, len(grid) - 1):
            return None
        low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)])
    if slope[best] >= 0:
        return None
    return LossLaw("saturating", float(grid[best]), float(log_k[best]), -float(slope[best]), "holds out best")


def _profile(log_c: Array, loss: Array, e: Array) -> tuple[Array, Array, Array]:
    """For each e [m]: squared misfit of ln loss, intercept and slope of ln(loss - e) on ln C, [m] each."""
    y = np.log(loss - e[:, None])
    x = log_c - log_c.mean()
    slope = y @ x / (x @ x)
    intercept = y.mean(axis=1)
    fitted = e[:, None] + np.exp(intercept[:, None] + slope[:, None] * x)
    misfit = ((np.log(loss) - np.log(fitted)) ** 2).sum(axis=1)
    return misfit, intercept - slope * log_c.mean(), slope


def saturating_laws(
    c_flops: Array, log_loss: Array, e: Array, log_k: Array, slope: Array
) -> tuple[Array, Array, Array]:
    """Saturating laws of many replicates at once.

    Args:
        c_flops: [budgets] fp64. log_loss: [k, budgets] fp64; NaN where a minimum was refused.
        e, log_k, slope: [k] fp64, the power laws that stay where a replicate shows no irreducible loss.

    Returns:
        e, ln k and -gamma, [k] each; NaN with fewer than 4 minima.
    """
    use = np.isfinite(log_loss)
    out = np.stack([e, log_k, slope])
    out[:, use.sum(axis=1) < 4] = np.nan
    rows = np.flatnonzero(use.sum(axis=1) >= 4)
    weight, y = use[rows], np.where(use[rows], log_loss[rows], 0.0)
    high = np.where(weight, np.exp(y), np.inf).min(axis=1) * 0.999
    low, largest, inside = np.zeros_like(high), high.copy(), np.ones(len(rows), dtype=bool)
    share = np.linspace(0, 1, PROFILE_POINTS)
    at = np.arange(len(rows))
    for zoom in range(PROFILE_ZOOMS if len(rows) else 0):
        grid = low[:, None] + (high - low)[:, None] * share
        misfit, intercept, gradient = _masked_profile(np.log(c_flops), y, weight, grid)
        best = misfit.argmin(axis=1)
        if zoom == 0:
            inside = (best > 0) & (best < PROFILE_POINTS - 1)
        found = np.stack([grid[at, best], intercept[at, best], gradient[at, best]])
        width = (high - low) / (PROFILE_POINTS - 1)
        low, high = np.maximum(found[0] - width, 0.0), np.minimum(found[0] + width, largest)
    if len(rows):
        inside &= found[2] < 0
        out[:, rows[inside]] = found[:, inside]
    return out[0], out[1], out[2]


def _masked_profile(log_c: Array, log_loss: Array, weight: Array, e: Array) -> tuple[Array, Array, Array]:
    """`_profile` per row with its own e [k, m] and points (weight [k, budgets], True or False): [k, m] each."""
    w = weight[:, None, :].astype(np.float64)
    count = w.sum(axis=2)
    x = log_c - ((weight * log_c).sum(axis=1) / count[:, 0])[:, None]
    x = x[:, None, :] * w
    y = np.where(weight[:, None, :], np.log(np.maximum(np.exp(log_loss)[:, None, :] - e[:, :, None], 1e-300)), 0.0)
    mean = y.sum(axis=2) / count
    slope = (x * y).sum(axis=2) / (x * x).sum(axis=2)
    fitted = e[:, :, None] + np.exp(mean[:, :, None] + slope[:, :, None] * x)
    misfit = (w * (log_loss[:, None, :] - np.log(fitted)) ** 2).sum(axis=2)
    centre = (weight * log_c).sum(axis=1) / count[:, 0]
    return misfit, mean - slope * centre[:, None], slope
