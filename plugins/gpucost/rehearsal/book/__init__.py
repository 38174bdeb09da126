"""Who owns which instance? The one owner of fleet and instance state, and its memory on disk."""
