"""``pardist_tp`` under a Trainer: results and side effects of a run, supported user code, and refusals."""

import functools
import itertools

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_pardist import PeerFailedError, TensorParallelStrategy
from lightning_pardist.axes.tensor import TensorAxis
from lightning_pardist.engines.tensor import apply_layout, plan_layout, unsplit_module
from recipes.gpt.model import GPT
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import cpu_mesh, run_ranks
from tests.helpers.runs import quiet_trainer
from tests.helpers.zoo import ZOO, build


def _data(length=24, width=8):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(length, width, generator=generator)
    return TensorDataset(x, x.flip(1).cumsum(1))


def _loader(**kwargs):
    return DataLoader(_data(), batch_size=4, **kwargs)


class Net(pl.LightningModule):
    """Pair of linears that are split together; subclasses add user patterns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        self.losses = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return {"hidden": self.net[1](self.net[0](batch[0])), "out": self(batch[0])}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def _fit(module, strategy="auto", devices=1, loader=None, ckpt_path=None, **kwargs):
    strategy = strategy() if callable(strategy) else strategy
    trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False, **kwargs)
    trainer.fit(module, _loader() if loader is None else loader, ckpt_path=ckpt_path)
    return trainer


# --- what is left behind ----------------------------------------------------------------------------------------


def _afterwards(path, one_process):
    module = Net()
    trainer = _fit(module, "pardist_tp", 2, ckpt_path=one_process, max_epochs=2)
    plain = all(type(p) is nn.Parameter for p in module.parameters())
    predicted = quiet_trainer(strategy="pardist_tp", devices=2, use_distributed_sampler=False).predict(
        module, _loader()
    )
    trainer.save_checkpoint(path)
    with torch.no_grad():
        out = module(torch.ones(2, 8))
    return plain, out, predicted, snapshot(module)


def test_checkpoints_go_both_ways_and_the_module_is_plain_afterwards(tmp_path):
    reference = Net()
    trainer = _fit(reference)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    expected = Net()
    _fit(expected, ckpt_path=tmp_path / "one.ckpt", max_epochs=2).save_checkpoint(tmp_path / "expected.ckpt")
    for plain, out, predicted, weights in run_ranks(2, _afterwards, tmp_path / "tp.ckpt", tmp_path / "one.ckpt"):
        assert plain
        assert_close(weights, snapshot(expected))
        assert torch.allclose(out, expected(torch.ones(2, 8)), atol=1e-5)
        (x, _), first = next(iter(_loader())), predicted[0]
        assert type(first["hidden"]) is torch.Tensor
        assert first["hidden"].shape == (4, 32)
        assert torch.allclose(first["out"], expected(x), atol=1e-5)
    ours, theirs = (torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("tp", "expected"))
    assert_close(ours["state_dict"], theirs["state_dict"])
    for index, entry in theirs["optimizer_states"][0]["state"].items():
        assert_close(ours["optimizer_states"][0]["state"][index], entry)


class Tracing(Net):
    """Changes everything that a step may change besides parameters."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.seen = 0
        self.total = torchmetrics.SumMetric()
        self.cache = {}
        self.drawn = []

    def on_train_epoch_start(self):
        self.prepared = True

    def training_step(self, batch, batch_idx):
        assert self.prepared
        self.seen += 1
        self.cache[self.seen] = batch_idx
        self.drawn.append(torch.rand(()).item())
        self.total(len(batch[0]))
        self.log("total", self.total, on_step=False, on_epoch=True)
        self.log("hidden", self.net[0](batch[0]).mean())
        return F.mse_loss(self(self.norm(batch[0])), batch[1])


