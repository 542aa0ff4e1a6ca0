"""Sweeps on a real Ray cluster: several raylets on this machine, one of them killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm.errors import ConfigError
from plugins.executors import ray_start
from plugins.loggers.sweep_ledger import SweepLedger
from sweeps import corpus_store
from sweeps.cluster import PACKAGES, check_nodes, look
from sweeps.config import parse_config
from sweeps.grid import build_grid
from sweeps.isoflop import read_corpus
from sweeps.ray_session import _described, ray_session
from sweeps.resume import result_rows
from sweeps.rules import Resources
from tests.stores import new_store
from tests.sweeps.test_isoflop import command, environment

SMALL = {"include_dashboard": False, "object_store_memory": 80_000_000}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without cores, a node of one core, and one of two cores and two devices (which nobody opens);
    RAY_ADDRESS says where."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "240")  # a busy machine takes its time
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **SMALL})
    try:
        made.add_node(num_cpus=1, object_store_memory=80_000_000)
        made.add_node(num_cpus=2, num_gpus=2, object_store_memory=80_000_000)
        monkeypatch.setenv("RAY_ADDRESS", made.address)
        yield made
    finally:
        made.shutdown()


def only_what_was_sent(names: tuple[str, ...]) -> list[str]:
    """On a node: where a Python that knows nothing of the driver's folders finds the packages."""
    sent = [path for path in sys.path if "runtime_resources" in path]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sent)}
    code = f"import importlib\nfor name in {names}: print(importlib.import_module(name).__file__)"
    return subprocess.check_output([sys.executable, "-c", code], env=environ, cwd="/", text=True).split()


