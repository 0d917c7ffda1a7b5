"""Entry point of ``python -m lightning_pardist``."""

import sys

from lightning_pardist.cli import main

if __name__ == "__main__":
    sys.exit(main())
