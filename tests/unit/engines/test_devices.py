"""Random states of a device, and the device of single messages."""

import random

import numpy as np
import torch
import torch.distributed as dist

from lightning_pardist.collectives import wire_device
from lightning_pardist.compat.fake_group import backend_on
from lightning_pardist.engines.common import devices
from lightning_pardist.runtime.process_group import default_backend
from tests.helpers.ranks import run_ranks


def _draws():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()


def test_random_numbers_of_the_host():
    device = torch.device("cpu")
    before = devices.random_state(device)
    with devices.preserve_random_state(device):
        devices.seed_generators(5, device)
        drawn = _draws()
        assert not devices.is_same_state(before, devices.random_state(device))
    assert devices.is_same_state(before, devices.random_state(device))
    for draw in (torch.rand, np.random.rand, lambda _: random.random()):
        draw(1)
        assert not devices.is_same_state(before, devices.random_state(device))
        devices.set_random_state(before, device)
        assert devices.is_same_state(before, devices.random_state(device))
    devices.seed_generators(5, device)
    assert _draws() == drawn
    devices.set_random_state(before, device)


def test_torch_draws_from_a_seed_and_goes_on_as_before():
    device = torch.device("cpu")
    before = devices.random_state(device)
    with devices.torch_seeded(5, device):
        torch.rand(3)
    assert devices.is_same_state(before, devices.random_state(device))


def test_what_ranks_talk_through():
    assert default_backend(torch.device("cpu")) == "gloo"
    assert default_backend(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"


def _backends():
    group = dist.new_group(backend="cpu:gloo,cuda:gloo")
    gpu = torch.device("cuda", 0)
    found = [backend_on(group, torch.device(kind)) for kind in ("cpu", "cuda", "xpu")]
    return found, wire_device(group, gpu).type, wire_device(dist.group.WORLD, gpu).type


def test_gloo_takes_single_messages_from_host_memory():
    assert run_ranks(2, _backends) == [(["gloo", "gloo", ""], "cpu", "cpu")] * 2
