"""The whole journey on real text, minutes on 2 CPU cores: corpus, sweep, fit, forecast, run, and the two held together.

Examples:
    make demo
    python -m recipes.demo
    python -m recipes.demo --budget 1.5e13 --processes 2

Each step is a public command, printed before it runs; what is valid from an earlier call is used again, and an
interrupted step goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from recipes.command import command_parser

DATA_CONFIG = "conf/data/demo.yaml"
SWEEP_CONFIG = "conf/sweep/demo.yaml"
OUT = Path("runs/demo")
RUNS = Path("runs")


class StepFailed(RuntimeError):
    """A command of the demo ended with an error of its own."""


def step(title: str, arguments: list[str]) -> None:
    """Run `python -m ARGUMENTS` and show it."""
    print(f"\n== {title}\n$ python -m {shlex.join(arguments)}", flush=True)
    started = time.monotonic()
    code = subprocess.run([sys.executable, "-m", *arguments]).returncode
    if code != 0:
        raise StepFailed(f"'python -m {shlex.join(arguments)}' ended with status {code}; run make demo again to go on")
    print(f"   {time.monotonic() - started:.0f} s", flush=True)


def train(config: Path, name: str) -> None:
    """Train the planned run, or go on with it; a finished one has nothing left to do."""
    arguments = ["recipes.pretrain", "fit", "--config", str(config)]
    if (RUNS / name / "config.yaml").exists():
        arguments += ["--ckpt_path", "last"]
    step("Train the planned run", arguments)


def summary(seconds: float) -> str:
    """The table at the end."""
    manifest = json.loads(Path("data/demo/manifest.json").read_text())
    fit, forecast, outcome = (
        json.loads((OUT / name).read_text()) for name in ("fit.json", "forecast.json", "outcome.json")
    )
    lines = ["", "== What came out", ""]
    for name, source in manifest["sources"].items():
        train_split = source["splits"]["train"]
        lines.append(
            f"source {name:<12}{train_split['documents']:>8,} documents {train_split['tokens']:>11,} tokens"
            f"  validation {outcome['val_loss/' + name]:.3f} nats per token, {outcome['bpb/' + name]:.3f} bits per byte"
        )
    lines.append(
        f"sweep  {fit['n_runs']} runs over {len(fit['budgets_flops'])} budgets, {_span(fit['budgets_flops'])} FLOPs"
    )
    for name, result in fit["results"].items():
        lines.append(
            f"fit    {name:<17} N* ~ C^{result['a']:.3f} {_ends(result['a_interval'], 3)}"
            f"  D* ~ C^{result['b']:.3f} {_ends(result['b_interval'], 3)}"
            f"  leave-last-budget-out error {_percent(result['holdout_error'])}"
        )
    for name, reason in fit["refused"].items():
        lines.append(f"fit    {name:<17} refused: {reason}")
    inside = "inside" if outcome["inside"] else "OUTSIDE"
    lines += [
        f"plan   {forecast['c_flops']:.3g} FLOPs: {forecast['n_params']:,.0f} parameters,"
        f" {forecast['d_tokens']:,.0f} tokens",
        f"forecast   {forecast['loss']:.3f} {_ends([forecast['loss_lo'], forecast['loss_hi']], 3)}"
        f" by {forecast['approach']}",
        f"measured   {outcome['val_loss']:.3f}: {inside} the 95% interval, {outcome['relative_error']:+.2%} off",
        f"note   {fit['note']}",
        "",
        f"report     {OUT / 'report.html'}",
        "MLflow     .venv/bin/mlflow ui --backend-store-uri sqlite:///mlflow.db   then http://localhost:5000,"
        " Model training at the top left",
        f"time       {seconds / 60:.1f} minutes",
    ]
    return "\n".join(lines)


def _span(values: list[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}"


def _ends(values: list[float | None], digits: int) -> str:
    if None in values:
        return "without an interval"  # the flags of the fit say why
    return "[" + ", ".join(f"{value:.{digits}f}" for value in values) + "]"


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:+.1%}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Options of the demo."""
    parser = command_parser("recipes.demo", __doc__)
    parser.add_argument("--budget", type=float, default=3.6e12, help="FLOPs of the planned run")
    parser.add_argument("--processes", type=int, default=2, help="of the planned run")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when the journey was made, whatever the forecast was worth."""
    options = parse(argv)
    started = time.monotonic()
    decide: list[Any] = ["sweeps.decide", "--config", SWEEP_CONFIG, "--out", str(OUT)]
    decide += ["--budget", f"{options.budget:g}", "--processes", str(options.processes)]
    try:
        step("Prepare the corpus", ["recipes.data", "prepare", "--config", DATA_CONFIG])
        step("Sweep sizes at four budgets", ["sweeps.isoflop", "--config", SWEEP_CONFIG, "--resume"])
        step("Fit, decide, forecast", decide)
        decision = json.loads((OUT / "forecast.json").read_text())
        train(OUT / "run.yaml", decision["run"])
        step("Hold the run against the forecast", ["sweeps.report", "--decision", str(OUT)])
    except StepFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; run make demo again to go on", file=sys.stderr)
        return 130
    print(summary(time.monotonic() - started))
    return 0


if __name__ == "__main__":
    sys.exit(main())
