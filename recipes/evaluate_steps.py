"""The measurements of recipes.evaluate: each takes the model and the command's options, tells `log`, returns values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.columns import aligned
from lm.errors import ConfigError

if TYPE_CHECKING:
    from recipes.loading import Trained

_LEAD = (
    "bits/byte leads: perplexity and loss count per token, and tokens are the tokenizer's own; only bits per byte of\n"
    "the same text compares models with different tokenizers."
)


def score_text(
    trained: Trained, options: argparse.Namespace, window: int, log: Callable[[str], None]
) -> dict[str, Any]:
    from lm.evaluation.text import NOTHING, check_context, score_file, score_source, scorer

    context = window // 2 if options.context is None else options.context
    check_context(context, window)
    found = {}
    if options.data:
        manifest = _data(trained, options.data)
        for source in manifest.source_names:
            found[source] = score_source(scorer(trained.model), manifest, source, window, options.windows)
        if not any(score.tokens for score in found.values()):
            raise ConfigError(
                f"--data {options.data}: no source has {window + 1:,} held-out tokens, a window of --window"
            )
        if len(found) > 1:
            found["all sources"] = sum(found.values(), NOTHING)
    for path in options.text or ():
        found[str(path)] = score_file(scorer(trained.model), trained.tokenizer, path, window, context)
    rows = [("text", "bits/byte", "loss", "perplexity", "tokens", "bytes")]
    for name, score in found.items():
        rows.append(
            (name, f"{score.bits_per_byte:.4f}", f"{score.loss:.4f}", f"{score.perplexity:.4g}",
             f"{score.tokens:,}", f"{score.n_bytes:,}")
        )  # fmt: skip
    log("\n" + aligned(rows) + "\n" + _LEAD)
    return {name: score.as_dict() for name, score in found.items()}


def _data(trained: Trained, folder: Path) -> Any:
    """Manifest of a data folder that was made with the model's tokenizer."""
    from lm.data.shards import load_manifest
    from lm.data.tokenizer import tokenizer_of

    manifest = load_manifest(folder)
    if tokenizer_of(manifest).to_str() != trained.tokenizer.to_str():
        raise ConfigError(
            f"{folder} was tokenized with another tokenizer than the model's; prepare the text with the model's, or"
            " give it as --text"
        )
    return manifest


def score_questions(trained: Trained, options: argparse.Namespace, log: Callable[[str], None]) -> dict[str, Any]:
    from lm.evaluation.questions import ask, read_questions, writer
    from lm.evaluation.text import scorer

    rows = [("questions", "exact match", "95%", "ln P(answer)", "per byte", "n")]
    values = {}
    for path in options.questions:
        score = ask(
            scorer(trained.model), writer(trained.model, trained.eot_id), trained.tokenizer, read_questions(path),
            trained.eot_id, options.max_new_tokens,
        )  # fmt: skip
        low, high = score.interval()
        rows.append(
            (str(path), f"{score.exact_match:.3f}", f"[{low:.3f}, {high:.3f}]", f"{score.log_probability:.3f}",
             f"{score.per_byte:.4f}", str(len(score.answered)))
        )  # fmt: skip
        values[str(path)] = {
            "exact_match": score.exact_match, "interval": [low, high],
            "log_probability": score.log_probability, "log_probability_per_byte": score.per_byte,
            "answers": [
                {"prompt": row.question.prompt, "wanted": list(row.question.answers), "written": row.written,
                 "exact": row.exact, "log_probability": row.log_probability}
                for row in score.answered
            ],
        }  # fmt: skip
    log("\n" + aligned(rows))
    return values


def probe(trained: Trained, options: argparse.Namespace, window: int, log: Callable[[str], None]) -> dict[str, Any]:
    from lm.evaluation.long_context import TASKS, effective_length
    from lm.evaluation.probes import accuracy_by_length, filler_of, make_probes, run_probes
    from lm.evaluation.questions import writer
    from lm.evaluation.text import scorer

    manifest = _data(trained, options.data)
    lengths = sorted(set(options.lengths or _lengths(window)))
    filler = filler_of(manifest, trained.tokenizer, max(lengths))
    tasks = TASKS if "all" in options.probes else tuple(dict.fromkeys(options.probes))
    scores = run_probes(
        scorer(trained.model), writer(trained.model, trained.eot_id), trained.tokenizer, trained.eot_id,
        make_probes(trained.tokenizer, filler, tasks, lengths, options.samples, options.seed),
        lambda s: log(f"  {s.task} {s.length} tokens, depth {s.depth:g}: exact {s.exact_match:.2f}"),
    )  # fmt: skip
    limits = (f"holds {options.share:.0%} up to", "falls below at")
    rows = [("task", *(f"{length} tokens" for length in lengths), *limits)]
    values: dict[str, Any] = {"cells": [vars(score) for score in scores], "effective_length": {}}
    for task in tasks:
        by_length = accuracy_by_length(scores, task)
        found = effective_length(by_length, options.share)
        values["effective_length"][task] = vars(found)
        ends = ("-" if end is None else f"{end} tokens" for end in (found.holds_to, found.falls_at))
        rows.append((task, *(f"{v:.2f}" for v in by_length.values()), *ends))
    log("\n" + aligned(rows))
    if options.plots:
        from recipes.evaluate_plots import heat_maps

        log(f"figure: {heat_maps(scores, options.plots / 'long_context.png')}")
    return values


