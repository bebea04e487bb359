"""config.json of a converted checkpoint: the same model said in PaddleNLP's or in Hugging Face's words."""

import math

from paddle_te.configs.families import FAMILIES, family_of
from paddle_te.weights.rope import check_paddlenlps_layers, scaling_of
from paddle_te.weights.rope import to_paddlenlp as rope_in_paddlenlp
from paddle_te.weights.tensors import CheckpointError
from paddle_te.weights.words import WORDS

FUSE_FLAGS = ("fuse_attention_qkv", "fuse_attention_ffn")

# In a te checkpoint's config.json: how the native checkpoint it was made from was fused, so that te2pd gives it back.
# (PaddleNLP takes its own fuse flags from arguments, not from config.json, so they would say nothing there.)
RECORD = "paddle_te_native_layout"


def fused_before(config):
    """{flag: bool}: how a te checkpoint's native one was fused."""
    return {flag: bool((config or {}).get(RECORD, {}).get(flag)) for flag in FUSE_FLAGS}


def native_config(config):
    """A config.json's content in PaddleNLP's words: as it is, or translated where transformers wrote it.

    Raises CheckpointError for a model that PaddleNLP cannot express, and for values that no model has.
    """
    if not isinstance(config, dict):
        raise CheckpointError("config.json: not a JSON object")
    # each writes its own version into it
    theirs = "paddlenlp_version" not in config and ("transformers_version" in config or "torch_dtype" in config)
    if theirs:
        return _from_hf(config, config.get("dtype") or config.get("torch_dtype") or "float32")
    return _checked(config)


def convert_config(config, source, target, dtype):
    """The output's config.json.

    Args:
        config: the input's, a dict.
        source, target: Layouts.
        dtype: of the weights, "bfloat16", "float16" or "float32".

    Raises CheckpointError for a model that the target's software cannot express.
    """
    if source.kind == "hf":
        converted = _from_hf(config, dtype)
    else:
        checked = _checked(config)
        converted = _to_hf(checked, dtype) if target.kind == "hf" else _with_dtype(checked, dtype)
    converted.pop(RECORD, None)
    if target.kind == "pd":
        check_paddlenlps_layers(converted)
    if target.kind == "te":
        fused = {flag: getattr(source, flag) for flag in FUSE_FLAGS} if source.kind == "pd" else fused_before(config)
        if any(fused.values()):
            converted[RECORD] = fused
    return converted


def _with_dtype(config, dtype):
    """A copy of PaddleNLP's config that names the dtype of the weights, if it names one at all."""
    return config | ({"dtype": dtype} if "dtype" in config else {})


# The same sentencepiece model goes by two names.
_SENTENCEPIECE = {"hf": "tokenizer.model", "pd": "sentencepiece.bpe.model"}


def companion_name(name, names, source, target):
    """What a companion file of the weights, one of `names`, is called beside the target Layout's weights."""
    if (source.kind == "hf") == (target.kind == "hf"):
        return name
    theirs, ours = _SENTENCEPIECE["hf"], _SENTENCEPIECE["pd"]
    old, new = (theirs, ours) if source.kind == "hf" else (ours, theirs)
    return new if name == old and new not in names else name


def _family(config):
    try:
        return family_of(config)
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from None


_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "sliding_window",
)
_POSITIVE = ("rope_theta", "rms_norm_eps", "rope_scaling_factor")


def _checked(config, hf=False):
    """The config, PaddleNLP's or (hf) transformers'. Raises CheckpointError for values that PaddleNLP's model would not
    look at, or that no model has."""
    family = _family(config)
    words = WORDS[family.model_type]
    for key, possible in (words.hf_only if hf and words.hf_only else words.only).items():
        if config.get(key, possible[0]) not in possible:
            wanted = " or ".join(map(repr, possible))
            raise CheckpointError(f"config.json: {key}={config[key]!r}: PaddleNLP's {family.title} has only {wanted}")
    for key in _COUNTS:
        value = config.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise CheckpointError(f"config.json: {key}={value!r}: it must be a whole number from 1")
    for key in _POSITIVE:
        value = config.get(key)
        if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
            raise CheckpointError(f"config.json: {key}={value!r}: it must be a positive number")
    for key, divisor in (("hidden_size", "num_attention_heads"), ("num_attention_heads", "num_key_value_heads")):
        if config.get(key) and config.get(divisor) and config[key] % config[divisor]:
            raise CheckpointError(f"config.json: {key}={config[key]} is no multiple of {divisor}={config[divisor]}")
    scaling_of(config)
    check_head_dim(config)
    return config


def check_head_dim(config):
    """Raises CheckpointError for heads of another size than PaddleNLP's models give them, whatever head_dim says."""
    heads = config.get("num_attention_heads")
    size = heads and config.get("hidden_size") and config["hidden_size"] // heads
    if size and config.get("head_dim") not in (None, size):
        raise CheckpointError(
            f"config.json: head_dim={config['head_dim']}: the heads of PaddleNLP's {_family(config).title} have only "
            f"hidden_size / num_attention_heads = {size} numbers"
        )


def in_paddlenlps_words(config):
    """A config.json's content for who reads sizes of it: translated where it has words that only transformers has.

    Raises CheckpointError for a model that PaddleNLP cannot express.
    """
    alone = [family.hf_model_type for family in FAMILIES.values() if family.hf_model_type]
    return _from_hf(config, None) if config.get("model_type") in alone else config


def _from_hf(config, dtype):
    _checked(config, hf=True)
    family = _family(config)
    said = WORDS[family.model_type].read(config, hf=True)
    said |= {"architectures": [family.architecture], "model_type": family.model_type, "dtype": dtype}
    if not family.learned_positions:
        # transformers 5 keeps theta and scaling together in rope_parameters
        theta = (config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta", 10000.0))
        said |= {"rope_theta": theta} | rope_in_paddlenlp(scaling_of(config), family)
    return _checked(said)


def _to_hf(config, dtype):
    family, scaling = _family(config), scaling_of(config)
    if config.get("alibi"):
        raise CheckpointError("config.json: alibi: Hugging Face's models have only rotary positions")
    if scaling and scaling["rope_type"] == "ntk":
        raise CheckpointError("config.json: rope_scaling_type='ntk': Hugging Face's models have no such scaling")
    words = WORDS[family.model_type]
    said = words.in_hf(words.read(config, hf=False))
    said |= {"architectures": [family.hf_architecture or family.architecture], "torch_dtype": dtype}
    said["model_type"] = family.hf_model_type or family.model_type
    if not family.learned_positions:
        said |= {"rope_theta": config.get("rope_theta", 10000.0), "rope_scaling": scaling}
    return said
