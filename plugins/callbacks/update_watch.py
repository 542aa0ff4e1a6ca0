"""What the dashboard sees of gradients and of an optimizer step, part by part of the model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from plugins.callbacks.tally import Tally
from plugins.strategies.parts import Part, gradient_parts, local, optimizer_parts, torch_optimizer


def part_labels(n_layers: int) -> list[str]:
    """Parts of a model by the names their metrics end in."""
    return ["embedding", *(f"block_{index:02d}" for index in range(n_layers)), "final_norm", "head"]


def label_of(name: str) -> str:
    """The part that a parameter belongs to, by its name."""
    block = re.search(r"(?:^|\.)blocks\.(\d+)\.", name)
    if block:
        return f"block_{int(block[1]):02d}"
    return {"norm": "final_norm"}.get(name.split(".")[-2], name.split(".")[-2])


class UpdateWatch:
    """Sums of squares of gradients, updates, weights and second moments, of this rank's share.

    The change of a step is the difference between weights after and before it, so it is right for any optimizer,
    clipping and weight decay. For that the weights that the step changes are copied just before it and dropped just
    after (under ZeRO one group at a time): at that moment activations are gone, so the peak of memory stays where it
    is unless the weights outweigh them.

    Args:
        strategy: set up, parameters not gathered.
        labels: from part_labels.

    Attributes:
        tally: where the sums go; None while nobody watches.
    """

    def __init__(self, strategy: Any, labels: list[str]):
        self.strategy = strategy
        self.tally: Tally | None = None
        self._places = {label: index for index, label in enumerate(labels)}
        self._parts = optimizer_parts(strategy)
        self._before: dict[Tensor, Tensor] = {}
        optimizer = torch_optimizer(strategy)
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def close(self) -> None:
        """Leave the optimizer as it was."""
        for handle in self._handles:
            handle.remove()

    def sums(self) -> dict[str, int]:
        """Lengths of the vectors that are summed, for Tally."""
        return {
            **dict.fromkeys(("gradient", "update", "weight"), len(self._places)),
            **dict.fromkeys(("second_moment", "second_moment_count", "eps", "eps_count"), 1),
        }

    def see_gradients(self) -> None:
        """After the backward pass of the step's last micro-batch, before clipping."""
        assert self.tally is not None
        self._add("gradient", gradient_parts(self.strategy, self._parts))

    @torch.no_grad()
    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.tally is not None:
            self._before = {p: local(p).clone() for p in _stepping(optimizer)}

    @torch.no_grad()
    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.tally is None:
            return
        before, self._before = self._before, {}
        self._add("weight", self._pieces(before))
        for parameter, copy in before.items():
            copy.sub_(local(parameter))
        self._add("update", self._pieces(before))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in before:
                    self._see_second_moment(parameter, group, optimizer.state[parameter])

    def _pieces(self, tensors: dict[Tensor, Tensor]) -> list[tuple[Part, Tensor]]:
        found = []
        for parameter, tensor in tensors.items():
            flat = tensor.flatten()
            found += [(part, flat[part.start : part.start + part.length]) for part in self._parts[parameter]]
        return found

    def _add(self, name: str, pieces: list[tuple[Part, Tensor]]) -> None:
        """Add the sum of squares of each piece to its part of the model."""
        assert self.tally is not None
        if not pieces:
            return
        norms: Iterable[Tensor] = torch._foreach_norm([piece.float() for _, piece in pieces])
        shares = [norm.double().square() / part.copies for norm, (part, _) in zip(norms, pieces, strict=True)]
        self.tally.add(name, [self._places[label_of(part.name)] for part, _ in pieces], shares)

    def _see_second_moment(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Adam's, corrected for its start at zero."""
        assert self.tally is not None
        parts = self._parts[parameter]
        if "exp_avg_sq" not in state or not parts:
            return
        copies, numel = parts[0].copies, sum(part.length for part in parts)
        correction = 1 - group["betas"][1] ** state["step"]
        total = local(state["exp_avg_sq"]).sum().double() / correction
        self.tally["second_moment"].add_((total / copies).to(self.tally["second_moment"]))
        self.tally["second_moment_count"].add_(numel / copies)
        self.tally["eps"].add_(group["eps"])
        self.tally["eps_count"].add_(1)


def _stepping(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
