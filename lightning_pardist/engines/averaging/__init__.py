"""Outer steps by a server that islands, each a job of its own, come to and leave."""

from lightning_pardist.engines.averaging.client import Meeting, OuterClient
from lightning_pardist.engines.averaging.messages import IslandPart, OuterSettings
from lightning_pardist.engines.averaging.server import OuterServer

__all__ = ["IslandPart", "Meeting", "OuterClient", "OuterServer", "OuterSettings"]
