"""FLOPs of a run whose sequence length changes."""

from __future__ import annotations

from lm.config import ModelConfig
from lm.data.plan import DataPlan
from lm.plan import flops_per_token


def flops_until(config: ModelConfig, plan: DataPlan, step: int) -> int:
    """FLOPs of the steps before this one (lm.plan's default convention), each stage at its own sequence length."""
    return sum(tokens * flops_per_token(config, length) for length, tokens in plan.tokens_by_length(step))
