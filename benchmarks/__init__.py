"""Strategies measured side by side with what people use today: ``python -m benchmarks --help``."""
