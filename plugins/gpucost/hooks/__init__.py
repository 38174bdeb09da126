"""Airflow's connections, as the rooms need them."""
