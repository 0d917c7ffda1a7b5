"""Expert layers on two ranks with different tokens, without Lightning: outputs, gradients and bytes sent."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pardist.engines.common.activation_checkpointing import checkpoint_blocks
from lightning_pardist.engines.experts import ExpertRuntime, ExpertSharding, HeldExperts, choose_routes, find_layers
from lightning_pardist.engines.experts.sharding import ShardedWeights
from tests.helpers.experts import CHOSEN, EXPERTS, LAYERS, WIDTH, Expert, Listed
from tests.helpers.parity import assert_close
from tests.helpers.ranks import cpu_mesh, run_ranks

ROWS, EXACT = 6, 1e-9


def _module(layer, lopsided):
    torch.manual_seed(3)
    made = [LAYERS[layer]() for _ in range(2)]
    for each in made if lopsided else ():
        # All tokens go to the first half of the experts, none to the second rank.
        each.router.bias.data[EXPERTS // 2 :] = -100.0
    return nn.Sequential(*made).double()


def _tokens(ranks=2):
    return torch.randn(ranks, ROWS, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


def _loss(module, x, recompute=False):
    for layer in module:
        x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
    return x.square().sum()


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _run(layer, lopsided, dispatch, recompute):
    module, rank = _module(layer, lopsided), dist.get_rank()
    x = _tokens()[rank].requires_grad_()
    layers = find_layers(module, lambda: module(x))
    choices = choose_routes(module, layers, size=2, dispatch=dispatch)
    mesh = cpu_mesh((2,), ("experts",))
    names = {name for name, _ in module.named_parameters()}
    held = HeldExperts(module, layers, mesh)
    runtime = ExpertRuntime(module, layers, choices, held, mesh.get_group())
    loss = _loss(module, x, recompute)
    loss.backward()
    sent, grads = runtime.peers.sent_bytes, {}
    for name, parameter in module.named_parameters():
        if parameter.is_meta or parameter.grad is None:
            continue
        grad = _whole(parameter.grad)
        if parameter not in held.parameters:
            dist.all_reduce(grad)
        grads[name] = grad
    assert all(parameter.grad is None for parameter in module.parameters() if parameter.is_meta)
    runtime.remove()
    held.restore()
    assert {name for name, _ in module.named_parameters()} == names
    state = {name: value.detach() for name, value in module.state_dict().items()}
    return {"loss": loss.detach(), "x": x.grad}, grads, state, sent, [choice.dispatch for choice in choices]


@functools.cache
def _expected(layer, lopsided):
    module, inputs = _module(layer, lopsided), [part.requires_grad_() for part in _tokens()]
    losses = [_loss(module, part) for part in inputs]
    sum(losses).backward()
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return [{"loss": loss.detach(), "x": part.grad} for loss, part in zip(losses, inputs, strict=True)], grads


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("lopsided", [False, True])
@pytest.mark.parametrize(
    ("layer", "dispatch"),
    [("listed", "tokens"), ("stacked", "tokens"), ("listed", "weights"), ("stacked", "weights"), ("dense", "auto")],
)
def test_ranks_compute_what_one_process_does(layer, dispatch, lopsided, recompute):
    expected, grads = _expected(layer, lopsided)
    seen = {}
    for rank, (values, of_rank, state, _, _) in enumerate(run_ranks(2, _run, layer, lopsided, dispatch, recompute)):
        assert_close(values, expected[rank], EXACT)
        assert_close(of_rank, {name: grads[name] for name in of_rank}, EXACT)
        assert_close(state, _module(layer, lopsided).state_dict(), EXACT)
        seen.update(of_rank)
    # Experts that receive no tokens have no gradient on one process either.
    assert seen.keys() == grads.keys()


class Odd(Expert):
    """Expert with parameters that do not divide evenly, and a scalar."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.scale * super().forward(x)


def _sharded_module(layer, lopsided):
    module = _module("listed" if layer == "odd" else layer, lopsided)
    if layer == "odd":
        for each in module:
            each.experts = nn.ModuleList(Odd() for _ in range(EXPERTS)).double()
    return module


@contextlib.contextmanager
def _noting_whole_weights():
    """Record all values that layers gather inside the block."""
    taken, take = [], ShardedWeights.full_values
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedWeights, "full_values", lambda self: taken.append(take(self)) or taken[-1])
        yield taken


