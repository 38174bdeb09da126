"""The services behind `make up`, and the watching part of `make demo`.

`stack.Stack` starts, checks and ends them; `airflow_api.AirflowApi` talks to Airflow; `timeline.Timeline` shows a job.
"""
