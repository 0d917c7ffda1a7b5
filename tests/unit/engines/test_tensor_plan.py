from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from lightning_pardist.engines.tensor import FallbackPlan, Layout, TensorParallelPlan, plan_layout
from tests.helpers.oddities import ODDITIES
from tests.helpers.zoo import ZOO, Llama, NanoGPT, build


def make(name, tp_size=2, **options):
    model = build(name)
    batch = model.batch(0)
    return plan_layout(model, lambda: model.loss(batch), tp_size=tp_size, **options)


COLUMN, ROW, FUSED = Layout(0), Layout(1), Layout(0, 3)

EXPECTED = {
    "gpt": {
        "transformer.wte.weight": COLUMN,
        "transformer.wpe.weight": None,
        "transformer.h.1.ln_1.weight": None,
        "transformer.h.1.attn.c_attn.weight": FUSED,
        "transformer.h.1.attn.c_attn.bias": FUSED,
        "transformer.h.1.attn.c_proj.weight": ROW,
        "transformer.h.1.attn.c_proj.bias": None,
        "transformer.h.1.mlp.c_fc.weight": COLUMN,
        "transformer.h.1.mlp.c_fc.bias": COLUMN,
        "transformer.h.1.mlp.c_proj.weight": ROW,
    },
    "llama": {
        "embed.weight": COLUMN,
        "layers.0.q_proj.weight": COLUMN,
        "layers.0.k_proj.weight": COLUMN,
        "layers.0.v_proj.weight": COLUMN,
        "layers.0.o_proj.weight": ROW,
        "layers.0.q_norm.weight": None,
        "layers.0.gate_proj.weight": COLUMN,
        "layers.0.up_proj.weight": COLUMN,
        "layers.0.down_proj.weight": ROW,
        "head.weight": COLUMN,
    },
    "llama_one_kv_head": {
        "layers.0.q_proj.weight": COLUMN,
        "layers.0.k_proj.weight": None,
        "layers.0.v_proj.weight": None,
        "layers.0.o_proj.weight": ROW,
    },
    "bert": {
        "layers.1.query.weight": COLUMN,
        "layers.1.key.bias": COLUMN,
        "layers.1.dense.weight": ROW,
        "layers.1.inter.weight": COLUMN,
        "layers.1.output.weight": ROW,
        "layers.1.norm1.weight": None,
        "decoder.weight": COLUMN,
    },
    "vit": {
        "patch.weight": None,
        "pos": None,
        "blocks.0.qkv.weight": FUSED,
        "blocks.0.proj.weight": ROW,
        "blocks.0.mlp.0.weight": COLUMN,
        "blocks.0.mlp.2.weight": ROW,
        "gamma.0": None,
    },
    "transformer": {
        "model.encoder.layers.0.self_attn.in_proj_weight": FUSED,
        "model.encoder.layers.0.self_attn.in_proj_bias": FUSED,
        "model.encoder.layers.0.self_attn.out_proj.weight": ROW,
        "model.encoder.layers.0.linear1.weight": COLUMN,
        "model.encoder.layers.0.linear2.weight": ROW,
        "model.decoder.layers.1.multihead_attn.in_proj_weight": FUSED,
    },
    "tagger": {"lstm.weight_ih_l0": None, "out.weight": None},
    "mixer": {"layers.0.1.0.weight": COLUMN, "layers.0.1.2.weight": ROW, "layers.0.3.0.weight": COLUMN},
    "resnet": {
        "stem.0.weight": COLUMN,
        "stem.1.weight": COLUMN,
        "stem.1.running_mean": COLUMN,
        "blocks.0.conv1.weight": ROW,
        "blocks.0.bn1.running_mean": None,
        "fc.weight": ROW,
    },
    "moe": {"router.weight": None, "experts.3.0.weight": COLUMN, "experts.3.2.weight": ROW},
    "moe_stacked": {"up": Layout(1, 2), "down": Layout(2), "router.weight": None},
    "mlp": {"body.0.weight": COLUMN, "body.2.weight": ROW, "body.4.weight": None, "scale": None, "unused.weight": None},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_zoo(name):
    found = make(name)
    layouts = {item.name: item.layout for item in (*found.parameters, *found.buffers)}
    assert {key: layouts[key] for key in EXPECTED[name]} == EXPECTED[name]
    assert not found.fallbacks


def test_ties_are_one_parameter():
    found = make("gpt")
    (head,) = [item for item in found.parameters if "lm_head.weight" in (item.name, *item.aliases)]
    assert {head.name, *head.aliases} == {"transformer.wte.weight", "lm_head.weight"}


@pytest.mark.parametrize("tp_size", [2, 4])
def test_a_rank_holds_its_share(tp_size):
    found = make("gpt", tp_size)
    assert found.bytes_per_rank / found.total_bytes <= 1 / tp_size + 0.02


def test_megatrons_count():
    for layers in (1, 3):
        model = NanoGPT(layers=layers)
        batch = model.batch(0)
        found = plan_layout(model, lambda model=model, batch=batch: model.loss(batch), tp_size=2)
        # Two per block and direction; plus embedding, loss, and the head's input.
        assert found.collective_count("forward") == 2 * layers + 2
        assert found.collective_count("backward") == 2 * layers + 1
        assert {item.kind for item in found.collectives if item.why != "cross_entropy in the step"} == {"all_reduce"}


@pytest.mark.parametrize("name", [*ZOO, "Teacher", "MoCo"])
def test_planning_leaves_no_trace(name):
    model = build(name) if name in ZOO else ODDITIES[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    batch = model.batch(0)
    state = torch.get_rng_state()

    def step():
        loss = model.loss(batch)
        loss.backward()

    first = plan_layout(model, step, tp_size=2)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert plan_layout(model, step, tp_size=2) == first


def test_one_rank_splits_nothing():
    found = make("gpt", 1)
    assert not found.layouts()
    assert found.bytes_per_rank == found.total_bytes


def test_what_does_not_divide_is_whole_with_the_reason():
    model = Llama(heads=3, kv_heads=3, dim=24, hidden=30)
    batch = model.batch(0)
    found = plan_layout(model, lambda: model.loss(batch), tp_size=4)
    items = {item.name: item for item in found.parameters}
    assert items["layers.0.q_proj.weight"].layout is None
    assert "layers.0" in items["layers.0.q_proj.weight"].why
    assert items["layers.0.gate_proj.weight"].why == "4 does not divide 30"


def test_prints_as_tables():
    text = str(make("gpt"))
    assert "transformer.h.0-1.attn.c_attn.weight" in text
    assert "dim 0 in 3 segments" in text
    assert "sum of transformer.h.*.mlp.c_proj" in text
    assert "(= " in text


def test_the_headline_names_operators_on_whole_tensors():
    backs = tuple(FallbackPlan(operator, "rnn", 1, 8, "no rule") for operator in ("lstm", "cumsum", "lstm"))
    plan = TensorParallelPlan(2, (), fallbacks=backs)
    assert plan.headline().endswith(" 0 collectives forward and 0 backward; on whole tensors: cumsum, lstm")


def test_is_frozen_and_plain_data():
    found = make("gpt")
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.tp_size = 3
    import pickle

    assert pickle.loads(pickle.dumps(found)) == found


def test_overrides_win():
    overrides = {
        "transformer.h.*.mlp.c_fc": "replicate",
        "transformer.h.0.attn.c_attn.weight": "replicate",
        "transformer.h.1.mlp.c_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(),
    }
    found = make("gpt", overrides=overrides)
    layouts = {item.name: item for item in found.parameters}
    assert layouts["transformer.h.0.mlp.c_fc.weight"].layout is None
    assert layouts["transformer.h.0.mlp.c_fc.weight"].why == "by hand: transformer.h.*.mlp.c_fc"
    assert layouts["transformer.h.0.attn.c_attn.weight"].layout is None
    assert layouts["transformer.h.1.mlp.c_proj.weight"].layout == ROW
    assert layouts["transformer.wte.weight"].layout == COLUMN
    assert layouts["transformer.h.1.attn.c_attn.weight"].layout == FUSED


def test_a_fused_projection_by_hand_is_laid_out_by_heads():
    found = make("gpt", overrides={"transformer.h.*.attn.c_attn": "column", "transformer.h.*.attn.c_proj": "row"})
    layouts = found.layouts()
    assert layouts["transformer.h.0.attn.c_attn.weight"] == FUSED
    assert layouts["transformer.h.0.attn.c_attn.bias"] == FUSED
    assert not found.fallbacks


def test_bad_overrides_are_refused():
    with pytest.raises(ValueError, match=r"plan\['blocks\.\*\.fc'\] matches no parameter and no module"):
        make("gpt", overrides={"blocks.*.fc": "column"})
    with pytest.raises(
        ValueError, match=r"'diagonal' is not a way to split\. Use one of column, row, vocab, replicate"
    ):
        make("gpt", overrides={"lm_head": "diagonal"})
    with pytest.raises(
        ValueError, match=r"body\.4\.weight .*tensor_parallel_size=2 does not divide 9. Use one of 1, 3, 9"
    ):
        make("mlp", overrides={"body.4": "column"})
    with pytest.raises(ValueError, match="on_indivisible='shrug' is unknown"):
        make("mlp", on_indivisible="shrug")
    with pytest.raises(ValueError, match="tp_size=0 is not a positive number"):
        make("mlp", tp_size=0)
    found = make("mlp", overrides={"body.4": "column"}, on_indivisible="replicate")
    assert "body.4.weight" not in found.layouts()


def test_transforms_of_torch_func_are_refused():
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    with pytest.raises(RuntimeError, match=r"inside of a transform of torch\.func"):
        plan_layout(layer, lambda: torch.func.vmap(torch.func.jacrev(layer))(x).sum(), tp_size=2)