class Counting(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        self.norm = pl_module.norm.num_batches_tracked.item()


def _no_trace(strategy, devices):
    torch.manual_seed(5)
    module, counting = Tracing(), Counting()
    loader = DataLoader(_data(), batch_size=4, shuffle=True)
    trainer = _fit(module, strategy, devices, loader, callbacks=[counting])
    metrics = {key: value.item() for key, value in trainer.callback_metrics.items()}
    return module.seen, module.cache, module.drawn, counting.norm, metrics, snapshot(module)


def test_the_rehearsal_leaves_no_trace():
    seen, cache, drawn, norm, metrics, weights = _no_trace("auto", 1)
    for other in run_ranks(2, _no_trace, "pardist_tp", 2):
        assert other[:4] == (seen, cache, drawn, norm)
        assert other[4] == pytest.approx(metrics)
        assert metrics["total"] == 24
        assert_close(other[5], weights)


class Stream(IterableDataset):
    def __init__(self):
        self.position = 0

    def __iter__(self):
        for row in itertools.islice(_data(), 12):
            self.position += 1
            yield row


class Once(IterableDataset):
    def __init__(self):
        self.rows = (row for row in _data())

    def __iter__(self):
        return self.rows


def _stream(strategy, devices):
    module, stream = Net(), Stream()
    _fit(module, strategy, devices, DataLoader(stream, batch_size=4))
    return stream.position, module.losses


def _once():
    alone = Net()
    _fit(alone, "pardist_tp", 2, DataLoader(Once(), batch_size=4))
    module = Net()
    batch = next(iter(_loader()))
    _fit(module, TensorParallelStrategy(sample=batch), 2, DataLoader(Once(), batch_size=4))
    return alone.losses, module.losses


def test_streams_lose_nothing():
    position, losses = _stream("auto", 1)
    for found in run_ranks(2, _stream, "pardist_tp", 2):
        assert found == (position, pytest.approx(losses, rel=1e-5))
    one = Net()
    _fit(one, loader=DataLoader(Once(), batch_size=4))
    for found in run_ranks(2, _once):
        assert found == (pytest.approx(one.losses, rel=1e-5),) * 2


# --- what user code may do --------------------------------------------------------------------------------------


class Curious(Net):
    """Reads parameters and calls parts of itself in hooks, outside of steps."""

    def __init__(self):
        super().__init__()
        self.noticed = []

    def on_before_optimizer_step(self, optimizer):
        norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
        self.log("grad_norm", norm)
        self.noticed.append(float(norm))

    def on_train_batch_start(self, batch, batch_idx):
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-0.3, 0.3)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.noticed.append(self.net[0](batch[0]).sum().item())

    def on_train_epoch_end(self):
        self.noticed.append(self(torch.ones(1, 8, dtype=self.dtype)).sum().item())
        self.noticed.append(sum(p.numel() for p in self.parameters()))

    def training_step(self, batch, batch_idx):
        penalty = sum(p.pow(2).sum() for p in self.parameters())
        return super().training_step(batch, batch_idx) + 1e-3 * penalty + self.net[0].weight.abs().max()


class Assigns(Net):
    """Sets parameters by ``p.data = ...`` in hooks: from tensors split like them, and from a whole tensor."""

    def on_train_batch_start(self, batch, batch_idx):
        for p in self.parameters():
            p.data = p.data.clamp(-0.3, 0.3)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            for p in self.net.parameters():
                p.data = torch.linspace(-0.3, 0.3, p.numel(), dtype=self.dtype).view(p.shape)


class Closures(Net):
    """Optimizer that needs whole parameters and calls the step several times."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Manual(Net):
    """Manual optimization, two optimizers, a scheduler, a closure and a toggle."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        with first.toggle_model():
            self.manual_backward(F.mse_loss(self(batch[0]), batch[1]))
            self.clip_gradients(first, gradient_clip_val=0.1)
            first.step()
            first.zero_grad()
        self.lr_schedulers().step()

        def closure():
            second.zero_grad()
            loss = F.mse_loss(self(batch[0]), batch[1])
            self.manual_backward(loss)
            self.losses.append(loss.item())
            return loss

        second.step(closure=closure)
        self.log("lr", self.optimizers(use_pl_optimizer=False)[0].param_groups[0]["lr"])
        self.log("other_lr", self.trainer.optimizers[1].param_groups[0]["lr"])

    def configure_optimizers(self):
        first = torch.optim.SGD(self.net[0].parameters(), lr=0.1, momentum=0.9)
        second = torch.optim.Adam(self.net[2].parameters(), lr=0.01, eps=1e-3)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(first, 0.9)]


