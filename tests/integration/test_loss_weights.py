"""Losses that are means over unequal amounts on ranks and micro-batches: tokens, class weights."""

import itertools
import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import DDPStrategy, FSDPStrategy, HybridStrategy, PipelineStrategy, ZeroStrategy
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer

SAMPLES, LENGTH, CLASSES, STEPS = 8, 6, 5, 4
#: Number of a global batch's samples on each rank.
EVEN, UNEVEN = (4, 4), (5, 3)
STRATEGIES = {
    "ddp": DDPStrategy,
    "zero1": lambda **kwargs: ZeroStrategy(zero_stage=1, **kwargs),
    "zero2": lambda **kwargs: ZeroStrategy(zero_stage=2, **kwargs),
    "zero3": FSDPStrategy,
    "hsdp": lambda **kwargs: FSDPStrategy(data_shard_size=2, **kwargs),
    "tp": lambda **kwargs: HybridStrategy(tensor_parallel_size=2, **kwargs),
    "pp": lambda **kwargs: PipelineStrategy(pipeline_parallel_size=2, **kwargs),
    "3d": lambda **kwargs: HybridStrategy(pipeline_parallel_size=2, tensor_parallel_size=2, **kwargs),
}
SCHEDULES = {
    "1f1b": {},
    "1f1b in 3": {"num_microbatches": 3},
    "gpipe": {"schedule": "gpipe"},
    "interleaved": {"schedule": "interleaved", "chunks_per_rank": 2, "num_microbatches": 4},
    "zb": {"schedule": "interleaved_zb", "num_microbatches": 4},
    "mp": {"schedule": "mp"},
}


