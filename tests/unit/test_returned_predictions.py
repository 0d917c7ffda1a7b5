"""Predictions of forked or spawned ranks, returned to the launching process."""

from lightning_pardist.runtime.returned_predictions import ReturnedPredictions


def test_batches_of_ranks_in_turns():
    returned = ReturnedPredictions()
    returned.send([1, 3], batch_rank=1, several_loaders=False)
    returned.send([0, 2, 4], batch_rank=0, several_loaders=False)
    returned.send([9, 9, 9], batch_rank=0, several_loaders=False)
    assert returned.receive() == [0, 1, 2, 3, 4]
    returned.close()


def test_by_loader_and_batch():
    returned = ReturnedPredictions()
    returned.send([[0, 2], ["a"]], batch_rank=0, several_loaders=True)
    returned.send([[1], ["b"]], batch_rank=1, several_loaders=True)
    assert returned.receive() == [[0, 1, 2], ["a", "b"]]
    returned.close()


def test_no_samples():
    returned = ReturnedPredictions()
    returned.send(None, batch_rank=0, several_loaders=False)
    assert returned.receive() is None
    returned.close()
