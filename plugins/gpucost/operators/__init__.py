"""Airflow's operators: they parse arguments, call a room, and defer."""
