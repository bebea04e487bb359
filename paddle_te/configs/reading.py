"""Read config.json once for all: strict JSON, each key known, each value of its type and within its bounds.

What is wrong raises ConfigError, one line that names the file, the key, the value and what it must be. What a model may
have, but our layers or PaddleNLP's do not compute, is refused by `check_computed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any

from paddle_te import typed
from paddle_te.configs.families import FAMILIES, Family, family_of
from paddle_te.configs.others import CHANGING, OTHER_WORDS, WITHOUT_MEANING, changes_nothing
from paddle_te.configs.rope import scaling_of
from paddle_te.configs.schema import SAME, SCHEMAS, ConfigError, Decoder, Key, Rotary, keys_of, words_of
from paddle_te.hosts.paddlenlp.capabilities import PADDLENLP, no_class
from paddle_te.options import LAYER_OPTIONS
from paddle_te.options.removed import REMOVED
from paddle_te.typed import NotAsDeclared, short

MOST_BYTES = 4 * 2**20
_TEXT = "text_config"
# what a larger model's config.json says outside of its text_config of that part, too
_OF_THE_WHOLE = ("transformers_version", "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id")
SIMILAR = 0.85  # from here on a name is another one's, mistyped
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class ModelConfig:
    """A config.json that was read and found right.

    content: as the file says it. theirs: whether in transformers' words. record: the same, typed, in PaddleNLP's words;
    a value that is left out has the default of the library that wrote the file. unknown: the keys that nothing here
    knows. part: the key of the file that holds the content, where it is that of a larger model.
    """

    source: str
    content: dict[str, Any]
    family: Family
    theirs: bool
    record: Decoder
    unknown: tuple[str, ...] = ()
    part: str | None = None

    @property
    def left_out(self) -> str | None:
        """Say what of a larger model is left out; None for a language model's file."""
        if self.part is None:
            return None
        return f"{self.source}: {self.part} is read, the language model; what sees pictures is left out"


def read_file(path: str | Path) -> ModelConfig:
    """Return the ModelConfig in a file. Raises ConfigError, also where it cannot be read."""
    return model_config(read_content(Path(path)), str(path))


