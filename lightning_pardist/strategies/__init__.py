"""What Lightning sees: one strategy a file."""
