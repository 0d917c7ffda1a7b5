"""Translates DeepSpeed configuration files to strategies and Trainer settings."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.amp import GradScaler

from lightning_pardist.compat.lightning_loops import precision_flag
from lightning_pardist.engines.common.devices import rank_devices
from lightning_pardist.trainer.batch_size import ExpectedBatchSize

_MIB = 2**20

#: Settings that always have these values here; a key is reported as ignored only if the file sets another value.
_ALWAYS = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "allgather_partitions": True,
    "round_robin_gradients": False,
    "gather_16bit_weights_on_model_save": True,
    "stage3_gather_16bit_weights_on_model_save": True,
    "prescale_gradients": False,
    "sparse_gradients": False,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "pin_memory": True,
    "wall_clock_breakdown": False,
    "dump_state": False,
}


@dataclass(frozen=True)
class DeepSpeedConfig:
    """A DeepSpeed configuration in this package's and Lightning's terms.

    Attributes:
        zero_stage: 0 (data parallelism) to 3.
        strategy: Arguments of the strategy of that stage.
        precision: Value for ``Trainer(precision=...)``; None if the file leaves it to the Trainer.
        loss_scale: Arguments of ``torch.amp.GradScaler``, under fp16.
        gradient_clip_val: Value for the Trainer, or None.
        accumulate_grad_batches: Value for the Trainer, or None.
        micro_batch_size: Samples per rank and batch, or None.
        global_batch_size: Samples per optimizer step, or None.
        ignored: Names of settings that have no counterpart.
    """

    zero_stage: int
    strategy: dict[str, Any]
    precision: Literal["16-mixed", "bf16-mixed", "bf16-true"] | None = None
    loss_scale: dict[str, Any] = field(default_factory=dict)
    gradient_clip_val: float | None = None
    accumulate_grad_batches: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    ignored: tuple[str, ...] = ()

    @classmethod
    def read(cls, config: str | os.PathLike[str] | Mapping[str, Any]) -> DeepSpeedConfig:
        """Read a file or its parsed content. ``"auto"`` leaves a value to the Trainer and the strategy.

        Raises:
            ValueError: If the file cannot be read, or its settings are out of range or contradict each other.
        """
        reader = _Reader(_loaded(config))
        zero = reader.section("zero_optimization")
        stage = zero.integer("stage", least=0) or 0
        if stage > 3:
            raise ValueError(f"zero_optimization.stage={stage} is unknown. Use 0, 1, 2 or 3.")
        precision, loss_scale = _precision(reader, stage)
        strategy = _strategy(zero, stage, half=precision == "bf16-true")
        if stage:
            strategy |= _few_bits(zero, scaled=precision == "16-mixed")
        clip = reader.number("gradient_clipping")
        accumulate = reader.integer("gradient_accumulation_steps", least=1)
        micro = reader.integer("train_micro_batch_size_per_gpu", least=1)
        total = reader.integer("train_batch_size", least=1)
        if total is not None and total % ((micro or 1) * (accumulate or 1)):
            raise ValueError(
                f"train_batch_size={total} is not a multiple of train_micro_batch_size_per_gpu={micro or 'auto'} times"
                f" gradient_accumulation_steps={accumulate or 'auto'}. It is their product with the number of ranks."
            )
        return cls(stage, strategy, precision, loss_scale, clip or None, accumulate, micro, total, tuple(reader.rest()))

    @property
    def precision_plugin(self) -> Precision | None:
        """Precision plugin for ``precision``, with the file's loss scale; None if the file sets no precision."""
        if self.precision == "bf16-true":
            return HalfPrecision("bf16-true")
        if self.precision is None:
            return None
        device = next((each.type for each in rank_devices()), "cpu")
        scaler = GradScaler(device, **self.loss_scale) if self.precision == "16-mixed" else None
        return MixedPrecision(self.precision, device, scaler)

    @property
    def strategy_class(self) -> str:
        """Name of the strategy class for the file's ZeRO stage."""
        return {0: "DDPStrategy", 3: "FSDPStrategy"}.get(self.zero_stage, "ZeroStrategy")

    def warn(self) -> None:
        """Warn once with the list of settings that have no counterpart."""
        if self.ignored:
            rank_zero_warn(
                "These settings of the DeepSpeed config have no counterpart here and are ignored:"
                f" {', '.join(self.ignored)}."
            )

    def apply(self, trainer: pl.Trainer, *, replicas: int) -> None:
        """Apply the settings that belong to the Trainer. Called by the strategy during setup.

        Args:
            trainer: The Trainer, before its run.
            replicas: Number of ranks that see different samples.

        Raises:
            ValueError: If the Trainer has a contradicting setting, or the batch sizes do not divide.
        """
        flag = precision_flag(trainer)
        if self.precision is not None and flag not in ("32-true", self.precision):
            raise _contradiction("precision", flag, self.precision)
        accumulate = self.accumulate_grad_batches
        if accumulate is None and self.micro_batch_size and self.global_batch_size:
            accumulate, left = divmod(self.global_batch_size, self.micro_batch_size * replicas)
            if left or not accumulate:
                raise ValueError(
                    f"train_batch_size={self.global_batch_size} is not a multiple of"
                    f" train_micro_batch_size_per_gpu={self.micro_batch_size} times {replicas} ranks. Change one."
                )
        if accumulate is not None:
            if trainer.accumulate_grad_batches not in (1, accumulate):
                raise _contradiction("accumulate_grad_batches", trainer.accumulate_grad_batches, accumulate)
            trainer.accumulate_grad_batches = accumulate
        if self.gradient_clip_val is not None:
            told = trainer.gradient_clip_val
            algorithm = str(trainer.gradient_clip_algorithm or "norm").rpartition(".")[2].lower()
            if told not in (None, self.gradient_clip_val) or algorithm != "norm":
                raise _contradiction("gradient_clip_val", f"{told} by {algorithm}", self.gradient_clip_val)
            trainer.gradient_clip_val = self.gradient_clip_val
        if self.micro_batch_size or self.global_batch_size:
            callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
            if not any(isinstance(callback, ExpectedBatchSize) for callback in callbacks):
                callbacks.append(ExpectedBatchSize(self.micro_batch_size, self.global_batch_size))


