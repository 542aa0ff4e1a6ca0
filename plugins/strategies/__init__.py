"""Ways to spread training over processes, one checkpoint format for all of them, and their names for the command line.

Call register() once, then Trainer(strategy="fsdp") or --trainer.strategy fsdp.
"""

from __future__ import annotations

NAMES = ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")


def register() -> None:
    """Put NAMES into Lightning's StrategyRegistry, replacing its own entries. Safe to call again.

    Must run before a Trainer or a LightningCLI looks a name up.
    """
    from lightning.pytorch.strategies import FSDPStrategy, StrategyRegistry

    from plugins.strategies.ddp import DDP
    from plugins.strategies.deepspeed import ZeRO
    from plugins.strategies.fsdp import FSDP
    from plugins.strategies.hsdp import HSDP
    from plugins.strategies.single import Single

    def put(name: str, strategy: type, description: str, **arguments: int) -> None:
        StrategyRegistry.register(name, strategy, description=description, override=True, **arguments)

    put("single", Single, "one process")
    put("ddp", DDP, "a copy of the model on each device")
    put("fsdp", FSDP, "parameters, gradients and optimizer state cut over all devices (fully_shard)")
    put("hsdp", HSDP, "fsdp inside groups of devices (nodes by default), copies between them")
    for stage in (1, 2, 3):
        put(f"zero{stage}", ZeRO, f"DeepSpeed ZeRO stage {stage}", stage=stage)

    # Lightning refuses these names without a GPU because its own FSDPStrategy needs one; ours does not.
    while "fsdp" in FSDPStrategy._registered_strategies:
        FSDPStrategy._registered_strategies.remove("fsdp")
