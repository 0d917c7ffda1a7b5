"""Who am I and where is rank 0. The only place that reads environment variables."""
