"""The fastest layout that fits, found by walking from the simplest to the most divided."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lm.errors import ConfigError
from lm.planner.job import Job
from lm.planner.layout import CHECKPOINTING, STRATEGIES, Layout, check_layout
from lm.planner.memory import DeviceMemory, device_memory
from lm.planner.timing import StepTime, layout_transfers, seconds_of, step_time

TIE = 0.01  # steps within 1% count as equally fast


@dataclass(frozen=True)
class Candidate:
    """A layout with what it takes."""

    layout: Layout
    memory: DeviceMemory
    time: StepTime
    communication_seconds: float

    @property
    def rank(self) -> tuple[float, ...]:
        """Among equally fast ones: most work at once on a device, since small products fall below the MFU that all are
        given; then nothing computed twice; then least communication; then simplest; then least memory."""
        layout = self.layout
        at_once = layout.micro_batch / (layout.context * layout.tensor)
        simple = STRATEGIES.index(layout.strategy) + layout.tensor + layout.context
        return -at_once, self.time.recompute, self.communication_seconds, simple, self.memory.total


@dataclass(frozen=True)
class Choice:
    """The outcome of a search.

    Attributes:
        best: fastest that fits; among those within 1% see Candidate.rank.
        runners_up: the best of other strategies and sizes, fastest first.
        reasons: lines, in the order of the walk.
        tried, fitting: layouts.
    """

    best: Candidate
    runners_up: tuple[Candidate, ...]
    reasons: tuple[str, ...]
    tried: int
    fitting: int


def evaluate(job: Job, layout: Layout) -> Candidate:
    """Memory and time of one layout."""
    sent = layout_transfers(job, layout)
    seconds = seconds_of(job, sent)
    return Candidate(layout, device_memory(job, layout), step_time(job, layout, sent, seconds), sum(seconds))


def search(job: Job) -> Choice:
    """Try every layout this recipe has for the job, in the order: one replica on a device; sharded inside a node, or
    cut by tensor inside a node; windows cut by context; sharded over nodes; replicas outermost.

    Raises:
        ConfigError: no layout divides the batch, or none fits; with what is nearest.
    """
    layouts = list(candidates(job))
    if not layouts:
        raise ConfigError(_no_layout(job))
    found = [evaluate(job, layout) for layout in layouts]
    fitting = [candidate for candidate in found if candidate.memory.total <= job.cluster.usable_bytes]
    if not fitting:
        least = min(found, key=lambda candidate: candidate.memory.total)
        raise ConfigError(
            f"nothing fits {job.cluster.usable_bytes / 1e9:.1f} usable GB a device: the smallest of {len(found)} "
            f"layouts, {least.layout.describe()}, takes {least.memory.total / 1e9:.1f} GB; take more devices, shorter "
            "windows or a smaller model"
        )
    best, *others = ranked(fitting)
    return Choice(best, _different(best, others), reasons(job, found, best), len(found), len(fitting))


def ranked(fitting: list[Candidate]) -> list[Candidate]:
    """Fastest first, in bands of TIE; inside a band by Candidate.rank."""
    bands: list[list[Candidate]] = []
    limit = 0.0
    for candidate in sorted(fitting, key=lambda candidate: candidate.time.total):
        if candidate.time.total > limit:
            bands.append([])
            limit = candidate.time.total * (1 + TIE)
        bands[-1].append(candidate)
    return [candidate for band in bands for candidate in sorted(band, key=lambda candidate: candidate.rank)]


def candidates(job: Job) -> Iterator[Layout]:
    """All layouts that divide, keeping job.layout's settings."""
    world, node = job.cluster.devices, job.cluster.devices_per_node
    for strategy in STRATEGIES:
        if (strategy == "single") != (world == 1):
            continue
        sharded = strategy in ("fsdp", "hsdp")
        for tensor in _divisors(node) if sharded else [1]:
            for context in _divisors(min(world // tensor, 64)):
                for shard in _shards(strategy, world // tensor):
                    yield from _batches(job, Layout(strategy, world, shard, tensor, context))


def _shards(strategy: str, places: int) -> list[int]:
    if strategy == "hsdp":
        return [size for size in _divisors(places) if 1 < size < places]
    return [places] if strategy == "fsdp" else [1]


def _batches(job: Job, base: Layout) -> Iterator[Layout]:
    share, left = divmod(job.sequences, base.data_parallel)
    if left or not share:
        return
    for micro in _divisors(share):
        accumulation = share // micro
        for checkpointing in CHECKPOINTING:
            for every in (False, True) if base.sharded_module and accumulation > 1 else (False,):
                sizes = (base.strategy, base.world, base.shard, base.tensor, base.context)
                layout = Layout(*sizes, micro, accumulation, checkpointing, every)
                if all(getattr(layout, name) == value for name, value in job.layout.items()) and _divides(job, layout):
                    yield layout


def _divides(job: Job, layout: Layout) -> bool:
    try:
        check_layout(job, layout)
    except ConfigError:
        return False
    return True


def _divisors(n: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(n) + 1) if n % size == 0]
    return small + [n // size for size in reversed(small) if size * size != n]


def _no_layout(job: Job) -> str:
    devices = job.cluster.devices
    if job.sequences < devices:
        return (
            f"the batch has {job.sequences} windows of {job.sequence_length} tokens for {devices} devices, and cutting "
            "windows or matrices does not spread it; take a larger global_batch_tokens or fewer devices"
        )
    kept = ", ".join(f"{name} {value}" for name, value in job.layout.items())
    return (
        f"a batch of {job.sequences} windows cannot be dealt out over {devices} devices"
        f"{f' with {kept}' if kept else ''}; make global_batch_tokens a multiple of devices x sequence_length "
        f"({devices * job.sequence_length:,})"
    )


def _different(best: Candidate, others: list[Candidate], most: int = 5) -> tuple[Candidate, ...]:
    """The best of each strategy and division that is not the chosen one's."""
    seen, found = {_kind(best.layout)}, []
    for candidate in others:
        if _kind(candidate.layout) not in seen:
            seen.add(_kind(candidate.layout))
            found.append(candidate)
    return tuple(found[:most])


def _kind(layout: Layout) -> tuple[str, int, bool, bool]:
    return layout.strategy, layout.shard, layout.tensor > 1, layout.context > 1


def reasons(job: Job, found: list[Candidate], best: Candidate) -> tuple[str, ...]:
    """Why, along the walk: does a replica fit, what sharding does, whether a window fits, what fills the batch."""
    usable, layout = job.cluster.usable_bytes, best.layout
    lines = []
    whole = [c for c in found if c.layout.strategy in ("single", "ddp") and c.layout.context == 1]
    if whole:
        least = min(whole, key=lambda candidate: candidate.memory.total)
        lines.append(_replica(least, usable))
    if layout.sharded_module:
        inside = layout.shard * layout.tensor <= job.cluster.devices_per_node
        where = "inside a node, over its fast links" if inside else "over several nodes: inside one it is not faster"
        lines.append(f"state cut by {layout.shard} {where}: {best.memory.state / 1e9:.1f} GB a device")
    if layout.tensor > 1:
        lines.append(f"matrices cut by {layout.tensor} inside a node")
    if layout.context > 1:
        short = "there are fewer windows than devices" if job.sequences < layout.world else "its activations fit so"
        lines.append(f"each window cut over {layout.context} devices: {short}")
    if layout.checkpointing != "none":
        lines.append(f"{layout.checkpointing} activation checkpointing: it fits, for {_share(best):.0%} more computing")
    lines.append(
        f"{layout.data_parallel} parts x micro-batch {layout.micro_batch} x accumulation {layout.accumulation} = "
        f"{job.sequences} windows a step"
    )
    exposed = best.time.communication / best.time.total
    lines.append(
        f"communication {best.communication_seconds:.2g} s a step; what computing does not hide is {exposed:.1%} of it"
    )
    return tuple(lines)


def _replica(least: Candidate, usable: float) -> str:
    fits = "fits" if least.memory.total <= usable else "does not fit"
    return (
        f"one replica {fits} a device: {least.memory.state / 1e9:.1f} GB of state, "
        f"{least.memory.total / 1e9:.1f} GB in all, {usable / 1e9:.1f} GB usable"
    )


def _share(candidate: Candidate) -> float:
    return candidate.time.recompute / candidate.time.compute
