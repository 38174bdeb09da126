"""Those whom machines are bought from; each behind the protocol of `base`."""
