"""Train, validate or test a Llama model: python -m recipes.pretrain {fit,validate,test} --config FILE [--KEY VALUE ...]

Examples:
    python -m recipes.pretrain fit --config conf/experiment/demo.yaml
    python -m recipes.pretrain fit --config conf/experiment/demo.yaml --trainer.strategy fsdp --trainer.devices 2
    python -m recipes.pretrain fit --config conf/experiment/demo.yaml --ckpt_path last    # goes on
    python -m recipes.pretrain fit --config conf/experiment/demo.yaml --ckpt_path auto    # starts, or goes on
    python -m recipes.pretrain fit --config conf/experiment/demo.yaml --name more --from-hf exported/small
    python -m recipes.pretrain validate --config runs/demo/config.yaml --ckpt_path last
"""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from typing import Any

from lm.errors import ConfigError


def main() -> int:
    """Run LightningCLI; a ConfigError becomes one line and exit status 2, a signal 128 + its number."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from plugins.callbacks.heartbeat import EXIT_CODE
    from recipes.build import PretrainCLI
    from recipes.checks import is_child_rank
    from recipes.cpu import keep_freed_memory

    quiet()
    keep_freed_memory()
    try:
        PretrainCLI(help_text=__doc__ or "")
    except (ConfigError, MisconfigurationException) as error:
        if not is_child_rank():  # every rank meets the same mistake
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not _lost_contact(error):
            raise
        rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
        print(
            f"error: rank {rank} lost the other ranks: {_first_sentence(error)}; --ckpt_path auto goes on from the "
            "newest checkpoint",
            file=sys.stderr,
        )
        return EXIT_CODE
    except KeyboardInterrupt:  # before training has begun; later it saves first (plugins/callbacks/stop.py)
        return 130
    return 0


def _lost_contact(error: RuntimeError) -> bool:
    """True for what gloo and NCCL raise when another process is gone or does not answer in time."""
    return bool(
        re.search(r"gloo|NCCL|ProcessGroup", str(error))
        and re.search(r"timed out|timeout|connection (closed|reset|refused)|broken pipe|remote", str(error), re.I)
    )


def _first_sentence(error: Exception) -> str:
    """Without the place in the library's source and its general advice."""
    text = re.sub(r"\[\S+\.(cc|cpp|h|hpp):\d+\]\s*", "", " ".join(str(error).split()))
    return text.partition(". ")[0][:300]


def quiet() -> None:
    """Drop messages that ask for nothing a user of this recipe should do; a warning is one line, as an error is."""
    plain = warnings.formatwarning

    def one_line(message: Any, category: type[Warning], *where: Any, **line: Any) -> str:
        return (
            f"warning: {' '.join(str(message).split())}\n"
            if category is UserWarning
            else plain(message, category, *where, **line)
        )

    warnings.formatwarning = one_line
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*`__len__` defined.*")
    warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
    warnings.filterwarnings("ignore", message=".*is deprecated.*", category=FutureWarning)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # "Creating initial MLflow database tables"
    for name in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not re.search(
        r"litlogger|GPU available|TPU available|`max_steps=|limit_val_batches=1.0|weights_only|Seed set"
        r"|distributed_backend=|^$",
        record.getMessage().strip(),
    )


if __name__ == "__main__":
    sys.exit(main())
