"""Learning rate and batch size as power laws of N and D, judged by regret.

At each (N, D) with a grid of learning rates (and batch sizes), the runs within .25% of that grid's lowest loss are all
as good as optimal: noise decides which is lowest. ln lr and ln batch of those runs are fitted by least squares to
1, ln N and ln D (the form of Li et al. 2025, Step Law, arXiv 2503.04715, who take D alone for the batch).

Constants of such laws trade off against each other, so a law is judged by its regret: how much more loss than the
lowest its nearest grid point has, at an (N, D) that was left out of the fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sweeps.scaling.bootstrap import Interval, interval
from sweeps.scaling.table import Array, FitError, RunTable, group_logs

NEAR = 0.0025
MIN_RATES, MIN_GRIDS = 3, 2
# From this many (N, D) on, whole grids are resampled as well as the runs in them.
RESAMPLED_GRIDS = 8

Law = Callable[[float, float], float]


@dataclass(frozen=True)
class Regret:
    """A law's loss at one (N, D), by the nearest point of its grid, over the lowest there, less 1."""

    n_params: float
    d_tokens: float
    lr: float
    batch_tokens: float
    regret: float


@dataclass(frozen=True)
class HyperparameterLaws:
    """ln lr and ln batch as c0 + c1 ln N + c2 ln D.

    Attributes:
        lr_law, batch_law: [3] fp64; c1 or c2 is 0 where N or D does not vary; NaN without a batch column.
        lr_draws, batch_draws: [k, 3] fp64, bootstrap.
        scheme: what was resampled.
        regrets: one per (N, D) that the others can predict, each left out of its own fit.
        grids: (N, D) fitted. flags: what limits the laws, in words.
    """

    lr_law: Array
    batch_law: Array
    lr_draws: Array
    batch_draws: Array
    scheme: str
    regrets: tuple[Regret, ...]
    grids: tuple[tuple[float, float], ...]
    flags: tuple[str, ...]

    def lr(self, n_params: float, d_tokens: float) -> float:
        """Peak learning rate at (N, D)."""
        return float(_evaluate(self.lr_law, n_params, d_tokens))

    def batch_tokens(self, n_params: float, d_tokens: float) -> float:
        """Global batch at (N, D), tokens; NaN without a batch column."""
        return float(_evaluate(self.batch_law, n_params, d_tokens))

    def lr_interval(self, n_params: float, d_tokens: float) -> Interval:
        """95% interval of `lr`."""
        return interval(_evaluate(self.lr_draws, n_params, d_tokens))

    def batch_interval(self, n_params: float, d_tokens: float) -> Interval:
        """95% interval of `batch_tokens`."""
        return interval(_evaluate(self.batch_draws, n_params, d_tokens))

    @property
    def mean_regret(self) -> float:
        """Mean of the left-out regrets; NaN when there are none."""
        return float(np.mean([r.regret for r in self.regrets])) if self.regrets else float("nan")

    @property
    def largest_regret(self) -> float:
        """Largest left-out regret; NaN when there are none."""
        return max((r.regret for r in self.regrets), default=float("nan"))


@dataclass(frozen=True)
class _Grids:
    """Rows with a learning rate. group: [rows] int, number of the (N, D); design: [rows, 3]; logs: [rows] each."""

    group: np.ndarray
    count: int
    design: Array
    log_lr: Array
    log_batch: Array
    loss: Array
    clusters: np.ndarray


def _evaluate(law: Array, n_params: float, d_tokens: float) -> Array:
    return np.exp(law @ np.array([1.0, np.log(n_params), np.log(d_tokens)]))


def fit_hyperparameters(table: RunTable, bootstrap: int = 1000, seed: int = 0) -> HyperparameterLaws:
    """Fits both laws.

    Args:
        table: runs with `lr` (and `batch_tokens`), several learning rates at each (N, D); N and D within 5% of a
            neighbour's are the same.
        bootstrap: replicates. Runs are resampled within each (N, D), all rows of a run together, and from 8 (N, D)
            on the (N, D) too.

    Raises:
        FitError: no learning rates, or fewer than 2 (N, D) with 3 learning rates or more.
    """
    grids, flags = _grids(table)
    ones = np.ones((1, len(grids.loss)))
    lr_law, batch_law = (law[0] for law in _fit(grids, ones))
    counts, scheme = _draw(grids, bootstrap, np.random.default_rng(seed))
    lr_draws, batch_draws = _fit(grids, counts)
    points = tuple(
        (float(np.exp(grids.design[grids.group == g, 1].mean())), float(np.exp(grids.design[grids.group == g, 2].mean())))
        for g in range(grids.count)
    )  # fmt: skip
    return HyperparameterLaws(
        lr_law, batch_law, lr_draws, batch_draws, scheme, tuple(_left_out(grids, points)), points, tuple(flags)
    )


def score_laws(table: RunTable, lr: Law, batch_tokens: Law) -> tuple[Regret, ...]:
    """Regret of given laws, lr(N, D) and batch(N, D) in tokens, at every (N, D) of a table."""
    grids, _ = _grids(table)
    found = []
    for g in range(grids.count):
        n, d = (float(np.exp(grids.design[grids.group == g, i].mean())) for i in (1, 2))
        found.append(_regret(grids, g, n, d, lr(n, d), batch_tokens(n, d)))
    return tuple(found)


