"""The planner's own error."""


class PlanError(ValueError):
    """Nothing can be planned as asked; the message is a sentence."""
