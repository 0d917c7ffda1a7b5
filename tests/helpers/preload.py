"""Imports of the fork server that ranks are started from, once per session. Must start no thread and make no tensor."""

import lightning_pardist
import lightning_pardist.registry

import lightning.pytorch  # noqa: F401  isort: skip
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor  # noqa: F401
import torchvision  # noqa: F401

for name in lightning_pardist.__all__:
    getattr(lightning_pardist, name)
for entry in lightning_pardist.registry.TABLE:
    entry.strategy  # noqa: B018
