"""Tables in logs: folding of rows and wrapping of lines."""

import pytest

from lightning_pardist.engines.common.tables import fold, ranges, starred, table


def _names(*names, like=lambda name: None):
    return [(text, len(items)) for text, items in fold(names, str, like)]


def test_repeated_blocks_share_a_line():
    names = [f"h.{block}.{name}" for block in range(24) for name in ("ln.weight", "mlp.weight")]
    assert _names("wte.weight", *names, "norm.weight") == [
        ("wte.weight", 1),
        ("h.0-23.ln.weight", 24),
        ("h.0-23.mlp.weight", 24),
        ("norm.weight", 1),
    ]


def test_blocks_that_differ_are_lines_of_their_own():
    names = [f"h.{block}.weight" for block in range(6)]
    assert _names(*names, like=lambda name: name == "h.2.weight") == [("h.0-1,3-5.weight", 5), ("h.2.weight", 1)]


def test_two_indices():
    experts = [f"layers.{layer}.experts.{expert}.w" for layer in range(3) for expert in range(4)]
    assert _names(*experts) == [("layers.0-2.experts.0-3.w", 12)]
    assert _names(*experts, "layers.3.experts.0.w") == [
        ("layers.0.experts.0-3.w", 4),
        ("layers.1.experts.0-3.w", 4),
        ("layers.2.experts.0-3.w", 4),
        ("layers.3.experts.0.w", 1),
    ]


def test_names_that_are_numbers():
    assert _names("0", "1", "3.weight", "3.bias") == [("0-1", 2), ("3.weight", 1), ("3.bias", 1)]


@pytest.mark.parametrize(("numbers", "wanted"), [([0, 1, 2], "0-2"), ([4], "4"), ([0, 2, 3, 9], "0,2-3,9")])
def test_ranges(numbers, wanted):
    assert ranges(numbers) == wanted


def test_numbers_that_are_no_index_stay():
    assert starred("sum of h.3.mlp") == "sum of h.*.mlp"
    assert starred("2 does not divide 7") == "2 does not divide 7"


def test_long_cells_wrap_between_words():
    shown = table(
        ("stage", "modules"), [("0", ", ".join(f"encoder{n}.block" for n in range(9))), ("1", "x")], wrap=("modules",)
    )
    lines = shown.splitlines()
    assert lines[0].split() == ["stage", "modules"]
    assert set(lines[1].strip()) == {"-"}
    assert all(len(line) < 80 for line in lines)
    assert sum("encoder" in line for line in lines) == 3
    assert lines[-1].split() == ["1", "x"]
    assert lines[3].startswith("         encoder")