def ignored(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def class_weights(logits, labels):
    return F.cross_entropy(logits.transpose(1, 2), labels, weight=torch.linspace(0.1, 2.0, CLASSES))


def smoothed(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.2)


def masked(logits, labels):
    counted = (labels != -100).float()
    losses = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    return (losses * counted).sum() / counted.sum().clamp(min=1)


def lifted(logits, labels):
    counted = (labels != -100).float()
    losses = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    return (losses * counted).sum() / (counted.sum() + 1.0)


def lifted_terms(logits, labels):
    counted = labels == 1
    lowered = logits[labels != -100].pow(2).sum() / ((labels != -100).sum() - 0.5)
    return logits[counted].pow(2).sum() / (counted.sum().float() + 2) + 0.5 * lifted(logits, labels) + lowered


def few(logits, labels):
    counted = labels == 1
    losses = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    return (losses * counted).sum() / max(1, int(counted.sum()))


def selected(logits, labels):
    return logits[labels != -100].pow(2).mean()


def guarded(logits, labels):
    counted = labels != -100
    return logits[counted].pow(2).mean() if counted.any() else logits.sum() * 0


def added(logits, labels):
    return 0.01 * F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def per_sample(logits, labels):
    return torch.stack([F.cross_entropy(*sample) for sample in zip(logits, labels, strict=True)]).mean()


def sum_per_sample(logits, labels):
    return 0.1 * sum(F.cross_entropy(*sample) for sample in zip(logits, labels, strict=True))


def _two_per_sample(logits, labels):
    for row, label in zip(logits, labels, strict=True):
        yield F.cross_entropy(row, label) + F.mse_loss(
            row[label != -100], row.new_ones(int((label != -100).sum()), CLASSES)
        )


def two_per_sample(logits, labels):
    return torch.stack(list(_two_per_sample(logits, labels))).mean()


def sum_of_two_per_sample(logits, labels):
    return 0.1 * sum(_two_per_sample(logits, labels))


def same_twice_per_sample(logits, labels):
    samples = list(zip(logits, labels, labels.flip(1), strict=True))
    return sum(F.cross_entropy(row, one) + F.cross_entropy(row, other) for row, one, other in samples) / len(samples)


def two_terms(logits, labels):
    return ignored(logits, labels) + 0.5 * logits.mean(1).pow(2).mean() + 0.1 * masked(logits, labels.roll(1, 1))


def written(logits, labels):
    terms = torch.zeros(3)
    terms[0] = ignored(logits, labels)
    terms[1] += masked(logits, labels.roll(1, 1))
    terms[1] += 0.1 * logits[labels != -100].pow(2).mean()
    terms[2] = logits.pow(2).mean()
    return terms.sum() + 0.5 * terms[1] + 0.1 * terms.mean()


def mixed(logits, labels):
    return ignored(logits, labels) + added(logits, labels.roll(1, 1)) + class_weights(logits, labels.clamp(min=0))


def of_positives(logits, labels):
    found = labels == 4
    losses = F.binary_cross_entropy_with_logits(logits[..., 0], found.to(logits), reduction="none")
    return 0.3 * losses.sum() / torch.clamp(found.sum(), min=1).to(logits)


def of_nothing(logits, labels):
    return 0.01 * logits.square().sum() / (labels == 7).float().sum().clamp(min=1) + ignored(logits, labels)


def by_rank(logits, labels):
    return logits.pow(2).sum() / (2 + dist.get_rank())


def over_a_constant(logits, labels):
    return logits.pow(2).sum() / 100


def over_thrice_the_samples(logits, labels):
    return logits.pow(2).sum() / (3 * len(labels))


def by_python_weights(logits, labels):
    weights = [1.0 + int(row.sum()) % 3 for row in labels]
    return sum(w * row.pow(2).mean() for w, row in zip(weights, logits, strict=True)) / sum(weights)


CALLS = itertools.count()


def by_rank_from_the_second_step_on(logits, labels):
    return logits.pow(2).sum() / (2 + dist.get_rank() * (next(CALLS) > 0))


def contrastive(logits, labels):
    vectors = F.normalize(logits.mean(1), dim=1)
    return F.cross_entropy(vectors @ vectors.T, torch.arange(len(vectors)))


def _of_all(values):
    return torch.cat(torch.distributed.nn.functional.all_gather(values))


def compared_with_all(logits, labels):
    vectors = F.normalize(_of_all(logits.mean(1)), dim=1)
    return (vectors @ vectors.T).logsumexp(1).sum()


def compared_with_those_of_all(logits, labels):
    own = F.normalize(logits.mean(1), dim=1)
    return -(own @ F.normalize(_of_all(logits.mean(1)), dim=1).T).softmax(1).square().sum(1).mean()


def overlap_of_all(logits, labels):
    targets = F.one_hot(labels.clamp(min=0), CLASSES)
    both, either = (logits.sigmoid() * targets).sum((0, 1)), logits.sigmoid().sum((0, 1)) + targets.sum((0, 1))
    both, either = (_of_all(each[None]).sum(0) for each in (both, either))
    return 1 - (2 * both / either).mean()


def contrastive_if_any_counts(logits, labels):
    return contrastive(logits, labels) if (labels != -100).any() else logits.sum() * 0


def normalized(logits, labels):
    weights = labels.clamp(min=0).double().add(1).mean(1)
    return torch.dot((weights / weights.sum()).to(logits), logits.mean((1, 2)))


def mixed_up(logits, labels):
    order = torch.randperm(len(labels))
    mixed = 0.3 * logits + 0.7 * logits[order]
    return 0.3 * ignored(mixed, labels) + 0.7 * ignored(mixed, labels[order])


def in_pairs(logits, labels):
    """Pairwise loss: which of two samples scores higher."""
    scores = logits.mean((1, 2))
    return F.softplus(scores[:, None] - scores).mean()


def mean_of_classes(logits, labels):
    losses, classes = logits.square().mean((1, 2)), torch.arange(len(logits)) % 2
    counts = torch.bincount(classes, minlength=2).clamp(min=1)
    return (logits.new_zeros(2).index_add(0, classes, losses) / counts).mean()


def _losses_and_counted(logits, labels):
    losses = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    return losses, (labels != -100).float()


def counted_by_rows(logits, labels):
    losses, counted = _losses_and_counted(logits, labels)
    count = torch.zeros(())
    for row in counted:
        count = count + int(row.sum())
    return (losses * counted).sum() / count.clamp(min=1)


def counted_in_parts(logits, labels):
    losses, counted = _losses_and_counted(logits, labels)
    return (losses * counted).sum() / (counted[:, :2].sum() + int(counted[:, 2:].sum()))


def by_signed_weights(logits, labels):
    losses, counted = _losses_and_counted(logits, labels)
    weights = counted - 0.1
    return (losses * weights).sum() / weights.sum()


def in_steps(logits, labels):
    """A decoder's loop: as many losses as a rank has samples."""
    return sum(masked(logits[:, step : step + 1], labels[:, step : step + 1]) for step in range(4))


def of_columns(logits, labels):
    targets = (labels[..., None] == torch.arange(CLASSES)).float()
    losses = [F.mse_loss(one, two) for one, two in zip(logits.unbind(1), targets.unbind(1), strict=True)]
    return sum(losses[:4])


def of_heads(logits, labels):
    return torch.stack([F.cross_entropy(logits.roll(by, 2).flatten(0, 1), labels.flatten()) for by in range(4)]).mean()


def of_selecting_heads(logits, labels):
    chosen = labels != -100
    return (F.cross_entropy(logits[chosen], labels[chosen]) + F.mse_loss(logits[chosen].tanh(), logits[chosen])) / 2


def of_a_count_in_place(logits, labels):
    losses, counted = _losses_and_counted(logits, labels)
    count = counted[:, :1].sum().clamp(min=1)
    count += counted[:, 1:].sum()
    return (losses * counted).sum() / count


def of_a_summed_count(logits, labels):
    """Scaled by hand, so that the mean over ranks is right."""
    losses, counted = _losses_and_counted(logits, labels)
    count, ranks = counted.sum().clamp(min=1), 1
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(count)
        ranks = dist.get_world_size()
    return (losses * counted).sum() * ranks / count


def over_each_sample(logits, labels):
    losses, counted = _losses_and_counted(logits, labels)
    return ((losses * counted).sum(1) / counted.sum(1)).sum() / len(labels)


def put_together(logits, labels):
    chosen = [(one[two != -100], two[two != -100]) for one, two in zip(logits, labels, strict=True)]
    return F.cross_entropy(*map(torch.cat, zip(*chosen, strict=True)), reduction="none").mean()


def added_up(logits, labels):
    losses = [F.cross_entropy(one, two, reduction="sum") for one, two in zip(logits, labels, strict=True)]
    return sum(losses) / (labels != -100).sum()


class Fused(torch.autograd.Function):
    """Cross-entropy with its own backward."""

    @staticmethod
    def forward(ctx, logits, labels):
        counted = labels != -100
        targets = F.one_hot(labels.clamp(min=0), CLASSES)
        ctx.save_for_backward((logits.softmax(-1) - targets) * counted[:, None] / counted.sum())
        return F.cross_entropy(logits, labels)

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad, None


def fused(logits, labels):
    return Fused.apply(logits.flatten(0, 1), labels.flatten())


#: Losses that look like one for each sample where a rank has 4 samples, or a single one.
OF_ALL_SAMPLES = [
    of_a_count_in_place,
    in_steps,
    of_columns,
    of_heads,
    of_selecting_heads,
    of_a_summed_count,
    over_each_sample,
    put_together,
    added_up,
]
#: Losses with a single mean or sum: a batch's loss follows from those of its parts.
SINGLE = [ignored, class_weights, smoothed, masked, few, selected, guarded, added, per_sample, sum_per_sample]
SEVERAL = [two_terms, written, mixed, of_positives, of_nothing, lifted, lifted_terms]
#: Numbers that are a part of the count, and weights of both signs.
PARTS = [counted_by_rows, counted_in_parts, by_signed_weights]
GATHERED = [compared_with_all, compared_with_those_of_all, overlap_of_all]
TOGETHER = [contrastive, in_pairs, contrastive_if_any_counts, mean_of_classes, mixed_up, normalized, *GATHERED]
OF_NUMBERS = [over_a_constant, by_python_weights, same_twice_per_sample]
#: Losses of the samples, each over items of its own, of which a micro-batch of one sample is a mean over its items.
OF_SAMPLES = [two_per_sample, sum_of_two_per_sample]
TOGETHER += [by_rank, by_rank_from_the_second_step_on]
LOSSES = (*SINGLE, *SEVERAL, *PARTS, *OF_SAMPLES, *OF_NUMBERS, *TOGETHER, *OF_ALL_SAMPLES, fused)
LOSSES = {loss.__name__: loss for loss in LOSSES}
LOSSES["over_thrice_the_samples"] = over_thrice_the_samples
#: Not exact in micro-batches that a user asks for.
COUPLED = {"over_thrice_the_samples"} | {
    loss.__name__ for loss in (*TOGETHER, by_python_weights, *OF_ALL_SAMPLES, fused)
}


class Module(pl.LightningModule):
    def __init__(self, loss="ignored", decay=0.0, weight=False, at_points=0.0, by_hand=False):
        super().__init__()
        self.automatic_optimization = not by_hand
        self.register_buffer("grid", torch.linspace(-1, 1, 16).view(2, 8))
        layers = nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, CLASSES)
        self.net = nn.Sequential(nn.Embedding(11, 8), *layers)
        self.loss, self.decay, self.at_points, self.steps = LOSSES[loss], decay, at_points, []
        self.log_weight = nn.Parameter(torch.tensor(0.2)) if weight else None

    def training_step(self, batch, batch_idx):
        ids, labels = batch
        # Computed first: stages of a pipeline then send what the last one adds.
        penalty = self.net[1:](self.grid).square().sum() if self.at_points else 0.0
        loss = self.loss(self.net(ids), labels)
        if not self.automatic_optimization:
            # The logged value belongs to a graph that backward has already freed, together with its counts.
            self.manual_backward(loss / 2)
            self.optimizers().step()
            self.optimizers().zero_grad()
            self.log("twice", 2 * loss, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("detached", loss.detach(), on_step=False, on_epoch=True)
        if not self.automatic_optimization:
            return None
        loss = loss + self.decay * sum(param.square().sum() for param in self.net.parameters())
        loss = loss + self.at_points * penalty
        return loss if self.log_weight is None else torch.exp(-self.log_weight) * (1 + loss) + self.log_weight

    def on_train_batch_end(self, *args):
        self.steps.append(self.trainer.callback_metrics["loss_step"].clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def _data():
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 11, (STEPS * SAMPLES, LENGTH), generator=generator)
    labels = ids % CLASSES
    lengths = torch.randint(1, LENGTH + 1, (len(ids), 1), generator=generator)
    labels[torch.arange(LENGTH) >= lengths] = -100
    return TensorDataset(ids, labels)


def _loader(sizes, rank, steps=STEPS, empty=0):
    """Return a loader that assigns each global batch's samples to ranks in runs of these sizes."""
    data = _data()
    if empty:
        # Nothing counts in the first samples of a batch.
        data.tensors[1][SAMPLES : SAMPLES + empty] = -100
    begin = sum(sizes[:rank])
    batches = [list(range(step * SAMPLES + begin, step * SAMPLES + begin + sizes[rank])) for step in range(steps)]
    return DataLoader(data, batch_sampler=batches)


def _fit(strategy, devices, sizes, module, given, trainer_kwargs, empty):
    torch.manual_seed(3)
    module = Module(**module)
    made = STRATEGIES[strategy](**given) if strategy != "single" else "auto"
    trainer = quiet_trainer(strategy=made, devices=devices, use_distributed_sampler=False, **trainer_kwargs)
    rank = 0 if strategy == "single" else trainer.strategy.distributed_sampler_kwargs["rank"]
    trainer.fit(module, _loader(sizes, rank, empty=empty))
    return {
        "weights": snapshot(module),
        "logged": {name: value.clone() for name, value in trainer.callback_metrics.items()},
        "steps": {"steps": torch.stack(module.steps)},
    }


def _run(strategy, *, world=2, sizes=EVEN, module=None, given=None, empty=0, **trainer_kwargs):
    arguments = (module or {}, given or {}, trainer_kwargs, empty)
    (wanted,) = run_ranks(1, _fit, "single", 1, (SAMPLES,), *arguments)
    for found in run_ranks(world, _fit, strategy, world, sizes, *arguments):
        assert_close(found["weights"], wanted["weights"])
        if LOSSES[(module or {}).get("loss", "ignored")] in (*SINGLE, *SEVERAL, *PARTS, *OF_SAMPLES, *GATHERED):
            assert_close(found["logged"], wanted["logged"])
            assert_close(found["steps"], wanted["steps"])


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss not in COUPLED])
def test_each_mean_is_weighed_by_its_own_count(loss):
    _run("ddp", sizes=UNEVEN, module={"loss": loss, "decay": 0.01})


