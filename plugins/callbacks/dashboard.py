"""Metrics that tell why a run behaves as it does: every n steps, cheap, the same under every strategy."""

from __future__ import annotations

import math
import resource
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lm.errors import ConfigError
from lm.model import Llama
from lm.plan import flops_per_token
from lm.planner.devices import peak_tflops
from plugins.callbacks.forward_watch import ForwardWatch
from plugins.callbacks.stragglers import Stragglers
from plugins.callbacks.tally import Tally
from plugins.callbacks.update_watch import UpdateWatch, part_labels
from plugins.strategies import collectives

_LONGEST_HISTORY = 1_000_000  # values of each metric; all of them go into every checkpoint


class Dashboard(Callback):
    """Records the metrics of docs/dashboard.md after steps n, 2 n, ... and changes nothing of training.

    In between it keeps two numbers a step. A step that is looked at costs two exchanges of a few hundred numbers and
    one read by the host.

    Args:
        every_n_steps: n.
        score_every: attention scores are looked at in every so many windows of the global batch, the same ones under
            every layout; 1 for all.
        peak_tflops: dense peak of one device, for mfu; None knows common GPUs and leaves mfu out elsewhere.
        straggler_factor: a rank whose own work takes longer than so many times the median is slow.
        straggler_patience: times in a row until a slow rank is named on the console.
        history_length: newest values kept of each metric, in the checkpoint too.

    Attributes:
        history: newest (step, value) pairs of each metric, also of `loss` and `grad_norm` at the same steps; finite
            values only.
    """

    def __init__(
        self,
        every_n_steps: int = 10,
        score_every: int = 4,
        peak_tflops: float | None = None,
        straggler_factor: float = 1.3,
        straggler_patience: int = 3,
        history_length: int = 256,
    ):
        for name, value in (
            ("every_n_steps", every_n_steps),
            ("score_every", score_every),
            ("straggler_patience", straggler_patience),
            ("history_length", history_length),
        ):
            if value < 1:
                raise ConfigError(f"dashboard: {name} must be at least 1, got {value}")
        if history_length > _LONGEST_HISTORY:
            raise ConfigError(f"dashboard: history_length must be at most {_LONGEST_HISTORY}, got {history_length}")
        if not 1 < straggler_factor < math.inf or (peak_tflops is not None and not 0 < peak_tflops < math.inf):
            raise ConfigError("dashboard: straggler_factor must be above 1 and peak_tflops above 0, both finite")
        self.every_n_steps = every_n_steps
        self.score_every = score_every
        self.peak_tflops = peak_tflops
        self.history_length = history_length
        self.history: dict[str, deque[tuple[int, float]]] = {}
        self._stragglers = Stragglers(straggler_factor, straggler_patience)
        self._tally: Tally | None = None  # of the step that is looked at
        self._last_micro_batch = False
        self._steps = 0  # since the last one that was looked at, as the rest below
        self._skipped_before = 0
        self._clipped: Any = 0
        self._tokens = 0
        self._sequence_length = 0
        self._seconds = 0.0
        self._since: float | None = None
        self._step_ended: float | None = None
        self._data_seconds = 0.0

    # What lasts -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"history": {name: list(points) for name, points in self.history.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = {
            name: deque(((int(step), float(value)) for step, value in points), maxlen=self.history_length)
            for name, points in state_dict["history"].items()
        }

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        model = getattr(pl_module, "model", None)
        if not isinstance(model, Llama):
            raise ConfigError(f"dashboard needs a LightningModule whose model is a Llama, not {type(model).__name__}")
        strategy = trainer.strategy
        self._sources: list[str] = list(getattr(trainer.datamodule, "source_names", []))
        self._labels = part_labels(len(model.blocks))
        self._forward = ForwardWatch(model, len(self._sources))
        self._update = UpdateWatch(strategy, self._labels)
        self._hosts = collectives.gather(socket.gethostname())
        self._peak_flops = 1e12 * (self.peak_tflops or _device_peak(strategy.root_device))
        self._forget(trainer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._update.close()

    # A step ---------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        self._since = self._since or now
        accumulate = trainer.accumulate_grad_batches
        micro_batch = batch_idx % accumulate
        self._last_micro_batch = micro_batch + 1 == accumulate
        if micro_batch == 0 and (trainer.global_step + 1) % self.every_n_steps == 0:
            self._begin(trainer, now)
        if self._tally is not None:
            windows = batch["input_ids"].shape[0]
            first = (trainer.strategy.data_parallel[0] * accumulate + micro_batch) * windows
            rows = [row for row in range(windows) if (first + row) % self.score_every == 0]
            self._forward.install(batch, self._tally, rows)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._forward.remove()
        if self._tally is not None and self._last_micro_batch:
            self._update.see_gradients()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._tokens += batch["input_ids"].numel() - batch.get("padding", 0)
        self._sequence_length = batch["input_ids"].shape[1]
        if not self._last_micro_batch:
            return
        self._steps += 1
        strategy, clip = trainer.strategy, trainer.gradient_clip_val
        if clip:
            self._clipped = self._clipped + (strategy.grad_norm > clip)  # on the device: nobody waits for it
        if self._tally is not None:
            self._end(trainer, pl_module)
        self._step_ended = time.perf_counter()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._pause()
        self._step_ended = None

    def _begin(self, trainer: Any, now: float) -> None:
        """Look at the step that starts."""
        ranks = collectives.world_size()
        sums = {**self._forward.sums(), **self._update.sums(), "step_seconds": ranks, "work_seconds": ranks}
        self._tally = Tally(sums, {**self._forward.maxima(), "memory": 1}, trainer.strategy.root_device)
        self._update.tally = self._tally
        self._forward.take_seconds()
        self._data_seconds = 0.0 if self._step_ended is None else now - self._step_ended

    def _end(self, trainer: Any, pl_module: Any) -> None:
        """All that was seen, from all ranks, to the loggers."""
        tally, rank = self._tally, collectives.rank()
        assert tally is not None
        self._tally = self._update.tally = None
        tally["work_seconds"][rank] = self._data_seconds + self._forward.take_seconds()
        self._pause()
        tally["step_seconds"][rank] = self._seconds / self._steps
        tally["memory"][0] = _memory_bytes(trainer.strategy.root_device)
        sums = tally.reduced()
        values = {**self._model_values(sums), **self._step_values(trainer), **self._speed_values(trainer, sums)}
        for rank in self._stragglers.see(sums["work_seconds"]):
            self._name_straggler(rank, sums["work_seconds"], trainer.global_step)
        shared = {"loss": _ratio(sums["nll"][0], sums["tokens"][0]), "grad_norm": float(trainer.strategy.grad_norm)}
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        self._remember(trainer.global_step, {**values, **shared})
        record = getattr(pl_module, "record", None)
        if record is not None:
            record(values)
        self._forget(trainer)
        self._since = time.perf_counter()

    # Values ---------------------------------------------------------------------------------------------------------

    def _model_values(self, sums: dict[str, list[float]]) -> dict[str, float]:
        """What the forward pass, the gradients and the update say."""
        values: dict[str, float] = {}
        for name, nll, tokens in zip(self._sources, sums["source_nll"], sums["source_tokens"], strict=True):
            if tokens:
                values[f"loss/{name}"] = nll / tokens
        values["log_z"] = _ratio(sums["logsumexp"][0], sums["tokens"][0])
        count = sums["residual_count"][0]
        for label, squares in zip(self._labels, sums["residual"], strict=False):  # embedding, then the blocks
            values[f"residual_rms/{label}"] = _root(_ratio(squares, count))
        for label, largest in zip(self._labels[1:], sums["logit"], strict=False):
            values[f"attention_logit/{label}"] = largest
        for label, gradient, update, weight in zip(
            self._labels, sums["gradient"], sums["update"], sums["weight"], strict=True
        ):
            if label == "head" and not self._has_head():
                continue
            values[f"grad_norm/{label}"] = _root(gradient)
            values[f"update_ratio/{label}"] = _root(update / weight) if weight else 0.0  # a step that was skipped
        if sums["second_moment_count"][0]:
            mean = sums["second_moment"][0] / sums["second_moment_count"][0]
            values["eps_ratio"] = _ratio(sums["eps"][0] / sums["eps_count"][0], _root(mean))
        return values

    def _step_values(self, trainer: Any) -> dict[str, float]:
        """Shares of the steps since the last ones."""
        values = {"skipped_fraction": (trainer.strategy.skipped_steps - self._skipped_before) / self._steps}
        if trainer.gradient_clip_val:
            values["clipped_fraction"] = float(self._clipped) / self._steps
        return values

    def _speed_values(self, trainer: Any, sums: dict[str, list[float]]) -> dict[str, float]:
        values = {f"step_seconds/rank_{rank}": seconds for rank, seconds in enumerate(sums["step_seconds"])}
        if len(self._hosts) > 1:
            values.update({f"work_seconds/rank_{rank}": own for rank, own in enumerate(sums["work_seconds"])})
        values["memory_gb"] = sums["memory"][0] / 1e9
        if self._peak_flops:
            ranks = len(self._hosts)
            tokens_a_device = self._tokens * trainer.strategy.data_parallel[1] / ranks
            flops = tokens_a_device * flops_per_token(self._forward.model.config, self._sequence_length)
            seconds = sum(sums["step_seconds"]) / ranks * self._steps
            values["mfu"] = flops / seconds / self._peak_flops
        return values

    def _has_head(self) -> bool:
        return self._forward.model.head is not None

    # Helpers --------------------------------------------------------------------------------------------------------

    def _remember(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            points = self.history.setdefault(name, deque(maxlen=self.history_length))
            while points and points[-1][0] >= step:
                points.pop()  # of a branch that was rolled back
            if math.isfinite(value):
                points.append((step, value))

    def _name_straggler(self, rank: int, seconds: list[float], step: int) -> None:
        others = sorted(seconds[:rank] + seconds[rank + 1 :])
        theirs = f"the others' {others[0]:.3g} to" if len(others) > 1 else "the other's"
        rank_zero_warn(
            f"dashboard: rank {rank} on {self._hosts[rank]} is slow: at step {step} its own work took "
            f"{seconds[rank]:.3g} s, {theirs} {others[-1]:.3g} s"
        )

    def _pause(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
        self._since = None

    def _forget(self, trainer: Any) -> None:
        """Begin to count anew."""
        self._steps = self._tokens = 0
        self._seconds, self._since, self._clipped = 0.0, None, 0
        self._skipped_before = trainer.strategy.skipped_steps


def _root(value: float) -> float:
    return math.sqrt(value) if value >= 0 else value  # not of NaN


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def _device_peak(device: torch.device) -> float:
    return peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else 0.0


def _memory_bytes(device: torch.device) -> float:
    """On CUDA the most that was allocated so far; on a CPU what is resident (Linux) or was at most."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    statm = Path("/proc/self/statm")
    if statm.exists():
        return float(int(statm.read_text().split()[1]) * resource.getpagesize())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak * (1 if sys.platform == "darwin" else 1024))
