from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from lightning_pardist.engines.tensor import (
    SplitTensor,
    to_full_tensor,
)
from tests.distributed.test_tensor import relative, split, train_beside_one_process
from tests.helpers.ranks import run_ranks
from tests.helpers.zoo import NanoGPT, build


class CollectiveCounter(CommDebugMode):
    """CommDebugMode without its module tracker, whose backward hooks would gather tensors."""

    def __init__(self):
        super().__init__()
        self.advanced_module_tracker = SimpleNamespace(
            name="Global",
            parent_dict={},
            module_parents_dict={"Global": set()},
            is_bw=False,
            activation_checkpointing=False,
        )

    def __enter__(self):
        self.comm_counts.clear()
        return torch.utils._python_dispatch.TorchDispatchMode.__enter__(self)

    def __exit__(self, *exc):
        return torch.utils._python_dispatch.TorchDispatchMode.__exit__(self, *exc)


def count_collectives(layers, options):
    torch.manual_seed(0)
    model = NanoGPT(layers=layers)
    found, runtime = split(model, 2, **options)
    forward, backward = CollectiveCounter(), CollectiveCounter()
    with runtime.step():
        with forward:
            loss = model.loss(model.batch(0))
        with backward:
            loss.backward()
    counts = [{str(op).split(".")[-1]: n for op, n in mode.comm_counts.items()} for mode in (forward, backward)]
    planned = [found.collective_count(phase) for phase in ("forward", "backward")]
    return counts, planned, not runtime.fallbacks and not found.fallbacks


def test_gpt_sends_what_megatron_sends():
    (two, planned, clean), *_ = run_ranks(2, count_collectives, 2, {})
    (six, _, _), *_ = run_ranks(2, count_collectives, 6, {})
    assert clean
    # Two all-reduces per block and direction; plus the embedding, one gather of the loss, and the head's input.
    assert two == [{"allreduce_": 2 * 2 + 1, "allgather_": 1}, {"allreduce_": 2 * 2 + 1}]
    assert six == [{"allreduce_": 2 * 6 + 1, "allgather_": 1}, {"allreduce_": 2 * 6 + 1}]
    assert planned == [6, 5]


def test_sequence_parallel_replaces_all_reduces_by_halves():
    (found, planned, clean), *_ = run_ranks(2, count_collectives, 2, {"sequence_parallel": True})
    assert clean
    forward, backward = found
    # On gloo a reduce-scatter is an all-to-all. Each former all-reduce is a gather and a scatter; one for the loss.
    assert forward["alltoall_base_"] == 5
    assert forward["allgather_"] == 5 + 1
    assert backward["alltoall_base_"] == 5
    assert planned[0] == sum(forward.values())


@pytest.mark.parametrize("name", ["gpt", "llama", "transformer", "vit", "moe_stacked"])
def test_sequence_parallel_trains_like_one_process(name):
    for worst, _, _ in run_ranks(2, train_beside_one_process, name, 2, "sgd", {"sequence_parallel": True}):
        assert max(worst.values()) < 1e-5, worst


def hand_written_plan(overrides):
    worst, fallbacks, _ = train_beside_one_process("mixer", 2, "sgd", {"overrides": overrides})
    return worst, fallbacks


def test_plans_by_hand_cost_collectives_and_not_numbers():
    # No layers pair here: every layer gets a mismatched input layout.
    overrides = {"layers.*.1.0": "row", "layers.*.3.2": "column", "layers.*.3.0": "replicate", "stem": "column"}
    for worst, fallbacks in run_ranks(2, hand_written_plan, overrides):
        assert max(worst.values()) < 1e-5, worst
        assert fallbacks


class Dropouts(nn.Module):
    def __init__(self, use_checkpoint=False):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)
        self.use_checkpoint = use_checkpoint

    def inner(self, x):
        self.whole = F.dropout(x, 0.5)
        self.hidden = F.dropout(self.up(self.whole), 0.5)
        return self.down(self.hidden)

    def batch(self, seed):
        return torch.ones(4, 16)

    def loss(self, batch):
        x = batch.clone().requires_grad_()
        if self.use_checkpoint:
            out = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        else:
            out = self.inner(x)
        self.after = torch.rand(4)
        return out.pow(2).mean()