class Compiled(Net):
    def __init__(self):
        super().__init__()
        self.net.compile(backend="eager")


USERS = {cls.__name__: cls for cls in (Curious, Assigns, Closures, Manual, Compiled)}


def _users(names, strategy, devices):
    results = {}
    for name in names:
        module = USERS[name]()
        # In fp64: quasi-Newton steps and clamps amplify rounding.
        _fit(module, strategy, devices, precision="64-true")
        results[name] = module.losses, getattr(module, "noticed", []), snapshot(module)
    return results


def test_users_do_as_they_like():
    expected = _users(USERS, "auto", 1)
    for results in run_ranks(2, _users, list(USERS), "pardist_tp", 2):
        for name, (losses, noticed, weights) in results.items():
            assert losses == pytest.approx(expected[name][0], rel=1e-5), name
            assert noticed == pytest.approx(expected[name][1], rel=1e-5), name
            assert_close(weights, expected[name][2])


def _precision(strategy, devices, precision):
    module = Net()
    _fit(module, strategy, devices, precision=precision)
    return module.losses, {p.dtype for p in module.parameters()}


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision(precision):
    losses, dtypes = _precision("auto", 1, precision)
    for found in run_ranks(2, _precision, "pardist_tp", 2, precision):
        # bf16 has three digits.
        assert found[0] == pytest.approx(losses, rel=1e-2)
        assert found[1] == dtypes


def _one_stream():
    """Random states that differ at the start, and diverge later; the same batch everywhere."""
    module = Net()
    torch.manual_seed(dist.get_rank())
    module.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8), nn.Dropout(0.5))

    class Drawing(pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.is_global_zero:
                torch.rand(3)

    _fit(module, "pardist_tp", 2, callbacks=[Drawing()])
    return module.losses


def test_tensor_ranks_draw_the_same_numbers():
    first, second = run_ranks(2, _one_stream)
    assert first == second


# --- what is refused --------------------------------------------------------------------------------------------


def _refused():
    messages = {}
    for name, strategy in {
        "nothing": TensorParallelStrategy(plan={"nett.*": "column"}),
        "way": TensorParallelStrategy(plan={"net.0": "diagonal"}),
    }.items():
        with pytest.raises((ValueError, PeerFailedError), match="plan") as caught:
            _fit(Net(), strategy, 2)
        messages[name] = str(caught.value)
    odd = Net()
    odd.net = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8))
    with pytest.raises((ValueError, PeerFailedError), match="does not divide") as caught:
        _fit(odd, TensorParallelStrategy(plan={"net.0": "column"}), 2)
    messages["size"] = str(caught.value)
    _fit(odd, TensorParallelStrategy(plan={"net.0": "column"}, on_indivisible="replicate"), 2)
    with pytest.raises((ValueError, PeerFailedError), match="WeightAveraging") as caught:
        _fit(Net(), TensorParallelStrategy(checkpoint="sharded"), 2, callbacks=[pl.callbacks.WeightAveraging()])
    messages["average"] = str(caught.value)
    return messages


def test_errors_say_what_was_set_and_what_would_do():
    for messages in run_ranks(2, _refused):
        assert "nett.*" in messages["nothing"]
        assert "column, row, vocab, replicate" in messages["way"]
        assert "1, 3, 9" in messages["size"]
        assert "replicate" in messages["size"]
        assert 'Use checkpoint="full"' in messages["average"]


