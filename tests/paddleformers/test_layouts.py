"""Layouts that PaddleFormers has not, for a Llama in a recipe, are refused before work starts."""

import pytest

pytest.importorskip("paddleformers", reason="needs PaddleFormers: HOST=paddleformers bash scripts/test.sh")

from paddle_te.hosts.paddleformers.layouts import Layout, check_layout
from tests.paddleformers.llama import tiny_config

MAIN_GRADIENTS = dict(amp_master_grad=True)
TP, PP = dict(tensor_model_parallel_size=2), dict(pipeline_model_parallel_size=2)
NONE = dict(transformer_engine_backend="none")
STAGE2, STAGE3 = (dict(MAIN_GRADIENTS, sharding=f"stage{stage}") for stage in (2, 3))


def recipe(folder, rope=None, **settings):
    tiny_config(**({"rope_scaling": rope} if rope else {})).save_pretrained(str(folder))
    return dict(model_name_or_path=str(folder), transformer_engine_backend="paddle") | settings


@pytest.mark.parametrize(
    "ranks, settings, says",
    [
        (2, dict(TP, **PP), "that 4 divides, and this is started with 2"),
        (2, dict(sharding="stage4"), "sharding: 'stage4'"),
        (2, dict(MAIN_GRADIENTS, sep_parallel_size=2), "sep_parallel_size: 2: PaddleFormers' Llama has no attention"),
        (4, dict(PP, **STAGE2), "stage2: PaddleFormers has stage 1 alone in pipelines"),
        (4, dict(TP, **STAGE3), "stage3: PaddleFormers has stages 1 and 2 alone beside tensor"),
        (4, dict(STAGE2, sharding_parallel_size=2), "stage2: PaddleFormers has stage 1 alone beside data"),
        (2, dict(STAGE3, fine_tuning="lora"), "stage3: PaddleFormers cannot save a LoRA adapter"),
        (2, {}, "sharding: stage1: PaddleFormers shards the optimizer with float32 main gradients only"),
        (2, TP, "max_grad_norm: PaddleFormers clips gradients under tensor parallelism"),
        (2, dict(PP, max_grad_norm=0, lora_path="adapter"), "lora_path: PaddleFormers loads no LoRA adapter"),
        (2, dict(STAGE2, **NONE, resume_from_checkpoint="c"), "resume_from_checkpoint: .* in sharding stage 2"),
    ],
)
def test_refused(tmp_path, ranks, settings, says):
    with pytest.raises(ValueError, match=says):
        check_layout(recipe(tmp_path, **settings), ranks)


def test_own_layers_rope_scaling_in_pipelines_is_refused(tmp_path):
    settings = recipe(tmp_path, {"rope_type": "linear", "factor": 2.0}, max_grad_norm=0, **PP)
    check_layout(settings, 2)
    with pytest.raises(ValueError, match="read neither the rope scaling"):
        check_layout(settings | NONE, 2)
    check_layout(recipe(tmp_path, max_grad_norm=0, **PP, **NONE), 2)


@pytest.mark.parametrize(
    "ranks, settings, layout",
    [
        (1, dict(sharding="stage2"), (1, 1, 1, 0)),
        (8, dict(TP, **PP), (2, 2, 1, 1)),
        (8, dict(TP, sharding=""), (2, 1, 4, 0)),
        (8, dict(sharding="stage1", sharding_parallel_size=2), (1, 1, 4, 1)),
    ],
)
def test_the_layout_of_a_recipe(ranks, settings, layout):
    found = Layout.of(settings, ranks)
    assert (found.tensor, found.pipeline, found.data, found.stage) == layout