def test_nodes_get_the_code_and_are_asked_before_cells_run(
    bucket: str, cluster: Any, tiny_sweep: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCALEWRIGHT_CACHE", str(tmp_path / "cache"))
    config = parse_config({**tiny_sweep, "mode": "runs", "runs_dir": str(tmp_path / "runs")})
    uri = new_store(tmp_path)
    with ray_session(99, config.resources) as session:
        import ray

        assert (session.units, session.unit, session.slots) == (3, "cores", 3)  # the cluster's own, not 99
        shared = _described("", Resources(gpus=0.5))
        assert (shared.units, shared.unit, shared.slots) == (2, "GPUs", 2)  # two cores on that node
        group = Resources(gpus=1, processes=2)
        assert _described("", group).slots == 1
        see = ray.remote(num_cpus=group.trial_cpus, num_gpus=group.trial_gpus)(os.getenv)
        assert ray.get(see.remote("CUDA_VISIBLE_DEVICES")) == "0,1"  # which its ranks inherit
        places = ray.get(ray.remote(num_cpus=1)(only_what_was_sent).remote(PACKAGES))
        assert all("runtime_resources" in place for place in places) and len(places) == len(PACKAGES), places
        check_nodes(config, uri)
        check_nodes(parse_config({**tiny_sweep, "data": {**tiny_sweep["data"], "dir": bucket}}), uri)
        # A path that means another place in each process: the driver sees the corpus there, no node does.
        monkeypatch.chdir(Path(tiny_sweep["data"]["dir"]).parent)
        unseen = {**tiny_sweep["data"], "dir": "/proc/self/cwd/out"}
        assert read_corpus(unseen["dir"]).vocab_size == 300
        with pytest.raises(
            ConfigError, match=r"does not see data.dir /proc/self/cwd/out: put it on.*2 of 2 nodes"
        ) as e:
            check_nodes(parse_config({**tiny_sweep, "data": unseen}), uri)
        assert "\n" not in str(e.value)
    large = parse_config({**tiny_sweep, "resources": {"cpus": 3}})
    with (
        pytest.raises(ConfigError, match=r"no node has room for a trial: it takes 3 cores"),
        ray_session(2, large.resources),
    ):
        pass


def test_what_a_node_may_lack(tiny_sweep: dict[str, Any], tmp_path: Path) -> None:
    import hashlib

    data = tiny_sweep["data"]["dir"]
    sha = hashlib.sha256(Path(data, "manifest.json").read_bytes()).hexdigest()
    needs: dict[str, Any] = {
        "data": data,
        "manifest": sha,
        "marker": None,
        "tracking_uri": "http://x",
        "host": "elsewhere",
    }
    assert look(needs) == ""
    assert "does not see data.dir /nowhere" in look({**needs, "data": "/nowhere"})
    assert "another corpus" in look({**needs, "manifest": "0"})
    assert "does not share runs_dir /nowhere" in look({**needs, "marker": "/nowhere/.seen"})
    assert "SQLite file of another machine" in look({**needs, "tracking_uri": "sqlite:///x"})
    assert "cannot read the corpus" in look({**needs, "data": "file:///nowhere"})


@pytest.mark.parametrize("address", [lambda bucket, data: bucket, lambda bucket, data: f"file://{data}"])
def test_a_corpus_at_an_address_is_copied_once(
    address: Callable[[str, str], str],
    bucket: str,
    tiny_sweep: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SCALEWRIGHT_CACHE", str(tmp_path / "cache"))
    data = tiny_sweep["data"]["dir"]
    copy = Path(corpus_store.local_corpus(address(bucket, data)))
    files = sorted(path.relative_to(data) for path in Path(data).rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(copy) for path in copy.rglob("*") if path.is_file()) and len(files) > 3
    assert all((copy / name).read_bytes() == Path(data, name).read_bytes() for name in files)
    (copy / "mark").touch()
    assert corpus_store.local_corpus(f"{address(bucket, data)}/") == str(copy) and (copy / "mark").exists()
    assert read_corpus(address(bucket, data)) == read_corpus(data)


def test_a_corpus_that_cannot_be_read_is_one_line_and_leaves_nothing(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCALEWRIGHT_CACHE", str(tmp_path / "cache"))
    wrong = {
        "file:///nowhere": "there is none", "nosuch://x": "nosuch", bucket + "2": "there is none",
        "s3://nosuch/x": "there is none", "s3:///x": "Missing bucket name",
    }  # fmt: skip
    for address, reason in wrong.items():
        with pytest.raises(ConfigError, match=f"^data.dir {address}: .*{reason}") as caught:
            corpus_store.local_corpus(address)
        assert "\n" not in str(caught.value)
    store, path = corpus_store._store(bucket)
    with store.open_output_stream(f"{path}/{'n' * 300}"):  # a name that no folder here can hold
        pass
    with pytest.raises(
        ConfigError, match=r"^data.dir s3://corpora/tiny: the copy to .*/cache failed \(.*name too long"
    ):
        corpus_store.local_corpus(bucket)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    monkeypatch.setenv("SCALEWRIGHT_CACHE", "/proc/none")
    with pytest.raises(ConfigError, match=r"^SCALEWRIGHT_CACHE /proc/none cannot be made: "):
        corpus_store.local_corpus(bucket)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_no_cluster_is_one_line(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS {address}: no Ray cluster answers") as caught:
        ray_session(1, Resources()).__enter__()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_what_listens_and_is_no_ray_is_one_line_too(answer: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself tries for ever; None: it takes the connection and says nothing."""
    monkeypatch.setattr(ray_start, "_CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                if answer is None:
                    time.sleep(1)
                else:
                    connection.sendall(answer)

        other = threading.Thread(target=listen)
        other.start()
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(ConfigError, match="no Ray cluster answers") as caught:
            ray_session(1, Resources()).__enter__()
        other.join()
    assert "\n" not in str(caught.value)


def wait_for(log: Path, process: subprocess.Popen[bytes], text: str) -> None:
    give_up = time.monotonic() + 500
    while text not in log.read_text():
        assert process.poll() is None and time.monotonic() < give_up, log.read_text()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["runs", "trunk"])
def test_a_killed_driver_and_a_killed_node_leave_each_cell_once(
    cluster: Any, tiny_sweep: dict[str, Any], tmp_path: Path, mode: str
) -> None:
    """SIGKILL for the driver after the first cell; --resume; SIGKILL for a node's raylet while both nodes work."""
    settings = {**tiny_sweep, "mode": mode, "runs_dir": str(tmp_path / "runs")}
    if mode == "trunk":
        settings |= {
            "optim": {**tiny_sweep["optim"], "schedule": {"kind": "wsd"}},
            "budgets": {4e8: [16, 24], 8e8: [16, 24]},
        }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(settings))
    total = sum(len(widths) for widths in settings["budgets"].values())
    environ = {**environment(), "RAY_ADDRESS": os.environ["RAY_ADDRESS"]}

    def begin(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
        with log.open("wb") as out:
            return subprocess.Popen(command(tmp_path, *arguments), cwd=tmp_path, env=environ, stdout=out, stderr=out)

    first = begin(tmp_path / "first.log")
    wait_for(tmp_path / "first.log", first, f"[1/{total}]")
    first.kill()
    first.wait()
    store = SweepLedger(f"sqlite:///{tmp_path / 'mlflow.db'}", "tiny")
    (parent,) = store.sweeps("tiny")
    before = {run.cell_id: run.run_id for run in store.cells(parent.run_id) if run.status == "complete"}
    assert before

    second = begin(tmp_path / "second.log", "--resume")
    wait_for(tmp_path / "second.log", second, f"[{len(before) + 1}/{total}]")
    cluster.remove_node(next(node for node in cluster.worker_nodes), allow_graceful=False)
    assert second.wait(timeout=900) == 0, (tmp_path / "second.log").read_text()

    runs = store.cells(parent.run_id)
    complete = [run for run in runs if run.status == "complete"]
    config = parse_config(settings)
    cells = build_grid(config, read_corpus(config.data.dir))
    assert sorted(run.cell_id for run in complete) == sorted(cell.cell_id for cell in cells)  # each once
    assert all(run.status in ("complete", "superseded") for run in runs)
    assert before.items() <= {run.cell_id: run.run_id for run in complete}.items()  # what was done was not done again
    assert all(row["val_loss"] for row in result_rows(store, parent.run_id, cells))
