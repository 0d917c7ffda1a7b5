"""Benchmarks of the strategies against common alternatives: ``python -m benchmarks --help``."""
