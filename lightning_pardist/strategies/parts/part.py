"""What a strategy asks of each kind of parallelism that it is made of."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.callbacks import ModelPruning, WeightAveraging
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pardist.engines.api import DataEngine
from lightning_pardist.engines.fully_sharded.materialize import on_meta
from lightning_pardist.mesh import Degree

if TYPE_CHECKING:
    from lightning_pardist.strategies.base import PardistStrategy


class Part:
    """One kind of parallelism under a strategy: tensor, pipeline or data. Every hook does nothing by default.

    The strategy calls the parts in a fixed order. A module is transformed ``tensor -> pipeline -> data``, then
    optimizers are made. A step runs inside ``data``, inside that ``pipeline``, inside that ``tensor``. What is loaded
    is taken apart ``pipeline -> tensor -> data``; what is saved is put together from where each part says it is.

    Attributes:
        strategy: The strategy that the part belongs to: process groups, precision, the module.
        creates_values: Whether a module built on ``meta`` gets its values from parts of this class.
    """

    strategy: PardistStrategy
    creates_values: ClassVar[bool] = False
    #: Whether the module came without values to this run.
    _built_on_meta = False

    def bind(self, strategy: PardistStrategy) -> None:
        """Become part of a strategy. Called once, when the strategy is made."""
        self.strategy = strategy

    def degrees(self, ranks_per_node: int) -> dict[str, Degree]:
        """Arguments for :meth:`~lightning_pardist.mesh.ParallelDims.resolve`.

        Args:
            ranks_per_node: Ranks that the Trainer starts on each host.
        """
        return {}

    def check(self, trainer: pl.Trainer) -> None:
        """Refuse what cannot be right, before the module is changed. Not collective.

        Raises:
            ValueError: With what was set, what was found and the fix.
        """

    # --- the module ---------------------------------------------------------------------------------------------

    @property
    def loads_after_setup(self) -> bool:
        """Whether the module has nowhere to load a checkpoint to before :meth:`transform`."""
        module = self.strategy.lightning_module
        return self.creates_values and module is not None and on_meta(module)

    def materialize(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Give values to a module built on ``meta``, as far as this rank needs them. Collective over the world.

        The module has its final dtype; nothing has been moved or transformed yet.
        """

    def observe(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Look at the module while it is plain and whole, before any part transforms it. Collective over the world."""

    def transform(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Change the module in place to what this part runs. Collective over the world."""

    def after_optimizers(self, trainer: pl.Trainer, optimizers: Sequence[Optimizer]) -> None:
        """Optimizers were made from the transformed module; the engine of the data axis does not exist yet.

        Collective over the world.
        """

    def ready(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Every part has transformed the module, and optimizers exist if there are any. Collective over the world."""

    @property
    def boundaries(self) -> Sequence[Sequence[nn.Module]] | None:
        """Modules that this part runs one by one, by their ``forward``; None if steps run as they were written.

        Stage by stage, in the order in which they are called.
        """
        return None

    @property
    def runs_a_step(self) -> int:
        """How often a training step runs forward and backward of the module."""
        return 1

    # --- steps --------------------------------------------------------------------------------------------------

    def running(self) -> AbstractContextManager[None]:
        """Around a step and everything that other parts do to run it."""
        return nullcontext()

    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one of the module's step functions."""
        return step(*args, **kwargs)

    def plain(self, tree: Any) -> Any:
        """Values of a step with ordinary, whole tensors in place of this part's. Collective if there are any."""
        return tree

    def backward(self, run: Callable[[], None]) -> None:
        """Run backward from a step's loss."""
        run()

    def start_evaluation(self) -> None:
        """Validation, test or predict begins on this rank. Not collective: a rank without samples skips predict."""

    def end_evaluation(self) -> None:
        """Every batch of this rank has been evaluated, and the epoch's hooks have run."""

    def before_collective(self) -> None:
        """Called right before a collective that steps and hooks may lead to, on every rank that takes part."""

    @property
    def random_position(self) -> int | None:
        """Where this part's own random numbers go on, if it has any beside those of the process."""
        return None

    @random_position.setter
    def random_position(self, position: int) -> None:
        """Go on as the run that was saved."""

    # --- the gradient norm --------------------------------------------------------------------------------------

    def counts(self, param: nn.Parameter) -> bool:
        """Whether this rank counts a parameter's gradient: of what several ranks of this axis hold alike, one does."""
        return True

    def reduce_over_axis(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Combine a tensor in place over this part's axis, the data axis excepted. Collective over it."""

    # --- checkpoints --------------------------------------------------------------------------------------------

    def own_module_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict without the values that other ranks of this axis answer for. Not collective.

        Returns:
            Their tensors on ``meta``, and no other values of theirs; what is split over ranks as ``DTensor``s.
        """
        return state

    def local_module_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of a state dict of one process that this rank's module takes. Not collective."""
        return state

    def local_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """As :meth:`local_module_state`, for an optimizer's state dict. Not collective."""
        return state

    def whole_values(self, tree: Any) -> Any:
        """What callbacks add to a checkpoint, with ordinary tensors in place of this part's. Collective if any are."""
        return tree

    # --- for people, and the end --------------------------------------------------------------------------------

    def describe(self) -> str:
        """What is split over what, in lines for the log; empty if there is nothing to say."""
        return ""

    def release(self) -> None:
        """Take back what :meth:`ready` did, before any part is torn down. Not collective."""

    def teardown(self) -> None:
        """The run has ended, well or not. Not collective, unless :meth:`ended_well`."""

    def ended_well(self) -> bool:
        """Whether the run came to its end on every rank, so that they may still talk to each other."""
        module = self.strategy.lightning_module
        if module is None or module._trainer is None:
            return False
        return module.trainer.state.status != TrainerStatus.INTERRUPTED


class DataPart(Part):
    """The axis along which ranks see different samples; every strategy has one."""

    @property
    def broadcasts(self) -> bool:
        """Whether :meth:`transform` gives every rank the first rank's values by itself."""
        return False

    @property
    def steps_on_parts(self) -> bool:
        """Whether the engine sees to it that optimizers step on what this rank holds of each parameter."""
        return False

    def convert_precision(self, module: pl.LightningModule) -> None:
        """Bring the module to the dtype that ``Trainer(precision=...)`` stands for. Not collective."""
        self.strategy.precision_plugin.convert_module(module)

    def to_device(self, module: nn.Module) -> None:
        """Move the module to this rank's device; what other ranks alone have created stays on ``meta``."""
        device = self.strategy.root_device
        if not self.strategy.restore_checkpoint_after_setup:
            module.to(device)
            return
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
        _update_properties(module, device=device)

    @abstractmethod
    def make_engine(self, module: nn.Module, optimizers: list[Optimizer]) -> DataEngine:
        """The engine that keeps gradients right over the data axis. Collective over the data axis."""

    def whole_module_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's state dict to that of one process, whole at least on the first rank. Collective.

        Called where neither tensor nor pipeline part split the module.
        """
        return state

    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
        """Load what :meth:`local_module_state` left of a state dict. Not collective."""
        module.load_state_dict(state, strict=strict)


def refuse_renormalized(module: nn.Module, where: str) -> None:
    """Refuse embeddings with ``max_norm`` where ranks see different samples, or parts of a layer. Not collective.

    Args:
        module: As the user built it.
        where: Name of the strategy.

    Raises:
        ValueError: With the name of the first.
    """
    for name, layer in module.named_modules():
        if not isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) or layer.max_norm is None:
            continue
        if layer.weight.requires_grad:
            raise ValueError(
                f"{name!r} has max_norm={layer.max_norm}, so that its forward changes the rows that one rank's samples"
                f" use: under {where} ranks would come to differ. Set max_norm=None, and rescale the rows in"
                " on_train_batch_start (torch.renorm)."
            )


def refuse_callbacks(trainer: pl.Trainer, kinds: type[pl.Callback] | tuple[type[pl.Callback], ...], why: str) -> None:
    """Refuse callbacks of some classes. Not collective.

    Args:
        trainer: Whose callbacks.
        kinds: Their classes.
        why: What the error says behind the callback's name: the reason, and the fix.

    Raises:
        ValueError: If the Trainer has such a callback.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, kinds):
            raise ValueError(f"{type(callback).__name__} {why}")


def refuse_pruning(trainer: pl.Trainer) -> None:
    """Refuse ``ModelPruning`` where ranks hold parts of the model. Not collective.

    Raises:
        ValueError: If the Trainer has such a callback.
    """
    refuse_callbacks(
        trainer,
        ModelPruning,
        f"compares the elements of whole parameters, and each rank of {type(trainer.strategy).__name__} has some of"
        " them only. Use pardist_ddp, pardist_zero1 or pardist_zero2, or prune after training.",
    )


def refuse_averages_in_shards(trainer: pl.Trainer) -> None:
    """Refuse callbacks that average weights where checkpoints are sharded and ranks hold parts. Not collective.

    Raises:
        ValueError: If the Trainer has such a callback.
    """
    strategy: Any = trainer.strategy
    if strategy.checkpoints.sharded:
        why = 'puts two models into a checkpoint, of which checkpoint="sharded" knows one. Use checkpoint="full".'
        refuse_callbacks(trainer, WeightAveraging, why)
