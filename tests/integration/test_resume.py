"""A resumed run sees the same samples and random numbers as the uninterrupted one."""

from contextlib import nullcontext

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, TensorDataset

from lightning_pardist import DDPStrategy, FSDPStrategy, PipelineStrategy, TensorParallelStrategy, ZeroStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

EPOCH = 4  # batches
GLOBAL_BATCH = 8
#: Cases with an order that is not Lightning's.
OWN_ORDER = ("own sampler", "stream", "counting", "endless", "shared", "keeps")
STRATEGIES = {
    "ddp": DDPStrategy,
    "zero2": ZeroStrategy,
    "fsdp": FSDPStrategy,
    "tp": TensorParallelStrategy,
    "pp": PipelineStrategy,
    "single": lambda: SingleDeviceStrategy(device="cpu"),
}


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.seen = []

    def training_step(self, batch, batch_idx):
        numbers, x = batch
        loss = F.mse_loss(self.net(x), x.sum(1, keepdim=True))
        self.seen.append((self.current_epoch, batch_idx, numbers.tolist(), loss.item()))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[1]).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def _dataset():
    numbers = torch.arange(EPOCH * GLOBAL_BATCH)
    return TensorDataset(numbers, torch.randn(len(numbers), 3, generator=torch.Generator().manual_seed(5)))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(_dataset())

    def __len__(self):
        return EPOCH * GLOBAL_BATCH


class Counting(Sampler):
    """Sampler that counts its epochs, and draws from a generator of its own."""

    def __init__(self) -> None:
        self.epoch = 0
        self.rng = np.random.default_rng(7)

    def __iter__(self):
        self.epoch += 1
        return iter(np.roll(self.rng.permutation(len(self)), self.epoch).tolist())

    def __len__(self):
        return EPOCH * GLOBAL_BATCH


class Endless(Sampler):
    """Sampler without an end and a length."""

    def __init__(self) -> None:
        self.rng = torch.Generator()

    def __iter__(self):
        while True:
            yield from torch.randperm(EPOCH * GLOBAL_BATCH, generator=self.rng).tolist()


class Keeps(DataLoader):
    """Stateful loader, like ``torchdata``'s, that draws random numbers when it resumes."""

    skip, order, given = 0, None, 0

    def state_dict(self):
        return {"given": self.given, "order": self.order}

    def load_state_dict(self, state):
        self.skip, self.order = state["given"], state["order"]

    def __iter__(self):
        torch.randn(3)
        if not self.skip:
            self.order = torch.randperm(EPOCH * GLOBAL_BATCH)
        self.given, self.skip = self.skip, 0
        return self._rest()

    def _rest(self):
        for indices in self.order.view(EPOCH, -1)[self.given :].tolist():
            self.given += 1
            numbers, x = zip(*(self.dataset[index] for index in indices), strict=True)
            yield torch.stack(numbers), torch.stack(x)


class Shared(Sampler):
    """Draws one order with every rank's generator, and gives each rank its part."""

    def __init__(self, rank, world) -> None:
        self.rank, self.world = rank, world

    def __iter__(self):
        return iter(torch.randperm(EPOCH * GLOBAL_BATCH)[self.rank :: self.world].tolist())

    def __len__(self):
        return EPOCH * GLOBAL_BATCH // self.world


