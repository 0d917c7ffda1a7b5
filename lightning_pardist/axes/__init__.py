"""Kinds of parallelism, one file or folder each; none of them knows the others or the strategy."""
