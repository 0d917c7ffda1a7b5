import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lightning_pardist.engines.fsdp import find_fsdp_units, shard
from lightning_pardist.engines.fsdp.sharded_norm import local_gradients, sharded_grad_norm
from tests.distributed import sharded_modules as zoo
from tests.helpers.ranks import cpu_mesh, run_ranks

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
    return cpu_mesh((2, size // 2), ("r", "s")) if hsdp else cpu_mesh((size,))


def reference_step(model, shares, scale=1.0):
    """Run a step in one process: the mean of the ranks' losses. Buffers are updated as on the first rank."""
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
    """Compare three optimizer steps with one process: losses, gradients, weights."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = getattr(zoo, name)()
    if rank > 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)  # the first rank's values must be used
    reference = getattr(zoo, name)()
    torch.manual_seed(0)
    reference = getattr(zoo, name)()
    if rank == 0:
        model = copy.deepcopy(reference)
    engine = shard(model, make_mesh(hsdp), units=find_fsdp_units(model, min_unit_bytes=1), **options)
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
            norm = sharded_grad_norm(model.parameters())
            for grad in local_gradients(model.parameters()):
                grad.mul_(torch.clamp(clip / (norm + 1e-6), max=1.0))
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
    *("MixedTypes", "ConvNet", "RankBranch", "SharedBlock", "TiedBlocks", "InPlace", "Penalty"),
)


def test_every_module_gives_the_numbers_of_one_process():
    run_ranks(2, many, [{"name": name} for name in ALL])


def test_one_rank():
    run_ranks(1, many, [{"name": "Frozen"}, {"name": "Outputs"}])


@pytest.mark.slow
def test_four_ranks():
    names = ("Mlp", "Gpt", "DirectWeight", "ForwardNeverCalled", "Repeated", "OddShapes", "MixedTypes", "ConvNet")
    run_ranks(4, many, [{"name": name} for name in (*names, "RankBranch")])


CASES = [
    *({"name": name, "optimizer": "sgd"} for name in ("Gpt", "OddShapes", "Frozen")),
    *({"name": name, "micro": 3} for name in ("Repeated", "RankBranch", "Gpt", "OddShapes")),
    *({"name": name, "micro": 2, "keep": "unsharded"} for name in ("Repeated", "RankBranch", "OddShapes")),
    *({"name": name, "reshard_after_forward": False} for name in ("Repeated", "Gpt")),
    *({"name": name, "reshard_after_forward": True} for name in ("Gpt", "OddShapes", "InPlace")),
    {"name": "Gpt", "clip": 0.05},
    {"name": "OddShapes", "clip": 0.05, "local": False, "optimizer": "sgd"},
    {"name": "DirectWeight", "detect_direct_param_use": "always"},
    *(
        {"name": name, "allow_divergent_forward": True}
        for name in ("RankUnits", "RankBranch", "Repeated", "DirectWeight")
    ),
]


@pytest.mark.slow
def test_options_give_the_numbers_of_one_process():
    run_ranks(2, many, CASES)


HSDP = [
    *({"name": name, "hsdp": True} for name in ("Gpt", "OddShapes", "RankBranch", "DirectWeight")),
    *({"name": name, "hsdp": True, "micro": 2} for name in ("Repeated", "RankBranch", "OddShapes")),
    {"name": "Repeated", "hsdp": True, "micro": 2, "keep": "unsharded"},
    {"name": "Gpt", "hsdp": True, "clip": 0.05},
    {"name": "RankUnits", "hsdp": True, "allow_divergent_forward": True},
]


@pytest.mark.slow
def test_replicated_and_sharded_on_two_axes():
    run_ranks(4, many, HSDP)


def _undeclared_rank_dependence():
    model = zoo.RankUnits()
    engine = shard(model, make_mesh(), units=find_fsdp_units(model, min_unit_bytes=1))
    x = torch.randn(zoo.BATCH, zoo.WIDTH)
    # Rank 0 skips block 1, rank 1 block 0; both have the same size: a mismatched all-gather would not raise.
    y = torch.full((zoo.BATCH,), 2 if dist.get_rank() == 0 else 3)
    loss = engine.run(model.training_step, (x, y))
    with pytest.raises(RuntimeError, match="allow_divergent_forward=True"):
        loss.backward()
    engine.reset()
    # The step is lost, but the module remains usable.
    share = zoo.batches(1, 2)[0][0]
    engine.run(model.training_step, share).backward()
    reference = zoo.RankUnits()
    reference.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
    reference.training_step(share).backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            close(whole(p.grad), q.grad, name)


def test_ranks_that_use_different_units_without_saying_so_are_told():
    run_ranks(2, _undeclared_rank_dependence)


def _uneven_evaluation():
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = zoo.Gpt()
    reference = copy.deepcopy(model)
    engine = shard(model, make_mesh(), units=find_fsdp_units(model, min_unit_bytes=1))
    data = zoo.batches(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for epoch in range(2):
        mine = data[:1] if rank == 0 else data[1:5]
        # Lightning evaluates in inference mode, and before the first training step.
        with torch.inference_mode(), engine.uneven():
            for (batch,) in mine if epoch else mine[1:]:
                loss = engine.run(model.training_step, batch)
                close(loss, reference.training_step(batch), "evaluation")
        assert engine.held_bytes()["gathered"] == 0
        engine.run(model.training_step, data[5][0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.training_step(data[5][0]).backward()
        theirs.step()
        theirs.zero_grad()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        close(whole(p), q, "weight")


def test_evaluation_with_uneven_batches_ends():
    run_ranks(2, _uneven_evaluation)
    run_ranks(4, _uneven_evaluation)


class Gan(torch.nn.Module):
    """Manual optimization: two optimizers, several backwards inside the step, clamped weights."""

    def __init__(self):
        super().__init__()
        self.generator = zoo.Blocks()
        self.critic = zoo.Blocks()
        self.shift = torch.nn.Parameter(torch.zeros(zoo.WIDTH))

    def step(self, batch, optimizers):
        x, y = batch
        first, second = optimizers
        fake = self.generator(x + self.shift)
        loss = torch.nn.functional.cross_entropy(fake, y)
        first.zero_grad()
        loss.backward(retain_graph=True)
        (0.5 * fake.square().mean()).backward()
        first.step()
        penalty = self.critic(x).square().mean() + self.generator(x + self.shift).square().mean()
        second.zero_grad()
        penalty.backward()
        second.step()
        with torch.no_grad():
            for parameter in self.critic.parameters():
                parameter.clamp_(-0.2, 0.2)
            self.shift.clamp_(-1e-4, 1e-4)  # the root is gathered at this point
        return penalty.detach()


def _manual_optimization():
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Gan()
    reference = copy.deepcopy(model)
    engine = shard(model, make_mesh(), units=find_fsdp_units(model, min_unit_bytes=1))
    make = OPTIMIZERS["adam"]
    mine = [make([*model.generator.parameters(), model.shift]), make(model.critic.parameters())]
    theirs = [make([*reference.generator.parameters(), reference.shift]), make(reference.critic.parameters())]
    for optimizer in mine:
        engine.attach(optimizer)
    for shares in zoo.batches(3, size):
        engine.run(model.step, shares[rank], mine)
        # The ranks' shares have equal sizes: the mean over the whole batch is the mean of the ranks' means.
        whole_batch = tuple(torch.cat(parts) for parts in zip(*shares, strict=True))
        reference.step(whole_batch, theirs)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        close(whole(p), q, name)


def test_manual_optimization_with_two_optimizers():
    run_ranks(2, _manual_optimization)


def _shrink(module):
    for parameter in module.parameters():
        # Not tracked by version counters.
        parameter.data.mul_(0.9)


def _clip(module):
    for parameter in module.parameters():
        parameter.data = parameter.data.clamp(-0.2, 0.2)


def _through_a_vector(module):
    vector = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    torch.nn.utils.vector_to_parameters(vector * 0.9, module.parameters())


def _changed_by_hand():
    """Change parameters inside steps, where only the root is gathered, and outside, where everything is sharded."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for inside, outside in ((_shrink, _clip), (_clip, _shrink), (_clip, _through_a_vector)):
        torch.manual_seed(0)
        model = zoo.Gpt()
        reference = copy.deepcopy(model)
        engine = shard(model, make_mesh(), units=find_fsdp_units(model, min_unit_bytes=1))
        mine, theirs = OPTIMIZERS["sgd"](model.parameters()), OPTIMIZERS["sgd"](reference.parameters())
        engine.attach(mine)

        def step(batch, model=model, inside=inside):
            inside(model)
            return model.training_step(batch)

        for shares in zoo.batches(3, size):
            inside(reference)
            reference_step(reference, shares)
            engine.run(step, shares[rank]).backward()
            for module, optimizer in ((model, mine), (reference, theirs)):
                optimizer.step()
                optimizer.zero_grad()
                outside(module)
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            close(whole(p), q, f"{inside.__name__}, {outside.__name__}: {name}")


def test_parameters_changed_by_hand_stay_changed():
    run_ranks(2, _changed_by_hand)


def _compiled():
    torch.manual_seed(0)
    model = zoo.Blocks()
    reference = copy.deepcopy(model)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    engine = shard(model, make_mesh(), units=find_fsdp_units(model, min_unit_bytes=1))
    rank = dist.get_rank()
    for shares in zoo.batches(3, dist.get_world_size()):
        engine.run(model.training_step, shares[rank]).backward()
        reference_step(reference, shares)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        close(whole(p.grad), q.grad, name)


def test_compiled_blocks():
    run_ranks(2, _compiled)
