"""What is saved, and when does it count? Immutable parts with digests; the manifest last."""
