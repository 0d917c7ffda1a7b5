"""Data-parallel strategy of one process (DataParallel)."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from lightning_pardist.axes.ddp import DDPAxis
from lightning_pardist.axes.replicas import ReplicaAxis
from lightning_pardist.engines.pipeline import BatchDim, SplitFunction
from lightning_pardist.strategies.strategy import PardistStrategy


class DataParallelStrategy(PardistStrategy):
    """Data parallel in one process: a replica of the module a device, each in a thread, with its part of each batch.

    What torch's ``DataParallel`` is, for a whole training step: the batch is cut, ``training_step`` runs on every
    replica, and losses, logged values, metrics and what the step returns are put together to those of the batch, each
    mean weighed by what it counts. The numbers are those of one process. Buffers stay those of the first replica.
    Validation, test and predict run whole batches on the first device.

    It needs no launcher and no second process, and it is slower than :class:`~lightning_pardist.DDPStrategy`: threads
    share one interpreter, every step replicates the module, and the optimizer runs on one device.

    Args:
        batch_dim: Dim of the samples in a batch's tensors, or by name where tensors differ, with None for a tensor that
            goes whole to every replica; as in :class:`~lightning_pardist.PipelineStrategy`.
        split_batch: For batches that no dim cuts: a function of a batch and a number that returns at most so many
            parts.
        **kwargs: See :class:`~lightning_pardist.strategies.strategy.PardistStrategy`.

    Raises:
        ValueError: If a setting is out of range; in a Trainer of several nodes or under a launcher that has started
            several processes; during a run, if the module cannot be replicated.
        CannotPipelineError: During a run, if the parts of a batch do not go together.
    """

    def __init__(self, *, batch_dim: BatchDim = 0, split_batch: SplitFunction | None = None, **kwargs: Any) -> None:
        self._replicas = ReplicaAxis(batch_dim=batch_dim, split_batch=split_batch)
        # Also in a notebook: one process needs no other.
        super().__init__(axes=[self._replicas, DDPAxis()], **{"start_method": "popen", **kwargs})

    @property
    @override
    def num_processes(self) -> int:
        """Ranks on this node: the one process that runs all devices."""
        return 1

    @override
    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        found = self.num_nodes
        if environment is not None and environment.creates_processes_externally:
            found = max(found, environment.world_size())
        if found > 1:
            raise ValueError(
                f"{type(self).__name__} is one process with several devices, and num_nodes={self.num_nodes}"
                f" with {found} processes was asked for. Start one process on one node, or use pardist_ddp."
            )
        self._replicas.devices = list(self.parallel_devices or [])
        super()._configure_launcher()
