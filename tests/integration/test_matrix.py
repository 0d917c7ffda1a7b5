"""Strategies x modules x features against one process. A new strategy is one new row of ``STRATEGIES``."""

import functools

import pytest

from tests.helpers.parity import assert_close
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import train

#: name of the row -> (registered name, ranks)
STRATEGIES = {
    "ddp-2": ("pardist_ddp", 2),
    "ddp-4": ("pardist_ddp", 4),
    "ddp-1": ("pardist_ddp", 1),
}

#: name of the column -> (modules, module arguments, Trainer arguments)
ALL = ("classifier", "param_groups", "language", "gan", "awkward", "large_embedding")
AUTOMATIC = tuple(name for name in ALL if name != "gan")
FEATURES = {
    "sgd": (ALL, {}, {}),
    "adam": (ALL, {"optimizer": "adamw"}, {}),
    "accumulate": (AUTOMATIC, {}, {"accumulate_grad_batches": 3}),
    "clip_norm": (AUTOMATIC, {}, {"gradient_clip_val": 0.05}),
    "clip_value": (("classifier", "language"), {}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "sync_batchnorm": (("batch_norm",), {}, {"sync_batchnorm": True}),
    "float64": (("classifier", "language"), {}, {"precision": "64-true"}),
}


@functools.cache
def _expected(module, feature):
    _, module_kwargs, trainer_kwargs = FEATURES[feature]
    return train("auto", 1, module, module_kwargs, trainer_kwargs)


def _run_column(strategy, devices, feature):
    modules, module_kwargs, trainer_kwargs = FEATURES[feature]
    return {name: train(strategy, devices, name, module_kwargs, trainer_kwargs) for name in modules}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("row", STRATEGIES)
def test_same_numbers_as_one_process(row, feature):
    strategy, devices = STRATEGIES[row]
    results = run_ranks(devices, _run_column, strategy, devices, feature)
    for rank_results in results:
        for module, got in rank_results.items():
            want = _expected(module, feature)
            for part in ("losses", "weights", "metrics", "optimizer"):
                assert_close(got[part], want[part])
