"""Single-process, multi-device data-parallel strategy (DataParallel)."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from lightning_pardist.axes.ddp import DDPAxis
from lightning_pardist.axes.replicas import ReplicaAxis
from lightning_pardist.engines.pipeline import BatchDim, SplitFunction
from lightning_pardist.strategies.strategy import PardistStrategy


class DataParallelStrategy(PardistStrategy):
    """Data parallel in one process: one module replica per device, each in its own thread with a part of each batch.

    Applies the scheme of torch's ``DataParallel`` to a whole training step: the batch is split, ``training_step`` runs
    on every replica, and losses, logged values, metrics and step outputs are combined to those of the batch, each mean
    weighted by its count. Results equal those of a single device. Buffers are those of the first replica. Validation,
    test and predict run whole batches on the first device.

    It needs no launcher and no second process, but is slower than :class:`~lightning_pardist.DDPStrategy`: threads
    share one interpreter, every step replicates the module, and the optimizer runs on one device.

    Args:
        batch_dim: Sample dim of a batch's tensors, or a mapping from names to dims if tensors differ, with None for a
            tensor that every replica gets whole; as in :class:`~lightning_pardist.PipelineStrategy`.
        split_batch: For batches that cannot be split along a dim: a function of a batch and a number that returns at
            most that many parts.
        **kwargs: See :class:`~lightning_pardist.strategies.strategy.PardistStrategy`.

    Raises:
        ValueError: If a setting is out of range; in a Trainer with several nodes or under a launcher that started
            several processes; during a run, if the module cannot be replicated.
        CannotPipelineError: During a run, if the results of a batch's parts cannot be combined.
    """

    def __init__(self, *, batch_dim: BatchDim = 0, split_batch: SplitFunction | None = None, **kwargs: Any) -> None:
        self._replicas = ReplicaAxis(batch_dim=batch_dim, split_batch=split_batch)
        # "popen" also in a notebook: the strategy starts no further process.
        super().__init__(axes=[self._replicas, DDPAxis()], **{"start_method": "popen", **kwargs})

    @property
    @override
    def num_processes(self) -> int:
        """Number of ranks on this node: 1, since one process runs all devices."""
        return 1

    @override
    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        found = self.num_nodes
        if environment is not None and environment.creates_processes_externally:
            found = max(found, environment.world_size())
        if found > 1:
            raise ValueError(
                f"{type(self).__name__} runs several devices in one process, but num_nodes={self.num_nodes} and"
                f" {found} processes were requested. Start one process on one node, or use pardist_ddp."
            )
        self._replicas.devices = list(self.parallel_devices or [])
        super()._configure_launcher()
