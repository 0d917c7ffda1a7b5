"""A checkpoint of any strategy, format and number of ranks resumes under any other, bit for bit."""

from functools import cache

import pytest
import torch

from tests.helpers.checkpoints import STRATEGIES, run
from tests.helpers.parity import assert_close
from tests.helpers.ranks import run_ranks

SPLIT = [name for name in STRATEGIES if name not in ("one", "single")]
ALONE = [(name, 1) for name in ("one", "zero1", "zero2", "zero3", "fsdp")]
LAYOUTS = [*ALONE, *((name, world) for name in SPLIT for world in (2, 4) if "_zero" not in name or world == 4)]
FORMS = ["full", "sharded"]
#: Every strategy once as a source and once as a target, with different numbers of ranks.
QUICK = [
    (("one", 1), ("zero3", 2), "sharded"),
    (("zero3", 2), ("zero1", 4), "sharded"),
    (("zero1", 4), ("fsdp", 2), "sharded"),
    (("fsdp", 2), ("ddp", 4), "full"),
    (("ddp", 4), ("zero2", 2), "full"),
    (("zero2", 2), ("tp", 2), "sharded"),
    (("tp", 2), ("pp", 2), "sharded"),
    (("pp", 2), ("tp_zero1", 4), "sharded"),
    (("tp_zero1", 4), ("pp_zero1", 4), "sharded"),
    (("pp_zero1", 4), ("pp_zero3", 4), "full"),
    (("pp_zero3", 4), ("3d", 4), "sharded"),
    (("3d", 4), ("one", 1), "full"),
]
#: Layouts with four or eight stages, which need a deeper module.
DEEP = {("mp", 4), ("pp_interleaved", 2), ("pp_interleaved", 4)}
MATRIX = [(source, target, form) for source in LAYOUTS for target in LAYOUTS for form in FORMS]


@cache
def _uninterrupted(module_name):
    return run_ranks(1, _run, "one", 1, module_name, {"epochs": 2})[0]


def _run(name, world, module_name, settings):
    return run(name, world, module_name, **settings)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that makes and caches checkpoints after one epoch."""
    made = {}

    def get(layout, form, module_name):
        key = (layout, form, module_name)
        if key not in made:
            path = str(tmp_path_factory.mktemp("saved") / "half.ckpt")
            name, world = layout
            settings = {"epochs": 1, "save": path, "checkpoint": form}
            made[key] = path, run_ranks(world, _run, name, world, module_name, settings)[0]
        return made[key]

    return get


def _check(saved, source, target, form, module_name):
    path, half = saved(source, form, module_name)
    name, world = target
    resumed = run_ranks(world, _run, name, world, module_name, {"epochs": 2, "resume": path})[0]
    for key, value in half["weights"].items():
        assert torch.equal(resumed["loaded_weights"][key], value), key
    assert resumed["loaded_optimizer"].keys() == half["optimizer"].keys()
    for key, value in half["optimizer"].items():
        assert torch.equal(resumed["loaded_optimizer"][key], value), key
    reference = _uninterrupted(module_name)
    steps = len(resumed["losses"])
    assert_close({"loss": resumed["losses"]}, {"loss": reference["losses"][-steps:]})
    assert_close(resumed["weights"], reference["weights"])


@pytest.mark.parametrize(("source", "target", "form"), QUICK, ids=str)
def test_quick(saved, source, target, form):
    _check(saved, source, target, form, "param_groups")


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target", "form"), MATRIX, ids=str)
def test_matrix(saved, source, target, form):
    _check(saved, source, target, form, "deep_param_groups" if DEEP & {source, target} else "param_groups")


@pytest.mark.slow
@pytest.mark.parametrize("module_name", ["awkward", "batch_norm", "gan"])
@pytest.mark.parametrize(("source", "target", "form"), QUICK[:5], ids=str)
def test_awkward_modules(saved, source, target, form, module_name):
    if module_name == "batch_norm" and source[1] != target[1]:
        pytest.skip("statistics of a batch depend on its share of a rank without sync_batchnorm")
    _check(saved, source, target, form, module_name)
