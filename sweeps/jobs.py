"""Which trial comes next: the longest first, branches after their trunk, retries by policy. No Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plugins.loggers.sweep_ledger import COMPLETE, DIVERGED, FAILED
from sweeps.rules import Retries


@dataclass
class Job:
    """One thing for a trial to do.

    Attributes:
        key: cell id or trunk id.
        spec: all that the trial must know, plain values.
        cost: expected time in arbitrary units.
        urgency: cost of the longest chain of jobs that begins with this one: the largest comes first.
        after: key of the job that has to end before; empty for none.
        tries: times it was started; without those that a dead process ended.
        deaths: times its process or node died.
    """

    key: str
    spec: dict[str, Any]
    cost: float
    urgency: float
    after: str = ""
    tries: int = 0
    deaths: int = 0


@dataclass
class JobQueue:
    """Jobs that are waiting, running and done.

    Attributes:
        jobs: all of them by key.
        retries: policy of cells that failed or diverged.
        max_failures: times a job is started again after its process died.
        waiting: keys, most urgent first.
        done: status by key of what is over for good.
    """

    jobs: dict[str, Job]
    retries: Retries
    max_failures: int = 0
    waiting: list[str] = field(default_factory=list)
    done: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, jobs: Sequence[Job], retries: Retries, max_failures: int = 0) -> JobQueue:
        """A queue with all jobs waiting."""
        ordered = sorted(jobs, key=lambda job: -job.urgency)  # of equals, as they were given
        return cls({job.key: job for job in ordered}, retries, max_failures, [job.key for job in ordered])

    @property
    def finished(self) -> bool:
        """Nothing waits and nothing runs."""
        return len(self.done) == len(self.jobs)

    def next(self) -> Job | None:
        """The most urgent job that can start now; None when none can."""
        for key in self.waiting:
            job = self.jobs[key]
            if not job.after or job.after in self.done or job.after not in self.jobs:
                self.waiting.remove(key)
                job.tries += 1
                return job
        return None

    def ended(self, key: str, result: Mapping[str, Any]) -> bool:
        """A job ended with result's status; True when it is over, False when it will be tried again."""
        job, status = self.jobs[key], str(result["status"])
        allowed = {FAILED: self.retries.failed, DIVERGED: self.retries.diverged}.get(status, 0)
        if job.tries <= allowed and result.get("again", True):
            self.waiting.insert(0, key)
            return False
        self.done[key] = status
        return True

    def died(self, key: str) -> bool:
        """A job's process or node died; True when it is over, False when it is started again."""
        job = self.jobs[key]
        job.deaths += 1
        if job.deaths <= self.max_failures:
            job.tries -= 1
            self.waiting.insert(0, key)
            return False
        self.done[key] = FAILED
        return True

    def status_before(self, job: Job) -> str:
        """How the job that this one had to wait for ended; complete where there was none."""
        return self.done.get(job.after, COMPLETE)
