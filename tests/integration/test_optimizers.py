"""Every optimizer under every strategy against one process, and its table in the documentation."""

import functools

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from lightning_pardist import (
    FSDPStrategy,
    HybridStrategy,
    LocalSGDStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from lightning_pardist.optim import split_groups
from tests.helpers import checkpoints
from tests.helpers.optimizers import ELEMENTWISE, JOINT, PER_TENSOR, Convex, Lamb, Looked, Trained
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, STEPS, Data, Losses, global_losses, quiet_trainer

_UNITS = {"min_unit_size_mb": 0}
_ISLANDS: dict = {"outer_parallel_size": 2}
#: name of the row -> (strategy factory, ranks)
STRATEGIES = {
    "ddp-2": ("pardist_ddp", 2),
    "zero1-2": ("pardist_zero1", 2),
    "zero2-2": ("pardist_zero2", 2),
    "zero2-3": ("pardist_zero2", 3),
    "zero3-2": (functools.partial(FSDPStrategy, **_UNITS), 2),
    "hsdp-4": (functools.partial(FSDPStrategy, data_shard_size=2, **_UNITS), 4),
    "tp-2": ("pardist_tp", 2),
    "tp_zero2-4": (functools.partial(TensorParallelStrategy, tensor_parallel_size=2, data_parallel="zero2"), 4),
    "tp_zero3-4": (
        functools.partial(TensorParallelStrategy, tensor_parallel_size=2, data_parallel="zero3", data_settings=_UNITS),
        4,
    ),
    "pp-2": ("pardist_pp", 2),
    "pp_zero2-4": (functools.partial(PipelineStrategy, pipeline_parallel_size=2, data_parallel="zero2"), 4),
    "3d-8": (
        functools.partial(
            HybridStrategy,
            pipeline_parallel_size=2,
            tensor_parallel_size=2,
            data_parallel="zero3",
            data_settings=_UNITS,
        ),
        8,
    ),
    "islands_zero2-4": (functools.partial(LocalSGDStrategy, sync_every=2, data_parallel="zero2", **_ISLANDS), 4),
    "islands_zero3-4": (
        functools.partial(LocalSGDStrategy, sync_every=2, data_parallel="zero3", data_settings=_UNITS, **_ISLANDS),
        4,
    ),
}
#: Islands do not equal one process: their reference is islands whose ranks hold complete states.
REFERENCES = {
    row: (functools.partial(LocalSGDStrategy, sync_every=2, data_parallel="ddp", **_ISLANDS), 4)
    for row in ("islands_zero2-4", "islands_zero3-4")
}
SOME = ("Adafactor", "Muon", "Shampoo (user's)", "Muon and Adam (user's)", "LBFGS")
#: Optimizers that every push runs: fewer on four ranks, none on eight.
QUICK = {
    row: SOME if devices < 4 else ("Muon and Adam (user's)", "Norm of all (user's)")
    for row, (_, devices) in STRATEGIES.items()
    if devices < 8 and row not in ("ddp-2", "zero1-2", "zero2-3", "hsdp-4", "islands_zero2-4", "islands_zero3-4")
}
#: Optimizer state created in the constructor, here for tensors that are also split.
QUICK["tp_zero2-4"] += ("Adagrad", "Counting (user's)")
QUICK["zero3-2"] += ("Counting (user's)",)
#: Families that need other modules: LBFGS has steps of size 1 and line searches in torch's own tests.
_MODULES = {"LBFGS": Convex, "SparseAdam": Looked}
SETTINGS = {"precision": "64-true", "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}


class OneUlp(pl.Callback):
    """Callback that moves every element of every gradient by one ulp, up or down."""

    def __init__(self, seed=0):
        self.seed = seed

    def on_fit_start(self, trainer, pl_module):
        generator = torch.Generator().manual_seed(self.seed)

        def moved(grad):
            if grad.is_sparse:
                grad = grad.coalesce()
                return torch.sparse_coo_tensor(grad.indices(), moved(grad.values()), grad.shape, check_invariants=False)
            up = torch.rand(grad.shape, generator=generator) < 0.5
            return torch.nextafter(grad, torch.where(up, torch.inf, -torch.inf).to(grad))

        for param in pl_module.parameters():
            if param.requires_grad:
                param.register_hook(moved)


def _train(strategy, devices, name, settings, reverse=False, also=()):
    torch.manual_seed(11)
    made = _MODULES.get(name.partition(": ")[0], Trained) if ": " in name else Trained
    module = made(name, schedule=True)
    record = Losses()
    settings = dict(settings)
    if name.startswith(("LBFGS", "SparseAdam")):
        # LBFGS evaluates its closure several times per batch, and clipping amplifies rounding there: 1e-9 under DDP.
        # torch does not clip sparse gradients.
        settings = {"precision": settings["precision"]}
    trainer = quiet_trainer(
        strategy=strategy() if callable(strategy) else strategy,
        devices=devices,
        use_distributed_sampler=False,
        callbacks=[record, *also],
        **settings,
    )
    dataset = module.dataset(BATCH * STEPS)
    if reverse:
        dataset = Subset(
            dataset, [start + BATCH - 1 - at for start in range(0, BATCH * STEPS, BATCH) for at in range(BATCH)]
        )
    trainer.fit(module, datamodule=Data(dataset))
    return {
        "losses": {"loss": global_losses(record.losses, devices)},
        "weights": snapshot(module),
        "optimizer": record.optimizer_state,
    }


@functools.cache
def expected(name):
    return _train("auto", 1, name, SETTINGS)


@functools.cache
def rounded_otherwise(name):
    """Train in one process that sums the samples of each batch in another order: the effect of rounding alone."""
    return _train("auto", 1, name, SETTINGS, reverse=True)


def moved_by_one_ulp(name, seed):
    """Train in one process whose gradients are off by one ulp."""
    return _train("auto", 1, name, SETTINGS, also=[OneUlp(seed)])


def column(strategy, devices, names):
    return {name: _train(strategy, devices, name, SETTINGS) for name in names}


def references(row, names):
    """Return the reference results of a row by name."""
    if row not in REFERENCES:
        return {name: expected(name) for name in names}
    strategy, devices = REFERENCES[row]
    return run_ranks(devices, column, strategy, devices, names)[0]


def _compare(row, names):
    strategy, devices = STRATEGIES[row]
    # Dozens of runs in one call.
    results = run_ranks(devices, column, strategy, devices, names, timeout_s=60.0 * devices)
    wanted = references(row, names)
    for rank, of_rank in enumerate(results):
        for name, got in of_rank.items():
            want = wanted[name]
            parts = ("losses", "weights", "optimizer") if rank == 0 else ("losses", "weights")
            for part in parts:
                assert_close(got[part], want[part], rtol=1e-9)


@pytest.mark.push("zero3-2", "pp-2")
@pytest.mark.parametrize("row", QUICK)
def test_some_optimizers_under_every_strategy(row):
    _compare(row, QUICK[row])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", STRATEGIES)
def test_every_optimizer_under_every_strategy(row):
    _compare(row, (*ELEMENTWISE, *PER_TENSOR, *JOINT))


# --- groups -----------------------------------------------------------------------------------------------------------


class Grouped(Trained):
    """Computes parameter groups before it is sharded, and uses them afterwards."""

    def setup(self, stage):
        self.groups = split_groups(self, next(iter(DataLoader(self.dataset(4), batch_size=4))))

    def configure_optimizers(self):
        return Lamb([{"params": self.groups.matrices, "lr": 0.05}, {"params": self.groups.rest, "lr": 0.01}])


def _grouped(strategies, devices):
    found = []
    for strategy in strategies:
        torch.manual_seed(5)
        module, record = Grouped("LAMB (user's)"), Losses()
        trainer = quiet_trainer(
            strategy=strategy, devices=devices, use_distributed_sampler=False, callbacks=[record], precision="64-true"
        )
        trainer.fit(module, datamodule=Data(module.dataset(BATCH * STEPS)))
        found.append((snapshot(module), sorted(module.groups.roles.items())))
    return found


def test_groups_are_found_before_a_module_is_sharded():
    ((wanted, roles),) = _grouped(["auto"], 1)
    assert {role for _, role in roles} == {"matrix", "embedding", "head", "vector"}
    for of_rank in run_ranks(2, _grouped, ["pardist_zero2", "pardist_zero3", "pardist_pp"], 2):
        for got, names in of_rank:
            assert names == roles
            assert_close(got, wanted, rtol=1e-9)


# --- checkpoints ------------------------------------------------------------------------------------------------------

#: Source, target, checkpoint format.
CHANGES = [
    (("zero2", 2), ("zero2", 2), "full"),
    (("zero2", 2), ("zero3", 2), "sharded"),
    (("zero3", 2), ("tp", 2), "full"),
    (("tp", 2), ("pp", 2), "sharded"),
    (("pp_zero1", 4), ("tp_zero3", 4), "sharded"),
    (("tp_zero3", 4), ("one", 1), "full"),
    (("one", 1), ("zero1", 3), "sharded"),
]


def _half(name, world, optimizer, settings):
    return checkpoints.run(name, world, "trained_by", optimizer=optimizer, **settings)


@functools.cache
def _whole_run(optimizer):
    return checkpoints.run("single", 1, "trained_by", optimizer=optimizer, epochs=2)


def _check_change(folder, source, target, form, optimizer):
    path = str(folder / "half.ckpt")
    half = run_ranks(source[1], _half, *source, optimizer, {"epochs": 1, "save": path, "checkpoint": form})[0]
    resumed = run_ranks(target[1], _half, *target, optimizer, {"epochs": 2, "resume": path})[0]
    for part, loaded in (("weights", "loaded_weights"), ("optimizer", "loaded_optimizer")):
        assert resumed[loaded].keys() == half[part].keys()
        for key, value in half[part].items():
            assert torch.equal(resumed[loaded][key], value), key
    assert half["optimizer"]
    assert_close(resumed["weights"], _whole_run(optimizer)["weights"])


@pytest.mark.parametrize(("source", "target", "form"), CHANGES[1:4], ids=str)
def test_state_of_whole_tensors_opens_anywhere(tmp_path, source, target, form):
    _check_change(tmp_path, source, target, form, "Muon and Adam (user's)")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [*PER_TENSOR, "Norm of all (user's)"])
@pytest.mark.parametrize(("source", "target", "form"), CHANGES, ids=str)
def test_every_state_opens_anywhere(tmp_path, source, target, form, optimizer):
    _check_change(tmp_path, source, target, form, optimizer)
