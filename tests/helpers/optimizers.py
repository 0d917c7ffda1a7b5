"""Optimizers of every kind, torch's own and user-defined, and modules that train with any of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from tests.helpers.models import MODULES, Base, points


class Own(Optimizer):
    """User-defined optimizer: runs the closure, then ``update``."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss


class Shampoo(Own):
    """Shampoo: inverse roots of second-moment factors per dim (arXiv 1802.09568), with a step count in its groups."""

    def __init__(self, params, lr=0.05, eps=1e-2):
        super().__init__(params, {"lr": lr, "eps": eps, "count": 0})

    def update(self):
        for group in self.param_groups:
            # The count in the group must count steps, however many calls of ``update`` a step takes.
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, update = self.state[p], p.grad
                for dim, size in enumerate(p.shape):
                    key = f"factor_{dim}"
                    if key not in state:
                        state[key] = group["eps"] * torch.eye(size, dtype=p.dtype)
                    rows = p.grad.movedim(dim, 0).reshape(size, -1)
                    state[key].add_(rows @ rows.T)
                    values, vectors = torch.linalg.eigh(state[key])
                    root = vectors @ torch.diag(values.clamp_min(group["eps"]) ** (-0.5 / p.dim())) @ vectors.T
                    update = (
                        (root @ update.movedim(dim, 0).reshape(size, -1))
                        .reshape(update.movedim(dim, 0).shape)
                        .movedim(0, dim)
                    )
                p.sub_(group["lr"] / group["count"] ** 0.5 * update)


