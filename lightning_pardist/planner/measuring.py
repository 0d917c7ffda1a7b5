"""Measurement of this machine's devices and links, for the planner's device profile."""

from __future__ import annotations

import math
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessException, start_processes
from typing_extensions import override

from lightning_pardist.compat.process_groups import FileStore
from lightning_pardist.engines.common.allocator import keep_freed_memory
from lightning_pardist.engines.common.devices import device_of_rank, rank_devices, synchronize
from lightning_pardist.planner.ledger import Event, Ledger, Operator
from lightning_pardist.planner.operator_rates import Rates, measure_operators
from lightning_pardist.planner.profiles import DeviceProfile, Link, data_sheet_of
from lightning_pardist.planner.step_time import time_step

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ROUNDS = 5
#: Times that everything is measured, apart from each other, where step times are to be accurate: medians are used.
_PASSES = 3
#: Sizes of the timed messages, in elements.
_MESSAGES = (1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22)
_TIMEOUT = timedelta(seconds=120)
#: Bytes that each rank writes to the disk and reads back.
_FILE_BYTES = 1 << 27


def measure_alone(num_ranks: int, *, disk: str | None = None) -> DeviceProfile:
    """Measure this machine's profile with ranks that are started for the measurement.

    Args:
        num_ranks: Number of ranks, each on its own device; with one rank, links are taken from a data sheet.
        disk: As for :func:`measure_rank`.

    Raises:
        RuntimeError: If a rank fails, with the rank and the reason in one sentence.
    """
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        try:
            arguments = (num_ranks, f"{folder}/store", queue, disk)
            start_processes(_rank, args=arguments, nprocs=num_ranks, start_method="spawn")
        except ProcessException as error:
            why = (str(error).strip().splitlines() or ["it ended"])[-1]
            raise RuntimeError(f"measuring failed on rank {error.error_index} of {num_ranks}: {why}") from error
    return DeviceProfile(**queue.get())


def _rank(rank: int, num_ranks: int, path: str, queue: Any, disk: str | None) -> None:
    device = device_of_rank(rank) if num_ranks <= len(rank_devices()) else torch.device("cpu")
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    store = FileStore(path, num_ranks)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=_TIMEOUT)
    profile = measure_rank(device, hosts=[platform.node()] * num_ranks, disk=disk)
    if rank == 0:
        found = {name: getattr(profile, name) for name in profile.__dataclass_fields__}
        queue.put(found)
    dist.barrier()
    dist.destroy_process_group()


