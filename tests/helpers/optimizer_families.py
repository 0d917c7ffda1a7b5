"""Optimizers of torch's own table of tests with every set of hyperparameters there, and some from PyPI."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import torch
from torch.optim import Optimizer

Make = Callable[..., Optimizer]


@functools.cache
def families() -> dict[str, dict[str, Make]]:
    """Return factories of optimizers by family (a class, one row of a table) and set of hyperparameters."""
    found = _torch() | _pypi()
    return {name: {f"{name}: {about}": make for about, make in sets.items()} for name, sets in found.items()}


def all_makers() -> dict[str, Make]:
    """Return the factory of every set of hyperparameters of every family by its name, ``family: set``."""
    return {name: make for sets in families().values() for name, make in sets.items()}


def _torch() -> dict[str, dict[str, Make]]:
    """Return torch's table; empty without ``expecttest``, which the table's module imports."""
    if importlib.util.find_spec("expecttest") is None:
        return {}
    from torch.testing._internal import common_optimizers as table

    found: dict[str, dict[str, Make]] = {}
    for info in table.optim_db:
        makers = found[info.optim_cls.__name__] = {}
        given = table._get_optim_inputs_including_global_cliquey_kwargs(torch.device("cpu"), torch.float64, info)
        for entry in given:
            # A differentiable step writes to leaves, which autograd refuses on one process as well.
            if not entry.kwargs.get("differentiable"):
                makers[entry.desc] = functools.partial(_made, info.optim_cls, entry.kwargs)
        if "foreach" in info.supported_impls:
            makers["default & foreach"] = functools.partial(_made, info.optim_cls, {"foreach": True})
    return found


def _pypi() -> dict[str, dict[str, Make]]:
    found: dict[str, dict[str, Make]] = {}
    if importlib.util.find_spec("transformers") is not None:
        from transformers.optimization import Adafactor

        found["Adafactor (transformers)"] = {
            "default": functools.partial(_made, Adafactor, {}),
            "own step size": functools.partial(_made, Adafactor, {"lr": 0.02, "relative_step": False, "beta1": 0.9}),
        }
    if importlib.util.find_spec("pytorch_optimizer") is not None:
        import pytorch_optimizer

        for name, settings in _PYTORCH_OPTIMIZER.items():
            how = _in_two_groups if name == "Muon" else _made
            make = functools.partial(how, getattr(pytorch_optimizer, name), settings)
            found[f"{name} (pytorch_optimizer)"] = {"default" if not settings else str(settings): make}
    if importlib.util.find_spec("schedulefree") is not None:
        import schedulefree

        for name in ("AdamWScheduleFree", "SGDScheduleFree"):
            found[f"{name} (schedulefree)"] = {
                "default": functools.partial(_training, getattr(schedulefree, name), {"lr": 0.02, "warmup_steps": 2})
            }
    return found


_PYTORCH_OPTIMIZER = {
    "SOAP": {"precondition_frequency": 2},
    "Shampoo": {"preconditioning_compute_steps": 1},
    "Lion": {},
    "Lamb": {},
    "CAME": {},
    "Adan": {},
    "AdEMAMix": {},
    "Prodigy": {},
    "Muon": {},
}


def _made(cls: type[Optimizer], settings: dict, params) -> Optimizer:
    """Make an optimizer; torch's Muon, which accepts only matrices, gets only those."""
    settings = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in settings.items()}
    params = list(params)
    if cls is torch.optim.Muon:
        params = [param for param in params if param.dim() == 2]
    return cls(params, **settings)


def _in_two_groups(cls: type[Optimizer], settings: dict, params) -> Optimizer:
    """Make an optimizer with the matrices in a ``use_muon`` group and the rest in another."""
    params = list(params)
    groups = [{"params": [p for p in params if (p.dim() == 2) is flag], "use_muon": flag} for flag in (True, False)]
    return cls(groups, **settings)


def _training(cls: type[Optimizer], settings: dict, params) -> Optimizer:
    """Make a schedule-free optimizer and switch it to training mode."""
    optimizer = _made(cls, settings, params)
    optimizer.train()
    return optimizer
