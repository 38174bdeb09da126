"""gpucost: train a model in time, on the cheapest GPU capacity, and know what it cost and why.

The packages below follow the way of a job, one question each; `docs/architecture.md` draws it:
job -> market -> placement -> capacity -> training -> ledger -> tracking and decisions.
"""

__version__ = "0.1.0"
