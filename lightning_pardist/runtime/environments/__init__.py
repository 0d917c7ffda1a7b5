"""Cluster environments: rank, world size, rendezvous. The only package that reads environment variables."""
