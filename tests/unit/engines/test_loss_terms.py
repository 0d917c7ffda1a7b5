"""Decomposition of a loss into terms, based on its autograd graph."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pardist.compat.autograd_graph import inputs_of, is_python_number, kind_of, saved, shape_of
from lightning_pardist.engines.common.floored_counts import noted_floors
from lightning_pardist.engines.common.held_tensors import mark_held
from lightning_pardist.engines.common.loss_couplings import couplings
from lightning_pardist.engines.common.loss_term import is_multiple_of_batch
from lightning_pardist.engines.common.loss_terms import find_terms

BATCH, LENGTH, WIDTH, CLASSES = 4, 6, 8, 10
torch.manual_seed(0)
NET = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))
LOG_SIGMA = nn.Parameter(torch.zeros(2))
TOKENS, SAMPLES = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, WIDTH)
LABELS = torch.randint(0, CLASSES, (BATCH, LENGTH))
LABELS[0, 2:] = LABELS[1, 5] = -100
COUNTED = LABELS != -100
FEW = (torch.arange(BATCH * LENGTH) < 2).reshape(BATCH, LENGTH)
ROWS = (torch.arange(BATCH * LENGTH) < 3).reshape(BATCH, LENGTH, 1)
WEIGHT = torch.linspace(0.5, 2.0, CLASSES)
COUNT, WEIGHTS = float(COUNTED.sum()), float(WEIGHT[LABELS[COUNTED]].sum())


def tokens():
    return NET(TOKENS)


def samples():
    return NET(SAMPLES)


def nll(**kwargs):
    return F.cross_entropy(tokens().flatten(0, 1), LABELS.flatten(), **kwargs)


def penalty():
    return 1e-3 * sum(param.pow(2).sum() for param in NET.parameters()) + torch.linalg.svdvals(NET[1].weight).sum()


def mean(count):
    return [("mean", count)]


SUM = [("sum", 0.0)]


def written(*terms):
    vector = torch.zeros(len(terms))
    for place, term in enumerate(terms):
        vector[place] = term
    return vector


def added(*terms):
    vector = torch.zeros(len(terms))
    for place, term in enumerate(terms):
        vector[place] -= 0.5 * term
        vector[place] -= 0.5 * term.detach()
    return vector


CASES = {
    "ignore_index": (nll, mean(COUNT)),
    "class weights": (lambda: nll(weight=WEIGHT), mean(WEIGHTS)),
    "classes second": (lambda: F.cross_entropy(tokens().transpose(1, 2), LABELS), mean(COUNT)),
    "label smoothing": (lambda: nll(label_smoothing=0.1), mean(COUNT) * 2),
    "probabilities": (lambda: F.cross_entropy(samples(), torch.rand(BATCH, CLASSES)), mean(BATCH)),
    "sum over count": (lambda: nll(reduction="sum") / COUNTED.sum(), mean(COUNT)),
    "sum over a python count": (lambda: nll(reduction="sum") / int(COUNTED.sum()), mean(COUNT)),
    "sum over a python count of few": (lambda: (tokens().mean(2) * FEW).sum() / int(FEW.sum()), mean(2.0)),
    "rows over a python count": (lambda: (tokens() * ROWS).sum() / (int(ROWS.sum()) * CLASSES), mean(3.0 * CLASSES)),
    "sum over a constant": (lambda: (tokens().mean(2) * FEW).sum() / 3, SUM),
    "mask": (lambda: (tokens().mean(2) * COUNTED).sum() / COUNTED.sum().clamp(min=1), mean(COUNT)),
    "einsum to a number": (
        lambda: torch.einsum("bl,bl->", tokens().mean(2), COUNTED.float()) / COUNTED.sum(),
        mean(COUNT),
    ),
    "vdot": (lambda: torch.vdot(tokens().mean(2).flatten(), COUNTED.float().flatten()) / COUNTED.sum(), mean(COUNT)),
    "trace": (lambda: (tokens().mean(2).T @ COUNTED.float()).trace() / COUNTED.sum(), mean(COUNT)),
    "indexed": (lambda: tokens()[COUNTED].mean(), mean(COUNT * CLASSES)),
    "mean squared error": (lambda: F.mse_loss(samples(), torch.zeros(BATCH, CLASSES)), mean(BATCH * CLASSES)),
    "masked means of samples": (lambda: ((tokens().mean(2) * COUNTED).sum(1) / COUNTED.sum(1)).mean(), mean(BATCH)),
    "batchmean": (
        lambda: F.kl_div(samples().log_softmax(1), torch.rand(BATCH, CLASSES), reduction="batchmean"),
        mean(BATCH),
    ),
    "sum over samples": (lambda: samples().pow(2).sum() / BATCH, mean(BATCH)),
    "a mean over samples, then a sum": (lambda: samples().mean(0).sum(), mean(BATCH)),
    "a mean over features, then a sum": (lambda: samples().mean(1).sum(), SUM),
    "sum": (lambda: samples().pow(2).sum(), SUM),
    "half a sum": (lambda: 0.5 * samples().pow(2).sum(), SUM),
    "a sum over two": (lambda: samples().pow(2).sum() / 2, SUM),
    "a sum over a constant": (lambda: samples().pow(2).sum() / 100, SUM),
    "a sum over a constant that is a size of the batch times two": (lambda: samples().pow(2).sum() / (2 * BATCH), SUM),
    "a sum over samples of all ranks, times ranks": (lambda: samples().pow(2).sum() * 2 / (2 * BATCH), mean(BATCH)),
    "two sums": (lambda: samples().exp().sum() - 0.5 * (1 + samples()).sum(), SUM * 2),
    "time first": (lambda: NET(torch.randn(7, BATCH, WIDTH)).mean(0).sum(), SUM),
    "penalty": (lambda: nll() + penalty(), mean(COUNT)),
    "two terms": (lambda: nll() + 0.3 * samples().mean(), [*mean(COUNT), *mean(40.0)]),
    "a stack of terms": (lambda: torch.stack([nll(), samples().mean()]).mean(), [*mean(COUNT), *mean(40.0)]),
    "terms written into a vector": (lambda: written(nll(), samples().mean()).sum(), [*mean(COUNT), *mean(40.0)]),
    "terms added to a vector": (lambda: added(nll(), samples().mean()).mean(), [*mean(COUNT), *mean(40.0)]),
    "learned weights": (
        lambda: (-LOG_SIGMA[0]).exp() * nll() + (-LOG_SIGMA[1]).exp() * samples().mean() + LOG_SIGMA.sum(),
        [*mean(COUNT), *mean(40.0)],
    ),
    "for each sample": (lambda: sum(logits.pow(2).mean() for logits in tokens()) / BATCH, [("other", 0.0)] * BATCH),
    "half precision": (lambda: nll().bfloat16().float(), mean(COUNT)),
}


@pytest.mark.parametrize("name", CASES)
def test_terms(name):
    make, wanted = CASES[name]
    found = [term for term in find_terms(make(), samples=BATCH) if term.kind != "constant"]
    assert [(term.kind, pytest.approx(float(term.count))) for term in found] == wanted
    assert not any(term.nonlinear for term in found)


def test_a_penalty_is_a_constant_however_many_parameters():
    net = nn.Sequential(*[nn.Linear(3, 3) for _ in range(60)])
    loss = samples().mean() + sum(param.norm() for param in net.parameters())
    assert {term.kind for term in find_terms(loss, samples=BATCH)} == {"mean", "constant"}


def test_terms_multiplied_into_a_vector_are_no_summands():
    vector = torch.ones(2)
    vector[0] = nll()
    vector[0].mul_(samples().mean())
    vector[1].mul_(samples().mean())
    assert {term.kind for term in find_terms(vector.sum(), samples=BATCH)} == {"other"}


def test_nothing_counts():
    empty = torch.zeros(BATCH, LENGTH)
    loss = (tokens().mean(2) * empty).sum() / empty.sum().clamp(min=1)
    (term,) = find_terms(loss, samples=BATCH)
    assert term.count == 0


def test_picked_items_come_first_where_features_are_as_many_as_samples():
    picked = samples()[torch.tensor([2]), :BATCH]
    (term,) = find_terms(picked.abs().sum() / 1, samples=BATCH)
    assert (term.kind, term.count) == ("mean", 1)


def test_what_nothing_is_divided_by_is_no_count():
    none = torch.tensor([], dtype=torch.long)
    loss = samples().pow(2).mean() + F.l1_loss(samples()[none], torch.zeros(0, CLASSES), reduction="sum") / max(
        len(none), 1
    )
    assert [term.count for term in find_terms(loss, samples=BATCH) if term.by_data] == [0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: samples().mean().sqrt(),
        lambda: samples().mean() * tokens().mean(),
        lambda: samples().mean(0).pow(2).sum(),
        lambda: samples().std(0).mean(),
        # The divisors of several sums may be constants.
        lambda: (samples().pow(2).sum(0) / torch.linspace(1.0, 2.0, CLASSES)).sum(),
        # Load-balancing loss of Switch Transformers.
        lambda: (samples().softmax(1).mean(0) * samples().detach().softmax(1).mean(0)).sum(),
        # That of Mixtral, with the two choices of each token along one dim.
        lambda: (torch.rand(2, CLASSES) * samples().softmax(1).mean(0)[None]).sum(),
        lambda: torch.minimum(samples().mean(), torch.tensor(0.5)),
        lambda: (mean := samples().mean()) + (mean - 1).square(),
    ],
)
def test_what_is_more_than_the_sum_of_its_parts_is_named(make):
    assert any(term.nonlinear for term in find_terms(make(), samples=BATCH))


@pytest.mark.parametrize("kept", [COUNTED, COUNTED & (torch.arange(LENGTH) > 0)])
@pytest.mark.parametrize("clamp", [True, False])
def test_means_with_counts_of_their_own(kept, clamp):
    counts = kept.sum(0).clamp(min=1) if clamp else kept.sum(0)
    loss = ((tokens().mean(2) * kept).sum(0) / counts).mean()
    assert [float(term.count) for term in find_terms(loss, samples=BATCH)] == kept.sum(0).tolist()


@pytest.mark.parametrize("lengths", [(2, 4, 1, 3), (1, 1, 1, 1), (3, 1, 6, 2)])
def test_items_of_each_sample_beside_means_of_samples(lengths):
    """A detector's boxes: their number may coincide with that of the samples, or with a box's coordinates."""
    rows = tokens()[:, :, :4]
    boxes = [(row[:length] - 1).abs().sum() for row, length in zip(rows, lengths, strict=True)]
    classes = [F.cross_entropy(row[:1], LABELS[3, :1]) for row in tokens()]
    *others, found = find_terms(torch.stack(classes).mean() + sum(boxes) / sum(lengths), samples=BATCH)
    assert (found.kind, found.count) == ("mean", sum(lengths))
    assert [(term.kind, term.nonlinear) for term in others] == [("other", "")] * BATCH


def test_samples_that_are_compared():
    features = samples()
    assert list(couplings(F.cross_entropy(features @ features.t(), torch.arange(BATCH)), samples=BATCH))
    assert list(couplings((features.t() @ features / BATCH).pow(2).sum(), samples=BATCH))
    for loss in (nll(), samples().mean() + (NET[1].weight @ NET[1].weight.t()).sum()):
        assert not list(couplings(loss, samples=BATCH))


def test_sums_over_samples_that_are_added_to_each_sample():
    rows, table = samples(), nn.Embedding(2 * BATCH, 4)
    each, mask = rows.square().sum(1), torch.arange(BATCH) % 2
    for loss in ((each.sum() + each).sum(), (each - each.sum()).mean(), (rows.square().sum() + each).sum()):
        assert list(couplings(loss, samples=BATCH))
    summands = [
        each.mean(),
        each.sum() / BATCH,
        each.sum() * (1 / BATCH),
        (each / BATCH).sum(),
        (each * mask).sum() * (1 / mask.sum()),
        0.0 * each.sum(),
        table(torch.arange(2 * BATCH)).square().sum(),
        (NET[1].weight @ torch.ones(NET[1].weight.shape[1])).sum(),
    ]
    for summand in summands:
        assert not list(couplings((summand + each).mean(), samples=BATCH))
    assert not list(couplings(each.sum() + each.sum(), samples=BATCH))


@pytest.mark.parametrize(
    ("divisor", "expected"), [(3 * BATCH, True), (3 * BATCH + 1, False), (4 * BATCH, False), (100, False)]
)
def test_constants_that_may_be_counts(divisor, expected):
    (term,) = find_terms(samples().square().sum() / divisor, samples=BATCH)
    assert (term.kind, term.number) == ("sum", divisor)
    assert is_multiple_of_batch(term, BATCH) == expected
    assert not is_multiple_of_batch(term, 1)


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return torch.cat([values, values])

    @staticmethod
    def backward(ctx, grad):
        return grad[:BATCH] + grad[BATCH:]


def test_what_is_computed_from_gathered_samples_is_the_same_on_all_ranks():
    features = samples()
    all_features = AllGather.apply(features)
    scores = all_features @ all_features.t()
    for loss in (F.cross_entropy(scores, torch.arange(2 * BATCH)), scores.logsumexp(1).sum(), scores.var().log()):
        assert not list(couplings(loss, samples=BATCH, gathers=True))
        assert list(couplings(loss, samples=BATCH))
        (term,) = find_terms(loss * NET[1].bias.exp().sum() / 10, samples=BATCH, gathers=True)
        assert (term.kind, term.nonlinear) == ("other", "")
    own = features @ all_features.t()
    assert not list(couplings(own.logsumexp(1).mean(), samples=BATCH, gathers=True))
    assert list(couplings((features @ features.t() + own[:, :BATCH]).mean(), samples=BATCH, gathers=True))
    mean, whole = find_terms(features.mean() + scores.sum(), samples=BATCH, gathers=True)
    assert (mean.kind, whole.kind) == ("mean", "other")
    # Gathered parameters contain no samples.
    weight = AllGather.apply(NET[1].weight[:BATCH])
    (term,) = find_terms((features[:, :WIDTH] @ weight.t()).sum(), samples=BATCH, gathers=True)
    assert term.kind == "sum"


class Held(nn.Module):
    """Computes with tensors that the module holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("differences", torch.eye(BATCH) - torch.eye(BATCH).roll(1, 0))
        self.points = torch.linspace(-1, 1, BATCH * WIDTH).view(BATCH, WIDTH)
        self.frozen = nn.Linear(CLASSES, BATCH).requires_grad_(False)
        self.free = nn.Linear(BATCH, BATCH)


