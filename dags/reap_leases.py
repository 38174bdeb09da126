"""Every ten minutes: end machines that nobody wants any more, whatever happened to those who bought them.

Keep it on. It never ends a machine whose task still runs, waits, or is to be retried.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from gpucost.operators.reaping import ReapLeasesOperator

with DAG(
    dag_id="reap_leases",
    schedule="*/10 * * * *",
    catchup=False,
    max_active_runs=1,
    is_paused_upon_creation=False,
    tags=["gpucost"],
    doc_md=__doc__,
) as dag:
    ReapLeasesOperator(task_id="reap", retries=2, retry_delay=timedelta(seconds=30))
