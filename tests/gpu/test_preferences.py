"""Preference tuning on te: a small model learns which answers are better, over weights in bf16 and in fp8 only."""

import numpy as np
import pytest

from tests.end_to_end.training.test_preferences import place, run  # noqa: F401 (place is a fixture)
from tests.small_models import TE

BASE_IN_FP8 = dict(lora="true", lora_rank=8, use_fp8="true", fp8_recipe="current", quantize_base="fp8")


@pytest.mark.parametrize(
    "flags", [dict(learning_rate=2e-3), BASE_IN_FP8 | dict(learning_rate=1e-2)], ids=["full", "base_in_fp8"]
)
def test_a_small_model_learns_which_answers_are_better(gpu, monkeypatch, place, tmp_path, flags):  # noqa: F811
    """As in pd: tests/end_to_end/training/test_preferences.py."""
    flags |= dict(bf16="true", fp16_opt_level="O2", device=gpu.split(":")[0], do_eval="true")
    flags |= dict(max_steps=20, save_steps=100, eval_steps=20)
    lines, evaluated = run(monkeypatch, place, tmp_path, TE, model_name_or_path=place / "paddle", **flags)
    assert evaluated[-1]["eval_rewards/accuracies"] >= 0.95 and evaluated[-1]["eval_rewards/margins"] > 0.1
    assert lines[1]["loss"] == pytest.approx(np.log(2), abs=0.02 if "use_fp8" in flags else 1e-3)
    assert lines[20]["loss"] < lines[1]["loss"] - 0.05


def test_roundings_of_policy_and_reference_cancel_out(gpu, monkeypatch, place, tmp_path):  # noqa: F811
    """With the weights that it began with, no answer is rewarded, under the delayed scaling of later steps too."""
    flags = BASE_IN_FP8 | dict(fp8_recipe="delayed", learning_rate=1e-20, bf16="true", fp16_opt_level="O2")
    flags |= dict(device=gpu.split(":")[0], gradient_accumulation_steps=4, max_steps=4, save_strategy="no")
    lines, _ = run(monkeypatch, place, tmp_path, TE, model_name_or_path=place / "paddle", **flags)
    assert [lines[step]["loss"] for step in lines] == pytest.approx([np.log(2)] * 4, rel=1e-6)
    assert all(lines[step][f"rewards/{answer}"] == 0 for step in lines for answer in ("chosen", "rejected"))
