"""Runs of demos that were interrupted: Airflow would go on with them, and rent machines for nobody."""

from __future__ import annotations

from collections.abc import Callable

import httpx

from .airflow_api import AirflowApi, AirflowError
from .stack import Stack

RUN_PREFIX = "demo_"
PATIENCE = 3.0
"""Seconds for each question to an api-server that may be about to end."""


def end_earlier(airflow: AirflowApi, dag_id: str, say: Callable[[str], object]) -> list[str]:
    """Mark the unfinished runs of demos as failed, say so, and return their ids.

    Raises:
        AirflowError: Airflow refuses.
    """
    unfinished = airflow.unfinished(dag_id)
    ended = [run.dag_run_id for run in unfinished if run.dag_run_id.startswith(RUN_PREFIX)]
    for run_id in ended:
        airflow.set_run_state(dag_id, run_id, "failed")
        say(f"{run_id}, an unfinished run of an interrupted demo, is marked as failed")
    return ended


def end_interrupted(stack: Stack, dag_id: str, say: Callable[[str], object]) -> None:
    """As `end_earlier`, for a stack that is about to end: an api-server that does not answer is no error."""
    url = stack.addresses().get("airflow")
    if url is None:
        return
    client = httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False)
    with AirflowApi(url, "admin", stack.credentials().passwords["admin"], client=client) as airflow:
        try:
            end_earlier(airflow, dag_id, say)
        except (httpx.HTTPError, AirflowError) as error:
            say(f"the run could not be marked as failed ({type(error).__name__}): the next demo does it")
