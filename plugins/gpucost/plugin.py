"""What Airflow's plugin loader executes: the only file of this package that `plugins/.airflowignore` lets it."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin


class GpuCostPlugin(AirflowPlugin):
    """Makes gpucost known to Airflow."""

    name = "gpucost"
