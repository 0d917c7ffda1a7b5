"""The pipeline's losses, gradients and weights against one process's: every schedule, every model of the zoo."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.pipeline_parity import Case, assert_parity_of_all
from tests.helpers.pipeline_zoo import ZOO
from tests.helpers.ranks import run_ranks

SCHEDULES = (
    Case("", "mp", num_microbatches=1),
    Case("", "gpipe", num_microbatches=4, optimizer="adam"),
    Case("", "1f1b", num_microbatches=4),
    Case("", "interleaved", num_microbatches=4, chunks_per_rank=2),
    Case("", "interleaved_zb", num_microbatches=4, optimizer="adam"),
    Case("", "zbv", num_microbatches=4, chunks_per_rank=2),
)


#: The most distinctive models: a chain, skips, data-dependent calls, layers that run twice.
_QUICK = ("gpt", "unet", "experts", "checkpointed")


@pytest.mark.push("gpt", "experts")
@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in sorted(ZOO)],
)
def test_every_schedule_at_two_ranks(model: str) -> None:
    for results in run_ranks(2, assert_parity_of_all, [replace(case, model=model) for case in SCHEDULES]):
        assert all(result["freed"] > 0 for result in results)


@pytest.mark.slow
def test_every_schedule_at_four_ranks() -> None:
    cases = [replace(case, model="gpt") for case in SCHEDULES if case.chunks_per_rank == 1]
    cases.append(Case("classifier", "interleaved", num_microbatches=4, chunks_per_rank=2))
    run_ranks(4, assert_parity_of_all, cases)


def test_odd_batches_and_accumulation() -> None:
    cases = [
        Case("gpt", "1f1b", num_microbatches=4, batch_size=7, last_batch_size=3),
        Case("tagger", "gpipe", num_microbatches=3, batch_size=8, last_batch_size=1),
        Case("experts", "interleaved", num_microbatches=4, chunks_per_rank=2, batch_size=5),
        Case("resnet", "interleaved_zb", num_microbatches=4, batch_size=9, last_batch_size=4),
        Case("gpt", "1f1b", num_microbatches=2, accumulate=2, optimizer="adam"),
        Case("classifier", "zbv", num_microbatches=4, chunks_per_rank=2, accumulate=2, last_batch_size=2),
    ]
    results = run_ranks(2, assert_parity_of_all, cases)[0]
    assert results[0]["counts"] == [4, 4, 3]
    assert results[1]["counts"] == [3, 3, 1]
