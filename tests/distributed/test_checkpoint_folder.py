"""Checkpoint folder that ranks write in parallel: saving from any layout, loading into any layout."""

import json
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_pardist.checkpoint.chunks import Shards, shards_of, shards_of_slice
from lightning_pardist.checkpoint.coordination import GroupCoordinator, StoreCoordinator
from lightning_pardist.checkpoint.errors import DamagedCheckpointError
from lightning_pardist.checkpoint.folder import FolderReader, FolderSave
from lightning_pardist.checkpoint.gather import assemble
from lightning_pardist.checkpoint.manifest import MANIFEST, Manifest, verify_files
from tests.helpers.ranks import cpu_mesh, run_ranks

SHAPES = {"even": (8, 6), "uneven": (7, 3), "short": (1, 5), "scalar": (), "none": (0, 4), "deep": (3, 5, 2)}


def _values(name):
    shape = SHAPES[name]
    return torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)


def _layouts(world):
    """Return every way of distributing a tensor, by name."""
    line = cpu_mesh((world,))
    layouts = {"plain": lambda t: t, "rows": lambda t: distribute_tensor(t, line, [Shard(0)], src_data_rank=None)}
    layouts["columns"] = lambda t: distribute_tensor(t, line, [Shard(t.dim() - 1)], src_data_rank=None)
    layouts["copies"] = lambda t: distribute_tensor(t, line, [Replicate()], src_data_rank=None)
    if world == 4:
        grid = cpu_mesh((2, 2))
        layouts["grid"] = lambda t: distribute_tensor(t, grid, [Shard(0), Shard(t.dim() - 1)], src_data_rank=None)
        layouts["both"] = lambda t: distribute_tensor(t, grid, [Shard(0), Shard(0)], src_data_rank=None)
        layouts["hybrid"] = lambda t: distribute_tensor(t, grid, [Replicate(), Shard(0)], src_data_rank=None)
        layouts["strided"] = lambda t: distribute_tensor(
            t, grid, [_StridedShard(0, split_factor=2), Shard(0)], src_data_rank=None
        )
    return layouts


def _fused(path):
    """Fused query, key and value projection: each split over tensor ranks, the result sharded by ``fully_shard``."""
    mesh = cpu_mesh((2, 2), ("data_shard", "tensor_parallel"))
    whole = torch.arange(36.0).view(12, 3)
    module = nn.Linear(3, 12, bias=False)
    tensor = mesh.get_local_rank("tensor_parallel")
    part = torch.cat([third.chunk(2)[tensor] for third in whole.chunk(3)])
    layout = [_StridedShard(0, split_factor=3)]
    fused = DTensor.from_local(part, mesh["tensor_parallel"], layout, run_check=False, shape=(12, 3), stride=(3, 1))
    module.weight = nn.Parameter(fused)
    fully_shard(module, mesh=mesh["data_shard"])
    save = FolderSave({"model.weight": shards_of(module.weight)}, path)
    save.plan(GroupCoordinator())
    save.write(GroupCoordinator(), {})
    assert torch.equal(FolderReader(path).read("model.weight"), whole)
    together = assemble({"weight": shards_of(module.weight)}, GroupCoordinator())
    assert dist.get_rank() or torch.equal(together["weight"], whole)


def test_shards_of_a_fused_projection(tmp_path):
    run_ranks(4, _fused, str(tmp_path / "folder"))