def dropped(use_checkpoint):
    torch.manual_seed(0)
    model = Dropouts(use_checkpoint)
    nn.init.ones_(model.up.weight)
    nn.init.normal_(model.down.weight)
    _, runtime = split(model, 2)
    torch.manual_seed(7)
    with runtime.step():
        loss = model.loss(model.batch(0))
        hidden = model.hidden
        assert isinstance(hidden, SplitTensor)
        loss.backward()
    grads = [to_full_tensor(parameter.grad) for parameter in model.parameters()]
    return model.whole.detach(), hidden.local.detach() != 0, model.after, loss.item(), grads


def test_dropout_agrees_where_whole_and_differs_where_split():
    (whole0, hidden0, after0, loss0, grads0), (whole1, hidden1, after1, loss1, _) = run_ranks(2, dropped, False)
    assert torch.equal(whole0, whole1)
    assert torch.equal(after0, after1)
    assert loss0 == loss1
    assert not torch.equal(hidden0, hidden1)
    (_, _, _, loss2, grads2), _ = run_ranks(2, dropped, True)
    assert loss2 == loss0
    for one, two in zip(grads0, grads2, strict=True):
        assert torch.allclose(one, two)


def norms():
    model = build("gpt")
    reference = copy.deepcopy(model)
    _, runtime = split(model, 2)
    with runtime.step():
        model.loss(model.batch(0)).backward()
    reference.loss(model.batch(0)).backward()
    expected = nn.utils.get_total_norm([p.grad for p in reference.parameters()])
    torchs = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    return expected.item(), torchs.full_tensor().item()


def test_gradient_norm_counts_everything_once():
    for expected, torchs in run_ranks(2, norms):
        assert torchs == pytest.approx(expected, rel=1e-5)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


square = Square.apply


class Recomputed(torch.autograd.Function):
    """Custom function that calls a layer, and calls it again in backward."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.save_for_backward(x)
        ctx.layer = layer
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(grad)
        return x.grad, None


class CallsLayers(nn.Module):
    """Split layers called inside custom autograd functions."""

    def __init__(self):
        super().__init__()
        self.inner, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def batch(self, seed):
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))

    def loss(self, batch):
        hidden = self.inner(batch).tanh()
        return (self.down(Recomputed.apply(hidden, self.up).tanh()) - batch).pow(2).mean()


class Odd(nn.Module):
    """Operations without rules: custom functions, in-place operators, reads of values, clipping inside the step."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.square = Square.apply

    def batch(self, seed):
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))

    def loss(self, batch):
        h = self.up(batch).clone()
        h.index_copy_(1, torch.tensor([0, 9]), torch.ones(4, 2))
        h[:, 3] = 0.5
        h = h + torch.fft.fft(h, dim=-1).real * 0.1
        assert h.tolist()[0][3] != 0.5
        assert h.shape == (4, 16)
        assert h.cumsum(-1).argmax(-1).shape == (4,)
        penalty = (self.up.weight**2).sum() + self.up.weight.t()[:, 2:].abs().max()
        return self.down(h).pow(2).mean() + square(h).mean() + self.square(h).mean() + h[:, 4:].mean() + 1e-2 * penalty


def odd():
    torch.manual_seed(0)
    model = Odd()
    reference = copy.deepcopy(model)
    _, runtime = split(model, 2, overrides={"up": "column", "down": "row"})
    expected = reference.loss(reference.batch(0))
    expected.backward()
    with runtime.step():
        loss = model.loss(model.batch(0))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
    nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.sub_(0.1 * parameter.grad)
    errors = [abs(loss.item() / expected.item() - 1)]
    for one, many in zip(reference.parameters(), model.parameters(), strict=True):
        assert isinstance(many, DTensor)
        errors.append(relative(to_full_tensor(many.grad), one.grad))
        errors.append(relative(to_full_tensor(many), one.detach()))
    return max(errors), sorted(runtime.fallbacks), {k: v.bytes_gathered for k, v in runtime.fallbacks.items()}


def test_operators_without_a_rule_run_on_whole_tensors_and_are_named():
    for error, names, cost in run_ranks(2, odd):
        assert error < 1e-5
        assert {"Square", "fft_fft", "index_copy", "setitem"} <= set(names)
        # By its global name and by the attribute.
        assert cost["Square"] == 2 * 4 * 16 * 4


