"""The ZeRO paper's memory table from the real engines, at test size."""

import pytest

from benchmarks.zero_table import PAPER, TINY, WORLDS, bytes_per_parameter, measure, table


def test_the_formula_is_the_papers():
    for stage, row in PAPER.items():
        for world_size in WORLDS:
            assert bytes_per_parameter(stage, world_size, mixed=True) * 7.5 == pytest.approx(
                row[world_size], rel=0.01, abs=0.005
            )


@pytest.mark.push("*-mixed")
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_held_bytes_are_the_formulas(stage, mixed):
    sizes = TINY | {"dim": 256, "vocab_size": 1024}
    cells = [measure(stage, world_size, mixed=mixed, sizes=sizes) for world_size in (4, 64)]
    for cell in cells:
        assert cell.held == pytest.approx(cell.expected, rel=0.02)
        assert cell.peak >= cell.held
    assert f"| ZeRO-{stage} | {'mixed' if mixed else 'fp32'} | 64 |" in table(cells)
