"""Measures what this machine's devices and links do, for a profile that plans are made with."""

from __future__ import annotations

import math
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes

from lightning_pardist.compat.process_groups import FileStore
from lightning_pardist.planner.ledger import Ledger, Operator
from lightning_pardist.planner.profiles import DeviceProfile, Link

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ROUNDS = 3
_TIMEOUT = timedelta(seconds=120)


def measure_alone(num_ranks: int) -> DeviceProfile:
    """The profile of this machine, by so many ranks that are started for it and end again.

    Args:
        num_ranks: Ranks, each on a device of its own; at least 2 are needed to see a link.

    Raises:
        RuntimeError: If a rank fails.
    """
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank, args=(num_ranks, f"{folder}/store", queue), nprocs=num_ranks, start_method="spawn")
    return DeviceProfile(**queue.get())


def _rank(rank: int, num_ranks: int, path: str, queue: Any) -> None:
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    store = FileStore(path, num_ranks)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=_TIMEOUT)
    profile = measure_rank(device, ranks_per_node=num_ranks)
    if rank == 0:
        found = {name: getattr(profile, name) for name in profile.__dataclass_fields__}
        queue.put(found)
    dist.barrier()
    dist.destroy_process_group()


def measure_rank(device: torch.device, *, ranks_per_node: int) -> DeviceProfile:
    """The profile of the slowest rank, measured on all at the same time. Collective over the world.

    Args:
        device: This rank's.
        ranks_per_node: Ranks ``0 .. ranks_per_node - 1`` are on the first node, and so on.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    flops = {str(dtype).removeprefix("torch."): _flops(device, dtype) for dtype in _DTYPES}
    if device.type == "cuda":
        flops["tf32"] = _flops(device, torch.float32, tf32=True)
    rates = {**flops, "memory": _memory_rate(device), "operator": -_operator_seconds(device)}
    slowest = torch.tensor(list(rates.values()), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MIN)
    rates = dict(zip(rates, slowest.tolist(), strict=True))
    node = rank // ranks_per_node
    nodes = [list(range(first, min(first + ranks_per_node, world_size)))
             for first in range(0, world_size, ranks_per_node)]  # fmt: skip
    groups = [dist.new_group(ranks) for ranks in nodes]
    inside = _link(device, groups[node]) if len(nodes[node]) > 1 else None
    across = dist.new_group([ranks[0] for ranks in nodes]) if len(nodes) > 1 else None
    between = _link(device, across) if across is not None and rank == nodes[node][0] else None
    told = [(inside, between)]
    dist.broadcast_object_list(told, src=0)
    inside, between = told[0]
    sources = [f"measured by pardist doctor on {world_size} ranks of {platform.node()}, torch {torch.__version__}"]
    if between is None:
        sources.append("between nodes: not measured (there was one), taken to be as inside a node")
    if inside is None:
        sources.append("inside a node: not measured (there was one rank), taken to be as between nodes")
    one = inside or between or Link(0.0, 1e12)
    name, memory, reserved = _device_facts(device, ranks_per_node)
    return DeviceProfile(
        name,
        memory,
        {name: rate for name, rate in rates.items() if name in flops and rate > 0},
        rates["memory"],
        inside or one,
        between or one,
        host_s_per_operator=-rates["operator"],
        asynchronous=device.type == "cuda",
        backend="nccl" if device.type == "cuda" else "gloo",
        reserved_bytes=reserved,
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        link_efficiency=1.0,
        is_measured=True,
        sources=tuple(sources),
    )


def _median(run: Callable[[], Any], device: torch.device, *, repeat: int = 1) -> float:
    """Seconds of one run, that many on every rank: ranks may wait for each other in it."""

    def once() -> float:
        begin = time.perf_counter()
        for _ in range(repeat):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / repeat

    once()
    return statistics.median(once() for _ in range(_ROUNDS))


def _flops(device: torch.device, dtype: torch.dtype, *, tf32: bool = False) -> float:
    """Floating point operations a second of a matrix product; 0 where there is none."""
    # Some dtypes have no fast product on some processors.
    size = 8192 if device.type == "cuda" else 384
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        return 2 * size**3 / _median(lambda: left @ right, device)
    except RuntimeError:
        return 0.0
    finally:
        torch.set_float32_matmul_precision(before)


def _memory_rate(device: torch.device) -> float:
    """Bytes a second that an addition reads and writes."""
    numel = (1 << 28) if device.type == "cuda" else (1 << 21)
    left, right, out = (torch.ones(numel, device=device) for _ in range(3))
    return 3 * 4 * numel / _median(lambda: torch.add(left, right, out=out), device)


def _operator_seconds(device: torch.device) -> float:
    """Seconds that the host takes for an operator of a training step, Python and autograd included."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(16)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, 8, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    step()
    ledger = Ledger()
    with ledger:
        ledger.start()
        step()
    count = sum(isinstance(event, Operator) for event in ledger.events)
    return _median(step, device, repeat=3) / count


def _link(device: torch.device, group: dist.ProcessGroup) -> Link:
    """Latency and bandwidth of all-reduces. Collective over ``group``."""
    size = group.size()
    small, large = torch.zeros(1, device=device), torch.zeros(1 << 22, device=device)
    short = _median(lambda: dist.all_reduce(small, group=group), device, repeat=20)
    long = _median(lambda: dist.all_reduce(large, group=group), device)
    sent = 2 * (size - 1) / size * large.numel() * large.element_size()
    return Link(short / (2 * math.ceil(math.log2(size))), sent / max(long - short, 1e-9))


def _device_facts(device: torch.device, ranks_per_node: int) -> tuple[str, float, float]:
    """Name, memory of one device in bytes, and what of it is taken before tensors are."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return torch.cuda.get_device_name(device), float(total), float(total - free)
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _processor(), pages / ranks_per_node, 0.5e9


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"CPU, {names[0]}" if names else f"CPU, {platform.machine()}"
