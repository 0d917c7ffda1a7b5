"""Differential check of many third-party models under every strategy against one process."""
