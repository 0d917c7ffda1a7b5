"""Parameter server: ranks that hold shares of the parameters and update them with gradients from workers."""

from lightning_pardist.engines.servers.dedicated import serve
from lightning_pardist.engines.servers.replay import replay
from lightning_pardist.engines.servers.roles import Roles
from lightning_pardist.engines.servers.served_updates import ServedUpdates, Worker
from lightning_pardist.engines.servers.server import ParameterServer

__all__ = ["ParameterServer", "Roles", "ServedUpdates", "Worker", "replay", "serve"]
