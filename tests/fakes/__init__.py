"""Stand-ins for the outside world: a provider that does as scripted, a clock that stands, a crash at a chosen line."""
