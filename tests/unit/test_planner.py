"""Planner: one rank of each strategy's real engines, with kernels that do not run."""

import json
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import HashStore
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader

import lightning_pardist
from lightning_pardist.cli import main
from lightning_pardist.compat.fake_group import in_fake_world
from lightning_pardist.engines.pipeline.stubs import StubMode
from lightning_pardist.planner import DeviceProfile, PlanError, ProfileError, find_profile, measuring, plan, search
from lightning_pardist.planner.candidates import DEFAULT, Candidate, enumerate_candidates
from lightning_pardist.planner.ledger import Block, HostStep, HostWork, Ledger, Message, Operator
from lightning_pardist.planner.measuring import measure_alone, measure_rank, nodes_of
from lightning_pardist.planner.operator_rates import measure_operators, rate_near, size_of
from lightning_pardist.planner.planned_rank import Place, dims_of, stage_places, trace_ranks
from lightning_pardist.planner.profiles import Link, data_sheet_of
from lightning_pardist.planner.skipped_kernels import SkippedKernels
from lightning_pardist.planner.step_time import message_seconds, operator_seconds, time_ranks, time_step
from lightning_pardist.registry import TABLE
from lightning_pardist.runtime import job_counts
from tests.helpers.experts import LENGTH, TOKENS, WIDTH, Mixture, is_expert
from tests.helpers.models import MODULES, Classifier

BATCH = torch.randn(8, 1, 8, 8), torch.randint(10, (8,))


class SecondOrder(Classifier):
    """Optimizer that needs whole parameters."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class TwoByHand(Classifier):
    """Two optimizers that the module steps itself in each training step."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self):
        params = list(self.parameters())
        return [torch.optim.Adam(params[:2]), torch.optim.Adam(params[2:])]


