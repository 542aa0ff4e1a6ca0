"""How many tokens a step takes, when the batch grows over the run: step -> tokens, piecewise linear. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lm.errors import ConfigError


class BatchRamp:
    """Global batch as a function of the step.

    Args:
        points: (from_tokens, batch_tokens): from that many training tokens on, a step takes so many. The first is at 0;
            a later one takes effect with the first step that begins at or after its tokens.

    Attributes:
        points: as given, integers.
        starts: (first step, tokens before it, batch_tokens) of each piece.

    Raises:
        ConfigError: points that do not begin at 0 or increase, or two that begin at one step.
    """

    def __init__(self, points: Sequence[Sequence[float]]) -> None:
        if not points or any(len(point) != 2 for point in points):
            raise ConfigError(f"batch_ramp must be a list of [from_tokens, batch_tokens], got {points}")
        if not all(float(value).is_integer() for point in points for value in point):
            raise ConfigError(f"batch_ramp must hold whole numbers of tokens, got {points}")
        self.points = tuple((int(tokens), int(batch)) for tokens, batch in points)
        if self.points[0][0] != 0 or any(batch < 1 for _, batch in self.points):
            raise ConfigError(f"batch_ramp must begin at 0 tokens and hold positive batches, got {list(self.points)}")
        if any(later[0] <= earlier[0] for earlier, later in pairwise(self.points)):
            raise ConfigError(f"batch_ramp must have increasing from_tokens, got {list(self.points)}")
        self.starts: list[tuple[int, int, int]] = [(0, 0, self.points[0][1])]
        for tokens, batch in self.points[1:]:
            step, before, current = self.starts[-1]
            steps = -(-(tokens - before) // current)
            if steps < 1:
                raise ConfigError(
                    f"batch_ramp: the pieces from {before} and {tokens} tokens begin at one step; drop one"
                )
            self.starts.append((step + steps, before + steps * current, batch))

    def piece(self, step: int) -> int:
        """Index of the piece that a 0-based step lies in."""
        return sum(start <= step for start, _, _ in self.starts[1:])

    def batch(self, step: int) -> int:
        """Tokens that a 0-based step takes."""
        return self.starts[self.piece(step)][2]

    def tokens(self, step: int) -> int:
        """Tokens that the steps before this one take."""
        first, before, batch = self.starts[self.piece(step)]
        return before + (step - first) * batch

    def first_step_at(self, tokens: int) -> int:
        """First step that begins at or after `tokens`."""
        first, before, batch = self._piece_of(tokens)
        return first + max(0, -(-(tokens - before) // batch))

    def nearest_step(self, tokens: float) -> int:
        """Number of steps whose tokens come nearest to `tokens`, at least 1."""
        first, before, batch = self._piece_of(tokens)
        return max(1, first + round((tokens - before) / batch))

    def _piece_of(self, tokens: float) -> tuple[int, int, int]:
        return next(start for start in reversed(self.starts) if start[1] <= max(tokens, 0))
