"""Counts of ranks that each compute on a part of one batch: equal on all of them, whatever terms a rank sees."""

from __future__ import annotations

import itertools
import zlib

import torch

from lightning_pardist.engines.common.loss_balance import agreed_terms
from lightning_pardist.engines.common.loss_term import Term
from lightning_pardist.engines.common.loss_terms import find_terms

HOST = torch.device("cpu")


def _terms(*counts: float, what: str = "Sum divided by a count") -> list[Term]:
    (term,) = find_terms(torch.ones(3, requires_grad=True).mean())
    return [Term("mean", term.node, count, what=f"{what} {index}") for index, count in enumerate(counts)]


def _agreed(*ranks: list[Term]) -> list[list[float]]:
    sent: list[torch.Tensor] = []
    for terms in ranks:
        agreed_terms(terms, lambda numbers: sent.append(numbers) or numbers, HOST)
    most = torch.stack(sent).amax(0)
    return [[float(term.count) for term in agreed_terms(terms, lambda _: most, HOST)] for terms in ranks]


def test_a_rank_without_an_item_takes_the_count_of_the_others():
    assert _agreed(_terms(7.0, 1.0), _terms(1.0, 3.0)) == [[7.0, 3.0], [7.0, 3.0]]


def test_ranks_with_different_numbers_of_terms_match_them_by_name():
    first, second = _terms(7.0, 1.0), [*_terms(1.0, 3.0), *_terms(5.0, what="more")]
    assert _agreed(first, second) == [[7.0, 3.0], [7.0, 3.0, 5.0]]
    assert _agreed([], second) == [[], [1.0, 3.0, 5.0]]


def test_names_in_one_slot_stay_apart():
    names = (f"name {number}" for number in itertools.count())
    slot = zlib.crc32(b"name 0 0 0 of 1") % 31
    alike = (name for name in names if zlib.crc32(f"{name} 0 0 of 1".encode()) % 31 == slot)
    one, other = itertools.islice(alike, 2)
    assert _agreed(_terms(5.0, what=one), [*_terms(90.0, what=other), *_terms(3.0, what="more")])[0] == [5.0]


def test_many_terms():
    counts = [float(place) for place in range(1, 141)]
    found = _agreed(_terms(*counts), _terms(*([1.0] * 140)))
    assert found[0] == counts
    assert found[1] == [*counts[:128], *([1.0] * 12)]


def test_without_ranks_that_share_a_batch_terms_stay():
    terms = _terms(2.0)
    assert agreed_terms(terms, None, HOST) is terms
