"""Deadline policies: small pure objects that say what to run next, and why."""
