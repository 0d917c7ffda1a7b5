"""Lightning strategies: the base adapter and one strategy per kind of parallelism."""
