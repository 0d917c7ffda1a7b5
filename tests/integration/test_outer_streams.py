"""Streaming, quantised outer synchronisation: against one process that trains the islands in turn."""

import copy
import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from lightning_pardist import HybridStrategy, LocalSGDStrategy
from lightning_pardist.engines.common.block_quantization import SliceLayout, decode, encode
from lightning_pardist.engines.outer_exchange import OuterExchange
from lightning_pardist.engines.outer_fragments import fragments_of
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, quiet_trainer
from tests.helpers.scripts import ROOT, run_script
from tests.integration.test_local_sgd import OPTIMIZERS, STEPS, Regressor, _dataset

LARGEST = {"int8": 127, "int4": 7}
GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "outer_updates.json").read_text())


def _rounded(values, kind):
    """Quantise and dequantise numbers that share scales by blocks of 2048."""
    if kind is None:
        return values
    if kind == "bf16":
        return values.bfloat16().to(values.dtype)
    found = []
    for block in values.float().split(2048):
        scale = block.abs().max() / LARGEST[kind]
        found.append(torch.round(block / scale) * scale if scale else block)
    return torch.cat(found).to(values.dtype)


class Means:
    """Quantised mean of K vectors in two stages, with error feedback to the next mean."""

    def __init__(self, islands, numel, kind, dtype):
        self.kind, self.numel, self.chunk = kind, numel, -(-numel // (2 * islands)) * 2
        self.errors = torch.zeros(islands, islands * self.chunk, dtype=dtype)
        self.mean_error = torch.zeros(islands * self.chunk, dtype=dtype)

    def __call__(self, vectors, *, exact=False):
        padded = F.pad(torch.stack(vectors), (0, self.errors.shape[1] - self.numel)) + self.errors
        if exact:
            mean = padded.mean(0) + self.mean_error
            self.errors.zero_()
            self.mean_error.zero_()
            return mean[: self.numel]
        sent = torch.stack([torch.cat([_rounded(each, self.kind) for each in row.split(self.chunk)]) for row in padded])
        self.errors = padded - sent
        mean = sent.mean(0) + self.mean_error
        rounded = torch.cat([_rounded(each, self.kind) for each in mean.split(self.chunk)])
        self.mean_error = mean - rounded
        return rounded[: self.numel]


def _build(optimizer):
    torch.manual_seed(3)
    return Regressor(optimizer)


def _simulate(islands, optimizer, every, *, kind=None, fragments=1, delay=0, mixing=0.0, outer=(1.0, 0.0)):
    models = [_build(optimizer).double()]
    models += [copy.deepcopy(models[0]) for _ in range(islands - 1)]
    optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in models]
    numbers = {param: index for index, param in enumerate(models[0].parameters())}
    parts = [[numbers[param] for param in run] for run in fragments_of(list(models[0].parameters()), fragments)]
    anchors = [param.detach().clone().requires_grad_() for param in models[0].parameters()]
    outer_step = torch.optim.SGD(anchors, lr=outer[0], momentum=outer[1], nesterov=outer[1] > 0)
    held = [list(model.parameters()) for model in models]
    means = [[Means(islands, anchors[i].numel(), kind, torch.float64) for i in part] for part in parts]
    coming, met = {}, {}

    def mean_of(index, **how):
        each = zip(parts[index], means[index], strict=True)
        return [
            mean([(anchors[i] - held[island][i]).detach().reshape(-1) for island in range(islands)], **how)
            for i, mean in each
        ]

    def take(index, pieces, share):
        for i, piece in zip(parts[index], pieces, strict=True):
            anchors[i].grad = piece.view_as(anchors[i])
        outer_step.step()
        for i in parts[index]:
            anchors[i].grad = None
            for island in range(islands):
                held[island][i].data = share * held[island][i].data + (1 - share) * anchors[i].data

    def complete(index, pieces):
        """Correct the last outer step as if it had included these pieces."""
        for i, piece in zip(parts[index], pieces, strict=True):
            momentum = outer_step.state[anchors[i]].get("momentum_buffer")
            if momentum is not None:
                momentum += piece.view_as(momentum)
            anchors[i].data -= outer[0] * (1 + outer[1]) * piece.view_as(anchors[i])
            for island in range(islands):
                held[island][i].data = anchors[i].data.clone()

    x, y = (tensor.double() for tensor in _dataset().tensors)
    for step in range(1, STEPS + 1):
        batch = torch.arange((step - 1) * BATCH, step * BATCH)
        for island, (model, step_of) in enumerate(zip(models, optimizers, strict=True)):
            mine = batch[island::islands]
            step_of.zero_grad()
            F.mse_loss(model.head(model.layers(x[mine])), y[mine]).backward()
            step_of.step()
        for index in range(len(parts)):
            begins = (index + 1) * every // len(parts)
            if step >= begins and (step - begins) % every == 0:
                before = copy.deepcopy(means[index])
                coming[index] = step + delay, mean_of(index), before
            if index in coming and coming[index][0] == step:
                take(index, coming.pop(index)[1], mixing)
                met[index] = step
    for index in range(len(parts)):
        if index in coming:
            # As if nothing had been sent.
            means[index] = coming.pop(index)[2]
        if met.get(index) == STEPS:
            complete(index, mean_of(index, exact=True))
        else:
            take(index, mean_of(index, exact=True), 0.0)
    return snapshot(models[0])


