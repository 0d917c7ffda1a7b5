"""Every registered strategy on CUDA: ranks on one GPU over gloo, and one rank over NCCL, against one process."""

import functools

import pytest
import torch

from lightning_pardist.registry import TABLE
from tests.helpers.gpu import SharedGPU
from tests.helpers.parity import assert_close
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import train
from tests.integration.test_matrix import AS_LIGHTNING, STRATEGIES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

#: name of the column -> (module arguments, Trainer arguments, strategy settings, tolerance)
FEATURES = {
    "sgd": ({}, {"precision": "64-true"}, {}, 1e-9),
    "float32": ({"optimizer": "adamw"}, {}, {}, 1e-5),
    "float64": ({"optimizer": "fused"}, {"precision": "64-true"}, {}, 1e-9),
    "accumulate": ({}, {"precision": "64-true", "accumulate_grad_batches": 2, "gradient_clip_val": 0.05}, {}, 1e-9),
    "checkpointing": ({}, {"precision": "64-true"}, {"activation_checkpointing": "auto"}, 1e-9),
    "bf16-mixed": ({}, {"precision": "bf16-mixed"}, {}, 2e-2),
    "16-mixed": ({}, {"precision": "16-mixed", "gradient_clip_val": 1.0}, {}, 1e-2),
}

#: Strategies that need settings of their own on two ranks.
SETTINGS = {
    "pardist_zero3": {"min_unit_size_mb": 0},
    "pardist_fsdp": {"min_unit_size_mb": 0},
    "pardist_zero3_offload": {"min_unit_size_mb": 0, "offload_window_mb": 0.25},
    "pardist_zero3_nvme": {"min_unit_size_mb": 0, "offload_window_mb": 0.25},
    "pardist_zero2_offload": {"offload_window_mb": 0.25},
    "pardist_hsdp": {"data_shard_size": 2, "min_unit_size_mb": 0},
    "pardist_cp": {"sequence_dim": 1},
    "pardist_cp_zero3": {"sequence_dim": 1, "data_settings": {"min_unit_size_mb": 0}},
    "pardist_3d": {"pipeline_parallel_size": 2, "tensor_parallel_size": 1},
    "pardist_local_sgd": {"sync_every": 1},
    "pardist_auto": {"strategies": ["pardist_zero2"]},
}
#: Strategies that do not equal one process, or start their ranks themselves.
OTHERS = {
    *("pardist_ddp_bf16", "pardist_ddp_fp16", "pardist_ddp_powersgd", "pardist_ps_async", "pardist_diloco"),
    *("pardist_ddp_spawn", "pardist_ddp_fork", "pardist_ddp_notebook"),
}
#: Strategies and rows that split the module into four stages.
FOUR_STAGES = ("pardist_pp_interleaved", "pardist_pp_zb", "pp-4", "pp_zb-4")
ISLANDS = ("pardist_local_sgd",)
NAMES = [entry.name for entry in TABLE if entry.name not in OTHERS]


def _make(name, **settings):
    entry = next(entry for entry in TABLE if entry.name == name)
    return entry.make(**entry.preset | SETTINGS.get(name, {}) | settings)


def _modules(name, feature="float64"):
    if feature == "checkpointing":
        return () if name.startswith("pardist_ep") or name in ISLANDS else ("gpt",)
    if name.startswith("pardist_cp"):
        return ("gpt", "large_embedding")
    if name.startswith("pardist_ep"):
        return ("experts",)
    if name in ISLANDS:
        # Equal to one process only where a step is linear in gradients.
        return ("mnist",) if feature == "sgd" else ()
    if name == "pardist_dp":
        return ("mnist", "gpt")
    if name in FOUR_STAGES:
        return ("gpt",)
    return ("mnist", "gpt", "param_groups", "large_embedding")


def _column(strategy, devices, feature, modules):
    module_kwargs, trainer_kwargs, _, _ = FEATURES[feature]
    trainer_kwargs = {"accelerator": SharedGPU(), **trainer_kwargs}
    return {name: train(strategy, devices, name, module_kwargs, trainer_kwargs) for name in modules}


@functools.cache
def _expected(module, feature):
    return _column("auto", 1, feature, (module,))[module]


def _check(results, feature, *, optimizer=True):
    tolerance = FEATURES[feature][3]
    for rank, of_rank in enumerate(results):
        for module, got in of_rank.items():
            want = _expected(module, feature)
            # In half precision small biases are noise: only losses and metrics are compared here.
            for part in ("losses", "weights", "metrics") if tolerance < 1e-3 else ("losses", "metrics"):
                assert_close(got[part], want[part], rtol=tolerance)
            if rank == 0 and optimizer and tolerance < 1e-3:
                assert_close(got["optimizer"], want["optimizer"], rtol=max(tolerance, 1e-6))


#: Excludes combinations that do not equal one process, or lack repeated blocks.
CELLS = [(name, feature) for name in NAMES for feature in FEATURES if _modules(name, feature)]


@pytest.mark.parametrize(("name", "feature"), CELLS)
def test_two_ranks_on_one_gpu(name, feature):
    strategy = functools.partial(_make, name, **FEATURES[feature][2])
    results = run_ranks(1 if name == "pardist_dp" else 2, _column, strategy, 2, feature, _modules(name, feature))
    _check(results, feature, optimizer=name not in ISLANDS)


@pytest.mark.parametrize("row", [row for row, (_, devices) in STRATEGIES.items() if devices == 4])
def test_four_ranks_on_one_gpu(row):
    strategy, devices = STRATEGIES[row]
    name = row if row in FOUR_STAGES else "pardist_" + row.partition("_")[0].partition("-")[0]
    _check(run_ranks(devices, _column, strategy, devices, "accumulate", _modules(name)), "accumulate")


@pytest.mark.parametrize("feature", ["float64", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", NAMES)
def test_one_rank_over_nccl(name, feature):
    settings = FEATURES[feature][2]
    alone = {"pardist_hsdp": {"data_shard_size": 1}, "pardist_3d": {"pipeline_parallel_size": 1}}.get(name, {})
    strategy = functools.partial(_make, name, **settings, **alone)
    _check([_column(strategy, 1, feature, _modules(name, "sgd"))], feature, optimizer=name not in ISLANDS)


def _as_lightning(feature):
    modules, module_kwargs, trainer_kwargs = AS_LIGHTNING[feature]
    # By default cuDNN's backward of a convolution sums in another order in each run.
    trainer_kwargs = {"accelerator": SharedGPU(), "deterministic": "warn", **trainer_kwargs}
    return {
        name: [
            train(strategy, 2, name, module_kwargs, trainer_kwargs)
            for strategy in ("pardist_ddp", "ddp_find_unused_parameters_true")
        ]
        for name in modules
        if name != "large_embedding"  # atomics
    }


@pytest.mark.parametrize("feature", AS_LIGHTNING)
def test_as_lightnings_ddp(feature):
    first, _ = run_ranks(2, _as_lightning, feature)
    for ours, theirs in first.values():
        for part in ("losses", "weights", "optimizer"):
            assert_close(ours[part], theirs[part], rtol=1e-6)
