"""Airflow's triggers: they subscribe to the hub."""
