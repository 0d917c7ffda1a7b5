"""ZeRO stages 1 and 2 (arXiv 1910.02054): whole parameters, sharded optimizer state and gradients."""

from lightning_pardist.engines.zero.zero_engine import ZeroEngine

__all__ = ["ZeroEngine"]