class Lamb(Own):
    """LAMB: Adam's update scaled by the ratio of parameter norm and update norm (arXiv 1904.00962)."""

    def __init__(self, params, lr=0.02, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                b1, b2 = group["betas"]
                state["m"].lerp_(p.grad, 1 - b1)
                state["v"].lerp_(p.grad.square(), 1 - b2)
                m, v = state["m"] / (1 - b1 ** state["step"]), state["v"] / (1 - b2 ** state["step"])
                update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
                p.sub_(group["lr"] * (p.norm() + 1e-3) / (update.norm() + 1e-3) * update)


class MuonAndAdam(Own):
    """Optimizer with per-group rules: orthogonalized momentum, also of stacked matrices, or Adam."""

    def __init__(self, params, lr=0.02):
        matrices, others = [p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]
        groups = [{"params": matrices, "orthogonal": True}, {"params": others, "orthogonal": False}]
        super().__init__(groups, {"lr": lr})

    def update(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                    if not group["orthogonal"]:
                        state.update(square=torch.zeros_like(p), step=torch.tensor(0.0))
                state["momentum"].mul_(0.9).add_(p.grad)
                if group["orthogonal"]:
                    x = state["momentum"] / (state["momentum"].norm(dim=(-2, -1), keepdim=True) + 0.1)
                    for _ in range(3):
                        x = 1.5 * x - 0.5 * x @ x.mT @ x
                    p.mul_(1 - 0.1 * group["lr"]).sub_(group["lr"] * x)
                else:
                    state["step"] += 1
                    state["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                    p.sub_(0.1 * group["lr"] * state["momentum"] / (state["square"].sqrt() + 0.1))


class Lion(Own):
    """Lion (arXiv 2302.06675) with tanh in place of sign, which would turn rounding noise into steps."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    def update(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    p.sub_(group["lr"] * torch.tanh((0.9 * m + 0.1 * p.grad) * 10))
                    m.lerp_(p.grad, 0.01)


class Counting(Own):
    """SGD whose step count, kept beside the parameters' state, weakens its momentum."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})
        self.state["steps"] = 0

    def update(self):
        self.state["steps"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.mul_(0.9 / self.state["steps"]).add_(p.grad)
                    p.sub_(group["lr"] * momentum)


class ScheduleFree(Own):
    """Schedule-free SGD (arXiv 2405.15682); its ``train`` and ``eval`` move parameters by the state."""

    def __init__(self, params, lr=0.05, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum, "count": 0, "trains": False})

    def train(self):
        self._switch(trains=True)

    def eval(self):
        self._switch(trains=False)

    @torch.no_grad()
    def _switch(self, trains):
        for group in self.param_groups:
            if group["trains"] != trains:
                group["trains"], beta = trains, group["momentum"]
                for p in group["params"]:
                    if p in self.state:
                        p.lerp_(self.state[p]["z"], 1 - beta if trains else 1 - 1 / beta)

    def update(self):
        for group in self.param_groups:
            if not group["trains"]:
                raise RuntimeError("Call train() before a step.")
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, 1 / group["count"])
                    p.sub_(p.grad, alpha=group["lr"] * (1 - group["momentum"] * (1 - 1 / group["count"])))
                    z.sub_(p.grad, alpha=group["lr"])


class NormOfAll(Own):
    """Optimizer that divides by the gradient norm over all of its parameters."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    def update(self):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.square().sum() for p in params).sqrt()
        for p in params:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            momentum.mul_(0.9).add_(p.grad / (norm + 0.1))
            p.sub_(self.param_groups[0]["lr"] * momentum)


def matrices(make: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """Restrict an optimizer to matrices."""

    def of_matrices(params, **kwargs: Any) -> Optimizer:
        return make([param for param in params if param.dim() == 2], **kwargs)

    return of_matrices


def _adafactor_of_transformers(params, **kwargs: Any) -> Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(params, **kwargs)


_T = torch.optim
#: Optimizer factories. A large eps where there is one: a tiny one turns rounding noise into full steps.
ELEMENTWISE: dict[str, Callable[..., Optimizer]] = {
    "Adadelta": functools.partial(_T.Adadelta, lr=0.5, eps=1e-3),
    "Adadelta decayed": functools.partial(_T.Adadelta, lr=0.5, eps=1e-3, weight_decay=0.1, rho=0.8),
    "Adagrad": functools.partial(_T.Adagrad, lr=0.05, eps=1e-3),
    "Adagrad started": functools.partial(_T.Adagrad, lr=0.05, initial_accumulator_value=0.1, lr_decay=0.1),
    "Adam": functools.partial(_T.Adam, lr=0.01, eps=1e-3),
    "Adam amsgrad": functools.partial(_T.Adam, lr=0.01, eps=1e-3, amsgrad=True, weight_decay=0.1),
    "Adam fused": functools.partial(_T.Adam, lr=0.01, eps=1e-3, fused=True),
    "Adam foreach": functools.partial(_T.Adam, lr=0.01, eps=1e-3, foreach=True),
    "Adam tensor lr": lambda params: _T.Adam(params, lr=torch.tensor(0.01), eps=1e-3),
    "Adamax": functools.partial(_T.Adamax, lr=0.01, eps=1e-2),
    "AdamW": functools.partial(_T.AdamW, lr=0.01, eps=1e-3, weight_decay=0.1),
    "ASGD": functools.partial(_T.ASGD, lr=0.05, t0=2),
    "NAdam": functools.partial(_T.NAdam, lr=0.01, eps=1e-3),
    "RAdam": functools.partial(_T.RAdam, lr=0.01, eps=1e-3),
    "RMSprop": functools.partial(_T.RMSprop, lr=0.01, eps=1e-2, momentum=0.5),
    "RMSprop centered": functools.partial(_T.RMSprop, lr=0.01, eps=1e-1, centered=True),
    "Rprop": functools.partial(_T.Rprop, lr=0.01),
    "SGD": functools.partial(_T.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Lion (user's)": Lion,
    "Counting (user's)": Counting,
    "SGD of matrices": matrices(functools.partial(_T.SGD, lr=0.1, momentum=0.9)),
}
PER_TENSOR: dict[str, Callable[..., Optimizer]] = {
    "Adafactor": functools.partial(_T.Adafactor, lr=0.05, eps=(1e-3, 1e-3)),
    "Adafactor foreach": functools.partial(_T.Adafactor, lr=0.05, eps=(1e-3, 1e-3), foreach=True, weight_decay=0.1),
    "Muon": matrices(functools.partial(_T.Muon, lr=0.02, eps=1e-3)),
    "Muon matched": matrices(functools.partial(_T.Muon, lr=0.02, eps=1e-3, adjust_lr_fn="match_rms_adamw")),
    "Adafactor (transformers)": functools.partial(
        _adafactor_of_transformers, lr=0.02, eps=(1e-3, 1e-3), relative_step=False, scale_parameter=True
    ),
    "Shampoo (user's)": Shampoo,
    "LAMB (user's)": Lamb,
    "Muon and Adam (user's)": lambda params: MuonAndAdam(list(params)),
}
JOINT: dict[str, Callable[..., Optimizer]] = {
    "LBFGS": functools.partial(_T.LBFGS, lr=0.1, max_iter=3),
    # Its line search depends on the loss, which must be that of all ranks' samples.
    "LBFGS line search": functools.partial(_T.LBFGS, lr=0.5, max_iter=2, line_search_fn="strong_wolfe"),
    "Norm of all (user's)": NormOfAll,
}
ALL = ELEMENTWISE | PER_TENSOR | JOINT


def maker(name: str) -> Callable[..., Optimizer]:
    """Return the factory of an optimizer of this file or of :mod:`tests.helpers.optimizer_families`."""
    if name in ALL:
        return ALL[name]
    from tests.helpers.optimizer_families import all_makers

    return all_makers()[name]


class Stack(nn.Module):
    """Two matrices stacked in one parameter, like experts; both are applied to every sample."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, size, size) / size**0.5)

    def forward(self, x):
        return torch.einsum("bi,eij->bj", x, self.weight).tanh()


class Trained(Base):
    """Chain of matrices of several shapes, vectors and a stack of matrices that every strategy can split.

    Parameters that the optimizer does not take are frozen.

    Args:
        name: Name of the optimizer.
        schedule: Whether to multiply learning rates by 0.8 after every step.
    """

    def __init__(self, name: str, schedule: bool = False) -> None:
        super().__init__()
        self.made_by, self.schedule = maker(name), schedule
        self.layers = nn.Sequential(
            nn.Sequential(nn.Linear(6, 16), nn.Tanh()),
            nn.Sequential(nn.Linear(16, 24), nn.Tanh()),
            Stack(24),
            nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 16), nn.Tanh()),
            nn.Linear(16, 1),
        )
        trained = {param for group in self.made_by(list(self.parameters())).param_groups for param in group["params"]}
        for param in self.parameters():
            param.requires_grad_(param in trained)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.note(F.mse_loss(self.layers(x.to(self.dtype)), y.to(self.dtype)))

    def configure_optimizers(self):
        optimizer = self.made_by(list(self.parameters()))
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def dataset(self, length):
        return points(length)


