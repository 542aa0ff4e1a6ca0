"""Plan a run on paper: parameters, FLOPs, memory, communication, time, cost, layout, checkpoints, predicted loss.

The layout is searched: the fastest that fits, with reasons and runners-up. --out writes it as a config that
`recipes.pretrain fit` takes. docs/plan.md says what each figure counts.

Examples:
  python -m recipes.plan --config conf/plan/llama_7b.yaml
  python -m recipes.plan --config conf/plan/llama_7b.yaml --json
  python -m recipes.plan --config conf/plan/llama_7b.yaml --plots runs/plan --out runs/plan/llama_7b.yaml
  python -m recipes.plan --config conf/plan/llama_7b.yaml --what-if
  python -m recipes.plan --config conf/plan/llama_7b.yaml --what-if cluster.devices=512 cluster.device=H200
  python -m recipes.plan --config conf/plan/budget.yaml
  python -m recipes.plan --calibrate runs/machine.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from lm.data.files import plain
from lm.errors import ConfigError
from recipes.command import command_parser, exit_status
from recipes.files import check_places, read_config
from recipes.plan_config import job_from, override, pretrain_config, write_config


def build_parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    parser = command_parser("recipes.plan", __doc__)
    parser.add_argument("--config", type=Path, help="YAML file of a plan, see conf/plan/")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw memory by part and time by part as PNG")
    parser.add_argument("--out", type=Path, metavar="CONFIG.yaml", help="write a config for recipes.pretrain fit")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="change values of the plan")
    parser.add_argument(
        "--what-if",
        nargs="*",
        metavar="KEY=VALUE[,KEY=VALUE]",
        help="compare with the plan; without a value: half the devices, 32k context, fp8, 13B",
    )
    parser.add_argument("--calibrate", type=Path, metavar="FILE.json", help="measure this machine as a device")
    parser.add_argument("--seconds", type=float, default=60, help="of the calibration")
    return parser


def assignments(text: str) -> dict[str, Any]:
    """{"cluster.devices": 128} of "cluster.devices=128"; several with commas; values as in YAML, lists among them.

    Raises:
        ConfigError: no KEY=VALUE.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    changes: dict[str, Any] = {}
    for part in _parts(text):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ConfigError(f"{text!r} is not KEY=VALUE, such as cluster.devices=128")
        try:
            # As in the files: a loader of YAML 1.1 takes 1e12 for a word.
            read: Any = OmegaConf.to_container(OmegaConf.create(f"value: {value}"))
        except (yaml.YAMLError, OmegaConfBaseException):
            raise ConfigError(f"{text!r}: the value {value!r} is not YAML; quote it, or close its brackets") from None
        changes[key.strip()] = read["value"]
    return changes


def _parts(text: str) -> list[str]:
    """Cut at commas that are in no brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 2 and one line where the plan makes no sense or nothing fits."""
    options = build_parser().parse_args(argv)
    return exit_status(lambda: run(options, argv))


def run(options: argparse.Namespace, argv: list[str] | None = None) -> None:
    """Plan, and print, draw and write what was asked for.

    Raises:
        ConfigError: see recipes.plan_config.job_from and lm.planner.search.search.
    """
    from lm.planner.plan import make_plan

    check_places((options.out, options.calibrate), (options.plots,))
    if options.calibrate:
        from recipes.calibrate import calibrate

        print(calibrate(options.calibrate, options.seconds))
        return
    if options.config is None:
        raise ConfigError("recipes.plan needs --config FILE, such as conf/plan/llama_7b.yaml, or --calibrate FILE")
    values = read_config(options.config, "conf/plan/")
    for text in options.set:
        values = override(values, assignments(text))
    job = job_from(values)
    plan = make_plan(job)
    if options.what_if is not None:
        from recipes.plan_what_if import changes_of, compare

        plan["what_if"] = compare(values, plan, changes_of(values, [assignments(text) for text in options.what_if]))
    if options.out:
        command = "python -m recipes.plan " + shlex.join(sys.argv[1:] if argv is None else argv)
        write_config(pretrain_config(job, plan), options.out, command)
        print(f"wrote {options.out}", file=sys.stderr)
    if options.plots:
        from recipes.plan_plots import plot

        for path in plot(plan, options.plots):
            print(f"wrote {path}", file=sys.stderr)
    if options.json:
        print(json.dumps(plain(plan)))
    else:
        from recipes.plan_page import page

        print(page(plan))


if __name__ == "__main__":
    sys.exit(main())
