"""muP keeps activations at their size over widths, with AdamW and with Muon; the standard parametrisation does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from lm.optim.coordinate_check import BASE, BASE_WIDTH, at_width, coordinate_check, worst_ratio
from recipes.bench import main

WIDTHS = (64, 128, 256, 512)


def assert_scales_do_not_depend_on_width(widths: tuple[int, ...], optimizer: str, mup: bool) -> None:
    scales = coordinate_check(widths, optimizer, mup)
    assert set(scales[64]) == {"blocks.0", "blocks.0.attention", "logits"}
    ratio, activation = worst_ratio(scales)
    assert ratio < 2, f"{activation} differs {ratio:.1f} times between widths {widths}"


# Muon's orthogonalisation takes most of the time of wide models: up to 1024 in the slow test.
WIDTHS_OF = {"adamw": WIDTHS, "muon": WIDTHS[:3]}


@pytest.mark.parametrize("optimizer", WIDTHS_OF)
def test_mup_transfers(optimizer: str) -> None:
    assert_scales_do_not_depend_on_width(WIDTHS_OF[optimizer], optimizer, mup=True)


@pytest.mark.parametrize("optimizer", WIDTHS_OF)
def test_the_standard_parametrisation_fails_the_same_test(optimizer: str) -> None:
    with pytest.raises(AssertionError, match="differs"):
        assert_scales_do_not_depend_on_width(WIDTHS_OF[optimizer], optimizer, mup=False)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "muon_original"])
def test_up_to_width_1024(optimizer: str) -> None:
    assert_scales_do_not_depend_on_width((*WIDTHS, 1024), optimizer, mup=True)
    with pytest.raises(AssertionError, match="differs"):
        assert_scales_do_not_depend_on_width((64, 1024), optimizer, mup=False)


def test_both_parametrisations_are_one_model_at_the_base_width() -> None:
    scales = [coordinate_check((BASE_WIDTH,), "muon", mup, steps=2) for mup in (True, False)]
    assert scales[0] == scales[1] and at_width(BASE_WIDTH, mup=False) == BASE


def test_the_plot_is_drawn(tmp_path: Path, capsys) -> None:
    out = tmp_path / "check.png"
    assert (
        main(["coordinates", "--widths", "64", "128", "--optimizers", "adamw", "--steps", "2", "--out", str(out)]) == 0
    )
    assert out.read_bytes()[:4] == b"\x89PNG" and '"worst_ratio"' in capsys.readouterr().out
    assert main(["coordinates", "--widths", "64", "100"]) == 2
