"""Built-in configurations: names, dimensions, errors."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from paddle_te import configs
from paddle_te.configs.families import family_of, is_tied
from paddle_te.configs.spec import spec_of
from paddle_te.planner.model import Model
from paddle_te.weights import Dims
from paddle_te.weights.layouts import hf_layout, te_layout


def parameters(config):
    """Weights of a model, from its dimensions alone; Qwen2's q, k and v have biases, Qwen3's and Gemma 3's q and k
    norms of a head, OLMo-2's of all heads, Gemma 3 and GLM-4 two norms more, and all of GPT's have biases."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if config["model_type"] == "gpt":
        ffn = config["intermediate_size"]
        layer = 4 * hidden * hidden + 2 * hidden * ffn + 9 * hidden + ffn
        embeddings = (config["vocab_size"] + config["max_position_embeddings"]) * hidden
        return config["num_hidden_layers"] * layer + embeddings + 2 * hidden
    head = config.get("head_dim", hidden // heads)
    q, kv = head * heads, head * config["num_key_value_heads"]
    layer = 2 * hidden * (q + kv) + 3 * hidden * config["intermediate_size"] + 2 * hidden
    more = {"qwen2": q + 2 * kv, "qwen3": 2 * head, "olmo2": q + kv, "glm4": 2 * hidden}
    more["gemma3_text"] = 2 * head + 2 * hidden
    layer += more.get(config["model_type"], 0)
    embeddings = 1 if config["tie_word_embeddings"] else 2
    return config["num_hidden_layers"] * layer + embeddings * config["vocab_size"] * hidden + hidden


# Hugging Face's model pages show the parameter counts to the last digit.
@pytest.mark.parametrize(
    "name, count",
    [
        ("meta-llama/Llama-2-7b", 6_738_415_616),
        ("meta-llama/Llama-2-13b", 13_015_864_320),
        ("meta-llama/Llama-2-70b", 68_976_648_192),
        ("meta-llama/Meta-Llama-3-8B", 8_030_261_248),
        ("meta-llama/Meta-Llama-3-70B", 70_553_706_496),
        ("meta-llama/Meta-Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Meta-Llama-3.1-70B", 70_553_706_496),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("meta-llama/Llama-3.2-3B", 3_212_749_824),
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-3B", 3_085_938_688),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-14B", 14_770_033_664),
        ("Qwen/Qwen2.5-32B", 32_763_876_352),
        ("Qwen/Qwen2.5-72B", 72_706_203_648),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-14B", 14_768_307_200),
        ("Qwen/Qwen3-32B", 32_762_123_264),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", 8_190_735_360),
        ("google/gemma-3-1b-it", 999_885_952),
        ("google/gemma-3-4b-it", 4_300_079_472 - 419_816_304),  # of which the latter see pictures
        ("google/gemma-3-12b-it", 12_187_325_040 - 421_290_864),
        ("google/gemma-3-27b-it", 27_432_406_640 - 423_060_336),
        ("microsoft/Phi-4-mini-instruct", 3_836_021_760),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1_777_088_000),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 7_615_616_512),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", 14_770_033_664),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", 32_763_876_352),
        ("microsoft/phi-4", 14_659_507_200),
        ("allenai/OLMo-2-0425-1B", 1_484_916_736),
        ("allenai/OLMo-2-1124-7B", 7_298_617_344),
        ("allenai/OLMo-2-1124-13B", 13_716_198_400),
        ("allenai/OLMo-2-0325-32B", 32_234_279_936),
        ("zai-org/GLM-4-32B-0414", 32_566_081_536),
        ("ibm-granite/granite-3.0-2b-base", 2_533_531_648),
        ("ibm-granite/granite-3.0-8b-base", 8_170_848_256),
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096),
        ("mistralai/Mistral-7B-v0.3", 7_248_023_552),
        ("gpt-126m", 125_262_336),
        ("gpt-1.3b", 1_315_819_520),
        ("gpt-5b", 5_047_558_144),
        ("gpt-6.7b", 6_658_596_864),
        ("gpt-13b", 12_853_626_880),
        ("gpt-175b", 174_604_836_864),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 8_030_261_248),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", 70_553_706_496),
    ],
)
def test_dimensions_give_the_published_parameter_count(name, count):
    assert parameters(configs.read(name)) == count