def measure_rank(
    device: torch.device,
    *,
    hosts: Sequence[str],
    keeps_memory: bool = True,
    by_size: bool = True,
    disk: str | None = None,
) -> DeviceProfile:
    """Measure all ranks at the same time, and return the profile of the slowest. Collective over the world.

    Args:
        device: This rank's device.
        hosts: Host name of every rank, the same list on all ranks.
        keeps_memory: Whether, on CPU, the allocator keeps freed memory from now on, as strategies set it.
        by_size: Whether single operators and messages are also measured by size, for more accurate step times. Takes
            several seconds more.
        disk: Folder in which every rank writes 128 MiB to an unnamed file to measure the disk; None for the data
            sheet's rate.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if device.type == "cpu" and keeps_memory:
        # Otherwise the times of large allocations include page faults.
        keep_freed_memory()
    flops = {str(dtype).removeprefix("torch."): _flops(device, dtype) for dtype in _DTYPES}
    if device.type == "cuda":
        flops["tf32"] = _flops(device, torch.float32, tf32=True)
    issued = [_operator_seconds(device) for _ in range(_PASSES if by_size else 1)]
    computes, updates = map(statistics.median, zip(*issued, strict=True))
    rates = {**flops, "memory": _memory_rate(device), "operator": -computes, "update": -updates}
    slowest = torch.tensor(list(rates.values()), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MIN)
    rates = dict(zip(rates, slowest.tolist(), strict=True))
    inside, between, share, messages = _links(device, hosts, rank, passes=_PASSES if by_size else 0)
    operators: Rates = {}
    cache = 0.0
    cold, core = 1.0, 0.0
    if by_size and device.type == "cpu":
        cache, core = min(_gathered(_cache_bytes())), min(_gathered(_core_cache_bytes()))
        cold = statistics.median(_gathered(_cold_factor(int(core))))
    if by_size:
        # Use the minimum: a round in which the heap grows takes ten times as long because of page faults.
        passes = [measure_operators(device, lambda run: _seconds(run, device, of=min)) for _ in range(_PASSES)]
        operators = _slowest_rates(_median_rates(passes))
    disk_rate = None if disk is None else _disk_rate(disk)
    name, memory, reserved = _smallest(_device_facts(device, hosts.count(hosts[rank])))
    sources = [f"measured by pardist doctor on {world_size} ranks of {platform.node()}, torch {torch.__version__}"]
    sheet = data_sheet_of(name)
    assumed = tuple(which for which, link in (("inside", inside), ("between", between)) if link is None)
    for which in assumed:
        sources.append(
            f"link {which}: not measured with {world_size} rank(s) on {len(set(hosts))} host(s), assumed to be that of"
            f" {sheet.name}: {'; '.join(sheet.sources)}"
        )
    if disk_rate is None:
        sources.append("the disk: not measured, assumed")
    if device.type != "cpu":
        sources.append(f"the host's memory and the link to it: not measured, assumed to be those of {sheet.name}")
    profile = DeviceProfile(
        name,
        memory,
        {name: rate for name, rate in rates.items() if name in flops and rate > 0},
        rates["memory"],
        inside or _of_data_sheet(sheet.inside, sheet),
        between or _of_data_sheet(sheet.between, sheet, at_most=inside),
        host_s_per_operator=-rates["operator"],
        host_s_per_update=-rates["update"],
        asynchronous=device.type != "cpu",
        backend=dist.get_default_backend_for_device(device),
        reserved_bytes=reserved,
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        link_efficiency=1.0,
        is_measured=True,
        assumed_links=assumed,
        sources=tuple(sources),
        rates=operators,
        message_rates=messages,
        link_host_share=share,
        host_link_bytes_per_s=sheet.host_link_bytes_per_s * sheet.link_efficiency,
        host_bytes_per_s=sheet.host_bytes_per_s,
        disk_bytes_per_s=disk_rate or sheet.disk_bytes_per_s,
        cache_bytes=cache,
        host_cold_factor=cold,
        host_cache_bytes=core,
    )
    if not operators or profile.asynchronous:
        return profile
    efficiencies = [_operator_efficiency(profile, device) for _ in range(_PASSES)]
    return replace(profile, operator_efficiency=statistics.median(efficiencies))


def nodes_of(hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host, in the order of their first ranks, for any placement of ranks."""
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    return list(nodes.values())


def _links(
    device: torch.device, hosts: Sequence[str], rank: int, *, passes: int
) -> tuple[Link | None, Link | None, float, Rates]:
    """Measure the slowest link inside a node and between nodes; None if there is no such link.

    Inside a node also the fraction of time in which messages occupy the processor, and rates by kind and size.
    Collective over the world.

    Args:
        device: This rank's device.
        hosts: Host name of every rank.
        rank: This rank.
        passes: Number of measurements of which the medians are used; with 0 one, without rates by kind and size.
    """
    nodes = nodes_of(hosts)
    # Every rank must create every group, in the same order.
    groups = [dist.new_group(ranks) for ranks in nodes]
    across = dist.new_group([ranks[0] for ranks in nodes]) if len(nodes) > 1 else None
    try:
        return _links_of(device, nodes, groups, across, rank, passes=passes)
    finally:
        # A job of many runs measures before each: kept groups would add their threads and sockets every time.
        for made in (*groups, *([] if across is None else [across])):
            if made is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(made)


