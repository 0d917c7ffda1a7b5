"""Device profiles: compute, memory and link rates from data sheets, or measured by ``pardist doctor --save``.

Data sheets list peak rates. The fraction that a program reaches is an efficiency, which is assumed unless the profile
was measured, and reported as assumed.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lightning_pardist.planner.operator_rates import Rates


class ProfileError(ValueError):
    """A device is unknown, or a profile is invalid; the message is a sentence."""


@dataclass(frozen=True)
class Link:
    """Latency and bandwidth of a connection between ranks.

    Attributes:
        latency_s: Seconds of an empty message.
        bytes_per_s: Bytes per second that one device sends, in one direction.
    """

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class DeviceProfile:
    """Rates of a type of device and of the links between devices.

    Attributes:
        name: Name of the device.
        memory_bytes: Memory of one device.
        flops: Floating point operations per second by dtype (``"float32"``, ``"bfloat16"``), dense.
        bytes_per_s: Bandwidth of its memory.
        inside: Link inside a node.
        between: Link between nodes.
        host_s_per_operator: Seconds that Python takes to issue one operator of forward or backward.
        host_cold_factor: Factor on ``host_s_per_operator`` after an operator that has read and written
            ``host_cache_bytes``, where host and device are one processor: the host's code and data are read again.
        host_cache_bytes: Size of the processor core's own cache; 0 to ignore it.
        host_s_per_update: Seconds that Python takes to issue one operator of an optimizer's update.
        operator_s: Minimum duration of an operator, in seconds.
        asynchronous: Whether the device executes asynchronously to the host.
        backend: Backend of its collectives: ``"nccl"`` or ``"gloo"``.
        reserved_bytes: Memory for the context, libraries and fragmentation.
        matmul_efficiency: Fraction of ``flops`` that matrix products reach.
        memory_efficiency: Fraction of ``bytes_per_s`` that other operators reach.
        link_efficiency: Fraction of a link's bandwidth that collectives reach.
        is_measured: Whether rates were measured (efficiencies are then 1) instead of taken from a data sheet.
        assumed_links: For a measured profile, which of ``"inside"`` and ``"between"`` could not be measured.
        sources: Sources of the numbers.
        rates: Rates of single operators by size, see :mod:`~lightning_pardist.planner.operator_rates`. If empty, an
            operator's time follows from its arithmetic and memory traffic at the rates above.
        cache_bytes: Size of the cache that a rank has to itself, from which operators were measured by size; operands
            that are not in it are read at ``bytes_per_s``. 0 if rates by size include memory, or are not given.
        operator_efficiency: Fraction of ``rates`` that operators reach in a training step.
        message_rates: Bytes per second that a rank sends inside a node, without latencies, by bytes sent and by kind of
            message (``"reduce"``, ``"gather"``, ``"send"``); if empty, the bandwidths of the links.
        link_host_share: Fraction of a message's time during which it occupies the processor that computes.
        host_link_bytes_per_s: Bandwidth between host memory and a device, in one direction.
        host_bytes_per_s: A device's share of the host memory bandwidth, for optimizers that step on the host.
        disk_bytes_per_s: A device's share of a local disk's bandwidth, for optimizer state in files.
    """

    name: str
    memory_bytes: float
    flops: Mapping[str, float]
    bytes_per_s: float
    inside: Link
    between: Link
    host_s_per_operator: float = 8e-6
    operator_s: float = 0.0
    asynchronous: bool = True
    backend: str = "nccl"
    reserved_bytes: float = 1.5e9
    matmul_efficiency: float = 0.65
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.75
    is_measured: bool = False
    assumed_links: tuple[str, ...] = ()
    sources: tuple[str, ...] = field(default=())
    rates: Rates = field(default_factory=dict, repr=False)
    message_rates: Rates = field(default_factory=dict, repr=False)
    link_host_share: float = 0.0
    host_link_bytes_per_s: float = 32e9
    host_bytes_per_s: float = 50e9
    disk_bytes_per_s: float = 2e9
    cache_bytes: float = 0.0
    host_s_per_update: float = 8e-6
    host_cold_factor: float = 1.0
    host_cache_bytes: float = 0.0
    operator_efficiency: float = 1.0

    def flops_of(self, dtype: str) -> float:
        """Return the effective FLOP/s of matrix products in a dtype; those of fp32 if it is not listed."""
        return self.flops.get(dtype, self.flops["float32"]) * self.matmul_efficiency

    @property
    def rates_text(self) -> str:
        """Short description of the source of the rates."""
        if not self.is_measured:
            return "data sheet, efficiencies assumed"
        if not self.assumed_links:
            return "measured"
        return f"measured, but links {' and '.join(_LINKS[each] for each in self.assumed_links)} assumed"

    def to_json(self) -> dict[str, Any]:
        """Return the profile as plain values that :meth:`read` accepts."""
        return asdict(self)

    @classmethod
    def read(cls, path: str | Path) -> DeviceProfile:
        """Read a saved profile.

        Raises:
            ProfileError: If the file cannot be read or is not a valid profile, with the reason.
        """
        try:
            content = json.loads(Path(path).read_text())
        except OSError as error:
            raise ProfileError(f"The device profile {path} cannot be read: {error.strerror}.") from None
        except ValueError as error:
            raise ProfileError(f"The device profile {path} is not JSON: {error}.") from None
        if not isinstance(content, dict):
            raise ProfileError(f"The device profile {path} is a {type(content).__name__}, not an object of settings.")
        if "host_s_per_operator" in content:
            # Profiles may have one host time for all operators.
            content.setdefault("host_s_per_update", content["host_s_per_operator"])
        known = {each.name for each in fields(cls)}
        needed = ("name", "memory_bytes", "flops", "bytes_per_s", "inside", "between")
        if missing := [name for name in needed if name not in content]:
            raise ProfileError(f"The device profile {path} lacks {', '.join(missing)}.")
        if unknown := sorted(set(content) - known):
            raise ProfileError(f"The device profile {path} has unknown settings: {', '.join(unknown)}.")
        try:
            links = {name: _link(**content[name]) for name in ("inside", "between")}
            flops = {str(name): float(value) for name, value in content["flops"].items()}
            lists = {name: tuple(map(str, content.get(name, ()))) for name in ("sources", "assumed_links")}
            rates = {name: _points(content.get(name, {})) for name in ("rates", "message_rates")}
            plain = {each.name: float(content[each.name]) for each in fields(cls)
                     if each.type == "float" and each.name in content}  # fmt: skip
            made = cls(**{**content, **plain, **links, **lists, **rates, "flops": flops})
            if unknown := sorted(set(made.assumed_links) - set(_LINKS)):
                raise ValueError(f"assumed_links has unknown links {', '.join(unknown)}")
            numbers = [made.memory_bytes, made.bytes_per_s, *flops.values()]
            numbers += [made.inside.bytes_per_s, made.between.bytes_per_s]
            numbers += [made.host_link_bytes_per_s, made.host_bytes_per_s, made.disk_bytes_per_s]
            numbers += [made.matmul_efficiency, made.memory_efficiency, made.link_efficiency, made.operator_efficiency]
            numbers += [number for each in rates.values() for points in each.values() for point in points
                        for number in point]  # fmt: skip
            if "float32" not in flops or not all(0 < number < math.inf for number in numbers):
                raise ValueError("rates and sizes must be positive and finite, and flops must have float32")
            costs = [made.inside.latency_s, made.between.latency_s, *plain.values()]
            if not all(0 <= number < math.inf for number in costs):
                raise ValueError("times and shares must be finite and not negative")
        except (TypeError, ValueError, AttributeError) as error:
            raise ProfileError(f"The device profile {path} is invalid: {error}.") from None
        return made


def _link(**content: Any) -> Link:
    return Link(**{name: float(value) for name, value in content.items()})


def _points(content: Mapping[str, Any]) -> Rates:
    return {
        str(name): [(float(size), float(work), float(rate)) for size, work, rate in points]
        for name, points in content.items()
    }


_LINKS = {"inside": "inside a node", "between": "between nodes"}
_NODE_400G = "8 network cards of 400 Gb/s for 8 devices, as in DGX H100: 50 GB/s a device"
_LATENCY = "latencies, efficiencies, host time per operator, rates of host memory and disk, reserved memory: assumed"
_PCIE4, _PCIE5 = 32e9, 64e9
_INSIDE_LATENCY, _BETWEEN_LATENCY = 5e-6, 15e-6

_TABLE: dict[str, DeviceProfile] = {
    "a100": DeviceProfile(
        "A100 SXM 80 GB", 80e9, {"float32": 19.5e12, "tf32": 156e12, "bfloat16": 312e12, "float16": 312e12}, 2.039e12,
        Link(_INSIDE_LATENCY, 300e9), Link(_BETWEEN_LATENCY, 25e9),
        host_link_bytes_per_s=_PCIE4,
        sources=("NVIDIA A100 data sheet (dense; NVLink 600 GB/s, PCIe 64 GB/s both ways)",
                 "8 network cards of 200 Gb/s for 8 devices, as in DGX A100: 25 GB/s a device", _LATENCY),
    ),
    "h100": DeviceProfile(
        "H100 SXM", 80e9, {"float32": 67e12, "tf32": 494.5e12, "bfloat16": 989.5e12, "float16": 989.5e12}, 3.35e12,
        Link(_INSIDE_LATENCY, 450e9), Link(_BETWEEN_LATENCY, 50e9),
        host_link_bytes_per_s=_PCIE5,
        sources=("NVIDIA H100 data sheet (half of the figures with sparsity; NVLink 900 GB/s, PCIe 128 GB/s both ways)",
                 _NODE_400G, _LATENCY),
    ),
    "h200": DeviceProfile(
        "H200 SXM", 141e9, {"float32": 67e12, "tf32": 494.5e12, "bfloat16": 989.5e12, "float16": 989.5e12}, 4.8e12,
        Link(_INSIDE_LATENCY, 450e9), Link(_BETWEEN_LATENCY, 50e9),
        host_link_bytes_per_s=_PCIE5,
        sources=("NVIDIA H200 data sheet (half of the figures with sparsity; NVLink 900 GB/s, PCIe 128 GB/s both ways)",
                 _NODE_400G, _LATENCY),
    ),
    "b200": DeviceProfile(
        "B200", 180e9, {"float32": 75e12, "tf32": 1.1e15, "bfloat16": 2.25e15, "float16": 2.25e15}, 8e12,
        Link(_INSIDE_LATENCY, 900e9), Link(_BETWEEN_LATENCY, 50e9),
        host_link_bytes_per_s=_PCIE5,
        sources=("NVIDIA DGX B200 and HGX B200 data sheets (an eighth of a system, half of the figures with sparsity;"
                 " NVLink 1.8 TB/s, PCIe 5.0 x16 128 GB/s both ways)", _NODE_400G, _LATENCY),
    ),
    "mi300x": DeviceProfile(
        "MI300X", 192e9, {"float32": 163.4e12, "tf32": 653.7e12, "bfloat16": 1307.4e12, "float16": 1307.4e12}, 5.3e12,
        Link(_INSIDE_LATENCY, 448e9), Link(_BETWEEN_LATENCY, 50e9),
        host_link_bytes_per_s=_PCIE5,
        sources=("AMD Instinct MI300X data sheet (dense; Infinity Fabric 896 GB/s, PCIe 128 GB/s both ways)",
                 _NODE_400G, _LATENCY),
    ),
    "l40s": DeviceProfile(
        "L40S", 48e9, {"float32": 91.6e12, "tf32": 183e12, "bfloat16": 362e12, "float16": 362e12}, 864e9,
        Link(_INSIDE_LATENCY, 32e9), Link(_BETWEEN_LATENCY, 25e9),
        host_link_bytes_per_s=_PCIE4,
        sources=("NVIDIA L40S data sheet (dense; PCIe 4.0 x16, 64 GB/s both ways)", "between nodes: assumed 200 Gb/s",
                 _LATENCY),
    ),
    "cpu": DeviceProfile(
        "CPU", 16e9, {"float32": 50e9, "bfloat16": 50e9, "float64": 25e9}, 10e9,
        Link(50e-6, 2e9), Link(100e-6, 1e9),
        host_s_per_operator=5e-6, host_s_per_update=5e-6, asynchronous=False, backend="gloo", reserved_bytes=0.5e9,
        sources=("all numbers assumed: one core of a typical CPU",),
    ),
}  # fmt: skip


def data_sheet_of(name: str) -> DeviceProfile:
    """Return the data-sheet profile of a device.

    Args:
        name: Name that the device reports, such as ``"NVIDIA H100 80GB HBM3"``. Devices that are not in the table get
            the NCCL profile with the slowest links.
    """
    words = name.lower()
    slowest = min(
        (each for each in _TABLE.values() if each.backend == "nccl"), key=lambda each: each.inside.bytes_per_s
    )
    return next((profile for kind, profile in _TABLE.items() if kind in words), slowest)


def find_profile(device: str | Path | DeviceProfile, *, memory_gb: float | None = None) -> DeviceProfile:
    """Return the profile of a device.

    Args:
        device: A name (``"h100"``), a path of a saved profile, or a profile.
        memory_gb: Override of the device's memory, in 10^9 bytes.

    Raises:
        ProfileError: If the device is unknown, or the file is not a valid profile.
    """
    if isinstance(device, DeviceProfile):
        found = device
    elif str(device).lower() in _TABLE:
        found = _TABLE[str(device).lower()]
    elif str(device).endswith(".json"):
        found = DeviceProfile.read(device)
    else:
        near = difflib.get_close_matches(str(device).lower(), _TABLE, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        names = ", ".join(_TABLE)
        raise ProfileError(
            f"There is no device {str(device)!r}.{hint} Use one of {names}, or the .json file of a profile."
        )
    if memory_gb is not None and not 0 < memory_gb < math.inf:
        raise ProfileError(
            f"memory_gb={memory_gb:g} is not positive and finite. Set the memory of a device in 10^9 bytes."
        )
    return found if memory_gb is None else replace(found, memory_bytes=memory_gb * 1e9)