@pytest.mark.parametrize(
    "name, count",
    [
        ("Qwen/Qwen1.5-MoE-A2.7B", 14_315_784_192),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen/Qwen3-235B-A22B", 235_093_634_560),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
        ("mistralai/Mixtral-8x22B-v0.1", 140_620_634_112),
        ("allenai/OLMoE-1B-7B-0924", 6_919_161_856),
        ("ibm-granite/granite-3.0-1b-a400m-base", 1_334_628_352),
        ("ibm-granite/granite-3.0-3b-a800m-base", 3_298_793_472),
        ("openai/gpt-oss-20b", 20_914_757_184),
        ("openai/gpt-oss-120b", 116_829_156_672),
        ("deepseek-ai/DeepSeek-V2-Lite", 15_706_484_224),
        ("deepseek-ai/DeepSeek-V3", 671_026_404_352),
        ("moonshotai/Moonlight-16B-A3B", 15_960_108_544),
    ],
)
def test_mixtures_of_experts_have_the_published_parameter_count(name, count):
    """The planner's, and that of all weights under Hugging Face's names; the bias of DeepSeek's experts is none."""
    config = configs.read(name)
    dims, layout = Dims(spec_of(config)), hf_layout(is_tied(config), family_of(config))
    assert Model.of(config).parameters == count
    places = [place for place in layout.tensors(dims.spec) if place.slot.parts != ("expert_bias",)]
    assert sum(math.prod(dims.slot_shape(place)) for place in places) == count


@pytest.mark.parametrize(
    "name, layers, hidden, ffn, heads, head, billions",
    [("glam-126m-64e", 12, 768, 3072, 12, 64, 1.9), ("glam-64b-64e", 64, 8192, 32768, 128, 128, 1200)],
)
def test_glam(name, layers, hidden, ffn, heads, head, billions):
    """Sizes and parameters of the paper's table (arXiv 2112.06905); all, and those that a token goes through."""
    config, half = configs.read(name), layers // 2
    norm, mlp = 2 * hidden, 2 * hidden * ffn + ffn + hidden
    attention = 4 * hidden * heads * head + 3 * heads * head + hidden + norm
    outside = (config["vocab_size"] + config["max_position_embeddings"]) * hidden + norm
    others = layers * attention + half * (mlp + norm) + half * norm + outside
    model, dims = Model.of(config), Dims(spec_of(config))
    assert model.parameters == others + half * 64 * (mlp + hidden)
    assert model.active_parameters == others + half * 2 * mlp
    assert round(model.parameters / 1e9, 1 - math.floor(math.log10(billions))) == billions
    layout = te_layout(True, family_of(config))
    tensors = [place for place in layout.tensors(dims.spec) if place.slot.parts != ("lm_head",)]  # the embedding
    assert sum(math.prod(dims.slot_shape(place)) for place in tensors) == model.parameters


@pytest.mark.parametrize("name", [name for name in configs.known_names() if name.startswith("meta-llama/")])
def test_metas_other_numbers(name):
    config = configs.read(name)
    llama3 = "Llama-3" in name
    assert config["rope_theta"] == (500000 if llama3 else 10000)
    longest = 131072 if "Llama-3." in name else 8192
    assert config["max_position_embeddings"] == (longest if llama3 else 4096)
    assert config["vocab_size"] == (128256 if llama3 else 32000)
    assert config["rms_norm_eps"] == 1e-5


def test_own_models():
    assert 120e6 < parameters(configs.read("llama-125m")) < 130e6
    tiny = configs.read("tiny-llama-demo")
    assert parameters(tiny) < 10e6
    assert tiny["num_attention_heads"] % 4 == tiny["num_key_value_heads"] % 2 == 0
    for name in ("llama-125m", "tiny-llama-demo"):
        config = configs.read(name)
        assert all(config[key] % 16 == 0 for key in ("hidden_size", "intermediate_size")), (
            "fp8 runs need multiples of 16"
        )


@pytest.mark.parametrize("name", configs.known_names())
def test_paddlenlp_reads_every_configuration(name):
    from paddle_te.configs.families import family_of
    from paddle_te.hosts.paddlenlp.families import config_class

    ours = json.loads((configs.resolve(name) / "config.json").read_text())
    theirs = config_class(family_of(ours)).from_pretrained(str(configs.resolve(name)))
    for key, value in ours.items():
        assert getattr(theirs, key) == value, key


