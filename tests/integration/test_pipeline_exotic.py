"""Modules that do more than call one layer after another: a pipeline against one process."""

import copy
import functools

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import PipelineStrategy
from lightning_pardist.engines.pipeline import CannotPipelineError
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.runs import quiet_trainer


def _layers(count=4, before=8, dim=16, after=4):
    inner = [nn.Sequential(nn.Linear(dim, dim), nn.Tanh()) for _ in range(count)]
    return nn.Sequential(nn.Linear(before, dim), *inner, nn.Linear(dim, after))


class Base(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = _layers()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class CompiledInside(Base):
    def __init__(self):
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")


class ValuesFromHooks(Base):
    """A hook records a layer's output, and the step logs it."""

    def __init__(self):
        super().__init__()
        self.norms = {}
        for index in (1, 3):
            self.net[index].register_forward_hook(functools.partial(self._note, index))

    def _note(self, index, module, inputs, output):
        self.norms[index] = output.detach().square().mean()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log_dict({f"norm_{index}": norm for index, norm in self.norms.items()})
        return loss


class LossFromHooks(Base):
    """Penalty on all activations, which hooks collect."""

    def __init__(self):
        super().__init__()
        self.seen = []
        for layer in self.net:
            layer.register_forward_hook(lambda module, inputs, output: self.seen.append(output))

    def training_step(self, batch, batch_idx):
        self.seen.clear()
        loss = super().training_step(batch, batch_idx)
        return loss + 0.01 * sum(each.square().mean() for each in self.seen)


class HooksAtFirstCall(Base):
    """Collects activations by hooks that the first step registers, guarded by a flag."""

    hooked = False

    def training_step(self, batch, batch_idx):
        self.seen = []
        if not self.hooked:
            for layer in self.net:
                layer.register_forward_hook(lambda module, inputs, output: self.seen.append(output))
            self.hooked = True
        loss = super().training_step(batch, batch_idx)
        return loss + sum(each.square().mean() / (index + 1) for index, each in enumerate(self.seen))


class HookForOneStep(Base):
    """Hook that each step registers and removes again."""

    def training_step(self, batch, batch_idx):
        seen = []
        handle = self.net[1].register_forward_hook(lambda module, inputs, output: seen.append(output))
        loss = super().training_step(batch, batch_idx)
        handle.remove()
        return loss + 0.1 * sum(each.square().mean() for each in seen)


class FrozenStem(Base):
    """Checkpointed layers after frozen ones, whose output a hook makes require a gradient."""

    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)
        self.net[0].register_forward_hook(lambda module, inputs, output: output.requires_grad_())

    def training_step(self, batch, batch_idx):
        x = self.net[0](batch[0])
        for layer in self.net[1:]:
            x = checkpoint(layer, x, use_reentrant=False)
        return F.cross_entropy(x, batch[1])


class Anchors(Base):
    """List of one item that each step recreates, like the anchors of detectors."""

    def __init__(self):
        super().__init__()
        self.anchors = [torch.ones(8)]

    def training_step(self, batch, batch_idx):
        self.anchors = [each.to(batch[0]) for each in self.anchors]
        assert len(self.anchors) == 1
        return super().training_step((batch[0] + self.anchors[0], batch[1]), batch_idx)


class ConvertedAnchors(Anchors):
    """As :class:`Anchors`, in another dtype than before."""

    def __init__(self):
        super().__init__()
        self.anchors = [torch.ones(8, dtype=torch.float64)]


class LowRank(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) / 4)
        self.b = nn.Parameter(torch.randn(base.out_features, 2) / 4)

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


class Adapters(Base):
    """Frozen layers with small trainable adapters."""

    def __init__(self):
        super().__init__()
        for index, layer in enumerate(self.net):
            if isinstance(layer, nn.Linear):
                self.net[index] = LowRank(layer)
            else:
                layer[0] = LowRank(layer[0])


class FrozenTeacher(Base):
    def __init__(self):
        super().__init__()
        self.teacher = _layers(2).requires_grad_(False).eval()

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            target = self.teacher(batch[0])
        y = self.net(batch[0])
        return F.cross_entropy(y, batch[1]) + F.mse_loss(y, target)