def test_settings_are_checked_before_anything_starts():
    with pytest.raises(ValueError, match="tensor_parallel_size=0"):
        TensorParallelStrategy(tensor_parallel_size=0)
    with pytest.raises(ValueError, match="auto, node, machine or a number"):
        TensorParallelStrategy(tensor_parallel_size="rack")
    with pytest.raises(ValueError, match="data_parallel='zero4'"):
        TensorParallelStrategy(data_parallel="zero4")
    with pytest.raises(ValueError, match="does not divide world_size=4"):
        quiet_trainer(strategy=TensorParallelStrategy(tensor_parallel_size=3), devices=4)


# --- the plan ---------------------------------------------------------------------------------------------------


def test_a_plan_needs_no_ranks():
    module = Tracing()
    module.prepared = True
    before = snapshot(module)
    found = TensorParallelStrategy.plan(module, next(iter(_loader())), tensor_parallel_size=4)
    text = str(found)
    assert "net.0.weight" in text
    assert "column-wise" in text
    assert found.collective_count("forward") > 0
    assert module.seen == 0
    assert "log" not in module.__dict__
    assert_close(snapshot(module), before, rtol=0.0)


def _sent_and_held():
    """Return what a step of the GPT recipe sends, and the share of the parameters that a rank holds."""
    module = GPT(dim=64, layers=3, heads=4, context=16, vocab_size=64, dropout=0.0, sample_tokens=0)
    tokens = torch.randint(0, 64, (24, 17), generator=torch.Generator().manual_seed(7))
    strategy = TensorParallelStrategy()

    class Count(pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            strategy.axis(TensorAxis).runtime.group.reset()

        def on_train_batch_end(self, trainer, pl_module, *_):
            self.calls = dict(strategy.axis(TensorAxis).runtime.group.calls)
            self.held = sum(p.to_local().numel() for p in pl_module.parameters() if isinstance(p, DTensor))

    count = Count()
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=4)
    _fit(module, strategy, 2, loader, callbacks=[count])
    planned = sum(strategy.axis(TensorAxis).plan.collective_count(phase) for phase in ("forward", "backward"))
    return count.calls, planned, count.held / sum(p.numel() for p in module.parameters())


def test_the_gpt_recipe_sends_and_holds_what_megatrons_does():
    for calls, planned, held in run_ranks(2, _sent_and_held):
        # Two all-reduces in forward and two in backward per block; plus embedding, loss, and the head's input.
        assert calls == {"all_reduce": 4 * 3 + 2, "all_gather": 1}
        assert planned == 4 * 3 + 3
        assert held <= 1 / 2 + 0.02


def _alone():
    module = Net()
    mesh = cpu_mesh((2,), ("tensor_parallel",))
    x = torch.ones(2, 8)
    runtime = apply_layout(module, plan_layout(module, lambda: module(x).sum(), tp_size=2), mesh["tensor_parallel"])
    runtime.wrap_calls(module)
    together = module(x)
    with pytest.raises(RuntimeError, match="called the module"):
        module(x) if dist.get_rank() == 0 else runtime.check_same_call("step")
    runtime.unwrap_calls()
    unsplit_module(module)
    return type(together), torch.allclose(together, module(x))


def test_calls_outside_of_steps_are_for_all_ranks():
    for kind, same in run_ranks(2, _alone):
        assert kind is torch.Tensor
        assert same