SAME = {
    "tile of the last dim": lambda h: h.tile(2),
    "tile of both": lambda h: h.tile(1, 2),
    "tile of the first dim": lambda h: torch.tile(h, (2, 1)),
    "tile of a new dim": lambda h: h.tile(2, 1, 1),
    "var_mean": lambda h: torch.stack(torch.var_mean(h, 0, False, True)),
    "equal": lambda h: torch.tensor(torch.equal(h, h + torch.eye(4, 16))),
    "equal to itself": lambda h: torch.tensor(torch.equal(h, h.clone())),
}


def same_values():
    torch.manual_seed(0)
    model = Odd()
    reference, batch = copy.deepcopy(model), torch.randn(4, 8)
    _, runtime = split(model, 2, overrides={"up": "column", "down": "row"})
    expected = reference.up(batch)
    with runtime.step():
        hidden = model.up(batch)
        assert isinstance(hidden, SplitTensor)
        slopes = runtime.plain(F.rrelu(hidden * 0 - 1, training=True))
        found = {name: runtime.plain(function(hidden)) for name, function in SAME.items()}
    errors = {name: (value.float() - SAME[name](expected).float()).abs().max().item() for name, value in found.items()}
    return errors, torch.equal(slopes[:, :8], slopes[:, 8:])


def test_functions_of_split_tensors_give_the_values_of_whole_ones():
    for errors, slopes_repeat in run_ranks(2, same_values):
        assert not slopes_repeat
        assert {name: error for name, error in errors.items() if error > 1e-6} == {}


def looks_at_memory():
    """Read tensors' memory on the first rank only: a read that gathers would block."""
    torch.manual_seed(0)
    model = Odd()
    _, runtime = split(model, 2, overrides={"up": "column", "down": "row"})
    with runtime.step():
        hidden = model.up(torch.ones(4, 8))
        assert isinstance(hidden, SplitTensor)
        if torch.distributed.get_rank():
            return [], []
        tensors = (hidden, model.up.weight)
        found = [(tensor.storage_offset(), tensor.is_contiguous()) for tensor in tensors]
        assert all(tensor.untyped_storage() is not None and tensor.stride()[1] == 1 for tensor in tensors)
        assert hidden.data_ptr() == hidden.untyped_storage().data_ptr()
    return found, sorted(runtime.fallbacks)


def test_looks_at_where_a_tensor_lies_gather_nothing():
    found, fallbacks = run_ranks(2, looks_at_memory, timeout_s=30)[0]
    assert found == [(0, True)] * 2
    assert not fallbacks


def layers_in_custom_functions():
    torch.manual_seed(0)
    model = CallsLayers().double()
    model.batch = lambda seed: torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).double()
    reference = copy.deepcopy(model)
    _, runtime = split(model, 2, overrides={"up": "column", "down": "row"})
    expected = reference.loss(reference.batch(0))
    expected.backward()
    with runtime.step():
        loss = model.loss(model.batch(0))
        loss.backward()
    pairs = zip(reference.parameters(), model.parameters(), strict=True)
    return max(
        abs(loss.item() / expected.item() - 1), *(relative(to_full_tensor(many.grad), one.grad) for one, many in pairs)
    )


def test_custom_functions_that_return_split_tensors_pass_gradients_on():
    assert max(run_ranks(2, layers_in_custom_functions)) < 1e-9


class Overwriting(Odd):
    def loss(self, batch):
        h = self.up(batch).clone()
        view = h[:, 4:]
        if batch[0, 0] > 0:
            view.add_(1.0)
        else:
            h.add_(1.0)
        return h.mean() + view.mean()


class OverwritingASibling(Odd):
    """Two views of one tensor that is no longer referenced."""

    def loss(self, batch):
        h = self.up(batch).clone()
        left, right = h[:, 4:], h.flatten()
        del h
        left.add_(1.0)
        return left.mean() + right.mean()


def overwrite(sign):
    torch.manual_seed(0)
    model = Overwriting() if sign else OverwritingASibling()
    _, runtime = split(model, 2, overrides={"up": "column"})
    with (
        pytest.raises(RuntimeError, match="add overwrites a tensor that shares memory with another one"),
        runtime.step(),
    ):
        model.loss(sign * torch.ones(4, 8))


