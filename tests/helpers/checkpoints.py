"""Run saved after one epoch, and its resumption under another strategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_pardist import (
    DDPStrategy,
    FSDPStrategy,
    HybridStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
    ZeroStrategy,
)
from tests.helpers.models import MODULES
from tests.helpers.parity import snapshot
from tests.helpers.runs import BATCH, Data, Losses, _flat_state, quiet_trainer

#: Strategy factories by their names in the matrix; each takes the checkpoint format to save.
STRATEGIES = {
    "one": lambda **kwargs: DDPStrategy(**kwargs),
    "ddp": lambda **kwargs: DDPStrategy(**kwargs),
    "zero1": lambda **kwargs: ZeroStrategy(zero_stage=1, bucket_size_mb=0.001, **kwargs),
    "zero2": lambda **kwargs: ZeroStrategy(zero_stage=2, bucket_size_mb=0.001, **kwargs),
    "zero3": lambda **kwargs: FSDPStrategy(min_unit_size_mb=0, **kwargs),
    "fsdp": lambda **kwargs: FSDPStrategy(min_unit_size_mb=0, reshard_after_forward=False, **kwargs),
    # On four ranks: two tensor-parallel or pipeline ranks times two data-parallel ones.
    "tp": lambda **kwargs: TensorParallelStrategy(tensor_parallel_size=2, **kwargs),
    "tp_zero1": lambda **kwargs: TensorParallelStrategy(tensor_parallel_size=2, data_parallel="zero1", **kwargs),
    "tp_zero3": lambda **kwargs: TensorParallelStrategy(
        tensor_parallel_size=2, data_parallel="zero3", data_settings={"min_unit_size_mb": 0}, **kwargs
    ),
    "pp": lambda **kwargs: PipelineStrategy(pipeline_parallel_size=2, **kwargs),
    "mp": lambda **kwargs: PipelineStrategy(schedule="mp", **kwargs),
    "pp_interleaved": lambda **kwargs: PipelineStrategy(schedule="interleaved", chunks_per_rank=2, **kwargs),
    "pp_zero1": lambda **kwargs: PipelineStrategy(pipeline_parallel_size=2, data_parallel="zero1", **kwargs),
    "pp_zero3": lambda **kwargs: PipelineStrategy(
        pipeline_parallel_size=2, data_parallel="zero3", data_settings={"min_unit_size_mb": 0}, **kwargs
    ),
    # As pardist_3d: tensor parallelism of 2 on two ranks, and two pipeline stages of it on four.
    "3d": lambda **kwargs: HybridStrategy(pipeline_parallel_size="machine", tensor_parallel_size="machine", **kwargs),
    "single": lambda **kwargs: SingleDeviceStrategy(device="cpu"),
}
#: Batches per epoch; a run is saved after one epoch and resumes for another.
STEPS = 2


@contextmanager
def whole_states(strategy: Any) -> Iterator[None]:
    """Make state dicts complete and unsharded inside the block, whatever the strategy's checkpoint format."""
    checkpoints = getattr(strategy, "checkpoints", None)
    if checkpoints is None:
        yield
        return
    form, checkpoints.form = checkpoints.form, "full"
    try:
        yield
    finally:
        checkpoints.form = form


class Record(Losses):
    """Callback that records losses, and the module and optimizer states restored before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, Any] = {}
        self.loaded_optimizer: dict[str, Any] = {}

    def on_train_start(self, trainer, pl_module) -> None:
        with whole_states(trainer.strategy):
            state = trainer.strategy.lightning_module_state_dict()
            self.weights = {name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)}
            self.loaded_optimizer = _flat_state([trainer.strategy.optimizer_state(opt) for opt in trainer.optimizers])

    def on_train_end(self, trainer, pl_module) -> None:
        with whole_states(trainer.strategy):
            super().on_train_end(trainer, pl_module)


def run(
    name: str,
    devices: int,
    module_name: str = "classifier",
    *,
    epochs: int,
    resume: str | None = None,
    save: str | None = None,
    optimizer: str = "adamw",
    **strategy_kwargs: Any,
) -> dict[str, Any]:
    """Train up to ``epochs`` epochs in total, optionally from a checkpoint, and optionally save one."""
    torch.manual_seed(11)
    module = MODULES[module_name](optimizer=optimizer)
    if resume is not None:
        # Shifted weights: all values must come from the checkpoint.
        with torch.no_grad():
            for param in module.parameters():
                param.add_(1.0)
    record = Record()
    trainer = quiet_trainer(
        strategy=STRATEGIES[name](**strategy_kwargs),
        devices=devices,
        use_distributed_sampler=False,
        callbacks=[record],
        max_epochs=epochs,
    )
    trainer.fit(module, datamodule=Data(module.dataset(BATCH * STEPS)), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    result = torch.stack(record.losses)
    if devices > 1 and dist.is_initialized():
        dist.all_reduce(result)
        result /= dist.get_world_size()
    return {
        "losses": result,
        "weights": snapshot(module),
        "optimizer": record.optimizer_state,
        "loaded_weights": record.weights,
        "loaded_optimizer": record.loaded_optimizer,
    }
