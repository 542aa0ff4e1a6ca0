"""From a config to an optimizer."""

from __future__ import annotations

import torch
from torch import nn

from lm.config import ModelConfig
from lm.optim.config import OptimConfig
from lm.optim.groups import parameter_groups
from lm.optim.muon import MuonAdamW


def make_optimizer(model: nn.Module, model_config: ModelConfig, optim_config: OptimConfig) -> torch.optim.Optimizer:
    """The run's one optimizer, over the table of lm.optim.groups.

    Args:
        model: with its values, sharded or not; parameter names as in Llama.

    Returns:
        torch.optim.AdamW (fused), or MuonAdamW.
    """
    groups = parameter_groups(model, model_config, optim_config)
    betas = (optim_config.betas[0], optim_config.betas[1])
    if optim_config.name == "muon":
        return MuonAdamW(groups, lr=optim_config.lr, betas=betas, eps=optim_config.eps)
    return torch.optim.AdamW(groups, lr=optim_config.lr, betas=betas, eps=optim_config.eps, fused=True)
