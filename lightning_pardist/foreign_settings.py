"""Replacements for settings of Lightning's and DeepSpeed's strategies that this package does not have."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_NOT_NEEDED = "Leave it out: it is not needed here."
_DEEPSPEED_OFFLOAD = 'Use strategy="pardist_zero2_offload" or "pardist_zero3_offload", or offload="cpu".'
_DEEPSPEED = "Leave it out, or read the whole configuration with ZeroStrategy.from_deepspeed_config."
_SCALER = "Give it to the Trainer's precision plugin, or leave it out."

#: Advice by name of the setting.
ADVICE: Mapping[str, str] = {
    # DDPStrategy
    "find_unused_parameters": "Leave it out: parameters that a step does not use need no setting.",
    "gradient_as_bucket_view": _NOT_NEEDED,
    "static_graph": _NOT_NEEDED,
    "bucket_cap_mb": "Use bucket_size_mb.",
    "ddp_comm_hook": 'Use gradient_compression="bf16", "fp16" or "powersgd" of DDPStrategy.',
    "ddp_comm_state": "Use gradient_compression=PowerSGD(...) of DDPStrategy.",
    "ddp_comm_wrapper": 'Use gradient_compression="bf16" or "fp16" of DDPStrategy.',
    "model_averaging_period": 'Use strategy="pardist_local_sgd", whose sync_every is the period.',
    "timeout": "Use timeout_s, in seconds.",
    # FSDPStrategy
    "sharding_strategy": 'Use strategy="pardist_fsdp" for FULL_SHARD, "pardist_zero2" for SHARD_GRAD_OP,'
    ' "pardist_hsdp" for HYBRID_SHARD and "pardist_ddp" for NO_SHARD.',
    "auto_wrap_policy": 'Leave it out: units are found. FSDPStrategy(units={"Block"}) names them by class.',
    "cpu_offload": 'Use offload="cpu".',
    "mixed_precision": "Use the Trainer's precision, or mp_policy of FSDPStrategy.",
    "activation_checkpointing_policy": 'Use activation_checkpointing=["Block"], names of classes, or "auto".',
    "state_dict_type": 'Use checkpoint="full" or "sharded".',
    "device_mesh": "Use data_shard_size of FSDPStrategy, or the degrees of HybridStrategy: the mesh is made from them.",
    "use_orig_params": "Leave it out: modules keep their own parameters.",
    "sync_module_states": "Leave it out: every rank starts with the first rank's parameters.",
    "limit_all_gathers": _NOT_NEEDED,
    "forward_prefetch": _NOT_NEEDED,
    "backward_prefetch": _NOT_NEEDED,
    # ModelParallelStrategy
    "data_parallel_size": "Leave it out: data parallelism uses the ranks that the other degrees leave.",
    "save_distributed_checkpoint": 'Use checkpoint="sharded" or "full".',
    # DeepSpeedStrategy
    "stage": 'Use strategy="pardist_zero1", "pardist_zero2" or "pardist_zero3", or zero_stage=1 or 2 of ZeroStrategy.',
    "zero_optimization": 'Use strategy="pardist_zero1", "pardist_zero2" or "pardist_zero3".',
    "config": "Use ZeroStrategy.from_deepspeed_config(config), or `pardist fit --deepspeed-config FILE`.",
    "offload_optimizer": _DEEPSPEED_OFFLOAD,
    "offload_parameters": _DEEPSPEED_OFFLOAD,
    "offload_optimizer_device": _DEEPSPEED_OFFLOAD,
    "offload_params_device": _DEEPSPEED_OFFLOAD,
    "remote_device": _DEEPSPEED_OFFLOAD,
    "nvme_path": "Use offload= with the path of a folder on a local disk.",
    "cpu_checkpointing": 'Use activation_checkpointing="auto".',
    "partition_activations": 'Use activation_checkpointing="auto".',
    "reduce_bucket_size": "Use bucket_size_mb of ZeroStrategy.",
    "allgather_bucket_size": "Use bucket_size_mb of ZeroStrategy.",
    "overlap_comm": "Use overlap of ZeroStrategy.",
    "load_full_weights": "Leave it out: every strategy loads full and sharded checkpoints.",
    **dict.fromkeys(
        ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"), _SCALER
    ),
    **dict.fromkeys(
        (
            *("params_buffer_count", "params_buffer_size", "max_in_cpu", "optimizer_buffer_count", "block_size"),
            *("queue_depth", "single_submit", "overlap_events", "thread_count", "pin_memory", "sub_group_size"),
            *("contiguous_gradients", "allgather_partitions", "reduce_scatter", "zero_allow_untested_optimizer"),
            *("logging_batch_size_per_gpu", "logging_level", "contiguous_memory_optimization"),
            *("synchronize_checkpoint_boundary", "exclude_frozen_parameters"),
        ),
        _DEEPSPEED,
    ),
}


def refuse_unknown(
    owner: str, settings: Iterable[str], known: Iterable[str], inside: Mapping[str, Callable[..., Any]] | None = None
) -> None:
    """Raise an error for settings that a strategy does not have.

    Args:
        owner: Name of the strategy's class.
        settings: Names of the unknown settings.
        known: Names of the strategy's settings.
        inside: Settings that are dicts, with the callable that takes their values as keyword arguments.

    Raises:
        ValueError: If the first one is a setting of another strategy or of a dict, with the replacement.
        TypeError: For any other name, with the closest known one.
    """
    for name in settings:
        if name in ADVICE:
            raise ValueError(f"{owner} has no setting {name!r}. {ADVICE[name]}")
        places = [f"{place}={{{name!r}: ...}}" for place, taker in (inside or {}).items() if name in names_of(taker)]
        if places:
            raise ValueError(f"{owner} has no setting {name!r} of its own. Set {' or '.join(places)}.")
        close = difflib.get_close_matches(name, list(known), n=1)
        raise TypeError(f"{owner} has no setting {name!r}." + (f" Did you mean {close[0]!r}?" if close else ""))


def refuse_unknown_inside(
    place: str, settings: Iterable[str], taker: Callable[..., Any], *, beside: Callable[..., Any]
) -> None:
    """Raise an error for unknown names in a setting that is a dict.

    Args:
        place: Name of the setting.
        settings: Names in the dict.
        taker: Callable that takes them as keyword arguments.
        beside: Callable whose arguments are set directly and thus not allowed in the dict.

    Raises:
        ValueError: If a name is unknown, with the allowed names.
    """
    known = [name for name in names_of(taker) if name not in names_of(beside)]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(f"{place}: {', '.join(unknown)} is unknown. Use {', '.join(known)}.")


def names_of(taker: Callable[..., Any]) -> list[str]:
    """Return the names of a callable's keyword arguments."""
    return [name for name in inspect.signature(taker).parameters if name not in ("self", "args", "kwargs")]


