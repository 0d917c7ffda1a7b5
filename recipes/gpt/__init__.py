"""A decoder-only transformer on text, a byte at a time."""
