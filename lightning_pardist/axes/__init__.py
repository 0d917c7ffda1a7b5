"""Parallel axes, one kind of parallelism per file or folder; axes do not depend on each other or on the strategy."""
