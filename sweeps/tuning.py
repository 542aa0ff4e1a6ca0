"""Jobs as Ray Tune trials: one process a core, used again for job after job, progress on one line each."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from plugins.loggers.sweep_ledger import CELL, STOPPED, SweepLedger
from sweeps.config import SweepConfig
from sweeps.jobs import Job, JobQueue
from sweeps.kind import SweepKind
from sweeps.trial import CellTrial


def run_trials(
    ledger: SweepLedger,
    config: SweepConfig,
    jobs: Sequence[Job],
    parent_run_id: str,
    slots: int,
    done_before: int,
    kind: SweepKind,
) -> float:
    """Run jobs, as many at a time as Ray has room for.

    Args:
        slots: trials that have room at the same time.
        done_before: cells that were done already.

    Returns:
        Compute seconds of all trials: CPU seconds, or device seconds of trials on GPUs.

    Raises:
        KeyboardInterrupt: SIGINT arrived; trials were stopped.
    """
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(slots)  # a process without a staged trial would be ended
    from ray import tune

    queue = JobQueue.of(jobs, config.retries, config.max_failures)
    progress = Progress(ledger, parent_run_id, queue, done_before)
    resources: dict[str, float] = {"cpu": config.resources.trial_cpus}
    if config.resources.gpus:
        resources["gpu"] = config.resources.trial_gpus
    tuner = tune.Tuner(
        tune.with_resources(kind.trial or CellTrial, resources),
        tune_config=tune.TuneConfig(
            reuse_actors=True, trial_dirname_creator=lambda trial: str(trial.trial_id), search_alg=tune_searcher(queue),
            num_samples=-1, scheduler=kind.scheduler() if kind.scheduler else None,
        ),
        run_config=tune.RunConfig(
            name=f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
            storage_path=os.path.abspath(os.path.join(config.runs_dir, "ray")),
            verbose=0,
            callbacks=[tune_callback(progress)],
            # The queue starts a job again whose process died: Tune would not where it had not begun yet.
            failure_config=tune.FailureConfig(max_failures=0),
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
        ),
    )  # fmt: skip
    tuner.fit()
    if not queue.finished:  # Tune returns quietly after SIGINT
        raise KeyboardInterrupt
    return progress.gpu_seconds * config.resources.trial_gpus if config.resources.gpus else progress.cpu_seconds


def tune_searcher(queue: JobQueue) -> Any:
    """A Ray Tune search algorithm that suggests what the queue has ready."""
    from ray.tune.search import Searcher

    class Next(Searcher):
        def suggest(self, trial_id: str) -> Any:
            if queue.finished:
                return Searcher.FINISHED
            job = queue.next()
            if job is None:
                return None
            if job.spec.get("branch"):
                job.spec["branch"]["trunk_status"] = queue.status_before(job)
            return {"spec": job.spec}

        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            """The callback tells the queue: it has the error's text as well."""

        def save_to_dir(self, checkpoint_dir: str, session_str: str = "default") -> None:
            """MLflow holds what is done."""

        def __getstate__(self) -> dict[str, Any]:
            return {}

    return Next()


class Progress:
    """Tells the queue what ended, counts finished cells, and prints one line for each job."""

    def __init__(self, ledger: SweepLedger, parent_run_id: str, queue: JobQueue, done_before: int):
        self.ledger = ledger
        self.parent_run_id = parent_run_id
        self.queue = queue
        self.done = done_before
        self.total = done_before + sum(job.spec["kind"] == CELL for job in queue.jobs.values())
        self.cpu_seconds = self.gpu_seconds = 0.0
        self._done_cost = 0.0
        self._started = time.monotonic()

    def finished(self, spec: dict[str, Any], result: dict[str, Any]) -> None:
        """A trial came to its end; result is what run_spec returned."""
        self.cpu_seconds += result["cpu_seconds"]
        self.gpu_seconds += result["wall_seconds"]
        text = result["status"]
        if text == STOPPED and result["run_id"]:  # its own worker may be ended before it can say so
            self.ledger.stop_cell(result["run_id"], result["step"], result["error"])
        if text == "complete" and spec["kind"] == CELL:
            text = f"loss {result['val_loss']:.4f}"
        elif result["error"]:
            text += ": " + result["error"].splitlines()[-1]
        self._line(spec, self.queue.ended(spec["cell_id"], result), f"{text}  {result['wall_seconds']:.0f} s")

    def died(self, spec: dict[str, Any], error: str) -> None:
        """A trial's process or node died."""
        reason = error.strip().splitlines()[-1] if error.strip() else "no reason known"
        text = f"its process or node died ({reason})"
        over = self.queue.died(spec["cell_id"])
        if over:
            self.ledger.fail_cell(
                self.parent_run_id, spec["cell_id"], spec["label"], f"{error}\n{text}".strip(), kind=spec["kind"]
            )
        self._line(spec, over, text)

    def _line(self, spec: dict[str, Any], over: bool, text: str) -> None:
        if not over:
            print(f"[{self.done}/{self.total}] {spec['label']:<14} {text}; it is started again", flush=True)
            return
        self.done += spec["kind"] == CELL
        self._done_cost += self.queue.jobs[spec["cell_id"]].cost
        elapsed = time.monotonic() - self._started
        left = elapsed * (sum(job.cost for job in self.queue.jobs.values()) / self._done_cost - 1)
        print(f"[{self.done}/{self.total}] {spec['label']:<14} {text}  ~{left:.0f} s left", flush=True)


def tune_callback(progress: Progress) -> Any:
    """A Ray Tune callback that tells `progress`."""
    from ray import tune

    class Report(tune.Callback):
        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            progress.finished(trial.config["spec"], trial.last_result)

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            error = str(trial.get_error() or "") if hasattr(trial, "get_error") else ""
            progress.died(trial.config["spec"], error)

    return Report()
