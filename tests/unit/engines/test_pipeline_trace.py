"""Recorded step: units, dependences, and absence of side effects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pardist.engines.pipeline import CannotPipelineError, dry_run, plan_stages, record_step
from lightning_pardist.engines.pipeline.records import AliasLeaf, TensorLeaf, Value
from tests.helpers.pipeline_zoo import ZOO, Block, make


class Net(nn.Module):
    """Six layers with arbitrary code between the third and the fourth."""

    def __init__(self, between: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])
        self.register_buffer("mean", torch.zeros(4))
        self.between = between
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            y = layer(x)
            x = self.between(self, x, y) if index == 2 else torch.tanh(y)
        return x

    def training_step(self, batch: Tensor) -> Tensor:
        return self(batch).square().mean()


def net(between: Callable[[Any, Tensor, Tensor], Tensor]) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(between), torch.randn(5, 4)


def test_units_are_items_of_lists_and_single_layers() -> None:
    model, batch = make("gpt", 4)
    recorded = record_step(model, model.training_step, batch)
    assert recorded.unit_names == ("wte", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head")
    assert [call.unit for call in recorded.calls] == list(recorded.unit_names)
    assert Value(0, 0) in recorded.calls[1].needs
    assert "positions" in recorded.calls[1].needs
    assert "wte.weight" in recorded.calls[6].needs
    assert recorded.parameters["wte.weight"].names == ("wte.weight", "head.weight")
    assert recorded.calls[1].output.leaves[0].shape == (4, 6, 16)  # type: ignore[union-attr]
    assert recorded.loss == pytest.approx(model.training_step(batch).item())


def test_flops_are_counted() -> None:
    model, batch = net(lambda self, x, y: y)
    recorded = record_step(model, model.training_step, batch)
    assert [call.flops for call in recorded.calls] == [2 * 5 * 4 * 4] * 6


@pytest.mark.parametrize("name", sorted(ZOO))
def test_nothing_is_left_behind(name: str) -> None:
    model, batch = make(name, 4)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = {key: set(module.__dict__) for key, module in model.named_modules()}
    rng = torch.get_rng_state()
    recorded = record_step(model, model.training_step, batch)
    for stages in (2, 3):
        dry_run(model, model.training_step, batch, plan_stages(recorded, stages))
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())
    assert attributes == {key: set(module.__dict__) for key, module in model.named_modules()}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_outputs_handed_through_are_aliases() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(3)])

        def training_step(self, x: Tensor) -> Tensor:
            mask = torch.ones(x.shape[0], 1, 3, 3, dtype=torch.bool)
            for block in self.blocks:
                x, mask = block(x, mask)
            return x.square().mean()

    model = Model()
    recorded = record_step(model, model.training_step, torch.randn(2, 3, 16))
    assert isinstance(recorded.calls[0].output.leaves[1], AliasLeaf)
    assert plan_stages(recorded, 3).sent == ((Value(0, 0),), (Value(1, 0),), ())


def test_attributes_left_by_a_unit_are_outputs() -> None:
    model, batch = make("experts", 4)
    recorded = record_step(model, model.training_step, batch)
    call = next(call for call in recorded.calls if call.unit == "layers.1")
    assert [(side.module, side.name) for side in call.output.side] == [("", "balance")]
    assert any(value in recorded.result_needs for value in (Value(2, 1),))


def test_integers_and_detached_values_count() -> None:
    model, batch = net(lambda self, x, y: torch.tanh(y) + torch.arange(4.0)[y.argmax(1)].unsqueeze(1))
    recorded = record_step(model, model.training_step, batch)
    assert recorded.reads == ()
    dry_run(model, model.training_step, batch, plan_stages(recorded, 6))
    with torch.no_grad():
        evaluated = record_step(model, model.training_step, batch, grad=False)
    assert [call.needs for call in evaluated.calls] == [call.needs for call in recorded.calls]
    leaf = evaluated.calls[0].output.leaves[0]
    assert isinstance(leaf, TensorLeaf)
    assert not leaf.requires_grad


def test_in_place_between_units() -> None:
    model, batch = net(lambda self, x, y: y.relu_())
    recorded = record_step(model, model.training_step, batch)
    assert recorded.mutated == {Value(2, 0)}
    dry_run(model, model.training_step, batch, plan_stages(recorded, 6))


def test_hooks_inside_blocks_open_them() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True) for _ in range(3)])
            self.seen: list[Tensor] = []
            for block in self.blocks:
                block.linear1.register_forward_hook(lambda module, args, output: self.seen.append(output))

        def training_step(self, x: Tensor) -> Tensor:
            self.seen.clear()
            for block in self.blocks:
                x = block(x)
            return x.square().mean() + sum(item.square().mean() for item in self.seen)

    model = Model()
    batch = torch.randn(2, 3, 8)
    recorded = record_step(model, model.training_step, batch)
    assert "blocks.0.linear1" in recorded.unit_names
    dry_run(model, model.training_step, batch, plan_stages(recorded, 3))


def test_weights_used_without_calling_their_layer() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.scale = nn.Linear(8, 8)

        def training_step(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            x = F.linear(self.attention(x, x, x)[0], self.scale.weight)
            return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), tokens.flatten())

    model, batch = Model(), torch.randint(0, 7, (3, 4))
    recorded = record_step(model, model.training_step, batch)
    assert [call.unit for call in recorded.calls] == ["embed", "attention"]
    made = plan_stages(recorded, 2)
    assert made.parameter_stages["embed.weight"] == (0, 1)
    assert made.parameter_stages["scale.weight"] == (1,)
    dry_run(model, model.training_step, batch, made)


def test_reentrant_checkpoint_is_refused() -> None:
    model, batch = net(lambda self, x, y: checkpoint(self.layers[3], y, use_reentrant=True))
    with pytest.raises(CannotPipelineError, match="use_reentrant=False"):
        record_step(model, model.training_step, batch)


def test_checkpoint_over_a_cut() -> None:
    model, batch = net(
        lambda self, x, y: checkpoint(lambda z: self.layers[4](self.layers[3](z)), y, use_reentrant=False)
    )
    recorded = record_step(model, model.training_step, batch)
    dry_run(model, model.training_step, batch, plan_stages(recorded, 4))


def looks(kind: str) -> Callable[[Any, Tensor, Tensor], Tensor]:
    def between(self: Any, x: Tensor, y: Tensor) -> Tensor:
        if kind == "if" and y.mean() > 100:
            return x
        if kind == "item":
            self.kept = y.sum().item()
        if kind == "list":
            self.kept = y.tolist()
        if kind == "numpy":
            self.kept = y.detach().numpy().sum()
        return torch.tanh(y)

    return between


@pytest.mark.parametrize("kind", ["if", "item", "list", "numpy"])
def test_looking_at_values_between_stages_is_refused_with_the_line(kind: str) -> None:
    model, batch = net(looks(kind))
    recorded = record_step(model, model.training_step, batch)
    assert all("test_pipeline_trace.py" in read.where for read in recorded.reads)
    with pytest.raises(CannotPipelineError, match=r"reads the value of the output of 'layers.2'") as caught:
        plan_stages(recorded, 4, split=["layers.1", "layers.3", "layers.5"])
    assert "pardist_ddp" in str(caught.value)
    # In the last stage the value is available.
    dry_run(model, model.training_step, batch, plan_stages(recorded, 3, split=["layers.1", "layers.2"]))
    dry_run(model, model.training_step, batch, plan_stages(recorded, 6, reads="send"))


def test_checks_inside_torch_are_served() -> None:
    model, batch = net(lambda self, x, y: torch.distributions.Normal(y, F.one_hot(y.argmax(1), 4) + 1.0).mean)
    recorded = record_step(model, model.training_step, batch)
    assert recorded.reads
    dry_run(model, model.training_step, batch, plan_stages(recorded, 6))


def test_batch_masks_select_from_stubs() -> None:
    model, batch = net(lambda self, x, y: y.index_put((self.kept,), y[self.kept] * 2))

    def step(x: Tensor) -> Tensor:
        model.kept = x[:, 0] > 0
        return model.training_step(x)

    recorded = record_step(model, step, batch)
    made = plan_stages(recorded, 6)
    assert all(len(sent) <= 1 for sent in made.sent)
    dry_run(model, step, batch, made)


def test_other_order_of_calls_is_refused() -> None:
    model, batch = net(lambda self, x, y: self.layers[1](y) if self.kept else torch.tanh(y))
    recorded = record_step(model, model.training_step, batch)
    model.kept = True
    with pytest.raises(CannotPipelineError, match=r"called 'layers.1' after 3 calls .* had 'layers.3'"):
        dry_run(model, model.training_step, batch, plan_stages(recorded, 2))


def test_a_look_that_the_recorded_run_did_not_show_is_refused() -> None:
    model, batch = net(lambda self, x, y: torch.tanh(y) * (float(y.sum()) if self.kept else 1.0))
    recorded = record_step(model, model.training_step, batch)
    model.kept = True
    with pytest.raises(CannotPipelineError, match=r"After 'layers.2', code between units reads the value"):
        dry_run(model, model.training_step, batch, plan_stages(recorded, 6))


def test_a_dependence_that_the_recorded_run_did_not_show_is_refused() -> None:
    def step(x: Tensor) -> Tensor:
        states = [model.layers[0](x)]
        for layer in model.layers[1:]:
            states.append(layer(states[-1]))
        return (states[-1] + (states[0] if model.kept else 0)).mean()

    model, batch = net(lambda self, x, y: y)
    recorded = record_step(model, step, batch)
    model.kept = True
    with pytest.raises(CannotPipelineError, match="in the recorded run"):
        dry_run(model, step, batch, plan_stages(recorded, 3))