class Siamese(Base):
    """Two passes through the same layers."""

    def training_step(self, batch, batch_idx):
        a, b = self.net(batch[0]), self.net(batch[0].flip(1))
        return (1 - F.cosine_similarity(a, b)).mean() + F.cross_entropy(a, batch[1])


class Autoencoder(Base):
    """Variational autoencoder with noise, and several losses of different kinds."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = _layers(2, after=8), _layers(2, before=4, after=8)

    def training_step(self, batch, batch_idx):
        mean, log_variance = self.encoder(batch[0]).chunk(2, -1)
        z = mean + 0.0 * torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1).mean()
        error = F.mse_loss(self.decoder(z), batch[0], reduction="sum") / len(batch[0])
        self.log_dict({"divergence": divergence, "error": error})
        return error + 0.1 * divergence


class MixOfStates(Base):
    """Token parameter of the root, and a learned sum over the outputs of all layers."""

    def __init__(self):
        super().__init__()
        self.inputs, self.out = nn.Linear(8, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True) for _ in range(4))
        self.token, self.mix = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.zeros(5))

    def training_step(self, batch, batch_idx):
        x = self.inputs(batch[0]).unflatten(-1, (1, 16)).repeat(1, 3, 1)
        states = [torch.cat([self.token.expand(len(x), -1, -1), x], 1)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        mixed = sum(weight * state for weight, state in zip(self.mix.softmax(0), states, strict=True))
        return F.cross_entropy(self.out(mixed[:, 0]), batch[1])


class Penalized(Base):
    """The loss reads every parameter without calling the layers that own them."""

    def training_step(self, batch, batch_idx):
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        self.log("penalty", penalty)
        return super().training_step(batch, batch_idx) + 1e-3 * penalty


class ByProgress(Base):
    """Computation and logs depend on the progress of training."""

    def training_step(self, batch, batch_idx):
        share = min(1.0, (self.global_step + 1) / 3)
        y = self.net(batch[0])
        self.log("share", share)
        self.log("seen", float(len(batch[0])), reduce_fx="sum")
        return share * F.cross_entropy(y, batch[1]) + (1 - share) * y.square().mean()


class GradientNorms(Base):
    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self.net, 2))


KINDS = (
    CompiledInside,
    ValuesFromHooks,
    LossFromHooks,
    HooksAtFirstCall,
    HookForOneStep,
    FrozenStem,
    Anchors,
    ConvertedAnchors,
    Adapters,
    FrozenTeacher,
    Siamese,
    Autoencoder,
    MixOfStates,
    Penalized,
    ByProgress,
    GradientNorms,
)


class MovingTeacher(Base):
    """EMA teacher updated in a hook, where each rank holds only the parameters of its own stages."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), self.teacher(batch[0]).softmax(-1))

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for teacher, student in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            teacher.mul_(0.9).add_(student, alpha=0.1)


class FollowsInStep(MovingTeacher):
    """EMA teacher updated inside the step, which a pipeline runs once per micro-batch."""

    on_train_batch_end = Base.on_train_batch_end

    def training_step(self, batch, batch_idx):
        for teacher, student in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            teacher.data = teacher.data * 0.9 + student.data * 0.1
        return super().training_step(batch, batch_idx)


class CopiesInStep(MovingTeacher):
    """Target network that is set in the step: its source may be on another rank."""

    on_train_batch_end = Base.on_train_batch_end

    def training_step(self, batch, batch_idx):
        if self.global_step % 2 == 0:
            self.teacher.load_state_dict(self.net.state_dict())
        return super().training_step(batch, batch_idx)


