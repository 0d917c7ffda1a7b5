"""Islands as separate jobs that synchronise at an outer server, against one process that trains them in turn."""

import threading

import pytest
import torch
from lightning.pytorch.tuner import Tuner

from lightning_pardist import LocalSGDStrategy
from lightning_pardist.engines.averaging import OuterServer
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import RankPool
from tests.helpers.runs import Data, quiet_trainer
from tests.integration import test_local_sgd as islands

DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9}


@pytest.fixture
def server():
    found = OuterServer("127.0.0.1", 0, timeout_s=20.0)
    threading.Thread(target=found.serve, daemon=True).start()
    yield found
    found.close()


@pytest.fixture
def jobs():
    """Return a function that runs separate jobs concurrently: ``run(ranks, function, [arguments of each])``."""
    pools = []

    def run(ranks, function, arguments):
        pools.extend(RankPool(ranks) for _ in arguments[len(pools) :])
        results = [None] * len(arguments)

        def call(index):
            results[index] = pools[index].run(function, arguments[index], 100.0)

        threads = [threading.Thread(target=call, args=(index,)) for index in range(len(arguments))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    yield run
    for pool in pools:
        pool.close()


def _strategy(address, number, inside, further):
    settings, _ = islands.INSIDE[inside]
    return LocalSGDStrategy(
        outer_parallel_size=2, outer_server=f"127.0.0.1:{address[1]}", island=number, **settings, **further
    )


def _island(address, number, inside, further, save_to=None, ckpt_path=None, options=None):
    module = islands._build("sgd")
    _, ranks = islands.INSIDE[inside]
    trainer = quiet_trainer(
        strategy=_strategy(address, number, inside, further),
        devices=ranks,
        use_distributed_sampler=False,
        **(options or {}),
    )
    trainer.fit(module, datamodule=Data(islands._dataset()), ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(f"{save_to}/{number}.ckpt")
    return snapshot(module)


@pytest.mark.push("pp-*", "ddp-*")
@pytest.mark.parametrize(
    ("inside", "further"),
    [("ddp", {}), ("zero3", DILOCO), ("pp", {}), pytest.param("tp", DILOCO, marks=pytest.mark.slow)],
)
def test_as_islands_one_after_the_other(server, jobs, inside, further):
    outer = (further["outer_lr"], further["outer_momentum"]) if further else None
    _, ranks = islands.INSIDE[inside]
    found = jobs(
        ranks, _island, [(server.address, number, inside, {"sync_every": 3, **further}) for number in range(2)]
    )
    wanted = islands._simulate(2, "sgd", 3, outer)
    for of_island in found:
        for of_rank in of_island:
            assert_close(of_rank, wanted, rtol=1e-6)


def test_a_resumed_run_goes_on_with_the_momentum(server, jobs, tmp_path):
    further = {"sync_every": 2, **DILOCO}
    whole = jobs(1, _island, [(server.address, number, "ddp", further) for number in range(2)])
    # Four steps end at a synchronisation; the resumed run uses another server, without its state.
    options = {"max_steps": 4}
    jobs(1, _island, [(server.address, number, "ddp", further, str(tmp_path), None, options) for number in range(2)])
    resumed = jobs(
        1,
        _island,
        [(server.address, number, "ddp", further, None, str(tmp_path / f"{number}.ckpt")) for number in range(2)],
    )
    for (mine,), (wanted,) in zip(resumed, whole, strict=True):
        assert_close(mine, wanted, rtol=1e-6)


class _Evaluated(islands.Regressor):
    def on_validation_batch_start(self, batch, batch_idx):
        self.seen = getattr(self, "seen", 0) + len(batch[0])


def _evaluate(address, number, inside):
    torch.manual_seed(0)
    module = _Evaluated()
    _, ranks = islands.INSIDE[inside]
    trainer = quiet_trainer(strategy=_strategy(address, number, inside, {"sync_every": 3}), devices=ranks, max_steps=2)
    data = torch.utils.data.DataLoader(islands._dataset(), batch_size=4)
    trainer.fit(module, data, data)
    trainer.validate(module, data, verbose=False)
    return module.seen, trainer.num_training_batches, len(islands._dataset())


@pytest.mark.parametrize("inside", ["ddp", "tp"])
def test_an_island_trains_on_its_share_and_evaluates_on_everything(server, jobs, inside):
    _, ranks = islands.INSIDE[inside]
    for of_island in jobs(ranks, _evaluate, [(server.address, number, inside) for number in range(2)]):
        for seen, batches, samples in of_island:
            assert batches == -(-(samples // 2) // 4)
            # Sanity checking, and validation; the epoch ended before its own.
            assert seen == 8 + samples


def _search(address):
    trainer = quiet_trainer(strategy=_strategy(address, 0, "ddp", {}), devices=1)
    with pytest.raises(ValueError, match="runs trial training, in which other islands would take part"):
        Tuner(trainer).lr_find(islands.Regressor(), Data(islands._dataset()))


def test_searches_that_train_are_refused(server, jobs):
    jobs(1, _search, [(server.address,)])
    assert server.generation == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"outer_server": "here", "island": 0}, "outer_server='here' is no address"),
        ({"outer_server": "here:1", "island": 2}, "island=2 is none of outer_parallel_size=2 islands"),
        ({"outer_server": "here:1"}, "Set island, or PARDIST_ISLAND"),
        ({"outer_server": "here:1", "sync_every": "epoch"}, "Set both to numbers"),
        ({"outer_server": "here:1", "fragments": 2}, "fragments of LocalSGDStrategy is only for islands of one job"),
        ({"island": 1}, "Set outer_server, or leave island out"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        LocalSGDStrategy(**{"outer_parallel_size": 2, **settings})