class _Reader:
    """Reads one section of a file and tracks which keys were used."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()
        self._sections: list[_Reader] = []

    def value(self, name: str) -> Any:
        """Return a setting and mark it as used; None if it is missing or ``"auto"``."""
        self._read.add(name)
        value = self._values.get(name)
        return None if value == "auto" else value

    def peek(self, name: str) -> Any:
        """Return a setting without marking it as used."""
        return self._values.get(name)

    def section(self, name: str) -> _Reader:
        value = self.value(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise ValueError(f"{self._prefix}{name}={value!r} is not an object. Write {{...}}.")
        self._sections.append(_Reader(value, f"{self._prefix}{name}."))
        return self._sections[-1]

    def number(self, name: str, *, least: float = 0) -> float | None:
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
            raise ValueError(f"{self._prefix}{name}={value!r} is not a number of {least} or more.")
        return float(value)

    def integer(self, name: str, *, least: int) -> int | None:
        value = self.number(name, least=least)
        # In JSON, large integers are often written as 5e8, which is parsed as a float.
        if value is not None and value != int(value):
            raise ValueError(f"{self._prefix}{name}={value} is not a whole number.")
        return None if value is None else int(value)

    def switch(self, name: str) -> bool | None:
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{self._prefix}{name}={value!r} is neither true nor false.")
        return value

    def rest(self) -> list[str]:
        """Return the names of settings that are present but were not used."""
        own = [
            f"{self._prefix}{name}"
            for name, value in self._values.items()
            if name not in self._read and value != "auto" and (name not in _ALWAYS or value != _ALWAYS[name])
        ]
        return own + [name for section in self._sections for name in section.rest()]


def _few_bits(zero: _Reader, *, scaled: bool) -> dict[str, Any]:
    """Return quantized communication settings (ZeRO++); error feedback is off where a loss scale may change."""
    found: dict[str, Any] = {}
    if zero.switch("zero_quantized_weights"):
        found["gather"] = "int8"
    if zero.switch("zero_quantized_gradients"):
        found |= {"reduce": "int8", "error_feedback": not scaled}
    return found


def _loaded(config: str | os.PathLike[str] | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    try:
        values = json.loads(Path(config).read_text())
    except OSError as error:
        raise ValueError(f"The DeepSpeed config {str(config)!r} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ValueError(f"The DeepSpeed config {str(config)!r} is not JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"The DeepSpeed config {str(config)!r} holds {type(values).__name__}, not an object.")
    return values


def _precision(
    reader: _Reader, stage: int
) -> tuple[Literal["16-mixed", "bf16-mixed", "bf16-true"] | None, dict[str, Any]]:
    fp16, bf16 = reader.section("fp16"), reader.section("bf16")
    use_fp16, use_bf16 = fp16.switch("enabled"), bf16.switch("enabled")
    if use_fp16 and use_bf16:
        raise ValueError("fp16.enabled and bf16.enabled are both true. Enable one of them.")
    static, power = fp16.number("loss_scale"), fp16.number("initial_scale_power")
    window = fp16.integer("loss_scale_window", least=1)
    if use_bf16:
        # DeepSpeed keeps bf16 weights with fp32 master weights, as the sharded stages do here.
        return ("bf16-true" if stage else "bf16-mixed"), {}
    if not use_fp16:
        return None, {}
    if static:
        return "16-mixed", {"init_scale": static, "backoff_factor": 1.0 - 2**-20, "growth_interval": 2**31 - 1}
    scaler: dict[str, Any] = {"init_scale": 2.0 ** (16 if power is None else power)}
    if window is not None:
        scaler["growth_interval"] = window
    return "16-mixed", scaler


def _strategy(zero: _Reader, stage: int, *, half: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if stage in (1, 2):
        found["zero_stage"] = stage
    if stage < 3:
        # DeepSpeed's bucket size is in elements, not bytes.
        elements = zero.number("reduce_bucket_size", least=1)
        if elements is not None:
            found["bucket_size_mb"] = elements * (2 if half else 4) / _MIB
        overlap = zero.switch("overlap_comm")
        if overlap is not None:
            found["overlap"] = overlap
    if stage == 0:
        return found
    optimizer, params = zero.section("offload_optimizer"), zero.section("offload_param")
    device = optimizer.value("device") or "none"
    path = optimizer.value("nvme_path")
    if device not in ("none", "cpu", "nvme"):
        raise ValueError(f"zero_optimization.offload_optimizer.device={device!r} is unknown. Use none, cpu or nvme.")
    if device == "nvme" and path is None:
        raise ValueError("zero_optimization.offload_optimizer.device='nvme' needs nvme_path, a folder on a local disk.")
    if stage == 3 and params.peek("device") in ("none", "cpu") and params.value("device") == "cpu" and device == "none":
        device = "cpu"
    if device != "none":
        found["offload"] = "cpu" if device == "cpu" else str(path)
    return found


def _contradiction(name: str, told: Any, config: Any) -> ValueError:
    return ValueError(
        f"Trainer({name}={told}) contradicts the DeepSpeed config, which says {config}. Leave it out of one of them."
    )
