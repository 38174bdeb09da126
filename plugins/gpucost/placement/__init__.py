"""What to buy, when, and why? Policies decide, the planner feeds them and explains."""