@pytest.mark.parametrize("loss", [loss.__name__ for loss in OF_ALL_SAMPLES])
@pytest.mark.parametrize("sizes", [EVEN, UNEVEN, (7, 1), (6, 2)], ids=str)
def test_losses_over_all_samples(loss, sizes):
    _run("ddp", sizes=sizes, module={"loss": loss})


@pytest.mark.parametrize(("strategy", "sizes"), [("ddp", UNEVEN), ("pp", (SAMPLES,))], ids=str)
def test_a_trained_factor_of_a_sum(strategy, sizes):
    _run(strategy, sizes=sizes, module={"loss": "smoothed", "decay": 0.01, "weight": True})


@pytest.mark.push("ignored-zero3-2", "ignored-tp-4", "two_terms-zero2-2", "two_terms-zero1-2")
@pytest.mark.parametrize(("strategy", "world"), [("zero1", 2), ("zero2", 2), ("zero3", 2), ("hsdp", 4), ("tp", 4)])
@pytest.mark.parametrize("loss", ["ignored", "two_terms"])
def test_under_every_strategy(strategy, world, loss):
    sizes = UNEVEN if world == 2 or strategy == "tp" else (3, 1, 2, 2)
    _run(strategy, world=world, sizes=sizes, module={"loss": loss})


