"""Print which parameter gets which optimizer, learning rate, weight decay and initial values.

Takes the same --config and keys as `python -m recipes.pretrain fit`; trains nothing.

Examples:
    python -m recipes.parameters --config conf/experiment/demo.yaml
    python -m recipes.parameters --config conf/experiment/demo.yaml --model.optim.name muon
    python -m recipes.parameters --config conf/experiment/demo.yaml --model.config.d_model 384 --json
"""

from __future__ import annotations

import json
import logging
import sys
import warnings

from lm.columns import aligned
from lm.optim.table import parameter_table
from recipes.command import command_parser, exit_status


def main(argv: list[str] | None = None) -> int:
    """Print the table; bad input is one line and status 2."""
    parser = command_parser("recipes.parameters", __doc__)
    parser.add_argument("--json", action="store_true", help="a list of objects instead of columns")
    options, run = parser.parse_known_args(argv)
    if not run:
        parser.error("give the run's --config FILE")
    return exit_status(lambda: _print(run, options.json))


def _print(run: list[str], as_json: bool) -> None:
    from recipes.build import parse

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = parse(run).model
    header, *rows = parameter_table(module.model_config, module.optim_config)
    if as_json:
        print(json.dumps([dict(zip(header, row, strict=True)) for row in rows], indent=1))
    else:
        print(aligned([header, *rows], text_columns=None))


if __name__ == "__main__":
    sys.exit(main())
