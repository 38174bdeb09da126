"""Buying and giving back: leases, who owns them, and the providers they are bought from."""
