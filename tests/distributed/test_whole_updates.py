"""Whole-tensor updates by owner ranks: rounds, state and traffic."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_pardist.collectives import world_group
from lightning_pardist.engines.common.full_tensor_updates import updates_of
from lightning_pardist.engines.common.joint_updates import step_on_full_tensors
from lightning_pardist.engines.common.update_scope import find_scope
from lightning_pardist.engines.zero import ZeroEngine
from tests.helpers.optimizers import Lamb, MuonAndAdam, NormOfAll, Own, Shampoo
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.wire import counting


def _module():
    torch.manual_seed(0)
    layers = [nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 7), nn.Tanh(), nn.Linear(7, 1)]
    return nn.Sequential(*layers).double()


def _trained(kind, round_bytes):
    """Return weights and counts in groups after some steps, and those of one process on all samples."""
    module = _module()
    reference = copy.deepcopy(module)
    optimizers = [kind(list(each.parameters())) for each in (module, reference)]
    engine = ZeroEngine(module, optimizers[:1], group=world_group(), zero_stage=2)
    updates_of(optimizers[0]).round_bytes = round_bytes
    size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(4):
        batches = torch.randn(size, 5, 8, generator=torch.Generator().manual_seed(step)).double()
        optimizers[0].zero_grad()
        loss = module(batches[rank]).square().mean()
        with engine.backward(loss):
            loss.backward()
        optimizers[0].step()
        engine.step_done()
        optimizers[1].zero_grad()
        reference(batches.flatten(0, 1)).square().mean().backward()
        optimizers[1].step()
    counts = [group.get("count") for optimizer in optimizers for group in optimizer.param_groups]
    return snapshot(module), snapshot(reference), counts


@pytest.mark.parametrize("round_bytes", [1.0, 2000.0, 1e9])
@pytest.mark.parametrize("kind", [Shampoo, Lamb, MuonAndAdam])
def test_any_number_of_rounds_is_one_step(kind, round_bytes):
    for mine, wanted, counts in run_ranks(3, _trained, kind, round_bytes):
        assert_close(mine, wanted, rtol=1e-9)
        assert len(set(counts)) == 1


def _drop_first(groups):
    del groups[0]


def _momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _regrouped(kind, change):
    """Return weights when the optimizer's groups change after two of five steps, and those of one process."""
    module = _module()
    reference = copy.deepcopy(module)
    optimizers = [kind([{"params": list(layer.parameters())} for layer in each[::2]]) for each in (module, reference)]
    engine = ZeroEngine(module, optimizers[:1], group=world_group(), zero_stage=2)
    x = torch.ones(2, 8).double()
    for step in range(5):
        if step == 2:
            for optimizer in optimizers:
                change(optimizer.param_groups)
            saved = [engine.optimizer_state(optimizers[0])]
        for each, optimizer in zip((module, reference), optimizers, strict=True):
            optimizer.zero_grad()
            loss = each(x).square().mean()
            with engine.backward(loss) if each is module else nullcontext():
                loss.backward()
            optimizer.step()
        engine.step_done()
    return snapshot(module), snapshot(reference), saved[0]


@pytest.mark.parametrize(
    ("kind", "change"),
    [(Shampoo, list.reverse), (Shampoo, _drop_first), (Shampoo, list.pop), (_momentum, list.pop)],
)
def test_state_stays_with_parameters_whose_groups_change(kind, change):
    """The state must not move with the parameters' indices."""
    found = run_ranks(3, _regrouped, kind, change)
    for mine, wanted, _ in found:
        assert_close(mine, wanted, rtol=1e-9)
    _, _, saved = found[0]
    assert set(saved["state"]) == {number for group in saved["param_groups"] for number in group["params"]}


def _one_step():
    width, size = 256, dist.get_world_size()
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))
    optimizer = torch.optim.Muon(module.parameters())
    engine = ZeroEngine(module, [optimizer], group=world_group(), zero_stage=2)
    rounds = 4
    sent: list[int] = []
    for _ in range(rounds):
        loss = module(torch.ones(1, width)).sum()
        with engine.backward(loss):
            loss.backward()
        with counting(sent):
            optimizer.step()
        engine.step_done()
        optimizer.zero_grad()
    elements = 8 * width * width
    state = sum(entry["momentum_buffer"].numel() for entry in optimizer.state.values())
    packed = torch.tensor(float(updates_of(optimizer).sent_bytes)) / rounds / 4 / elements
    dist.all_reduce(packed)
    return min(sent) / 4 / elements, packed.item(), state / elements, size


