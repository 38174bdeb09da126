"""What runs around the program? The agent: from the machine's first command to its last."""