def _links_of(
    device: torch.device,
    nodes: Sequence[Sequence[int]],
    groups: Sequence[dist.ProcessGroup],
    across: dist.ProcessGroup | None,
    rank: int,
    *,
    passes: int,
) -> tuple[Link | None, Link | None, float, Rates]:
    """Measure as :func:`_links`, over one group in each node and one of the nodes' first ranks."""
    node = next(number for number, ranks in enumerate(nodes) if rank in ranks)
    insides = [_link(device, groups[node]) for _ in range(max(1, passes))] if len(nodes[node]) > 1 else []
    inside = _median(insides)
    between = _link(device, across) if across is not None and rank == nodes[node][0] else None
    share = _busy_share(groups[node]) if device.type == "cpu" and inside is not None else 0.0
    found = _gathered((inside, between, share))
    slowest_inside, slowest_between = (_slowest(links) for links in list(zip(*found, strict=True))[:2])
    share = max(each for *_, each in found)
    if not passes:
        return slowest_inside, slowest_between, share, {}
    rates: Rates = {}
    if inside is not None:
        rates = _median_rates([_message_rates(device, groups[node], inside) for _ in range(passes)])
    alike = all(len(ranks) == len(nodes[0]) for ranks in nodes)
    return slowest_inside, slowest_between, share, _slowest_rates(rates) if alike else {}


