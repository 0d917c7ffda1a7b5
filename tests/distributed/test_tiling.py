"""Linear layers in tiles: one process's results, and the memory of a tile."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.zero_table import LiveBytes
from lightning_pardist.engines.fsdp import find_fsdp_units, shard
from lightning_pardist.engines.fsdp.tiling import find_tiled
from tests.distributed import sharded_modules as zoo
from tests.distributed.test_fully_sharded import close, make_mesh, many, whole
from tests.helpers.ranks import run_ranks

# A few rows of a few hundred bytes: every layer of the zoo is tiled, most with a smaller last tile.
TILED = {"tile_above_bytes": 400}
NAMES = ("Mlp", "Blocks", "Gpt", "ForwardNeverCalled", "Repeated", "Outputs", "Frozen", "OddShapes", "MixedTypes")


def test_the_numbers_of_one_process():
    cases = [{"name": name, **TILED} for name in ("Mlp", "OddShapes", "Frozen")]
    run_ranks(2, many, [*cases, {"name": "RankBranch", "allow_divergent_forward": True, **TILED}])


@pytest.mark.slow
def test_every_module_and_way():
    cases = [{"name": name, **TILED} for name in (*NAMES, "SharedBlock", "TiedBlocks", "InPlace")]
    for keep in ("sharded", "unsharded"):
        cases += [{"name": name, "micro": 2, "keep": keep, **TILED} for name in NAMES[:2]]
    cases += [{"name": "RankUnits", "allow_divergent_forward": True, **TILED}, {"name": "Mlp", "clip": 0.05, **TILED}]
    run_ranks(2, many, cases)


@pytest.mark.slow
def test_replicated_shards_and_four_ranks():
    cases = [{"name": "OddShapes", **TILED}, {"name": "Mlp", "hsdp": True, **TILED}]
    cases += [{"name": "Blocks", "hsdp": True, "micro": 2, **TILED}]
    cases += [{"name": "RankUnits", "hsdp": True, "allow_divergent_forward": True, **TILED}]
    run_ranks(4, many, cases)


def _no_rows():
    """Train on a rank without rows beside one that has some (an expert without tokens)."""
    torch.manual_seed(0)
    net = nn.Linear(8, 17, bias=False)
    (want,) = torch.autograd.grad(net(torch.ones(3, 8)).pow(2).sum() / 2, [net.weight])
    handle = shard(net, make_mesh(), tile_above_bytes=64)
    rows = 0 if dist.get_rank() else 3
    output = handle.run(net, torch.ones(rows, 8))
    assert output.shape == (rows, 17)
    output.pow(2).sum().backward()
    torch.testing.assert_close(net.weight.grad.full_tensor(), want)


def test_a_rank_without_rows():
    run_ranks(2, _no_rows)


class Wide(nn.Module):
    """Module dominated by a single layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 512)
        self.large = nn.Linear(512, 4096, bias=False)
        self.last = nn.Linear(4096, 4)

    def training_step(self, x):
        return self.last(torch.relu(self.large(torch.relu(self.first(x))))).pow(2).mean()


LARGE = 4 * 512 * 4096


def _peak(tile_above_bytes):
    torch.manual_seed(0)
    model = Wide()
    with LiveBytes() as live:
        handle = shard(
            model, make_mesh(), units=find_fsdp_units(model, min_unit_bytes=1), tile_above_bytes=tile_above_bytes
        )
        x = torch.randn(2, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
        # The second step is representative of all later ones.
        for _ in range(2):
            handle.zero_grad()
            before = live.now
            live.restart()
            handle.run(model.training_step, x).backward()
    gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    return live.peak - before, gradients


def _peaks():
    (plain, want), (tiled, got) = _peak(None), _peak(LARGE / 16)
    for name, gradient in want.items():
        close(got[name], gradient, name)
    return plain, tiled


def test_a_layer_in_tiles_is_never_there_whole():
    for plain, tiled in run_ranks(2, _peaks):
        # Untiled: the weight, its gradient, and the part of the latter in flight to the other rank.
        assert plain > 2 * LARGE
        # In tiles of a sixteenth: this rank's half of the gradient persists; a tile and its gradient are temporary.
        assert tiled < 0.5 * LARGE + 5 * LARGE / 16


def _half():
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = []
    for above in (None, 400):
        torch.manual_seed(0)
        model = zoo.Mlp()
        handle = shard(
            model, make_mesh(), units=find_fsdp_units(model, min_unit_bytes=1), mp_policy=policy, tile_above_bytes=above
        )
        with torch.autocast("cpu", torch.bfloat16):
            loss = handle.run(model.training_step, zoo.batches(1, 2)[0][dist.get_rank()])
        loss.backward()
        results.append({name: whole(parameter.grad) for name, parameter in model.named_parameters()})
    for name, want in results[0].items():
        assert results[1][name].dtype == want.dtype == torch.float32
        assert (results[1][name] - want).abs().max() <= 0.02 * want.abs().max(), name


def test_half_precision():
    run_ranks(2, _half)


def _used_directly():
    model = zoo.DirectWeight()
    handle = shard(model, make_mesh(), **TILED)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.\w+\.weight is used outside of its layer's call"):
        handle.run(model.training_step, zoo.batches(1, 2)[0][dist.get_rank()])


def test_a_weight_used_directly_is_refused_by_name():
    run_ranks(2, _used_directly)


def test_layers_that_others_read_from_stay_whole():
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2)
            self.encoder = nn.TransformerEncoderLayer(16, 2)
            self.embed = nn.Embedding(16, 16)
            self.head = nn.Linear(16, 16, bias=False)
            self.head.weight = self.embed.weight
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
            self.free = nn.Linear(16, 16)

    assert set(find_tiled(Module(), 1)) == {"free"}
    assert find_tiled(Module(), 4 * 16 * 16) == {}