def _run_sharded(cases):
    """Run on four ranks: two hold the experts together, and two share each of them."""
    mesh, x = cpu_mesh((2, 2), ("data_shard", "experts")), _tokens(4)[dist.get_rank()]
    found = []
    for layer, lopsided, dispatch, recompute in cases:
        module = _sharded_module(layer, lopsided)
        layers = find_layers(module, functools.partial(module, x))
        choices = choose_routes(module, layers, size=2, dispatch=dispatch)
        sharding = ExpertSharding(mesh["data_shard"], mesh, average_over=4)
        held = HeldExperts(module, layers, mesh["experts"], sharding)
        runtime = ExpertRuntime(module, layers, choices, held, mesh["experts"].get_group())
        rows = x.clone().requires_grad_()
        with _noting_whole_weights() as taken:
            loss = _loss(module, rows, recompute)
        whole = sum(value.untyped_storage().nbytes() for values in taken for value in values)
        loss.backward()
        local = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in held.parameters)
        grads = {}
        for name, parameter in module.named_parameters():
            if parameter.is_meta or parameter.grad is None:
                continue
            grads[name] = grad = _whole(parameter.grad)
            if parameter not in held.parameters:
                dist.all_reduce(grad)
                grad.div_(4)
        runtime.remove()
        held.restore()
        state = {name: value.detach() for name, value in module.state_dict().items()}
        found.append(({"loss": loss.detach(), "x": rows.grad}, grads, state, local, whole))
    return found


def test_ranks_that_share_experts_hold_shards_of_them():
    cases = [
        (layer, lopsided, dispatch, recompute)
        for layer, dispatch in (
            ("listed", "tokens"),
            ("odd", "tokens"),
            ("stacked", "tokens"),
            ("odd", "weights"),
            ("dense", "auto"),
        )
        for lopsided, recompute in ((False, False), (True, True))
    ]
    of_ranks = run_ranks(4, _run_sharded, cases)
    for number, (layer, lopsided, dispatch, _) in enumerate(cases):
        module, inputs = _sharded_module(layer, lopsided), [part.requires_grad_() for part in _tokens(4)]
        losses = [_loss(module, part) for part in inputs]
        sum(losses).backward()
        expected = {name: p.grad / 4 for name, p in module.named_parameters() if p.grad is not None}
        seen = {}
        for rank, found in enumerate(of_ranks):
            values, grads, state, local, whole = found[number]
            assert_close(values, {"loss": losses[rank].detach(), "x": inputs[rank].grad}, EXACT)
            assert_close(grads, {name: expected[name] for name in grads}, EXACT)
            assert_close(state, _sharded_module(layer, lopsided).state_dict(), EXACT)
            experts = sum(
                p.numel() for n, p in module.named_parameters() if ".experts." in n or n.endswith((".up", ".down"))
            )
            # A bias of 13 is split into 7 and 6; a scale is replicated on both.
            assert local <= experts / 4 + 2 * 2 * (1 if layer == "odd" else 0)
            assert dispatch != "tokens" or whole == 0
            seen.update(grads)
        # Experts that receive no tokens have no gradient on one process either.
        assert seen.keys() == expected.keys()


class Dropping(Listed):
    """Skips tokens that begin with a negative number: for these, backward needs nothing of forward."""

    def forward(self, x):
        out = flat = x.reshape(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).topk(CHOSEN, -1)
        # The first number is kept: in every layer, one of the ranks has no token for any expert.
        keep = torch.ones(WIDTH, dtype=x.dtype).index_fill(0, torch.tensor([0]), 0)
        for index, expert in enumerate(self.experts):
            row, place = ((chosen == index) & (flat[:, :1] >= 0)).nonzero(as_tuple=True)
            if len(row):
                out = out.index_add(0, row, weights[row, place, None] * expert(flat[row]) * keep)
        return out.view(x.shape)


def _dropping():
    torch.manual_seed(3)
    return nn.Sequential(Dropping(), Dropping()).double()


def _half_negative():
    x = _tokens()
    x[0, ..., 0] = x[0, ..., 0].abs()
    x[1, ..., 0] = -x[1, ..., 0].abs()
    return x


def _gradients(module, x, checkpointed=None):
    undo = (lambda: None) if checkpointed is None else checkpoint_blocks(module, [checkpointed])
    module(x.clone().requires_grad_()).square().sum().backward()
    undo()
    return {name: _whole(p.grad) for name, p in module.named_parameters() if not p.is_meta and p.grad is not None}


def _checkpointed(cases):
    rank, mesh, results = dist.get_rank(), cpu_mesh((2,), ("experts",)), []
    for make, inputs, classes, dispatch in cases:
        x = inputs()[rank]
        for name in classes:
            module = make()
            layers = find_layers(module, functools.partial(module, inputs()[0]))
            choices = choose_routes(module, layers, size=2, dispatch=dispatch)
            held = HeldExperts(module, layers, mesh)
            runtime = ExpertRuntime(module, layers, choices, held, mesh.get_group())
            grads = _gradients(module, x, name)
            for key, parameter in module.named_parameters():
                if parameter not in held.parameters and not parameter.is_meta:
                    grad = grads.get(key, torch.zeros_like(parameter))
                    dist.all_reduce(grad)
                    grads[key] = grad
            runtime.remove()
            results.append(grads)
    return results