def _message_rates(device: torch.device, group: dist.ProcessGroup, link: Link) -> Rates:
    """Return bytes per second of messages by kind and size, without latency. Collective over ``group``."""
    size, rank = group.size(), group.rank()
    hops = math.ceil(math.log2(size))
    ahead, behind = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    found: dict[str, list[tuple[float, float, float]]] = {}
    for numel in _MESSAGES:
        part, whole = torch.zeros(numel // size, device=device), torch.zeros(numel // size * size, device=device)
        other = torch.empty_like(part)

        def exchange(part: Tensor = part, other: Tensor = other) -> None:
            pair = [dist.P2POp(dist.isend, part, ahead, group), dist.P2POp(dist.irecv, other, behind, group)]
            for work in dist.batch_isend_irecv(pair):
                work.wait()

        moved = float(part.numel() * part.element_size())
        runs: list[tuple[str, Callable[[], Any], float, int]] = [
            ("reduce", partial(dist.all_reduce, whole, group=group), 2 * (size - 1) * moved, 2 * hops),
            ("gather", partial(dist.all_gather, list(whole.chunk(size)), part, group=group), (size - 1) * moved, hops),
            ("send", exchange, moved, 1),
        ]
        for kind, run, sent, steps in runs:
            took = _between_products(run, device)
            net = max(took - steps * link.latency_s, 0.1 * took)
            found.setdefault(kind, []).append((sent, sent, sent / net))
    return found


def _busy_share(group: dist.ProcessGroup) -> float:
    """Return the fraction of a message's time in which this process is busy with it. Collective over ``group``."""
    large = torch.zeros(1 << 22)
    begin = time.perf_counter(), time.process_time()
    for _ in range(_ROUNDS):
        dist.all_reduce(large, group=group)
    return min(1.0, (time.process_time() - begin[1]) / max(time.perf_counter() - begin[0], 1e-9))


def _slowest_rates(own: Rates) -> Rates:
    """Return the slowest rank's rate of every operator and size. Collective over the world."""
    everyone: list[Rates] = _gathered(own)
    return {
        name: [
            (size, work, min(rates[name][index][2] for rates in everyone))
            for index, (size, work, _) in enumerate(points)
        ]
        for name, points in everyone[0].items()
    }


def _median_rates(passes: Sequence[Rates]) -> Rates:
    """Return the median of the rates of every operator and size."""
    return {
        name: [
            (size, work, statistics.median(rates[name][index][2] for rates in passes))
            for index, (size, work, _) in enumerate(points)
        ]
        for name, points in passes[0].items()
    }


def _median(links: Sequence[Link]) -> Link | None:
    if not links:
        return None
    return Link(*(statistics.median(getattr(link, each.name) for link in links) for each in fields(Link)))


def _gathered(own: Any) -> list[Any]:
    """Gather a picklable object from every rank. Collective over the world."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def _slowest(links: Sequence[Link | None]) -> Link | None:
    seen = [link for link in links if link is not None]
    if not seen:
        return None
    return Link(max(link.latency_s for link in seen), min(link.bytes_per_s for link in seen))


def _smallest(own: tuple[str, float, float]) -> tuple[str, float, float]:
    """Return the first rank's device name, and the smallest memory of all ranks. Collective over the world."""
    everyone = _gathered(own)
    _, memory, reserved = min(everyone, key=lambda facts: facts[1] - facts[2])
    return everyone[0][0], memory, reserved


def _of_data_sheet(link: Link, sheet: DeviceProfile, *, at_most: Link | None = None) -> Link:
    """Return a data sheet's link at collective efficiency, limited to the rate of a measured link."""
    link = replace(link, bytes_per_s=link.bytes_per_s * sheet.link_efficiency)
    return link if at_most is None else _slowest([link, at_most]) or link


def _seconds(
    run: Callable[[], Any],
    device: torch.device,
    *,
    repeat: int = 1,
    of: Callable[[Iterable[float]], float] = statistics.median,
) -> float:
    """Return the seconds of one run, reduced by ``of`` over some rounds; the same number of rounds on every rank."""

    def once() -> float:
        begin = time.perf_counter()
        for _ in range(repeat):
            run()
        synchronize(device)
        return (time.perf_counter() - begin) / repeat

    once()
    return of([once() for _ in range(_ROUNDS)])


def _flops(device: torch.device, dtype: torch.dtype, *, tf32: bool = False) -> float:
    """Return the FLOP/s of a matrix product; 0 if the dtype is not supported."""
    # Small on CPU, because matrix products are slow in dtypes that the processor does not support.
    size = 384 if device.type == "cpu" else 8192
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        return 2 * size**3 / _seconds(lambda: left @ right, device)
    except RuntimeError:
        return 0.0
    finally:
        torch.set_float32_matmul_precision(before)


def _memory_rate(device: torch.device) -> float:
    """Return the bytes per second that an addition reads and writes, on data larger than a rank's cache."""
    # On CPU three tensors of 16 MiB, which the allocator can keep.
    numel = (1 << 22) if device.type == "cpu" else (1 << 28)
    left, right, out = (torch.ones(numel, device=device) for _ in range(3))
    return 3 * 4 * numel / _seconds(lambda: torch.add(left, right, out=out), device)


def _cache_bytes() -> float:
    """Return the largest working set that this rank reads about as fast as from its caches, while all ranks do."""
    sizes = [1 << power for power in range(20, 27)]
    rates = []
    for size in sizes:
        data = torch.ones(size // 4)
        rates.append(size / _seconds(data.sum, torch.device("cpu"), repeat=max(1, (1 << 24) // size)))
    between = math.sqrt(max(rates) * rates[-1])
    return float(max((size for size, rate in zip(sizes, rates, strict=True) if rate > between), default=0))


def _disk_rate(folder: str) -> float | None:
    """Return the slowest rank's bytes per second of disk writes and reads; None if a rank cannot write there.

    Collective over the world.
    """
    rate = 0.0
    dist.barrier()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            block = os.urandom(1 << 20)
            begin = time.perf_counter()
            for _ in range(_FILE_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            if hasattr(os, "posix_fadvise"):
                # Drop the file from the page cache, so that it is read from the disk.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.read(len(block)):
                pass
            rate = 2 * _FILE_BYTES / (time.perf_counter() - begin)
    except OSError:
        pass
    return min(_gathered(rate)) or None


class _Reference(nn.Module):
    """Transformer blocks with a loss over the tokens of a batch that it holds: a step with usual Python code."""

    tokens: Tensor

    def __init__(self, width: int, blocks: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(4 * width, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 4 * width, activation="gelu", batch_first=True) for _ in range(blocks)
        )
        self.head = nn.Linear(width, 4 * width)
        self.register_buffer("tokens", torch.randint(4 * width, (8, length)))

    @override
    def forward(self) -> Tensor:
        hidden = self.embed(self.tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), self.tokens.flatten())


def _reference_step(device: torch.device, *sizes: int) -> tuple[Callable[[], None], Callable[[], Any]]:
    """Return functions that run forward and backward, and the update, of a reference module."""
    torch.manual_seed(0)
    model = _Reference(*sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def compute() -> None:
        optimizer.zero_grad()
        model().backward()

    compute()
    optimizer.step()
    return compute, optimizer.step


def _events_of(compute: Callable[[], None], update: Callable[[], Any]) -> list[Event]:
    ledger = Ledger()
    with ledger:
        ledger.start()
        compute()
        ledger.updates = True
        update()
    return ledger.events


def _operator_seconds(device: torch.device) -> tuple[float, float]:
    """Return the host seconds per operator of forward and backward, and of an update, Python and autograd included."""
    compute, update = _reference_step(device, 16, 4, 8)
    operators = [event for event in _events_of(compute, update) if isinstance(event, Operator)]
    updates = sum(event.updates for event in operators)
    computes = _seconds(compute, device, repeat=3) / (len(operators) - updates)
    return computes, _seconds(update, device, repeat=3) / updates


def _core_cache_bytes() -> float:
    """Return the size of a processor core's own cache, or that of a typical one."""
    name = "SC_LEVEL2_CACHE_SIZE"
    return float((os.sysconf(name) if name in os.sysconf_names else 0) or 1 << 20)


def _cold_factor(core_cache_bytes: int) -> float:
    """Return how much longer this rank's host issues operators between those that evict its core's own cache."""
    layers = [nn.Linear(16, 16) for _ in range(16)]
    inputs, large = torch.randn(8, 16), torch.ones(core_cache_bytes)

    def run(issues: bool, evicts: bool) -> None:
        values = inputs
        for layer in layers:
            values = torch.relu(layer(values)) if issues else values
            if evicts:
                large.add_(1.0)

    warm, alone, cold = (
        _seconds(partial(run, *each), torch.device("cpu")) for each in ((True, False), (False, True), (True, True))
    )
    return max(1.0, (cold - alone) / warm)


def _operator_efficiency(profile: DeviceProfile, device: torch.device) -> float:
    """Return the fraction of the measured rates that operators reach in a step. Collective over the world.

    Operators are measured one by one, each again and again, which is when processors are fastest.
    """
    compute, update = _reference_step(device, 256, 2, 64)
    events = _events_of(compute, update)

    def step() -> None:
        compute()
        update()

    planned = time_step(events, profile, ranks_per_node=1)
    took = _seconds(step, device)
    shares: list[float] = _gathered(min(1.0, planned.compute / max(took - planned.idle, 1e-9)))
    return min(shares)


def _link(device: torch.device, group: dist.ProcessGroup) -> Link:
    """Return latency and bandwidth of all-reduces. Collective over ``group``.

    Small ones are issued between matrix products, as in a step: communication threads then need time to wake up, and
    ranks do not arrive at the same moment.
    """
    size = group.size()
    small, large = torch.zeros(1, device=device), torch.zeros(1 << 22, device=device)
    short = _between_products(lambda: dist.all_reduce(small, group=group), device)
    long = _seconds(lambda: dist.all_reduce(large, group=group), device)
    sent = 2 * (size - 1) / size * large.numel() * large.element_size()
    return Link(short / (2 * math.ceil(math.log2(size))), sent / max(long - short, 1e-9))


def _between_products(run: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds that a message adds to some matrix products. Called by all participating ranks."""
    work = torch.randn(192, 192, device=device)

    def products() -> None:
        for _ in range(3):
            work @ work

    def both() -> None:
        products()
        run()

    with_it, without = _seconds(both, device, repeat=5), _seconds(products, device, repeat=5)
    return max(with_it - without, 0.1 * with_it)


def _device_facts(device: torch.device, ranks_per_node: int) -> tuple[str, float, float]:
    """Return name, memory of one device in bytes, and the part of it that is used before tensors are allocated."""
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        free, total = module.mem_get_info(device)
        return module.get_device_name(device), float(total), float(total - free)
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _processor(), pages / ranks_per_node, 0.5e9


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"CPU, {names[0]}" if names else f"CPU, {platform.machine()}"