class Beside(nn.Module):
    """Linear layer that concatenates its output to those of the layers before it, which share its input."""

    def __init__(self, size: int, results: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, results)

    def forward(self, seen):
        x, results = seen
        return x, torch.cat((results, self.linear(x)), dim=1)


class Convex(Trained):
    """Linear layers under a strongly convex loss: convergence to its only minimum does not amplify rounding.

    LBFGS with a step size of 1 and its line search amplify rounding if a loss is not convex, on one process as well.
    """

    def __init__(self, name: str, schedule: bool = False) -> None:
        super().__init__(name, schedule)
        self.layers = nn.Sequential(*(Beside(6, results) for results in (16, 24, 8, 4)))

    def training_step(self, batch, batch_idx):
        x, y = (part.to(self.dtype) for part in batch)
        _, results = self.layers((x, x[:, :0]))
        wanted = y * torch.arange(results.shape[1], device=y.device, dtype=y.dtype).cos()
        away = results - wanted
        loss = (F.softplus(away) + F.softplus(-away)).sum() / len(x)
        return self.note(loss + 0.5 * sum(param.square().sum() for param in self.parameters()))


class Looked(Trained):
    """Embedding with sparse gradients, followed by a chain of frozen layers, which SparseAdam does not support."""

    def __init__(self, name: str, schedule: bool = False) -> None:
        super().__init__(name, schedule)
        self.requires_grad_(False)
        self.embed = nn.Embedding(64, 6, sparse=True)

    def training_step(self, batch, batch_idx):
        x, y = batch
        # One id for each combination of signs of a sample's features.
        ids = (x > 0).long() @ 2 ** torch.arange(6, device=x.device)
        return self.note(F.mse_loss(self.layers(self.embed(ids)), y.to(self.dtype)))

    def configure_optimizers(self):
        own, self.made_by = self.made_by, lambda params: own(self.embed.parameters())
        return super().configure_optimizers()


#: Registered by name for modules made by name; its ``optimizer`` is a name of this file.
MODULES["trained_by"] = lambda optimizer: Trained(optimizer)