def _grids(table: RunTable) -> tuple[_Grids, list[str]]:
    rows = table.where(np.isfinite(table.optional("lr")) & (table.optional("lr") > 0))
    if len(rows) == 0:
        raise FitError("no run has a learning rate; give its column with --columns.lr")
    pair = np.stack([group_logs(rows.n), group_logs(rows.d)], axis=1)
    _, group = np.unique(pair, axis=0, return_inverse=True)
    group = group.ravel()
    lr = rows.optional("lr")
    flags, keep = [], np.zeros(len(rows), dtype=bool)
    for g in np.unique(group):
        members = group == g
        rates = np.unique(np.round(np.log(lr[members]), 6))
        where = f"N {rows.n[members].mean():.3g}, D {rows.d[members].mean():.3g}"
        best = round(float(np.log(lr[members][rows.loss[members].argmin()])), 6)
        if len(rates) < MIN_RATES:
            flags.append(f"{where}: {len(rates)} learning rates, {MIN_RATES} are needed; left out")
            continue
        if best in (rates[0], rates[-1]):
            flags.append(f"{where}: the best learning rate is the {'lowest' if best == rates[0] else 'highest'} tried")
        keep |= members
    if len(np.unique(group[keep])) < MIN_GRIDS:
        raise FitError(
            f"learning-rate laws need {MIN_GRIDS} (N, D) or more with {MIN_RATES} learning rates each, got "
            f"{len(np.unique(group[keep]))}; sweep the rate at more sizes"
        )
    rows = rows.where(keep)
    design = np.stack([np.ones(len(rows)), np.log(rows.n), np.log(rows.d)], axis=1)
    numbers = np.unique(group[keep], return_inverse=True)[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        log_batch = np.log(rows.optional("batch_tokens"))
    return (
        _Grids(numbers, int(numbers.max()) + 1, design, np.log(rows.optional("lr")), log_batch, rows.loss, rows.clusters),
        flags,
    )  # fmt: skip


def _fit(grids: _Grids, counts: Array) -> tuple[Array, Array]:
    """Laws of replicates with given counts [k, rows] -> lr and batch coefficients, [k, 3] each.

    Least squares over the runs near each grid's lowest present loss; a direction that does not vary gets 0.
    """
    near = np.zeros_like(counts)
    for g in range(grids.count):
        members = np.flatnonzero(grids.group == g)
        present = np.where(counts[:, members] > 0, grids.loss[members], np.inf)
        lowest = present.min(axis=1, keepdims=True)
        near[:, members] = counts[:, members] * (present <= lowest * (1 + NEAR))
    return _least_squares(grids.design, grids.log_lr, near), _least_squares(grids.design, grids.log_batch, near)


def _least_squares(design: Array, target: Array, weights: Array) -> Array:
    """[k, 3] minimum-norm weighted solutions about the centre of the design; NaN where the target is."""
    if not np.isfinite(target).all():
        return np.full((len(weights), 3), np.nan)
    total = weights.sum(axis=1, keepdims=True)
    x = design[:, 1:]
    x_mean, y_mean = weights @ x / total, (weights @ target)[:, None] / total
    second = np.einsum("kr,ri,rj->kij", weights, x, x) - total[:, :, None] * x_mean[:, :, None] * x_mean[:, None, :]
    mixed = (weights * target) @ x - total * x_mean * y_mean
    slope = np.einsum("kij,kj->ki", np.linalg.pinv(second, rcond=1e-6, hermitian=True), mixed)
    return np.concatenate([y_mean - (slope * x_mean).sum(axis=1, keepdims=True), slope], axis=1)


def _draw(grids: _Grids, k: int, generator: np.random.Generator) -> tuple[Array, str]:
    """[k, rows] counts: runs within each (N, D), and the (N, D) themselves where there are enough."""
    counts = np.zeros((k, len(grids.loss)))
    whole = grids.count >= RESAMPLED_GRIDS
    times = generator.multinomial(grids.count, np.full(grids.count, 1 / grids.count), size=k) if whole else None
    for g in range(grids.count):
        members = np.flatnonzero(grids.group == g)
        names, number = np.unique(grids.clusters[members], return_inverse=True)
        drawn = generator.multinomial(len(names), np.full(len(names), 1 / len(names)), size=k)
        counts[:, members] = drawn[:, number] * (1 if times is None else times[:, g : g + 1])
    return counts, "runs and (N, D)" if whole else "runs within each (N, D)"


def _left_out(grids: _Grids, points: tuple[tuple[float, float], ...]) -> list[Regret]:
    """Each (N, D) predicted by the laws of the others, where they still span it."""
    found = []
    rank = np.linalg.matrix_rank(_centred(grids.design), tol=1e-6)
    for g, (n, d) in enumerate(points):
        rest = grids.group != g
        if np.linalg.matrix_rank(_centred(grids.design[rest]), tol=1e-6) < rank:
            continue
        lr_law, batch_law = (law[0] for law in _fit(grids, rest[None].astype(np.float64)))
        lr, batch = float(_evaluate(lr_law, n, d)), float(_evaluate(batch_law, n, d))
        found.append(_regret(grids, g, n, d, lr, batch))
    return found


def _centred(design: Array) -> Array:
    return design[:, 1:] - design[:, 1:].mean(axis=0)


def _regret(grids: _Grids, g: int, n_params: float, d_tokens: float, lr: float, batch_tokens: float) -> Regret:
    """At the grid point nearest in ln lr and ln batch (in ln lr alone without batches)."""
    members = np.flatnonzero(grids.group == g)
    distance = (grids.log_lr[members] - np.log(lr)) ** 2
    if np.isfinite(batch_tokens) and np.isfinite(grids.log_batch[members]).all():
        distance = distance + (grids.log_batch[members] - np.log(batch_tokens)) ** 2
    loss = grids.loss[members]
    return Regret(n_params, d_tokens, lr, batch_tokens, float(loss[distance.argmin()] / loss.min() - 1))
