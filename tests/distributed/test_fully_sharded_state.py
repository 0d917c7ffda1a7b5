import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_pardist.engines.fsdp import find_fsdp_units, shard
from lightning_pardist.engines.fsdp.full_state import (
    full_state,
    load_full_state,
    own_values,
    whole_values,
)
from tests.distributed import sharded_modules as zoo
from tests.distributed.test_fully_sharded import OPTIMIZERS, close, make_mesh, parity, whole
from tests.helpers.ranks import run_ranks
from tests.helpers.wire import sent_bytes


def train(engine, optimizer, steps, seed):
    rank = dist.get_rank()
    for shares in zoo.batches(steps, dist.get_world_size(), seed):
        engine.run(engine.module.training_step, shares[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()


def _states(name, hsdp, local, folder):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = getattr(zoo, name)()
    plain = copy.deepcopy(model)
    engine = shard(model, make_mesh(hsdp), units=find_fsdp_units(model, min_unit_bytes=1))
    optimizer = OPTIMIZERS["adam"](model.parameters())
    if local:
        engine.attach(optimizer)
    train(engine, optimizer, 2, 1)

    state = dict(full_state(model))
    moments = {}
    for parameter, value in model.named_parameters():
        moments[parameter] = dict(whole_values(parameter, value, optimizer.state.get(value, {})))
    assert set(state) == set(plain.state_dict())
    if rank == 0:
        plain.load_state_dict(state)
        torch.save({"state": state, "moments": moments}, folder + "/full.pt")
    else:
        assert all(value is None for value in state.values())
    dist.barrier()

    saved = torch.load(folder + "/full.pt", mmap=True, weights_only=True)
    torch.manual_seed(1)
    other = getattr(zoo, name)()
    second = shard(other, make_mesh(hsdp), units=find_fsdp_units(other, min_unit_bytes=300))
    load_full_state(other, saved["state"])
    again = OPTIMIZERS["adam"](other.parameters())
    if local:
        second.attach(again)
    for parameter, value in other.named_parameters():
        again.state[value] = own_values(value, saved["moments"][parameter], local=local)
    for (key, p), q in zip(other.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(whole(p), whole(q)), key
        assert set(again.state[p]) == set(optimizer.state[q])
        for entry in again.state[p]:
            mine, theirs = again.state[p][entry], optimizer.state[q][entry]
            assert type(mine) is type(theirs), (key, entry)
            assert torch.equal(whole(mine), whole(theirs)), (key, entry)
    train(engine, optimizer, 1, 2)
    train(second, again, 1, 2)
    for (key, p), q in zip(other.named_parameters(), model.named_parameters(), strict=True):
        close(whole(p), whole(q[1]), key)
    with pytest.raises(RuntimeError, match="missing"):
        load_full_state(other, {})


def test_full_state_goes_out_and_comes_back(tmp_path):
    for case in (("OddShapes", False, True), ("Gpt", False, False), ("MixedTypes", False, True)):
        run_ranks(2, _states, *case, str(tmp_path))
    run_ranks(4, _states, "OddShapes", True, True, str(tmp_path))


class Composite(zoo.Step):
    """Modules of many kinds, one that initializes its children again, and a tied weight."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(zoo.CLASSES, zoo.WIDTH)
        self.blocks = nn.ModuleList(zoo.Block() for _ in range(2))
        self.attention = nn.MultiheadAttention(zoo.WIDTH, 2, batch_first=True)
        self.stage = nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4))
        self.recurrent = nn.GRU(zoo.WIDTH, zoo.WIDTH)
        self.head = nn.Linear(zoo.WIDTH, zoo.CLASSES, bias=False)
        self.head.weight = self.tokens.weight
        self.again = Again()


class Again(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.ModuleList(nn.Linear(zoo.WIDTH, zoo.WIDTH) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self):
        for item in self.items:
            nn.init.xavier_normal_(item.weight)


def _meta():
    torch.manual_seed(5)
    wanted = Composite()
    after = torch.rand(3)
    with torch.device("meta"):
        model = Composite()
    torch.manual_seed(5 + dist.get_rank())
    peak = 0
    shard(model, make_mesh(), units=find_fsdp_units(model, min_unit_bytes=1))
    if dist.get_rank() == 0:
        assert torch.equal(torch.rand(3), after), "the random numbers that follow"
    for (name, p), q in zip(model.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(whole(p), q), name
    for (name, p), q in zip(model.named_buffers(), wanted.buffers(), strict=True):
        assert torch.equal(p, q), name
    assert model.head.weight is model.tokens.weight
    with torch.device("meta"):
        unknown = zoo.InPlace()
    with pytest.raises(ValueError, match=r"tables.0.rows.*reset_parameters"):
        shard(unknown, make_mesh())
    return peak


def test_meta_modules_get_the_values_of_one_process():
    run_ranks(2, _meta)


def _mixed_precision():
    torch.manual_seed(0)
    model = zoo.Blocks()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    engine = shard(model, make_mesh(), units=find_fsdp_units(model, min_unit_bytes=1), mp_policy=policy)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    engine.attach(optimizer)
    before = {name: whole(p).clone() for name, p in model.named_parameters()}
    train(engine, optimizer, 3, 1)
    for name, p in model.named_parameters():
        assert p.dtype == torch.float32
        assert not torch.equal(whole(p), before[name])
        assert torch.isfinite(whole(p)).all()


def test_master_weights_in_single_precision():
    run_ranks(2, _mixed_precision)


class Wide(zoo.Step):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


def _traffic():
    torch.manual_seed(0)
    model = Wide()
    total = sum(p.numel() for p in model.parameters())
    engine = shard(model, make_mesh(), reshard_after_forward=True)
    optimizer = torch.optim.Adam(model.parameters())
    engine.attach(optimizer)
    x, y = torch.randn(2, 512), torch.randint(0, 512, (2,))

    def step():
        engine.run(model.training_step, (x, y)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    sent = sent_bytes(step)
    engine.run(model.training_step, (x, y)).backward()
    held = engine.held_bytes([optimizer])
    return sent / 4 / total, {key: value / 4 / total for key, value in held.items()}


@pytest.mark.alone
@pytest.mark.parametrize("size", [2, 4])
def test_sent_and_held_bytes_are_those_of_the_table(size):
    results = run_ranks(size, _traffic)
    # The counter sums over all ranks: N times 3 Psi (N-1)/N, plus TCP headers.
    assert results[0][0] == pytest.approx(3 * (size - 1), rel=0.01), results
    for _, held in results:
        assert held["parameters"] + held["gradients"] + held["optimizer"] == pytest.approx(4 / size, rel=0.02)
        assert held["gathered"] == 0


def _attached_optimizers():
    model = zoo.Blocks()
    engine = shard(model, make_mesh(), units=find_fsdp_units(model, min_unit_bytes=1))
    with pytest.raises(ValueError, match="SparseAdam"):
        engine.attach(torch.optim.SparseAdam(model.parameters()))
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam):
        engine.attach(kind(model.parameters(), lr=1e-3))
    engine.attach(torch.optim.AdamW(model.parameters(), fused=True))
    missing = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    assert not missing
    with pytest.raises(ValueError, match="already"):
        shard(model, make_mesh())


def test_optimizers_that_can_be_tried_are_attached():
    run_ranks(2, _attached_optimizers)


def _offload_free_parity():
    torch.manual_seed(0)
    parity("Gpt", optimizer="sgd", local=False)


def test_without_local_steps():
    run_ranks(2, _offload_free_parity)