def _lengths(window: int) -> list[int]:
    """The window, and halves of it down to what a probe needs."""
    lengths = [window]
    while lengths[-1] // 2 >= 256 and len(lengths) < 5:
        lengths.append(lengths[-1] // 2)
    return lengths[::-1]


def position_loss(
    trained: Trained, options: argparse.Namespace, window: int, log: Callable[[str], None]
) -> dict[str, Any]:
    from lm.evaluation.probes import loss_by_position

    manifest, values = _data(trained, options.data), {}
    for source in manifest.source_names:
        found = loss_by_position(trained.model, manifest, source, window)
        values[source] = [vars(row) for row in found]
        if not found:
            log(f"\n{source}: no held-out document is longer than {window} tokens: no loss by position")
            continue
        rows = [
            ("position", *(f"{row.first}-{row.last}" for row in found)),
            ("loss", *(f"{row.loss:.3f}" for row in found)),
        ]
        log(f"\n{source}\n{aligned(rows)}")
    if options.plots and any(values.values()):
        from recipes.evaluate_plots import position_losses

        log(f"figure: {position_losses(values, options.plots / 'loss_by_position.png')}")
    return values


def contamination(options: argparse.Namespace, log: Callable[[str], None]) -> dict[str, Any]:
    from lm.data.shards import load_manifest
    from lm.evaluation.contamination import check_contamination
    from lm.evaluation.questions import read_questions
    from lm.evaluation.text import read_documents

    manifest, values = load_manifest(options.data), {}
    sets = {str(p): [f"{q.prompt} {q.answers[0]}" for q in read_questions(p)] for p in options.questions or ()}
    sets |= {str(path): read_documents(path) for path in options.text or ()}
    for name, texts in sets.items():
        found = check_contamination(manifest, texts, options.ngram)
        log(
            f"\n{name}: {len(found.found)} of {found.texts - found.too_short} texts share {options.ngram} words in a"
            f" row with the training data; {found.too_short} are too short to say"
        )
        for overlap in found.found[:5]:
            log(
                f"  text {overlap.index + 1}, {overlap.share:.0%} of its n-grams, in {overlap.source}:"
                f" {overlap.example}"
            )
        values[name] = {
            "share": found.share, "texts": found.texts, "too_short": found.too_short,
            "found": [vars(overlap) for overlap in found.found],
        }  # fmt: skip
    return values


def write(trained: Trained, options: argparse.Namespace, log: Callable[[str], None]) -> list[dict[str, str]]:
    from lm.generation import Sampling, generate

    sampling = Sampling(options.temperature, options.top_p, options.seed)
    prompts = [trained.tokenizer.encode(text, add_special_tokens=False).ids for text in options.prompt]
    longest = max(len(prompt) for prompt in prompts) + options.max_new_tokens
    if longest > trained.window:
        log(f"\nnote: the model was trained on {trained.window:,} tokens; with its prompt a text may get {longest:,}")
    found = generate(trained.model, prompts, options.max_new_tokens, {trained.eot_id}, sampling)
    values = []
    for prompt, ids in zip(options.prompt, found, strict=True):
        text = trained.tokenizer.decode([token for token in ids if token != trained.eot_id])
        log(f"\n{prompt}|{text}" + (" <end of text>" if trained.eot_id in ids else ""))
        values.append({"prompt": prompt, "text": text})
    return values


def benchmarks(options: argparse.Namespace, log: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Standard benchmarks, by the harness that everybody's numbers come from."""
    from recipes.benchmarks import run_benchmarks

    found = run_benchmarks(options.ckpt_path, options.tasks, options.limit, options.device)
    rows = [("task", "measure", "value", "standard error", "n")]
    for task, values in found.items():
        measures = [key for key in values if "," in key and "_stderr" not in key]
        if not measures:
            rows.append((task, "nothing: metric_list names none", "-", "-", str(values["questions"])))
        for key in measures:
            measure, _, variant = key.partition(",")
            error = values.get(f"{measure}_stderr,{variant}")
            shown = f"{error:.4f}" if isinstance(error, float) else "-"
            rows.append((task, measure, f"{values[key]:.4f}", shown, str(values["questions"])))
    log("\n" + aligned(rows))
    return found
