"""Tensor parallelism combined with the data-parallel engines: 2 x 2 ranks against one process."""

import copy

import pytest
import torch

from lightning_pardist.engines.ddp import AllReduce, GradientReducer
from lightning_pardist.engines.ddp.buffers import broadcast_tensors
from lightning_pardist.engines.fsdp import ShardedDataEngine, find_fsdp_units, shard
from lightning_pardist.engines.fsdp.full_state import full_state, load_full_state
from lightning_pardist.engines.tensor import (
    apply_layout,
    attach,
    local_like,
    plan_layout,
    to_full_tensor,
    unsplit_module,
)
from lightning_pardist.engines.zero import ZeroEngine
from lightning_pardist.local_tensors import local_shard
from tests.helpers.parity import assert_close
from tests.helpers.ranks import cpu_mesh, run_ranks
from tests.helpers.zoo import build, whole_state

STEPS = 3
OPTIMIZERS = {
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, eps=1e-3),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-3, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}


def make_engine(kind, module, optimizer, group):
    if kind == "ddp":
        attach(optimizer)
        return GradientReducer(module, transport=AllReduce(group), bucket_size_mb=0.01, first_bucket_size_mb=0.01)
    return ZeroEngine(module, [optimizer], group=group, zero_stage=int(kind[-1]), bucket_size_mb=0.01)


def train(kind, name, optimizer_name):
    reference = build(name)
    model = copy.deepcopy(reference)
    mesh = cpu_mesh((2, 2), ("data_parallel", "tensor_parallel"))
    data_rank = mesh["data_parallel"].get_local_rank()
    sample = model.batch(0)
    runtime = apply_layout(model, plan_layout(model, lambda: model.loss(sample), tp_size=2), mesh["tensor_parallel"])
    broadcast_tensors([*model.parameters(), *model.buffers()], group=mesh["data_parallel"].get_group())
    one, many = OPTIMIZERS[optimizer_name](reference.parameters()), OPTIMIZERS[optimizer_name](model.parameters())
    engine = make_engine(kind, model, many, mesh["data_parallel"].get_group())
    for step in range(STEPS):
        one.zero_grad()
        sum(reference.loss(reference.batch(10 * step + rank)) / 2 for rank in range(2)).backward()
        one.step()
        many.zero_grad()
        for half in range(2):
            # Accumulation: the same batch twice, half weight each.
            with runtime.step():
                loss = runtime.whole(model.loss(model.batch(10 * step + data_rank))) / 2
                with engine.no_sync() if half == 0 else engine.backward(loss):
                    loss.backward()
        if kind == "ddp":
            for (label, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
                if p.grad is not None:
                    assert_close({label: to_full_tensor(q.grad)}, {label: p.grad})
        many.step()
        engine.step_done()
    state = engine.optimizer_state(many)["state"]
    engine.detach()
    weights = dict(reference.named_parameters(remove_duplicate=False))
    found = whole_state(model)
    # Running statistics are of each rank's own samples, and not compared.
    assert_close({name: found[name] for name in weights}, {name: p.detach() for name, p in weights.items()})
    if kind != "ddp" and data_rank == 0:
        for index, entry in one.state_dict()["state"].items():
            assert_close({key: to_full_tensor(value) for key, value in state[index].items()}, entry)


def train_sharded(name, optimizer_name):
    reference = build(name)
    model = copy.deepcopy(reference)
    mesh = cpu_mesh((2, 2), ("data_shard", "tensor_parallel"))
    data_rank = mesh["data_shard"].get_local_rank()
    sample = model.batch(0)
    runtime = apply_layout(model, plan_layout(model, lambda: model.loss(sample), tp_size=2), mesh["tensor_parallel"])
    sharded = shard(model, mesh["data_shard"], units=find_fsdp_units(model, min_unit_bytes=0))
    one, many = OPTIMIZERS[optimizer_name](reference.parameters()), OPTIMIZERS[optimizer_name](model.parameters())
    engine = ShardedDataEngine(sharded, [many], accumulate="sharded")

    def loss_of(batch):
        with runtime.step():
            return runtime.whole(model.loss(batch))

    for step in range(STEPS):
        one.zero_grad()
        sum(reference.loss(reference.batch(10 * step + rank)) / 2 for rank in range(2)).backward()
        one.step()
        many.zero_grad()
        loss = sharded.run(loss_of, model.batch(10 * step + data_rank))
        with engine.backward(loss), runtime.step():
            loss.backward()
        many.step()
        engine.step_done()
    held = sum(local_shard(param).numel() for param in model.parameters())
    state = {key: to_full_tensor(value) for key, value in full_state(model, sharded.writer) if value is not None}
    numbered = engine.optimizer_state(many)["state"]
    if data_rank == 0:
        weights = dict(reference.named_parameters(remove_duplicate=False))
        assert_close({key: state[key] for key in weights}, {key: p.detach() for key, p in weights.items()})
        for index, entry in one.state_dict()["state"].items():
            assert_close({key: to_full_tensor(value) for key, value in numbered[index].items()}, entry)
    load_full_state(
        model, {key: local_like(value, dict(model.state_dict())[key]) for key, value in reference.state_dict().items()}
    )
    sharded.unshard_module()
    unsplit_module(model)
    assert_close(model.state_dict(), reference.state_dict(), rtol=0.0)
    return held / sum(param.numel() for param in reference.parameters())


@pytest.mark.push("llama-sgd", "mlp-sgd")
@pytest.mark.parametrize(("name", "optimizer"), [("gpt", "fused"), ("llama", "sgd"), ("mlp", "sgd")])
def test_parameters_sharded_over_data_ranks_too(name, optimizer):
    for held in run_ranks(4, train_sharded, name, optimizer):
        assert name == "mlp" or held < 0.3


@pytest.mark.push("zero2-gpt-adam", "ddp-gpt-fused")
@pytest.mark.parametrize(
    ("kind", "name", "optimizer"),
    [("ddp", "gpt", "fused"), ("ddp", "resnet", "sgd"), ("zero1", "llama", "adam"), ("zero2", "gpt", "adam")],
)
def test_data_engines_work_on_parts(kind, name, optimizer):
    run_ranks(4, train, kind, name, optimizer)


def step_of_optimizers_on_whole_matrices():
    mesh = cpu_mesh((2,), ("tensor_parallel",))
    for make in (
        lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
        lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2),
        lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3),
    ):
        # In fp64: their first steps are signs, which rounding flips for near-zero gradients.
        reference = build("mlp").double()
        model = copy.deepcopy(reference)
        batch = tuple(t.double() if t.is_floating_point() else t for t in model.batch(0))
        runtime = apply_layout(model, plan_layout(model, lambda: model.loss(batch), tp_size=2), mesh["tensor_parallel"])  # noqa: B023
        one, many = make(reference), make(model)
        attach(many)

        def evaluate(module, optimizer, around):
            optimizer.zero_grad()
            with around():
                loss = module.loss(batch)  # noqa: B023
                loss.backward()
            return loss

        def nothing():
            return torch.enable_grad()

        for _ in range(2):
            one.step(lambda: evaluate(reference, one, nothing))  # noqa: B023
            many.step(lambda: evaluate(model, many, runtime.step))  # noqa: B023
        assert_close(whole_state(model), reference.state_dict())


def test_optimizers_that_need_whole_matrices_get_them():
    run_ranks(2, step_of_optimizers_on_whole_matrices)
