"""LightningDataModule over a prepared data folder. The position of the stream is one number, the trainer's step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from lm.data.dropped import with_ranges
from lm.data.epochs import EpochRow, epoch_rows, repeat_warnings
from lm.data.layout import by_batch, micro_batches
from lm.data.order import DataOrder, DataPlan, Stage
from lm.data.ramp import BatchRamp
from lm.data.resume import align_progress, check_fingerprint, plan_fingerprint
from lm.data.shards import load_manifest
from lm.data.streams import Layout, TrainStream, ValidationWindows, validation_windows
from lm.data.tokenizer import byte_lengths, load_tokenizer
from lm.data.windows import Batch, WindowReader
from lm.errors import ConfigError

# Validation keeps no gradients, so it can take more than a small training micro-batch.
VALIDATION_BATCH_TOKENS = 8192


def _identity(batch: Batch) -> Batch:
    return batch


class StreamLoader(DataLoader[Batch]):
    """DataLoader over a TrainStream that asks for the position each time it is iterated."""

    def __init__(
        self,
        stream: TrainStream,
        position: Callable[[], int],
        before_fetch: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(stream, **options)
        self.stream = stream
        self.position = position
        self.before_fetch = before_fetch

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        self.stream.start_step = self.position()
        batches: Iterator[Batch] = super().__iter__()
        return batches if self.before_fetch is None else _fetched(batches, self.before_fetch)


def _fetched(batches: Iterator[Batch], before_fetch: Callable[[], None]) -> Iterator[Batch]:
    while True:
        before_fetch()
        yield next(batches)


class TokenDataModule(LightningDataModule):
    """Packed windows of tokens in an order that depends on (seed, plan, step) alone.

    Args:
        dir: folder made by `python -m recipes.data prepare`.
        sequence_length: T, tokens a window.
        global_batch_tokens: G, tokens an optimizer step over all ranks and micro-batches; a multiple of T.
        micro_batch_size: windows a rank takes at once; null: its whole share of a step, without accumulation.
        weights: share of each source in training; null: in proportion to its tokens.
        seed: of the data order.
        stages: later stages of the plan, each with its own sequence length and weights (the first is given above). A
            micro-batch keeps its number of tokens in all stages.
        validation_windows: most windows of each source to validate on, a fixed choice over the whole split.
        validation_batch_size: windows a rank validates at once; null: the micro-batch, at least 8,192 tokens.
        batch_ramp: [from_tokens, batch_tokens] pairs: from that many training tokens on, a step takes so many. Begins
            at 0 and ends at global_batch_tokens; accumulation follows. null: global_batch_tokens throughout.
        num_workers: loader processes; the stream is the same for any number. 0 is fastest for small windows.

    Attributes (after setup):
        manifest, source_names, source_weights, plan, order, accumulate, micro_batch_size.
    """

    def __init__(
        self,
        dir: str,
        sequence_length: int,
        global_batch_tokens: int,
        micro_batch_size: int | None = None,
        weights: dict[str, float] | None = None,
        seed: int = 0,
        stages: list[Stage] | None = None,
        validation_windows: int = 512,
        validation_batch_size: int | None = None,
        num_workers: int = 0,
        batch_ramp: Sequence[Sequence[float]] | None = None,
    ) -> None:
        super().__init__()
        self.batch_ramp = BatchRamp(batch_ramp).points if batch_ramp else ()
        self.dir = Path(dir)
        self.sequence_length = sequence_length
        self.global_batch_tokens = global_batch_tokens
        self.requested_micro_batch_size = micro_batch_size
        self.weights = weights
        self.seed = seed
        self.later_stages = list(stages or [])
        self.n_validation_windows = validation_windows
        self.validation_batch_size = validation_batch_size
        self.num_workers = num_workers
        self.skipped: list[tuple[int, int]] = []
        self.accumulate = 1
        self.micro_batch_size = micro_batch_size or 1
        self._saved_accumulate: int | None = None
        self._is_set_up = False

    # -- set up -------------------------------------------------------------------------------------------------

    def add_stage(self, stage: Stage) -> None:
        """Append a stage to the plan; for callbacks, in their setup hook (which Lightning calls after this setup)."""
        self.later_stages.append(stage)
        if self._is_set_up:
            self.plan = self._make_plan()
            self.order = self._make_order()
            if self._fitting() is not None:
                self._set_layout()

    def setup(self, stage: str) -> None:
        """Read the manifest, check it against the model, the plan and the machine, set accumulation.

        Raises:
            ValueError: one line: not a data folder, unknown source, other vocabulary, sequences longer than the
                shards, a batch that does not divide.
        """
        if not self._is_set_up:
            self.manifest = load_manifest(self.dir)
            self.source_names = self.manifest.source_names
            self._check_vocabulary()
            self.source_weights = self._resolve_weights()
            self.plan = self._make_plan()
            self.order = self._make_order()
            self._is_set_up = True
        if stage == "fit":
            self._set_layout()
            self._warn_of_repeats()

    def _check_vocabulary(self) -> None:
        module = getattr(self.trainer, "lightning_module", None)
        config = getattr(module, "model_config", None)
        if config is not None and config.vocab_size != self.manifest.vocab_size:
            raise ConfigError(
                f"model.config.vocab_size is {config.vocab_size} but {self.dir} was tokenized with"
                f" {self.manifest.vocab_size}; set it to that, or prepare the data with the model's vocabulary"
            )

    def _resolve_weights(self) -> dict[str, float]:
        if self.weights is None:
            raw: dict[str, float] = {name: float(n) for name, n in self.manifest.tokens("train").items()}
        else:
            raw = {name: float(weight) for name, weight in self.weights.items()}
        total = sum(raw.values())
        return {name: weight / total for name, weight in raw.items()} if total > 0 else raw

    def _make_plan(self) -> DataPlan:
        first = Stage(0, self.sequence_length, self.source_weights)
        return DataPlan(self.seed, self.global_batch_tokens, (first, *self.later_stages), self.batch_ramp)

    def _make_order(self) -> DataOrder:
        return DataOrder(self.plan, self.manifest.tokens("train"), self.skipped)

    def _set_layout(self) -> None:
        world_size = self._rank_and_world()[1]
        self.micro_batch_size, self.accumulate = micro_batches(self.plan, world_size, self.requested_micro_batch_size)
        if self.trainer is not None:
            # Lightning reads it every batch; DeepSpeed once, in strategy.setup, which comes later.
            self.trainer.accumulate_grad_batches = self.accumulate

    def _rank_and_world(self) -> tuple[int, int]:
        """(which part of a batch this process reads, number of parts); under tensor parallelism some read the same."""
        if self.trainer is None:
            return 0, 1
        part = getattr(self.trainer.strategy, "data_parallel", None)
        return (self.trainer.global_rank, self.trainer.world_size) if part is None else part

    def _fitting(self) -> Trainer | None:
        trainer = self.trainer
        return trainer if trainer is not None and trainer.state.fn == TrainerFn.FITTING else None

    # -- epochs -------------------------------------------------------------------------------------------------

    def epoch_table(self, total_tokens: int | None = None) -> list[EpochRow]:
        """Per source: documents, unique tokens, bytes per token, weight, tokens drawn, epochs; from the plan alone.

        Args:
            total_tokens: length of the run; None: the trainer's max_steps.
        """
        if total_tokens is None:
            max_steps = -1 if self.trainer is None else self.trainer.max_steps
            total_tokens = self.plan.ramp.tokens(max(max_steps, 0))
        return epoch_rows(self.manifest, self.order, total_tokens)

    def _warn_of_repeats(self) -> None:
        if self._rank_and_world()[0] == 0:
            for line in repeat_warnings(self.epoch_table()):
                warnings.warn(line, stacklevel=2)

    # -- state --------------------------------------------------------------------------------------------------

    def fingerprint(self) -> dict[str, Any]:
        """Shards, tokenizer and plan, as plain values."""
        return {**self.manifest.fingerprint(), "plan": plan_fingerprint(self.plan)}

    def skip_samples(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Drop [start, stop) ranges of k, as they are numbered now; iterate the loader anew afterwards."""
        self.set_skipped(with_ranges(self.order, ranges))

    def set_skipped(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Let these be all ranges that are dropped; iterate the loader anew afterwards."""
        self.skipped = list(ranges)
        self.order = self._make_order()
        self.skipped = list(self.order.skipped)

    def rolled_back(self, skipped: Iterable[tuple[int, int]]) -> None:
        """After an older checkpoint was loaded into a running fit: drop `skipped`, fit Lightning's batch counters."""
        if self.trainer is not None and self._saved_accumulate is not None:
            align_progress(self.trainer, self._saved_accumulate, int(self.trainer.accumulate_grad_batches))
            self._saved_accumulate = None
        self.set_skipped(skipped)

    def state_dict(self) -> dict[str, Any]:
        """Position, skipped ranges and fingerprint, as plain values (loadable with weights_only)."""
        step = self._position()
        return {
            "step": step,
            "tokens": self.plan.ramp.tokens(step),
            "samples": int(self.order.step_samples(step)[0]),
            "skipped": [list(pair) for pair in self.order.skipped],
            "accumulate": self.accumulate,
            "fingerprint": self.fingerprint(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that the data is what the checkpoint was trained on, and take over its skipped ranges.

        The position itself is the trainer's step. Outside of fit only the tokenizer has to agree.

        Raises:
            ValueError: one line that says which part differs.
        """
        constant = int(state_dict["step"]) * int(state_dict["fingerprint"]["plan"]["global_batch_tokens"])
        trained_tokens = int(state_dict.get("tokens", constant))
        parts = ("shards", "tokenizer", "plan") if self._fitting() is not None else ("tokenizer",)
        check_fingerprint(state_dict["fingerprint"], self.fingerprint(), parts, trained_tokens, str(self.dir))
        if self._fitting() is not None:
            self.skipped = [(int(a), int(b)) for a, b in state_dict["skipped"]]
            self.order = self._make_order()
            self._saved_accumulate = int(state_dict["accumulate"])

    def _position(self) -> int:
        return 0 if self.trainer is None else int(self.trainer.global_step)

    def _start_position(self) -> int:
        trainer = self._fitting()
        if trainer is not None and self._saved_accumulate is not None and trainer.fit_loop.restarting:
            align_progress(trainer, self._saved_accumulate, self.accumulate)
            self._saved_accumulate = None
        return self._position()

    # -- loaders ------------------------------------------------------------------------------------------------

    def _options(self) -> dict[str, Any]:
        device = getattr(getattr(self.trainer, "strategy", None), "root_device", torch.device("cpu"))
        return {
            "batch_size": None,
            "collate_fn": _identity,
            "pin_memory": device.type == "cuda",
            # iter(DataLoader) draws a seed: from this one, so that a resume finds the global state untouched.
            "generator": torch.Generator().manual_seed(self.seed),
        }

    def train_dataloader(self) -> StreamLoader:
        """Micro-batches from the trainer's current step on: input_ids, labels, document_ids, source, loss_tokens."""
        reader = WindowReader(self.manifest, "train", self.source_names)
        rank, world_size = self._rank_and_world()
        layout = Layout(rank, world_size, self.accumulate, by_batch(self.plan, world_size, self.micro_batch_size))
        stream = TrainStream(self.order, reader, layout)
        adapt = self._adapt_accumulation if self.batch_ramp else None
        return StreamLoader(stream, self._start_position, adapt, num_workers=self.num_workers, **self._options())

    def _adapt_accumulation(self) -> None:
        """Between two micro-batches: accumulate as the coming step's batch needs it.

        Lightning steps where (batches so far) % accumulate == 0 and validates where (batches so far) % val_check_batch
        == 0: all counts are put on the new scale, on which they are steps x accumulate again.
        """
        trainer = self._fitting()
        if trainer is None:
            return
        old, world_size = int(trainer.accumulate_grad_batches), self._rank_and_world()[1]
        counts = by_batch(self.plan, world_size, self.micro_batch_size)
        new = counts[self.plan.ramp.batch(self._position())]
        if new == old:
            return
        align_progress(trainer, old, new)
        self.accumulate = trainer.accumulate_grad_batches = new
        if isinstance(trainer.val_check_interval, int):
            trainer.val_check_interval = max(1, trainer.val_check_interval // old * new)
            trainer.val_check_batch = trainer.val_check_interval

    def val_dataloader(self) -> list[DataLoader[Batch]]:
        """One loader a source, in the order of source_names; batches also carry target_bytes."""
        reader = WindowReader(self.manifest, "validation", self.source_names)
        lengths = byte_lengths(load_tokenizer(self.dir))
        layout = Layout(*self._rank_and_world(), 1)
        batch_size = self.validation_batch_size or max(
            self.micro_batch_size, VALIDATION_BATCH_TOKENS // self.sequence_length
        )
        loaders = []
        for index, name in enumerate(self.source_names):
            available = reader.count_windows(index, self.sequence_length)
            if available < 1:
                raise ConfigError(
                    f"sequence_length {self.sequence_length} is longer than the validation split of source '{name}'"
                    f" ({self.manifest.tokens('validation')[name]} tokens); shorten it or hold out more"
                )
            # Not by the run's seed: runs that differ in it are compared on the same windows.
            windows = validation_windows(name, available, self.n_validation_windows, seed=0)
            part = ValidationWindows(reader, index, windows, self.sequence_length, batch_size, layout, lengths)
            loaders.append(DataLoader(part, **self._options()))
        return loaders

    def test_dataloader(self) -> list[DataLoader[Batch]]:
        """The validation loaders: `trainer.test` reports on the same windows."""
        return self.val_dataloader()