def read_content(path: Path) -> object:
    """Return the content of a JSON file. Raises ConfigError."""
    try:
        return typed.load(path, MOST_BYTES)
    except typed.NotJson as error:
        raise ConfigError(f"{path} {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def model_config(content: object, source: str = "config.json") -> ModelConfig:
    """Return the ModelConfig of a config.json's content. Raises ConfigError, whose text begins with `source`."""
    try:
        if not isinstance(content, dict):
            raise ConfigError(f"not a JSON object, {{…}}, but {short(content)}")
        return _model_config(content, source)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _model_config(content: dict[str, Any], source: str) -> ModelConfig:
    content, part = text_part(content)
    family = _family(content)
    theirs = written_by_transformers(content)
    keys = keys_of(SCHEMAS[family.model_type])
    defaults = {entry.name: entry.default for entry in fields(SCHEMAS[family.model_type])}
    known = {word: defaults[name] for name, said in keys.items() for word in words_of(name, said, theirs)}
    known |= {word: content[word] for word in known if word in content}
    unknown = tuple(name for name in content if name not in known and not _is_known(name, content[name], known))
    record = _record(content, family, keys, theirs)
    _check_together(record, content, keys, theirs)
    return ModelConfig(source, content, family, theirs, record, unknown, part)


def text_part(content: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return (what a config.json says of the language model, the key under which it does).

    Of a model that sees pictures, too, that is its text_config; None: all of the file.
    """
    family = next((each for each in FAMILIES.values() if each.part_of == content.get("model_type")), None)
    inside = content.get(_TEXT)
    if family is None or family.part_of is None or not isinstance(inside, dict):
        return content, None
    outside = {name: content[name] for name in _OF_THE_WHOLE if name in content}
    return outside | {"model_type": family.model_type} | inside, _TEXT


def _family(content: dict[str, Any]) -> Family:
    try:
        return family_of(content)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def written_by_transformers(content: dict[str, Any]) -> bool:
    """Return whether transformers, not PaddleNLP, wrote a config.json: each writes its own version into it."""
    if content.get("model_type") in [family.hf_model_type for family in FAMILIES.values() if family.hf_model_type]:
        return True
    return "paddlenlp_version" not in content and ("transformers_version" in content or "torch_dtype" in content)


def _is_known(name: str, value: Any, known: Mapping[str, Any]) -> bool:
    """Return whether a key that is none of the family's is known. Raises ConfigError for one that must not be there.

    known: {key of the family's: what the file says, or else the default}.
    """
    if name in CHANGING:
        if not changes_nothing(name, value):
            raise ConfigError(
                f"{name}={short(value)}: it changes what the model computes, and the layers here do not have it; "
                "train this model with the library that it was made for"
            )
        return True
    if name in WITHOUT_MEANING:
        types, words = WITHOUT_MEANING[name]
        if value is not None and (type(value) not in types):
            raise ConfigError(f"{name}={short(value)}: it must be {words} or null")
        return True
    meant = next((word for word in OTHER_WORDS.get(name, ()) if word in known), None)
    if name in LAYER_OPTIONS or name in REMOVED or (meant and known[meant] == value):  # the same is said twice
        return True
    if meant := meant or _similar(name, known):
        raise ConfigError(f"{short(name)}={short(value)}: this key is not known; write {meant}, or take it out")
    return _is_another_familys(name, value)


def _similar(name: str, known: Iterable[str]) -> str | None:
    from difflib import get_close_matches  # here, since only a key that nobody knows needs it

    plain = name.lower().replace("-", "_").strip()
    return next(iter(get_close_matches(plain, sorted({*known, *CHANGING}), 1, SIMILAR)), None)


def _is_another_familys(name: str, value: object) -> bool:
    """Return whether a key is another family's, with the value that it has where it is left out."""
    found = [key for record in SCHEMAS.values() for key in fields(record) if name in _words(key)]
    if found and value is not None and value not in [key.default for key in found]:
        raise ConfigError(f"{name}={short(value)}: it is the key of another family; take it out")
    return bool(found)


def _words(entry: Field[Any]) -> tuple[str, ...]:
    return (entry.name, *(entry.metadata["key"].theirs or ()))


def _record(content: dict[str, Any], family: Family, keys: Mapping[str, Key], theirs: bool) -> Decoder:
    """Return the file's values as the family's record."""
    record = SCHEMAS[family.model_type]
    said, word_of = {}, {}
    for name, key in keys.items():
        words = words_of(name, key, theirs)
        given = [word for word in words if word in content]
        if given:
            value, word_of[name] = _one_value(content, given), given[0]
            said[name] = key.values.get(value, value) if theirs and isinstance(value, str) else value
        elif not theirs and key.paddlenlp is not SAME:
            said[name] = key.paddlenlp
    _check_needed(record, content, keys, theirs)
    try:
        return typed.read(record, said)
    except NotAsDeclared as error:
        name, _, rest = error.name.partition(".")
        name, _, place = name.partition("[")
        name = word_of.get(name, name) + (f"[{place}" if place else "") + (f".{rest}" if rest else "")
        if error.shown is None:
            raise ConfigError(f"{name} is {error.wanted}") from None
        raise ConfigError(f"{name}={error.shown}: it must be {error.wanted}") from None


def _one_value(content: dict[str, Any], words: Sequence[str]) -> Any:
    first, *others = words
    for word in others:
        if content[word] != content[first]:
            raise ConfigError(
                f"{word}={short(content[word])} and {first}={short(content[first])}: PaddleNLP's model has one value "
                "for both; give both the same"
            )
    return content[first]


def _check_needed(record: type[Decoder], content: dict[str, Any], keys: Mapping[str, Key], theirs: bool) -> None:
    """Check that the file has what shapes a model, unless transformers leaves it out."""
    optional = {entry.name for entry in fields(record) if entry.default is not MISSING} if theirs else set()
    words = [words_of(name, keys[name], theirs)[0] for name in NEEDED if name not in optional]
    if missing := [word for word in words if content.get(word) is None]:
        raise ConfigError(f"lacks {', '.join(missing)}")


def _check_together(record: Decoder, content: dict[str, Any], keys: Mapping[str, Key], theirs: bool) -> None:
    """Check values against each other."""

    def said(name: str, value: object) -> str:
        return f"{words_of(name, keys[name], theirs)[0] if name in keys else name}={value}"

    heads, kv_heads = record.num_attention_heads, record.kv_heads
    if kv_heads != heads and not isinstance(record, Rotary):
        raise ConfigError(f"num_key_value_heads={kv_heads}: it must be {said('num_attention_heads', heads)} or null")
    if heads % kv_heads:
        raise ConfigError(
            f"{said('num_attention_heads', heads)} is no multiple of num_key_value_heads={kv_heads}: each head of the "
            "keys serves as many of the queries"
        )
    if not getattr(record, "head_dim", None) and record.hidden_size % heads:
        raise ConfigError(
            f"{said('hidden_size', record.hidden_size)} is no multiple of {said('num_attention_heads', heads)}"
        )
    if (rotated := getattr(record, "qk_rope_head_dim", 0)) % 2:
        raise ConfigError(f"qk_rope_head_dim={rotated}: rotation takes pairs, so it must be even")
    if isinstance(record, Rotary) and record.head_size % 2:
        raise ConfigError(
            f"{said('hidden_size', record.hidden_size)} and {said('num_attention_heads', heads)} make heads of "
            f"{record.head_size} numbers, and rotation takes pairs: an even head_dim is needed"
        )
    if isinstance(record, Rotary):
        _check_long_factors(record, scaling_of(content), content.get("rope_parameters") or {})
    if (types := getattr(record, "layer_types", None)) and len(types) != record.num_hidden_layers:
        raise ConfigError(
            f"layer_types: it names {len(types)} layers, and num_hidden_layers={record.num_hidden_layers}"
        )
    _check_tokens(record, content, keys)


def _check_long_factors(record: Decoder, scaling: dict[str, Any] | None, parameters: dict[str, Any]) -> None:
    """Check that longrope has a factor for each pair of the numbers of a head that are turned."""
    if not scaling or scaling["rope_type"] != "longrope":
        return
    fraction = parameters.get("partial_rotary_factor") or getattr(record, "partial_rotary_factor", None) or 1.0
    pairs = int(record.head_size * fraction) // 2
    for name in ("short_factor", "long_factor"):
        if len(scaling[name]) != pairs:
            raise ConfigError(f"rope_scaling.{name} has {len(scaling[name])} numbers; a head here turns {pairs} pairs")


def _check_tokens(record: Decoder, content: dict[str, Any], keys: Mapping[str, Key]) -> None:
    """Refuse a token for which the embedding has no row, unless a library has written its default."""
    defaults = {entry.name: entry.default for entry in fields(record)}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = content.get(name)
        usual = (defaults[name], keys[name].paddlenlp)
        for token in value if isinstance(value, list) else [value]:
            if token is not None and token >= record.vocab_size and value not in usual:
                raise ConfigError(
                    f"{name}={short(value)}: it must be below vocab_size={record.vocab_size}, or null where the model "
                    "has no such token"
                )


def remarks(config: ModelConfig) -> list[str]:
    """Return the lines that a program says once of a ModelConfig: what of the file is left out, and unknown keys."""
    found = [config.left_out] if config.left_out else []
    if config.unknown:
        found.append(
            f"{config.source}: nothing here knows {', '.join(map(short, config.unknown))}; the model is built without"
        )
    return found


def check_computed(config: ModelConfig, backend: str | None = None) -> None:
    """Raise ConfigError for a model that PaddleNLP's layers and ours do not compute.

    backend: the one that must compute it, "none", "paddle" or "transformer_engine" (pd, te); None: either.
    """
    try:
        if backend == "none" and config.family.model_type not in PADDLENLP:
            raise ConfigError(no_class(config.family.title))
        _check_softcap(config, backend)
        for name, key in keys_of(type(config.record)).items():
            _check_only(config, name, key, backend)
        _check_head_dim(config)
    except ConfigError as error:
        raise ConfigError(f"{config.source}: {error}") from error


def _check_only(config: ModelConfig, name: str, key: Key, backend: str | None) -> None:
    word = next(iter(words_of(name, key, config.theirs)), name)
    value = config.content.get(word, getattr(config.record, name))
    possible = key.only
    if config.theirs and key.values and word in config.content:
        possible = (*key.values, *(each for each in key.only if each not in key.values.values()))
    has_class = config.family.model_type in PADDLENLP
    whose, remedy = f"PaddleNLP's {config.family.title} has" if has_class else f"{config.family.title} here has", ""
    if not possible and backend not in (None, "none"):
        possible, whose = key.ours, "backends paddle and transformer_engine have"
        remedy = "; use backend none, PaddleNLP's own layers"
    if possible and value not in possible:
        raise ConfigError(f"{word}={short(value)}: {whose} only {' or '.join(map(repr, possible))}{remedy}")


def _check_softcap(config: ModelConfig, backend: str | None) -> None:
    softcap = getattr(config.record, "attn_logit_softcapping", None)
    if softcap and backend == "transformer_engine":
        raise ConfigError(
            f"attn_logit_softcapping={softcap}: Transformer Engine's attention has no soft cap of the scores; use "
            "backend pd (paddle)"
        )


def _check_head_dim(config: ModelConfig) -> None:
    record = config.record
    if config.family.model_type not in PADDLENLP:  # whose models are ours
        return
    size = record.hidden_size // record.num_attention_heads
    if getattr(record, "head_dim", None) not in (None, size) or record.hidden_size % record.num_attention_heads:
        raise ConfigError(
            f"head_dim={record.head_size}: the heads of PaddleNLP's {config.family.title} have only hidden_size / "
            f"num_attention_heads = {size} numbers"
        )
