"""What the demo promises, each checked against the services themselves and not against our own word."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import httpx

from gpucost.lifecycle.services import Services
from gpucost.reasons import Reason

LEAST_ACCURACY = 0.95
JOB_TAG = "gpucost:job"


@dataclass(frozen=True)
class Promise:
    """One promise, whether it was kept, and what was seen."""

    text: str
    kept: bool
    seen: str


@dataclass(frozen=True)
class Evidence:
    """What the promises are checked against.

    Args:
        services: gpucost's rooms.
        job: the job's key.
        summary: what the Airflow task returned.
        checkpoint_steps: the interval between two checkpoints.
        reference_digest: of the same training without interruption.
        rehearsal: address of the rehearsal cloud.
        mlflow: address of MLflow.
    """

    services: Services
    job: str
    summary: dict[str, Any]
    checkpoint_steps: int
    reference_digest: str
    rehearsal: str
    mlflow: str


def check(evidence: Evidence) -> Iterator[Promise]:
    """Every promise, in the order of the story."""
    yield _interrupted(evidence)
    yield _resumed(evidence)
    yield _same_weights(evidence)
    yield _accurate(evidence)
    yield _in_time(evidence)
    yield _as_invoiced(evidence)
    yield _tracked_once(evidence)
    yield _nothing_left(evidence)


def _interrupted(evidence: Evidence) -> Promise:
    ended = [attempt.reason for attempt in evidence.services.leases.attempts(evidence.job)]
    kept = ended.count(Reason.INTERRUPTED) == 1 and ended[-1] is Reason.COMPLETED
    return Promise("killed once without notice, then finished", kept, " then ".join(str(reason) for reason in ended))


def _resumed(evidence: Evidence) -> Promise:
    report = evidence.services.books.report(evidence.job)
    first = report.attempts[-1].first_step or 0
    kept = first > 0 and report.lost_steps <= evidence.checkpoint_steps
    return Promise(
        f"went on from its checkpoint, at most {evidence.checkpoint_steps} steps lost",
        kept,
        f"resumed at step {first}, {report.lost_steps} steps lost",
    )


def _same_weights(evidence: Evidence) -> Promise:
    digest = evidence.summary["weights_digest"]
    seen = f"{digest[:16]}… and {evidence.reference_digest[:16]}…" if digest else "no digest"
    return Promise(
        "the final weights are those of an uninterrupted training, bit for bit",
        digest == evidence.reference_digest,
        seen,
    )


def _accurate(evidence: Evidence) -> Promise:
    accuracy = evidence.summary["results"].get("accuracy", 0.0)
    return Promise(
        f"at least {LEAST_ACCURACY:.0%} of held-out digits read right", accuracy >= LEAST_ACCURACY, f"{accuracy:.2%}"
    )


def _in_time(evidence: Evidence) -> Promise:
    _, job, _ = evidence.services.jobs.load(evidence.job)
    ended = max(lease.ended_at for lease in evidence.services.leases.of_job(evidence.job) if lease.ended_at)
    spare = job.deadline - ended
    hours = spare.total_seconds() / 3600
    return Promise("finished before its deadline", hours >= 0, f"{hours:.1f} rehearsed hours to spare")


def _as_invoiced(evidence: Evidence) -> Promise:
    mine = {lease.instance_id for lease in evidence.services.leases.of_job(evidence.job)}
    invoice = _get(f"{evidence.rehearsal}/rehearsal/invoice")
    invoiced = sum((Decimal(line["amount"]) for line in invoice["lines"] if line["instance_id"] in mine), Decimal(0))
    charged = evidence.services.books.job_cost(evidence.job).amount
    return Promise(
        "charged what the cloud invoices, to the micro-dollar", charged == invoiced, f"${charged} and ${invoiced}"
    )


def _tracked_once(evidence: Evidence) -> Promise:
    text = "one MLflow run over both attempts, each step once, with its cost"
    run_id = evidence.summary["mlflow_run_id"]
    if run_id is None:
        return Promise(text, False, "no run")
    api = f"{evidence.mlflow}/api/2.0/mlflow"
    run = _get(f"{api}/runs/get?run_id={run_id}")["run"]
    query = f"{api}/metrics/get-history?run_id={run_id}&metric_key=loss&max_results=25000"
    steps = [point["step"] for point in _get(query).get("metrics", [])]
    cost = {metric["key"]: metric["value"] for metric in run["data"].get("metrics", [])}.get("gpucost.cost_usd")
    kept = run["info"]["status"] == "FINISHED" and cost is not None and steps and len(steps) == len(set(steps))
    return Promise(text, bool(kept), f"{len(steps)} points of loss, {len(set(steps))} steps, ${cost}")


def _nothing_left(evidence: Evidence) -> Promise:
    instances = _get(f"{evidence.rehearsal}/rehearsal/status")["instances"]
    # Another job of the same cloud may well be training.
    mine = [item for item in instances if item["tags"].get(JOB_TAG) == evidence.job]
    living = [item["instance_id"] for item in mine if item["state"] != "terminated"]
    kept = bool(mine) and not living
    return Promise("no machine is left", kept, ", ".join(living) or f"all {len(mine)} are gone")


def _get(url: str) -> Any:
    answer = httpx.get(url, timeout=20, trust_env=False)
    answer.raise_for_status()
    return answer.json()
