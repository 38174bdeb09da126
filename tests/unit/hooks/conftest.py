"""Airflow is imported once for these tests, with a home of its own, and asked for nothing but its classes."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("AIRFLOW_HOME", tempfile.mkdtemp(prefix="airflow-home-"))
