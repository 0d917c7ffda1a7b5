"""Sparse buffers, such as the adjacency matrix of a recommender, under strategies whose ranks have other samples."""

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_pardist
from tests.helpers.parity import assert_close
from tests.helpers.ranks import run_ranks

USERS, ITEMS = 12, 20


class LightGCN(pl.LightningModule):
    """Averages embeddings over the graph of users and items (arXiv 2002.02126), with a pairwise loss."""

    def __init__(self, layout, changes="never", factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(USERS + ITEMS, 8)
        linked = (torch.rand(USERS, ITEMS) > 0.6).float()
        links = torch.zeros(USERS + ITEMS, USERS + ITEMS)
        links[:USERS, USERS:], links[USERS:, :USERS] = linked, linked.T
        links *= factor / links.sum(1).clamp(min=1)
        self.register_buffer("adjacency", links.to_sparse(layout=layout))
        self.changes, self.losses = changes, []

    def forward(self):
        once = torch.sparse.mm(self.adjacency, self.embed.weight)
        return (self.embed.weight + once + torch.sparse.mm(self.adjacency, once)) / 3

    def training_step(self, batch, batch_idx):
        found, (user, liked, other) = self(), batch
        loss = -F.logsigmoid((found[user] * (found[USERS + liked] - found[USERS + other])).sum(1)).mean()
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, *args):
        if self.changes == "in place":
            self.adjacency.mul_(0.9)
        elif self.changes == "replaced":
            self.adjacency = self.adjacency * 0.9

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


def _rank():
    return dist.get_rank() if dist.is_initialized() else 0


def _fit(strategy, devices, module, *, epochs=2, ckpt_path=None, saved=None):
    made = torch.Generator().manual_seed(1)
    columns = (torch.randint(count, (64,), generator=made) for count in (USERS, ITEMS, ITEMS))
    data = TensorDataset(*columns)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, precision="64-true", max_epochs=epochs, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    sampler = DistributedSampler(data, devices, _rank(), shuffle=False)
    trainer.fit(module, DataLoader(data, batch_size=16 // devices, sampler=sampler), ckpt_path=ckpt_path)
    if saved is not None:
        trainer.save_checkpoint(saved)
    return {"loss": trainer.callback_metrics["loss"], "weight": module.embed.weight.detach().clone()}


def _ranks(strategy, layout):
    return _fit(strategy, 2, LightGCN(layout))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
@pytest.mark.parametrize("strategy", ["pardist_ddp", "pardist_zero2", "pardist_zero3"])
@pytest.mark.push("pardist_ddp-csr", "pardist_zero3-coo")
def test_a_sparse_buffer_is_a_constant(strategy, layout):
    expected = _fit("auto", 1, LightGCN(layout))
    for found in run_ranks(2, _ranks, strategy, layout):
        assert_close(found, expected, rtol=1e-9)


def test_one_device_holds_sparse_buffers():
    expected = _fit("auto", 1, LightGCN(torch.sparse_coo))
    assert_close(_fit("pardist_zero3", 1, LightGCN(torch.sparse_coo)), expected, rtol=1e-9)


def _resumed(folder):
    found = []
    for form in ("full", "sharded"):
        path = f"{folder}/{form}.ckpt"
        settings = {"checkpoint": form, "async_save": form == "full"}
        _fit(lightning_pardist.DDPStrategy(**settings), 2, LightGCN(torch.sparse_coo), epochs=1, saved=path)
        strategy = lightning_pardist.DDPStrategy(**settings)
        found.append(_fit(strategy, 2, LightGCN(torch.sparse_coo), ckpt_path=path))
    return found


def test_checkpoints_of_both_forms_hold_sparse_buffers(tmp_path):
    # Lightning restores a module before it converts it to float64.
    alone = str(tmp_path / "alone.ckpt")
    _fit("auto", 1, LightGCN(torch.sparse_coo), epochs=1, saved=alone)
    expected = _fit("auto", 1, LightGCN(torch.sparse_coo), ckpt_path=alone)
    for found in run_ranks(2, _resumed, str(tmp_path)):
        for each in found:
            assert_close(each, expected, rtol=1e-9)
    full = torch.load(tmp_path / "full.ckpt", weights_only=True)
    assert full["state_dict"]["adjacency"].layout is torch.sparse_coo


def _refused():
    rank, found = dist.get_rank(), []
    cases = [
        ("pardist_ddp", {"factor": 1.0 + rank}),
        ("pardist_ddp", {"changes": "in place"}),
        ("pardist_zero3", {"changes": "replaced"}),
        ("pardist_pp", {}),
    ]
    for strategy, settings in cases:
        with pytest.raises((RuntimeError, ValueError)) as error:
            _fit(strategy, 2, LightGCN(torch.sparse_coo, **settings))
        found.append(str(error.value))
    return found


def test_sparse_buffers_that_cannot_be_equal_are_refused():
    for differs, in_place, replaced, split in run_ranks(2, _refused):
        assert differs.startswith("The module differs between ranks: at tensor 1 rank 0 has 'adjacency (32, 32)")
        for changed in (in_place, replaced):
            assert changed.startswith("The sparse buffer 'adjacency' has changed in training")
        assert split.startswith("The buffer 'adjacency' is sparse (torch.sparse_coo), and PipelineStrategy needs dense")
