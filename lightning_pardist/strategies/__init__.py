"""Strategies: Lightning's adapter and its presets."""
