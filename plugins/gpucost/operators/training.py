"""`SpotTrainingOperator`: train this, by then, for at most that, on the cheapest capacity that finishes in time."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferralError, TaskDeferred

from gpucost import settings
from gpucost.triggers.training import TrainingTrigger, goes_on, stop_job

if TYPE_CHECKING:
    from airflow.sdk import Context

    from gpucost.job import JobId, TrainingJob
    from gpucost.lifecycle.course import Course
    from gpucost.lifecycle.services import Services
    from gpucost.lifecycle.steps import Step

log = logging.getLogger(__name__)


class SpotTrainingOperator(BaseOperator):
    """Runs one training job to its end, through every interruption, without holding a worker meanwhile.

    The task defers while the job runs; an interruption is not a failure: it plans again, buys again, and defers
    again. Failures of the program use Airflow's `retries`, and go on from the newest checkpoint.

    Args:
        job: fields of `gpucost.job.TrainingJob`; templated. `code` may be relative to the include folder, `recipe` the
            name of a YAML file below it. Instead of `deadline`, give `deadline_hours`.
        deadline_hours: hours from the DAG run's `run_after` to the deadline; templated.
        policy: name or dotted path of the placement policy.
        db_conn_id, aws_conn_id, store_conn_id, mlflow_conn_id: see `gpucost.hooks.gpucost.GpuCostHook`.

    Returns:
        As XCom: cost, on-demand comparison, savings, attempts, results, MLflow run; nothing secret.
    """

    template_fields: Sequence[str] = ("job", "deadline_hours", "policy")
    template_fields_renderers = {"job": "json"}  # noqa: RUF012 - Airflow's own convention
    ui_color = "#e4f1d8"

    def __init__(
        self,
        *,
        job: dict[str, Any],
        deadline_hours: float | str | None = None,
        policy: str = "greedy",
        db_conn_id: str = settings.DB_CONN_ID,
        aws_conn_id: str = settings.AWS_CONN_ID,
        store_conn_id: str = settings.STORE_CONN_ID,
        mlflow_conn_id: str | None = settings.MLFLOW_CONN_ID,
        **kwargs: Any,
    ) -> None:
        given = {**(kwargs.get("default_args") or {}), **kwargs}
        if "retries" not in given:
            kwargs["retries"] = 3
        if "retry_delay" not in given:
            kwargs["retry_delay"] = timedelta(seconds=10)
        super().__init__(**kwargs)
        self.job = job
        self.deadline_hours = deadline_hours
        self.policy = policy
        self.db_conn_id = db_conn_id
        self.aws_conn_id = aws_conn_id
        self.store_conn_id = store_conn_id
        self.mlflow_conn_id = mlflow_conn_id
        self._told_to_end = False

    def execute(self, context: Context) -> dict[str, Any]:
        """Begin the job, or go on with it after a retry or a clear: what is there is adopted."""
        from gpucost.capacity.lease import new_owner_token
        from gpucost.lifecycle import settlement
        from gpucost.reasons import Reason

        tries_allowed = context["ti"].max_tries or 0
        with _wrong_input_fails_at_once():
            services = self._services()
        job_id = services.jobs.current(self._task_id(context), tries_allowed)
        owner = new_owner_token()
        if services.jobs.ended_as(job_id.key) is Reason.COMPLETED:
            log.info("Job %s was done by an earlier try that could not say so any more", job_id.key)
            return settlement.finish(services, job_id.key, owner, Reason.COMPLETED)
        try:
            with _wrong_input_fails_at_once():
                course = self._course(services, job_id, self._wanted(context, services), owner)
                course.begin(self._code_folder(course.job), tries_allowed)
        except AirflowFailException:
            self._end_what_runs(services, job_id)
            raise
        return self._drive(course, course.pursue)

    def resume(self, context: Context, event: dict[str, Any], job: str, owner: str) -> dict[str, Any]:  # noqa: ARG002
        """Go on after what the trigger saw."""
        from gpucost.lifecycle.steps import Event

        services = self._services()
        job_id, wanted, _ = services.jobs.load(job)
        course = self._course(services, job_id, wanted, owner)
        return self._drive(course, lambda: course.handle(Event.model_validate(event)))

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """As Airflow's; a trigger that failed must not leave a machine behind that no further try takes over."""
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except TaskDeferralError:
            ti = context["ti"]
            if ti.try_number > (ti.max_tries or 0):
                services = self._services()
                self._end_what_runs(services, services.jobs.current(self._task_id(context), ti.max_tries or 0))
            raise

    def on_kill(self) -> None:
        """Called inside a signal handler, in the middle of whatever `execute` does: only remembered here.

        The step that is under way is finished, and then `_drive` ends what nobody comes back to. Where Airflow does
        not leave it the time, the reaper does.
        """
        self._told_to_end = True

    def _end_what_runs(self, services: Services, job_id: JobId) -> None:
        """End the job's machines, whichever try bought them: no further try will."""
        from gpucost.capacity.lease import new_owner_token

        key, owner = job_id.key, new_owner_token()
        if not services.jobs.known(key) or not services.jobs.take_over(key, services.jobs.owner(key), owner):
            return
        for lease in services.leases.open(key):
            services.leases.adopt(lease, owner, services.clock.now())
        stop_job(services, key, owner)

    def _code_folder(self, job: TrainingJob) -> Path:
        folder = Path(job.code)
        return folder if folder.is_absolute() else settings.include_folder() / folder

    def _drive(self, course: Course, step: Any) -> dict[str, Any]:
        """Take one step, and defer, finish or fail as it says."""
        from gpucost.lifecycle.steps import CourseEnded, Finished, Pause

        try:
            result: Step = step()
        except CourseEnded as ended:
            _fail(ended)
        if self._told_to_end and not goes_on(course.services, course.key):
            stop_job(course.services, course.key, course.owner)
            raise AirflowFailException("The task was ended by a user; its machines are given back")
        if isinstance(result, Finished):
            log.info("Done: %s", result.summary)
            return result.summary
        if isinstance(result, Pause):
            log.info("Waiting until %s: %s", result.until, result.why)
            raise self._deferral(course, until=result.until.isoformat())
        raise self._deferral(course, lease_id=result.lease_id)

    def _deferral(self, course: Course, *, lease_id: str | None = None, until: str | None = None) -> TaskDeferred:
        return TaskDeferred(
            trigger=TrainingTrigger(
                job=course.key,
                owner=course.owner,
                connections=self._connections(),
                policy=self.policy,
                lease_id=lease_id,
                until=until,
            ),
            method_name="resume",
            kwargs={"job": course.key, "owner": course.owner},
        )

    def _services(self) -> Services:
        from gpucost.hooks.gpucost import GpuCostHook

        return GpuCostHook(**self._connections()).services()  # type: ignore[arg-type]

    def _connections(self) -> dict[str, str | None]:
        return {
            "db_conn_id": self.db_conn_id,
            "aws_conn_id": self.aws_conn_id,
            "store_conn_id": self.store_conn_id,
            "mlflow_conn_id": self.mlflow_conn_id,
        }

    def _course(self, services: Services, job_id: JobId, job: TrainingJob, owner: str) -> Course:
        from gpucost.lifecycle.course import Course

        return Course(services, job_id, job, owner, self.policy)

    def _task_id(self, context: Context) -> JobId:
        from gpucost.job import JobId

        ti = context["ti"]
        map_index = ti.map_index if ti.map_index is not None else -1
        return JobId(dag_id=ti.dag_id, run_id=ti.run_id, task_id=ti.task_id, map_index=map_index)

    def _recipe(self, given: Any) -> Any:
        """A recipe by the name of its file; a form that is left empty asks for none."""
        from gpucost.recipe_file import load_recipe

        if given is None or given == "":
            return {}
        return load_recipe(given, settings.include_folder()) if isinstance(given, str) else given

    def _wanted(self, context: Context, services: Services) -> TrainingJob:
        """The job from the templated arguments; its deadline counts from the run's `run_after`.

        Raises:
            AirflowFailException: a field is wrong; the message names each.
            ValueError: the recipe's file is.
        """
        from pydantic import ValidationError

        from gpucost.job import TrainingJob

        fields = {**self.job, "recipe": self._recipe(self.job.get("recipe"))}
        if self.deadline_hours not in (None, ""):
            if "deadline" in fields:
                raise AirflowFailException("deadline and deadline_hours are both given; give one of them")
            began: datetime = services.clock.spec.at(context["dag_run"].run_after)
            try:
                fields["deadline"] = began + timedelta(hours=float(str(self.deadline_hours)))
            except (ValueError, OverflowError) as wrong:
                raise AirflowFailException(
                    f"deadline_hours: got {self.deadline_hours!r}, expected hours from the run's start such as 8"
                ) from wrong
        try:
            return TrainingJob.model_validate(fields)
        except ValidationError as wrong:
            details = "; ".join(_fault(one) for one in wrong.errors())
            raise AirflowFailException(f"The job is not valid, nothing was bought: {details}") from wrong


def _fault(error: Any) -> str:
    """A wrong field, its value and what was expected."""
    where, words = ".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, ")
    # Our own messages tell the value, or why it does not matter.
    ours = "got " in words or error["type"] == "recipe"
    return f"{where}: {words}" if ours else f"{where}: got {error.get('input')!r}, {words}"


@contextmanager
def _wrong_input_fails_at_once() -> Iterator[None]:
    """Settings, connections, files and fields that are wrong stay wrong: no retry helps, and nothing was bought yet."""
    try:
        yield
    except ValueError as wrong:
        raise AirflowFailException(str(wrong)) from wrong


def _fail(ended: Any) -> NoReturn:
    """Fail for good, or in a way that Airflow's retries follow, as the reason table says."""
    from gpucost.reasons import Then, rule_for

    if rule_for(ended.reason).then is Then.RETRY:
        raise AirflowException(str(ended)) from ended
    raise AirflowFailException(str(ended)) from ended
