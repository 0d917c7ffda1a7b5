"""Planner error."""


class PlanError(ValueError):
    """Planning is not possible with these arguments; the message is a sentence."""