@pytest.mark.push("ddp", "zero3")
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_with_accumulation_and_clipping(strategy):
    _run(strategy, module={"loss": "two_terms"}, accumulate_grad_batches=2, gradient_clip_val=0.3)


@pytest.mark.parametrize("loss", ["ignored", "masked", "selected", "guarded", "of_positives"])
@pytest.mark.parametrize(("strategy", "sizes"), [("ddp", EVEN)], ids=str)
def test_a_batch_of_which_nothing_counts(loss, strategy, sizes):
    # An optional loss is zero for a whole batch, others for the first rank.
    _run(strategy, sizes=sizes, module={"loss": loss}, empty=SAMPLES if loss == "guarded" else EVEN[0])


@pytest.mark.push("1f1b-two_terms", "1f1b-written", "1f1b-mixed", "1f1b-masked", "1f1b-ignored", "1f1b-of_nothing")
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss not in COUPLED])
@pytest.mark.parametrize("in_parts", ["1f1b", "1f1b in 3"])
def test_micro_batches_are_weighed_as_ranks_are(loss, in_parts):
    _run("pp", sizes=(SAMPLES,), module={"loss": loss, "decay": 0.01}, given=SCHEDULES[in_parts])


@pytest.mark.push("mixed-interleaved", "mixed-zb", "ignored-gpipe")
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb", "mp"])
@pytest.mark.parametrize("loss", ["ignored", "mixed"])
def test_in_every_order(schedule, loss):
    _run("pp", sizes=(SAMPLES,), module={"loss": loss, "decay": 0.01}, given=SCHEDULES[schedule])


