"""Quality by a fastText classifier (Joulin et al. 2017), trained on texts of one's own or given as a file.

As DCLM (arXiv 2406.11794, section 4.4) and others filter: positives are texts as one wants them, negatives a sample of
the source; what scores below a threshold goes. Training is with one thread and a seed: the same inputs, the same model.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lm.data.files import DataError, sha256_file, sha256_json, write_json
from lm.data.pipeline.language import load_model
from lm.data.pipeline.stage import (
    FRACTION,
    Build,
    DocumentRule,
    Dropped,
    Kept,
    Outcome,
    PerDocument,
    Range,
    StageKind,
    files_option,
)
from lm.data.pipeline.store import Item
from lm.data.words import MARKS, spaced_letters

VERSION = 2  # of what decides a trained model and its scores, besides its inputs and options
POSITIVE, NEGATIVE = "positive", "negative"
HELD_OUT = 0.1  # share of the labelled texts that is not trained on
_CHARACTERS = 20_000  # of a text, here as in training
_PUNCTUATION = re.compile(rf"([^\w\s{MARKS}])")
_FASTTEXT = {
    "dim": "dim",
    "epochs": "epoch",
    "learning_rate": "lr",
    "word_ngrams": "wordNgrams",
    "buckets": "bucket",
    "min_count": "minCount",
    "seed": "seed",
}
_TRAINING = ("text", *_FASTTEXT)


def plain_line(text: str) -> str:
    """A text as the classifier sees it: words of lm.data.words in lower case, marks apart, one line, no label.

    fastText takes for a word what stands between spaces: a clause of Han or Thai would be one, and not come twice.
    """
    line = _PUNCTUATION.sub(r" \1 ", text[:_CHARACTERS].lower())
    return " ".join(spaced_letters(line).replace("__label__", " ").split())


# -- labelled texts ---------------------------------------------------------------------------------------------


def labelled_texts(path: Path, column: str) -> Iterator[str]:
    """Texts of a file: a column of JSONL, else each line; those that are empty left out.

    Raises:
        DataError: the file is not UTF-8, a row is not JSON or has no text in the column.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"stage quality: {path} line {number}"
            try:
                text = line.decode()
                if path.suffix == ".jsonl" and text.strip():
                    text = json.loads(text)[column]
            except UnicodeDecodeError:
                raise DataError(f"{where} is not UTF-8") from None
            except (ValueError, KeyError, TypeError, RecursionError):
                raise DataError(f"{where} is no JSON row with the column '{column}'; set the option text") from None
            if not isinstance(text, str):
                raise DataError(f"{where}: the column '{column}' must hold text")
            if text.strip():
                yield text


# -- training ---------------------------------------------------------------------------------------------------


def model_inputs(options: dict[str, Any]) -> Any:
    """Hashes of the model, or of the texts to train it on.

    Raises:
        DataError: neither or both are given, or a file is missing.
    """
    given = [name for name in ("positives", "negatives") if options[name] is not None]
    if len(given) != (0 if options["model"] is not None else 2):
        raise DataError("stage quality needs either positives and negatives (files to train on) or model (a file)")
    if given:
        return {name: [sha256_file(path) for path in files_option("quality", options, name)] for name in given}
    path = Path(str(options["model"]))
    if not path.is_file():
        raise DataError(f"stage quality: the model {path} does not exist")
    return sha256_file(path)


def stage_inputs(options: dict[str, Any]) -> Any:
    """What decides the scores besides the options: a given model sees texts as they are, one of ours its own lines."""
    inputs = model_inputs(options)
    return inputs if options["model"] is not None else [VERSION, inputs]


def model_name(options: dict[str, Any]) -> str | None:
    """Folder of the trained model: what decides it, as a hash. None: a model is given."""
    if options["model"] is not None:
        return None
    inputs = [VERSION, model_inputs(options), {name: options[name] for name in _TRAINING}]
    return f"quality-{sha256_json(inputs)[:16]}"


def train_model(options: dict[str, Any], folder: Path, log: Callable[[str], None]) -> None:
    """model.bin and report.json (written last) in `folder`, if they are not there.

    Raises:
        DataError: a class has too few texts, or training gives no numbers.
    """
    if (folder / "report.json").is_file():
        return
    settings = {to: options[name] for name, to in _FASTTEXT.items()}
    training, held_out = _split(options)
    folder.mkdir(parents=True, exist_ok=True)
    order = np.random.default_rng(settings["seed"]).permutation(len(training))  # classes in turn, or it learns the last
    lines = folder / "training.txt"
    lines.write_text("".join(f"__label__{training[i][0]} {training[i][1]}\n" for i in order), encoding="utf-8")
    import fasttext

    try:
        model = fasttext.train_supervised(input=str(lines), thread=1, loss="softmax", verbose=0, **settings)
    except RuntimeError as error:
        raise DataError(f"stage quality: fastText cannot train ({error}); set a lower learning_rate") from None
    finally:
        lines.unlink()
    aside = folder / "model.bin.tmp"
    model.save_model(str(aside))
    _require_whole(aside, model, [line for _, line in held_out])
    aside.replace(folder / "model.bin")
    report = _report(model, training, held_out)
    write_json(folder / "report.json", report)
    log(
        f"quality: trained on {report['positives']:,} positives and {report['negatives']:,} negatives; of"
        f" {report['held_out']:,} texts held out, a positive scores above a negative with p = {report['auc']:.3f}"
    )


