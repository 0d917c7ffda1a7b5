import pytest
import torch
from torch import nn

from lightning_pardist.engines.common.meta_init import materialize
from lightning_pardist.engines.fsdp import find_fsdp_units, format_units
from lightning_pardist.engines.fsdp.outputs import before_backward, shares_memory, tensors_in
from tests.distributed import sharded_modules as zoo


def plan(module, **options):
    options.setdefault("min_unit_bytes", 1)
    return {unit.name: unit for unit in find_fsdp_units(module, **options)}


def test_repeated_blocks_and_big_layers_are_units_and_the_rest_is_the_roots():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(1000, 128)
            self.blocks = nn.ModuleList(zoo.Block(128) for _ in range(3))
            self.norm = nn.LayerNorm(128)
            self.head = nn.Linear(128, 1000)

    units = plan(Model(), min_unit_bytes=64 * 1024)
    assert list(units) == ["tokens", "blocks.0", "blocks.1", "blocks.2", "head", ""]
    assert units["blocks.0"].reason == "block"
    assert units["head"].reason == "large"
    assert units[""].parameters == ("norm.weight", "norm.bias")
    assert sum(unit.numel for unit in units.values()) == sum(p.numel() for p in Model().parameters())
    assert units["tokens"].nbytes == 4 * 128 * 1000
    assert "blocks.0 .. blocks.2 (3x)" in format_units(list(units.values()))


def test_meta_modules_have_the_same_plan():
    with torch.device("meta"):
        module = zoo.Gpt()
    assert list(plan(module)) == list(plan(zoo.Gpt()))


def test_tied_parameters_belong_to_what_is_around_their_modules():
    units = plan(zoo.Gpt())
    assert "tokens" not in units
    assert "head" not in units
    assert "tokens.weight" in units[""].parameters
    # Tied between two blocks: one of them is dissolved, which makes the root own the weight.
    units = plan(zoo.TiedBlocks())
    assert "blocks.0.up.weight" in units[""].parameters
    assert "blocks.1" in units


def test_a_module_under_two_names_is_one_unit():
    units = plan(zoo.SharedBlock())
    assert [name for name in units if name.startswith("blocks")] == ["blocks.0", "blocks.1"]
    assert [name for name in units if name.startswith("layers")] == ["layers.layers.0", "layers.layers.1"]


def test_rarer_dtypes_get_units_of_their_own():
    units = plan(zoo.MixedTypes())
    assert units["blocks.0.norm"].reason == "dtype"
    assert "blocks.0.norm.weight" not in units["blocks.0"].parameters


def test_torch_attention_is_never_split():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 4)

    assert list(plan(Model())) == ["attention", ""]


def test_large_blocks_are_split_at_their_inner_blocks():
    stages = nn.ModuleList(nn.Sequential(*(nn.Linear(8, 8) for _ in range(n))) for n in (1, 30))
    units = plan(nn.Sequential(nn.Identity(), *stages))
    assert "1" in units
    assert "2" not in units
    assert "2.29" in units


def test_policies_by_name_and_by_function():
    assert [u.name for u in find_fsdp_units(zoo.Blocks(), policy=["Block"])] == ["blocks.0", "blocks.1", "blocks.2", ""]
    assert [u.name for u in find_fsdp_units(zoo.Blocks(), policy=lambda m: isinstance(m, nn.LayerNorm))][:1] == [
        "blocks.0.norm"
    ]
    nested = find_fsdp_units(zoo.Blocks(), policy=["Block", "Linear"])
    assert [u.name for u in nested if u.name.startswith("blocks.0")] == ["blocks.0.up", "blocks.0.down", "blocks.0"]
    with pytest.raises(ValueError, match="names Blok, but"):
        find_fsdp_units(zoo.Blocks(), policy=["Blok"])
    with pytest.raises(ValueError, match="blocks, which cannot be called"):
        find_fsdp_units(zoo.Blocks(), policy=["ModuleList"])


def test_outputs_are_searched_everywhere():
    x = torch.ones(2, requires_grad=True) * 2
    loop = {"a": [x]}
    loop["self"] = loop
    assert [*tensors_in(zoo.Plain(loop))] == [x]
    assert [*tensors_in(zoo.Answer(x, {"b": (x, 3, "text")}))] == [x, x]
    calls = []
    y = torch.ones(2, 3, requires_grad=True) * 1
    view = y.view(3, 2)
    before_backward(zoo.Plain(view), lambda g: calls.append(g) or g)
    view += 1
    view.sum().backward()
    assert calls
    weight = nn.Parameter(torch.ones(4))
    storages = {weight.untyped_storage().data_ptr()}
    assert shares_memory({"w": weight[:2]}, storages)
    assert not shares_memory({"w": weight * 2}, storages)


def test_materialize_shards_a_unit_before_the_next_has_values():
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    whole = []

    def shard_now(unit):
        whole.append(sum(not p.is_meta for p in module.parameters()))
        for child in unit.modules():
            for name in child._parameters:
                child._parameters[name] = nn.Parameter(torch.empty(4, device="meta"))

    materialize(module, shard_now, is_unit=lambda m: isinstance(m, nn.Linear))
    assert whole == [2, 2, 2]
