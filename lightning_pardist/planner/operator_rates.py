"""Rates of single operators on a device by size, measured in a second or two in addition to peak rates.

Peak rates do not predict small matrix products, exponentials, or operators on data that fits a cache. Each common
operator and its backward is therefore measured at a few sizes. Other operators are assumed to be as fast as the most
similar one.

[Note: edge] The size of a product is the edge of the cube with the same operations per byte: for (m, k) times (k, n)
the harmonic mean of m, k and n. This distinguishes thin products from square ones, and gives batched products,
convolutions and recurrent layers a size as well. The size of any other operator is the bytes that it reads and writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pardist.planner.ledger import Ledger, Operator

#: By operator: size (see the note), operations or bytes of a call, and operations or bytes per second.
Rates = Mapping[str, Sequence[tuple[float, float, float]]]

_ELEMENTS = (1 << 13, 1 << 16, 1 << 19, 1 << 22)
_TINY = 16
_ROW = 256
#: Operators that use the rate of another one.
_LIKE = {
    **dict.fromkeys(("addmm", "bmm", "baddbmm", "_grouped_mm", "dot", "mv"), "mm"),
    **dict.fromkeys(("tanh", "sigmoid", "silu", "erf", "log", "log1p", "sin", "cos", "pow", "softplus", "mish", "elu",
                     "logsumexp"), "exp"),
    "native_dropout": "bernoulli",
    **dict.fromkeys(("rand", "rand_like", "random", "exponential", "multinomial"), "uniform"),
    **dict.fromkeys(("randn", "randn_like"), "normal"),
    **dict.fromkeys(("tanh_backward", "sigmoid_backward", "silu_backward", "mish_backward", "elu_backward"),
                    "gelu_backward"),
    **dict.fromkeys(("mean", "amax", "max", "amin", "argmax", "any", "all", "linalg_vector_norm", "norm", "cumsum",
                     "nll_loss_forward"), "sum"),
    **dict.fromkeys(("native_group_norm", "rsqrt"), "native_layer_norm"),
    "native_group_norm_backward": "native_layer_norm_backward",
    **dict.fromkeys(("clone", "cat", "stack", "_to_copy", "constant_pad_nd", "split_with_sizes_copy", "slice_backward",
                     "select_backward", "flip", "roll", "index_put", "scatter", "masked_fill"), "copy"),
    **dict.fromkeys(("index", "index_select", "gather"), "embedding"),
    **dict.fromkeys(("zero", "fill", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros",
                     "nll_loss_backward"), "fill"),
    **dict.fromkeys(("addcdiv", "reciprocal"), "div"),
    **dict.fromkeys(("_fused_adam", "_fused_sgd", "_fused_adagrad"), "_fused_adamw"),
    **dict.fromkeys(("avg_pool2d", "_adaptive_avg_pool2d", "upsample_nearest2d"), "max_pool2d_with_indices"),
    **dict.fromkeys(("avg_pool2d_backward", "_adaptive_avg_pool2d_backward", "upsample_nearest2d_backward"),
                    "max_pool2d_with_indices_backward"),
}  # fmt: skip


def operator_name(text: str) -> str:
    """Return an operator's base name without in-place and foreach variants: ``"add"`` for ``"aten.add_.Tensor"``."""
    name = text.split(".")[1] if "." in text else text
    return (name if name.startswith("__") else name.rstrip("_")).removeprefix("_foreach_")


def size_of(operator: Operator) -> float:
    """Return an operator's size: [Note: edge]."""
    if not operator.flops or not operator.moved:
        return float(operator.moved)
    return 1.5 * operator.flops * operator.dtype.itemsize / operator.moved


def rate_of(operator: Operator, rates: Rates) -> float | None:
    """Return an operator's operations or bytes per second; None if no similar operator was measured."""
    name = operator_name(operator.name)
    points = rates.get(name) or rates.get(_LIKE.get(name, "mm" if operator.flops else "add"))
    return rate_near(points, size_of(operator), operator.flops or operator.moved) if points else None


def rate_near(points: Sequence[tuple[float, float, float]], size: float, work: float) -> float:
    """Interpolate measured rates in log space, weighted by the inverse squared distance in size and work."""
    total = weights = 0.0
    for at_size, at_work, rate in points:
        far = math.log(max(size, 1.0) / at_size) ** 2 + math.log(max(work, 1.0) / at_work) ** 2
        weight = 1 / max(far, 1e-6) ** 2
        weights += weight
        total += weight * math.log(rate)
    return math.exp(total / weights)


def measure_operators(device: torch.device, seconds_of: Callable[[Callable[[], Any]], float]) -> Rates:
    """Measure each common operator at several sizes.

    Args:
        device: Device to measure.
        seconds_of: Function that returns the seconds of one call. If it is collective, so is this function.
    """
    found: dict[str, list[tuple[float, float, float]]] = {}
    for makes in _probes(device):
        runs = [make() for make in makes]
        # The first call has minimal size and measures the fixed cost of a call.
        seconds = [seconds_of(run) for run in runs]
        for run, took in zip(runs[1:], seconds[1:], strict=True):
            operator = _main_operator(run)
            if operator is not None:
                work = float(operator.flops or operator.moved)
                net = max(took - seconds[0], 0.1 * took)
                found.setdefault(operator_name(operator.name), []).append((size_of(operator), work, work / net))
    return found


