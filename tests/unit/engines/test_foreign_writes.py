"""User changes to served parameters outside of updates are refused, unless they leave the values unchanged."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_pardist.axes.parameter_server import _refuse_shared
from lightning_pardist.engines.ddp.buffers import tensors_without_optimizer
from lightning_pardist.engines.servers import Roles, ServedUpdates, Worker
from lightning_pardist.engines.servers.foreign_writes import fingerprint


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def run(alone):
    """Set up one worker that serves itself, after one step."""
    param = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([param], lr=1.0, momentum=0.5)
    roles = Roles.colocated(1, 1)
    updates = [ServedUpdates(optimizer, group=alone, roles=roles, rank=0, setting="elementwise")]
    here = [True]
    worker = Worker(
        updates, group=alone, roles=roles, tags=(0, 1), max_staleness=1, timeout_s=5.0, has_gradients=lambda: here[0]
    )
    worker.start()
    param.grad = torch.tensor([-1.0, -2.0, -3.0])
    optimizer.step()
    yield worker, optimizer, param, here
    worker.stop(1.0)


def _reorder(param, optimizer):
    param.data = param.data.flip(0)


def _clamp(param, optimizer):
    with torch.no_grad():
        param.clamp_(-0.5, 0.5)


WRITES = {
    "clamp": (_clamp, "was written to outside of its step"),
    "data": (lambda param, optimizer: param.data.clamp_(-0.5, 0.5), "was written to outside of its step"),
    "order": (_reorder, "was written to outside of its step"),
    "maximize": (lambda param, optimizer: optimizer.param_groups[0].update(maximize=True), "'maximize' in group 0"),
    "key": (lambda param, optimizer: optimizer.param_groups[0].update(scale=2.0), "'scale' in group 0"),
    "none": (lambda param, optimizer: optimizer.param_groups[0].update(lr=None), "'lr' in group 0"),
}


@pytest.mark.parametrize("kind", WRITES)
@pytest.mark.parametrize("where", ["step", "meeting"])
def test_changes_are_refused_at_the_next_step_and_at_a_meeting(run, kind, where):
    worker, optimizer, param, _ = run
    change, message = WRITES[kind]
    change(param, optimizer)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step() if where == "step" else worker.meet()


def test_cleared_state_is_refused(run):
    worker, optimizer, *_ = run
    worker.meet()
    worker.resume_updates()
    optimizer.step()
    optimizer.state.clear()
    with pytest.raises(RuntimeError, match="state of SGD was cleared"):
        optimizer.step()


@pytest.mark.parametrize("change", [lambda state, param: state.clear(), lambda state, param: state[param].update(x=1)])
def test_state_that_no_meeting_has_shown_is_refused_as_well(run, change):
    _, optimizer, param, _ = run
    change(optimizer.state, param)
    with pytest.raises(RuntimeError, match="state of SGD was cleared"):
        optimizer.step()


def test_what_stands_for_state_is_gone_at_meetings_and_at_the_end(run):
    worker, optimizer, param, _ = run
    assert optimizer.state[param] == {}
    worker.meet()
    assert torch.equal(optimizer.state[param]["momentum_buffer"], torch.tensor([-1.0, -2.0, -3.0]))
    optimizer.state.clear()
    worker._watches[0].note_states()
    worker.resume_updates()
    assert list(optimizer.state) == [param]
    worker.stop(1.0)
    assert not optimizer.state


def test_weights_may_be_put_in_place_of_others_and_back(run):
    worker, optimizer, param, _ = run
    worker.meet()
    kept = param.detach().clone()
    param.data.zero_()
    # A checkpoint may be saved while other weights are swapped in.
    worker.meet()
    assert not param.any()
    param.data.copy_(kept)
    worker.resume_updates()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    torch.testing.assert_close(param.detach(), kept + 0.5 * 1.5 * torch.tensor([1.0, 2.0, 3.0]))


def test_a_step_without_samples_leaves_momentum_alone(run):
    _, optimizer, param, here = run
    before = param.detach().clone()
    here[0] = False
    param.grad = torch.zeros(3)
    optimizer.step()
    assert torch.equal(param, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_fingerprints_tell_bits_and_their_order(dtype):
    values = torch.randn(33, dtype=torch.float32).to(dtype)
    other = values.clone()
    assert fingerprint(values) == fingerprint(other)
    other[[3, 7]] = other[[7, 3]]
    assert fingerprint(values) != fingerprint(other)
    values[0] = float("nan")
    assert fingerprint(values) == fingerprint(values.clone())


def test_a_parameter_of_two_optimizers_is_refused():
    param = nn.Parameter(torch.zeros(2))
    optimizers = [torch.optim.SGD([param], lr=1.0), torch.optim.Adam([param])]
    with pytest.raises(ValueError, match="1 parameters are in both SGD and Adam"):
        _refuse_shared(optimizers, "pardist_ps_async")


def test_teachers_are_averaged_with_buffers():
    student, teacher = nn.Linear(2, 2), nn.BatchNorm1d(2).requires_grad_(False)
    found = tensors_without_optimizer(
        nn.ModuleList([student, teacher]), [torch.optim.SGD(student.parameters(), lr=1.0)]
    )
    assert {id(each) for each in found} == {
        id(each) for each in (teacher.weight, teacher.bias, teacher.running_mean, teacher.running_var)
    }