def _held(layout, world, name, values):
    if layout == "flat":
        # ZeRO's layout: even flat slices, regardless of the shape.
        step = -(-values.numel() // world)
        start = min(dist.get_rank() * step, values.numel())
        stop = min(start + step, values.numel())
        return shards_of_slice(values, start, stop, values.reshape(-1)[start:stop].clone())
    if values.dim() == 0:
        return shards_of(values)
    return shards_of(_layouts(world)[layout](values))


def _save_under(layout, path):
    world = dist.get_world_size()
    tensors = {f"model.{name}": _held(layout, world, name, _values(name)) for name in SHAPES}
    save = FolderSave(tensors, path, about={"world_size": world})
    save.plan(GroupCoordinator())
    save.write(GroupCoordinator(), {"epoch": 3})


def _load_under(layout, path):
    reader = FolderReader(path)
    verify_files(path, reader.manifest, share=dist.get_rank(), shares=dist.get_world_size())
    for name in SHAPES:
        expected = _held(layout, dist.get_world_size(), name, _values(name))
        shards = _held(layout, dist.get_world_size(), name, torch.zeros(SHAPES[name]))
        reader.read_into(f"model.{name}", shards)
        for part, wanted in zip(shards.parts, expected.parts, strict=True):
            assert torch.equal(part.values, wanted.values), (layout, name)
    return reader.trainer_state()


def _names(world):
    return ["plain", "rows", "columns", "copies", "flat"] + (
        ["grid", "both", "hybrid", "strided"] if world == 4 else []
    )


@pytest.mark.parametrize("world", [2, 4])
def test_saved_in_any_layout_it_loads_in_any(world, tmp_path):
    for layout in _names(world):
        run_ranks(world, _save_under, layout, str(tmp_path / layout))
        assert sorted(os.listdir(tmp_path)) == sorted(_names(world)[: _names(world).index(layout) + 1])
        state = {f"model.{name}": torch.zeros(shape) for name, shape in SHAPES.items() if name != "none"}
        dcp.load(state, checkpoint_id=str(tmp_path / layout), no_dist=True)
        for key, value in state.items():
            assert torch.equal(value, _values(key.removeprefix("model."))), (layout, key)
    for source in _names(world):
        for target in ("plain", "rows", "flat"):
            states = run_ranks(6 - world, _load_under, target, str(tmp_path / source))
            assert states[0] == {"epoch": 3}


def _shares(path):
    _save_under("plain", path)


def test_ranks_that_hold_the_same_share_the_writing(tmp_path):
    run_ranks(2, _shares, str(tmp_path / "a"))
    files = Manifest.read(tmp_path / "a").files
    assert {"__0_0.distcp", "__1_0.distcp"} <= set(files)


def _save_with_a_hole(path):
    held = shards_of(torch.ones(4)) if dist.get_rank() == 0 else Shards((4,), torch.float32, ())
    bad = Shards((4,), torch.float32, ())
    save = FolderSave({"model.good": held, "model.hole": bad}, path)
    with pytest.raises((ValueError, RuntimeError), match=r"model\.hole have 0 elements in total"):
        save.plan(GroupCoordinator())


def test_a_tensor_that_nobody_holds_is_refused_on_every_rank(tmp_path):
    run_ranks(2, _save_with_a_hole, str(tmp_path / "a"))
    assert os.listdir(tmp_path) == []


def _fail_on_one(path):
    save = FolderSave({"model.a": shards_of(torch.ones(1000)), "model.b": shards_of(torch.ones(1000))}, path)
    save.plan(GroupCoordinator())
    if dist.get_rank() == 1:
        save._folder = "/proc/nowhere"
    with pytest.raises((OSError, RuntimeError)) as caught:
        save.write(GroupCoordinator(), {})
    return str(caught.value)


def test_a_rank_that_cannot_write_fails_the_save_everywhere_and_the_old_one_stays(tmp_path):
    run_ranks(2, _save_under, "rows", str(tmp_path / "a"))
    before = (tmp_path / "a" / MANIFEST).read_bytes()
    first, _ = run_ranks(2, _fail_on_one, str(tmp_path / "a"))
    assert "/proc/nowhere" in first
    assert (tmp_path / "a" / MANIFEST).read_bytes() == before
    assert os.listdir(tmp_path) == ["a"]


def _elsewhere(path):
    """Rank 1 writes to a folder that rank 0 does not see, like a node-local filesystem."""
    save = FolderSave({"model.a": shards_of(torch.ones(1000)), "model.b": shards_of(torch.ones(1000))}, path)
    save.plan(GroupCoordinator())
    if dist.get_rank() == 1:
        save._folder = f"{path}-elsewhere"
    with pytest.raises(RuntimeError, match="needs a filesystem that all nodes share"):
        save.write(GroupCoordinator(), {})


def test_shards_that_the_first_rank_cannot_see_are_refused_with_the_reason(tmp_path):
    run_ranks(2, _elsewhere, str(tmp_path / "a"))
    assert not (tmp_path / "a").exists()


def _over_the_store(path):
    exchange = StoreCoordinator(
        dist.distributed_c10d._get_default_store(), name=path, rank=dist.get_rank(), world_size=2, timeout_s=30
    )
    save = FolderSave({"model.a": _held("rows", 2, "even", _values("even"))}, path)
    save.plan(GroupCoordinator())
    save.stage()
    save.write(exchange, {"epoch": 1})


def test_saved_over_the_store_without_collectives(tmp_path):
    run_ranks(2, _over_the_store, str(tmp_path / "a"))
    assert torch.equal(FolderReader(tmp_path / "a").read("model.a"), _values("even"))


def test_damage_is_found_and_named(tmp_path):
    run_ranks(2, _save_under, "rows", str(tmp_path / "a"))
    manifest = Manifest.read(tmp_path / "a")
    verify_files(tmp_path / "a", manifest)
    for name in manifest.files:
        path = tmp_path / "a" / name
        content = path.read_bytes()
        for harm, reason in (
            (content[:-1], "bytes"),
            (content[:-9] + bytes([content[-9] ^ 1]) + content[-8:], "checksum"),
        ):
            path.write_bytes(harm)
            with pytest.raises(DamagedCheckpointError, match=rf"{name} .*{reason}"):
                verify_files(tmp_path / "a", manifest)
        path.unlink()
        with pytest.raises(DamagedCheckpointError, match=f"{name} is missing"):
            verify_files(tmp_path / "a", manifest)
        path.write_bytes(content)
    path = tmp_path / "a" / MANIFEST
    outer = json.loads(path.read_text())
    outer["content"]["tensors"]["model.even"]["boxes"][0]["start"] += 4
    path.write_text(json.dumps(outer))
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json does not match"):
        FolderReader(tmp_path / "a")
