"""Quantised parameters and gradients, against one process that rounds as all ranks together do."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_pardist.engines.common.block_quantization import EvenBlocks, decode, encode
from lightning_pardist.engines.common.quantized_exchange import ErrorFeedback, reduce_scatter_quantized
from lightning_pardist.engines.fsdp import find_fsdp_units, shard
from lightning_pardist.engines.fsdp.comm import UnitCompression
from lightning_pardist.engines.fsdp.full_state import full_state
from lightning_pardist.engines.zero import ZeroEngine
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import cpu_mesh, run_ranks
from tests.helpers.wire import sent_bytes

STEPS, LARGEST = 5, {"int8": 127, "int4": 7}


def _module(width=9, dtype=torch.float64):
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(width, 23), nn.Tanh(), nn.Linear(23, width), nn.Tanh(), nn.Linear(width, 5)).to(
        dtype
    )


def _loss(module, step, rank):
    x = torch.randn(6, 9, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)
    return module(x).pow(2).mean()


def _optimizer(params):
    return torch.optim.AdamW(params, lr=0.02, eps=1e-3)


# --- one process ------------------------------------------------------------------------------------------------------


def _rounded(values, kind):
    """Quantise and dequantise numbers that share scales by blocks of 64."""
    if kind == "bf16":
        return values.bfloat16().to(values.dtype)
    found = []
    for block in values.float().split(64):
        scale = block.abs().max() / LARGEST[kind]
        found.append(torch.round(block / scale) * scale if scale else block)
    return torch.cat(found).to(values.dtype)


def _zero_rows(numbers, world):
    """Return the layout of ZeRO-1 and 2's single bucket over ranks: parameters from the last to the first.

    Parameters and slices begin at multiples of 16 bytes, which are two elements.
    """

    def padded(values, multiple):
        return nn.functional.pad(values, (0, -len(values) % multiple), value=-1)

    flat = torch.cat([padded(each.reshape(-1), 2) for each in reversed(numbers)])
    return padded(flat, 2 * world).view(world, -1)


def _fsdp_rows(numbers, world):
    """Return the layout of a unit of ``fully_shard`` over ranks: rows of each parameter in turn."""
    rows = []
    for each in numbers:
        missing = -len(each) % world
        padding = each.new_full((missing, *each.shape[1:]), -1)
        rows.append(torch.cat([each, padding]).view(world, -1))
    return torch.cat(rows, 1)


def _simulate(world, layout, gather, reduce, feedback=True):
    module = _module()
    params = list(module.parameters())
    exact = [param.detach().clone().requires_grad_() for param in params]
    optimizer = _optimizer(exact)
    ends = torch.tensor([param.numel() for param in params]).cumsum(0).tolist()
    sizes = [param.shape for param in params]
    numbers = [torch.arange(e - s.numel(), e).view(s) for e, s in zip(ends, sizes, strict=True)]
    where = layout(numbers, world)
    kept = torch.zeros(world, *where.shape, dtype=torch.float64)

    def rows(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        return torch.where(where < 0, 0.0, flat[where])

    def tensors(values):
        flat = torch.zeros(ends[-1], dtype=torch.float64)
        flat[where[where >= 0]] = values[where >= 0]
        return [piece.view(size) for piece, size in zip(flat.split([s.numel() for s in sizes]), sizes, strict=True)]

    for step in range(STEPS):
        values = rows(exact)
        seen = torch.stack([_rounded(row, gather) for row in values]) if gather else values
        for param, value in zip(params, tensors(seen), strict=True):
            param.data.copy_(value)
        total = torch.zeros_like(values)
        for rank in range(world):
            gradients = rows(torch.autograd.grad(_loss(module, step, rank), params)) / world
            if reduce is None:
                total += gradients
                continue
            for owner in range(world):
                if owner == rank:
                    total[owner] += gradients[owner]
                    continue
                wanted = gradients[owner] + kept[rank, owner]
                sent = _rounded(wanted, reduce)
                total[owner] += sent
                if feedback:
                    kept[rank, owner] = _rounded(wanted - sent, "int8")
        for param, gradient in zip(exact, tensors(total), strict=True):
            param.grad = gradient
        optimizer.step()
    return {name: param.detach() for (name, _), param in zip(module.named_parameters(), exact, strict=True)}


# --- ranks ------------------------------------------------------------------------------------------------------------


def _zero(stage, gather, reduce, feedback):
    module = _module()
    optimizer = _optimizer(module.parameters())
    engine = ZeroEngine(
        module, [optimizer], group=dist.group.WORLD, zero_stage=stage, gather=gather, reduce=reduce,
        error_feedback=feedback,
    )  # fmt: skip
    for step in range(STEPS):
        engine.show_dequantized()
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, snapshot(module))
        assert all(torch.equal(other[name], mine) for other in everywhere for name, mine in snapshot(module).items())
        loss = _loss(module, step, dist.get_rank())
        optimizer.zero_grad()
        with engine.backward(loss):
            loss.backward()
        optimizer.step()
        engine.step_done()
    engine.show_exact()
    found = snapshot(module)
    # Reading changes nothing: the codes of the exact values equal the received ones.
    engine.show_dequantized()
    coded = snapshot(module)
    engine.show_exact(for_a_look=True)
    assert_close(snapshot(module), found)
    engine.show_dequantized()
    # Values written into the exact view are kept, and are not mistaken for the parameters' own once they are undone.
    next(iter(module.parameters())).data.add_(1.0)
    engine.show_exact(for_a_look=True)
    assert not torch.equal(snapshot(module)["0.weight"], found["0.weight"])
    next(iter(module.parameters())).data.copy_(coded["0.weight"])
    engine.show_exact()
    assert_close(snapshot(module), found)
    engine.detach()
    return found


def _fsdp(gather, reduce, feedback):
    module = _module()
    compression = UnitCompression(gather, reduce, ErrorFeedback() if feedback else None)
    sharded = shard(module, cpu_mesh((dist.get_world_size(),)), units=[], compression=compression)
    optimizer = _optimizer(module.parameters())
    sharded.attach(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        sharded.run(_loss, module, step, dist.get_rank()).backward()
        optimizer.step()
    found = dict(full_state(module, sharded.writer))
    sharded.unshard_module()
    return found


CASES = [("int8", "int8", True), ("int8", None, True), (None, "int4", True), ("bf16", "int8", False)]


@pytest.mark.parametrize(("world", "stage"), [(2, 2), (4, 1)])
def test_zero_rounds_as_one_process_does(world, stage):
    for gather, reduce, feedback in CASES:
        expected = _simulate(world, _zero_rows, gather, reduce, feedback)
        for found in run_ranks(world, _zero, stage, gather, reduce, feedback):
            assert_close(found, expected, rtol=1e-9)


def test_fully_sharded_rounds_as_one_process_does():
    for gather, reduce, feedback in CASES:
        found = run_ranks(2, _fsdp, gather, reduce, feedback)[0]
        assert_close(found, _simulate(2, _fsdp_rows, gather, reduce, feedback), rtol=1e-9)


def _sent(kind, gather, reduce):
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    if kind == "zero3":
        units = find_fsdp_units(module, min_unit_bytes=1)
        compression = UnitCompression(gather, reduce)
        engine = shard(
            module, cpu_mesh((dist.get_world_size(),)), units=units, compression=compression, reshard_after_forward=True
        )
        optimizer = torch.optim.Adam(module.parameters())
        engine.attach(optimizer)
    else:
        optimizer = torch.optim.Adam(module.parameters())
        engine = ZeroEngine(
            module, [optimizer], group=dist.group.WORLD, zero_stage=int(kind[-1]), gather=gather, reduce=reduce
        )

    def step(number):
        x = torch.randn(4, 512, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))
        optimizer.zero_grad()
        if kind == "zero3":
            engine.run(lambda: module(x).pow(2).mean()).backward()
        else:
            loss = module(x).pow(2).mean()
            with engine.backward(loss):
                loss.backward()
        optimizer.step()

    step(0)
    sent = sent_bytes(lambda: step(1))
    if kind == "zero3":
        engine.unshard_module()
    else:
        engine.detach()
    return sent


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
def test_codes_of_eight_bits_are_a_quarter_of_the_bytes(kind):
    whole = run_ranks(2, _sent, kind, None, None)[0]
    assert run_ranks(2, _sent, kind, "int8", "int8")[0] <= 0.30 * whole
    assert run_ranks(2, _sent, kind, "int8", "int4")[0] <= 0.25 * whole


# --- codes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int8", "int4", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_codes_of_any_width_and_dtype(kind, dtype):
    for width in (1, 63, 64, 130):
        rows = torch.randn(3, width, generator=torch.Generator().manual_seed(width)).to(dtype)
        layout = EvenBlocks(width)
        found = decode(encode(rows, layout, kind), layout, kind, dtype)
        assert found.dtype == dtype
        assert_close({"": found}, {"": torch.stack([_rounded(row, kind) for row in rows])})


def _overflow():
    error_feedback, world = ErrorFeedback(), dist.get_world_size()
    finite = torch.randn(world * 128, generator=torch.Generator().manual_seed(dist.get_rank()))
    broken = finite.clone()
    broken[::32] = float("inf")
    sums = [
        reduce_scatter_quantized(
            each.clone(), group=dist.group.WORLD, kind="int8", error_feedback=error_feedback
        ).finish()
        for each in (finite, broken, finite)
    ]
    return [bool(each.isfinite().all()) for each in sums]


def test_gradients_that_are_not_finite_are_seen_once():
    assert run_ranks(2, _overflow) == [[True, False, True]] * 2


def _halves():
    """Return the largest error of the mean of received bf16 gradients, sent as int4 and the same in every step."""
    error_feedback, steps = ErrorFeedback(), 200
    mine = torch.randn(2 * 64, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    total = torch.zeros(64)
    for _ in range(steps):
        total += reduce_scatter_quantized(
            mine.clone(), group=dist.group.WORLD, kind="int4", error_feedback=error_feedback
        ).finish()
    everywhere = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(everywhere, mine)
    expected = sum(each.float() for each in everywhere).view(2, 64)[dist.get_rank()]
    return float((total / steps - expected).abs().max())


def test_errors_of_gradients_in_halves_do_not_add_up():
    assert max(run_ranks(2, _halves)) < 3e-3


def _one_is_not_finite():
    module = _module(dtype=torch.float32)
    engine = ZeroEngine(module, [_optimizer(module.parameters())], group=dist.group.WORLD, zero_stage=1, gather="int8")
    with torch.no_grad():
        module[0].weight[0, 0] = float("inf")
    exact = snapshot(module)
    engine.show_exact()
    engine.show_dequantized()
    engine.show_exact()
    left = snapshot(module)
    engine.show_dequantized()
    engine.show_exact(for_a_look=True)
    again = snapshot(module)
    engine.detach()
    return exact, left, again


def test_exact_values_outlast_a_neighbour_that_is_not_finite():
    for exact, left, again in run_ranks(2, _one_is_not_finite):
        for name, values in exact.items():
            assert torch.equal(left[name], values)
            assert torch.equal(again[name], values)


def test_an_optimizer_of_all_tensors_together_is_refused_by_name():
    (text,) = set(run_ranks(2, _joint))
    assert "LBFGS" in text
    assert "gather='int8'" in text


def _joint():
    module = copy.deepcopy(_module())
    try:
        ZeroEngine(
            module, [torch.optim.LBFGS(module.parameters())], group=dist.group.WORLD, zero_stage=1, gather="int8"
        )
    except ValueError as error:
        return str(error)
    return ""
