"""Detects pairwise comparisons of samples in a step, by any function: ``a @ b.T``, ``x[:, None] - x[None]``.

If each rank has a part of the samples, there are fewer pairs than on one process. The graph of a loss shows some of
these comparisons, but hardly any with inputs that have no gradient (of a frozen tower, of labels). So the functions
that a step calls are traced from the batch: a result with samples along two dims was made of pairs if none of its
inputs has samples along two dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_pardist.engines.common.batch_dim import BatchDims
from lightning_pardist.engines.pipeline.nested import tensors_in
from lightning_pardist.trainer.batch_figures import given_tensors
from lightning_pardist.trainer.sample_orders import SIDE_BY_SIDE

#: Functions whose result has the pairs of samples along one dim.
_IN_A_ROW = {"pdist"}


class SamplePairs(TorchFunctionMode):
    """Torch function mode that traces the functions of a step from its batch.

    Args:
        batch: Batch of the step.
        samples: Number of samples in it.

    Attributes:
        found: Description of the first result with a gradient that was made of pairs of samples; None if there is none.
    """

    def __init__(self, batch: Any, samples: int) -> None:
        super().__init__()
        self.found: str | None = None
        self._samples = samples
        #: Tensors that hold samples.
        self._known: Any = WeakTensorKeyDictionary()
        for each in tensors_in(batch):
            if each.shape[:1] == (samples,):
                self._known[each] = True

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.found is None and self._samples > 1:
            self._follow(getattr(func, "__name__", ""), given_tensors((args, kwargs)), given_tensors(output))
        return output

    def _follow(self, name: str, given: list[Tensor], results: list[Tensor]) -> None:
        results = [each for each in results if type(each) is Tensor]
        of_pairs = [each for each in results if each.requires_grad and self._dims_of(each) > 1]
        in_a_row = [each for each in results if each.requires_grad and name in _IN_A_ROW]
        if of_pairs and name not in SIDE_BY_SIDE and self._are_samples(given, at_least=2):
            self.found = f"{name.strip('_')} of samples with each other, of shape {list(of_pairs[0].shape)}"
        elif in_a_row and self._are_samples(given, at_least=1):
            self.found = f"{name.strip('_')} of samples with each other"
        if any(each in self._known for each in given):
            self._known.update((each, True) for each in results if self._dims_of(each))

    def _dims_of(self, tensor: Tensor) -> int:
        """Return the number of dims whose size is the number of samples."""
        return sum(size == self._samples for size in tensor.shape)

    def _are_samples(self, given: list[Tensor], *, at_least: int) -> bool:
        """Return whether arguments with a dim of that size hold samples, in one dim each: layers may be as wide."""
        dims = [(each, self._dims_of(each)) for each in given]
        if any(count > 1 for _, count in dims) or sum(count for _, count in dims) < at_least:
            return False
        return all(self._holds_samples(each) for each, count in dims if count)

    def _holds_samples(self, tensor: Tensor) -> bool:
        """Return whether a tensor holds samples, by the trace, or by its graph after custom autograd functions."""
        node = tensor.grad_fn
        return tensor in self._known or (node is not None and BatchDims(self._samples).of(node) >= 0)
