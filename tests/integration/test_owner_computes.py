"""Model parallelism without stages: manual optimization, loops, packed sequences, double backward."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import PipelineStrategy
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.runs import _flat_state, quiet_trainer


class Base(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.losses = []

    @staticmethod
    def batches():
        generator = torch.Generator().manual_seed(5)
        return DataLoader(TensorDataset(torch.randn(32, 6, generator=generator)), batch_size=8)

    def note(self, loss):
        self.losses.append(loss.detach().clone())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class GradientPenalty(Base):
    """Wasserstein GAN: two optimizers, double backward, noise, clamped weights, a shared scale parameter."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.scale = nn.Parameter(torch.ones(6))
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.25), nn.ReLU(inplace=True), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        for_generator, for_critic = self.optimizers()
        for _ in range(2 if batch_idx else 1):
            fake = (self.generator(torch.randn(len(real), 4)) * self.scale).detach()
            mixed = torch.lerp(real, fake, torch.rand(len(real), 1)).requires_grad_()
            (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
            loss = self.critic(fake).mean() - self.critic(real).mean() + (slope.norm(dim=1) - 1).square().mean()
            for_critic.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(for_critic, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            for_critic.step()
            for parameter in self.critic.parameters():
                parameter.data.clamp_(-0.4, 0.4)
        self.toggle_optimizer(for_generator)
        fake = self.generator(torch.randn(len(real), 4)) * self.scale
        loss_of_generator = -self.critic(fake).mean()
        for_generator.zero_grad()
        self.manual_backward(loss_of_generator)
        for_generator.step()
        self.untoggle_optimizer(for_generator)
        self.note(loss + loss_of_generator)

    def configure_optimizers(self):
        mine = [self.scale, *self.generator.parameters()]
        return torch.optim.Adam(mine, lr=0.02, eps=1e-3), torch.optim.SGD(self.critic.parameters(), lr=0.1)


class Packed(Base):
    """Packed sequences of many lengths; an autoregressive decoder that runs as long as the longest."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.encoder = nn.GRU(6, 5, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(10, 6)
        self.decoder = nn.GRUCell(6, 6)

    @staticmethod
    def batches():
        generator = torch.Generator().manual_seed(5)
        made = []
        for longest in (7, 4, 9, 5):
            lengths = torch.randint(1, longest + 1, (8,), generator=generator)
            lengths[0] = longest
            made.append((torch.randint(0, 11, (8, longest), generator=generator), lengths))
        return DataLoader(made, batch_size=None)

    def training_step(self, batch, batch_idx):
        tokens, lengths = batch
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.encoder(packed)[0], batch_first=True)
        state = torch.tanh(self.bridge(hidden.mean(1)))
        given, loss = torch.zeros_like(state), 0.0
        for index in range(tokens.shape[1]):
            state = self.decoder(given, state)
            # Reads the embedding's weight without calling its layer, as tied heads do.
            logits = F.linear(state, self.embed.weight)
            mask = (index < lengths).float()
            loss = loss + (F.cross_entropy(logits, tokens[:, index], reduction="none") * mask).sum() / lengths.sum()
            given = self.embed(logits.argmax(1))
            if bool((index >= lengths).all()):
                break
        return self.note(loss)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))


class Noted(nn.Module):
    """Layer that modifies its input in place and stores an auxiliary loss for code outside."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.extra = None

    def forward(self, x, history):
        x.relu_()
        history.append(self.linear(x))
        self.extra = history[-1].square().mean()
        return {"out": history[-1] + x, "steps": len(history)}


class OwnBackward(Base):
    """Overridden backward hook, blocks called in a loop, and several backward passes through one graph."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Noted() for _ in range(3))

    def training_step(self, batch, batch_idx):
        x, history = self.first(batch[0]), []
        for block in (*self.blocks, *self.blocks[: batch_idx % 3]):
            answer = block(x, history)
            x = answer["out"]
        extra = sum(block.extra for block in self.blocks)
        return self.note((x - batch[0]).square().mean() + 0.1 * extra / answer["steps"])

    def backward(self, loss, *args, **kwargs):
        loss.backward(retain_graph=True)
        loss.backward()


class Epoch(pl.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            trainer.save_checkpoint(self.path)


def _fit(make, strategy, world, path):
    torch.manual_seed(3)
    module = make()
    trainer = quiet_trainer(
        strategy=strategy() if callable(strategy) else strategy,
        devices=world,
        use_distributed_sampler=False,
        callbacks=[Epoch(path)],
        gradient_clip_val=None if not module.automatic_optimization else 0.7,
        accumulate_grad_batches=1 if not module.automatic_optimization else 2,
        max_epochs=2,
    )
    loader = make.batches()
    trainer.fit(module, loader, loader)
    losses = torch.stack(module.losses)
    logged = {key: value for key, value in trainer.callback_metrics.items() if torch.is_tensor(value)}
    return {"losses": losses} | snapshot(module) | logged


def _check(make, strategy, world, folder):
    want = _fit(make, "auto", 1, folder / "one.ckpt")
    for got in run_ranks(world, _fit, make, strategy, world, folder / "many.ckpt"):
        assert_close(got, want)
    ours, theirs = (torch.load(folder / f"{name}.ckpt", weights_only=True) for name in ("many", "one"))
    assert_close(ours["state_dict"], theirs["state_dict"])
    assert_close(_flat_state(ours["optimizer_states"]), _flat_state(theirs["optimizer_states"]))


def _sharded(data_parallel):
    return PipelineStrategy(schedule="mp", pipeline_parallel_size=2, data_parallel=data_parallel)


@pytest.mark.push("Packed", "OwnBackward")
@pytest.mark.parametrize("make", [GradientPenalty, Packed, OwnBackward])
def test_whole_batches_layer_by_layer(make, tmp_path):
    _check(make, "pardist_mp", 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("make", [GradientPenalty, Packed, OwnBackward])
def test_on_three_ranks(make, tmp_path):
    _check(make, "pardist_mp", 3, tmp_path)


@pytest.mark.parametrize("make", [GradientPenalty, OwnBackward])
def test_a_pipeline_refuses_in_one_sentence(make, tmp_path):
    with pytest.raises(RankFailed, match="Use pardist_mp"):
        run_ranks(2, _fit, make, "pardist_pp", 2, tmp_path / "x.ckpt")
