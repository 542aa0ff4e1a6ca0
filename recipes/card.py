"""Write a model card (Markdown) from a run: what it is, what it read, how it was trained, what it is worth.

Everything in it is read from the run's folder and from the files that other commands wrote; nothing is filled in by
hand, and what is not known is said to be so.

Examples:
    python -m recipes.card --run runs/small
    python -m recipes.evaluate --ckpt_path runs/small --data data/demo --json scores.json
    python -m sweeps.ledger --json forecasts.json
    python -m recipes.card --run runs/small --scores scores.json --forecasts forecasts.json --plan plan.json
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.errors import ConfigError
from recipes.card_facts import RunFacts, as_written, read_run, read_values
from recipes.command import command_parser, exit_status
from recipes.files import check_places, write_text

_CONFIG = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab_size", "sequence_length", "tie_embeddings")
_TRAINING = (
    *("schedule", "lr", "weight_decay", "global_batch_tokens", "seed", "strategy", "world_size", "precision"),
    *("torch_version", "git_commit"),
)
_LIMITS = """## Limits

This is a pretrained model: it continues text and has not been taught to follow instructions, to refuse, or to be
truthful. It reproduces what its sources say, biases included. The licences above are those its sources state; whether
they allow a use is for whoever uses it to judge."""


def write_card(
    run: Path,
    scores: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    forecasts: Mapping[str, Any] | None = None,
) -> str:
    """The card's text.

    Args:
        run: a run's folder.
        scores: what `recipes.evaluate --json` wrote.
        plan: what `recipes.plan --json` printed.
        forecasts: what `sweeps.ledger --json` wrote.

    Raises:
        ConfigError: see read_run; or a file is not what its command writes.
    """
    from recipes.export import data_folder

    facts = read_run(run)
    data = data_folder(run)
    parts = [f"# {facts.name}"]
    parts += [_model(facts), _data(run, data), _training(facts)]
    with as_written("--plan"):
        parts.append(_plan(facts, plan))
    with as_written("--forecasts"):
        parts.append(_forecast(facts, forecasts))
    with as_written("--scores"):
        parts.append(_evaluations(facts, scores))
    parts.append(_LIMITS)
    return "\n\n".join(parts) + "\n"


def _model(facts: RunFacts) -> str:
    rows = [(key, _shown(facts.params[key])) for key in _CONFIG if key in facts.params]
    rows[:0] = [
        ("parameters", _count(facts.params.get("n_params_total"))),
        ("parameters without embeddings", _count(facts.params.get("n_params_non_embedding"))),
    ]
    return "## Model\n\nA Llama language model (decoder-only transformer).\n\n" + _table(("", ""), rows)


def _data(run: Path, folder: Path | None) -> str:
    from lm.data.shards import load_manifest

    text = "## Data"
    if (run / "data.txt").is_file():
        try:
            read = (run / "data.txt").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{run / 'data.txt'} cannot be read: {error}") from None
        text += f"\n\nWhat the run read, by stage and source:\n\n```\n{read}\n```"
    if folder is None or not (folder / "manifest.json").is_file():
        return text + f"\n\nThe data folder ({folder}) is not there any more: licences are not known here."
    manifest = load_manifest(folder)
    rows = []
    for name in manifest.source_names:
        train = manifest.split(name, "train")
        licence = manifest.content["sources"][name].get("licence", "not stated")
        with as_written(f"{folder / 'manifest.json'}"):
            counts = [f"{train[key]:,.0f}" for key in ("documents", "tokens", "utf8_bytes")]
        rows.append((name, *counts, licence))
    return text + "\n\n" + _table(("source", "documents", "train tokens", "bytes", "licence"), rows)


def _training(facts: RunFacts) -> str:
    rows = [(key, _shown(facts.params[key])) for key in _TRAINING if key in facts.params]
    rows += [(name, f"{facts.last[key][1]:.4g} (step {facts.last[key][0]:,})") for name, key in (
        ("training loss, nats per token", "loss"), ("validation loss", "val_loss"), ("validation bits per byte", "bpb"),
    ) if key in facts.last]  # fmt: skip
    if "spike/skipped_steps" in facts.last:
        rows.append(("steps skipped by the spike guard", f"{facts.last['spike/skipped_steps'][1]:.0f}"))
    text = "## Training\n\n" + _table(("", ""), rows)
    with as_written("spike_guard.json"):
        for back in facts.roll_backs:
            samples = sum(stop - start for start, stop in back["dropped"])
            text += (
                f"\n\nRolled back from step {back['at_step']:,} to {back['to_step']:,} after repeated spikes from step"
                f" {back['first_strike'] + 1:,}; {samples:,} samples around them were dropped."
            )
    return text


def _plan(facts: RunFacts, plan: Mapping[str, Any] | None) -> str:
    steps = max((step for step, _ in facts.last.values()), default=0)
    batch, planned_tokens = _number(facts.params.get("global_batch_tokens")), _number(facts.params.get("d_tokens"))
    rows = [
        ("tokens", _count(planned_tokens), _count(min(steps * batch, planned_tokens))),
        ("hours", "not planned", f"{facts.seconds / 3600:.3g}"),
    ]
    note = "Planned tokens are those of the run's own config."
    if plan is not None:
        seconds = plan["time_and_cost"]["seconds"]
        rows[1] = ("hours", f"{seconds / 3600:.3g}", f"{facts.seconds / 3600:.3g}")
        rows.insert(0, ("parameters", _count(plan["parameters"]["total"]), _count(facts.params.get("n_params_total"))))
        rows.append(("tokens per second", f"{plan['step']['tokens_per_s']:,.0f}", _last(facts, "tokens_per_second")))
        rows.append(("MFU", f"{plan['step']['mfu']:.1%}", _last(facts, "mfu", "{:.1%}")))
        note = "Planned by `recipes.plan`."
    return f"## Plan against actual\n\n{_table(('', 'planned', 'actual'), rows)}\n\n{note}"


def _forecast(facts: RunFacts, forecasts: Mapping[str, Any] | None) -> str:
    head = "## Forecast against actual\n\n"
    if not facts.forecast_id:
        return head + "No forecast was written down before this run."
    rows = [row for row in (forecasts or {}).get("rows", []) if row["forecast_id"] == facts.forecast_id]
    if not rows:
        return head + f"Forecast {facts.forecast_id}; its figures were not given to this card (`--forecasts`)."
    row = rows[0]
    measured = "not known" if row["measured"] is None else f"{row['measured']:.4f}"
    table = _table(
        ("predicted loss", "95% interval", "measured", "verdict"),
        [(_figure(row["loss"]), f"{_figure(row['low'])} to {_figure(row['high'])}", measured, row["status"])],
    )
    return f"{head}Forecast {facts.forecast_id}, written by approach {row['approach']} before the run.\n\n{table}"


def _evaluations(facts: RunFacts, scores: Mapping[str, Any] | None) -> str:
    head = "## Evaluations\n\n"
    if scores is None:
        return head + "None were given to this card (`recipes.evaluate --json`)."
    parts: list[str] = []
    rows: list[tuple[str, ...]]
    if "text" in scores:
        rows = [
            (Path(name).name, _figure(row["bits_per_byte"]), _figure(row["loss"]), _count(row["tokens"]))
            for name, row in scores["text"].items()
        ]
        parts.append(_table(("held-out text", "bits per byte", "loss, nats per token", "tokens"), rows))
    if "questions" in scores:
        rows = [
            (Path(name).name, f"{row['exact_match']:.3f} ({row['interval'][0]:.3f} to {row['interval'][1]:.3f})",
             _figure(row["log_probability_per_byte"]))
            for name, row in scores["questions"].items()
        ]  # fmt: skip
        parts.append(_table(("questions", "exact match (95%)", "ln P(answer) per byte"), rows))
    if "tasks" in scores:
        rows = [
            (task, key.partition(",")[0], _figure(value), str(row["questions"]))
            for task, row in scores["tasks"].items()
            for key, value in row.items()
            if "," in key and "_stderr" not in key
        ]
        parts.append(_table(("benchmark", "measure", "value", "questions"), rows))
    if "probes" in scores:
        held = scores["probes"]["effective_length"]
        rows = [(task, *_length_words(found)) for task, found in held.items()]
        parts.append(_table(("long-context task", "holds up to, tokens", "falls below at, tokens"), rows))
    for name, row in scores.get("contamination", {}).items():
        parts.append(
            f"Contamination: {row['share']:.1%} of the texts of {Path(name).name} share a long run of words with the"
            f" training data ({row['too_short']} of {row['texts']} too short to say)."
        )
    return head + "\n\n".join(parts)


def _length_words(found: Mapping[str, int | None]) -> tuple[str, str]:
    """Of lm.evaluation.long_context.EffectiveLength."""
    if found["holds_to"] is None:
        return "answers nothing", "answers nothing"
    return f"{found['holds_to']:,}", "none tried" if found["falls_at"] is None else f"{found['falls_at']:,}"


def _last(facts: RunFacts, key: str, form: str = "{:,.0f}") -> str:
    return form.format(facts.last[key][1]) if key in facts.last else "not measured"


def _number(value: Any) -> float:
    """NaN for what is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _count(value: Any) -> str:
    number = _number(value)
    return f"{number:,.0f}" if math.isfinite(number) else "not known"


