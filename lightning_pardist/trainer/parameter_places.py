"""Guard against re-registering parameters during a run in which ranks hold parts of them."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


def forbid_reassignment(module: nn.Module, strategy: str) -> Callable[[], None]:
    """Make it an error to register a layer's parameter under another name in that layer. Not collective.

    ``torch.nn.utils.prune`` does so, for example in a callback. The code that shards, splits or sends the parameter
    would continue with a name that no longer exists, and pruning by element values would see a part of them only.

    Args:
        module: The module as it is trained on this rank.
        strategy: Class name of the strategy, for the message.

    Returns:
        Function that removes the guard.
    """
    layers = {id(layer): name for name, layer in module.named_modules()}
    names = {
        (id(layer), name)
        for layer in module.modules()
        for name, _ in layer.named_parameters(recurse=False, remove_duplicate=False)
    }

    def refuse(layer: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or id(layer) not in layers or (id(layer), name) in names:
            return
        if any(own is parameter for own in layer.parameters(recurse=False)):
            path = f"{layers[id(layer)]}.{name}".lstrip(".")
            raise RuntimeError(
                f"A parameter was registered again as {path} during the run (as torch.nn.utils.prune does), but each"
                f" rank of {strategy} holds only a part of the model's parameters. Do that before or after Trainer.fit,"
                " or use pardist_ddp, pardist_zero1 or pardist_zero2."
            )

    return register_module_parameter_registration_hook(refuse).remove