@pytest.mark.alone
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_sent_and_state_held(ranks):
    results = run_ranks(ranks, _one_step)
    assert sum(state for _, _, state, _ in results) == 1.0
    assert max(state for _, _, state, _ in results) == 1 / ranks
    sent, packed, _, _ = results[0]
    # Gradients to owners and values back total at most one model each way, over all ranks.
    assert packed <= 2.01
    # The counter sums over all ranks: these, and the slices gathered after any ZeRO step.
    assert sent == pytest.approx(packed + ranks - 1, rel=0.02)


class CountsInState(Own):
    """Stores a step count in its state, next to that of parameters; a step follows the normalized gradient."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.state["steps"] = torch.tensor(0)

    def update(self):
        self.state["steps"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] / self.state["steps"] * p.grad / p.grad.norm())


class CountsElementwise(CountsInState):
    """Elementwise variant of CountsInState."""

    def update(self):
        self.state["steps"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] / self.state["steps"] * p.grad)


def _counted(kind, round_bytes, zero_stage):
    module = _module()
    reference = copy.deepcopy(module)
    optimizers = [kind(list(each.parameters())) for each in (module, reference)]
    engine = ZeroEngine(module, optimizers[:1], group=world_group(), zero_stage=zero_stage)
    if updates := updates_of(optimizers[0]):
        updates.round_bytes = round_bytes
    x = torch.ones(2, 8).double()
    for step in range(4):
        optimizers[0].zero_grad()
        loss = module(x).square().mean()
        with engine.backward(loss):
            loss.backward()
        optimizers[0].step()
        engine.step_done()
        optimizers[1].zero_grad()
        reference(x).square().mean().backward()
        optimizers[1].step()
        if step == 1:
            saved = [engine.optimizer_state(optimizers[0])]
            dist.broadcast_object_list(saved, 0)
            engine.load_optimizer_state(optimizers[0], saved[0])
    return snapshot(module), snapshot(reference), int(optimizers[0].state["steps"])


@pytest.mark.parametrize("kind", [CountsInState, CountsElementwise])
def test_state_of_all_parameters_together_is_kept(kind):
    for mine, wanted, steps in run_ranks(2, _counted, kind, 2000.0, 2):
        assert_close(mine, wanted, rtol=1e-9)
        assert steps == 4


class Raises(NormOfAll):
    """Optimizer that runs its closure itself, as LBFGS does."""

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        self.update()
        return loss


def _one_raises():
    module = nn.Linear(4, 3)
    fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    params = list(module.parameters())
    optimizer = Raises(params)
    step_on_full_tensors(optimizer, find_scope(optimizer, form="dims"), group=world_group())
    stop = {"now": dist.get_rank() == 1}

    def closure():
        if stop["now"]:
            raise KeyError("stop")
        return

    if stop["now"]:
        # As inside a step, but without its collectives.
        with pytest.raises(KeyError):
            updates_of(optimizer)._evaluated(closure)
    same = all(a is b for a, b in zip(optimizer.param_groups[0]["params"], params, strict=True))
    dist.barrier()
    return same


def test_nothing_collective_follows_a_closure_that_raises():
    assert all(run_ranks(2, _one_raises))


def _one_without_gradient():
    param = nn.Parameter(torch.arange(1.0, 9.0).reshape(2, 4))
    param = nn.Parameter(distribute_tensor(param.detach(), dist.device_mesh.init_device_mesh("cpu", (2,)), [Shard(0)]))
    optimizer = Lamb([param], weight_decay=0.0)
    step_on_full_tensors(optimizer, find_scope(optimizer, form="dims"), group=world_group())
    before = param.full_tensor()
    if dist.get_rank() == 0:
        param.grad = distribute_tensor(torch.ones(2, 4), param.device_mesh, [Shard(0)], src_data_rank=None)
    optimizer.step()
    return (param.full_tensor() - before).detach()


def test_no_gradient_on_one_rank_is_zeros():
    for change in run_ranks(2, _one_without_gradient):
        assert (change[0] != 0).all()
        assert (change[1] == 0).all()
