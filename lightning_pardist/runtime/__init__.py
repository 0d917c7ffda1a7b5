"""Processes of a job: rendezvous, launch, monitoring and shutdown."""
