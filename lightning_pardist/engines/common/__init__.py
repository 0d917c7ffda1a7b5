"""Building blocks that several engines share. Plain torch."""
