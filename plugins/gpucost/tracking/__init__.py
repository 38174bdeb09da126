"""How does it compare? One MLflow run per job, a child run per attempt, dollars beside quality."""
