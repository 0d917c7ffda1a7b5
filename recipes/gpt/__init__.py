"""Recipe: a decoder-only transformer on text, one byte at a time."""