HELD = Held()
mark_held(HELD)


@pytest.mark.parametrize(
    "penalty",
    [
        lambda: 0.1 * (HELD.differences @ HELD.free.weight).pow(2).sum(),
        lambda: (HELD.free.weight.t() @ HELD.differences @ HELD.free.weight).trace(),
        lambda: NET(HELD.points).pow(2).sum() / 3,
        lambda: HELD.frozen(NET(HELD.points)).tanh().sum(),
    ],
)
def test_what_is_computed_from_held_tensors_alone_is_of_no_sample(penalty):
    mean, fixed = find_terms(samples().mean() + penalty(), samples=BATCH)
    assert (mean.kind, fixed.kind, fixed.of_held) == ("mean", "constant", True)


def test_held_tensors_that_meet_data():
    targets = torch.randn(BATCH, CLASSES)
    predicted = NET(HELD.points)
    for loss in ((predicted - targets).pow(2).sum(), F.mse_loss(predicted, targets, reduction="sum")):
        assert [term.kind for term in find_terms(loss, samples=BATCH)] == ["sum"]
    # Rows of a table may stand for samples.
    table = Held()
    table.rows = torch.randn(2 * BATCH, WIDTH)
    mark_held(table)
    (term,) = find_terms(NET(table.rows[BATCH:]).sum(), samples=BATCH)
    assert term.kind == "sum"


