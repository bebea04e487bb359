"""config.json of every family: right ones are read as they were, and of each wrong one a line names file, key, value
and what is expected."""

import json
import os
import re
import time

import pytest

from paddle_te import configs
from paddle_te.configs import ConfigError
from paddle_te.configs.families import FAMILIES
from paddle_te.configs.reading import check_computed, model_config, read_file
from paddle_te.configs.schema import SCHEMAS, keys_of
from paddle_te.configs.translation import to_paddlenlp, to_transformers
from paddle_te.hosts.paddlenlp.capabilities import PADDLENLP
from tests.unit.configs.written import REAL, TRANSFORMERS

LARGEST = "a whole number from 1 to"


def sized(family, **changes):
    """A right config.json of a family in PaddleNLP's words; a value of ... takes the key out."""
    config = dict(
        model_type=family, vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, paddlenlp_version="3.0.0b4",
    ) | ({"attention_bias": False} if family == "glm4" else {}) | changes  # fmt: skip
    return {name: value for name, value in config.items() if value is not ...}


def gpt2(**changes):
    """The same in transformers' words."""
    return (
        dict(model_type="gpt2", vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=64, torch_dtype="float32")
        | changes
    )


def refusal(content, backend="paddle"):
    """What reading and checking a config.json says."""
    with pytest.raises(ConfigError) as error:
        check_computed(model_config(content, "folder/config.json"), backend)
    text = str(error.value)
    assert text.startswith("folder/config.json: ") and "\n" not in text and len(text) < 400
    return text.removeprefix("folder/config.json: ")


