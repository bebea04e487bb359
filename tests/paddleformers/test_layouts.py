"""Whether a Llama's positions are read by PaddleFormers' own pipelines; job.rules has what layouts it lacks."""

import pytest

pytest.importorskip("paddleformers", reason="needs PaddleFormers: HOST=paddleformers bash scripts/test.sh")

from paddle_te.hosts.paddleformers.recipes import check_recipe
from tests.paddleformers.llama import tiny_config


def test_own_layers_rope_scaling_in_pipelines_is_refused(tmp_path):
    folders = {}
    for name, rope in (("plain", {}), ("scaled", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})):
        folders[name] = str(tmp_path / name)
        tiny_config(**rope).save_pretrained(folders[name])
    piped = dict(pipeline_model_parallel_size=2, gradient_accumulation_steps=2, max_grad_norm=0)
    own = dict(piped, transformer_engine_backend="none")
    check_recipe(dict(piped, model_name_or_path=folders["scaled"], transformer_engine_backend="paddle"), 2)
    check_recipe(dict(own, model_name_or_path=folders["plain"]), 2)
    with pytest.raises(ValueError, match="read neither the rope scaling"):
        check_recipe(dict(own, model_name_or_path=folders["scaled"]), 2)
