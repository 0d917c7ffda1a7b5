"""Strategies x modules x features against one process. A new strategy is one new row of ``STRATEGIES``."""

import functools

import pytest

from lightning_pardist import (
    AutoStrategy,
    ContextParallelStrategy,
    ExpertParallelStrategy,
    FSDPStrategy,
    HybridStrategy,
    LocalSGDStrategy,
    ParameterServerStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from tests.helpers.parity import assert_close
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.runs import train

#: name of the row -> (registered name or strategy factory, ranks)
STRATEGIES = {
    "ddp-2": ("pardist_ddp", 2),
    "ddp-4": ("pardist_ddp", 4),
    "ddp-1": ("pardist_ddp", 1),
    "zero1-2": ("pardist_zero1", 2),
    "zero1-4": ("pardist_zero1", 4),
    "zero2-2": ("pardist_zero2", 2),
    "zero2-4": ("pardist_zero2", 4),
    "zero3-2": ("pardist_zero3", 2),
    "zero3-4": ("pardist_zero3", 4),
    # Each rank serves an equal share of everything.
    "ps-2": ("pardist_ps", 2),
    # Two workers, and a dedicated server that makes the updates.
    "ps_dedicated-3": (functools.partial(ParameterServerStrategy, dedicated_servers=1), 3),
    # Factories set a small unit size: with the default, all parameters of these modules would belong to the root.
    "fsdp-2": (functools.partial(FSDPStrategy, min_unit_size_mb=0), 2),
    "hsdp-4": (functools.partial(FSDPStrategy, min_unit_size_mb=0, data_shard_size=2), 4),
    "tp-2": ("pardist_tp", 2),
    "tp-4": ("pardist_tp", 4),
    "tp-sequence-2": (functools.partial(TensorParallelStrategy, sequence_parallel=True), 2),
    "tp-ddp-4": (functools.partial(TensorParallelStrategy, tensor_parallel_size=2), 4),
    "tp-zero1-4": (functools.partial(TensorParallelStrategy, tensor_parallel_size=2, data_parallel="zero1"), 4),
    "tp-zero2-4": (functools.partial(TensorParallelStrategy, tensor_parallel_size=2, data_parallel="zero2"), 4),
    "tp-zero3-4": (
        functools.partial(
            TensorParallelStrategy,
            tensor_parallel_size=2,
            data_parallel="zero3",
            data_settings={"min_unit_size_mb": 0},
        ),
        4,
    ),
    # The sequence is shorter than the batch is large, hence an explicit dim.
    "cp-2": (functools.partial(ContextParallelStrategy, sequence_dim=1), 2),
    "cp_ddp-4": (functools.partial(ContextParallelStrategy, context_parallel_size=2, sequence_dim=1), 4),
    "cp_zero3-4": (
        functools.partial(
            ContextParallelStrategy,
            context_parallel_size=2,
            sequence_dim=1,
            data_parallel="zero3",
            data_settings={"min_unit_size_mb": 0},
        ),
        4,
    ),
    "ep-2": ("pardist_ep", 2),
    "ep_zero2-4": (functools.partial(ExpertParallelStrategy, expert_parallel_size=2, data_parallel="zero2"), 4),
    "ep_zero3-4": (
        functools.partial(
            ExpertParallelStrategy,
            expert_parallel_size=2,
            data_parallel="zero3",
            data_settings={"min_unit_size_mb": 0},
        ),
        4,
    ),
    "mp-2": ("pardist_mp", 2),
    "pp_tp-4": (functools.partial(HybridStrategy, pipeline_parallel_size=2, tensor_parallel_size=2), 4),
    "pp_tp_zero1-8": (
        functools.partial(HybridStrategy, pipeline_parallel_size=2, tensor_parallel_size=2, data_parallel="zero1"),
        8,
    ),
    "pp-2": ("pardist_pp", 2),
    "pp_gpipe-2": ("pardist_pp_gpipe", 2),
    "pp_interleaved-2": ("pardist_pp_interleaved", 2),
    "pp_zb-2": ("pardist_pp_zb", 2),
    "pp-4": ("pardist_pp", 4),
    "pp_zb-4": ("pardist_pp_zb", 4),
    "pp_ddp-4": (functools.partial(PipelineStrategy, pipeline_parallel_size=2, num_microbatches=3), 4),
    "pp_zero1-4": (functools.partial(PipelineStrategy, pipeline_parallel_size=2, data_parallel="zero1"), 4),
    "pp_zero2-4": (functools.partial(PipelineStrategy, pipeline_parallel_size=2, data_parallel="zero2"), 4),
    "pp_zero3-4": (
        functools.partial(
            PipelineStrategy, pipeline_parallel_size=2, data_parallel="zero3", data_settings={"min_unit_size_mb": 0}
        ),
        4,
    ),
    "pp_zero3_kept-4": (
        functools.partial(
            PipelineStrategy,
            pipeline_parallel_size=2,
            schedule="gpipe",
            data_parallel="zero3",
            data_settings={"min_unit_size_mb": 0, "reshard_after_forward": False, "accumulate": "unsharded"},
        ),
        4,
    ),
    "pp_hsdp-8": (
        functools.partial(
            HybridStrategy,
            pipeline_parallel_size=2,
            data_parallel="zero3",
            data_shard_size=2,
            data_settings={"min_unit_size_mb": 0},
        ),
        8,
    ),
    "pp_tp_zero3-8": (
        functools.partial(
            HybridStrategy,
            pipeline_parallel_size=2,
            tensor_parallel_size=2,
            data_parallel="zero3",
            data_settings={"min_unit_size_mb": 0},
        ),
        8,
    ),
}

#: A single candidate makes the selection the same on every machine.
STRATEGIES["auto-2"] = (functools.partial(AutoStrategy, strategies=["pardist_zero2"]), 2)
#: Rows whose devices are threads of fewer processes.
PROCESSES = {"dp-2": 1, "dp-3": 1}
STRATEGIES |= {"dp-2": ("pardist_dp", 2), "dp-3": ("pardist_dp", 3)}

#: Rows with separate optimizer states per rank, which equal one process only where a step is linear in gradients.
ISLANDS = {"local_sgd-2": ("sgd", "accumulate")}
#: Ranks of rows without batches, and thus without losses.
ONLY_SERVE = {"ps_dedicated-3": (2,)}
#: Modules that train with Adam, whatever the column.
ADAPTIVE = ("gpt", "param_groups")
STRATEGIES["local_sgd-2"] = (functools.partial(LocalSGDStrategy, sync_every=1), 2)

#: name of the column -> (modules, module arguments, Trainer arguments)
ALL = ("mnist", "gpt", "param_groups", "gan", "awkward", "large_embedding")
AUTOMATIC = tuple(name for name in ALL if name != "gan")
FEATURES = {
    "sgd": (ALL, {}, {}),
    "adam": (tuple(name for name in ALL if name != "mnist"), {"optimizer": "adamw"}, {}),
    # Adam amplifies gradients that are pure rounding noise: 1.07e-5 of a weight in fp32, 2e-14 in fp64.
    "adam64": (("mnist",), {"optimizer": "adamw"}, {"precision": "64-true"}),
    "accumulate": (AUTOMATIC, {}, {"accumulate_grad_batches": 3}),
    "clip_norm": (AUTOMATIC, {}, {"gradient_clip_val": 0.05}),
    "clip_value": (("classifier", "gpt"), {}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "sync_batchnorm": (("batch_norm",), {}, {"sync_batchnorm": True}),
    # 18 layers of batch norm over few samples amplify rounding by thousands: fp64 removes that.
    "sync_batchnorm64": (("cifar",), {}, {"sync_batchnorm": True, "precision": "64-true"}),
    "float64": (("classifier", "gpt"), {}, {"precision": "64-true"}),
}


#: Modules that a row refuses, and why.
_BY_PIPELINES = {"gan": "optimizes by hand", "awkward": "does not call the same layers in every step"}
_TOO_SMALL = dict.fromkeys(("classifier", "param_groups", "large_embedding"), "the step calls only [23] unit")
_FOUR_STAGES = ("pp_interleaved-2", "pp-4", "pp_zb-4")
REFUSED = {row: _BY_PIPELINES for row in STRATEGIES if row.startswith("pp")}
REFUSED |= {row: {"gan": "optimizes by hand"} for row in PROCESSES}
_NO_SEQUENCE = ("mnist", "cifar", "classifier", "param_groups", "batch_norm", "gan", "awkward")
REFUSED |= {row: dict.fromkeys(_NO_SEQUENCE, "found no sequence") for row in STRATEGIES if row.startswith("cp")}
#: Modules that replace a column's own in rows that refuse those.
INSTEAD = {row: ("experts",) for row in STRATEGIES if row.startswith("ep")}
_NO_EXPERTS = tuple(dict.fromkeys(name for names, _, _ in FEATURES.values() for name in names))
REFUSED |= {row: dict.fromkeys(_NO_EXPERTS, "No experts were found") for row in INSTEAD}
REFUSED |= dict.fromkeys(_FOUR_STAGES, _BY_PIPELINES | _TOO_SMALL)
#: Columns of a row that every push runs, if not all; `make test-all` runs the rest.
QUICK = {
    "ddp-1": ("adam",),
    "ddp-2": ("adam", "accumulate", "clip_value", "sync_batchnorm"),
    "ddp-4": (),
    "dp-2": ("accumulate",),
    "dp-3": (),
    "zero1-2": ("clip_norm",),
    "zero1-4": (),
    "zero2-2": ("clip_norm", "float64"),
    "zero2-4": (),
    "ps-2": ("clip_norm",),
    "ps_dedicated-3": ("clip_norm",),
    "fsdp-2": ("adam", "sync_batchnorm"),
    "pp-2": ("accumulate",),
    "zero3-2": ("adam", "clip_norm"),
    "zero3-4": (),
    "tp-2": ("adam", "accumulate", "sync_batchnorm"),
    "pp_tp-4": (),
    "pp_tp_zero1-8": (),
    "tp-4": (),
    "tp-sequence-2": ("sgd",),
    "tp-ddp-4": (),
    "tp-zero1-4": (),
    "tp-zero2-4": (),
    "tp-zero3-4": (),
    "cp-2": ("adam", "accumulate", "clip_norm"),
    "ep-2": ("adam", "clip_value"),
    "ep_zero2-4": (),
    "ep_zero3-4": (),
    "cp_ddp-4": (),
    "cp_zero3-4": (),
    "pp_gpipe-2": ("adam",),
    "pp_interleaved-2": ("clip_norm",),
    "pp_zb-2": (),
    "mp-2": ("adam", "sync_batchnorm"),
    "pp-4": (),
    "pp_zb-4": (),
    "pp_ddp-4": (),
    "pp_zero1-4": (),
    "pp_zero2-4": (),
    "pp_zero3-4": (),
    "pp_zero3_kept-4": (),
    "pp_hsdp-8": (),
    "auto-2": (),
    "pp_tp_zero3-8": (),
}
#: Cells of which every push runs one module.
ONE_MODULE = {("pp_tp_zero3-8", "sgd"): "gpt"}


@functools.cache
def _expected(module, feature):
    _, module_kwargs, trainer_kwargs = FEATURES[feature]
    return train("auto", 1, module, module_kwargs, trainer_kwargs)


def _run_column(strategy, devices, feature, modules):
    _, module_kwargs, trainer_kwargs = FEATURES[feature]
    return {name: train(strategy, devices, name, module_kwargs, trainer_kwargs) for name in modules}


def _cells():
    for row, (_, devices) in STRATEGIES.items():
        for feature, (_, _, trainer_kwargs) in FEATURES.items():
            apart = row != "pp-2" and row.startswith(("pp", "dp", "cp", "ep"))
            if apart and "sync_batchnorm" in trainer_kwargs:
                continue  # too few layers for four stages, refused, or no sequence
            if feature not in ISLANDS.get(row, FEATURES):
                continue
            # On four ranks every push runs the most distinctive column.
            quick = QUICK.get(row, ("clip_norm",) if devices == 4 else tuple(FEATURES))
            marks = () if feature in quick else pytest.mark.slow
            yield pytest.param(row, feature, (), id=f"{row}-{feature}", marks=marks)
    for (row, feature), module in ONE_MODULE.items():
        yield pytest.param(row, feature, (module,), id=f"{row}-{feature}-{module}")


@pytest.mark.parametrize(("row", "feature", "only"), list(_cells()))
def test_same_numbers_as_one_process(row, feature, only):
    strategy, devices = STRATEGIES[row]
    modules = [name for name in FEATURES[feature][0] if name not in REFUSED.get(row, {})]
    modules = [*(only or INSTEAD.get(row, modules))]
    if row in ISLANDS:
        modules = [name for name in modules if name not in ADAPTIVE]
    world_size = PROCESSES.get(row, devices)
    results = run_ranks(
        world_size, _run_column, strategy, devices, feature, modules, timeout_s=max(120, 30 * world_size)
    )
    for rank, rank_results in enumerate(results):
        for module, got in rank_results.items():
            want = _expected(module, feature)
            for part in ("losses", "weights", "metrics")[rank in ONLY_SERVE.get(row, ()) :]:
                assert_close(got[part], want[part])
            if rank == 0 and row not in ISLANDS:  # only the rank that writes checkpoints has the optimizer state
                assert_close(got["optimizer"], want["optimizer"])


@pytest.mark.parametrize(
    ("row", "module"),
    [("pp-2", "gan"), ("pp-2", "awkward"), ("pp_interleaved-2", "classifier"), ("cp-2", "classifier"), ("ep-2", "gpt")],
)
def test_refused_with_the_reason(row, module):
    strategy, devices = STRATEGIES[row]
    with pytest.raises(RankFailed, match=REFUSED[row][module]):
        run_ranks(devices, _run_column, strategy, devices, "sgd", [module])


#: Cases where one process is no reference (rounding, per-rank batch norm): bit for bit Lightning's ddp.
AS_LIGHTNING = {
    "sgd": (("mnist", "gan", "awkward", "batch_norm"), {}, {}),
    "bf16-mixed": (("mnist", "gpt", "awkward"), {}, {"precision": "bf16-mixed"}),
    "16-mixed": (("mnist",), {}, {"precision": "16-mixed"}),
    "bf16-true": (("mnist", "gpt"), {}, {"precision": "bf16-true"}),
    "accumulate": (("mnist", "gpt"), {}, {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}),
}


def _both(feature):
    modules, module_kwargs, trainer_kwargs = AS_LIGHTNING[feature]
    return {
        name: [
            train(strategy, 2, name, module_kwargs, trainer_kwargs)
            for strategy in ("pardist_ddp", "ddp_find_unused_parameters_true")
        ]
        for name in modules
    }


@pytest.mark.push("sgd", "bf16-mixed", "16-mixed")
@pytest.mark.parametrize("feature", AS_LIGHTNING)
def test_bit_for_bit_as_lightnings_ddp(feature):
    first, second = run_ranks(2, _both, feature)
    for module, (ours, theirs) in first.items():
        for part in ("losses", "weights", "optimizer"):
            assert_close(ours[part], theirs[part], rtol=0.0)
        # Lightning leaves each rank its own running statistics; here all have rank zero's.
        assert_close(second[module][0]["weights"], ours["weights"], rtol=0.0)