class FromZoo(pl.LightningModule):
    """Model of the zoo under a Trainer."""

    def __init__(self, name):
        super().__init__()
        self.model = build(name)
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.model.loss(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Batches(torch.utils.data.Dataset):
    def __init__(self, module, count):
        self.batches = [module.model.batch(seed) for seed in range(count)]

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def _zoo(names, strategy, devices):
    results = {}
    for name in names:
        module = FromZoo(name)
        _fit(module, strategy, devices, DataLoader(Batches(module, 3), batch_size=None))
        results[name] = module.losses, snapshot(module)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("data_parallel", ["ddp", "zero3"])
def test_zoo_trains_like_one_process(data_parallel):
    strategy = functools.partial(TensorParallelStrategy, data_parallel=data_parallel)
    expected = _zoo(ZOO, "auto", 1)
    for results in run_ranks(2, _zoo, list(ZOO), strategy, 2, timeout_s=600):
        for name, (losses, weights) in results.items():
            assert losses == pytest.approx(expected[name][0], rel=1e-5), name
            assert_close(weights, expected[name][1])


# --- modules without values --------------------------------------------------------------------------------------


class Late(Net):
    """Tied weights, buffers, and layers created in ``configure_model``, as in large models."""

    def __init__(self, late):
        super().__init__()
        self.late = late
        self.net = None
        if not late:
            self.configure_model()

    def configure_model(self):
        if self.net is None:
            # Layers created on meta are initialized later, from this random state.
            torch.manual_seed(4)
            with torch.device("meta" if self.late else "cpu"):
                first = nn.Linear(8, 32, bias=False)
                last = nn.Linear(32, 8)
                again = nn.Linear(8, 32, bias=False)
                again.weight = first.weight
                self.net = nn.Sequential(first, nn.BatchNorm1d(32), nn.Tanh(), last, again, nn.ReLU(), nn.Linear(32, 8))

    def training_step(self, batch, batch_idx):
        return super().training_step((self.net[:4](batch[0]) + batch[0], batch[1]), batch_idx)


def _late(strategy, devices, folder):
    results = []
    for name, late in {"plain": False, "late": devices > 1}.items():
        module = Late(late)
        path = folder / f"{name}-{devices}.ckpt"
        _fit(module, strategy, devices).save_checkpoint(path)
        again = Late(late)
        _fit(again, strategy, devices, ckpt_path=folder / f"{name}-1.ckpt", max_epochs=2)
        results.append((module.losses, snapshot(module), again.losses, snapshot(again)))
    return results


def test_modules_built_on_meta_are_created_in_parts(tmp_path):
    (_, expected) = _late("auto", 1, tmp_path)
    for _, found in run_ranks(2, _late, "pardist_tp", 2, tmp_path):
        for one, many in ((0, 0), (2, 2)):
            assert found[one] == pytest.approx(expected[many], rel=1e-5)
        assert_close(found[1], expected[1])
        assert_close(found[3], expected[3])


def _in_the_users_order(strategy, devices):
    module = Net()
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=2)
    trainer.fit(module, _loader())
    return {"loss": trainer.callback_metrics["loss"], **snapshot(module)}


@pytest.mark.parametrize("strategy", ["pardist_tp", "pardist_pp"])
def test_a_loader_that_does_not_shuffle_is_left_alone(strategy):
    expected = _in_the_users_order("auto", 1)
    for got in run_ranks(2, _in_the_users_order, strategy, 2):
        assert_close(got, expected)


class Adjoint(torch.autograd.Function):
    """Runs layers again in backward, for gradients with respect to its arguments, as in torchdiffeq."""

    @staticmethod
    def forward(ctx, layers, y, *parameters):
        ctx.layers = layers
        ctx.save_for_backward(y, *parameters)
        with torch.no_grad():
            return y + layers(y)

    @staticmethod
    def backward(ctx, grad):
        y, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            return None, *torch.autograd.grad(y + ctx.layers(y), (y, *parameters), grad, allow_unused=True)


class WithAdjoint(Net):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x):
        return self.net(Adjoint.apply(self.inner, x, *self.inner.parameters()))


def _with_adjoint(strategy, devices):
    module = WithAdjoint()
    before = snapshot(module)
    _fit(module, strategy, devices)
    return before, snapshot(module)


def test_parameters_as_arguments_of_custom_functions():
    before, want = _with_adjoint("auto", 1)
    assert not torch.equal(before["inner.0.weight"], want["inner.0.weight"])
    for _, got in run_ranks(2, _with_adjoint, "pardist_tp", 2):
        assert_close(got, want)
