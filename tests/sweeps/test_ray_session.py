"""A Ray that does not start: tried again, then told in one line."""

from __future__ import annotations

import pytest
import ray

from lm.errors import ConfigError
from sweeps.config import Resources
from sweeps.ray_session import ray_session


def test_a_busy_machine_gets_more_attempts_and_one_line(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    attempts = []

    def init(**options: object) -> None:
        attempts.append(options["num_cpus"])
        raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    too_busy = pytest.raises(ConfigError, match="Ray did not start on this machine: it is too busy")
    with too_busy as caught, ray_session(2, Resources()):
        raise AssertionError("there is no Ray")
    assert attempts == [2] * 5 and "\n" not in str(caught.value)
    assert "attempt 5 of 5" in capsys.readouterr().err


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        raise Exception("something else")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(Exception, match="something else"), ray_session(2, Resources()):
        raise AssertionError("there is no Ray")
