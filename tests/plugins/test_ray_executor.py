"""Preparing data on a real Ray cluster of several raylets, one of which is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lm.data.files import DataError, sha256_file
from lm.data.pipeline import store
from lm.data.pipeline.parts import part_outcomes
from lm.data.pipeline.store import Documents
from lm.data.prepare import prepare
from plugins.executors.ray_executor import RayExecutor
from tests.lm.test_executor import all_stages, contents

STORE_BYTES = 80_000_000


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without cores and two nodes of one core; RAY_ADDRESS says where."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "240")  # a busy machine takes its time
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            made.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        monkeypatch.setenv("RAY_ADDRESS", made.address)
        yield made
    finally:
        made.shutdown()


class LosesANode(RayExecutor):
    """Kills a raylet while the parts of its second `map` are under way."""

    def __init__(self, cluster: Any) -> None:
        super().__init__(1)
        self.cluster, self.maps, self.lost = cluster, 0, False

    def map(self, function: Any, calls: Any) -> Iterator[Any]:
        self.maps += 1
        for number, result in enumerate(super().map(function, calls)):
            if self.maps >= 2 and number == 1 and not self.lost:
                self.lost = True
                self.cluster.remove_node(next(iter(self.cluster.worker_nodes)), allow_graceful=False)
            yield result


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cluster_makes_the_same_folder_also_when_a_node_dies(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = all_stages(tmp_path)
    prepare(config, tmp_path / "one")
    monkeypatch.setattr(store, "PART_BYTES", 4000)
    import ray

    monkeypatch.chdir(tmp_path)
    with RayExecutor(99) as executor:
        assert executor.workers == 2  # the cluster's own
        prepare(config, tmp_path / "ray", executor=executor)
        place = ray.get(ray.remote(num_cpus=1)(lambda: str(__import__("lm").__file__)).remote())
        assert "runtime_resources" in place  # the code came with the job
        base = next(path for path in (tmp_path / ".ray.stages" / "web").iterdir() if path.name.startswith("00-"))
        part = next(Documents(base).parts())
        with pytest.raises(DataError, match=r"stage pii: .* has other files, other code or another version of") as e:
            list(executor.map(part_outcomes, [(part, "pii", '{"kinds": ["email"]}', "a key of other packages")]))
        assert "\n" not in str(e.value)
        with pytest.raises(DataError, match="does not see /nowhere/x: start the command in a folder that all nodes"):
            list(executor.map(sha256_file, [(Path("/nowhere/x"),)]))
    assert contents(tmp_path / "one") == contents(tmp_path / "ray")
    with LosesANode(cluster) as executor:
        prepare(config, tmp_path / "lost", executor=executor)
        assert executor.lost and len(cluster.worker_nodes) == 1
    assert contents(tmp_path / "one") == contents(tmp_path / "lost")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_no_cluster_is_one_line(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm.errors import ConfigError

    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS {address}: no Ray cluster answers") as caught:
        RayExecutor(1).__enter__()
    assert "\n" not in str(caught.value)
