import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_pardist.engines.fully_sharded import find_units, shard
from tests.distributed import sharded_modules as zoo
from tests.helpers.ranks import run_ranks

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-3),
}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(mine, wanted, what):
    assert mine.shape == wanted.shape, what
    scale = wanted.abs().max().clamp(min=1e-3) if wanted.numel() else 1.0
    error = ((mine - wanted).abs().max() / scale).item() if wanted.numel() else 0.0
    assert error < 1e-5, f"{what}: {error}"


def make_mesh(hsdp=False):
    size = dist.get_world_size()
    return (
        init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("r", "s")) if hsdp else init_device_mesh("cpu", (size,))
    )


def reference_step(model, shares, scale=1.0):
    """One process: the mean of the ranks' losses. Buffers move as on the first rank."""
    losses = []
    for rank, share in enumerate(shares):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        loss = model.training_step(share)
        (loss * scale / len(shares)).backward()
        losses.append(loss.detach())
        if rank > 0:
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
    return losses


def parity(name, optimizer="adam", hsdp=False, micro=1, keep="sharded", clip=None, local=True, **options):
    """Three optimizer steps sharded and in one process: losses, gradients, weights."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = getattr(zoo, name)()
    if rank > 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)  # the first rank's values are the ones that count
    reference = getattr(zoo, name)()
    torch.manual_seed(0)
    reference = getattr(zoo, name)()
    if rank == 0:
        model = copy.deepcopy(reference)
    engine = shard(model, make_mesh(hsdp), units=find_units(model, min_unit_bytes=1), **options)
    mine, theirs = OPTIMIZERS[optimizer](model.parameters()), OPTIMIZERS[optimizer](reference.parameters())
    if local:
        engine.attach(mine)
    data = zoo.batches(3 * micro, size)
    for step in range(3):
        for part in range(micro):
            shares = data[step * micro + part]
            wanted = reference_step(reference, shares, 1 / micro)
            if part < micro - 1:
                with engine.accumulate(keep):
                    loss = engine.run(model.training_step, shares[rank])
                    (loss / micro).backward()
            else:
                loss = engine.run(model.training_step, shares[rank])
                (loss / micro).backward()
            close(loss.detach(), wanted[rank], f"{name} loss {step}")
        for (key, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), f"{name} {key}: {p.grad} {q.grad}"
            if q.grad is not None:
                close(whole(p.grad), q.grad, f"{name} {key} gradient {step}")
        if clip:
            norm = engine.clip_(clip)
            close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), clip), "norm")
        mine.step()
        theirs.step()
        mine.zero_grad()
        theirs.zero_grad()
    for (key, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        close(whole(p), q, f"{name} {key} weight")
    for (key, p), q in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        if rank == 0:
            close(p.float(), q[1].float(), f"{name} {key} buffer")
    held = engine.held_bytes([mine])
    assert held["gathered"] == 0, held
    return str(engine)


def many(cases):
    for case in cases:
        torch.manual_seed(0)
        try:
            parity(**case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


ALL = (
    *("Mlp", "Blocks", "Gpt", "DirectWeight", "ForwardNeverCalled", "Repeated", "Outputs", "Frozen", "OddShapes"),
    *("MixedTypes", "ConvNet", "RankBranch", "SharedBlock", "TiedBlocks", "InPlace"),
)


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_module_gives_the_numbers_of_one_process(world_size):
    run_ranks(world_size, many, [{"name": name} for name in ALL])
