"""What did we compromise? The decision log."""