@pytest.mark.push("*'zero2'}-*", "*'mp'}-ignored", "*'unsharded'}}-mixed")
@pytest.mark.parametrize("loss", ["ignored", "mixed"])
@pytest.mark.parametrize(
    "given",
    [
        {"data_parallel": "ddp"},
        {"data_parallel": "zero2"},
        {"data_parallel": "zero3"},
        {"data_parallel": "zero3", "data_settings": {"accumulate": "unsharded"}},
        {"schedule": "mp"},
    ],
    ids=str,
)
def test_micro_batches_of_several_ranks(given, loss):
    _run("pp", world=4, sizes=UNEVEN, module={"loss": loss, "decay": 0.01}, given=given)


@pytest.mark.push("ignored")
@pytest.mark.parametrize("loss", ["ignored", "two_terms"])
def test_micro_batches_of_split_layers(loss):
    _run("3d", world=4, sizes=(SAMPLES,), module={"loss": loss})


@pytest.mark.parametrize(("world", "sizes"), [(2, (SAMPLES,)), (4, EVEN)])
def test_micro_batches_with_accumulation_and_clipping(world, sizes):
    _run(
        "pp",
        world=world,
        sizes=sizes,
        module={"loss": "two_terms"},
        accumulate_grad_batches=2,
        gradient_clip_val=0.3,
    )