def refuse_name(name: str, known: Iterable[str]) -> None:
    """Raise an error for an unknown strategy name that begins like one of this package, or for a class path.

    Args:
        name: Value of ``Trainer(strategy=...)``.
        known: Registered names of this package.

    Raises:
        ValueError: For a class path; for an unknown name, with the closest name and all others.
    """
    names = list(known)
    if name.startswith("lightning_pardist."):
        raise ValueError(
            f"strategy={name!r} is the path of a class, but the Trainer accepts only registered names as strings:"
            " pass an instance, for example strategy=lightning_pardist.ZeroStrategy(). On the command line, pass a"
            f" setting of the class as well (--trainer.strategy {name} --trainer.strategy.timeout_s 1800), or set"
            " class_path in a config file."
        )
    if not name.startswith("pardist") or name in names:
        return
    longer = sorted((known for known in names if name.startswith(known)), key=len)
    close = longer[-1:] or difflib.get_close_matches(name, names, n=1)
    setting = next((setting for setting in ADVICE if longer and setting in name), None)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    advice = f"{setting}: {ADVICE[setting]} " if setting is not None else ""
    raise ValueError(f"strategy={name!r} is unknown. {hint}{advice}This package has {', '.join(names)}.")


def advise(message: str, classes: Mapping[str, str]) -> str | None:
    """Return advice for a command-line error caused by a strategy's setting; None for any other error.

    Args:
        message: Error message of the parser.
        classes: Import path of the class by registered name.
    """
    if "pardist" not in message:
        return None
    names = re.findall(r"Option '(\w+)' is not accepted", message) or re.findall(r"NestedArg\(key='(\w+)'", message)
    if not names:
        return None
    name = names[0]
    if name in ADVICE:
        return f"Strategies of lightning_pardist have no setting {name!r}. {ADVICE[name]}"
    chosen = re.search(r"path string: (pardist_\w+)", message)
    if chosen is None or chosen[1] not in classes:
        return None
    path = classes[chosen[1]]
    return (
        f"Settings belong to a class, not to a name: use --trainer.strategy {path} --trainer.strategy.{name} in place"
        f" of --trainer.strategy {chosen[1]}."
    )
