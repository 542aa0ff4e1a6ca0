"""IsoFLOP parabolas of many replicates of one design at once: the same rules as `isoflop.fit_curve`, in arrays.

The points a parabola uses depend on which size has the lowest loss, so replicates are grouped by that size; inside a
group every parabola is one matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sweeps.scaling.isoflop import MIN_POINTS, nearest_to_lowest
from sweeps.scaling.table import Array

# Columns of a vertex.
LOG_N, LOG_D, LOG_LOSS, CURVATURE = range(4)


@dataclass(frozen=True)
class _Window:
    """Points used when one given size is the lowest; weights [3, points] give q2, q1, q0 in N; [2, points] in D."""

    use: np.ndarray
    weights_n: Array
    weights_d: Array
    n_mean: float
    d_mean: float


def vertices(log_n: Array, log_d: Array, losses: Array, near: int | None) -> Array:
    """Minima of one budget's replicates.

    Args:
        log_n, log_d: [points] fp64. losses: [k, points] fp64, nats per token.
        near: sizes nearest the lowest that each parabola uses; None takes all.

    Returns:
        [k, 4] fp64: ln N*, ln D*, ln loss, curvature (q2 / loss); NaN where a curve is refused.
    """
    out = np.full((len(losses), 4), np.nan)
    sizes, inverse = np.unique(np.round(log_n, 9), return_inverse=True)
    if len(sizes) < MIN_POINTS:
        return out
    member = (inverse == np.arange(len(sizes))[:, None]).astype(np.float64)
    mean = losses @ (member / member.sum(axis=1, keepdims=True)).T
    lowest = mean.argmin(axis=1)
    if near is None or len(sizes) <= near:
        lowest = np.zeros_like(lowest)
    for size in np.unique(lowest):
        at = np.flatnonzero(lowest == size)
        shape = np.where(inverse == size, 0.0, 1.0)
        window = _window(log_n, log_d, nearest_to_lowest(log_n, shape, near))
        out[at] = _parabolas(window, losses[at], (log_n.min(), log_n.max()), (log_d.min(), log_d.max()))
    return out


def _window(log_n: Array, log_d: Array, use: np.ndarray) -> _Window:
    inverses = []
    for x in (log_n[use], log_d[use]):
        centred = x - x.mean()
        inverses.append(np.linalg.pinv(np.stack([centred**2, centred, np.ones_like(x)], axis=1)))
    return _Window(use, inverses[0], inverses[1], float(log_n[use].mean()), float(log_d[use].mean()))


def _parabolas(w: _Window, losses: Array, n_range: tuple[float, float], d_range: tuple[float, float]) -> Array:
    y = losses[:, w.use]
    q2, q1, q0 = w.weights_n @ y.T
    p2, p1, _ = w.weights_d @ y.T
    with np.errstate(all="ignore"):
        log_n, log_d = w.n_mean - q1 / (2 * q2), w.d_mean - p1 / (2 * p2)
        loss = q0 - q1**2 / (4 * q2)
        inside = (log_n > n_range[0]) & (log_n < n_range[1]) & (log_d > d_range[0]) & (log_d < d_range[1])
        ok = (q2 > 0) & (p2 > 0) & inside & (loss > 0)
        found = np.stack([log_n, log_d, np.log(loss), q2 / loss], axis=1)
    return np.where(ok[:, None], found, np.nan)