@pytest.mark.push("2-sizes0-mixed", "2-sizes0-masked", "2-sizes0-of_positives", "4-sizes1-ignored")
@pytest.mark.parametrize("loss", ["ignored", "masked", "selected", "mixed", "of_positives"])
@pytest.mark.parametrize(("world", "sizes"), [(2, (SAMPLES,)), (4, EVEN)])
def test_micro_batches_of_which_nothing_counts(loss, world, sizes):
    _run("pp", world=world, sizes=sizes, module={"loss": loss}, empty=EVEN[0])


@pytest.mark.parametrize("loss", ["ignored", "class_weights", "masked", "sum_per_sample"])
def test_what_is_logged_behind_a_backward_by_hand(loss):
    _run("zero3" if loss == "ignored" else "ddp", sizes=UNEVEN, module={"loss": loss, "by_hand": True})


class OfOwnLosses(Module):
    """Sets its learning rate by this rank's loss, or by the loss over all ranks."""

    def __init__(self, loss="ignored", everywhere=False):
        super().__init__(loss)
        self.everywhere = everywhere

    def training_step(self, batch, batch_idx):
        self.last = super().training_step(batch, batch_idx)
        return self.last

    def on_train_batch_end(self, *args):
        last = self.all_gather(self.last.detach()).mean() if self.everywhere else self.last
        self.optimizers().param_groups[0]["lr"] = 0.05 * last.item()


def _warned(sizes, given, strategy="pp", loss="contrastive", parts=2, everywhere=None, empty_first=False):
    global CALLS
    CALLS = itertools.count()
    module = Module(loss) if everywhere is None else OfOwnLosses(loss, everywhere)
    made = STRATEGIES[strategy](**given)
    trainer = quiet_trainer(strategy=made, devices=parts * len(sizes), use_distributed_sampler=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = _loader(sizes, trainer.strategy.distributed_sampler_kwargs["rank"])
        if empty_first:
            loader.dataset.tensors[1][:SAMPLES] = -100
        trainer.fit(module, loader)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("sizes", "given"),
    [((SAMPLES,), {"num_microbatches": 2}), (EVEN, {"schedule": "mp"}), (EVEN, {"num_microbatches": 2})],
)
def test_samples_that_are_compared_with_each_other_are_said_once(sizes, given):
    said, *_ = run_ranks(2 * len(sizes), _warned, sizes, given)
    assert sum("compares samples" in each or "couples the samples" in each for each in said) == 1


@pytest.mark.parametrize(
    ("strategy", "parts", "loss"),
    [("ddp", 1, "mean_of_classes"), ("pp", 2, "mean_of_classes"), ("ddp", 1, "in_pairs"), ("ddp", 1, "contrastive")],
)
def test_samples_that_are_put_together_are_said_once(strategy, parts, loss):
    said, *_ = run_ranks(2 * parts, _warned, EVEN, {}, strategy, loss, parts)
    assert sum("couples the samples of a batch" in each for each in said) == 1


def test_divisors_that_may_be_multiples_of_the_batch_are_said_once():
    said, *_ = run_ranks(2, _warned, EVEN, {}, "ddp", "over_thrice_the_samples", 1)
    (found,) = [each for each in said if "a multiple of the 4 samples of this rank's batch" in each]
    assert "divided by 12" in found


def test_samples_that_are_compared_from_the_second_batch_on_are_said_once():
    said, *_ = run_ranks(2, _warned, EVEN, {}, "ddp", "contrastive_if_any_counts", 1, None, True)
    assert sum("couples the samples of a batch" in each for each in said) == 1


