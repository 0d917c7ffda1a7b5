"""One model of transformers under each kind of parallelism, saved half way; `make test-all` covers many more."""

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import TensorDataset

from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, quiet_trainer

pytest.importorskip("transformers")

STEPS = 3
STRATEGIES = ("pardist_tp", "pardist_pp", "pardist_zero3")


class Decoder(pl.LightningModule):
    """Llama with grouped-query attention; the loss is computed inside the model."""

    def __init__(self):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 50, "num_hidden_layers": 4}
        self.model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        return self.model(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


def _train(strategy, devices, path=None):
    torch.manual_seed(4)
    module = Decoder()
    draw = torch.Generator().manual_seed(6)
    tokens = TensorDataset(torch.randint(50, (BATCH * STEPS, 10), generator=draw))
    saves = [] if path is None else [pl.callbacks.ModelCheckpoint(dirpath=path, every_n_train_steps=2, filename="half")]
    trainer = quiet_trainer(
        strategy=strategy,
        devices=devices,
        use_distributed_sampler=False,
        gradient_clip_val=0.5,
        callbacks=saves,
        enable_checkpointing=bool(saves),
    )
    trainer.fit(module, datamodule=Data(tokens))
    return snapshot(module)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_same_numbers_as_one_process(strategy, tmp_path):
    want = _train("auto", 1, str(tmp_path / "one"))
    for got in run_ranks(2, _train, strategy, 2, str(tmp_path / "many")):
        assert_close(got, want)
    halves = [torch.load(tmp_path / name / "half.ckpt", weights_only=False) for name in ("one", "many")]
    assert_close(halves[1]["state_dict"], halves[0]["state_dict"])