def _require_whole(path: Path, model: Any, lines: list[str]) -> None:
    """fastText says nothing of a disk that was full: the file must score as the model does. What scores is at its end.

    Raises:
        OSError: it does not; the file is removed.
    """
    try:
        saved = load_model(path)
        whole = all(score(saved, line, POSITIVE) == score(model, line, POSITIVE) for line in lines)
    except DataError:
        whole = False
    if not whole:
        path.unlink(missing_ok=True)
        raise OSError(errno.ENOSPC, "the model was not written whole", str(path))


Labelled = list[tuple[str, str]]


def _split(options: dict[str, Any]) -> tuple[Labelled, Labelled]:
    """(label, line) to train on and held out; by the hash of the text, so that copies stay together."""
    parts: tuple[Labelled, Labelled] = ([], [])
    for label, name in ((POSITIVE, "positives"), (NEGATIVE, "negatives")):
        for path in files_option("quality", options, name):
            for text in labelled_texts(path, str(options["text"])):
                line = plain_line(text)
                rank = hashlib.sha256(line.encode("utf-8", "replace")).digest()
                held_out = int.from_bytes(rank[:8], "little") < HELD_OUT * 2.0**64
                if line:
                    parts[held_out].append((label, line.encode("utf-8", "replace").decode()))
        for part, use in zip(parts, ("train on", "hold out"), strict=True):
            if not any(one[0] == label for one in part):
                raise DataError(f"stage quality: {name} has no text to {use}; a few hundred texts are the least")
    return parts


def _report(model: Any, training: Labelled, held_out: Labelled) -> dict[str, Any]:
    """How well the model tells held-out texts apart, and what each threshold would keep of them."""
    scores = np.array([score(model, line, POSITIVE) for _, line in held_out])
    good = np.array([label == POSITIVE for label, _ in held_out])
    lower = np.sort(scores[~good])
    # Negatives below each positive, those level with it by half: Mann and Whitney 1947.
    auc = np.mean([np.searchsorted(lower, scores[good], side) for side in ("left", "right")]) / len(lower)
    kept = {f"{t / 10:.1f}": [float((scores[part] >= t / 10).mean()) for part in (good, ~good)] for t in range(1, 10)}
    counts = {name: sum(one[0] == label for one in training) for name, label in
              (("positives", POSITIVE), ("negatives", NEGATIVE))}  # fmt: skip
    return {
        **counts,
        "held_out": len(held_out),
        "auc": float(auc),
        "kept_of_held_out_positives_and_negatives_by_threshold": kept,
    }


# -- the stage --------------------------------------------------------------------------------------------------


def score(model: Any, line: str, label: str) -> float:
    """Probability of a label, at most 1; 0 if the model sees nothing in the line."""
    found = model.f.predict(line + "\n", len(model.f.getLabels("strict")[0]), 0.0, "strict")
    return min(1.0, next((float(p) for p, name in found if name.removeprefix("__label__") == label), 0.0))


def quality(options: dict[str, Any]) -> DocumentRule:
    """Drops documents that score below `threshold`; the funnel counts tenths of the score, kept and dropped."""
    threshold = options["threshold"]
    given = options["model"] is not None
    model = load_model(Path(options["model"]) if given else Path(options["built"]) / "model.bin")
    label = str(options["label"])
    known = [name.removeprefix("__label__") for name in model.f.getLabels("strict")[0]]
    if label not in known:
        raise DataError(f"stage quality: the model has no label {label}; set label to one of {', '.join(known[:20])}")

    def rule(item: Item) -> Outcome:
        text = item.string
        # A given model has its own idea of words: it gets the text as it is, in one line.
        line = " ".join(text[:_CHARACTERS].split()) if given else plain_line(text)
        found = score(model, line, label)
        tenth = min(9, int(found * 10))
        name, detail = f"quality {tenth / 10:.1f} to {(tenth + 1) / 10:.1f}", f"score {found:.3f}"
        return Kept(notes={name: 1}, detail=detail) if found >= threshold else Dropped(name, detail)

    return rule


KINDS = {
    "quality": StageKind(
        PerDocument(quality),
        {"positives": None, "negatives": None, "model": None, "label": POSITIVE, "threshold": 0.5, "text": "text",
         "dim": 64, "epochs": 5, "learning_rate": 0.1, "word_ngrams": 2, "buckets": 1 << 18, "min_count": 2, "seed": 0},
        {
            "threshold": FRACTION,
            "dim": Range(1, 1000, True),
            "epochs": Range(1, 1000, True),
            "learning_rate": Range(1e-6, 100),
            "word_ngrams": Range(1, 10, True),
            "buckets": Range(1, 1e8, True),
            "min_count": Range(1, 1e9, True),
            "seed": Range(0, 2**31 - 1, True),
        },
        identity=stage_inputs,
        packages=("fasttext-wheel",),
        build=Build(model_name, train_model),
    )
}  # fmt: skip