class SetBySamples(Base):
    """Data-dependent initialization of a shift by the first batch (ActNorm)."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))
        self.register_buffer("is_set", torch.tensor(False))

    def training_step(self, batch, batch_idx):
        if not self.is_set:
            self.shift.data.copy_(-batch[0].mean(0))
            self.is_set.fill_(True)
        return super().training_step((batch[0] + self.shift, batch[1]), batch_idx)


class ClampsInStep(Base):
    """Clamp in the step, which is idempotent."""

    def training_step(self, batch, batch_idx):
        self.net[3][0].weight.data.clamp_(-0.1, 0.1)
        return super().training_step(batch, batch_idx)


class WholeBatch(Base):
    """Indexes samples of the batch by number."""

    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0].flip(0)[torch.arange(7, -1, -1)], batch[1]), batch_idx)


class Adapts(Base):
    """Meta-learning: a gradient descent step inside the training step (MAML, arXiv 1703.03400)."""

    def training_step(self, batch, batch_idx):
        names, params = zip(*self.net.named_parameters(), strict=True)
        grads = torch.autograd.grad(F.cross_entropy(self.net(batch[0]), batch[1]), params, create_graph=True)
        return self.adapted({name: p - 0.1 * g for name, p, g in zip(names, params, grads, strict=True)}, batch)

    def adapted(self, params, batch):
        return F.cross_entropy(torch.func.functional_call(self.net, params, (batch[0],)), batch[1])


class AdaptsByFunction(Adapts):
    def training_step(self, batch, batch_idx):
        params = dict(self.net.named_parameters())
        grads = torch.func.grad(self.adapted)(params, batch)
        return self.adapted({name: param - 0.1 * grads[name] for name, param in params.items()}, batch)


def _fit(kind, strategy="auto", devices=1):
    torch.manual_seed(3)
    module = kind()
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 8, generator=generator), torch.randint(0, 4, (24,), generator=generator)
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=2)
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=8))
    return {**snapshot(module), **{key: value.clone() for key, value in trainer.callback_metrics.items()}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, ClampsInStep, WholeBatch])
def test_same_numbers(kind):
    for got in run_ranks(2, _fit, kind, "pardist_pp", 2):
        assert_close(got, _fit(kind))


@pytest.mark.parametrize(
    ("strategy", "devices"), [pytest.param("pardist_pp", 2, marks=pytest.mark.slow), ("pardist_3d", 4)]
)
def test_parameters_of_other_stages_are_not_used_in_hooks(strategy, devices):
    with pytest.raises(RankFailed, match=r"needs the values of 'net\.\d.*which rank \d of the pipeline holds"):
        run_ranks(devices, _fit, MovingTeacher, strategy, devices)


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        (Adapts, r"training_step asks torch.autograd.grad for gradients of 'net\.0\.\w+'"),
        (AdaptsByFunction, r"calls 'net\.0' inside of a transform of torch.func"),
    ],
)
@pytest.mark.parametrize("strategy", ["pardist_pp", "pardist_mp"])
def test_gradients_that_a_step_computes_with_are_refused(kind, pattern, strategy):
    with pytest.raises(RankFailed, match=pattern):
        run_ranks(2, _fit, kind, strategy, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [(CopiesInStep, "teacher.0.weight"), (SetBySamples, "shift")])
def test_parameters_that_a_step_sets_by_others(kind, name):
    with pytest.raises(RankFailed, match=f"training_step computes the values of '{name}' from other parameters"):
        run_ranks(2, _fit, kind, "pardist_pp", 2)


@pytest.mark.slow
def test_steps_that_mean_one_whole_batch_are_refused():
    with pytest.raises(RankFailed, match=r"training_step changes the values of 'teacher\.0\.weight'"):
        run_ranks(2, _fit, FollowsInStep, "pardist_pp", 2)
    with pytest.raises(RankFailed, match=r"runs on a batch and fails on a micro-batch .*num_microbatches"):
        run_ranks(2, _fit, WholeBatch, PipelineStrategy(num_microbatches=4), 2)


class _Labelled(torch.Tensor):
    """Tensor whose rows can be selected by name; a plain subclass, as applications define it."""

    def named(self, names):
        rows = [self.names_.index(name) for name in names]
        return _Labelled(self.as_subclass(torch.Tensor)[rows])


class _OfLabelled(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        points = batch[0].as_subclass(_Labelled)
        points.names_ = list("abcdefgh"[: len(points)])
        return self.second(self.first(points.named("ab").as_subclass(torch.Tensor)).relu()).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit_labelled(name):
    trainer = pl.Trainer(
        strategy=name, accelerator="cpu", devices=2, max_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(CannotPipelineError, match=r"^The step makes tensors of a class of its own"):
        trainer.fit(_OfLabelled(), DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=8))
    return True


@pytest.mark.parametrize("name", ["pardist_pp", "pardist_mp"])
def test_steps_that_make_tensors_of_a_subclass_are_refused(name):
    assert all(run_ranks(2, _fit_labelled, name))
