"""The planner: memory and time of every strategy, by running one rank of each on tensors that are never computed."""

from lightning_pardist.planner.planning import Plan, PlanError, Row, plan
from lightning_pardist.planner.profiles import DeviceProfile, Link, ProfileError, find_profile

__all__ = ["DeviceProfile", "Link", "Plan", "PlanError", "ProfileError", "Row", "find_profile", "plan"]
