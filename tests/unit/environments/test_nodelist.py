"""SLURM's node lists and counts, in its commands' formats."""

import pytest

from lightning_pardist.runtime.environments.nodelist import expand_counts, expand_nodes


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("gpu01", ["gpu01"]),
        ("n[1-3,7],gpu01", ["n1", "n2", "n3", "n7", "gpu01"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[001,3]", ["n001", "n3"]),
        ("host7,host2,host5", ["host7", "host2", "host5"]),
        ("host0 host1 host3", ["host0", "host1", "host3"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
        ("rack[1-2]-node5.cluster", ["rack1-node5.cluster", "rack2-node5.cluster"]),
        ("a[1,3-4],b,c[2]", ["a1", "a3", "a4", "b", "c2"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("", []),
    ],
)
def test_nodes(text, nodes):
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize("text", ["n[1-3", "n1]", "n[a-b]", "n[1-]"])
def test_broken_node_lists(text):
    with pytest.raises(ValueError, match="node list"):
        expand_nodes(text)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("3(x2),1", [3, 3, 1]), ("2,1(x3)", [2, 1, 1, 1]), ("16(x2)", [16, 16])],
)
def test_counts(text, counts):
    assert expand_counts(text) == counts


def test_broken_counts():
    with pytest.raises(ValueError, match="3\\(x2\\),1"):
        expand_counts("3(x")
