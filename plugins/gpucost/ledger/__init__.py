"""What did it cost? Billing rules per provider, charges that are never changed, and the report of a job."""
