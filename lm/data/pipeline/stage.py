"""What a stage is: options with defaults, and a function from documents to one outcome each."""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from lm.data.files import DataError
from lm.data.options import text_list
from lm.data.pipeline.store import Documents, Item

REQUIRED = object()  # the default of an option that a config must set
SNAPSHOT = "snapshot"  # a scope
BUILT = ".built"  # a folder of the cache; no source can have this name


@dataclass(frozen=True)
class StageSpec:
    """A stage as a config names it.

    Attributes:
        kind: a name of lm.data.pipeline.kinds.KINDS.
        options: what the config sets; the rest has defaults.
        scope: SNAPSHOT to compare documents within each snapshot only; None: all that the stage sees.
    """

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    scope: str | None = None


@dataclass(frozen=True)
class Kept:
    """A document that stays.

    Attributes:
        text: its new text; None: unchanged.
        notes: what was found in it, by name, for the funnel's counts ("email": 2).
        detail: shown beside its sample, if it has notes.
    """

    text: bytes | None = None
    notes: Mapping[str, int] = field(default_factory=dict)
    detail: str = ""


@dataclass(frozen=True)
class Dropped:
    """A document that goes.

    Attributes:
        reason: the rule, a short name.
        detail: what the rule saw, for people.
    """

    reason: str
    detail: str = ""


Outcome = Kept | Dropped
Run = Callable[[Documents, dict[str, Any]], Iterator[Outcome]]
DocumentRule = Callable[[Item], Outcome]


@dataclass(frozen=True)
class PerDocument:
    """A run that looks at one document at a time: parts of the documents may go to several workers.

    Attributes:
        rule: all options -> what becomes of a document.
    """

    rule: Callable[[dict[str, Any]], DocumentRule]

    def __call__(self, documents: Documents, options: dict[str, Any]) -> Iterator[Outcome]:
        return map(self.rule(options), documents)


@dataclass(frozen=True)
class Build:
    """What a stage makes once for all sources before it runs, in a folder of the cache.

    Attributes:
        name: options -> name of the folder, with a hash of all that decides what is made; None: nothing is needed.
        make: (options, folder, log) -> None; does nothing where the folder is complete.
    """

    name: Callable[[dict[str, Any]], str | None]
    make: Callable[[dict[str, Any], Path, Callable[[str], None]], None]


@dataclass(frozen=True)
class Range:
    """What a number among the options may be.

    Attributes:
        low: at least.
        high: at most.
        whole: no fraction; 64e6 is whole.
        off: null is a value too, and switches the rule off.
    """

    low: float
    high: float = math.inf
    whole: bool = False
    off: bool = False


FRACTION = Range(0, 1)


@dataclass(frozen=True)
class StageKind:
    """How one kind of stage works.

    Attributes:
        run: (documents, all options) -> one outcome a document, in order; may read the documents more than once. A
            PerDocument where each document is judged by itself.
        options: name -> default, or REQUIRED.
        allowed: of each number its Range, of some words (or lists of words) the choice.
        changes: whether it may change texts; if not, only positions are written.
        compares: whether a document's outcome depends on others, so that a config may set the scope.
        identity: options -> plain values that change when the outcome may (hashes of files that options name).
        packages: distributions whose version decides the outcome.
        version: raise it when the code's outcome changes.
        build: of something that `run` needs; it finds the folder as the option `built`.
    """

    run: Run
    options: Mapping[str, Any] = field(default_factory=dict)
    allowed: Mapping[str, Range | tuple[str, ...]] = field(default_factory=dict)
    changes: bool = False
    compares: bool = False
    identity: Callable[[dict[str, Any]], Any] | None = None
    packages: tuple[str, ...] = ()
    version: int = 1
    build: Build | None = None

    def ready(self, options: dict[str, Any], cache: Path, log: Callable[[str], None]) -> dict[str, Any]:
        """Options for `run`, after building what it needs."""
        name = self.build.name(options) if self.build else None
        if self.build is None or name is None:
            return options
        self.build.make(options, cache / BUILT / name, log)
        return {**options, "built": str(cache / BUILT / name)}

    def key(self, options: dict[str, Any]) -> Any:
        """Plain values that decide the outcome, given the same input."""
        extra = self.identity(options) if self.identity else None
        return [self.version, options, extra, [package_version(name) for name in self.packages]]


def package_version(name: str) -> str:
    """Version of an installed distribution.

    Raises:
        DataError: it is missing.
    """
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        raise DataError(f"the package {name} is missing; install it: pip install 'scalewright[data]'") from None


def list_option(kind: str, options: dict[str, Any], name: str) -> list[str]:
    """A string or a list of strings, as a list.

    Raises:
        DataError: another value.
    """
    value = options[name]
    values = text_list(value)
    if values is None:
        raise DataError(f"stage {kind}: {name} must be a string or a list of strings, got {value!r}")
    return values


def files_option(kind: str, options: dict[str, Any], name: str) -> list[Path]:
    """Files that an option names (paths or globs), sorted.

    Raises:
        DataError: a pattern matches nothing.
    """
    found: set[Path] = set()
    for pattern in list_option(kind, options, name):
        matches = [Path(path) for path in glob.glob(pattern, recursive=True) if Path(path).is_file()]
        if not matches:
            raise DataError(f"stage {kind}: no file of {name} matches {pattern} (relative to {Path.cwd()})")
        found.update(matches)
    return sorted(found)