def test_checkpointed_blocks_around_and_inside_of_experts():
    """Also when one rank's tokens reach no expert, which changes the saved tensors that its backward unpacks."""
    stacked = functools.partial(_module, "stacked", True)
    cases = [
        (_dropping, _half_negative, (None, "Dropping", "Expert", "Linear"), "tokens"),
        (_dropping, _half_negative, ("Dropping", "Expert", "Linear"), "weights"),
        (stacked, _tokens, ("StackedExperts", "Stacked"), "tokens"),
        (stacked, _tokens, ("StackedExperts", "Stacked"), "weights"),
    ]
    found = run_ranks(2, _checkpointed, cases)
    number = 0
    for make, inputs, classes, dispatch in cases:
        expected = {}
        for part in inputs():
            for name, grad in _gradients(make(), part).items():
                expected[name] = expected.get(name, 0) + grad
        for name in classes:
            both = {**found[0][number], **found[1][number]}
            assert both.keys() >= expected.keys(), (name, dispatch)
            for key, grad in both.items():
                of_one = expected.get(key, torch.zeros_like(grad))
                assert_close({key: grad}, {key: of_one}, EXACT)
            number += 1


def _many():
    """More experts per rank than a message formerly had room for."""
    torch.manual_seed(3)
    module = nn.Sequential(Listed()).double()
    module[0].router = nn.Linear(WIDTH, 600).double()
    module[0].experts = nn.ModuleList(Expert() for _ in range(600)).double()
    x = _tokens()[dist.get_rank()]
    expected = module(x)
    layers = find_layers(module, lambda: module(x))
    # The sample used to find layers must not be kept alive.
    sample = [weakref.ref(leaf) for leaf in (*layers[0].call[0], *layers[0].inputs[0], layers[0].output)]
    choices = choose_routes(module, layers, size=2, dispatch="tokens")
    mesh = cpu_mesh((2,), ("experts",))
    held = HeldExperts(module, layers, mesh)
    runtime = ExpertRuntime(module, layers, choices, held, mesh.get_group())
    gc.collect()
    kept = [ref() is not None for ref in sample]
    found = module(x)
    runtime.remove()
    return found.detach(), expected.detach(), kept


def test_hundreds_of_experts_on_a_rank_and_no_sample_kept():
    for found, expected, kept in run_ranks(2, _many):
        assert_close({"out": found}, {"out": expected}, EXACT)
        assert kept == [False] * 3


def _alone(layer):
    """One rank evaluates two batches under autocast, the other none."""
    module = _module(layer, False).float()
    x = _tokens()[0].float()
    layers = find_layers(module, lambda: module(x))
    choices = choose_routes(module, layers, size=2, dispatch="tokens")
    mesh = cpu_mesh((2,), ("experts",))
    expected = []
    for autocast in (True, False):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected.append(module(x))
    held = HeldExperts(module, layers, mesh)
    runtime = ExpertRuntime(module, layers, choices, held, mesh.get_group())
    runtime.start_uneven()
    found = []
    for autocast in (True, False) if dist.get_rank() == 0 else ():
        inside = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
        with torch.no_grad(), inside:
            found.append(module(x))
    runtime.end_uneven()
    runtime.remove()
    return found, expected


@pytest.mark.parametrize("layer", ["listed", "stacked"])
def test_a_rank_without_a_batch_computes_in_the_others_precision(layer):
    (found, expected), (none, _) = run_ranks(2, _alone, layer)
    assert none == []
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    assert_close({"half": found[0].float()}, {"half": expected[0].float()}, 2e-2)
    assert_close({"whole": found[1]}, {"whole": expected[1]})


def test_tokens_are_sent_once_to_each_rank():
    module = _module("stacked", False)
    rows, pairs = [0, 0], [0, 0]
    for rank, x in enumerate(_tokens()):
        for layer in module:
            chosen = layer.router(x.reshape(-1, WIDTH)).topk(CHOSEN, -1).indices
            elsewhere = chosen // (EXPERTS // 2) != rank
            rows[rank] += int(elsewhere.any(1).sum())
            pairs[rank] += int(elsewhere.sum())
            x = layer(x)
    for rank, (_, _, _, sent, dispatches) in enumerate(run_ranks(2, _run, "stacked", False, "auto", False)):
        assert dispatches == ["tokens", "tokens"]
        # Forward sends a token, its row and expert index, its weight, and a result; backward all but the indices.
        bytes_of_rows = 2 * 8 * WIDTH * (rows[0] + rows[1])
        assert sent == bytes_of_rows + (8 + 16) * pairs[rank] + 8 * pairs[1 - rank]
