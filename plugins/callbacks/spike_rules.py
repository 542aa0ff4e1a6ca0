"""When is a step a spike? Statistics of accepted steps and the limits they set. Standard library only.

A rule is asked before the optimizer applies a step and learns only from steps that were accepted: a rejected value, and
a value that is NaN or infinite, never enters. Both limits are upper limits: nothing that falls is a spike.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any

from lm.errors import ConfigError

QUANTITIES = ("grad_norm", "loss")
LONGEST_WINDOW = 1_000_000  # values of each quantity; all of them go into every checkpoint

# Least scale of a quantity as a share of its level: values that hardly vary must not make an ordinary step a spike.
_LEAST_SCALE = {"grad_norm": 0.1, "loss": 0.02}


@dataclass(frozen=True)
class Spike:
    """Why a step is rejected.

    Attributes:
        quantity: grad_norm or loss.
        value: of the step.
        limit: that it passed; None when the value is not finite.
    """

    quantity: str
    value: float
    limit: float | None

    def __str__(self) -> str:
        if self.limit is None:
            return f"{self.quantity} is {self.value}"
        return f"{self.quantity} {self.value:.4g} above the limit {self.limit:.4g}"


class Rule(ABC):
    """Limits on gradient norm and loss from the steps accepted so far.

    Args:
        window: steps that the statistics look back on.
        threshold: see the rule.
        warmup: accepted steps before the rule rejects anything that is finite.
    """

    name = ""
    window, threshold, warmup = 128, 8.0, 32  # defaults of the rule

    def __init__(self, window: int | None = None, threshold: float | None = None, warmup: int | None = None) -> None:
        self.window = self.window if window is None else window
        self.threshold = self.threshold if threshold is None else threshold
        self.warmup = min(self.warmup, self.window) if warmup is None else warmup
        if not 2 <= self.window <= LONGEST_WINDOW or not 0 < self.threshold < math.inf or self.warmup < 1:
            raise ConfigError(
                f"spike_guard: window must be from 2 to {LONGEST_WINDOW}, threshold positive and finite, warmup"
                f" 1 or more, got window {self.window}, threshold {self.threshold}, warmup {self.warmup}"
            )
        self.accepted = 0

    def judge(self, grad_norm: float, loss: float) -> Spike | None:
        """The reason to reject a step, or None, and then the step counts as accepted."""
        values = {"grad_norm": grad_norm, "loss": loss}
        for quantity, value in values.items():
            if not math.isfinite(value):
                return Spike(quantity, value, None)
        for quantity, limit in self.limits().items():
            if values[quantity] > limit:
                return Spike(quantity, values[quantity], limit)
        self.accepted += 1
        for quantity, value in values.items():
            self._learn(quantity, value)
        return None

    def limits(self) -> dict[str, float]:
        """Largest value of each quantity that is accepted now; empty during the warmup."""
        return {} if self.accepted < self.warmup else {quantity: self._limit(quantity) for quantity in QUANTITIES}

    def reset(self) -> None:
        """Forget everything: the data or the batch has just changed by plan."""
        self.accepted = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain values from which load_state_dict makes a rule that decides the same, bit for bit."""
        return {"rule": self.name, "accepted": self.accepted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.accepted = int(state["accepted"])

    @abstractmethod
    def _limit(self, quantity: str) -> float:
        """Largest value that is accepted."""

    @abstractmethod
    def _learn(self, quantity: str, value: float) -> None:
        """Take in an accepted value."""


class _Windowed(Rule):
    """Keeps the last `window` accepted values of each quantity."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.values = {quantity: deque[float](maxlen=self.window) for quantity in QUANTITIES}

    def _learn(self, quantity: str, value: float) -> None:
        self.values[quantity].append(value)

    def _above(self, quantity: str, level: float, scale: float) -> float:
        return level + self.threshold * max(scale, _LEAST_SCALE[quantity] * abs(level))

    def reset(self) -> None:
        super().reset()
        for values in self.values.values():
            values.clear()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "values": {quantity: list(values) for quantity, values in self.values.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for quantity, values in self.values.items():
            values.clear()
            values.extend(float(value) for value in state["values"][quantity])


class Robust(_Windowed):
    """Median + threshold x 1.4826 x MAD, over the last `window` accepted steps.

    1.4826 x the median absolute deviation estimates the standard deviation of a normal law and does not move when up to
    half of the values are outliers (Hampel 1974; Leys et al. 2013, doi 10.1016/j.jesp.2013.03.013). A level that drifts
    evenly stays 1.35 such units above its own median, whatever the drift.
    """

    name = "robust"

    def _limit(self, quantity: str) -> float:
        values = self.values[quantity]
        median = statistics.median(values)
        spread = statistics.median(abs(value - median) for value in values)
        return self._above(quantity, median, 1.4826 * spread)


class Sigma(_Windowed):
    """Mean + threshold x standard deviation over the last `window` accepted steps, once half of it is there.

    The rule of OLMo-core's SkipStepOptimizer (6 sigma over 128 steps), but for what may enter the window.
    """

    name = "sigma"
    window, threshold, warmup = 128, 6.0, 64

    def _limit(self, quantity: str) -> float:
        values = self.values[quantity]
        mean = math.fsum(values) / len(values)
        variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
        return self._above(quantity, mean, math.sqrt(variance))


class Ema(Rule):
    """Gradient norm above threshold x its moving average, or loss above its moving average + 0.5 nats.

    Exponential averages of accepted steps with weight 2 / (window + 1) on the newest.
    """

    name = "ema"
    window, threshold, warmup = 32, 6.0, 100
    loss_margin = 0.5

    def __init__(self, window: int | None = None, threshold: float | None = None, warmup: int | None = None) -> None:
        super().__init__(window, threshold, self.warmup if warmup is None else warmup)  # an average has no length
        self.averages: dict[str, float] = {}

    def _limit(self, quantity: str) -> float:
        average = self.averages[quantity]
        return self.threshold * average if quantity == "grad_norm" else average + self.loss_margin

    def _learn(self, quantity: str, value: float) -> None:
        average = self.averages.get(quantity, value)
        self.averages[quantity] = average + 2 / (self.window + 1) * (value - average)

    def reset(self) -> None:
        super().reset()
        self.averages = {}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "averages": dict(self.averages)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.averages = {quantity: float(value) for quantity, value in state["averages"].items()}


_RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Robust, Ema, Sigma)}


def make_rule(name: str, window: int | None = None, threshold: float | None = None, warmup: int | None = None) -> Rule:
    """The rule of that name; None leaves a value to the rule.

    Raises:
        ConfigError: no such rule, or a value it cannot have.
    """
    if name not in _RULES:
        raise ConfigError(f"spike_guard: rule {name!r} is unknown; take one of {', '.join(_RULES)}")
    return _RULES[name](window, threshold, warmup)