def test_weights_that_are_computed_with_held_tensors_hold_no_samples():
    weight = HELD.differences @ torch.linalg.matrix_exp(HELD.free.weight)
    assert not list(couplings((samples()[:, :BATCH] @ weight.t()).sum(), samples=BATCH))


def test_an_opaque_operation_goes_by_samples():
    class Opaque(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            ctx.shape = values.shape
            return values.mean()

        @staticmethod
        def backward(ctx, grad):
            return grad.expand(ctx.shape) / ctx.shape.numel()

    (term,) = find_terms(Opaque.apply(samples()), samples=BATCH)
    assert term.kind == "other"
    assert "by samples" in term.describe()


def test_what_torch_keeps_in_nodes():
    """Contract with torch: names, edges, shapes and saved values that the traversal reads."""
    node = nll().grad_fn
    assert kind_of(node) == "NllLoss"
    assert saved(node, "total_weight") == COUNT
    assert saved(node, "reduction") == 1
    assert shape_of(inputs_of(node)[0]) == (BATCH * LENGTH, CLASSES)
    node = samples().mean(-1).grad_fn
    assert (kind_of(node), len(saved(node, "dim")), saved(node, "keepdim")) == ("Mean", 1, False)
    total = samples().sum()
    for number in (2, 2.0):
        assert is_python_number(saved((total / number).grad_fn, "other"))
        for dtype in (torch.int64, torch.float32, torch.float64):
            assert not is_python_number(saved((total / torch.tensor(number, dtype=dtype)).grad_fn, "other"))


def test_what_a_sum_is_not_divided_by():
    temperature = COUNTED.sum()
    (term,) = find_terms((samples() / temperature).exp().sum(), samples=BATCH)
    assert term.kind == "sum"
    (term,) = find_terms((samples() / temperature).sum(), samples=BATCH)
    assert (term.kind, term.count) == ("mean", COUNT)
    # One operand of the addition is divided, not the sum.
    (term,) = find_terms((samples() / temperature + samples().exp()).sum(), samples=BATCH)
    assert term.kind == "sum"


def test_a_mask_on_one_side_of_an_addition_does_not_empty_the_sum():
    empty = torch.zeros(BATCH, 1)
    loss = ((samples() * empty).pow(2) + samples().exp()).sum() / empty.sum().clamp(min=1)
    (term,) = find_terms(loss, samples=BATCH)
    assert term.count == 1


def test_means_of_samples_beside_a_sum():
    each = sum(logits.pow(2).mean() for logits in tokens()) / BATCH
    found = find_terms(each + samples().abs().sum(), samples=BATCH)
    assert sorted(term.kind for term in found if term.kind != "constant") == ["other"] * BATCH + ["sum"]


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda: samples().softmax(0).pow(2).sum(), "Softmax"),
        (lambda: samples().topk(2, dim=-2).values.mean(), "Topk"),
        (lambda: (samples().mean(1) * torch.full((BATCH,), 1 / BATCH)).sum(), "weights that add up to 1"),
        (lambda: torch.full((BATCH,), 1 / BATCH) @ samples().mean(1), "weights that add up to 1"),
        (lambda: (samples() * torch.full((BATCH, 1), 1 / (BATCH * CLASSES))).sum(), "weights that add up to 1"),
        (lambda: (each_over_all(samples().exp())).mean(), "Div of each sample and a result of all samples"),
        (lambda: (samples() * samples().square().mean()).mean(), "Mul of each sample and a result of all samples"),
        (lambda: centered(samples()).square().mean(), "Sub of each sample and a result of all samples"),
    ],
)
def test_operations_over_all_samples(loss, reason):
    assert any(reason in each for each in couplings(loss(), samples=BATCH))


