"""What each rule rejects, what it learns from, and that a restart decides the same."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from lm.errors import ConfigError
from plugins.callbacks.spike_rules import Rule, make_rule

NAMES = ("robust", "ema", "sigma")
EACH = pytest.mark.parametrize("name", NAMES)


def noisy(n: int, seed: int = 0) -> np.ndarray:
    """[n, 2] gradient norms about 1 (log-normal) and losses about 3."""
    rng = np.random.default_rng(seed)
    return np.stack([np.exp(0.15 * rng.standard_normal(n)), 3 + 0.05 * rng.standard_normal(n)], axis=1)


def settled(name: str, n: int = 200, **options) -> Rule:
    rule = make_rule(name, **options)
    assert [rule.judge(*values) for values in noisy(n).tolist()] == [None] * n
    return rule


@EACH
def test_ordinary_steps_pass_and_spikes_do_not(name: str) -> None:
    rule = settled(name)
    loss, norm = rule.judge(1.0, 5.5), rule.judge(1e4, 3.0)
    assert loss.quantity == "loss" and loss.value == 5.5 and 3.2 < loss.limit < 4.0
    assert norm.quantity == "grad_norm" and norm.value == 1e4 and 1.5 < norm.limit < 7.0
    assert rule.judge(0.01, 0.1) is None  # nothing that falls is a spike


@EACH
def test_the_limits_are_those_of_the_formulas(name: str) -> None:
    values = noisy(200)
    rule = settled(name)
    for column, quantity in enumerate(("grad_norm", "loss")):
        series = values[:, column]
        last = series[-128:]
        if name == "robust":
            median = np.median(last)
            wanted = median + 8 * max(1.4826 * np.median(np.abs(last - median)), (0.1, 0.02)[column] * median)
        elif name == "sigma":
            wanted = last.mean() + 6 * max(last.std(), (0.1, 0.02)[column] * last.mean())
        else:
            average = series[0]
            for value in series[1:]:
                average += 2 / 33 * (value - average)
            wanted = 6 * average if quantity == "grad_norm" else average + 0.5
        assert rule.limits()[quantity] == pytest.approx(wanted, rel=1e-9)


@EACH
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_rejected_at_once_and_blinds_nothing(name: str, bad: float) -> None:
    fresh = make_rule(name)
    assert str(fresh.judge(bad, 3.0)) == f"grad_norm is {bad}" and str(fresh.judge(1.0, bad)) == f"loss is {bad}"
    assert fresh.state_dict() == make_rule(name).state_dict()
    rule = settled(name)
    before = rule.limits()
    for _ in range(100):
        assert rule.judge(bad, bad) is not None
    assert rule.limits() == before
    assert rule.judge(1.0, 3.0) is None and rule.judge(1.0, 6.0) is not None


@EACH
def test_rejected_values_never_enter(name: str) -> None:
    rule = settled(name)
    state = json.dumps(rule.state_dict())
    for _ in range(300):  # more than any window holds
        assert rule.judge(50.0, 9.0) is not None
    assert json.dumps(rule.state_dict()) == state


@EACH
@pytest.mark.parametrize("factor", [10.0, 0.1])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_a_slow_drift_never_triggers(name: str, factor: float, noise: float) -> None:
    """Norm and loss go to ten times or a tenth of what they were within 4,000 steps; the loss lies between 1 and 10."""
    rule, rng = make_rule(name), np.random.default_rng(1)
    for step in range(5000):
        level = factor ** min(step / 4000, 1.0)
        norm = level * math.exp(0.15 * noise * rng.standard_normal())
        loss = level * max(1.0, 1 / factor) * (1 + 0.005 * noise * rng.standard_normal())
        assert rule.judge(norm, loss) is None, step


@EACH
def test_a_constant_window_does_not_trigger_on_noise(name: str) -> None:
    rule, rng = make_rule(name), np.random.default_rng(2)
    for _ in range(300):
        assert rule.judge(1.0, 3.0) is None
    for noise in rng.standard_normal((300, 2)).tolist():
        assert rule.judge(1 + 0.05 * noise[0], 3 + 0.03 * noise[1]) is None
    assert rule.judge(20.0, 3.0) is not None and rule.judge(1.0, 4.5) is not None


def test_outliers_that_were_accepted_move_the_robust_limit_least() -> None:
    """A quarter of the window at 3 times the level: the median rule still rejects 10 times, 6 sigma does not."""
    limits = {}
    for name in ("robust", "sigma"):
        rule = make_rule(name, warmup=128)
        for step in range(128):
            rule.judge(3.0 if step % 4 == 0 else 1.0 + 0.01 * (step % 3), 3.0)
        limits[name] = rule.limits()["grad_norm"]
    assert limits["robust"] < 2 < 6 < limits["sigma"]


@EACH
def test_the_warmup_accepts_what_is_finite(name: str) -> None:
    rule = make_rule(name)
    assert rule.warmup == {"robust": 32, "ema": 100, "sigma": 64}[name]
    for step in range(rule.warmup):
        assert rule.limits() == {} and rule.judge(1.0 + step % 2, 3.0) is None
    assert rule.judge(1e3, 3.0) is not None
    rule.reset()
    assert rule.limits() == {} and rule.judge(1e3, 3.0) is None


@EACH
def test_a_restart_decides_the_same_bit_for_bit(name: str) -> None:
    rule, again = settled(name), make_rule(name)
    again.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    assert again.limits() == rule.limits()  # guarded at once
    for norm, loss in (noisy(150, 3) * [[1.5, 1.05]]).tolist():
        assert again.judge(norm, loss) == rule.judge(norm, loss)
        assert again.limits() == rule.limits()


@pytest.mark.parametrize(
    "options", [{"name": "median"}, {"name": "robust", "window": 1}, {"name": "ema", "threshold": 0.0}]
)
def test_bad_settings_are_one_line(options: dict) -> None:
    with pytest.raises(ConfigError, match=r"^spike_guard: [^\n]+$"):
        make_rule(**options)
