"""Write config.json of a converted checkpoint: the same model in PaddleNLP's or in Hugging Face's words."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paddle_te.configs import ConfigError, ModelConfig, check_computed, model_config, read_file
from paddle_te.configs.rope import check_paddlenlps_layers
from paddle_te.configs.translation import in_paddlenlps_words, to_paddlenlp, to_transformers
from paddle_te.weights.layout import Layout
from paddle_te.weights.tensors import CheckpointError

FUSE_FLAGS = ("fuse_attention_qkv", "fuse_attention_ffn")

# In a te checkpoint's config.json: how the native checkpoint it was made from was fused, so that te2pd gives it back.
# (PaddleNLP takes its own fuse flags from arguments, not from config.json, so they would say nothing there.)
RECORD = "paddle_te_native_layout"


def fused_before(config: Mapping[str, Any] | None) -> dict[str, bool]:
    """Return {flag: bool}: how a te checkpoint's native one was fused."""
    return {flag: bool((config or {}).get(RECORD, {}).get(flag)) for flag in FUSE_FLAGS}


@contextmanager
def _as_checkpoint_errors() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise CheckpointError(str(error)) from error


def read_config(folder: str | Path) -> ModelConfig | None:
    """Return the ModelConfig of a folder's config.json; None where there is none. Raises CheckpointError."""
    path = Path(folder) / "config.json"
    if not path.exists():
        return None
    with _as_checkpoint_errors():
        return read_file(path)


def native_words(config: ModelConfig) -> dict[str, Any]:
    """Return a ModelConfig's content in PaddleNLP's words, translated where transformers wrote it.

    Raises CheckpointError for a model that PaddleNLP cannot express.
    """
    with _as_checkpoint_errors():
        return in_paddlenlps_words(config)


def native_config(content: dict[str, Any]) -> dict[str, Any]:
    """Return `native_words` of the content of a config.json.

    Raises CheckpointError, also for values that no model has.
    """
    with _as_checkpoint_errors():
        return in_paddlenlps_words(model_config(content))


def convert_config(config: dict[str, Any], source: Layout, target: Layout, dtype: str) -> dict[str, Any]:
    """Return the output's config.json.

    Args:
        config: the input's, a dict.
        source, target: Layouts.
        dtype: of the weights, "bfloat16", "float16" or "float32".

    Raises CheckpointError for a model that the target's software cannot express.
    """
    with _as_checkpoint_errors():
        converted = _converted(model_config(config), source, target, dtype)
    converted.pop(RECORD, None)
    if target.kind == "te":
        fused = {flag: getattr(source, flag) for flag in FUSE_FLAGS} if source.kind == "pd" else fused_before(config)
        if any(fused.values()):
            converted[RECORD] = fused
    return converted


def _converted(config: ModelConfig, source: Layout, target: Layout, dtype: str) -> dict[str, Any]:
    if source.kind == "hf":
        converted = to_paddlenlp(config, dtype)
    elif target.kind == "hf":
        converted = to_transformers(config, dtype)
    else:
        check_computed(config)
        converted = config.content | ({"dtype": dtype} if "dtype" in config.content else {})
    if target.kind == "pd":
        check_paddlenlps_layers(converted)
    return converted


# The same sentencepiece model goes by two names.
_SENTENCEPIECE = {"hf": "tokenizer.model", "pd": "sentencepiece.bpe.model"}


def companion_name(name: str, names: Collection[str], source: Layout, target: Layout) -> str:
    """Return what a companion file of the weights, one of `names`, is called beside the target Layout's weights."""
    if (source.kind == "hf") == (target.kind == "hf"):
        return name
    theirs, ours = _SENTENCEPIECE["hf"], _SENTENCEPIECE["pd"]
    old, new = (theirs, ours) if source.kind == "hf" else (ours, theirs)
    return new if name == old and new not in names else name


GENERATION = "generation_config.json"
# What PaddleNLP adds there; a value, where only that one is PaddleNLP's own
_PADDLENLPS = {"use_cache": False, "max_length": 20, "no_repeat_ngram_size": 0}
_PADDLENLPS_ONLY = {"_from_model_config", "decode_strategy", "paddlenlp_version"}


def generation_config(said: dict[str, Any]) -> dict[str, Any]:
    """Return a generation_config.json without PaddleNLP's own words: transformers would generate without a cache."""
    theirs = {name for name, value in said.items() if name in _PADDLENLPS and value == _PADDLENLPS[name]}
    return {name: value for name, value in said.items() if name not in theirs | _PADDLENLPS_ONLY}