def _fit(strategy, world, case, *, steps, resume=None, save=None, folder=None):
    torch.manual_seed(3)
    module = Module()
    size = GLOBAL_BATCH // (1 if strategy in ("tp", "pp") else world)
    if case == "workers":
        loader = DataLoader(_dataset(), batch_size=size, num_workers=1, multiprocessing_context="fork")
    elif case in ("own sampler", "own sampler, every step"):
        loader = DataLoader(_dataset(), batch_size=size, sampler=RandomSampler(_dataset()))
    elif case == "own sampler, workers":
        sampler = RandomSampler(_dataset())
        loader = DataLoader(_dataset(), batch_size=size, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    elif case.startswith("keeps"):
        loader = Keeps(_dataset(), batch_size=size)
    elif case == "counting":
        loader = DataLoader(_dataset(), batch_size=size, sampler=Counting())
    elif case == "endless":
        loader = DataLoader(_dataset(), batch_size=size, sampler=Endless())
    elif case == "shared":
        loader = DataLoader(_dataset(), batch_size=size, sampler=Shared(dist.get_rank(), world))
    elif case == "stream":
        loader = DataLoader(Stream(), batch_size=size)
    else:
        loader = DataLoader(_dataset(), batch_size=size, shuffle=True)
    callbacks = []
    if "every step" in case:
        callbacks = [ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=1, filename="{step}")]
    if case == "after validation":
        callbacks = [ModelCheckpoint(folder, save_top_k=-1, monitor="val_loss", filename="{step}")]
    by_epochs = case == "epochs" or (case == "steps, then epochs" and steps == 12)
    epochs = {"max_epochs": steps // EPOCH} if by_epochs else {"max_epochs": -1, "max_steps": steps}
    trainer = quiet_trainer(
        strategy=STRATEGIES[strategy](),
        devices=world,
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
        use_distributed_sampler=not case.startswith(OWN_ORDER),
        val_check_interval=2 if case == "after validation" else None,
        num_sanity_val_steps=0,
        **epochs,
    )
    validation = DataLoader(_dataset(), batch_size=size) if case == "after validation" else None
    trainer.fit(module, loader, validation, ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return module.seen, weights, trainer.optimizers[0].param_groups[0]["lr"]


def _resumed_alike(strategy, world, case, stops, folder):
    """Compare batches, losses and weights with those of an uninterrupted run."""
    whole, weights, rate = _fit(strategy, world, case, steps=12 if "epochs" in case else 10, folder=f"{folder}/all")
    for stop in stops:
        path = f"{folder}/all/step={stop}.ckpt"
        if "every step" not in case and case != "after validation":
            path = f"{folder}/{stop}.ckpt"
            before, *_ = _fit(strategy, world, case, steps=stop, save=path)
            assert before == whole[:stop]
        after, end, end_rate = _fit(
            strategy, world, case, steps=len(whole), resume=path, folder=f"{folder}/after-{stop}"
        )
        assert after == whole[stop:], (case, stop, after, whole[stop:])
        assert end_rate == rate
        for name, value in weights.items():
            assert torch.equal(value, end[name]), (case, stop, name)


CASES = [
    ("ddp", 1, "steps", (1, 3, 4, 6, 8)),
    ("ddp", 1, "epochs", (4, 8)),
    ("ddp", 1, "steps, then epochs", (3, 4, 6)),
    ("ddp", 1, "every step", (1, 3, 4, 5)),
    ("ddp", 1, "after validation", (2, 4, 6)),
    ("ddp", 1, "workers", (3, 6)),
    ("ddp", 1, "own sampler", (3, 4, 5, 6, 8, 9)),
    ("ddp", 1, "own sampler, every step", (4, 5, 7)),
    ("ddp", 1, "own sampler, workers", (3, 6, 9)),
    ("ddp", 1, "counting", (3, 5, 9)),
    ("ddp", 1, "endless", (3, 6)),
    ("ddp", 1, "keeps", (3, 6)),
    ("ddp", 1, "keeps, every step", (6,)),
    ("ddp", 1, "stream", (3, 4)),
    ("ddp", 2, "steps", (3, 4, 6)),
    ("zero2", 2, "every step", (4, 5)),
    ("zero2", 2, "own sampler", (6,)),
    pytest.param("fsdp", 2, "steps", (3, 6), marks=pytest.mark.slow),
    ("tp", 2, "own sampler", (6,)),
    ("pp", 2, "steps", (3, 6)),
]


@pytest.mark.push("ddp-1-*", "zero2-2-*", "tp-2-*")
@pytest.mark.parametrize(("strategy", "world", "case", "stops"), CASES, ids=str)
def test_the_same_batches_losses_and_weights(strategy, world, case, stops, tmp_path):
    run_ranks(world, _resumed_alike, strategy, world, case, stops, str(tmp_path), timeout_s=250)


class Ends(Module):
    """Records the events at the end of an epoch, and may fail there."""

    def __init__(self, fails=False) -> None:
        super().__init__()
        self.fails, self.events = fails, []

    def validation_step(self, batch, batch_idx):
        if self.fails and batch_idx == 1:
            raise InterruptedError
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self):
        self.events.append("validated")

    def on_train_epoch_end(self):
        self.events.append((self.current_epoch, self.trainer.fit_loop.epoch_loop._batches_that_stepped))


def _ends(folder, fails, resume=None):
    module = Ends(fails)
    trainer = quiet_trainer(
        strategy="pardist_ddp",
        max_epochs=2,
        num_sanity_val_steps=0,
        callbacks=[
            ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=False),
            OnExceptionCheckpoint(folder),
        ],
        enable_checkpointing=True,
    )
    loader = DataLoader(_dataset(), batch_size=GLOBAL_BATCH)
    with pytest.raises(InterruptedError) if fails else nullcontext():
        trainer.fit(module, loader, loader, ckpt_path=resume)
    return module.events


