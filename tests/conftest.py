"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

_SLOW_SECONDS = 1200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A slow test has longer than the usual time: it compiles or starts many processes, on a busy machine too."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SLOW_SECONDS))


@pytest.fixture(autouse=True)
def _environment_stays() -> Iterator[None]:
    """Lightning writes the port of a run into the environment; the processes of a later test would meet there too."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
