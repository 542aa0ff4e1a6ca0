"""L(N, D) = E + A / N^alpha + B / D^beta as a model that answers questions about budgets, and known surfaces.

The known surfaces are what coverage and bias are measured on: a fit of runs simulated on them has a right answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar

from sweeps.scaling.optimum import ByOptimum, FlopRule, optimum
from sweeps.scaling.parametric import ParametricFit
from sweeps.scaling.table import Array


@dataclass(frozen=True)
class Surface(ByOptimum):
    """A parametric fit with its FLOP rule, so that it answers questions about budgets.

    Attributes:
        left_out: why some of the table's runs were not fitted; empty when all were.
    """

    fit: ParametricFit
    rule: FlopRule
    left_out: str = ""

    @property
    def a(self) -> float:
        """Exponent of N* in C."""
        return self.fit.a

    @property
    def b(self) -> float:
        """Exponent of D* in C."""
        return self.fit.b

    @property
    def e(self) -> float:
        """Irreducible loss, nats per token."""
        return self.fit.e

    @property
    def flags(self) -> tuple[str, ...]:
        """What limits the fit, in words."""
        return (*self.fit.flags, *([self.left_out] if self.left_out else []))

    @property
    def parameters(self) -> dict[str, float | str]:
        """The fit's constants, for reports."""
        fit = self.fit
        return {
            "A": fit.a_coef, "B": fit.b_coef, "E": fit.e, "alpha": fit.alpha, "beta": fit.beta,
            "objective": fit.objective, "gradient": fit.gradient,
        }  # fmt: skip

    def _optimum(self, c_flops: float) -> tuple[float, float, float]:
        n, d, loss = optimum(self.fit.theta[None], self.rule, c_flops)
        return float(n[0]), float(d[0]), float(loss[0])

    def loss_at(self, n_params: float, d_tokens: float, c_flops: float) -> float:
        """Loss of any shape, nats per token."""
        return float(self.fit.loss(n_params, d_tokens))


@dataclass(frozen=True)
class KnownSurface:
    """L = E + (A / N^alpha + B / D^beta)^gamma under C = 6 N D.

    With gamma = 1 it is the form approach 3 fits; any other gamma moves no optimum and is of no form that is fitted.
    """

    name: str
    e: float
    a_coef: float
    b_coef: float
    alpha: float
    beta: float
    gamma: float = 1.0

    @property
    def a(self) -> float:
        """Exponent of N* in C."""
        return self.beta / (self.alpha + self.beta)

    def loss(self, n_params: Array | float, d_tokens: Array | float) -> Array:
        """L(N, D) in nats per token."""
        reducible = self.a_coef * np.power(n_params, -self.alpha) + self.b_coef * np.power(d_tokens, -self.beta)
        return np.asarray(self.e + reducible**self.gamma)

    def n_opt(self, c_flops: Array | float) -> Array:
        """N* = G (C/6)^a, Hoffmann et al. 2022, equation 4."""
        g = (self.alpha * self.a_coef / (self.beta * self.b_coef)) ** (1 / (self.alpha + self.beta))
        return np.asarray(g * (np.asarray(c_flops) / 6) ** (self.beta / (self.alpha + self.beta)))

    def d_opt(self, c_flops: Array | float) -> Array:
        """D* = C / (6 N*)."""
        return np.asarray(np.asarray(c_flops) / 6 / self.n_opt(c_flops))


SURFACES = {
    surface.name: surface
    for surface in (
        KnownSurface("symmetric", 1.69, 406.4, 410.7, 0.31, 0.31),
        KnownSurface("chinchilla", 1.69, 406.4, 410.7, 0.34, 0.28),
        KnownSurface("ratio3", 1.69, 406.4, 410.7, 0.465, 0.155),
        KnownSurface("bent", 1.69, 406.4, 410.7, 0.34, 0.28, gamma=0.8),
    )
}


@dataclass(frozen=True)
class MistunedSurface(KnownSurface):
    """A surface whose runs have a learning rate that is right at one size only: loss (1 + penalty (ln N/tuned_at)^2).

    N* has no exponent then, and no form that is fitted holds.
    """

    tuned_at: float = 3e8
    penalty: float = 0.002

    @property
    def a(self) -> float:
        """NaN: ln N* is not straight in ln C."""
        return float("nan")

    def loss(self, n_params: Array | float, d_tokens: Array | float) -> Array:
        """L(N, D) in nats per token."""
        return super().loss(n_params, d_tokens) * (1 + self.penalty * np.log(np.divide(n_params, self.tuned_at)) ** 2)

    def n_opt(self, c_flops: Array | float) -> Array:
        """N* of each budget, found within 20 times of the tuned surface's."""
        return np.vectorize(self._n_opt)(c_flops)

    def _n_opt(self, c_flops: float) -> float:
        centre = float(np.log(super().n_opt(c_flops)))
        found = minimize_scalar(
            lambda x: float(self.loss(np.exp(x), c_flops / 6 / np.exp(x))), bounds=(centre - 3, centre + 3),
            method="bounded", options={"xatol": 1e-9},
        )  # fmt: skip
        return float(np.exp(found.x))


# What coverage is measured on: also surfaces of no form that is fitted.
WORLDS = SURFACES | {"mistuned": MistunedSurface("mistuned", 1.69, 406.4, 410.7, 0.34, 0.28)}
