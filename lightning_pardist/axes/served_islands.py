"""Outer axis of elastic islands: each island is a separate job, and an outer server runs the outer optimizer."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, StochasticWeightAveraging, WeightAveraging
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.axes.base import ParallelAxis
from lightning_pardist.axes.refusals import refuse_callbacks
from lightning_pardist.checkpoint.chunks import Shards
from lightning_pardist.checkpoint.tensors import copy_from_full, shards_like
from lightning_pardist.collectives import real_view, table_device, world_group
from lightning_pardist.engines.averaging import IslandPart, Meeting, OuterClient, OuterSettings
from lightning_pardist.engines.ddp.buffers import tensors_without_optimizer
from lightning_pardist.local_tensors import local_shard
from lightning_pardist.runtime.environments.program import ISLAND_VARIABLE, given_island
from lightning_pardist.settings import positive

#: Attempts to fetch weights of the same outer step on all ranks of an island before an error is raised.
_TRIES = 20


class ServedIslandsAxis(ParallelAxis):
    """Synchronizes this job's parameters and floating-point buffers with an outer server every few steps.

    Other islands are separate jobs: a failure of one does not affect the others. Checkpoints and evaluation use this
    island's own weights, since other islands may be at any point of their data.

    The arguments are those of :class:`~lightning_pardist.LocalSGDStrategy`.

    Raises:
        ValueError: If a setting is out of range; during a run, if a callback averages weights itself, or the server
            rejects the island.
        ConnectionError: During a run, if the server cannot be reached or has exited.
    """

    name = "outer"
    # After all axes that act within an island.
    order = 60
    diverges = True

    def __init__(
        self,
        *,
        outer_server: str,
        island: int | None,
        islands: int,
        sync_every: int,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
    ) -> None:
        host, _, port = outer_server.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"outer_server={outer_server!r} is no address. Use 'HOST:PORT' of `pardist outer-server`.")
        if island is None:
            island = _island_of_environment()
        if not 0 <= island < islands:
            raise ValueError(
                f"island={island} is none of outer_parallel_size={islands} islands, which are counted from 0. Give each"
                " job its own number."
            )
        self.island, self.islands = island, islands
        self.sync_every = int(positive("sync_every", sync_every, "Set the optimizer steps between two meetings."))
        if not 0 <= outer_momentum < 1:
            raise ValueError(f"outer_momentum={outer_momentum} is not in [0, 1). DiLoCo uses 0.9, plain averaging 0.")
        self.outer_lr = positive("outer_lr", outer_lr, "DiLoCo uses 0.7, plain averaging 1.")
        self.outer_momentum = outer_momentum
        self._host, self._port = host.strip("[]"), int(port)
        self._client: OuterClient | None = None
        self._steps = 0
        self._dtype = torch.float32
        self._names: dict[Tensor, str] = {}
        self._stepped: list[nn.Parameter] = []
        self._rest: list[Tensor] = []
        self._anchor = torch.empty(0)
        self._momentum: dict[Tensor, Tensor] = {}

    @override
    def is_used(self, dims: object) -> bool:
        return True

    @property
    @override
    def data_share(self) -> tuple[int, int]:
        return self.island, self.islands

    @override
    def check(self, trainer: pl.Trainer) -> None:
        refuse_callbacks(
            trainer,
            (StochasticWeightAveraging, WeightAveraging),
            "averages the weights of this island only, and these averages would never be combined with other"
            " islands'. Remove the callback.",
        )
        refuse_callbacks(
            trainer,
            (LearningRateFinder, BatchSizeFinder),
            "runs trial training, in which other islands would take part. Run it without outer_server.",
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_client": None}

    @override
    def ready(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        optimizers = self.context.optimizers
        held = {param for one in optimizers for group in one.param_groups for param in group["params"]}
        named = [(name, param) for name, param in module.named_parameters() if param in held and _is_averaged(param)]
        # A checkpoint may be saved after the run, when the module's parameters have been replaced.
        self._names = {param: name for name, param in named}
        self._stepped = [param for _, param in named]
        self._rest = tensors_without_optimizer(module, optimizers)
        self._dtype = torch.float32
        for tensor in (*self._stepped, *self._rest):
            self._dtype = torch.promote_types(self._dtype, tensor.real.dtype if tensor.is_complex() else tensor.dtype)
        self._momentum = {}

    # --- steps --------------------------------------------------------------------------------------------------

    @override
    def start_training(self) -> None:
        self._steps = 0
        context = self.context
        part = IslandPart(
            OuterSettings(self.islands, context.dims.world_size, self.outer_lr, self.outer_momentum),
            island=self.island,
            rank=dist.get_rank(),
            numel=sum(_numel(tensor) for tensor in (*self._stepped, *self._rest)),
            stepped=sum(_numel(param) for param in self._stepped),
            dtype=self._dtype,
            token=context.broadcast(uuid.uuid4().bytes),
            layout=self._layout(),
        )
        self._client = OuterClient(self._host, self._port, part)
        found = self._client.join(self._flat(), self._flat_momentum)
        self._take(self._agreed(found))
        if self._client.generation:
            rank_zero_info(
                f"Island {self.island} continues from the weights that at most {self.islands} islands share after"
                f" {self._client.generation} outer steps."
            )

    @override
    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Synchronize with the server every :attr:`sync_every` steps of the first optimizer.

        Collective over the world.
        """
        if self._client is None or optimizer is not self.context.optimizers[0]:
            return
        self._steps += 1
        if self._steps >= self.sync_every:
            self._meet(self._client)

    @override
    def end_training(self) -> None:
        if self._client is None:
            return
        if self._steps:
            self._meet(self._client)
        self._keep_momentum(self._client)
        self._client.leave()
        self._client = None

    def _meet(self, client: OuterClient) -> None:
        self._steps = 0
        self.context.before_collective()
        # All ranks reach the server at about the same time: it counts an island only once all its ranks have arrived.
        dist.barrier(world_group())
        found = client.meet(self._anchor - self._flat())
        if not found.islands:
            rank_zero_warn(
                f"Island {self.island} reached its meeting after the others' outer step, which was made without it:"
                " its last steps do not count. A longer `pardist outer-server --timeout` waits for slower islands."
            )
        self._take(self._agreed(found))

    def _agreed(self, found: Meeting) -> Tensor:
        """Return weights of the same outer step on every rank of the island, fetching again if they differ.

        Collective over the world.

        Raises:
            RuntimeError: If they still differ after ``_TRIES`` attempts.
        """
        client = self._client
        for _ in range(_TRIES):
            seen = torch.tensor(
                [found.generation, -found.generation], device=table_device(world_group(), self.context.device)
            )
            dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=world_group())
            newest, oldest = seen.tolist()
            if newest == -oldest or client is None:
                return found.values
            found = client.fetch()
        raise RuntimeError(
            f"Ranks of island {self.island} received weights of different outer steps {_TRIES} times: other islands"
            " meet faster than these ranks can reach the server. Use a larger sync_every."
        )

    # --- weights ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _flat(self) -> Tensor:
        tensors = (*self._stepped, *self._rest)
        parts = [real_view(local_shard(each)).reshape(-1).to("cpu", self._dtype) for each in tensors]
        return torch.cat([torch.empty(0, dtype=self._dtype), *(part.detach() for part in parts)])

    @torch.no_grad()
    def _take(self, values: Tensor) -> None:
        for tensor, piece in self._pieces(values, [*self._stepped, *self._rest]):
            real_view(local_shard(tensor)).copy_(piece)
        # The parameters, not `values`: their rounding to a lower precision must not count as this island's progress.
        self._anchor = self._flat()

    def _pieces(self, flat: Tensor, tensors: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        for tensor, piece in zip(tensors, flat.split([_numel(each) for each in tensors]), strict=True):
            yield tensor, piece.view(real_view(local_shard(tensor)).shape)

    def _layout(self) -> bytes:
        digest = hashlib.sha256(self.context.dims.describe().encode())
        for param in self._stepped:
            digest.update(f"{self._names[param]} {tuple(local_shard(param).shape)};".encode())
        for tensor in self._rest:
            digest.update(f"{tuple(local_shard(tensor).shape)};".encode())
        return digest.digest()

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _keep_momentum(self, client: OuterClient) -> None:
        if self.outer_momentum:
            found, generation = client.momentum()
            if generation != client.generation:
                rank_zero_warn(
                    f"The other islands have made {generation - client.generation} outer steps since the last meeting"
                    f" of island {self.island}: the checkpoint keeps the outer momentum after them."
                )
            pieces = self._pieces(found, list(self._stepped))
            self._momentum = {param: piece.clone() for param, piece in pieces}

    def _flat_momentum(self) -> Tensor:
        kept = [self._momentum.get(param) for param in self._stepped]
        zeros = [torch.zeros(_numel(param), dtype=self._dtype) for param in self._stepped]
        return torch.cat([zero if one is None else one.reshape(-1) for one, zero in zip(kept, zeros, strict=True)])

    @override
    def shards(self) -> dict[str, Shards]:
        if self._client is not None:
            self._keep_momentum(self._client)
        return {
            f"momentum.{self._names[param]}": shards_like(param, _like(momentum, param))
            for param, momentum in self._momentum.items()
        }

    @override
    def load_shards(self, saved: Callable[[str], Tensor | None]) -> None:
        if not self.outer_momentum:
            return
        for param, name in self._names.items():
            whole = saved(f"momentum.{name}")
            if whole is not None:
                momentum = torch.zeros(real_view(local_shard(param)).shape, dtype=self._dtype)
                copy_from_full(whole, shards_like(param, _like(momentum, param)))
                self._momentum[param] = momentum

    # --- description and teardown -------------------------------------------------------------------------------

    @override
    def describe(self) -> str:
        kind = "DiLoCo" if self.outer_momentum or self.outer_lr != 1 else "Local SGD"
        text = (
            f"{kind}: island {self.island} of at most {self.islands}, which come to the outer server at"
            f" {self._host}:{self._port} every {self.sync_every} optimizer steps; it trains on 1/{self.islands} of"
            " the data, evaluates and saves its own weights"
        )
        if kind == "DiLoCo":
            text += f"; outer SGD with lr {self.outer_lr:g}, Nesterov momentum {self.outer_momentum:g}"
        return text

    @override
    def teardown(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        # Drop references to the run's parameters.
        self._stepped, self._rest, self._anchor = [], [], torch.empty(0)


def _island_of_environment() -> int:
    found = given_island()
    if not found.isdigit():
        raise ValueError(
            f"outer_server is set, but the number of this job's island is not: {ISLAND_VARIABLE}={found!r}. Set"
            f" island, or {ISLAND_VARIABLE}, to a number from 0."
        )
    return int(found)


def _is_averaged(tensor: Tensor) -> bool:
    return not tensor.is_meta and (tensor.is_floating_point() or tensor.is_complex())


def _numel(tensor: Tensor) -> int:
    return real_view(local_shard(tensor)).numel()


def _like(flat: Tensor, param: Tensor) -> Tensor:
    """View real values as complex ones, sharing memory, if ``param`` is complex."""
    return torch.view_as_complex(flat) if param.is_complex() else flat
