"""How large a model and how many tokens: a fitted surface L(N, D) = E + A / N^alpha + B / D^beta, read three ways."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm.errors import ConfigError

_NAMES = ("E", "A", "B", "alpha", "beta")


@dataclass(frozen=True)
class Surface:
    """Loss in nats a token of N parameters trained on D tokens (Hoffmann et al. 2022, arXiv 2203.15556, eq. 2).

    C = 6 N D throughout; what N counts is what the fit's N counted.
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for name in _NAMES:
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and 0 < value < math.inf):
                raise ConfigError(f"loss.{name} must be a positive number, got {value!r}")
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if not 1e-3 <= value <= 10:
                raise ConfigError(f"loss.{name} is an exponent, from 0.001 to 10, got {value!r}")
        for name in ("E", "A", "B"):
            value = getattr(self, name)
            if not 1e-12 <= value <= 1e30:
                raise ConfigError(f"loss.{name} must be from 1e-12 to 1e30, got {value!r}")

    def loss(self, n_params: float, tokens: float) -> float:
        """Nats a token."""
        return float(self.E + self.A / n_params**self.alpha + self.B / tokens**self.beta)

    def optimum(self, flops: float) -> tuple[float, float]:
        """(N, D) of the lowest loss at C = 6 N D: N = G (C/6)^(beta/(alpha+beta)),
        G = (alpha A / (beta B))^(1/(alpha+beta)) (eq. 4)."""
        total = self.alpha + self.beta
        g = (self.alpha * self.A / (self.beta * self.B)) ** (1 / total)
        n_params = g * (flops / 6) ** (self.beta / total)
        return n_params, flops / (6 * n_params)

    def tokens_for(self, loss: float, n_params: float) -> float:
        """D that reaches `loss` with N parameters; infinite where no D does."""
        rest = loss - self.E - self.A / n_params**self.alpha
        return math.inf if rest <= 0 else float((self.B / rest) ** (1 / self.beta))

    def inference_aware(self, loss: float, inference_tokens: float) -> tuple[float, float]:
        """(N, D) that reaches `loss` with the fewest FLOPs over training and serving, 6 N D + 2 N I.

        Sardana and Frankle 2023, arXiv 2401.00448, eq. 2, by golden-section search in ln N: the objective falls, then
        rises.

        Raises:
            ConfigError: a loss that no size reaches.
        """
        if loss <= self.E:
            raise ConfigError(f"target loss {loss:g} is not above the fit's floor E {self.E:g}: no model reaches it")

        def flops(log_n: float) -> float:
            n_params = math.exp(log_n)
            return 6 * n_params * self.tokens_for(loss, n_params) + 2 * n_params * inference_tokens

        smallest = math.log(self.A / (loss - self.E)) / self.alpha  # with infinite data
        low, high = smallest + 1e-9, smallest + 40
        ratio = (math.sqrt(5) - 1) / 2
        while high - low > 1e-10:
            step = ratio * (high - low)
            low, high = (low, low + step) if flops(high - step) < flops(low + step) else (high - step, high)
        n_params = math.exp((low + high) / 2)
        return n_params, self.tokens_for(loss, n_params)


HOFFMANN = Surface(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)


def surface_from(values: Any) -> Surface:
    """From {E, A, B, alpha, beta}, {fit: FILE} with what `sweeps.fit --json` wrote, or the word hoffmann.

    Raises:
        ConfigError: none of these, or a file without a parametric fit.
    """
    if values == "hoffmann":
        return HOFFMANN
    if not isinstance(values, dict):
        raise ConfigError(f"loss must be hoffmann, {{fit: FILE}} or {{E, A, B, alpha, beta}}, got {values!r}")
    if "fit" in values:
        return _from_file(str(values["fit"]), values.keys() - {"fit"})
    missing, unknown = [name for name in _NAMES if name not in values], sorted(values.keys() - set(_NAMES))
    if missing or unknown:
        wrong = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}, which is unknown"
        raise ConfigError(f"loss {wrong}; it takes fit: FILE, or {', '.join(_NAMES)}")
    return Surface(**values)


def _section(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _sections(value: Any) -> list[dict[str, Any]]:
    """The dictionaries in a dictionary; none in anything else."""
    return [part for part in _section(value).values() if isinstance(part, dict)]


def _from_file(path: str, others: set[str]) -> Surface:
    if others:
        raise ConfigError(f"loss has fit and {', '.join(sorted(others))}; give one of the two")
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"loss.fit {path}: cannot be read as JSON ({error})") from None
    for result in _sections(_section(found).get("results")):
        for constants in (result, *_sections(result)):
            if all(name in constants for name in _NAMES):
                return Surface(**{name: constants[name] for name in _NAMES})
    raise ConfigError(f"loss.fit {path} holds no parametric fit; run sweeps.fit --approach parametric --json {path}")
