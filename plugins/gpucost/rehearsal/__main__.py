"""`python -m gpucost.rehearsal`: the rehearsal cloud's commands."""

from gpucost.rehearsal.terminal import app

app()