@pytest.mark.parametrize(
    "alias, name",
    [
        ("llama-2-7b", "meta-llama/Llama-2-7b"),
        ("Llama-2-70b", "meta-llama/Llama-2-70b"),
        ("llama-3-8b", "meta-llama/Meta-Llama-3-8B"),
        ("Meta-Llama-3-70B", "meta-llama/Meta-Llama-3-70B"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B"),  # Hugging Face's name; the other is PaddleNLP's
        ("llama-3.2-1b", "meta-llama/Llama-3.2-1B"),
        ("META-LLAMA/llama-2-13B", "meta-llama/Llama-2-13b"),
        ("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B"),
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("gemma-3-4b-it", "google/gemma-3-4b-it"),
        ("phi-4-mini-instruct", "microsoft/Phi-4-mini-instruct"),
        ("phi-4", "microsoft/phi-4"),
        ("mistral-7b-v0.1", "mistralai/Mistral-7B-v0.1"),
        ("deepseek-r1-distill-qwen-7b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"),
    ],
)
def test_short_names(alias, name):
    assert configs.canonical(alias) == name
    assert configs.resolve(alias) == configs.resolve(name)


def scaled(frequency, factor, low=1.0, high=4.0, length=8192):
    """One frequency as Meta's llama-models scale it (`apply_scaling`)."""
    wavelength = 2 * math.pi / frequency
    if wavelength < length / high:
        return frequency
    if wavelength > length / low:
        return frequency / factor
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


@pytest.mark.parametrize("name, factor", [("3-8B", 1), ("3.1-8B", 8), ("3.1-70B", 8), ("3.2-1B", 32), ("3.2-3B", 32)])
def test_angles(name, factor):
    import paddle

    from paddle_te.configs.spec import spec_of
    from paddle_te.hosts.paddlenlp.loading import read_config
    from paddle_te.models.decoder import rotary_embedding

    spec = spec_of(read_config(configs.resolve(f"llama-{name}")))
    dim = spec.layer.attention.head_dim
    assert dim == (64 if name == "3.2-1B" else 128)
    positions = [0, 1, 77, 8191, 131071]
    frequencies = np.array([scaled(500000.0 ** (-i / dim), factor) for i in range(0, dim, 2)])
    want = np.outer(positions, np.tile(frequencies, 2))
    np.testing.assert_allclose(rotary_embedding(spec).at(paddle.to_tensor(positions)).numpy(), want, rtol=2e-6)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"head_dim": 128}, "head_dim=128.* = 64 numbers"),
    ],
)
def test_what_paddlenlp_would_leave_out_is_refused(tmp_path, change, message):
    from paddle_te.hosts.paddlenlp.loading import read_config

    (tmp_path / "config.json").write_text(json.dumps(configs.read("llama-3.2-1b") | change))
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_a_folder_comes_before_a_name(tmp_path, monkeypatch):
    folder = tmp_path / "llama-125m"
    folder.mkdir()
    (folder / "config.json").write_text((configs.resolve("tiny-llama-demo") / "config.json").read_text())
    monkeypatch.chdir(tmp_path)
    assert configs.resolve("llama-125m") == folder
    assert configs.read("llama-125m")["hidden_size"] == configs.read("tiny-llama-demo")["hidden_size"]


def test_unknown_names_lead_to_the_known_ones(tmp_path):
    """To those that are like them, or to all."""
    with pytest.raises(ValueError, match=r"neither a folder nor a known model; .*, perhaps Qwen/Qwen3-8B or [^,]*$"):
        configs.resolve("Qwen/Qwen-3-8B")
    with pytest.raises(ValueError, match="a known model; .*llama-125m.*tiny-llama-demo") as refused:
        configs.resolve("some/other")
    *_, listed = str(refused.value).partition("or one of: ")
    assert len(listed) < 1500 and listed.startswith("Qwen/Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B, Qwen2.5-0.5B, -1.5B, -14B")
    whole = [name for name in listed.split(", ") if not name.startswith("-")]  # each can be given so
    assert {configs.canonical(name) for name in whole} < {*configs.known_names()}
    assert len(listed.split(", ")) == len(configs.known_names())
    with pytest.raises(ValueError, match="a folder without config.json"):
        configs.resolve(str(tmp_path))


def test_broken_configurations(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        configs.read(str(tmp_path))
    path.write_text(json.dumps({"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9, "intermediate_size": "4"}))
    with pytest.raises(ValueError, match="config.json: lacks num_hidden_layers$"):
        configs.read(str(tmp_path))


def test_a_family_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(configs.read("tiny-llama-demo") | {"model_type": "falcon"}))
    with pytest.raises(
        ValueError, match="config.json: model_type='falcon' is not supported.*: llama, qwen2, .*, mistral"
    ):
        configs.read(str(tmp_path))


def test_kv_heads_default_to_heads(tmp_path):
    config = configs.read("tiny-llama-demo")
    del config["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert configs.read(str(tmp_path))["num_key_value_heads"] == config["num_attention_heads"]


def test_the_launcher_reads_them_without_paddle():
    code = "import sys, paddle_te.launch.__main__; print({'paddle', 'paddlenlp', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