def _ends_alike(folder):
    whole = _ends(f"{folder}/all", fails=False)
    _ends(f"{folder}/failed", fails=True)
    assert _ends(f"{folder}/a", fails=False, resume=f"{folder}/failed/on_exception.ckpt") == whole
    assert _ends(f"{folder}/b", fails=False, resume=f"{folder}/all/epoch=0.ckpt") == whole[1:]


def test_the_end_of_an_epoch_that_was_saved_in_or_after_its_validation(tmp_path):
    run_ranks(1, _ends_alike, str(tmp_path))


def _seen(strategy, world, settings, case):
    seen, *_ = _fit(strategy, world, case, **settings)
    return [(epoch, numbers) for epoch, _, numbers, _ in seen]


def _of_all_ranks(world, strategy, settings, case="steps"):
    """Return for each step its epoch and the samples of all ranks."""
    ranks = run_ranks(world, _seen, strategy, world, settings, case)
    return [
        (step[0][0], sorted(number for _, numbers in step for number in numbers)) for step in zip(*ranks, strict=True)
    ]


@pytest.mark.parametrize(("first", "second"), [(("ddp", 4), ("zero2", 2)), (("fsdp", 2), ("ddp", 1))], ids=str)
def test_other_numbers_of_ranks_see_every_sample_of_the_epoch_once(first, second, tmp_path):
    path = str(tmp_path / "a.ckpt")
    (name, world), (other_name, other_world) = first, second
    before = _of_all_ranks(world, name, {"steps": 3, "save": path})
    after = _of_all_ranks(other_world, other_name, {"steps": 8, "resume": path})
    steps = before + after
    for epoch in range(2):
        numbers = sorted(number for of, batch in steps if of == epoch for number in batch)
        assert numbers == list(range(EPOCH * GLOBAL_BATCH)), epoch
    assert steps == _of_all_ranks(other_world, other_name, {"steps": 8})


def test_a_sampler_of_the_users_goes_on_at_other_numbers_of_ranks(tmp_path):
    path = str(tmp_path / "a.ckpt")
    before = _of_all_ranks(1, "ddp", {"steps": 5, "save": path}, "shared")
    after = _of_all_ranks(2, "zero2", {"steps": 8, "resume": path}, "shared")
    numbers = sorted(number for epoch, batch in before + after if epoch == 1 for number in batch)
    assert numbers == list(range(EPOCH * GLOBAL_BATCH))


def _seen_of_two_loaders(first, second, steps, save=None, resume=None):
    """Train on two loaders, and return for each step the samples of both."""
    seen = []

    class Two(Module):
        def training_step(self, batch, batch_idx):
            seen.append([each[0].tolist() for each in batch])
            return super().training_step(batch[0], batch_idx)

    loaders = [DataLoader(_dataset(), batch_size=size) for size in (first, second)]
    trainer = quiet_trainer(strategy="pardist_ddp", max_steps=steps, use_distributed_sampler=False)
    trainer.fit(Two(), loaders, ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    return seen, trainer.fit_loop.epoch_loop.batch_progress.current.completed


@pytest.mark.parametrize("second", [4, 8])
def test_each_of_two_loaders_goes_on_at_its_sample_with_other_batch_sizes(second, tmp_path):
    path = str(tmp_path / "a.ckpt")
    ((before, _),) = run_ranks(1, _seen_of_two_loaders, 2, second // 2, 6, path)
    ((after, done),) = run_ranks(1, _seen_of_two_loaders, 4, second, 7, None, path)
    assert done == 3 + len(after)
    for loader in range(2):
        assert after[0][loader][0] == before[-1][loader][-1] + 1, (loader, before, after)


def _from_plain_lightning(path):
    _fit("single", 1, "own sampler", steps=3, save=path)
    ours, *_ = _fit("ddp", 1, "stream", steps=8, resume=path)
    assert [(epoch, index) for epoch, index, *_ in ours] == [(0, 3), *((1, index) for index in range(4))]
    _fit("ddp", 1, "steps", steps=3, save=path)
    theirs, *_ = _fit("single", 1, "steps", steps=8, resume=path)
    assert len(theirs) == 5


def test_to_and_from_plain_lightning(tmp_path):
    run_ranks(1, _from_plain_lightning, str(tmp_path / "a.ckpt"), timeout_s=250)