ROTARY = ("llama", "qwen2", "mistral")
PLAIN = [name for name in FAMILIES if name != "gpt_oss"]  # whose weights are never stored in MXFP4
ODD = ["2", 2.0, True, None, [2], {"a": 2}, -1, 0, 10**12, 10**39]
# (families, changes, what the line must say)
WRONG = [
    (ROTARY, {"hidden_size": 66}, "hidden_size=66 is no multiple of num_attention_heads=4"),
    (ROTARY, {"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
    (ROTARY, {"num_key_value_heads": 8}, "num_attention_heads=4 is no multiple of num_key_value_heads=8"),
    (ROTARY, {"hidden_size": 12}, ".*rotation takes pairs: an even head_dim is needed"),
    (ROTARY, {"head_dim": 15}, ".*rotation takes pairs"),
    (ROTARY, {"head_dim": 32}, "head_dim=32: .* have only hidden_size / num_attention_heads = 16 numbers"),
    (ROTARY, {"head_dim": 0}, f"head_dim=0: it must be {LARGEST} 1,048,576 or null"),
    (ROTARY, {"rope_theta": 0}, "rope_theta=0: it must be a number above 0"),
    (ROTARY, {"rope_theta": -1.0}, "rope_theta=-1.0: it must be a number above 0"),
    (ROTARY, {"rope_theta": "10000"}, "rope_theta='10000': it must be a number above 0"),
    (ROTARY, {"rope_theta": 10**30}, "rope_theta=10.*: it must be a number above 0 and at most 1,000,000,000,000"),
    (ROTARY, {"rms_norm_eps": 0}, "rms_norm_eps=0: it must be a number above 0 and below 1"),
    (ROTARY, {"rms_norm_eps": 1.0}, "rms_norm_eps=1.0: it must be a number above 0 and below 1"),
    (ROTARY, {"rms_norm_eps": True}, "rms_norm_eps=True: it must be a number"),
    (ROTARY, {"hidden_act": "gelu"}, "hidden_act='gelu': PaddleNLP's .* has only 'silu'"),
    (ROTARY, {"hidden_act": 3}, "hidden_act=3: it must be a text"),
    (ROTARY, {"attention_dropout": 0.1}, "attention_dropout=0.1: PaddleNLP's .* has only 0.0"),
    (ROTARY, {"rope_scaling": "yes"}, "rope_scaling='yes': it must be an object, {…} or null"),
    (ROTARY, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling: rope type 'longrope' is not"),
    (ROTARY, {"rope_scaling": {"rope_type": 3}}, "rope_scaling.rope_type=3: it must be a text or null"),
    (ROTARY, {"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor=0: it must be a number above 0"),
    (ROTARY, {"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor='2': it must be a number"),
    (ROTARY, {"rope_scaling": {"type": "linear"}}, "rope_scaling of type linear lacks factor"),
    (ROTARY, {"rope_scaling": {"type": "linear", "factor": 2, "wrong": 3}}, "rope_scaling.wrong is not known"),
    (ROTARY, {"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}, "rope_scaling: partial_rotary_f"),
    (ROTARY, {"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "rope_scaling.mrope_section is not known"),
    (
        ROTARY,
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 0}},
        "rope_scaling.truncate=0: it must be tr",
    ),
    (ROTARY, {"rope_parameters": {"rope_theta": -5}}, "rope_parameters.rope_theta=-5: it must be a number above 0"),
    (
        ROTARY,
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        "rope_parameters and rope_scaling say different things",
    ),
    (
        ("llama",),
        {
            "rope_scaling": dict(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=4.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            )
        },
        "rope_scaling: high_freq_factor=4.0 must be above low_freq_factor=4.0",
    ),
    (ROTARY, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: it changes what the model computes"),
    (ROTARY, {"logit_scale": 0.0625}, "logit_scale=0.0625: it changes what the model computes"),
    (ROTARY, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*: it must be .*'full_attention'"),
    (("llama",), {"alibi": True}, "alibi=True: backends paddle and transformer_engine have only False; use backend no"),
    (("llama",), {"use_long_sequence_strategies": True}, "use_long_sequence_strategies=True: backends paddle and tra"),
    (("llama",), {"alibi": 1}, "alibi=1: it must be true or false"),
    (("qwen2", "mistral"), {"alibi": True}, "alibi=True: it changes what the model computes"),
    (("llama",), {"attention_bias": True}, "attention_bias=True: PaddleNLP's Llama has only False"),
    (("llama",), {"mlp_bias": True}, "mlp_bias=True: PaddleNLP's Llama has only False"),
    (("mistral", "qwen2"), {"mlp_bias": True}, "mlp_bias=True: it changes what the model computes"),
    (("llama",), {"sliding_window": 4096}, "sliding_window=4096: PaddleNLP's Llama has only None"),
    (("llama",), {"rope_scaling_type": "dynamic"}, "rope_scaling_type='dynamic': it must be 'linear' or 'ntk' or 'dyn"),
    (("llama",), {"rope_scaling_factor": -2.0}, "rope_scaling_factor=-2.0: it must be a number above 0"),
    (("qwen2",), {"use_sliding_window": True}, "use_sliding_window=True: PaddleNLP's Qwen2 has only False"),
    (("llama", "mistral"), {"use_sliding_window": True}, "use_sliding_window=True: it changes what the model computes"),
    (("mistral",), {"sliding_window": 0}, f"sliding_window=0: it must be {LARGEST} .* or null"),
    (("mistral", "qwen2"), {"sliding_window": "all"}, "sliding_window='all': it must be a whole number"),
    (("mistral",), {"tie_word_embeddings": True}, "tie_word_embeddings=True: PaddleNLP's Mistral has only False"),
    (("gpt",), {"tie_word_embeddings": False}, "tie_word_embeddings=False: PaddleNLP's GPT has only True"),
    (("gpt",), {"num_key_value_heads": 2}, "num_key_value_heads=2: it must be num_attention_heads=4 or null"),
    (("gpt",), {"hidden_activation": "silu"}, "hidden_activation='silu': PaddleNLP's GPT has only 'gelu' or 'relu'"),
    (("gpt",), {"layer_norm_eps": 1e-6}, "layer_norm_eps=1e-06: PaddleNLP's GPT has only 1e-05"),
    (("gpt",), {"hidden_dropout_prob": 1.5}, "hidden_dropout_prob=1.5: it must be a number of at least 0 and below 1"),
    (("gpt",), {"normalize_before": False}, "normalize_before=False: PaddleNLP's GPT has only True"),
    (("gpt",), {"n_embd": 32}, "'n_embd'=32: this key is not known; write hidden_size"),
    (("gpt",), {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling=.*: PaddleNLP's GPT has only None"),
    (FAMILIES, {"initializer_range": -1}, "initializer_range=-1: it must be a number from 0 to 1"),
    (FAMILIES, {"tie_word_embeddings": "false"}, "tie_word_embeddings='false': it must be true or false"),
    (FAMILIES, {"eos_token_id": 128}, "eos_token_id=128: it must be below vocab_size=128"),
    (FAMILIES, {"eos_token_id": [2, 400]}, r"eos_token_id=\[2, 400\]: it must be below vocab_size=128"),
    (FAMILIES, {"eos_token_id": [2, "3"]}, r"eos_token_id\[1\]='3': it must be a whole number"),
    (FAMILIES, {"bos_token_id": 5000}, "bos_token_id=5000: it must be below vocab_size=128"),
    (FAMILIES, {"bos_token_id": -3}, "bos_token_id=-3: it must be a whole number from 0"),
    (FAMILIES, {"pad_token_id": -2}, "pad_token_id=-2: it must be a whole number from -1"),
    (PLAIN, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config=.*: it changes what"),
    (PLAIN, {"quantization_config": "fp8"}, "quantization_config='fp8': it changes what"),
    (("gpt_oss",), {"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method='gptq': it mu"),
    (("gpt_oss",), {"swiglu_limit": 6.0}, "swiglu_limit=6.0: GptOss here has only 7.0"),
    (FAMILIES, {"pruned_heads": {"0": [1]}}, "pruned_heads=.*: it changes what"),
    (FAMILIES, {"is_encoder_decoder": True}, "is_encoder_decoder=True: it changes what"),
    (FAMILIES, {"init_class": "LlamaModel"}, "init_class='LlamaModel': it changes what"),
    (FAMILIES, {"hiden_size": 64}, "'hiden_size'=64: this key is not known; write hidden_size, or take it out"),
    (FAMILIES, {"Vocab-Size": 64}, "'Vocab-Size'=64: this key is not known; write vocab_size, or take it out"),
    (FAMILIES, {"num_layers": 64}, "'num_layers'=64: this key is not known; write num_hidden_layers, or take it out"),
    (FAMILIES, {"initializer_rnage": 0.1}, "'initializer_rnage'=0.1: this key is not known; write initializer_range"),
    (FAMILIES, {"attention_bia": True}, "'attention_bia'=True: this key is not known; write attention_bias"),
    (ROTARY, {"hidden_activation": "gelu"}, "'hidden_activation'='gelu': this key is not known; write hidden_act"),
    (ROTARY, {"normalize_before": False}, "normalize_before=False: it is the key of another family; take it out"),
    (("gpt",), {"head_dim": 32}, "head_dim=32: it is the key of another family; take it out"),
    (("gpt",), {"rms_norm_eps": 1e-6}, "'rms_norm_eps'=1e-06: this key is not known; write layer_norm_eps"),
    (FAMILIES, {"num_layers": 2.5}, "'num_layers'=2.5: this key is not known; write num_hidden_layers"),
    (FAMILIES, {"use_cache": "no"}, "use_cache='no': it must be true or false or null"),
    (FAMILIES, {"temperature": "hot"}, "temperature='hot': it must be a number or null"),
    (FAMILIES, {"architectures": "Llama"}, "architectures='Llama': it must be a list, each entry a text or null"),
    (FAMILIES, {"dtype": 16}, "dtype=16: it must be a text or null"),
    (FAMILIES, {"hidden_size": ..., "vocab_size": ...}, "lacks vocab_size, hidden_size"),
]


@pytest.mark.parametrize("families, changes, message", WRONG, ids=[message for *_, message in WRONG])
def test_each_wrong_value_is_named(families, changes, message):
    for family in families:
        assert re.search(f"^{message}", refusal(sized(family, **changes))), family


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_wrong_values_stand_in_is_right(family):
    check_computed(model_config(sized(family)), "paddle")


@pytest.mark.parametrize("name", configs.reading.NEEDED)
@pytest.mark.parametrize("value", ODD, ids=str)
def test_sizes(name, value):
    """A size is a whole number within its bounds; no size that is wrong is taken for another one."""
    wanted = f"lacks {name}$" if value is None else f"{name}=.{{,40}}: it must be {LARGEST} [0-9,]+"
    for family in FAMILIES:
        assert re.search(f"^{wanted}", refusal(sized(family, **{name: value}))), family


@pytest.mark.parametrize("value", [{}, [], "x", -7, 10**39, 1e300, True], ids=str)
def test_no_key_takes_everything(value):
    """Whatever stands under a key of a family, it is read as it should be, or refused in one line."""
    for family in FAMILIES:
        check_keys(family, value)


def check_keys(family, value):
    refused = 0
    for name in keys_of(SCHEMAS[family]):
        try:
            check_computed(model_config(sized(family, **{name: value})), "paddle")
        except ConfigError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 300
            assert name in str(error) or name == "model_type"
    assert refused > len(keys_of(SCHEMAS[family])) / 2


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_embd": 66}, "n_embd=66 is no multiple of n_head=4"),
        ({"n_embd": "64"}, f"n_embd='64': it must be {LARGEST} 1,048,576"),
        ({"n_layer": 10**9}, f"n_layer=1000000000: it must be {LARGEST} 10,000"),
        ({"n_inner": 0}, f"n_inner=0: it must be {LARGEST} .* or null"),
        ({"hidden_size": 32}, "'hidden_size'=32: this key is not known; write n_embd"),
        (
            {"activation_function": "gelu"},
            "activation_function='gelu': .* only 'gelu_new' or 'gelu_pytorch_tanh' or 'r",
        ),
        (
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx=True: PaddleNLP's GPT has only Fa",
        ),
        (
            {"resid_pdrop": 0.1, "embd_pdrop": 0.2},
            "embd_pdrop=0.2 and resid_pdrop=0.1: PaddleNLP's model has one value",
        ),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06: PaddleNLP's GPT has only 1e-05"),
    ],
)
def test_transformers_words_are_named(change, message):
    check_computed(model_config(gpt2()), "paddle")
    assert re.search(f"^{message}", refusal(gpt2(**change)))


def test_the_same_in_another_familys_words():
    """As it stands in files of models that were made from another one's."""
    assert not model_config(sized("gpt", rms_norm_eps=1e-5, layer_norm_eps=1e-5)).unknown
    assert not model_config(sized("llama", d_model=64)).unknown


def test_alibi_is_paddlenlps():
    for key in ("alibi", "use_long_sequence_strategies"):
        check_computed(model_config(sized("llama", **{key: True})), "none")
        refusal(sized("llama", **{key: True}), "transformer_engine")


FILES = [
    (b"", "is empty"),
    (b" \n", "is empty"),
    (b"{", "is not JSON: Expecting property name"),
    (b"[1, 2]", r": not a JSON object, {…}, but \[1, 2\]"),
    (b"7", ": not a JSON object, {…}, but 7"),
    (b"null", ": not a JSON object, {…}, but None"),
    (b'{"hidden_size": 8, "vocab_size": 9, "hidden_size": 16}', "names 'hidden_size' twice: leave one of them out"),
    (b'{"rope_scaling": {"factor": 1, "factor": 2}}', "names 'factor' twice"),
    (b'{"rope_theta": NaN}', "holds NaN, which is no number of JSON"),
    (b'{"rope_theta": -Infinity}', "holds -Infinity, which is no number of JSON"),
    (b'{"rope_theta": 1e999}', "holds '1e999', a number that is too large"),
    (b'{"hidden_size": 1' + b"0" * 5000 + b"}", "holds '10.*, a number that is too large"),
    (b'{"a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "is nested too deeply"),
    (b'{"model_type": "\xff"}', "is not UTF-8 text: byte 16 is 0xff"),
    ('{"a": 1}'.encode("utf-16"), "is not UTF-8 text: byte 0 is 0xff"),
    (b'\xef\xbb\xbf{"hidden_size": 1}', "is not JSON: it begins with a byte order mark"),
    (b'{"a": "' + b"x" * 100 * 2**20 + b'"}', "has more than 4,194,304 bytes"),
    (b"\0" * 100, "is not JSON"),
    (
        b'{"model_type": ["llama"]}',
        r": model_type=\['llama'\] is not supported; it may be one of: llama, qwen2, .*, mistral",
    ),
    (b"{}", ": lacks vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads"),
]


@pytest.mark.parametrize("content, message", FILES, ids=[message[:25] for _, message in FILES])
def test_files(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    start = time.process_time()
    with pytest.raises(ConfigError) as error:
        read_file(path)
    assert time.process_time() - start < 2
    assert re.search(f"^{path} ?{message}", str(error.value)) and "\n" not in str(error.value)
    assert len(str(error.value)) < len(str(path)) + 250


def test_nested_values_are_shown_in_short():
    """Less deep than what JSON's reader refuses."""
    value = json.loads("[" * 900 + "]" * 900)
    assert "rope_theta=[[[[...]]]]" in refusal(sized("llama", rope_theta=value))
    model_config(sized("llama", something=value))


def test_what_is_no_file(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="config.json is a folder, where a JSON file is expected"):
        read_file(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="nowhere.json cannot be read: No such file"):
        read_file(tmp_path / "nowhere.json")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe is no ordinary file"):
        read_file(tmp_path / "pipe")


def test_unknown_keys_are_told():
    config = model_config(sized("llama", our_note={"by": "us"}, unsloth_version="2024.9", license="x"))
    assert config.unknown == ("our_note", "license")


@pytest.mark.parametrize("name", configs.known_names())
def test_our_own_are_right(name):
    config = configs.read_model(name)
    check_computed(config, "transformer_engine")
    assert not config.unknown and configs.read(name).items() >= config.content.items()
    for entry, value in config.content.items():
        found = getattr(config.record, entry)
        assert value == (found if not isinstance(value, dict) else {name: getattr(found, name) for name in value}), (
            entry
        )


@pytest.mark.parametrize("content", [*TRANSFORMERS.values(), *REAL.values()])
def test_transformers_are_right(content):
    config = model_config(content)
    check_computed(config, "transformer_engine")
    assert not config.unknown
    for name, key in keys_of(type(config.record)).items():
        for word in configs.schema.words_of(name, key, config.theirs):
            if word in content and name not in ("rope_scaling", "hidden_activation"):
                assert getattr(config.record, name) == content[word]
    native = model_config(to_paddlenlp(config, "bfloat16"))
    again = model_config(to_transformers(native, "bfloat16"))
    assert to_paddlenlp(again, "bfloat16") == native.content


@pytest.mark.parametrize("family", PADDLENLP)
def test_paddlenlps_are_right(family):
    """Its classes' defaults are the schema's, all its keys are known, and what it saves is read."""
    from paddle_te.hosts.paddlenlp.families import config_class

    theirs = config_class(FAMILIES[family])().to_dict()
    config = model_config(theirs)
    check_computed(config, "transformer_engine")
    assert not config.unknown
    bare = model_config({name: theirs[name] for name in ("model_type", "paddlenlp_version", *configs.reading.NEEDED)})
    for name in keys_of(SCHEMAS[family]):
        if name in theirs and name not in ("dtype", "seq_length", "num_key_value_heads", "ignore_index"):
            assert getattr(bare.record, name) == getattr(config.record, name) == theirs[name], name
    assert bare.record.kv_heads == config.record.kv_heads


@pytest.mark.parametrize("content", TRANSFORMERS.values())
def test_transformers_defaults_are_ours(content):
    """Of what a config.json of theirs leaves out."""
    shapes = ("model_type", "torch_dtype", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    bare = model_config({name: content[name] for name in (*shapes, "num_attention_heads") if name in content})
    whole = model_config(content)
    filled = {"num_key_value_heads", "head_dim", "qk_head_dim"}  # null in one, a number in the other: the same
    for name in keys_of(type(whole.record)):
        if name not in filled and name in content:
            assert getattr(bare.record, name) == getattr(whole.record, name), name
    assert bare.record.kv_heads == whole.record.kv_heads and bare.record.head_size == whole.record.head_size