def each_over_all(values):
    return values / values.sum()


def centered(values):
    return values - values.mean(0)


def test_a_result_of_all_samples_may_be_added_to_each():
    loss = (samples().square().mean(1) + 0.1 * tokens().square().mean()).mean()
    assert not list(couplings(loss, samples=BATCH))


def test_weights_of_layers_are_no_results_of_all_samples():
    scale = LOG_SIGMA.exp().sum()
    for loss in ((samples() * scale).square().mean(), each_over_all(NET[1].weight).sum() + samples().mean()):
        assert not list(couplings(loss, samples=BATCH))


def test_operations_over_features_compare_no_samples():
    for loss in (samples().softmax(-1).pow(2).sum(), samples().topk(2).values.mean(), samples().cumsum(1).mean()):
        assert not list(couplings(loss, samples=BATCH))


def test_operations_within_single_samples_compare_none():
    def by_sample(loss):
        return torch.stack([loss(*one) for one in zip(tokens(), LABELS.float(), strict=True)]).mean()

    sorted_errors = by_sample(
        lambda logits, labels: (1 - logits * labels[:, None]).flatten().sort().values.relu().sum()
    )
    alone = torch.stack([F.cross_entropy(NET(x)[None, :3], torch.tensor([1])) for x in SAMPLES]).mean()
    for loss in (sorted_errors, alone):
        assert not list(couplings(loss, samples=BATCH))


