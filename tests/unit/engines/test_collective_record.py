"""The first collective in which the records of several ranks differ."""

import gc
import json

from lightning_pardist.engines.common.collective_record import CollectiveRecord, first_difference, recorded


def _record(codes, ranks=(5, 6)):
    record = CollectiveRecord(ranks, "gathers {}".format)
    for code in codes:
        record.add(code)
    return recorded()


def _own(text):
    """Return the records of these tests' groups: other engines of this process may be recorded as well."""
    return json.dumps([entry for entry in json.loads(text) if entry[0][0] >= 5])


def test_equal_records_do_not_differ():
    same = _own(_record([1, 2, 3]))
    assert first_difference({5: same, 6: same}) == ""


def test_the_first_that_differs_is_named_with_its_line():
    left, right = _own(_record([1, 2, 3])), _own(_record([1, 4, 3]))
    text = first_difference({5: left, 6: right})
    assert "Rank 5 gathers 2, for" in text
    assert "Rank 6 gathers 4, for" in text
    assert "in _record\n    record.add(code)" in text


def test_ranks_that_do_the_same_are_listed_together_and_one_that_did_not_get_there_is_named():
    ahead, behind = _own(_record([1, 2], (5, 6, 7))), _own(_record([1], (5, 6, 7)))
    text = first_difference({5: ahead, 6: behind, 7: ahead})
    assert "Rank 5, 7 gathers 2" in text
    assert "Rank 6 has issued no other." in text


def test_the_same_from_another_line_does_not_differ():
    left, right = _own(_record([1])), _own(_record([1]).replace("_record", "_other"))
    assert first_difference({5: left, 6: right}) == ""


def test_a_rank_that_has_issued_none_is_named():
    text = first_difference({5: _own(_record([1])), 6: _own(_record([]))})
    assert "Rank 5 gathers 1" in text
    assert "Rank 6 has issued no other." in text


def test_collectives_that_a_rank_has_forgotten_are_not_compared():
    left, right = _own(_record(range(1, 700))), _own(_record(range(1, 701)))
    text = first_difference({5: left, 6: right})
    assert "Rank 5 has issued no other." in text
    assert "Rank 6 gathers 700" in text


def test_groups_are_compared_among_their_own_ranks():
    left, right = _own(_record([1], (5, 6))), _own(_record([2], (7, 8)))
    assert first_difference({5: left, 6: left, 7: right, 8: right}) == ""


def test_records_are_forgotten_with_their_engines():
    _record([1], (9, 10))
    gc.collect()
    assert all(ranks != [9, 10] for ranks, _ in json.loads(recorded()))