class Contrasts(pl.LightningModule):
    """Loss that compares the samples of a batch."""

    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        found = self.layers(batch)
        return F.cross_entropy(found @ found.T, torch.arange(len(batch)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Compares(Contrasts):
    """Loss that compares each sample with its own target."""

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.layers(batch), batch)


class BrokenData(pl.LightningDataModule):
    """Data module whose own code fails."""

    def setup(self, stage):
        raise KeyError("the column that is not there")


class NoLoader(pl.LightningDataModule):
    """Data module without a loader, which Lightning reports."""


def make_plan(**kwargs):
    return plan(Classifier(optimizer="adam"), BATCH, **{"devices": 4, "device": "h100"} | kwargs)


@pytest.fixture(scope="module")
def planned():
    return make_plan(strategies=["pardist_ddp", "pardist_zero2", "pardist_zero3", "pardist_tp"])


def test_kernels_do_not_run_and_what_is_known_is_computed():
    layer = nn.Linear(4096, 4096)
    with SkippedKernels() as skipped:
        skipped.forget(layer.parameters())
        lengths = torch.tensor([3, 1, 2])
        assert lengths.sort(descending=True).values.tolist() == [3, 2, 1]
        assert (lengths > 2).nonzero().tolist() == [[0]]
        out = layer(torch.zeros(8192, 4096)).relu()
        assert out.shape == (8192, 4096)
        assert not skipped.looked_at
        assert out.mean().item() == 1.0
        assert torch.isfinite(out).all()
        assert len(skipped.looked_at) == 2
        # Numbers, and results of comparisons, that are read immediately.
        assert torch.stack([out.mean().double(), (out.mean() > 2).double()]).tolist() == [1.0, 0.0]
        out.sum().backward()
    assert layer.weight.grad.shape == layer.weight.shape


def test_what_fake_tensors_refuse_runs_once():
    grouped = torch.ops.aten._grouped_mm.default
    with SkippedKernels() as skipped:
        rows, weights, ends = torch.zeros(8, 16), torch.zeros(2, 16, 32), torch.tensor([3, 8], dtype=torch.int32)
        skipped.forget([rows, weights])
        # In fp32, which its CPU kernel supports.
        assert grouped(rows, weights, ends).shape == (8, 32)
        with pytest.raises(RuntimeError):
            torch.ops.aten.mm.default(rows, rows)


def test_collectives_move_nothing():
    parts = torch.zeros(8 << 18)
    with in_fake_world(8, rank=0, stands_for="nccl"), SkippedKernels() as skipped:
        own = torch.ones(1 << 18)
        skipped.forget([own])
        torch.distributed.all_gather_into_tensor(parts, own)
        whole = torch.empty(8 << 18)
        torch.distributed.all_to_all_single(whole, parts)
        torch.distributed.reduce_scatter_tensor(own, whole, async_op=True).wait()
        known = torch.zeros(8)
        torch.distributed.all_gather_into_tensor(known, torch.tensor([3.0]))
        assert known.tolist() == [3.0] * 8
    assert not parts.any()
    assert own.eq(1).all()


def test_every_name_is_there_with_numbers_or_a_reason():
    found = make_plan(devices=2)
    named = {each.candidate.strategy: each.reason for each in (*found.rows, *found.refused)}
    # Replicas across nodes need several nodes, and three axes four ranks.
    assert {entry.name for entry in TABLE} - set(named) == {"pardist_hsdp", "pardist_3d"}
    assert all(named.values())
    assert "threads of one process" in named["pardist_dp"]
    assert "Name it in strategies" in named["pardist_mp"]
    assert "others fit, and offloaded states add copies" in named["pardist_zero2_offload"]


@pytest.mark.slow
def test_no_strategy_is_faster_than_its_bound():
    slow = find_profile("h100")
    slow = replace(slow, between=replace(slow.between, bytes_per_s=slow.between.bytes_per_s / 1e6))
    searched = search.Search(Classifier(optimizer="adam"), BATCH, slow, search.Job(2, 2, {}), leave_out=False)
    # In addition to the bounds of all strategies planned by default, that of islands.
    names = [
        name for name in (*DEFAULT, "pardist_local_sgd") if name not in ("pardist_zero1", "pardist_pp_interleaved")
    ]
    candidates = list(enumerate_candidates(names, devices=2, num_nodes=2))
    searched.add_all(candidates)
    rows = searched.plan().rows
    assert len(rows) > 8
    for row in rows:
        assert row.samples_per_s <= searched._speed_bound(row.candidate) * (1 + 1e-9), row.candidate
    # Links dominate there: some of the bounds are almost tight.
    assert max(row.samples_per_s / searched._speed_bound(row.candidate) for row in rows) > 0.7


@pytest.mark.slow
def test_plans_compare_several_strategies_where_one_is_the_best_by_far():
    model = Classifier(optimizer="adam")
    fast = find_profile("h100")
    links = {"between": replace(fast.between, bytes_per_s=fast.between.bytes_per_s / 1e5)}
    found = plan(model, BATCH, devices=2, num_nodes=4, device=replace(fast, **links))
    assert len({row.candidate.strategy for row in found.rows}) >= 4
    assert any("sending its gradients takes at least" in each.reason for each in found.refused)


def test_states_on_the_host_are_not_the_devices():
    names = ["pardist_zero2", "pardist_zero2_offload", "pardist_zero3_offload"]
    found = make_plan(strategies=names)
    rows = {row.candidate.strategy: row for row in found.rows}
    plain, second, third = (rows[name] for name in names)
    psi = 4 * sum(param.numel() for param in Classifier().parameters())
    assert (plain.on_host, second.memory["optimizer"], third.memory["parameters"]) == (0, 0, 0)
    # Masters, gradients and two moments of Adam; without the masters' copy on the device.
    assert second.on_host == pytest.approx(psi, rel=0.05)
    assert third.on_host == pytest.approx(psi, rel=0.05)
    assert second.memory["peak"] < plain.memory["peak"] - 1.8 * psi / 4
    slow = found.what_if(device=replace(found.device, host_bytes_per_s=1e6))
    waits = {row.candidate.strategy: row.time.idle - rows[row.candidate.strategy].time.idle for row in slow.rows}
    assert waits[names[0]] == 0
    assert all(1e-3 < waits[name] < 0.1 for name in names[1:])
    assert "The host holds" in found.explain(second)
    between = (second.memory["peak"] + plain.memory["peak"]) / 2 + found.device.reserved_bytes
    assert found.what_if(memory_gb=between / 1e9).best.candidate.strategy.endswith("_offload")
    # On CPU there is only one memory.
    (row,) = make_plan(strategies=["pardist_zero2_offload"], device="cpu").rows
    assert row.on_host == 0
    assert row.memory["optimizer"] == pytest.approx(2 * psi / 4, rel=0.05)


def test_a_device_waits_for_the_hosts_step():
    profile = replace(find_profile("h100"), host_bytes_per_s=50e9, host_link_bytes_per_s=40e9, link_efficiency=0.5)
    time = time_step([HostStep(moved=50_000_000, copied=20_000_000, operators=0)], profile, ranks_per_node=1)
    assert (time.compute, time.communication) == (0, 0)
    assert time.idle == pytest.approx(2e-3)


def test_defects_of_the_planner_are_no_refusals(monkeypatch):
    monkeypatch.setattr("lightning_pardist.planner.planned_rank.StepLedger", None)
    with pytest.raises(TypeError, match="not callable"):
        make_plan(strategies=["pardist_ddp"])


def test_tensors_may_be_larger_than_the_machine():
    with SkippedKernels():
        rows = torch.empty(1 << 40).view(-1, 2) * 2
    assert rows.shape == (1 << 39, 2)
    assert rows.untyped_storage().nbytes() == 1 << 42


def test_islands_send_once_in_many_steps():
    (row,) = make_plan(devices=4, num_nodes=2, strategies=["pardist_local_sgd"]).rows
    psi = 4 * sum(param.numel() for param in Classifier().parameters())
    assert row.dims.layout == {"outer_parallel": 2, "data_replicate": 4}
    assert row.sent["outer_parallel"] == pytest.approx(2 * psi / 2 / 32, rel=0.1)
    (ddp,) = make_plan(devices=4, strategies=["pardist_ddp"]).rows
    assert row.sent["data_replicate"] == pytest.approx(ddp.sent["data_replicate"], rel=0.1)
    assert row.time.step == pytest.approx(ddp.time.step, rel=0.2)


@pytest.mark.slow
def test_sequences_are_split_where_there_are_any():
    module = MODULES["gpt"]()
    batch = next(iter(DataLoader(module.dataset(8), batch_size=8)))
    found = plan(module, batch, devices=2, strategies=["pardist_cp"], device="h100")
    (row,) = found.rows
    assert row.dims.layout == {"context_parallel": 2}
    assert row.sent["context_parallel"] > 0
    (refused,) = make_plan(devices=2, strategies=["pardist_ddp", "pardist_cp"]).refused
    assert "found no sequence" in refused.reason


def test_a_plan_leaves_the_job_around_it_as_it_is():
    before = dict(job_counts._counts)
    make_plan(devices=2, strategies=["pardist_ddp"])
    assert dict(job_counts._counts) == before


def test_replicas_that_cannot_fit_are_not_traced():
    psi = 4 * sum(param.numel() for param in Classifier().parameters())
    small = replace(find_profile("h100", memory_gb=2.5 * psi / 1e9), reserved_bytes=0.0)
    searched = search.Search(Classifier(optimizer="adam"), BATCH, small, search.Job(4, 1, {}), leave_out=True)
    searched.add(Candidate("pardist_ddp"))
    searched.add(Candidate("pardist_zero1"))
    found = searched.plan()
    (refused,) = (each for each in found.refused if each.candidate.strategy == "pardist_ddp")
    assert "parameters and optimizer state alone take" in refused.reason
    assert "pardist_zero1" in {row.candidate.strategy for row in found.rows}
    more = found.what_if(memory_gb=80)
    assert "pardist_ddp" in {each.strategy for each in more.untraced}


def test_a_search_ends_at_its_limit_once_something_fits():
    found = make_plan(strategies=["pardist_ddp", "pardist_zero1"], time_limit_s=1e-6)
    assert [row.candidate.strategy for row in found.rows] == ["pardist_ddp"]
    assert "time limit" in found.refused[0].reason


def test_states_are_those_of_the_formulas(planned):
    psi = 4 * sum(param.numel() for param in Classifier().parameters())
    by_name = {
        row.candidate.strategy: row.memory for row in planned.rows if "data_parallel" not in row.candidate.settings
    }
    assert by_name["pardist_ddp"]["parameters"] == psi
    assert by_name["pardist_ddp"]["optimizer"] == pytest.approx(2 * psi, rel=0.01)
    # Parameters begin at multiples of 16 bytes in a bucket, and so do its four slices. Adam has a step count.
    padded = sum(-(-4 * param.numel() // 16) * 16 for param in Classifier().parameters())
    assert by_name["pardist_zero2"]["parameters"] == -(-padded // 64) * 64
    assert by_name["pardist_zero2"]["optimizer"] == pytest.approx(2 * psi / 4, rel=0.05)
    assert by_name["pardist_zero3"]["parameters"] == pytest.approx(psi / 4, rel=0.05)
    for memory in by_name.values():
        assert memory["peak"] == sum(size for kind, size in memory.items() if kind != "peak")


def test_a_rank_sends_what_the_formula_says(planned):
    psi = 4 * sum(param.numel() for param in Classifier().parameters())
    ddp = next(row for row in planned.rows if row.candidate.strategy == "pardist_ddp")
    assert ddp.sent["data_replicate"] == pytest.approx(2 * psi * 3 / 4, rel=0.2)


def test_a_plan_has_the_form_that_is_promised(planned, tmp_path):
    planned.save(tmp_path / "plan.json")
    found = json.loads((tmp_path / "plan.json").read_text())["candidates"]
    assert len(found) == len(planned.rows) >= 4
    for row in found:
        assert {"strategy", "settings", "degrees", "memory", "sent", "seconds", "fits", "reason"} <= set(row)
        assert all(isinstance(size, int) for size in (*row["memory"].values(), *row["sent"].values()))
        assert row["seconds"]["step"] == pytest.approx(
            sum(row["seconds"][part] for part in ("compute", "communication", "idle"))
        )
        assert isinstance(row["fits"], bool)
        assert {"parameters", "gradients", "optimizer", "activations", "other", "peak"} == set(row["memory"])
        assert {"compute", "communication", "idle", "step"} == set(row["seconds"])
    assert planned.best is planned.rows[0]
    assert planned.best.fits
    assert "Trainer(strategy=" in str(planned)
    assert "peak" in planned.explain(0)
    assert "against" in planned.diff(0, 1)
    assert not torch.distributed.is_initialized()


def test_what_a_strategy_refuses_is_refused_in_its_words():
    found = plan(SecondOrder(), BATCH, devices=2, strategies=["pardist_ddp", "pardist_zero3"])
    (refused,) = found.refused
    assert refused.candidate.strategy == "pardist_zero3"
    assert "LBFGS" in refused.reason


def test_steps_of_several_optimizers_are_one_step_of_a_plan():
    found = plan(TwoByHand(), BATCH, devices=2, strategies=["pardist_ddp"])
    once = make_plan(devices=2, strategies=["pardist_ddp"])
    (row,), (other,) = found.rows, once.rows
    assert row.memory["optimizer"] == pytest.approx(other.memory["optimizer"], rel=0.01)
    assert row.time.compute > 1.5 * other.time.compute


def test_checkpointing_that_is_set_is_planned():
    made = make_plan(strategies=["pardist_ddp", "pardist_zero2"], activation_checkpointing={"Linear"}, memory_gb=1e-6)
    assert [row.candidate.settings for row in made.rows] == [{"activation_checkpointing": ("Linear",)}] * 2


def test_what_does_not_fit_says_what_would():
    found = make_plan(strategies=["pardist_ddp"], memory_gb=1.0)
    assert found.best is None
    assert "too much" in found.rows[0].reason
    assert "pardist_ddp" in found.why_nothing_fits()


@pytest.mark.parametrize("batch", [None, [], {"text": "words"}])
def test_a_batch_without_tensors_is_refused(batch):
    with pytest.raises(PlanError, match="batch"):
        plan(Classifier(), batch, devices=2)


def test_devices_and_profiles(tmp_path):
    with pytest.raises(ProfileError, match="Did you mean 'h100'"):
        find_profile("h10")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(find_profile("a100").to_json()))
    assert DeviceProfile.read(path) == find_profile("a100")
    whole = find_profile("a100").to_json()
    no_numbers = [{"memory_bytes": "much"}, {"matmul_efficiency": 0}, {"host_s_per_operator": -1}, {"operator_s": None}]
    no_numbers += [{"memory_bytes": float("inf")}, {"inside": {"latency_s": "short", "bytes_per_s": 1e9}}]
    for broken in ("{", "[]", "{}", '{"name": "x"}', *(json.dumps(whole | each) for each in no_numbers)):
        path.write_text(broken)
        with pytest.raises(ProfileError, match=str(path)):
            find_profile(str(path))
    path.write_text(json.dumps(whole | {"memory_bytes": "8e10"}))
    assert find_profile(str(path)).memory_bytes == 8e10
    for memory in (0, -1, float("nan")):
        with pytest.raises(ProfileError, match=f"memory_gb={memory}"):
            find_profile("h100", memory_gb=memory)


@pytest.mark.parametrize(
    "arguments", [["--device", "h10"], ["--model", "tests.helpers.models.Classifier"], ["--device", "missing.json"]]
)
def test_bad_input_is_one_sentence_and_status_2(arguments, capsys):
    assert main(["plan", "--devices", "2", *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("pardist plan: ")
    assert "\n" not in said


def test_messages_overlap_with_what_does_not_need_them():
    profile = find_profile("cpu")
    message = Message("allreduce_", (0, 1), 10_000_000, (1,))
    long = Operator("mm", int(1e9), 0, torch.float32, (2,), (2,))
    needs = Operator("add", 0, 0, torch.float32, (1,), (1,))
    alone = message_seconds(message, profile, ranks_per_node=2)
    assert time_step([message, needs], profile, ranks_per_node=2).communication == pytest.approx(alone, rel=0.1)
    assert time_step([message, long, needs], profile, ranks_per_node=2).communication == 0.0
    across = message_seconds(message, profile, ranks_per_node=1)
    assert across > alone


def test_messages_slow_what_computes_where_both_need_one_processor():
    profile = replace(find_profile("cpu"), host_s_per_operator=0.0, link_host_share=1.0)
    message = Message("allreduce_", (0, 1), 10_000_000, (1,))
    long = Operator("mm", int(1e9), 0, torch.float32, (2,), (2,))
    needs = Operator("add", 0, 0, torch.float32, (1,), (1,))
    sends = message_seconds(message, profile, ranks_per_node=2)
    computes = time_step([long], profile, ranks_per_node=2).step
    together = time_step([message, long, needs], profile, ranks_per_node=2)
    assert together.step == pytest.approx(sends + computes, rel=0.01)
    assert together.compute == pytest.approx(computes)
    half = replace(profile, link_host_share=0.5)
    assert time_step([message, long, needs], half, ranks_per_node=2).step < together.step


def test_rates_of_single_operators_count_where_they_were_measured():
    profile = replace(
        find_profile("cpu"), rates={"mm": [(16.0, 1e4, 1e9), (256.0, 1e8, 1e11)], "exp": [(1e6, 1e6, 1e9)]}
    )
    thin = Operator("aten.mm.default", 10_000, 3750, torch.float32, (), ())
    assert size_of(thin) == 16.0
    assert operator_seconds(thin, profile) == pytest.approx(1e-5)
    assert operator_seconds(replace_name(thin, "aten.addmm.default"), profile) == pytest.approx(1e-5)
    assert 1e9 < rate_near(profile.rates["mm"], 64.0, 1e6) < 1e11
    assert operator_seconds(Operator("aten.tanh_.default", 0, 10**6, torch.float32, (), ()), profile) == pytest.approx(
        1e-3
    )
    # Operators unlike any measured one take the time of their memory traffic.
    other = Operator("aten.add.Tensor", 0, 10**6, torch.float32, (), ())
    assert operator_seconds(other, profile) == operator_seconds(other, replace(profile, rates={}))


def _add(size, reads, writes, **kwargs):
    return Operator("aten.add.Tensor", 0, size, torch.float32, reads, writes, **kwargs)


def test_operands_that_left_the_cache_are_read_from_memory():
    size = 10**6
    profile = replace(
        find_profile("cpu"), host_s_per_operator=0.0, bytes_per_s=1e9, memory_efficiency=1.0, cache_bytes=2.5 * size,
        rates={"add": [(1e6, 1e6, 1e11)]},
    )  # fmt: skip
    blocks = {key: (Block(size, "activations", key), size) for key in range(5)}
    one, hot, cold = _add(size, (0,), (0,)), 1e-5, 1e-3

    def seconds(*events):
        return time_step([*blocks.values(), *events], profile, ranks_per_node=1).compute

    assert seconds(one) == pytest.approx(cold)
    assert seconds(one, one) == pytest.approx(cold + hot)
    others = [_add(size, (key,), (key,)) for key in range(1, 5)]
    assert seconds(one, *others[:1], one) == pytest.approx(2 * cold + hot)
    assert seconds(one, *others, one) == pytest.approx(6 * cold)
    # Memory that was just freed is used again.
    freed, new = (blocks[0][0], -size), (Block(size, "activations", 9), size)
    assert seconds(one, freed, new, _add(size, (9,), (9,))) == pytest.approx(cold + hot)
    half = replace(profile, operator_efficiency=0.5)
    events = [*blocks.values(), one, one]
    assert time_step(events, half, ranks_per_node=1).compute == pytest.approx(cold + 2 * hot)


def test_updates_have_a_host_time_of_their_own():
    profile = replace(find_profile("h100"), host_s_per_operator=1e-3, host_s_per_update=1e-4)
    computes, updates = _add(0, (), ()), _add(0, (), (), updates=True)
    assert time_step([computes], profile, ranks_per_node=1).step == pytest.approx(1e-3)
    assert time_step([computes, updates], profile, ranks_per_node=1).step == pytest.approx(1.1e-3)


def test_the_host_is_slower_once_its_code_has_left_the_cache():
    profile = replace(
        find_profile("cpu"), host_s_per_operator=1e-3, host_cold_factor=3.0, host_cache_bytes=1e6, operator_s=0.0,
        bytes_per_s=1e15, cache_bytes=0.0,
    )  # fmt: skip

    def seconds(*events, **kwargs):
        return time_step(events, profile, ranks_per_node=1, **kwargs).step

    small, large = _add(0, (), ()), _add(10**6, (), ())
    assert seconds(small, small) == pytest.approx(2e-3)
    assert seconds(large, small) == pytest.approx(4e-3, rel=1e-3)
    assert seconds(_add(500_000, (), ()), small) == pytest.approx(3e-3, rel=1e-3)
    # Work that is done once per step is cold if the step moves more than the cache, whatever came last.
    assert seconds(large, small, HostWork(2.0)) == pytest.approx(1e-3 + 3e-3 + 2 * 3e-3, rel=1e-3)
    assert seconds(small, HostWork(2.0)) == pytest.approx(3e-3)
    assert time_ranks({0: [small, HostWork(1.0)]}, profile, ranks_per_node=1, host_factor=4.0)[0].step == pytest.approx(
        5e-3
    )


def test_operators_on_stubs_hold_and_compute_nothing():
    stub = StubMode().stub((8, 4), (4, 1), torch.float32, torch.device("cpu"))
    with Ledger() as ledger:
        ledger.note([torch.zeros(1)])
        before = ledger.now
        ledger.start()
        torch.relu(stub + 1.0)
        ledger.stop()
    assert ledger.now == before
    assert [event for event in ledger.events if not isinstance(event, tuple)] == [HostWork(1.0)] * 2


def test_recurrent_layers_issue_operators_quickly():
    head, net, before = nn.Linear(8, 4), nn.GRU(4, 8), torch._VF.gru
    with Ledger() as ledger:
        ledger.start()
        head(net(torch.randn(5, 2, 4))[0]).sum().backward()
        ledger.stop()
    assert torch._VF.gru is before
    operators = [event for event in ledger.events if isinstance(event, Operator)]
    slow = [event.name.split(".")[1] for event in operators if not event.inner]
    assert len(slow) < 15 < 100 < len(operators)
    profile = replace(find_profile("h100"), host_s_per_operator=1.0, host_s_per_update=1e-3)
    seconds = time_ranks({0: operators}, profile, ranks_per_node=1, host_factor=5.0)[0].step
    assert seconds == pytest.approx(5 * len(slow) + 1e-3 * (len(operators) - len(slow)), rel=1e-3)


def test_work_of_the_host_is_planned_for_every_strategy():
    batch = torch.randn(8, 1, 8, 8), torch.randint(10, (8,))
    made = plan(Classifier(), batch, devices=2, device="cpu", strategies=["pardist_ddp", "pardist_zero1", "pardist_pp"])
    rows = {row.candidate.strategy: row for row in made.rows}
    # Next to no computation: a step takes what the host takes.
    assert rows["pardist_ddp"].time.step > 170 * find_profile("cpu").host_s_per_operator
    assert rows["pardist_ddp"].time.step < rows["pardist_zero1"].time.step < rows["pardist_pp"].time.step


def test_work_of_the_host_grows_with_accumulated_batches():
    batch = torch.randn(8, 1, 8, 8), torch.randint(10, (8,))

    def work(**settings):
        first = Place(0, 2, 1, "gloo")
        make = Candidate("pardist_pp", {}).make
        places = stage_places(dims_of(make(), first), first)
        traces = trace_ranks(Classifier(), batch, make, places, trainer_settings=settings)
        return [sum(event.operators for event in each.events if isinstance(event, HostWork)) for each in traces]

    one, four = work(), work(accumulate_grad_batches=4)
    assert four == pytest.approx([4 * each for each in one], rel=0.01)


def replace_name(operator, name):
    return Operator(name, operator.flops, operator.moved, operator.dtype, operator.reads, operator.writes)


def test_every_probe_measures_what_it_is_named_for():
    rates = measure_operators(torch.device("cpu"), lambda run: (run(), 1e-3)[1])
    assert {"mm", "convolution", "convolution_backward", "gelu_backward", "embedding", "_fused_adamw"} <= set(rates)
    assert {"sqrt", "bernoulli", "uniform", "normal"} <= set(rates)
    assert all(rate > 0 for points in rates.values() for _, _, rate in points)


def test_a_step_is_planned_without_what_is_looked_at_once():
    """Layers that mix samples are detected in the second step of a run, on values, and only once."""
    module = MODULES["gpt"]()
    batch = next(iter(DataLoader(module.dataset(8), batch_size=8)))
    alone, ranks = (
        search.trace_rank(module, batch, Candidate("pardist_ddp").make, search.Place(0, count, 1, "nccl"))
        for count in (1, 2)
    )
    flops = [sum(each.flops for each in trace.events if isinstance(each, Operator)) for trace in (alone, ranks)]
    assert flops[0] == flops[1] > 0


def test_an_operator_moves_what_it_picks_and_what_it_writes():
    ledger, weight, row = Ledger(), torch.zeros(1000, 8), torch.zeros(8)
    with ledger:
        ledger.start()
        nn.functional.embedding(torch.tensor([1, 2]), weight)
        row.copy_(torch.ones(8))
        torch._foreach_add_([row], 1.0)
    moved = {each.name.split(".")[1]: each.moved for each in ledger.events if isinstance(each, Operator)}
    assert moved["embedding"] == 2 * 2 * 8 * 4 + 2 * 8
    assert moved["copy_"] == 2 * 8 * 4
    assert moved["_foreach_add_"] == 2 * 8 * 4


@pytest.mark.slow
def test_stages_of_a_pipeline_run_together_and_wait_for_each_other():
    found = make_plan(devices=2, strategies=["pardist_pp", "pardist_pp_gpipe"])
    by_name = {row.candidate.strategy: row for row in found.rows}
    assert set(by_name) == {"pardist_pp", "pardist_pp_gpipe"}, found
    psi = 4 * sum(param.numel() for param in Classifier().parameters())
    for row in found.rows:
        assert row.dims.pipeline_parallel == 2
        assert len(row.timelines) == 2
        assert 0 < row.idle_share < 1
        assert row.sent["pipeline_parallel"] > 0
        assert row.memory["parameters"] < psi
        assert row.memory["optimizer"] == pytest.approx(2 * row.memory["parameters"], rel=0.05)
    by_name = {row.candidate.strategy: row for row in found.rows if "num_microbatches" not in row.candidate.settings}
    assert by_name["pardist_pp_gpipe"].memory["activations"] > by_name["pardist_pp"].memory["activations"]


def test_micro_batches_are_chosen_by_what_a_step_takes():
    slow = replace(find_profile("h100"), host_s_per_operator=1e-3)
    found = make_plan(devices=2, strategies=["pardist_pp"], device=slow)
    counts = {row.candidate.settings.get("num_microbatches"): row.samples_per_s for row in found.rows}
    # The host's time per operator dominates and grows with micro-batches: two is the minimum for two stages.
    assert found.best.candidate.settings["num_microbatches"] == 2
    assert counts[2] > counts[4] > counts[None]
    usual = Candidate("pardist_pp", {"pipeline_parallel_size": 2}).microbatches(2, BATCH)
    assert usual == 8
    assert 16 not in counts


@pytest.mark.push("Contrasts-*")
@pytest.mark.parametrize(("kind", "counts"), [(Contrasts, {1}), (Compares, {8, 4, 2})])
def test_batches_whose_samples_are_compared_are_planned_whole(kind, counts):
    slow = replace(find_profile("h100"), host_s_per_operator=1e-3)
    found = plan(kind(), torch.randn(8, 16), devices=2, device=slow, strategies=["pardist_pp"])
    sent = {round(row.sent["pipeline_parallel"] / (8 * 16 * 4)) for row in found.rows}
    assert sent == {1}
    settings = {row.candidate.settings.get("num_microbatches", 8 if kind is Compares else 1) for row in found.rows}
    assert settings == counts


@pytest.mark.slow
def test_three_axes_at_once():
    (row,) = make_plan(devices=8, strategies=["pardist_3d"]).rows
    assert row.dims.layout == {"pipeline_parallel": 2, "data_replicate": 2, "tensor_parallel": 2}
    assert row.memory["parameters"] < 0.5 * 4 * sum(param.numel() for param in Classifier().parameters())
    assert {"pipeline_parallel", "data_replicate"} <= set(row.sent)


def test_storages_at_the_address_of_freed_ones_are_others():
    with Ledger() as ledger:
        ledger.start()
        for _ in range(8):
            torch.ones(1000)
    written = [event.writes for event in ledger.events if isinstance(event, Operator)]
    assert len(written) >= 8
    assert len(set(written)) == len(written)


@pytest.mark.slow
def test_a_global_batch_is_divided(planned):
    found = make_plan(strategies=["pardist_ddp", "pardist_tp"], global_batch=16)
    per_rank = {row.dims.batch_size: row.samples for row in found.rows}
    assert per_rank[4] == 4
    assert per_rank[1] == 16
    assert make_plan(strategies=["pardist_ddp"], global_batch=32).rows[0].time == next(
        row.time for row in planned.rows if row.candidate.strategy == "pardist_ddp"
    )
    odd = make_plan(strategies=["pardist_ddp", "pardist_tp"], global_batch=2)
    assert any("cannot be divided" in each.reason for each in odd.refused)


def test_what_if_needs_no_trace_and_says_what_it_cannot(planned):
    small = planned.what_if(memory_gb=1.0)
    assert small.best is None
    assert {row.memory["peak"] for row in small.rows} == {row.memory["peak"] for row in planned.rows}
    fast = planned.what_if(links=100.0)
    assert sum(row.time.communication for row in fast.rows) < sum(row.time.communication for row in planned.rows)
    assert planned.what_if(device="b200").device.name == "B200"
    with pytest.raises(ValueError, match="gloo"):
        planned.what_if(device="cpu")


def test_a_page_needs_nothing_else(planned):
    page = planned.to_html()
    assert page.count("<svg") >= 3
    assert "http" not in page.replace("http-equiv", "")
    assert "pardist_zero2" in page
    assert "<svg" in planned._repr_html_()
    devices, rates = zip(*planned.scaling(), strict=True)
    assert devices[:3] == (1, 2, 4)
    assert list(rates) == sorted(rates)


def test_stages_are_played_together():
    profile = replace(find_profile("cpu"), host_s_per_operator=0.0)
    work = Operator("mm", int(1e9), 0, torch.float32, (1,), (1,))
    sends, receives = Message("send", (0, 1), 8, (1,), 1), Message("recv_", (0, 1), 8, (1,), 0)
    times = time_ranks({0: [work, sends], 1: [receives, work]}, profile, ranks_per_node=2)
    assert times[0].step == times[1].step == pytest.approx(2 * times[0].compute, rel=0.1)
    assert times[1].stages == pytest.approx(times[0].compute, rel=0.1)


def test_ranks_that_wait_for_what_is_never_sent_are_no_fast_pipeline(monkeypatch):
    receives = Message("recv_", (0, 1), 8, (1,), 0)
    with pytest.raises(PlanError, match=r"never sent: rank 1 for recv_ \(event 0 of 1\)"):
        time_ranks({0: [], 1: [receives]}, find_profile("cpu"), ranks_per_node=2)

    def stuck(*_, **__):
        raise PlanError("ranks wait for messages that are never sent")

    monkeypatch.setattr(search, "time_ranks", stuck)
    with pytest.raises(PlanError, match="pardist_ddp: cannot be planned: ranks wait"):
        make_plan(devices=2, strategies=["pardist_ddp"])


def test_what_if_says_what_was_left_out_and_may_be_best_there():
    # The host's time dominates: four replicas are faster than four tensor ranks.
    found = make_plan(device=replace(find_profile("h100"), host_s_per_operator=1e-3))
    assert found.best is not None
    assert any(each.reason.startswith("not traced") for each in found.refused)
    assert found.what_if().untraced == found.untraced == ()
    least = min(row.memory["peak"] for row in found.rows)
    small = found.what_if(memory_gb=(least + found.device.reserved_bytes - 1000) / 1e9)
    assert small.best is None
    strategies = {each.strategy for each in small.untraced}
    assert {"pardist_ddp", "pardist_tp"} <= strategies
    assert "No candidate fits" not in small.why_nothing_fits()
    assert "Make a new plan()" in small.why_nothing_fits()
    assert small.notes[-1] in str(small)
    # Replicas are then limited by their links, which the others' bounds do not include.
    slow = found.what_if(links=1e-9)
    assert slow.untraced
    assert slow.rows[0].reason == "the fastest traced candidate that fits"
    assert slow.what_if(links=1e9).untraced == ()


@pytest.fixture
def one_rank(monkeypatch):
    """Set up a world of one with fake measured rates."""
    fakes = {"_flops": 1e9, "_memory_rate": 1e9, "_operator_seconds": (1e-5, 1e-6), "_cache_bytes": 1e6}
    fakes["_operator_efficiency"] = 0.8
    for name, value in fakes.items():
        monkeypatch.setattr(measuring, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(measuring, "measure_operators", lambda *_: {"mm": [(64.0, 1e6, 1e10)]})
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield torch.device("cpu")
    torch.distributed.destroy_process_group()


def test_what_nobody_measured_is_a_data_sheets_and_said_to_be(one_rank, tmp_path, monkeypatch):
    profile = measure_rank(one_rank, hosts=["a"])
    assert (profile.operator_efficiency, profile.cache_bytes, profile.host_s_per_update) == (0.8, 1e6, 1e-6)
    sheet = find_profile("cpu")
    assert profile.inside == Link(sheet.inside.latency_s, sheet.inside.bytes_per_s * sheet.link_efficiency)
    assert profile.between == Link(sheet.between.latency_s, sheet.between.bytes_per_s * sheet.link_efficiency)
    assert profile.assumed_links == ("inside", "between")
    assert profile.rates_text == "measured, but links inside a node and between nodes assumed"
    assert sum("assumed to be that of CPU" in each for each in profile.sources) == 2
    assert "the disk: not measured, assumed" in profile.sources
    monkeypatch.setattr(measuring, "_FILE_BYTES", 1 << 20)
    measured = measure_rank(one_rank, hosts=["a"], by_size=False, disk=str(tmp_path))
    assert "the disk: not measured, assumed" not in measured.sources
    assert not list(tmp_path.iterdir())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(profile.to_json()))
    assert DeviceProfile.read(path) == profile


def test_the_nearest_data_sheet():
    assert data_sheet_of("NVIDIA H100 80GB HBM3").name == "H100 SXM"
    assert data_sheet_of("AMD Instinct MI300X OAM").name == "MI300X"
    assert data_sheet_of("a GPU of another kind").name == "L40S"


def test_nodes_are_the_hosts_of_ranks_however_they_are_placed():
    assert nodes_of(["a", "b", "a", "b", "b"]) == [[0, 2], [1, 3, 4]]
    assert nodes_of(["a"]) == [[0]]


def test_a_rank_that_fails_to_measure_is_one_sentence(monkeypatch):
    def fail(*_, **__):
        raise ProcessRaisedException("\n\n-- Process 1\nTraceback\nRuntimeError: no memory\n", 1, 0)

    monkeypatch.setattr(measuring, "start_processes", fail)
    with pytest.raises(RuntimeError, match=r"^measuring failed on rank 1 of 2: RuntimeError: no memory$"):
        measure_alone(2)


@pytest.mark.parametrize(("data", "own"), [("BrokenData", True), ("NoLoader", False)])
def test_an_error_of_the_datas_own_code_stays_visible(data, own, capsys):
    arguments = ["--model", "tests.helpers.models.Classifier", "--data", f"{__name__}.{data}"]
    assert main(["plan", "--devices", "2", *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith(f"pardist plan: {data}.")
    assert ("Traceback (most recent call last):" in said) == own
    assert any("the column that is not there" in line for line in said) == own


def test_parameters_of_other_stages_take_no_memory():
    def made():
        return lightning_pardist.PipelineStrategy(pipeline_parallel_size=2)

    module, first = Contrasts(width=128), Place(0, 2, 1, "nccl")
    for trace in trace_ranks(module, torch.randn(4, 128), made, stage_places(dims_of(made(), first), first)):
        assert trace.held.by_kind["other"] < 0.3 * trace.held.by_kind["parameters"]


def test_the_name_is_public():
    assert lightning_pardist.plan is plan


def test_compressed_gradients_are_what_travels():
    sent = {}
    for name in ("pardist_ddp", "pardist_ddp_bf16", "pardist_ddp_powersgd"):
        sent[name] = make_plan(strategies=[name]).best.sent["data_replicate"]
    # Of an all-reduce of 4 ranks each sends 3/2 of its size. Flags and counts are sent uncompressed.
    elements = sum(param.numel() for param in Classifier().parameters())
    assert sent["pardist_ddp"] - sent["pardist_ddp_bf16"] == 1.5 * 2 * elements
    assert sent["pardist_ddp"] - 1.5 * 4 * elements < 1100
    # As in all steps but the first hundred.
    assert sent["pardist_ddp_powersgd"] < 0.4 * sent["pardist_ddp"]


def test_state_in_files_is_read_and_written_in_each_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fast, slow = (
        make_plan(device=replace(find_profile("h100"), disk_bytes_per_s=rate), strategies=["pardist_zero3_nvme"]).best
        for rate in (2e9, 1e6)
    )
    hosted = make_plan(strategies=["pardist_zero3_offload"]).best
    numel = sum(param.numel() for param in Classifier().parameters())
    assert fast.in_files == pytest.approx(8 * numel / 4, rel=0.05)
    assert fast.memory == hosted.memory
    assert slow.time.step - fast.time.step == pytest.approx(2 * fast.in_files * (1e-6 - 1 / 2e9))
    assert not list(tmp_path.iterdir())
    assert "Files hold" in make_plan(strategies=["pardist_zero3_nvme"]).explain(0)
    assert fast.to_json()["in_files"] == fast.in_files


@pytest.mark.parametrize("layer", [pytest.param("stacked", marks=pytest.mark.slow), "listed"])
def test_experts_are_planned_as_if_tokens_went_to_all_of_them_alike(layer):
    module, batch = Mixture(layer), [torch.randint(TOKENS, (16, LENGTH))]
    found = plan(module, batch, devices=2, device="h100", strategies=["pardist_ep", "pardist_ddp"])
    by_name = {row.candidate.strategy: row for row in found.rows}
    ep, ddp = by_name["pardist_ep"], by_name["pardist_ddp"]
    experts = sum(param.numel() for name, param in module.named_parameters() if is_expert(name))
    assert ddp.memory["parameters"] - ep.memory["parameters"] == 4 * experts / 2
    assert ddp.memory["optimizer"] > 8 * experts
    assert "all experts get the same number of tokens" in found.explain(ep)
    # Two exchanges of rows per layer and the same in backward, each to one other rank.
    rows = 2 * 4 * 16 * LENGTH * WIDTH * 4
    assert 0.5 * rows < ep.sent["expert_parallel"] < 2 * rows


def test_rows_that_a_router_sends_are_counted_without_values():
    with SkippedKernels() as skipped:
        scores = torch.empty(60, 6)
        skipped.forget([scores])
        index = scores.topk(2, -1).indices
        mask = F.one_hot(index, 6).permute(2, 1, 0)
        assert [len(torch.where(each)[0]) for each in mask] == [20] * 6
        assert (mask.sum(dim=(-1, -2)) > 0).nonzero().shape == (6, 1)
        assert len(torch.where(index == 3)[0]) == 20
        assert scores[(index == 3).any(-1)].shape[1] == 6
        assert len(index.unique()) == 6
        assert index.flatten().bincount(minlength=6).shape == (6,)
        assert len(scores.masked_select(scores.argmax(-1, keepdim=True) == 1)) == 60