def test_a_look_at_a_loss_runs_no_checkpointed_layer_again():
    layer, runs = nn.Linear(4, 4), []

    def forward(x):
        runs.append(x)
        return layer(x)

    hidden = checkpoint(forward, torch.randn(3, 4), use_reentrant=False)
    assert [term.kind for term in find_terms(hidden.square().mean(), samples=3, gathers=True)] == ["mean"]
    assert len(runs) == 1


def _scattered(rows, index, places):
    return torch.zeros(places, rows.shape[1]).index_add(0, index, rows)


def test_samples_that_are_added_up_by_class_are_found():
    """Unless the loss is a sum of these sums, with weights that the module holds."""
    layer, weights = nn.Linear(5, 4), nn.Module()
    weights.register_buffer("of_classes", torch.tensor([[0.1], [0.2], [0.3]]))
    mark_held(weights)
    x, y = torch.randn(8, 5), torch.tensor([2, 0, 1, 1, 0, 2, 2, 1])
    counts = torch.bincount(y)[:, None]
    sums, scattered = _scattered(layer(x), y, 3), torch.zeros(3).scatter_add(0, y, layer(x).mean(1))
    by_class = [
        (sums / counts).mean(),
        sums.square().sum(),
        sums.mean(),
        (layer(x) - (sums / counts)[y]).square().mean(),
    ]
    for loss in (*by_class, (scattered / counts[:, 0]).sum()):
        assert any("sums samples by class" in each for each in couplings(loss, samples=8))
    for loss in (sums.sum(), 0.1 * (sums * weights.of_classes).sum() + layer(x).mean()):
        assert not list(couplings(loss, samples=8))


