"""Models with tied embeddings train under TP 2 and PP 2 as in one process.

The small models are of three kinds: Llama 3.2's has scaled frequencies, Qwen2.5's biases, and GPT's learned positions.
The latter two run under TP 2 with sequence parallelism.

In a pipeline the first and the last stage each have a copy of the embedding: the same weights, though Hugging Face's
folder has one, one gradient, once in the norm that clips, and one state of the optimizer that goes along.
"""

import pytest

from paddle_te.weights import convert
from tests.multiprocess.distributed import jobs

ROPE = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA32 = dict(rope_theta=500000.0, rope_scaling=ROPE | dict(original_max_position_embeddings=16))
GPT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, ignore_index=-100)
GPT |= dict.fromkeys(("num_key_value_heads", "rms_norm_eps", "rope_theta"))
MODELS = {
    "llama": LLAMA32,
    "qwen2": dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2"),
    "gpt": dict(architectures=["GPTForCausalLM"], model_type="gpt") | GPT,
}
SEQUENCE_PARALLEL = {jobs.TP: 2, "sequence_parallel": "true"}
TP2 = {"llama": {jobs.TP: 2}, "qwen2": SEQUENCE_PARALLEL, "gpt": SEQUENCE_PARALLEL}
FLOAT32 = ["none", "pd", "pd_fused"]
SAVES = dict(save_strategy="steps", save_steps=jobs.SAVED_STEP)
CLIPPED = dict(max_grad_norm=0.05)  # which all gradients exceed
FP8_HEAD, TE_IN = "te_fp8_head", ("tp2", "pp2")
FP8_FUSED, FUSED_IN = "te_fp8_fused", "pp2"


@pytest.fixture(scope="module", params=MODELS)
def runs(request, tmp_path_factory, warm_start, warm_host):
    """{layout: {variant: Run}}; those called X_moved go on from the checkpoint of X in the layout before."""
    folder = tmp_path_factory.mktemp("tied")
    jobs.save_random_model(folder, tie_word_embeddings=True, num_hidden_layers=2, **MODELS[request.param])
    convert(folder / "native", folder / "hf", "pd2hf", progress=False)
    init = dict.fromkeys(("none", "paddle", "transformer_engine"), str(folder / "hf"))
    if request.param == "gpt":  # whose head PaddleNLP does not divide among ranks
        init["none"] = str(folder / "native")
    environment, made, before = warm_host | dict(EMULATED_TE="1"), {}, None
    for layout, processes, flags in (("tp2", 2, TP2[request.param]), ("pp2", 2, {jobs.PP: 2}), ("one", 1, {})):
        names = FLOAT32[: 3 if layout == "pp2" else 2] + (["te_bf16", FP8_HEAD] if layout in TE_IN else [])
        names += [FP8_FUSED] if layout == FUSED_IN else []
        wanted = [jobs.variant(name, init) | CLIPPED | SAVES for name in names]
        for name in FLOAT32[:2] if before else []:
            resume = dict(resume=str(folder / before / name / f"checkpoint-{jobs.SAVED_STEP}"))
            wanted.append(jobs.variant(name, init) | CLIPPED | resume | dict(name=f"{name}_moved"))
        device, where = ("cpu", warm_start) if layout == "one" else ("nvgpu", environment)
        flags = flags | dict(model_name_or_path=str(folder / "model"))
        made[layout] = jobs.launch(folder / layout, processes, flags, wanted, device, where)
        before = layout
    return made


@pytest.mark.parametrize("layout, name", [*(("tp2", n) for n in FLOAT32[:2]), *(("pp2", n) for n in FLOAT32)])
def test_as_in_one_process(runs, layout, name):
    jobs.check_same(runs[layout][name], runs["one"][name.partition("_")[0]], 1e-5, 1e-5)


@pytest.mark.parametrize("layout", TE_IN)
def test_te_in_bf16(runs, layout):
    assert jobs.loss_difference(runs[layout]["te_bf16"], runs["one"]["pd"]) < 5e-3


@pytest.mark.parametrize("layout", TE_IN)
def test_te_with_its_head_in_fp8(runs, layout):
    """Scales are shared by the ranks of tp2, those of the last stage in pp2; its gradient and the embedding's are added
    inside the GEMM, in float32."""
    assert jobs.loss_difference(runs[layout][FP8_HEAD], runs["one"]["pd"]) < 1e-2
    assert runs[layout][FP8_HEAD].losses != runs[layout]["te_bf16"].losses


def test_te_with_loss_in_chunks_in_fp8(runs):
    """Head and loss are in bf16 there, and the layers in fp8."""
    fused, plain = runs[FUSED_IN][FP8_FUSED], runs[FUSED_IN]["te_bf16"]
    assert jobs.loss_difference(fused, runs["one"]["pd"]) < 1e-2 and fused.losses != plain.losses


def test_none_and_pd_agree(runs):
    assert jobs.loss_difference(runs["one"]["pd"], runs["one"]["none"]) < 1e-5


@pytest.mark.parametrize("layout", ["pp2", "one"])
@pytest.mark.parametrize("name", FLOAT32[:2])
def test_goes_on_in_another_layout(runs, layout, name):
    whole, moved = runs[layout][name].losses, runs[layout][f"{name}_moved"].losses
    assert moved == pytest.approx({step: whole[step] for step in range(jobs.SAVED_STEP + 1, jobs.STEPS + 1)}, rel=1e-5)
