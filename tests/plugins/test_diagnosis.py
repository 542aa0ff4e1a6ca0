"""The diagnosis names the cause that the history shows."""

from __future__ import annotations

from collections import deque

import pytest

from plugins.callbacks.diagnosis import diagnose


def ramp(first: float, last: float, n: int = 60) -> deque:
    return deque((10 * i, first + (last - first) * i / (n - 1)) for i in range(n))


FLAT = {
    "loss": ramp(3.2, 3.0),
    "log_z": ramp(0.1, 0.3),
    "attention_logit/block_00": ramp(9, 12),
    "attention_logit/block_01": ramp(8, 9),
    "update_ratio/block_00": ramp(1e-3, 9e-4),
}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"attention_logit/block_01": ramp(10, 400)}, ["attention logits grew", "block_01", "qk_norm"]),
        ({"log_z": ramp(0, 12)}, ["log Z drifted", "z_loss"]),
        ({"log_z": ramp(0, -12)}, ["log Z drifted", "z_loss"]),
        ({"update_ratio/block_00": ramp(1e-3, 4e-3)}, ["updates grew", "block_00", "optim.lr"]),
    ],
)
def test_each_sign_has_its_remedy(changed: dict, words: list[str]) -> None:
    text = diagnose({**FLAT, **changed}, 600, {"code": 3})
    assert all(word in text for word in words)
    assert "data" not in text and "\n" not in text


def test_signs_add_up_with_the_worst_block() -> None:
    logits = {"attention_logit/block_00": ramp(10, 60), "attention_logit/block_01": ramp(10, 900)}
    text = diagnose({**FLAT, **logits, "log_z": ramp(0, 5)}, 600)
    assert "block_01" in text and "block_00" not in text and text.index("qk_norm") < text.index("z_loss")


def test_updates_that_rise_with_the_loss_are_no_early_sign() -> None:
    history = {**FLAT, "update_ratio/block_00": ramp(1e-3, 4e-3), "loss": ramp(3.0, 5.0)}
    assert "look at that data" in diagnose(history, 600, {"code": 3})


def test_without_a_sign_it_is_the_data() -> None:
    for history in (FLAT, {}):
        assert diagnose(history, 600, {"prose": 6, "code": 18, "maths": 0}).endswith(
            "the struck samples are from code 75%, prose 25%: look at that data"
        )
    assert "look at the data" in diagnose({}, 600)


def test_what_came_after_the_first_strike_is_no_cause() -> None:
    """Logits explode because of the spike; up to it they were flat."""
    late = ramp(10, 12)
    late.extend((600 + i, 500.0) for i in range(100))
    assert "attention" not in diagnose({**FLAT, "attention_logit/block_01": late}, 599)