def _figure(value: float | str | None) -> str:
    """Four digits; JSON has null for what is no number, and a benchmark may have a word of its own."""
    return "no number" if value is None else f"{value:.4f}" if isinstance(value, int | float) else str(value)


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    p = command_parser("recipes.card", __doc__)
    p.add_argument("--run", type=Path, required=True, metavar="DIR", help="a run's folder")
    p.add_argument("--scores", type=Path, metavar="FILE", help="of python -m recipes.evaluate --json FILE")
    p.add_argument("--plan", type=Path, metavar="FILE", help="of python -m recipes.plan --json > FILE")
    p.add_argument("--forecasts", type=Path, metavar="FILE", help="of python -m sweeps.ledger --json FILE")
    p.add_argument("--out", type=Path, metavar="FILE", help="default: model_card.md in the run's folder")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 0, or 2 after one line on stderr."""
    options = build_parser().parse_args(argv)

    def command() -> None:
        out = options.out or options.run / "model_card.md"
        check_places((options.out,))
        text = write_card(
            options.run,
            read_values(options.scores, "--scores", ["model"]),
            read_values(options.plan, "--plan", ["parameters", "time_and_cost", "step"]),
            read_values(options.forecasts, "--forecasts", ["rows"]),
        )
        write_text(out, text)
        print(f"wrote {out}")

    return exit_status(command)


if __name__ == "__main__":
    sys.exit(main())
