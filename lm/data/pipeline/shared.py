"""Stages over all sources, after each source's own: what a source holds already, a later one need not hold again.

Their outcome is kept beside that of the source's own stages, CACHE/<source>/all-<number>-<kind>-<key>/, under the hash
of the stage and of everything before it in every source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from lm.data.executor import Executor
from lm.data.files import sha256_json
from lm.data.pipeline.kinds import stage_key, stage_kind
from lm.data.pipeline.run import Pipeline
from lm.data.pipeline.scope import outcomes as scoped_outcomes
from lm.data.pipeline.stage import StageSpec
from lm.data.pipeline.store import Documents
from lm.data.sources import SourceSpec

Steps = list[tuple[Documents, dict[str, Any]]]


def after_all_stages(
    sources: Sequence[SourceSpec],
    stages: Sequence[StageSpec],
    cache: Path,
    log: Callable[[str], None],
    executor: Executor | None = None,
) -> dict[str, tuple[Documents, list[dict[str, Any]]]]:
    """Documents that are left of each source, and the report of each step; what was done before is not done again.

    Args:
        stages: over all sources; documents come in the order of the sources, so that the first source keeps most.
    """
    pipelines = [Pipeline(spec, cache, log, executor) for spec in sources]
    states = [pipeline.run() for pipeline in pipelines]
    documents, reports = [state[0] for state in states], [state[1] for state in states]
    key = sha256_json([[pipeline.spec.name, pipeline.key] for pipeline in pipelines])
    names = []
    for number, stage in enumerate(stages, start=1):
        key = sha256_json([key, *stage_key(stage, *stage_kind(stage, "stages"))])
        names.append(f"all-{number:02}-{stage.kind}-{key[:16]}")
        steps = _found(pipelines, names[-1], documents) or _run(pipelines, names[-1], stage, documents)
        documents = [step[0] for step in steps]
        for own, step in zip(reports, steps, strict=True):
            own.append(step[1])
    for pipeline in pipelines:
        pipeline.prune(names)
    return {spec.name: (left, own) for spec, left, own in zip(sources, documents, reports, strict=True)}


def _found(pipelines: list[Pipeline], name: str, documents: list[Documents]) -> Steps | None:
    """The stage's outcome for each source, if it is whole."""
    steps = []
    for pipeline, before in zip(pipelines, documents, strict=True):
        if (step := pipeline.found(name, before)) is None:
            return None
        steps.append(step)
    return steps


def _run(pipelines: list[Pipeline], name: str, stage: StageSpec, documents: list[Documents]) -> Steps:
    """The stage over all documents; a kill costs all of it, since each source's outcome depends on the others'."""
    kind, options = stage_kind(stage, "stages")
    title = f"{stage.kind} ({f'per {stage.scope}' if stage.scope else 'all'})"
    options = kind.ready(options, pipelines[0].cache, pipelines[0].log)
    outcomes = iter(scoped_outcomes(stage.kind, options, stage.scope, documents))
    return [
        pipeline.write(name, title, kind.changes, islice(outcomes, len(before)), before)
        for pipeline, before in zip(pipelines, documents, strict=True)
    ]
