"""Cross-entropy of next tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # label of a position that predicts nothing (the last token of a document)


def token_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood of each label, in nats.

    Args:
        logits: [B, T, V], any float dtype; the softmax runs in fp32.
        labels: [B, T] int64, already shifted: labels[b, t] is the token after position t, or IGNORE.

    Returns:
        [B, T] fp32; 0 where the label is IGNORE.
    """
    nll = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none")
    # A copy, since fully_shard hooks the model's output and loses the hook when a view of it is changed in place.
    return nll.view(labels.shape).clone()
