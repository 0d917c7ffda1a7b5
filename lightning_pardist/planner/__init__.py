"""Planner: memory and step time of every strategy, from ranks that run without computing tensor values."""

from lightning_pardist.planner.errors import PlanError
from lightning_pardist.planner.plan_result import Plan, Refused, Row
from lightning_pardist.planner.planning import plan
from lightning_pardist.planner.profiles import DeviceProfile, Link, ProfileError, find_profile

__all__ = [
    "DeviceProfile",
    "Link",
    "Plan",
    "PlanError",
    "ProfileError",
    "Refused",
    "Row",
    "find_profile",
    "plan",
]
