"""Compiled blocks: one class at a time, found by structure, reverted without side effects, recompilation reported."""

import copy
import re

import pytest
import torch
from torch import nn

from lightning_pardist.engines.common import activation_checkpointing
from lightning_pardist.engines.common.compilation import Compilation
from lightning_pardist.engines.common.eager_runs import eagerly
from tests.helpers.parity import assert_close


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x, *, scale=1.0):
        return x + scale * self.narrow(self.wide(x).relu())


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 6)
        self.parts = nn.ModuleList(Inner() for _ in range(4))
        self.last = nn.Linear(6, 1)

    def forward(self, x, **kwargs):
        x = self.first(x)
        for part in self.parts:
            x = part(x, **kwargs)
        return self.last(x)


def _run(module, rows=3, **kwargs):
    torch.compiler.reset()
    module.zero_grad()
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))
    loss = module(x, **kwargs).pow(2).mean()
    loss.backward()
    return {"loss": loss.detach()} | {name: param.grad.clone() for name, param in module.named_parameters()}


def _compiled(module, backend="aot_eager"):
    told = []
    compilation = Compilation("blocks", backend, report=told.append)
    compilation.compile_blocks(module)
    return compilation, told


def test_blocks_share_what_is_compiled():
    module, reference = Outer(), Outer()
    compilation, told = _compiled(module)
    assert module.state_dict().keys() == reference.state_dict().keys()
    assert_close(_run(module), _run(reference))
    assert (compilation.graphs, told) == (1, [])
    assert "4 blocks by aot_eager, 1 graphs in" in str(compilation)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.parts[0].wide.weight.zero_()
        reference.parts[0].wide.weight.zero_()
    assert_close(_run(twin), _run(reference))
    compilation.undo()
    assert {type(part) for part in module.parts} == {Inner}
    assert compilation.graphs == 2


def test_what_is_compiled_again_has_a_name():
    module = Outer()
    _, told = _compiled(module, backend="eager")
    x = torch.randn(2, 6)
    torch.compiler.reset()
    module(x)
    module(x)
    with torch.no_grad():
        # Another autograd mode is expected to recompile once, as in validation.
        module(x)
    assert told == []
    module(x, scale=3.0)
    assert told
    assert told[0].startswith("parts.0 was recompiled (1 recompilations so far)")


def test_hooks_and_checkpointed_activations_run_around_compiled_code():
    module, reference = Outer(), Outer()
    seen = []
    for part in module.parts:
        part.register_forward_hook(lambda *_: seen.append(1))
    compilation, _ = _compiled(module)
    undo = activation_checkpointing.checkpoint_blocks(module, "auto")
    assert_close(_run(module), _run(reference))
    assert len(seen) == 4
    undo()
    compilation.undo()
    assert {type(part) for part in module.parts} == {Inner}


def test_activations_of_an_eager_run_are_computed_again_eagerly():
    module, reference = Outer(), Outer()
    compilation, _ = _compiled(module)
    activation_checkpointing.checkpoint_blocks(module, "auto")
    torch.compiler.reset()
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(3))
    with eagerly():
        loss = module(x).pow(2).mean()
    loss.backward()
    assert compilation.graphs == 0
    found = {"loss": loss.detach()} | {name: param.grad for name, param in module.named_parameters()}
    assert_close(found, _run(reference))
    assert_close(_run(module), _run(reference))
    assert compilation.graphs > 0


def test_what_users_compiled_is_left_as_it_is():
    module, reference = Outer(), Outer()
    module.parts[1].compile(backend="eager")
    module.parts[2] = torch.compile(module.parts[2], backend="eager")
    compilation, _ = _compiled(module)
    changed = [type(part).__mro__[1].__name__ == "_Compiled" for part in module.parts]
    assert changed == [True, False, False, True]
    found = {name.replace("_orig_mod.", ""): value for name, value in _run(module).items()}
    assert_close(found, _run(reference))
    compilation.undo()


def test_what_cannot_be_compiled_is_refused_by_name():
    with pytest.raises(ValueError, match="found no repeated blocks in Linear"):
        _compiled(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"compile_backend='turbo' is unknown. Use .*inductor"):
        _compiled(Outer(), backend="turbo")
    module = Outer()
    module.parts[1].forward = lambda x: x
    with pytest.raises(ValueError, match=re.escape("would compile parts.1, whose forward was replaced")):
        _compiled(module)