@pytest.mark.parametrize(
    ("index", "places", "samples"),
    [
        ([0, 0, 0, 1, 1, 2, 2, 2], 3, 8),
        ([2, 0, 1, 3, 6, 7, 5, 4], 8, 4),
        ([3, 0, 1, 2, 1, 0, 3, 2], 4, 4),
        ([1, 0, 3, 2, 5, 5, 7, 6], 9, 4),
    ],
    ids=["nodes in order", "each to its own", "tokens brought back", "edges of each sample"],
)
def test_rows_that_belong_to_a_sample_are_added_up_within_it(index, places, samples):
    pooled = _scattered(nn.Linear(5, 4)(torch.randn(8, 5)), torch.tensor(index), places)
    assert not list(couplings(pooled.square().mean(), samples=samples))


@pytest.mark.parametrize(("factor", "ranks", "is_named"), [(BATCH, 2, True), (BATCH, 1, False), (3.0, 2, False)])
def test_a_mean_times_the_number_of_samples(factor, ranks, is_named):
    (term,) = find_terms(samples().pow(2).mean() * factor, samples=BATCH, ranks=ranks)
    assert bool(term.nonlinear) == is_named
    (term,) = find_terms(samples().pow(2).sum() * factor, samples=BATCH, ranks=ranks)
    assert not term.nonlinear


@pytest.mark.parametrize(
    ("divided", "added"),
    [
        (lambda count: count + 2.0, 2.0),
        (lambda count: 1 + count, 1.0),
        (lambda count: torch.add(count, 3).float(), 3.0),
        (lambda count: count.float() - 0.5, -0.5),
        (lambda count: count.clamp(min=1) + 1 + 1, 2.0),
        (lambda count: (count + 1).clamp_(min=1), 1.0),
        (lambda count: torch.zeros(()) + float(count), 0.0),
        (lambda count: count - 3 + float(3 * (count > 0)), 0.0),
        (lambda count: count + 1e-8, 0.0),
        (lambda count: (count + 1) * 2, 0.0),
    ],
)
def test_numbers_added_to_a_count(divided, added):
    with noted_floors():
        loss = (tokens().mean(2) * COUNTED).sum() / divided(COUNTED.sum())
    (term,) = find_terms(loss, samples=BATCH)
    assert term.added == added
    torch.testing.assert_close(term.divisor.float(), divided(COUNTED.sum()).float())


def test_a_number_added_to_a_count_of_nothing():
    empty = torch.zeros(BATCH, LENGTH)
    with noted_floors():
        loss = (tokens().mean(2) * empty).sum() / (empty.sum() + 2)
    (term,) = find_terms(loss, samples=BATCH)
    assert (term.count, term.divisor) == (0, 2)
