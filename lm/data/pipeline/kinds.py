"""All kinds of stages by name; a config's stage checked against them."""

from __future__ import annotations

from typing import Any

from lm.data.files import DataError
from lm.data.pipeline import decontaminate, exact, extract, filters, language, lists, near, pii
from lm.data.pipeline.stage import REQUIRED, StageKind, StageSpec

KINDS: dict[str, StageKind] = {}
for module in (extract, language, filters, exact, near, pii, lists, decontaminate):
    KINDS |= module.KINDS


def stage_kind(spec: StageSpec, where: str) -> tuple[StageKind, dict[str, Any]]:
    """The stage's kind, and its options with the defaults filled in.

    Raises:
        DataError: unknown kind, unknown or missing option.
    """
    if spec.kind not in KINDS:
        raise DataError(f"{where}: unknown stage '{spec.kind}'; stages: {', '.join(KINDS)}")
    kind = KINDS[spec.kind]
    for option in spec.options:
        if option not in kind.options:
            known = ", ".join(kind.options) or "none"
            raise DataError(f"{where}: stage {spec.kind} has no option '{option}'; options: {known}")
    options = {**kind.options, **spec.options}
    for name, value in options.items():
        if value is REQUIRED:
            raise DataError(f"{where}: stage {spec.kind} needs option '{name}'")
    return kind, options


def stage_keys(specs: tuple[StageSpec, ...]) -> list[Any]:
    """What decides the outcome of a source's stages; nothing without stages, so that such a source is as ever."""
    stages = [(spec, *stage_kind(spec, "stages")) for spec in specs]
    return [[[spec.kind, kind.key(options)] for spec, kind, options in stages]] if stages else []


def stage_specs(value: Any, where: str) -> tuple[StageSpec, ...]:
    """The stages of a source, from the value of its key `stages`: names, or mappings with a kind and options.

    Raises:
        DataError: another value, an unknown stage or option, `extract` not first.
    """
    if not isinstance(value, list):
        raise DataError(f"{where}: stages must be a list, got {value!r}")
    found = []
    for one in value:
        one = {"kind": one} if isinstance(one, str) else one
        if not isinstance(one, dict) or not isinstance(one.get("kind"), str):
            raise DataError(f"{where}: a stage is a name or a mapping with a kind, got {one!r}")
        found.append(StageSpec(one["kind"], {str(key): option for key, option in one.items() if key != "kind"}))
        stage_kind(found[-1], where)
    if any(spec.kind == "extract" for spec in found[1:]):
        raise DataError(f"{where}: extract reads pages as they were served, so it must be the first stage")
    return tuple(found)
