"""`ReapLeasesOperator`: no machine outlives the task that wanted it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from gpucost import settings

if TYPE_CHECKING:
    from airflow.sdk import Context

log = logging.getLogger(__name__)


class ReapLeasesOperator(BaseOperator):
    """One round of the reaper: ends machines whose task is over, whose time is up, or that belong to nobody.

    Args:
        dry_run: only say what would be ended.
        db_conn_id, aws_conn_id, store_conn_id, mlflow_conn_id: see `gpucost.hooks.gpucost.GpuCostHook`.

    Returns:
        As XCom: what was found, one entry per machine, with what it cost per hour while it stayed.
    """

    ui_color = "#f1e4d8"

    def __init__(
        self,
        *,
        dry_run: bool = False,
        db_conn_id: str = settings.DB_CONN_ID,
        aws_conn_id: str = settings.AWS_CONN_ID,
        store_conn_id: str = settings.STORE_CONN_ID,
        mlflow_conn_id: str | None = settings.MLFLOW_CONN_ID,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.only_say = dry_run
        self.db_conn_id = db_conn_id
        self.aws_conn_id = aws_conn_id
        self.store_conn_id = store_conn_id
        self.mlflow_conn_id = mlflow_conn_id

    def execute(self, context: Context) -> list[dict[str, Any]]:  # noqa: ARG002
        """Look once, and end what should not be there."""
        from gpucost.hooks.gpucost import GpuCostHook
        from gpucost.hooks.tasks import is_wanted
        from gpucost.lifecycle.reaping import reap

        hook = GpuCostHook(self.db_conn_id, self.aws_conn_id, self.store_conn_id, self.mlflow_conn_id)
        findings = reap(hook.services(), is_wanted=is_wanted, dry_run=self.only_say)
        for finding in findings:
            log.warning("%s: %s, at %s", finding.instance_id or finding.lease_id, finding.why, finding.at_stake)
        return [
            {
                "lease_id": finding.lease_id,
                "instance_id": finding.instance_id,
                "why": finding.why,
                "per_hour": str(finding.at_stake.amount) if finding.at_stake else None,
                "over": finding.ended is not None and not finding.ended.state.may_cost,
            }
            for finding in findings
        ]