#: Optimizer, steps between synchronisations, and further settings.
CASES = {
    "fragments": ("adamw", 3, {"fragments": 3}),
    "delay": ("sgd", 4, {"fragments": 2, "fragment_sync_delay": 2, "fragment_mixing": 0.5}),
    "delay of one fragment": ("sgd", 3, {"fragment_sync_delay": 1}),
    "bf16": ("adamw", 2, {"outer_compression": "bf16"}),
    "int8": ("sgd", 2, {"outer_compression": "int8"}),
    "int4": ("adamw", 2, {"outer_compression": "int4", "outer_lr": 0.7, "outer_momentum": 0.9}),
    "all": (
        "adamw",
        4,
        {
            "outer_compression": "int4",
            "outer_lr": 0.7,
            "outer_momentum": 0.9,
            "fragments": 2,
            "fragment_sync_delay": 3,
            "fragment_mixing": 0.25,
        },
    ),
}


def _fit(names, islands, inside=None, ckpt=None):
    found = {}
    for name in names:
        optimizer, every, settings = CASES[name]
        module = _build(optimizer)
        strategy = LocalSGDStrategy(outer_parallel_size=islands, sync_every=every, **settings, **(inside or {}))
        trainer = quiet_trainer(
            strategy=strategy, devices=dist.get_world_size(), use_distributed_sampler=False, precision="64-true"
        )
        trainer.fit(module, datamodule=Data(_dataset()))
        found[name] = snapshot(module)
    return found


def _wanted(name, islands):
    optimizer, every, settings = CASES[name]
    renamed = {"outer_compression": "kind", "fragment_sync_delay": "delay", "fragment_mixing": "mixing"}
    given = {renamed.get(key, key): value for key, value in settings.items() if not key.startswith("outer_l")}
    given.pop("outer_momentum", None)
    outer = (settings.get("outer_lr", 1.0), settings.get("outer_momentum", 0.0))
    return _simulate(islands, optimizer, every, outer=outer, **given)


