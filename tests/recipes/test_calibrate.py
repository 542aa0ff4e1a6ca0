"""A measured machine: rates are recovered from seconds, and a plan uses them. Nothing here is timed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from lm.errors import ConfigError
from lm.planner.devices import as_values, find_device
from lm.planner.plan import make_plan
from lm.planner.timing import work
from recipes.calibrate import FITTED, HELD_OUT, as_device, calibrate, fit_rates, predict
from recipes.plan_config import job_from

RATES = {
    "matmul_flops": 1e-11,
    "attention_flops": 2e-11,
    "activation_bytes": 3e-10,
    "parameters": 4e-9,
    "blocks": 5e-4,
    "steps": 1e-3,
}
PLAN: dict[str, Any] = {
    "model": {"vocab_size": 512, "d_model": 64, "n_layers": 2, "n_heads": 2},
    "tokens": 1e6,
    "sequence_length": 128,
    "global_batch_tokens": 2048,
    "precision": "32-true",
    "warmup_steps": 20,
}


def test_rates_are_recovered_from_seconds() -> None:
    done = [work(*shape) for shape in FITTED]
    found = fit_rates(done, [predict(RATES, row) for row in done])
    assert found == {name: pytest.approx(rate, rel=1e-5) for name, rate in RATES.items()}
    for shape in HELD_OUT:
        assert predict(found, work(*shape)) == pytest.approx(predict(RATES, work(*shape)), rel=1e-6)


def test_rates_are_not_negative_where_seconds_are_noisy() -> None:
    done = [work(*shape) for shape in FITTED]
    noisy = [predict(RATES, row) * (1.3 if i % 2 else 0.7) for i, row in enumerate(done)]
    assert min(fit_rates(done, noisy).values()) >= 0


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    device = dataclasses.replace(as_device(RATES), memory_gb=2.0)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"device": as_values(device)}))
    return path


def test_a_plan_takes_the_measured_machine(machine: Path) -> None:
    assert find_device(str(machine)).rates == RATES
    job = job_from({**PLAN, "cluster": {"device": str(machine), "devices": 1}})
    plan = make_plan(job)
    layout = plan["layout"]
    assert (layout["strategy"], layout["checkpointing"]) == ("single", "none")
    whole = predict(RATES, work(job.model, 16, 128))
    # micro-batches enter the blocks anew; all else adds up to the same
    again = (layout["accumulation"] - 1) * RATES["blocks"] * 2
    assert plan["step"]["seconds"] == pytest.approx(whole + again, rel=0.02)


def test_what_a_measured_machine_cannot_be(machine: Path) -> None:
    with pytest.raises(ConfigError, match="measured as one process on all cores; plan it with devices 1"):
        job_from({**PLAN, "cluster": {"device": str(machine), "devices": 2}})
    with pytest.raises(ConfigError, match="has no bf16; it has fp32"):
        job_from({**PLAN, "precision": "bf16-mixed", "cluster": {"device": str(machine), "devices": 1}})
    machine.write_text("{}")
    with pytest.raises(ConfigError, match="is no measured device"):
        job_from({**PLAN, "cluster": {"device": str(machine), "devices": 1}})
    with pytest.raises(ConfigError, match="--seconds must be above 0"):
        calibrate(machine, 0)
