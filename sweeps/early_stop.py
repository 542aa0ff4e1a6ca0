"""Early stopping of learning-rate trials: Ray Tune's ASHA inside each curve, and trials that can be ended by it.

Sound here and not for IsoFLOP cells: all rates of a curve train one model on the same tokens for the same number of
steps, so the losses of two at one step compare like with like, and the optimum comes from the runs that reached their
end. A stopped run is recorded as `stopped`, with its step, and is never a point of a parabola.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler

from plugins.loggers.sweep_ledger import STOPPED
from sweeps import report_loss
from sweeps.lr_grid import EarlyStop
from sweeps.report_loss import Channel
from sweeps.trial import CellTrial, cpu_seconds_now, prepare_thread, run_cell


class CurveASHA(FIFOScheduler):
    """An ASHAScheduler a curve: a wide model's losses must not stop a narrow one's trials.

    A trial that ASHA would stop goes on while fewer than `keep` of its curve were better at that step: ASHA alone would
    end each neighbour of the best rate as soon as the best is known.

    Args:
        settings: see EarlyStop.
        max_steps: of the longest trial.
    """

    def __init__(self, settings: EarlyStop, max_steps: int):
        super().__init__()
        self._settings = settings
        self._max_steps = max_steps
        self._asha: dict[str, ASHAScheduler] = {}
        self._losses: dict[str, dict[tuple[str, int], float]] = {}

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        curve = trial.config["spec"]["curve"]
        if curve not in self._asha:
            self._asha[curve] = ASHAScheduler(
                time_attr="step",
                metric="loss",
                mode="min",
                max_t=max(self._max_steps, self._settings.grace),
                grace_period=self._settings.grace,
                reduction_factor=self._settings.reduction,
                stop_last_trials=False,
            )
            self._losses[curve] = {}
        self._asha[curve].on_trial_add(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        if "step" not in result:
            return str(TrialScheduler.CONTINUE)
        curve = trial.config["spec"]["curve"]
        step, loss = result["step"], result["loss"]
        seen = self._losses[curve]
        seen[trial.trial_id, step] = loss
        action = self._asha[curve].on_trial_result(tune_controller, trial, result)
        better = sum(other < loss for (name, at), other in seen.items() if at == step and name != trial.trial_id)
        if action == TrialScheduler.STOP and better < self._settings.keep:
            return str(TrialScheduler.CONTINUE)
        return str(action)


class StoppableTrial(CellTrial):
    """A cell whose `step` comes back at each report, so that the scheduler can end it there."""

    _thread: threading.Thread | None = None
    _channel: Channel
    _result: dict[str, Any]

    def step(self) -> dict[str, Any]:
        if self._thread is None:
            self._start()
        else:
            self._channel.answer(stop=False)
        report = self._channel.reports.get()
        if not report:
            self._join()
            return {"done": True, **self._result}
        seconds = {"cpu_seconds": cpu_seconds_now() - self._cpu, "wall_seconds": time.perf_counter() - self._wall}
        error = f"stopped early at step {report['step']} of {report['steps']}"
        # What the driver writes down when the scheduler ends the trial here.
        return {"done": False, "status": STOPPED, "val_loss": math.nan, "error": error, **report, **seconds}

    def _start(self) -> None:
        self._cpu, self._wall = cpu_seconds_now(), time.perf_counter()
        self._channel = report_loss.current = Channel()
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        try:
            prepare_thread(self.spec)
            self._result = run_cell(self.spec)
        finally:
            self._channel.reports.put({})

    def _join(self) -> None:
        assert self._thread is not None
        self._thread.join()
        self._thread = report_loss.current = None

    def _end(self) -> None:
        if self._thread is not None:
            self._channel.answer(stop=True)
            self._join()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._end()
        return super().reset_config(new_config)

    def cleanup(self) -> None:
        self._end()


def stoppable(spec: dict[str, Any], settings: EarlyStop, curve: str) -> None:
    """Makes a cell's trial spec one of a StoppableTrial, and its cell a point of `curve`."""
    callback = {"class_path": "sweeps.report_loss.ReportLoss", "init_args": {"every": settings.every}}
    spec["recipe"]["trainer"]["callbacks"].append(callback)
    spec["curve"] = curve
