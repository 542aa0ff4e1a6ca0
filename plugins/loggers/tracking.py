"""Where MLflow's records live. Importing this costs nothing, unlike the logger beside it."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lm.errors import ConfigError

DEFAULT_TRACKING_URI = "sqlite:///mlflow.db"
PAGE = 1000
NEWEST, OLDEST = "attributes.start_time DESC", "attributes.start_time ASC"


def tracking_uri() -> str:
    """MLFLOW_TRACKING_URI, or a SQLite file in the working directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_TRACKING_URI


def patient_uri(uri: str) -> str:
    """A SQLite address whose writers wait up to a minute for each other instead of SQLite's 5 seconds."""
    return f"{uri}?timeout=60" if uri.startswith("sqlite:") and "?" not in uri else uri


def absolute_uri(uri: str) -> str:
    """A relative SQLite path made absolute, so that processes in other folders open the same file."""
    prefix = "sqlite:///"
    if uri.startswith(prefix) and not uri.startswith(prefix + "/"):
        return prefix + os.path.abspath(uri[len(prefix) :])
    return uri


def check_store(uri: str, seconds: float = 10.0) -> None:
    """Make sure that somebody answers, before work begins that would be recorded there.

    MLflow's own client tries an address that nobody answers for minutes. Any answer will do: an authenticating proxy
    may refuse this question and take the client's.

    Raises:
        ConfigError: no answer from a server; a SQLite file that is none.
    """
    if uri.startswith(("http://", "https://")):
        try:
            urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=seconds).close()
        except urllib.error.HTTPError:
            return
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(
                f"no MLflow server answers at {uri} ({reason}); start it, or set MLFLOW_TRACKING_URI to another"
            ) from None
    elif uri.startswith("sqlite:///"):
        _check_sqlite(uri.removeprefix("sqlite:///").partition("?")[0])


def _check_sqlite(path: str) -> None:
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ConfigError(
            f"MLflow's database {path}: there is no folder {folder}; make it, or change MLFLOW_TRACKING_URI"
        )
    if not os.path.exists(path):
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"MLflow's database {path} cannot be made: {folder} is not writable")
        return
    if not os.access(path, os.W_OK):
        raise ConfigError(f"MLflow's database {path} is not writable")
    with open(path, "rb") as file:
        start = file.read(16)
    if start not in (b"", b"SQLite format 3\0"):
        raise ConfigError(f"{path} is not an SQLite database; move it away, or set MLFLOW_TRACKING_URI to another")


def experiment_id_for(client: Any, name: str) -> str:
    """Id of the experiment, made when missing, tagged so that the MLflow UI shows metric columns."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return experiment.experiment_id
    try:
        return client.create_experiment(name, tags={"mlflow.experimentKind": "custom_model_development"})
    except MlflowException:
        # Another process made it in between.
        return client.get_experiment_by_name(name).experiment_id


def search_runs(
    client: Any,
    experiment_ids: Sequence[str],
    query: str = "",
    order: str = NEWEST,
    call: Callable[[Callable[[], Any]], Any] = lambda ask: ask(),
) -> list[Any]:
    """Every run of these experiments that the query finds: a search returns at most 1,000 unless it is paged.

    Args:
        order: NEWEST or OLDEST first.
        call: makes each request; plugins.loggers.sweep_ledger.with_retries where the store may be away.
    """
    found: list[Any] = []
    token = None
    while True:
        options = {"max_results": PAGE, "order_by": [order], "page_token": token}
        page = call(partial(client.search_runs, list(experiment_ids), query, **options))
        found.extend(page)
        token = page.token
        if not token:
            return found
