"""torch's pipeline schedules as data: actions, and the placement of sends and receives between them."""

from __future__ import annotations

from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _ComputationType

from lightning_pardist.compat.contract import Private

_ORDER = "torch's order of forwards and backwards, of which its schedule classes give lists"
_INSTEAD = "the same class under its new name, or generate the order here"
NAMES = (
    Private("torch.distributed.pipelining._utils.generate_stage_to_rank_mapping", _ORDER, _INSTEAD),
    Private("torch.distributed.pipelining.schedules._Action", _ORDER, _INSTEAD),
    Private("torch.distributed.pipelining.schedules._ComputationType", _ORDER, _INSTEAD),
    Private("torch.distributed.pipelining.schedules._add_send_recv", _ORDER, _INSTEAD),
)

TorchAction = _Action
ComputationType = _ComputationType
add_send_recv = _add_send_recv
stage_to_rank = generate_stage_to_rank_mapping
