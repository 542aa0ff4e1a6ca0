"""Judge a trained model: bits per byte, questions, long context, contamination; or let it write.

Takes a checkpoint of any strategy, a run's folder (its newest checkpoint) or an exported Hugging Face folder.

Examples:
    python -m recipes.evaluate --ckpt_path runs/small --data data/demo
    python -m recipes.evaluate --ckpt_path runs/small --text book.txt held_out.jsonl --json scores.json
    python -m recipes.evaluate --ckpt_path runs/small --questions trivia.jsonl --data data/demo --contamination
    python -m recipes.evaluate --ckpt_path runs/small --data data/demo --probes all --plots figures
    python -m recipes.evaluate --ckpt_path exported/small --tasks arc_easy my_task.yaml
    python -m recipes.evaluate --ckpt_path exported/small --prompt "In the beginning" --temperature 0.8 --top-p 0.95
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.data.files import plain
from recipes import evaluate_steps
from recipes.command import command_parser, exit_status
from recipes.evaluate_checks import check_options
from recipes.files import write_text

if TYPE_CHECKING:
    from recipes.loading import Trained


def evaluate(options: argparse.Namespace, log: Callable[[str], None]) -> dict[str, Any]:
    """Everything that was asked for, as plain values; see docs/evaluation.md for the keys.

    Raises:
        ConfigError: nothing was asked for, or what was cannot be read.
    """
    from recipes.loading import load_trained

    check_options(options)
    trained = load_trained(options.ckpt_path, options.tokenizer, options.device)
    window = options.window or trained.window
    values: dict[str, Any] = {"model": _model(trained, window)}
    log(_head(values["model"]))
    if options.data or options.text:
        values["text"] = evaluate_steps.score_text(trained, options, window, log)
    if options.questions:
        values["questions"] = evaluate_steps.score_questions(trained, options, log)
    if options.probes:
        values["probes"] = evaluate_steps.probe(trained, options, window, log)
    if options.positions:
        values["positions"] = evaluate_steps.position_loss(trained, options, window, log)
    if options.contamination:
        values["contamination"] = evaluate_steps.contamination(options, log)
    if options.tasks:
        values["tasks"] = evaluate_steps.benchmarks(options, log)
    if options.prompt:
        values["prompts"] = evaluate_steps.write(trained, options, log)
    return values


def _model(trained: Trained, window: int) -> dict[str, Any]:
    from lm.plan import count_parameters

    return {
        "path": str(trained.path),
        "step": trained.step,
        "parameters": count_parameters(trained.model.config).total,
        "vocabulary": trained.model.config.vocab_size,
        "window": window,
    }


def _head(model: dict[str, Any]) -> str:
    sizes = f"{model['parameters']:,} parameters, {model['vocabulary']:,} ids"
    return f"{model['path']}: {sizes}, windows of {model['window']} tokens"


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    p = command_parser("recipes.evaluate", __doc__)
    p.add_argument("--ckpt_path", type=Path, required=True, help="a checkpoint, a run's folder or an exported model")
    p.add_argument("--tokenizer", type=Path, help="tokenizer.json or its folder; default: the run's data folder")
    p.add_argument("--device", default="cpu", help="where the model runs")
    p.add_argument("--data", type=Path, metavar="DIR", help="prepared data: its held-out split, per source")
    p.add_argument("--windows", type=int, metavar="N", help="of each source at most (default: all)")
    p.add_argument("--text", type=Path, nargs="+", metavar="FILE", help="text, or JSONL with a field text")
    p.add_argument("--window", type=int, metavar="T", help="tokens the model sees (default: longest trained on)")
    p.add_argument("--context", type=int, metavar="T", help="of --text: least tokens before a token of a later window")
    p.add_argument("--questions", type=Path, nargs="+", metavar="FILE", help='JSONL of {"prompt": ..., "answer": ...}')
    p.add_argument(
        "--probes", nargs="+", metavar="TASK", help="long-context tasks: needle needles variables frequent all"
    )
    p.add_argument("--lengths", type=int, nargs="+", metavar="T", help="of the probes (default: window, 1/2, 1/4 ...)")
    p.add_argument("--samples", type=int, default=5, help="probes of a length and depth")
    p.add_argument(
        "--share", type=float, default=0.85, help="of the shortest length's score that still counts as holding"
    )
    p.add_argument("--positions", action="store_true", help="loss by position in long held-out documents")
    p.add_argument("--contamination", action="store_true", help="what --questions and --text share with --data")
    p.add_argument("--ngram", type=int, default=13, metavar="N", help="words in a row that count")
    p.add_argument("--tasks", nargs="+", metavar="TASK", help="of lm-evaluation-harness: names, or task files (.yaml)")
    p.add_argument("--limit", type=int, metavar="N", help="questions of each of --tasks at most")
    p.add_argument("--prompt", nargs="+", metavar="TEXT", help="let the model go on from here")
    p.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="of an answer")
    p.add_argument("--temperature", type=float, default=0.0, help="of --prompt; 0: the likeliest")
    p.add_argument("--top-p", type=float, default=1.0, help="of --prompt: nucleus")
    p.add_argument("--seed", type=int, default=0, help="of --prompt and --probes")
    p.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    p.add_argument("--plots", type=Path, metavar="DIR", help="write figures here")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 0, or 2 after one line on stderr."""
    options = build_parser().parse_args(argv)

    def command() -> None:
        values = evaluate(options, lambda line: print(line, flush=True))
        if options.json:
            write_text(options.json, json.dumps(plain(values), indent=1, ensure_ascii=False) + "\n")
            print(f"\nnumbers: {options.json}")

    return exit_status(command, "stopped" + ("; --json was not written" if options.json else ""))


if __name__ == "__main__":
    sys.exit(main())
