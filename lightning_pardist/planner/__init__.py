"""The planner: memory and time of every strategy, by running ranks of each on tensors that are never computed."""

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