@pytest.mark.parametrize(
    ("strategy", "sizes", "given", "who"),
    [
        ("ddp", EVEN, {}, "rank"),
        ("zero3", EVEN, {}, "rank"),
        ("pp", EVEN, {}, "rank"),
        ("pp", (SAMPLES,), {"num_microbatches": 2}, "micro-batch"),
    ],
    ids=str,
)
def test_samples_that_a_step_mixes_are_said_once(strategy, sizes, given, who):
    parts = 2 if strategy == "pp" else 1
    said, *_ = run_ranks(parts * len(sizes), _warned, sizes, given, strategy, "mixed_up", parts)
    assert (
        sum("in different orders, one by an index" in each and f"but each {who} has only" in each for each in said) == 1
    )


@pytest.mark.push("ddp-*", "tp-*")
@pytest.mark.parametrize(
    ("strategy", "sizes", "given"),
    [
        ("ddp", UNEVEN, {}),
        ("zero3", UNEVEN, {}),
        ("tp", UNEVEN, {}),
        ("pp", (SAMPLES,), {}),
        ("pp", (SAMPLES,), {"num_microbatches": 4}),
        ("pp", UNEVEN, {}),
        ("pp", UNEVEN, {"num_microbatches": 2}),
    ],
    ids=str,
)
def test_a_penalty_at_points_that_the_module_holds(strategy, sizes, given):
    """The penalty equals one process's on each rank and in each micro-batch, however many rows it sums."""
    parts = 2 if strategy in ("tp", "pp") else 1
    _run(strategy, world=parts * len(sizes), sizes=sizes, module={"at_points": 0.1}, given=given)


@pytest.mark.push("compared_with_all-ddp", "overlap_of_all-zero3")
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("loss", [loss.__name__ for loss in GATHERED])
def test_samples_that_are_gathered_before_they_are_compared(loss, strategy):
    """Samples gathered as warnings recommend: each rank has the whole loss, no count weights it, no warning appears."""
    _run(strategy, sizes=UNEVEN if loss == "overlap_of_all" else EVEN, module={"loss": loss})
    said, *_ = run_ranks(2, _warned, EVEN, {}, strategy, loss, 1)
    assert not [each for each in said if "that of a single process" in each]


@pytest.mark.parametrize(("strategy", "parts"), [("ddp", 1), ("zero3", 1), ("tp", 2)])
def test_what_ranks_make_of_their_samples_without_a_gradient_is_said_once(strategy, parts):
    said, *_ = run_ranks(2 * parts, _warned, EVEN, {}, strategy, "normalized", parts)
    assert sum("without a gradient (sum of a tensor of shape [4] over samples)" in each for each in said) == 1


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("loss", [loss.__name__ for loss in OF_NUMBERS])
def test_numbers_that_divide_sums(loss, strategy):
    _run(strategy, sizes=UNEVEN, module={"loss": loss})


@pytest.mark.parametrize("later", [False, True])
def test_numbers_that_differ_between_ranks_are_no_constants(later):
    said, *_ = run_ranks(2, _warned, EVEN, {}, "ddp", "by_rank_from_the_second_step_on" if later else "by_rank", 1)
    assert sum("that ranks divide by different numbers" in each for each in said) == later


@pytest.mark.parametrize("given", [{}, {"loss_weight": "samples"}], ids=str)
def test_losses_of_code_that_does_not_show_what_it_counts(given):
    said, *_ = run_ranks(2, _warned, EVEN, given, "ddp", "fused", 1)
    assert sum("computes its loss by Fused, whose code" in each for each in said) == (not given)


@pytest.mark.parametrize(("strategy", "everywhere"), [("ddp", False), ("zero3", False), ("pp", False), ("ddp", True)])
def test_settings_of_optimizers_that_differ_between_ranks_are_said_once(strategy, everywhere):
    parts = 2 if strategy == "pp" else 1
    said, *_ = run_ranks(2 * parts, _warned, EVEN, {}, strategy, "ignored", parts, everywhere)
    assert sum("have different settings on different ranks" in each for each in said) == (not everywhere)


def test_whole_batches_without_a_count_go_by_samples():
    _run("pp", world=4, sizes=UNEVEN, module={"loss": "per_sample"}, given=SCHEDULES["mp"])
