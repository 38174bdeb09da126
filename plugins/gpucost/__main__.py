"""`python -m gpucost`."""

from gpucost.cli import app

app()
