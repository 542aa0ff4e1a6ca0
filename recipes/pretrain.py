"""Train, validate or test a Llama model: python -m recipes.pretrain {fit,validate,test} --config FILE [--KEY VALUE ...]

Examples:
    python -m recipes.pretrain fit --config conf/experiment/demo.yaml
    python -m recipes.pretrain fit --config conf/experiment/demo.yaml --trainer.strategy fsdp --trainer.devices 2
    python -m recipes.pretrain fit --config conf/experiment/demo.yaml --ckpt_path last
    python -m recipes.pretrain validate --config runs/demo/config.yaml --ckpt_path last
"""

from __future__ import annotations

import sys
import warnings

from lm.errors import ConfigError


def main() -> int:
    """Run LightningCLI; a ConfigError becomes one line and exit status 2."""
    _quiet()
    from recipes.build import PretrainCLI

    try:
        PretrainCLI()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _quiet() -> None:
    """Drop warnings that ask for nothing a user of this recipe should do."""
    for message in (
        ".*does not have many workers.*",
        ".*`IterableDataset` has `__len__` defined.*",
        ".*`isinstance\\(treespec, LeafSpec\\)`.*",
    ):
        warnings.filterwarnings("ignore", message=message)


if __name__ == "__main__":
    sys.exit(main())
