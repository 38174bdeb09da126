"""What goes wrong on the way? Throttling, errors, lost answers, by rule and rate."""
