"""Benchmarks of the strategies beside the common alternatives: ``python -m benchmarks --help``."""
