"""LightningDataModule over a prepared data folder. The position of the stream is one number, the trainer's step."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from lm.data.epochs import repeat_warnings
from lm.data.layout import by_batch, micro_batches
from lm.data.loaders import VALIDATION_BATCH_TOKENS, StreamLoader, ValidationLoaders, identity, outlive_signals
from lm.data.mix import Settled
from lm.data.packed_windows import reader_of
from lm.data.plan import Stage
from lm.data.planned import Contribution, PlannedStream
from lm.data.ramp import BatchRamp
from lm.data.resume import align_progress, change_accumulation, check_fingerprint
from lm.data.shards import load_manifest
from lm.data.streams import Layout, TrainStream
from lm.data.windows import Batch
from lm.errors import ConfigError


class TokenDataModule(PlannedStream, LightningDataModule):
    """Packed windows of tokens in an order that depends on (seed, plan, step) alone.

    Args:
        dir: folder made by `python -m recipes.data prepare`.
        sequence_length: T, tokens a window.
        global_batch_tokens: G, tokens an optimizer step over all ranks and micro-batches; a multiple of T.
        micro_batch_size: windows a rank takes at once; null: its whole share of a step, without accumulation.
        weights: share of each source in training; null: in proportion to its tokens. A name may be a slice of a source
            by the length of its documents: `web[>=8192]`, `web[<8192]`, `web[1024:8192]`. Or a rule (lm.data.mix):
            `{temperature: 3.33}`, `{unimax: {max_epochs: 4}}`.
        seed: of the data order.
        stages: later stages of the plan, each with its own sequence length and weights (the first is given above). A
            micro-batch keeps its number of tokens in all stages.
        validation_windows: most windows of each source to validate on, a fixed choice over the whole split. Where a
            later stage has longer sequences, as many tokens at the longest of them too.
        validation_batch_size: windows a rank validates at once; null: the micro-batch, at least 8,192 tokens.
        batch_ramp: [from_tokens, batch_tokens] pairs: from that many training tokens on, a step takes so many. Begins
            at 0 and ends at global_batch_tokens; accumulation follows. null: global_batch_tokens throughout.
        packing: cut: documents one after the other, cut every T tokens. best_fit: no document of at most T tokens
            is cut, windows are padded; a plan's tokens are positions. Validation reads the same windows under both.
        verify_bytes: before training, the sha256 of every shard is compared with the manifest's where the folder is no
            larger; see plugins.callbacks.data_check. 0: never.
        num_workers: loader processes; the stream is the same for any number. 0 is fastest for small windows.

    Attributes (after setup):
        manifest, source_names, plan, order, accumulate, micro_batch_size.
        mixes: what the rules among the weights came to; a resumed run keeps what its checkpoint says.
        source_weights: share of each source in the first stage, its slices taken together.
        validation_sets: (suffix of metric names, source) of each validation loader; the suffix is empty at the first
            stage's sequence length, and `_long` at the longest.
    """

    def __init__(
        self,
        dir: str,
        sequence_length: int,
        global_batch_tokens: int,
        micro_batch_size: int | None = None,
        weights: dict[str, Any] | None = None,
        seed: int = 0,
        stages: list[Stage] | None = None,
        validation_windows: int = 512,
        validation_batch_size: int | None = None,
        num_workers: int = 0,
        batch_ramp: Sequence[Sequence[float]] | None = None,
        packing: str = "cut",
        verify_bytes: float = 1e9,
    ) -> None:
        super().__init__()
        if not verify_bytes >= 0:
            raise ConfigError(f"data.verify_bytes must not be negative, got {verify_bytes}")
        self.verify_bytes = verify_bytes
        self.packing = packing
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
        self.validation_sets: list[tuple[str, str]] = []
        self._contributions: dict[str, Contribution] = {}
        self._saved_accumulate: int | None = None
        self.mixes: list[Settled] = []
        self._saved_mixes: list[Settled] = []
        self._is_set_up = False

    # -- set up -------------------------------------------------------------------------------------------------

    def add_stage(self, stage: Stage) -> None:
        """Append a stage to those of the config."""
        self.later_stages.append(stage)
        self._replan()

    def contribute(self, owner: str, changes: Contribution) -> None:
        """Let `changes` take part in the plan; for callbacks, in their setup hook (called after this module's).

        It is asked each time the plan is made: now, and on resume before the plan is compared with the checkpoint's,
        when the LightningModule knows its state.

        Raises:
            ConfigError: another object contributes under this name, or the plan that results does not hold together.
        """
        if self._contributions.get(owner, changes) != changes:
            raise ConfigError(f"there are two callbacks {owner}; put what they do into one")
        self._contributions[owner] = changes
        self._replan()

    def _replan(self) -> None:
        if self._is_set_up:
            self.plan = self._make_plan()
            self.order = self._make_order()
            fitting = self._fitting()
            # In a running fit (a roll-back) the number of micro-batches is that of the step under way.
            if fitting is not None and getattr(fitting.fit_loop, "_data_fetcher", None) is None:
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
            self.plan = self._make_plan()
            self.order = self._make_order()
            self._is_set_up = True
        if stage == "fit":
            self._set_layout()

    def _check_vocabulary(self) -> None:
        module = getattr(self.trainer, "lightning_module", None)
        config = getattr(module, "model_config", None)
        if config is not None and config.vocab_size != self.manifest.vocab_size:
            raise ConfigError(
                f"model.config.vocab_size is {config.vocab_size} but {self.dir} was tokenized with"
                f" {self.manifest.vocab_size}; set it to that, or prepare the data with the model's vocabulary"
            )

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
        return self.trainer if self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING else None

    def _max_steps(self) -> int:
        return -1 if self.trainer is None else int(self.trainer.max_steps)

    def _warn_of_repeats(self) -> None:
        if self._fitting() is not None and self._rank_and_world()[0] == 0:
            for line in repeat_warnings(self.epoch_table()):
                warnings.warn(line, stacklevel=2)

    # -- state --------------------------------------------------------------------------------------------------

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
            "tokens": self.tokens_trained(step),
            "samples": int(self.order.step_samples(step)[0]),
            "skipped": [list(pair) for pair in self.order.skipped],
            "accumulate": self.accumulate,
            "fingerprint": self.fingerprint(),
            "mixes": [one.plain() for one in self.mixes],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that the data is what the checkpoint was trained on, and take over its skipped ranges.

        The position itself is the trainer's step. Outside of fit only the tokenizer has to agree.

        Raises:
            ValueError: one line that says which part differs.
        """
        fitting = self._fitting() is not None
        # What had begun keeps its weights, though a run of another length would give others.
        mixes = [Settled.from_plain(values) for values in state_dict.get("mixes", ())]
        self._saved_mixes = [one for one in mixes if one.step == 0 or one.step < int(state_dict["step"])]
        if fitting or mixes:
            self._replan()  # contributions may know more by now
        parts = ("shards", "tokenizer", "plan") if fitting else ("tokenizer",)
        check_fingerprint(state_dict["fingerprint"], self.fingerprint(), parts, int(state_dict["step"]), str(self.dir))
        if fitting:
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
            "collate_fn": identity,
            "worker_init_fn": outlive_signals,
            "pin_memory": device.type == "cuda",
            # iter(DataLoader) draws a seed: from this one, so that a resume finds the global state untouched.
            "generator": torch.Generator().manual_seed(self.seed),
        }

    def train_dataloader(self) -> StreamLoader:
        """Micro-batches from the trainer's current step on: input_ids, labels, document_ids, source, loss_tokens."""
        self._warn_of_repeats()  # here all stages are known, also those of a resumed run
        reader = reader_of(self.packing, self.manifest, "train", self.order.source_names)
        rank, world_size = self._rank_and_world()
        layout = Layout(rank, world_size, self.accumulate, by_batch(self.plan, world_size, self.micro_batch_size))
        stream = TrainStream(self.order, reader, layout)
        adapt = self._adapt_accumulation if self.batch_ramp else None
        return StreamLoader(stream, self._start_position, adapt, num_workers=self.num_workers, **self._options())

    def _adapt_accumulation(self) -> None:
        """Between two micro-batches: accumulate as the coming step's batch needs it."""
        trainer = self._fitting()
        if trainer is None:
            return
        counts = by_batch(self.plan, self._rank_and_world()[1], self.micro_batch_size)
        new = counts[self.plan.ramp.batch(self._position())]
        if new != trainer.accumulate_grad_batches:
            change_accumulation(trainer, new)
            self.accumulate = new

    def val_dataloader(self) -> list[DataLoader[Batch]]:
        """One loader a source at the first sequence length, in the order of source_names; batches carry target_bytes.

        Then one at the longest of a later stage, for each source that holds a window of it out. `validation_sets` says
        which is which.
        """
        make = ValidationLoaders(self.manifest, Layout(*self._rank_and_world(), 1), self._options())
        T, longest = self.sequence_length, max(stage.sequence_length for stage in self.plan.stages)
        size = self.validation_batch_size or max(self.micro_batch_size, VALIDATION_BATCH_TOKENS // T)
        self.validation_sets, loaders = make.at_lengths(T, longest, self.n_validation_windows, size)
        return loaders

    def test_dataloader(self) -> list[DataLoader[Batch]]:
        """The validation loaders: `trainer.test` reports on the same windows."""
        return self.val_dataloader()
