"""Who runs the machines? Real local processes, and what a machine knows about itself."""
