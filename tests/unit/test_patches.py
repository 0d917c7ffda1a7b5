"""Patches of torch and Lightning that last for a step or a run, and their removal."""

import contextlib
import sys

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_pardist.compat import dtensor_operators, lightning_patches, patches


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


#: As libraries name their functions.
double = Double.apply


def test_custom_functions_under_a_global_name():
    seen, own, x = [], double, torch.ones(2, requires_grad=True)

    def call(cls, apply, args, kwargs):
        seen.append(cls)
        return apply(*args, **kwargs)

    with patches.custom_functions(call), patches.custom_functions(call):
        double(x).sum().backward()
    assert seen == [Double, Double]
    assert double is own
    # A notebook names functions between runs, with no new module.
    main = sys.modules["__main__"]
    main.later = Double.apply
    try:
        with patches.custom_functions(call):
            main.later(x)
        assert seen.pop() is Double
        assert seen == [Double, Double]
    finally:
        del main.later
    double(x).sum().backward()
    assert (seen, x.grad.tolist()) == ([Double, Double], [4, 4])


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.double = Double.apply


@pytest.mark.parametrize("held", [True, False])
def test_custom_functions_of_other_references(held):
    module, x = Holder(), torch.ones(2, requires_grad=True)
    double = module.double if held else Double.apply
    seen = []

    def call(cls, apply, args, kwargs):
        seen.append(cls)
        return apply(*args, **kwargs)

    def changed(cls, apply, args, kwargs):
        return apply(args[0] + 1)

    with patches.custom_functions(call, patches.held_functions([module])):
        (module.double if held else double)(x).sum().backward()
    assert (seen, x.grad.tolist()) == ([Double], [2, 2])
    assert not held or module.double is double
    with patches.custom_functions(changed, patches.held_functions([module])):
        if held or torch.__version__ < "2.15":
            assert (module.double if held else double)(x).tolist() == [4, 4]
        else:
            with pytest.raises(RuntimeError, match="Call it as Double"):
                double(x)
            with torch.no_grad():
                assert double(x).tolist() == [2, 2]
            assert Double.apply(x).tolist() == [4, 4]
    double(x).sum().backward()
    assert (seen, x.grad.tolist()) == ([Double], [4, 4])


def test_compiled_code_first_called_while_reductions_are_watched():
    rules = pytest.importorskip("torch._dynamo.trace_rules")
    rules.clear_lru_cache()
    compiled = [torch.compile(lambda x, i=i: torch.mean(x) + i, backend="eager", fullgraph=True) for i in range(2)]
    with patches.report_reductions(lambda *args, **kwargs: None, arithmetic=True):
        assert compiled[0](torch.ones(2)) == 1
    assert compiled[1](torch.ones(2)) == 2


def test_custom_functions():
    own = torch.autograd.Function.__dict__["apply"]
    seen = []

    def call(cls, apply, args, kwargs):
        seen.append(cls)
        return apply(*args, **kwargs)

    x = torch.ones(2, requires_grad=True)
    with patches.custom_functions(call):
        Double.apply(x).sum().backward()
    assert seen == [Double]
    assert x.grad.tolist() == [2, 2]
    assert torch.autograd.Function.__dict__["apply"] is own


def test_backward_inside():
    depth = []

    class Context:
        def __enter__(self):
            depth.append(1)

        def __exit__(self, *error):
            depth.append(-1)

    x = torch.ones(2, requires_grad=True)
    with patches.backward_inside(Context()):
        x.register_hook(lambda grad: depth.append(0))
        (3 * x).sum().backward()
    assert depth == [1, 0, -1]
    (3 * x).sum().backward()
    assert depth == [1, 0, -1, 0]


def test_recomputed_functions():
    calls = []

    def wrap(function):
        def wrapped(*args):
            calls.append(1)
            return function(*args)

        return wrapped

    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with patches.recomputed_functions(wrap):
        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    wrapped = len(calls)
    assert wrapped
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert len(calls) == wrapped


def test_functions_behind_a_wrapper():
    for function in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_, nn.utils.get_total_norm):
        assert callable(patches.cell_of(function).cell_contents)
    with pytest.raises(RuntimeError, match="in a form that lightning_pardist does not know"):
        patches.cell_of(test_functions_behind_a_wrapper)


def test_grad_norm():
    from lightning.pytorch.utilities import grad_norm

    def other(module, norm_type, group_separator="/"):
        return {"other": norm_type}

    before = lightning_patches.replace_grad_norm(other.__code__)
    assert grad_norm(nn.Linear(1, 1), 2) == {"other": 2}
    lightning_patches.replace_grad_norm(before)
    assert grad_norm(nn.Linear(1, 1), 2) == {}


def test_operators_of_dtensors_are_taken_back_with_the_last_user():
    known = DTensor._op_dispatcher._custom_op_handlers
    before = dict(known)
    dtensor_operators.complete_operators()
    dtensor_operators.complete_operators()
    assert torch.ops.aten.equal.default in known
    dtensor_operators.restore_operators()
    assert torch.ops.aten.equal.default in known
    dtensor_operators.restore_operators()
    assert known == before


def test_unchanged_parameters_stay():
    own = torch.utils.swap_tensors
    with patches.keep_unchanged_parameters():
        first, second = torch.zeros(2), torch.ones(2)
        torch.utils.swap_tensors(first, second)
        assert first.tolist() == [1, 1]
    assert torch.utils.swap_tensors is own


class _Clamping(nn.Module):
    def forward(self, x):
        return torch.clamp(x, min=0.0) + torch.maximum(x, x) + x.clamp(min=1).float()


def test_numbers_are_noted_where_they_are_clamped_and_cast():
    own, noted, x = torch.clamp, [], torch.tensor([2.0, 3.0])
    with patches.report_scalar_casts(lambda *each: noted.append(each), lambda *each: noted.append(each)):
        number, traced = torch.zeros(()), torch.ones((), requires_grad=True)
        results = [number.clamp(min=1), torch.clamp(number, min=2), torch.maximum(number, torch.tensor(3.0))]
        results += [number.double(), number.to(torch.float16), number.clone().clamp_(min=4)]
        assert len(noted) == len(results)
        assert all(before == 0 and after is result for (before, after), result in zip(noted, results, strict=True))
        # Tensors with dims, or with a gradient, are no counts.
        assert torch.equal(torch.jit.script(_Clamping())(x), _Clamping()(x))
        assert torch.equal(torch.compile(_Clamping(), backend="eager", fullgraph=True)(x), _Clamping()(x))
        traced.clamp(min=2)
        assert len(noted) == len(results)
    assert torch.clamp is own
    assert "clamp" not in vars(torch.Tensor)


def test_numbers_are_noted_until_the_last_one_is_outside():
    noted = []
    first, second = (
        patches.report_scalar_casts(lambda *each: noted.append(each), lambda *each: None) for _ in range(2)
    )
    with contextlib.ExitStack() as outer:
        first.__enter__()
        outer.enter_context(second)
        # Removes the first patch, not the last: ranks may be threads of one process.
        first.__exit__(None, None, None)
        torch.zeros(()).clamp(min=1)
        assert len(noted) == 1
    assert "clamp" not in vars(torch.Tensor)
