"""Who am I and where is rank 0: launchers and schedulers."""
