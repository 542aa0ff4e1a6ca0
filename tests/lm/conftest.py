from __future__ import annotations

import pytest

from tests.lm.datamodule_helpers import write_data


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A data folder with the sources prose, code and reference; nobody writes to it."""
    path = tmp_path_factory.mktemp("data") / "synthetic"
    write_data(path)
    return str(path)