@pytest.mark.parametrize("islands", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_as_islands_one_after_the_other(islands):
    for got in run_ranks(islands, _fit, list(CASES), islands):
        for name in CASES:
            assert_close(got[name], _wanted(name, islands), rtol=1e-9)


@pytest.mark.push("inside2")
@pytest.mark.parametrize(
    "inside",
    [
        {"data_parallel": "zero3", "data_settings": {"min_unit_size_mb": 0}},
        pytest.param({"data_parallel": "zero2"}, marks=pytest.mark.slow),
        {"tensor_parallel_size": 2},
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_islands_of_several_ranks_end_alike(inside):
    """Quantisation blocks are those of a rank's shards: the results differ from those of whole models."""
    first, *others = run_ranks(4, _fit, ["all"], 2, inside)
    start = {name: value.double() for name, value in snapshot(_build("adamw")).items()}
    for other in others:
        assert_close(other["all"], first["all"], rtol=0.0)
    assert all(not torch.equal(first["all"][name], start[name]) for name in start)


def _saved_at_meetings(folder, compression):
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx % 2:
                trainer.save_checkpoint(f"{folder}/{compression}.ckpt")

    module = _build("adamw")
    strategy = LocalSGDStrategy(sync_every=2, outer_lr=0.7, outer_momentum=0.9, outer_compression=compression)
    options = {"devices": 2, "use_distributed_sampler": False, "precision": "64-true", "callbacks": [Save()]}
    quiet_trainer(strategy=strategy, **options).fit(module, datamodule=Data(_dataset()))
    return snapshot(module)


def test_a_checkpoint_on_a_meeting_is_no_further_outer_step(tmp_path):
    """Saving flushes the rounding errors: the run equals one without compression."""
    (want, _), (got, _) = (run_ranks(2, _saved_at_meetings, str(tmp_path), kind) for kind in (None, "int4"))
    assert_close(got, want, rtol=1e-9)


def _resumed(folder):
    """Save in the middle, with fragments in flight, and resume; and run the same without interruption."""
    optimizer, every, settings = CASES["all"]
    results = []
    for ckpt in (None, f"{folder}/half.ckpt"):
        module = _build(optimizer)
        strategy = LocalSGDStrategy(outer_parallel_size=2, sync_every=every, **settings)
        options = {"strategy": strategy, "devices": 2, "use_distributed_sampler": False}

        class Save(pl.Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, first=ckpt is None):
                if batch_idx == 2 and first:
                    trainer.save_checkpoint(f"{folder}/half.ckpt")

        quiet_trainer(**options, callbacks=[Save()]).fit(module, datamodule=Data(_dataset()), ckpt_path=ckpt)
        results.append(snapshot(module))
    return results


def test_resume_is_exact(tmp_path):
    for whole, resumed in run_ranks(2, _resumed, str(tmp_path)):
        assert_close(resumed, whole)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", "raise", "kill"])
def test_a_script_ends_whatever_is_on_its_way(fault):
    finished = run_script(str(ROOT / "tests" / "scripts" / "train.py"), "streams", "2", fault, "1")
    assert finished.code == (fault != "none"), finished.output
    said = {"none": "done 0", "raise": "the user's own mistake", "kill": "was killed by SIGKILL"}
    assert said[fault] in finished.output
    assert not finished.left


# --- codes ------------------------------------------------------------------------------------------------------------


def _golden(case):
    values = torch.tensor(case["differences"])
    exchange = OuterExchange([values.shape[-1]], group=dist.group.WORLD, kind=case["kind"], like=values)
    found = []
    for meeting in values:
        exchange.start(meeting[dist.get_rank()])
        exchange.turn()
        found.append(exchange.finish())
    return found, exchange.exact(torch.zeros(values.shape[-1]))


@pytest.mark.parametrize("case", GOLDEN, ids=[case["kind"] for case in GOLDEN])
def test_golden_updates(case):
    """Precomputed means by plain arithmetic: a sequence of synchronisations of two islands."""
    for found, left in run_ranks(2, _golden, case):
        # The error is a small remainder of much larger numbers.
        got, want = torch.stack([*found, left]), torch.tensor([*case["means"], case["left"]])
        assert_close({"means": got}, {"means": want}, rtol=1e-6)


@pytest.mark.parametrize(("kind", "bits", "error"), [("bf16", 16, 2**-8), ("int8", 8, 1 / 254), ("int4", 4, 1 / 14)])
def test_codes_are_small_and_near(kind, bits, error):
    layout = SliceLayout([30_001, 7], 2)
    values = torch.randn(30_008, generator=torch.Generator().manual_seed(2))
    data = encode(layout.rows(values), layout, kind)
    assert data.numel() <= 1.02 * values.numel() * bits / 8
    back = layout.flat(decode(data, layout, kind, torch.float32))
    assert float((back - values).abs().max()) <= 1.001 * error * float(values.abs().max())
    zeros = torch.zeros(2, layout.width)
    assert torch.equal(decode(encode(zeros, layout, kind), layout, kind, torch.float32), zeros)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_codes_of_a_tensor_depend_on_no_other(kind):
    """Tensor ranks hold replicated biases next to different shards of weights, and the replicas must stay equal."""
    bias, one, other = (torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (13, 40, 27))
    found = []
    for before in (one, other):
        layout = SliceLayout([before.numel(), bias.numel()], 3)
        rows = layout.rows(torch.cat([before, bias]))
        found.append(layout.flat(decode(encode(rows, layout, kind), layout, kind, torch.float32))[-13:])
    assert torch.equal(*found)


# --- settings ---------------------------------------------------------------------------------------------------------


def _hybrid():
    weights = []
    for strategy in (
        HybridStrategy(outer_parallel_size=2, sync_every=2, outer_settings={"outer_momentum": 0.9}),
        LocalSGDStrategy(sync_every=2, outer_momentum=0.9),
    ):
        module = _build("sgd")
        trainer = quiet_trainer(strategy=strategy, devices=2, use_distributed_sampler=False)
        trainer.fit(module, datamodule=Data(_dataset()))
        weights.append(snapshot(module))
    return weights


def test_hybrid_takes_islands():
    for got, want in run_ranks(2, _hybrid):
        assert_close(got, want, rtol=0.0)
    strategy = HybridStrategy(outer_parallel_size="node", tensor_parallel_size=2)
    strategy.num_nodes, strategy.parallel_devices = 2, [torch.device("cpu")] * 4
    assert strategy.resolve_dims(8).layout == {"outer_parallel": 2, "data_replicate": 2, "tensor_parallel": 2}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fragments": 0}, "use 1 fragment or more"),
        ({"fragments": 5, "sync_every": 4}, "are too few for fragments=5"),
        ({"fragment_sync_delay": 4, "sync_every": 4}, "a delay below"),
        ({"fragments": 2, "sync_every": "epoch"}, "Set sync_every to a number of steps"),
        ({"fragment_mixing": 0.5}, "Set a delay"),
        ({"fragments": "auto"}, "fragments='auto' is not a whole number"),
        ({"outer_settings": {"fragments": 2}}, "as separate arguments"),
        ({"outer_compression": "int2"}, "bf16, int8, int4 or None"),
    ],
)
def test_what_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        LocalSGDStrategy(**settings)
    with pytest.raises(ValueError, match="Set outer_parallel_size"):
        HybridStrategy(outer_settings={"outer_momentum": 0.9})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sync_every": 5}, "sync_every=5 is for islands, but outer_parallel_size=1. Set outer_parallel_size"),
        ({"outer_parallel_size": 2, "outer_settings": {"bogus": 1}}, "bogus is unknown. Use fragment_mixing"),
        (
            {"outer_parallel_size": 2, "outer_settings": {"sync_every": 4}},
            "steps between averages as outer_parallel_size",
        ),
    ],
)
def test_what_islands_of_a_hybrid_refuse(settings, said):
    with pytest.raises(ValueError, match=said):
        HybridStrategy(**settings)


