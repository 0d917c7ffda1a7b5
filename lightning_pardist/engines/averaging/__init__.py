"""Outer optimizer on a server that islands, each an independent job, can join and leave at any time."""

from lightning_pardist.engines.averaging.client import Meeting, OuterClient
from lightning_pardist.engines.averaging.messages import IslandPart, OuterSettings
from lightning_pardist.engines.averaging.server import OuterServer

__all__ = ["IslandPart", "Meeting", "OuterClient", "OuterServer", "OuterSettings"]
