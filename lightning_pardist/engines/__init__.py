"""Engines: plain torch, usable without Lightning. Nothing here imports lightning."""
