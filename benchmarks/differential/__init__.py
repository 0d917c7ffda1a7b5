"""Many foreign models under every strategy against one process: a table of cells, equal, refused or different."""
