"""Package version, in a separate file that a build reads without importing torch."""

__version__ = "0.1.0"
