"""What could be bought? Pools, quotes and the sources they come from."""