class LastBatch(pl.Callback):
    """Records the weights after the last step, before the synchronisation at the end of training."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.weights = snapshot(pl_module)


def _at_the_end_of_an_epoch():
    found = []
    for settings in (
        {"sync_every": "epoch"},
        {"sync_every": STEPS},
        {"sync_every": "epoch", "outer_compression": None},
    ):
        module, last = _build("sgd"), LastBatch()
        strategy = LocalSGDStrategy(**{"outer_compression": "int4", **settings})
        trainer = quiet_trainer(strategy=strategy, devices=2, use_distributed_sampler=False, callbacks=[last])
        trainer.fit(module, datamodule=Data(_dataset()))
        found.append(last.weights)
    return found


def test_an_epochs_meeting_sends_few_bits():
    for by_epoch, by_steps, whole in run_ranks(2, _at_the_end_of_an_epoch):
        assert_close(by_epoch, by_steps, rtol=0.0)
        assert not torch.equal(by_epoch["head.weight"], whole["head.weight"])


def _after_an_overflow():
    values = torch.randn(100, generator=torch.Generator().manual_seed(dist.get_rank()))
    exchange = OuterExchange([100], group=dist.group.WORLD, kind="int8", like=values)
    found = []
    for each in (values, torch.where(values > 1, torch.inf, values), values):
        exchange.start(each.clone())
        exchange.turn()
        found.append(bool(exchange.finish().isfinite().all()))
    return found


def test_differences_that_are_not_finite_are_seen_once():
    assert run_ranks(2, _after_an_overflow) == [[True, False, True]] * 2
