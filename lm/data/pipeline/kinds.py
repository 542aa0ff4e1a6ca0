"""All kinds of stages by name; a config's stage checked against them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lm.data.files import DataError, discard
from lm.data.pipeline import decontaminate, exact, extract, filters, language, lists, near, pii, quality, substrings
from lm.data.pipeline.option_types import checked_options
from lm.data.pipeline.stage import BUILT, REQUIRED, SNAPSHOT, StageKind, StageSpec

KINDS: dict[str, StageKind] = {}
for module in (extract, language, filters, quality, exact, near, substrings, pii, lists, decontaminate):
    KINDS |= module.KINDS


def stage_kind(spec: StageSpec, where: str) -> tuple[StageKind, dict[str, Any]]:
    """The stage's kind, and its options with the defaults filled in.

    Raises:
        DataError: unknown kind, unknown or missing option, or one of another type or beyond its range.
    """
    if spec.kind not in KINDS:
        raise DataError(f"{where}: unknown stage '{spec.kind}'; stages: {', '.join(KINDS)}")
    kind = KINDS[spec.kind]
    for option in spec.options:
        if option not in kind.options:
            known = ", ".join(kind.options) or "none"
            raise DataError(f"{where}: stage {spec.kind} has no option '{option}'; options: {known}")
    given = checked_options(spec.kind, kind.options, kind.allowed, spec.options, where)
    options = {**kind.options, **given}
    for name, value in options.items():
        if value is REQUIRED:
            raise DataError(f"{where}: stage {spec.kind} needs option '{name}'")
    return kind, options


def stage_keys(specs: tuple[StageSpec, ...]) -> list[Any]:
    """What decides the outcome of a source's stages; nothing without stages, so that such a source is as ever."""
    stages = [(spec, *stage_kind(spec, "stages")) for spec in specs]
    return [[stage_key(*stage) for stage in stages]] if stages else []


def stage_key(spec: StageSpec, kind: StageKind, options: dict[str, Any]) -> list[Any]:
    """What decides a stage's outcome, given the same input."""
    return [spec.kind, kind.key(options), *([spec.scope] if spec.scope else [])]


def stage_specs(value: Any, where: str, shared: bool = False) -> tuple[StageSpec, ...]:
    """The stages of a source, from the value of its key `stages`: names, or mappings with a kind and options.

    Args:
        shared: these are the stages of a config, which see all sources.

    Raises:
        DataError: another value, an unknown stage, option or scope, `extract` not first.
    """
    if not isinstance(value, list):
        raise DataError(f"{where}: stages must be a list, got {value!r}")
    found = []
    for one in value:
        one = {"kind": one} if isinstance(one, str) else one
        if not isinstance(one, dict) or not isinstance(one.get("kind"), str):
            raise DataError(f"{where}: a stage is a name or a mapping with a kind, got {one!r}")
        options = {str(key): option for key, option in one.items() if key not in ("kind", "scope")}
        found.append(StageSpec(one["kind"], options, _scope(one, where, "all" if shared else "source")))
        stage_kind(found[-1], where)
    if any(spec.kind == "extract" for spec in found if shared or spec is not found[0]):
        raise DataError(f"{where}: extract reads pages as they were served, so it must be the first stage")
    return tuple(found)


def prune_built(cache: Path, specs: Iterable[StageSpec]) -> None:
    """Remove what stages of other configs have built."""
    stages = [stage_kind(spec, "stages") for spec in specs]
    kept = {kind.build.name(options) for kind, options in stages if kind.build}
    for path in (cache / BUILT).iterdir() if (cache / BUILT).is_dir() else ():
        if path.name not in kept:
            discard(path, "report.json")


def _scope(stage: dict[str, Any], where: str, whole: str) -> str | None:
    """SNAPSHOT, or None for the whole of what the stage sees, which is the default."""
    if "scope" not in stage:
        return None
    name, kind = stage["kind"], KINDS.get(stage["kind"])
    if kind and not kind.compares:
        raise DataError(f"{where}: stage {name} looks at one document at a time and has no scope; remove it")
    if stage["scope"] not in (whole, SNAPSHOT):
        raise DataError(
            f"{where}: the scope of stage {name} must be {whole} or {SNAPSHOT} here, got {stage['scope']!r}"
            " (source: in the stages of a source; all: in the list `stages` beside `sources`)"
        )
    return SNAPSHOT if stage["scope"] == SNAPSHOT else None
