"""What Airflow says of the task that a job belongs to: does anybody still want it?

Asked through the supervisor, as Airflow's own external-task sensor does; never through the metadata database.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpucost.job import JobId

OVER = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})
"""States after which nobody comes back to the job."""


def is_wanted(job_id: JobId) -> bool:
    """Whether the job's task is in a state from which a try goes on with it: running, deferred, cleared, to be retried.

    A task that was deleted with its DAG run is not wanted. Blocks: call it in a thread when in a trigger.
    """
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    answer = RuntimeTaskInstance.get_task_states(
        dag_id=job_id.dag_id,
        task_ids=[job_id.task_id],
        run_ids=[job_id.run_id],
        map_index=job_id.map_index if job_id.map_index >= 0 else None,
    )
    states = answer.get(job_id.run_id, {})
    name = job_id.task_id if job_id.map_index < 0 else f"{job_id.task_id}_{job_id.map_index}"
    return name in states and states[name] not in OVER
