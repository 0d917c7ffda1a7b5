"""Building blocks shared by several engines; they depend on plain torch only."""