def _main_operator(run: Callable[[], Any]) -> Operator | None:
    ledger = Ledger()
    with ledger:
        ledger.start()
        run()
        ledger.stop()
    operators = [event for event in ledger.events if isinstance(event, Operator)]
    return max(operators, key=lambda each: (each.flops, each.moved), default=None)


_Function = Callable[..., Tensor]
_Makes = Sequence[Callable[[], Callable[[], Any]]]


def _probes(device: torch.device) -> Iterator[_Makes]:
    """Yield the calls to time for each operator, the first of minimal size."""
    # Not negative: the square root of a negative number takes twenty times as long.
    tensor = partial(torch.rand, device=device)

    def forward(function: Callable[..., Any], *shapes: Sequence[tuple[int, ...]]) -> _Makes:
        return [lambda each=each: partial(function, *(tensor(shape) for shape in each)) for each in shapes]  # type: ignore[misc]

    def backward(function: Callable[..., Any], *shapes: Sequence[tuple[int, ...]]) -> _Makes:
        return [lambda each=each: _backward(function, [tensor(shape) for shape in each]) for each in shapes]  # type: ignore[misc]

    flat = [((count,),) for count in (_TINY, *_ELEMENTS)]
    rows = [((max(1, count // _ROW), min(count, _ROW)),) for count in (_TINY, *_ELEMENTS)]
    rowwise: list[_Function] = [partial(torch.softmax, dim=-1), partial(torch.log_softmax, dim=-1), _layer_norm]
    single: list[_Function] = [torch.exp, F.gelu, torch.relu, torch.sum, torch.clone, torch.zeros_like, torch.sqrt]
    drawn: list[_Function] = [_bernoulli, torch.Tensor.uniform_, torch.Tensor.normal_]
    double: list[_Function] = [torch.add, torch.mul, torch.div]
    yield from (forward(function, *flat) for function in (*single, *drawn))
    yield from (forward(function, *(shape * 2 for shape in flat)) for function in double)
    yield from (forward(function, *rows) for function in rowwise)
    yield from (backward(function, *flat) for function in single[1:3])
    yield from (backward(function, *rows) for function in rowwise)
    images = [((4, 16, 2, 2),), *(((8, 64, edge, edge),) for edge in (4, 16, 64))]
    pictured: list[_Function] = [_batch_norm, partial(F.max_pool2d, kernel_size=2)]
    for function in pictured:
        yield forward(function, *images)
        yield backward(function, *images)
    thin = [((few, wide), (wide, wide)) for few in (2, 16, 64) for wide in (256, 1024)]
    # Weights too large for the cache that ranks share.
    thin.append(((8, 2048), (2048, 2048)))
    yield forward(torch.mm, *(((edge, edge),) * 2 for edge in (1, 16, 64, 256, 768)), *thin)
    # A single sample may use another algorithm than several.
    convolutions = [((1, 1, 1, 1), (1, 1, 1, 1))]
    convolutions += [((samples, wide, edge, edge), (wide, wide, 3, 3))
                     for wide, edge in ((32, 32), (128, 8), (512, 2)) for samples in (1, 8)]  # fmt: skip
    attentions = [((1, 1, 1, 1),) * 3, *(((4, 4, length, 64),) * 3 for length in (32, 128, 512))]
    products: list[tuple[_Function, Any]] = [
        (partial(F.conv2d, padding=1), convolutions),
        (F.scaled_dot_product_attention, attentions),
    ]
    for function, shapes in products:
        yield forward(function, *shapes)
        yield backward(function, *shapes)
    for make in (_recurrent, _recurrent_backward):
        yield [partial(make, device, *sizes) for sizes in ((1, 1, 8), (1, 64, 256), (8, 64, 256), (8, 8, 64))]
    for other in (_embedding, _embedding_backward, _optimizer):
        yield [partial(other, device, size) for size in (1, 8, 64)]


def _bernoulli(x: Tensor) -> Tensor:
    return x.bernoulli_(0.9)


def _backward(function: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], Any]:
    inputs = [each.requires_grad_() for each in inputs]
    with torch.enable_grad():
        out = function(*inputs)
        grad = torch.randn_like(out)
    return partial(torch.autograd.grad, out, inputs, grad, retain_graph=True)


def _layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _batch_norm(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def _recurrent(device: torch.device, samples: int, length: int, width: int) -> Callable[[], Any]:
    layer = nn.LSTM(width, width, batch_first=True, device=device)
    return partial(layer, torch.randn(samples, length, width, device=device))


def _recurrent_backward(device: torch.device, samples: int, length: int, width: int) -> Callable[[], Any]:
    layer = nn.LSTM(width, width, batch_first=True, device=device)
    inputs = torch.randn(samples, length, width, device=device)
    return _backward(lambda x, *_: layer(x)[0], [inputs, *layer.parameters()])


def _embedding(device: torch.device, size: int) -> Callable[[], Any]:
    weight = torch.randn(64 * size, _ROW, device=device)
    return partial(F.embedding, torch.randint(64 * size, (8 * size * size,), device=device), weight)


def _embedding_backward(device: torch.device, size: int) -> Callable[[], Any]:
    tokens = torch.randint(64 * size, (16 * size,), device=device)
    return _backward(partial(F.embedding, tokens), [torch.randn(64 * size, _ROW, device=device)])


def _optimizer(device: torch.device, size: int) -> Callable[[], Any]:
    param = nn.Parameter(torch.randn(_ROW, size * size, device=device))
    param.grad = torch.randn_like(param)
    optimizer = torch.optim.AdamW([param], fused=True)
    return optimizer.step
