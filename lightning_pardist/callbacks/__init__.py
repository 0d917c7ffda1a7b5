"""Callbacks that go with the strategies."""
