"""Published runs compared with plans made from data sheets; no factor is fitted to any row.

Each case is the model of the run with its batch and degrees of parallelism, under the strategy of this package that is
nearest to the published one. Each row lists what differs.
"""

from __future__ import annotations

import lightning_pardist  # before lightning

# isort: split
import argparse
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads import GPTLoss
from lightning_pardist.planner import DeviceProfile, find_profile
from lightning_pardist.planner.candidates import Candidate
from lightning_pardist.planner.plan_result import Row
from lightning_pardist.planner.search import Job, Search

_TORCHTITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
_MEGATRON = "Megatron-LM, arXiv 2205.05198, table 5"
_NANOGPT = "nanoGPT, README (Efficiency notes), bench.py"


class _Module(pl.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(*batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class _Llama(nn.Module):
    """Llama 3 of transformers, with its loss."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.net = LlamaForCausalLM(LlamaConfig(vocab_size=128256, num_key_value_heads=8, use_cache=False, **sizes))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.net(input_ids=tokens).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class _SlowAttention(nn.Module):
    """Unfused attention that materializes its scores, as in nanoGPT before torch 2."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        parts = self.qkv(x).split(dim, dim=2)
        q, k, v = (part.view(batch, length, self.heads, dim // self.heads).transpose(1, 2) for part in parts)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.shape[-1])
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, dim))


class _WrittenGELU(nn.Module):
    """Tanh-approximated GELU written as single operators, which eager mode does not fuse."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _nano_gpt() -> nn.Module:
    net = GPTLoss(dim=768, layers=12, heads=12, context=1024, vocab_size=50304)
    for block in net.blocks:
        block.attention, block.mlp[1] = _SlowAttention(768, 12), _WrittenGELU()  # type: ignore[index, operator]
    return net


def _megatron(dim: int, layers: int, heads: int) -> Callable[[], nn.Module]:
    return lambda: GPTLoss(dim=dim, layers=layers, heads=heads, context=2048, vocab_size=51200)


@dataclass(frozen=True)
class Case:
    """One published run.

    Attributes:
        make: The model, on ``meta``.
        vocab: Vocabulary size.
        batch: Sequences per rank, or per group of ranks that share them, and tokens per sequence.
        candidate: The strategy.
        device: The device of the run.
        layout: Devices per node, and number of nodes.
        published: Seconds per step, or tokens per second and device.
        unit: Unit of ``published``.
        source: Where it is published.
        differs: What the plan does not model of the run.
        settings: Trainer arguments.
        long: Whether planning takes minutes.
        planned: Two numbers of micro-batches of one sequence each that are planned in place of the run's, of which a
            plan would have too many operators. Once all stages are busy, each further micro-batch adds the same time.
    """

    make: Callable[[], nn.Module]
    vocab: int
    batch: tuple[int, int]
    candidate: Candidate
    device: DeviceProfile
    layout: tuple[int, int]
    published: float
    unit: str
    source: str
    differs: str
    settings: Mapping[str, Any] = field(default_factory=lambda: {"precision": "bf16-mixed"})
    long: bool = False
    planned: tuple[int, int] = (0, 0)


# As published: HBM2e of 2.4 TB/s, 500 W.
_H100_96 = replace(find_profile("h100"), name="H100 96 GB HBM2e", memory_bytes=96e9, bytes_per_s=2.4e12)
_A100 = find_profile("a100")
_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
_405B = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
_BLOCKS = {"activation_checkpointing": "auto"}


def _three_axes(
    schedule: str,
    microbatches: int,
    data_parallel: str,
    chunks: int = 1,
    *,
    stages: int = 8,
    sequence_parallel: bool = False,
) -> Candidate:
    pipeline: dict[str, Any] = {"schedule": schedule, "num_microbatches": microbatches}
    pipeline |= {"chunks_per_rank": chunks} if chunks > 1 else {}
    settings: dict[str, Any] = {
        "pipeline_parallel_size": stages, "tensor_parallel_size": 8, "data_parallel": data_parallel,
    }  # fmt: skip
    if sequence_parallel:
        settings["tensor_settings"] = {"sequence_parallel": True}
    return Candidate("pardist_3d", {**settings, "pipeline_settings": pipeline, **_BLOCKS})


CASES: dict[str, Case] = {
    "gpt2-124m": Case(
        _nano_gpt, 50304, (12, 1024), Candidate("pardist_ddp"), _A100, (1, 1), 0.250, "s", _NANOGPT,
        "eager, before fused attention",
    ),
    "llama3-8b": Case(
        lambda: _Llama(**_8B), 128256, (2, 8192), Candidate("pardist_zero3", _BLOCKS), _H100_96, (8, 1), 5762,
        "tokens/s", _TORCHTITAN, "it keeps some operators' results; here blocks are computed again whole",
    ),
    "megatron-22b-full": Case(
        _megatron(6144, 48, 64), 51200, (4, 2048), Candidate("pardist_tp", {"tensor_parallel_size": 8, **_BLOCKS}),
        _A100, (8, 1), 1.42, "s", _MEGATRON, "all blocks computed again, as here",
    ),
    "megatron-22b": Case(
        _megatron(6144, 48, 64), 51200, (4, 2048),
        Candidate("pardist_tp", {"tensor_parallel_size": 8, "sequence_parallel": True}),
        _A100, (8, 1), 1.10, "s", _MEGATRON, "attention alone computed again; here it is fused, and nothing is",
    ),
    "megatron-175b-full": Case(
        _megatron(12288, 96, 96), 51200, (64, 2048), _three_axes("1f1b", 64, "ddp"), _A100, (8, 8), 18.13, "s",
        _MEGATRON, "three chunks a stage; here one", long=True,
    ),
    "megatron-530b-full": Case(
        _megatron(20480, 105, 128), 51200, (280, 2048), _three_axes("1f1b", 280, "ddp", stages=35), _A100, (8, 35),
        49.05, "s", _MEGATRON, "three chunks a stage; here one", long=True, planned=(36, 40),
    ),
    "megatron-1t-full": Case(
        _megatron(25600, 128, 160), 51200, (512, 2048), _three_axes("1f1b", 512, "ddp", stages=64), _A100, (8, 64),
        94.42, "s", _MEGATRON, "", long=True, planned=(65, 70),
    ),
    "llama3-405b-1f1b": Case(
        lambda: _Llama(**_405B), 128256, (32, 8192),
        _three_axes("1f1b", 8, "zero3", sequence_parallel=True), _H100_96, (8, 64), 100,
        "tokens/s", _TORCHTITAN, "float8, compiled, asynchronous tensor parallelism; here bf16", long=True,
    ),
    "llama3-405b-interleaved": Case(
        lambda: _Llama(**_405B), 128256, (32, 8192),
        _three_axes("interleaved", 8, "zero3", 2, sequence_parallel=True), _H100_96, (8, 64), 128,
        "tokens/s", _TORCHTITAN, "float8, compiled, asynchronous tensor parallelism; here bf16", long=True,
    ),
}  # fmt: skip


def _plan(case: Case) -> Row:
    """Return the plan of a case."""
    with torch.device("meta"):
        module = _Module(case.make())
    tokens = torch.randint(case.vocab, (case.batch[0], case.batch[1] + 1))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    search = Search(module, batch, case.device, Job(*case.layout, case.settings), leave_out=False)
    search.add(case.candidate)
    # A candidate that does not fit is also planned with activation checkpointing, which is another run.
    return next(row for row in search.plan().rows if row.candidate is case.candidate)


def _with_microbatches(case: Case, number: int) -> Case:
    """Return a case with another number of sequences, each of them a micro-batch."""
    settings = dict(case.candidate.settings)
    settings["pipeline_settings"] = {**settings["pipeline_settings"], "num_microbatches": number}
    return replace(case, batch=(number, case.batch[1]), candidate=Candidate(case.candidate.strategy, settings))


def _run_extrapolated(name: str, case: Case) -> str:
    """Plan a case with fewer micro-batches and return its line of the table."""
    begin = time.perf_counter()
    fewer, more = (_plan(_with_microbatches(case, number)) for number in case.planned)
    each = (more.time.step - fewer.time.step) / (case.planned[1] - case.planned[0])
    said = more.time.step + each * (case.batch[0] - case.planned[1])
    took = time.perf_counter() - begin
    memory = f"{more.memory['peak'] / 2**30:.1f} GiB{'' if more.fits else ', does not fit'}"
    differs = case.differs and f"{case.differs}; "
    return (
        f"| {name} | {case.published:g} s | {said:.4g} s | {said / case.published - 1:+.0%} | {memory} | | {differs}"
        f"{fewer.time.step:.4g} and {more.time.step:.4g} s with {case.planned[0]} and {case.planned[1]} micro-batches,"
        f" extrapolated; {case.source} ({took:.0f} s) |"
    )


def run(name: str, case: Case) -> str:
    """Plan a case and return its line of the table."""
    begin = time.perf_counter()
    try:
        row = _plan(case)
    except lightning_pardist.planner.PlanError as error:
        return f"| {name} | {case.published:g} {case.unit} | {error} | | | | |"
    count = case.layout[0] * case.layout[1]
    said = row.time.step if case.unit == "s" else row.tokens_per_s / count
    took = time.perf_counter() - begin
    fits = "" if row.fits else ", does not fit"
    memory = f"{row.memory['peak'] / 2**30:.1f} GiB{fits}"
    return (
        f"| {name} | {case.published:g} {case.unit} | {said:.4g} {case.unit} | {said / case.published - 1:+.0%}"
        f" | {memory} | {row.mfu:.0%} | {case.differs}; {case.source} ({took:.0f} s) |"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan the selected cases; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_published", description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="by default those that take seconds")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    print("| run | published | planned | off by | memory | MFU | what differs; source |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in options.cases or [name for name, case in CASES.items() if not case.long]:
        case = CASES[name]
        print(_run_extrapolated(name, case) if case.planned[1] else run(name, case), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
