"""Finds a rank whose memory differs from that of the ranks it must agree with, and stops before that is saved."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor

from lm.errors import ConfigError
from plugins.callbacks.step_end import ends_step
from plugins.strategies import collectives
from plugins.strategies.checksums import checksum, published, replicated

Place = tuple[int, ...]


class IntegrityError(ConfigError):
    """Ranks that must hold the same bits do not; the message is one line that names rank and tensor."""


class Integrity(Callback):
    """Compares checksums of everything that is held more than once, every n steps and before each save.

    See plugins.strategies.checksums.replicated for what that is under each strategy. All ranks raise together, so that
    the run ends with one line and a status other than 0, and no checkpoint of that state is written. Where it stands
    among the callbacks does not matter: a save asks it first.

    Args:
        every_n_steps: n; 0 checks before saves only.

    Raises:
        IntegrityError: while training or saving, on every rank.
    """

    def __init__(self, every_n_steps: int = 100):
        if every_n_steps < 0:
            raise ConfigError(f"integrity: every_n_steps must not be negative, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self.checks = 0
        self._keys: list[str] = []
        self._places: list[list[Place]] = []  # of each rank, for each key
        self._found = ""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not ends_step(trainer, batch_idx):
            return
        if self._found or (self.every_n_steps and trainer.global_step % self.every_n_steps == 0):
            self.check(trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.check(trainer)

    def check(self, trainer: Any) -> None:
        """Compare now. Collective.

        Raises:
            IntegrityError: on every rank, when any two ranks differ.
        """
        self.checks += 1
        self._found = self._found or self._own(trainer.strategy) or self._others(trainer.strategy)
        if self._found:
            raise IntegrityError(
                f"integrity: at step {trainer.global_step} {self._found}; nothing of this state is saved. Look after "
                "that device and go on from the last checkpoint with --ckpt_path last"
            )

    def _own(self, strategy: Any) -> str:
        """What a rank of ZeRO holds twice. Collective."""
        broken = [
            _name_at(parts, own, given)
            for parts, own, given in published(strategy)
            if int(checksum(own)) != int(checksum(given))
        ]
        found = [
            f"rank {rank} on {host} holds two copies of its part of {names[0]} that differ"
            for rank, (host, names) in enumerate(collectives.gather((socket.gethostname(), broken)))
            if names
        ]
        return "; ".join(found)

    def _others(self, strategy: Any) -> str:
        """What several ranks hold. Collective."""
        items = list(replicated(strategy))
        keys = [key for key, _, _ in items]
        if keys != self._keys:  # the optimizer's state appears with its first step
            self._places = collectives.gather([place for _, _, place in items])
            self._keys = keys
        if not items:
            return ""
        sums = _gathered(torch.stack([checksum(tensor).to(strategy.root_device) for _, tensor, _ in items]))
        differing = []
        for index, key in enumerate(keys):
            text = disagreement([places[index] for places in self._places], [row[index] for row in sums])
            if text:
                differing.append((key, text))
        if not differing:
            return ""
        hosts = collectives.gather(socket.gethostname())
        key, text = differing[0]
        more = f" (and in {len(differing) - 1} more tensors)" if len(differing) > 1 else ""
        where = ", ".join(f"{rank}: {host}" for rank, host in enumerate(hosts)) if len(set(hosts)) > 1 else hosts[0]
        return f"{text} in {key}{more} [hosts {where}]"


def disagreement(places: Sequence[Place], sums: Sequence[int]) -> str:
    """Which ranks hold something else than the others of their place; empty when all agree.

    Args:
        places: of each rank; those with the same one must agree.
        sums: checksum of each rank.
    """
    for place in dict.fromkeys(places):
        ranks = [rank for rank, other in enumerate(places) if other == place]
        (common, votes), *rest = Counter(sums[rank] for rank in ranks).most_common()
        if not rest:
            continue
        if 2 * votes > len(ranks):
            wrong = [rank for rank in ranks if sums[rank] != common]
            right = [rank for rank in ranks if sums[rank] == common]
            return f"{_ranks(wrong)} holds other bits than {_ranks(right)}"
        return f"{_ranks(ranks)} hold different bits, one of them is wrong,"
    return ""


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"


def _gathered(sums: Tensor) -> list[list[int]]:
    """Checksums of all ranks, [ranks][keys]. Collective."""
    if not collectives.is_distributed():
        return [sums.tolist()]
    rows = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, sums)
    return torch.stack(rows).tolist()


def _name_at(parts: list, own: Tensor, given: Tensor) -> str:
    """The parameter in which two flat copies differ first."""
    place = int((own.view(torch.int32) != given.view(torch.int32)).nonzero()[0])
    inside = (part.name for part in parts if part.start <= place < part.start + part.length)
    return f"param/{next(inside, 'padding')}"