@pytest.mark.parametrize("sign", [1, -1, 0])
def test_overwriting_a_view_that_became_a_copy_is_refused(sign):
    run_ranks(2, overwrite, sign)


class OverwritingTheLast(Odd):
    """View of an unreferenced tensor, like relative positions that are shifted by views and then masked."""

    def loss(self, batch):
        h = self.up(batch).clone()
        h = h[:, 4:]
        h *= 2.0
        return h.mean()


def overwrite_the_last():
    torch.manual_seed(0)
    model = OverwritingTheLast()
    reference = copy.deepcopy(model)
    _, runtime = split(model, 2, overrides={"up": "column"})
    expected = reference.loss(torch.ones(4, 8))
    expected.backward()
    with runtime.step():
        loss = model.loss(torch.ones(4, 8))
        loss.backward()
    return relative(to_full_tensor(model.up.weight.grad), reference.up.weight.grad), loss.item() / expected.item() - 1


def test_a_copied_view_may_be_overwritten_that_nobody_else_looks_at():
    for errors in run_ranks(2, overwrite_the_last):
        assert max(map(abs, errors)) < 1e-5


def evaluate():
    model = build("transformer")
    batch = model.batch(0)
    expected = model.eval().loss(batch).item()
    model.train()
    _, runtime = split(model, 2)
    model.eval()
    found = []
    for context in (torch.no_grad, torch.inference_mode):
        with context(), runtime.step():
            found.append(model.loss(batch).item())
            logits = runtime.whole(model.out(model.embed(batch[0])))
            assert type(logits) is torch.Tensor
    return expected, found


def test_evaluation():
    for expected, found in run_ranks(2, evaluate):
        assert found == pytest.approx([expected] * 2, rel=1e-5)


class LearnedQueries(nn.Module):
    """Attention whose queries are computed from parameters alone, as in the decoder of DETR."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.queries = nn.Embedding(6, 16)

    def loss(self, batch):
        places = self.queries.weight.unsqueeze(0).repeat(len(batch), 1, 1)
        heads = (layer(places).view(len(batch), 6, -1, 8).transpose(1, 2) for layer in (self.q, self.k, self.v))
        found = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)
        return (self.out(found.reshape(len(batch), 6, -1)) - batch[:, None]).pow(2).mean()


def evaluate_queries():
    torch.manual_seed(0)
    model = LearnedQueries()
    model.batch = lambda seed: torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
    expected = model.loss(model.batch(0)).item()
    _, runtime = split(model, 2)
    with torch.no_grad(), runtime.step():
        return expected, model.loss(model.batch(0)).item()


def test_results_of_parameters_alone_in_evaluation():
    for expected, found in run_ranks(2, evaluate_queries):
        assert found == pytest.approx(expected, rel=1e-5)


def products_of_weights():
    """Compute an orthogonality penalty on split weights, compared with plain tensors."""
    model = build("mlp")

    def penalty():
        found = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        both = [(each @ each.T, len(each)) for each in found] + [(each.T @ each, each.shape[1]) for each in found]
        return sum((product - torch.eye(size)).pow(2).sum() for product, size in both)

    with torch.no_grad():
        expected = penalty().item()
    _, runtime = split(model, 2)
    with torch.no_grad(), runtime.step():
        return expected, float(runtime.plain(penalty()))


def test_products_of_split_weights_in_evaluation():
    for expected, found in run_ranks(2, products_of_weights):
        assert found == pytest.approx(expected, rel=1e-5)


def half_precision():
    model = build("gpt")
    reference = copy.deepcopy(model)
    _, runtime = split(model, 2)
    with torch.autocast("cpu", torch.bfloat16):
        expected = reference.loss(model.batch(0))
        with runtime.step():
            loss = model.loss(model.batch(0))
    with runtime.step():
        loss.backward()
    expected.backward()
    error = max(
        relative(to_full_tensor(m.grad), r.grad)
        for m, r in zip(model.parameters(), reference.parameters(), strict=True)
    )
    return loss.item(), expected.item(), error, str(loss.dtype)


def test_autocast():
    for loss, expected, error, dtype in run_ranks(2, half_precision):
        # Tolerance of bfloat16, whose rounding depends on the order of sums.
        assert loss == pytest.approx(expected, rel=2e-3)
        assert error < 0.05
        assert dtype == "torch.float32"
