"""What config.json of each family says: its keys, their types, bounds, units and defaults, in one record a family.

A field's name is PaddleNLP's word. Its default is what transformers means where its config.json leaves the key out. Its
Key says the rest. The reader (`configs.reading`), its errors, the translation between the two languages and the page
docs/reference/config.md are made from the records; `python -m paddle_te.configs` writes the page.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from paddle_te.records import Record, record
from paddle_te.typed import Bounds

PADDLENLP, TRANSFORMERS = "PaddleNLP", "transformers"
SAME = object()  # as a default of PaddleNLP's: it is transformers'

# Beyond every model there is, with room: 671 billion parameters have 61 layers of width 7168.
LAYERS, WIDTH, FEED_FORWARD, HEADS, EXPERTS = 10_000, 2**20, 2**22, 2**16, 2**16
VOCABULARY, POSITIONS = 2**24, 2**30


class ConfigError(ValueError):
    """A config.json that is no model's, or that of a model which is not computed here; the message is one line."""


@dataclass(frozen=True)
class Key:
    """All that is said about a key of config.json beside its type and transformers' default.

    means: for the pages. unit: of its numbers.
    theirs: transformers' words, where they are others: the first is read, all are written; () where it has none.
    written_by: the library that alone has the key, None for both.
    paddlenlp: PaddleNLP's default, where it is not transformers'.
    only: the values with which every backend computes the model, the first being what no word means. Weights do not
    tell: those of a model with a sliding window have the names and shapes of one without.
    ours: the same of backends paddle and transformer_engine, where PaddleNLP's own layers have more.
    values: {transformers' value: PaddleNLP's}, where they are others; of two for one the first is written.
    carried: whether a conversion takes the value over; it does not where `only` leaves a single one.
    """

    means: str
    unit: str = ""
    theirs: tuple[str, ...] | None = None
    written_by: str | None = None
    paddlenlp: Any = SAME
    only: tuple[Any, ...] = ()
    ours: tuple[Any, ...] = ()
    values: dict[str, str] = field(default_factory=dict)
    carried: bool = True


def key(means: str, default: object = MISSING, bounds: Bounds | None = None, unit: str = "", **more: Any) -> Any:
    """Return a record's field. more: of Key."""
    metadata = {"key": Key(means, unit, **more)} | ({"bounds": bounds} if bounds else {})
    return field(default=default, metadata=metadata)


def count(means: str, most: int, unit: str, default: object = MISSING, **more: Any) -> Any:
    """Return a field for whole numbers from 1."""
    return key(means, default, Bounds(1, most), unit, **more)


def switch(means: str, only: tuple[Any, ...], **more: Any) -> Any:
    """Return a field that no conversion carries, as layers compute one value."""
    return key(means, only[0], only=only, carried=False, **more)


_FRACTION = Bounds(above=0, below=1)
_PROBABILITY = Bounds(least=0, below=1)
_FACTOR = Bounds(above=0, most=10**6)
_TOKEN, _TOKEN_OR_NONE = Bounds(0, VOCABULARY), Bounds(-1, VOCABULARY)  # transformers wrote -1 for no padding once
_LABEL = Bounds(-(2**31), 2**31 - 1)
_SHARE = Bounds(above=0, most=1)
_THETA = Bounds(above=0, most=10**12)
_COEFFICIENT = Bounds(least=0, most=10**6)
_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True)
class Scaling:
    """The scaling of rotary positions for long contexts: rope_scaling, in transformers 5 rope_parameters."""

    rope_type: str | None = None
    type: str | None = None  # older files'
    rope_theta: float | None = field(default=None, metadata={"bounds": _THETA})
    factor: float | None = field(default=None, metadata={"bounds": _FACTOR})
    original_max_position_embeddings: int | None = field(default=None, metadata={"bounds": Bounds(1, POSITIONS)})
    low_freq_factor: float | None = field(default=None, metadata={"bounds": _FACTOR})
    high_freq_factor: float | None = field(default=None, metadata={"bounds": _FACTOR})
    attention_factor: float | None = field(default=None, metadata={"bounds": _FACTOR})
    beta_fast: float | None = field(default=None, metadata={"bounds": _FACTOR})
    beta_slow: float | None = field(default=None, metadata={"bounds": _FACTOR})
    mscale: float | None = field(default=None, metadata={"bounds": _FACTOR})
    mscale_all_dim: float | None = field(default=None, metadata={"bounds": _FACTOR})
    short_factor: list[float] | None = field(default=None, metadata={"bounds": _FACTOR})
    long_factor: list[float] | None = field(default=None, metadata={"bounds": _FACTOR})
    partial_rotary_factor: float | None = field(default=None, metadata={"bounds": Bounds(above=0, most=1)})
    truncate: bool | None = None  # yarn's ramp begins and ends at whole pairs; null means true
    finetuned: bool | None = None  # says how the weights came to be
    # vLLM's: it multiplies yarn's own factor. transformers leaves it out, and so do the layers here.
    attn_factor: float | None = field(default=None, metadata={"bounds": _FACTOR})


@record
class Decoder(Record):
    """The keys of all families."""

    vocab_size: int = count("rows of the embedding and of the head", VOCABULARY, "tokens")
    hidden_size: int = count("width of a token between the layers", WIDTH, "numbers")
    intermediate_size: int = count("width of the MLP", FEED_FORWARD, "numbers")
    num_hidden_layers: int = count("decoder layers", LAYERS, "layers")
    num_attention_heads: int = count("heads of the queries, which divide hidden_size", HEADS, "heads")
    num_key_value_heads: int | None = count(
        "heads of the keys and values; they divide num_attention_heads, and null means as many", HEADS, "heads", None
    )
    max_position_embeddings: int = count("longest sequence", POSITIONS, "tokens", 2048)
    initializer_range: float = key("standard deviation of new weights", 0.02, Bounds(0, 1))
    tie_word_embeddings: bool = key("whether the embedding is the head", False)
    bos_token_id: int | None = key("the token that begins a text", 1, _TOKEN, "token id")
    eos_token_id: int | list[int] | None = key("the tokens that end one", 2, _TOKEN, "token id")
    pad_token_id: int | None = key(
        "the token that fills a batch; -1 and null mean none", None, _TOKEN_OR_NONE, "token id"
    )
    ignore_index: int = key(
        "the label that the loss leaves out", -100, _LABEL, "token id", theirs=(), written_by=PADDLENLP, carried=False
    )
    seq_length: int | None = count(
        "length of a run's sequences; training sets its own", POSITIONS, "tokens", None, written_by=PADDLENLP,
        carried=False,
    )  # fmt: skip
    dtype: str | None = key("precision of the weights beside the file", None, carried=False)
    torch_dtype: str | None = key("the same in transformers 4", None, written_by=TRANSFORMERS, carried=False)
    architectures: list[str] | None = key("the class of the whole model", None, carried=False)
    model_type: str | None = key("the family; null means llama", None, carried=False)

    @property
    def kv_heads(self) -> int:
        """num_key_value_heads, filled in."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Numbers of a head."""
        return getattr(self, "head_dim", None) or self.hidden_size // self.num_attention_heads


@record
class Rotary(Decoder):
    """The keys of the families that have rotary positions, RMSNorm and a gated MLP."""

    rms_norm_eps: float = key("what a norm adds before the root", 1e-6, _FRACTION)
    head_dim: int | None = count(
        "width of a head, an even number; null means hidden_size / num_attention_heads, and PaddleNLP's models have no "
        "other", WIDTH, "numbers", None, carried=False,
    )  # fmt: skip
    hidden_act: str = switch("the MLP's activation", ("silu",))
    attention_dropout: float = switch("dropout of attention's weights", (0.0,))
    rope_theta: float = key("base of the rotary angles", 10000.0, _THETA, carried=False)
    rope_scaling: Scaling | None = key("scaling of the rotary positions", None, carried=False)
    rope_parameters: Scaling | None = key(
        "rope_theta and rope_scaling in transformers 5", None, written_by=TRANSFORMERS, carried=False
    )
    rope_scaling_type: str | None = key(
        "scaling of the rotary positions", None, written_by=PADDLENLP, only=(None,), carried=False
    )
    rope_scaling_factor: float | None = key(
        "rope_scaling_type's", None, _FACTOR, written_by=PADDLENLP, paddlenlp=1.0, carried=False
    )
    layer_types: list[str] | None = key(
        "the attention of each layer", None, Bounds(among=("full_attention",)), written_by=TRANSFORMERS, carried=False
    )


@record
class Llama(Rotary):
    """config.json of model_type llama."""

    pad_token_id: int | None = key(
        "the token that fills a batch; -1 and null mean none", None, _TOKEN_OR_NONE, "token id", paddlenlp=0
    )
    attention_bias: bool = switch("biases of attention's projections", (False,))
    mlp_bias: bool = switch("biases of the MLP's projections", (False,))
    sliding_window: int | None = switch("tokens that attention sees", (None,), unit="tokens")
    pretraining_tp: int | None = count(
        "slices in which transformers computes the same products", HEADS, "", 1, written_by=TRANSFORMERS, carried=False
    )
    rope_scaling_type: str | None = key(
        "scaling of the rotary positions", None, Bounds(among=("linear", "ntk", "dynamic_ntk")),
        written_by=PADDLENLP, carried=False,
    )  # fmt: skip
    alibi: bool = key("positions by ALiBi, not by rotation", False, written_by=PADDLENLP, ours=(False,), carried=False)
    use_long_sequence_strategies: bool = key(
        "positions by long_sequence_strategy_type", False, written_by=PADDLENLP, ours=(False,), carried=False
    )


@record
class Qwen2(Rotary):
    """config.json of model_type qwen2."""

    num_key_value_heads: int | None = count(
        "heads of the keys and values; they divide num_attention_heads, and null means as many", HEADS, "heads", 32
    )
    max_position_embeddings: int = count("longest sequence", POSITIONS, "tokens", 32768)
    bos_token_id: int | None = key("the token that begins a text", None, _TOKEN, "token id", paddlenlp=151643)
    eos_token_id: int | list[int] | None = key("the tokens that end one", None, _TOKEN, "token id", paddlenlp=151643)
    pad_token_id: int | None = key(
        "the token that fills a batch; -1 and null mean none", None, _TOKEN_OR_NONE, "token id", paddlenlp=0
    )
    use_sliding_window: bool = switch("whether sliding_window counts", (False,))
    sliding_window: int | None = count(
        "tokens that attention sees, with use_sliding_window", POSITIONS, "tokens", 4096, carried=False
    )
    max_window_layers: int | None = key(
        "the layers that use_sliding_window leaves alone", 28, Bounds(0, LAYERS), "layers", carried=False
    )


@record
class Qwen3(Qwen2):
    """config.json of model_type qwen3."""

    head_dim: int = count("width of a head, an even number", WIDTH, "numbers", 128)
    attention_bias: bool = switch("biases of attention's projections", (False,))


@record
class Phi3(Rotary):
    """config.json of model_type phi3, which Phi-4 has."""

    rms_norm_eps: float = key("what a norm adds before the root", 1e-5, _FRACTION)
    max_position_embeddings: int = count("longest sequence", POSITIONS, "tokens", 4096)
    original_max_position_embeddings: int | None = count("that of the first training", POSITIONS, "tokens", 4096)
    partial_rotary_factor: float = key("share of a head that is rotated", 1.0, _SHARE)
    sliding_window: int | None = count("tokens that attention sees; null means all", POSITIONS, "tokens", None)
    attention_bias: bool = switch("biases of attention's projections", (False,))
    resid_pdrop: float = switch("dropout of what is added to the residual", (0.0,))
    embd_pdrop: float = switch("dropout of the embedding", (0.0,))
    eos_token_id: int | list[int] | None = key("the tokens that end one", 32000, _TOKEN, "token id")
    pad_token_id: int | None = key("the token that fills a batch", 32000, _TOKEN_OR_NONE, "token id")


@record
class Olmo2(Rotary):
    """config.json of model_type olmo2."""

    rms_norm_eps: float = key("what a norm adds before the root", 1e-5, _FRACTION)
    attention_bias: bool = switch("biases of attention's projections", (False,))
    bos_token_id: int | None = key("the token that begins a text", None, _TOKEN, "token id")
    eos_token_id: int | list[int] | None = key("the tokens that end one", 50279, _TOKEN, "token id")
    pad_token_id: int | None = key("the token that fills a batch", 1, _TOKEN_OR_NONE, "token id")


@record
class Glm4(Rotary):
    """config.json of model_type glm4, which GLM-4-0414 has."""

    rms_norm_eps: float = key("what a norm adds before the root", 1.5625e-07, _FRACTION)
    num_key_value_heads: int | None = count("heads of the keys and values", HEADS, "heads", 2)
    head_dim: int = count("width of a head, an even number", WIDTH, "numbers", 128)
    max_position_embeddings: int = count("longest sequence", POSITIONS, "tokens", 131072)
    partial_rotary_factor: float = key("share of a head that is rotated", 0.5, _SHARE)
    attention_bias: bool = key("biases of attention's projections", True, only=(False,))
    bos_token_id: int | None = key("the token that begins a text", None, _TOKEN, "token id")
    eos_token_id: int | list[int] | None = key("the tokens that end one", None, _TOKEN, "token id")
    pad_token_id: int | None = key("the token that fills a batch", 151329, _TOKEN_OR_NONE, "token id")


@record
class Gemma2(Rotary):
    """config.json of model_type gemma2."""

    vocab_size: int = count("rows of the embedding and of the head", VOCABULARY, "tokens", 256000)
    hidden_size: int = count("width of a token between the layers", WIDTH, "numbers", 2304)
    intermediate_size: int = count("width of the MLP", FEED_FORWARD, "numbers", 9216)
    num_hidden_layers: int = count("decoder layers", LAYERS, "layers", 26)
    num_attention_heads: int = count("heads of the queries", HEADS, "heads", 8)
    num_key_value_heads: int | None = count("heads of the keys and values", HEADS, "heads", 4)
    head_dim: int = count("width of a head, an even number", WIDTH, "numbers", 256)
    max_position_embeddings: int = count("longest sequence", POSITIONS, "tokens", 8192)
    tie_word_embeddings: bool = key("whether the embedding is the head", True)
    hidden_act: str = switch("what older files say beside hidden_activation", (_TANH,))
    hidden_activation: str = switch("the MLP's activation", (_TANH,))
    attention_bias: bool = switch("biases of attention's projections", (False,))
    query_pre_attn_scalar: float = key("scores are divided by its root", 256, Bounds(above=0, most=WIDTH))
    sliding_window: int | None = count("tokens that attention sees in most layers", POSITIONS, "tokens", 4096)
    sliding_window_pattern: int = switch("every so manieth layer sees all tokens", (2,), theirs=())
    layer_types: list[str] | None = key(
        "the attention of each layer; null means by sliding_window_pattern",
        None,
        Bounds(among=("full_attention", "sliding_attention")),
    )
    final_logit_softcapping: float | None = key("soft cap of the logits", 30.0, _FACTOR)
    attn_logit_softcapping: float | None = key("soft cap of the scores, which te refuses", 50.0, _FACTOR)
    bos_token_id: int | None = key("the token that begins a text", 2, _TOKEN, "token id")
    eos_token_id: int | list[int] | None = key("the tokens that end one", 1, _TOKEN, "token id")
    pad_token_id: int | None = key("the token that fills a batch", 0, _TOKEN_OR_NONE, "token id")


@record
class Gemma3(Gemma2):
    """config.json of model_type gemma3_text, or its text_config in one of model_type gemma3."""

    vocab_size: int = count("rows of the embedding and of the head", VOCABULARY, "tokens", 262208)
    max_position_embeddings: int = count("longest sequence", POSITIONS, "tokens", 131072)
    rope_theta: float = key("base of the rotary angles where a layer sees all tokens", 1e6, _THETA, carried=False)
    rope_local_base_freq: float = key("that of the layers with a sliding window", 10000.0, _THETA)
    sliding_window_pattern: int = count("every so manieth layer sees all tokens", LAYERS, "layers", 6)
    final_logit_softcapping: float | None = key("soft cap of the logits", None, _FACTOR)
    attn_logit_softcapping: float | None = switch("soft cap of the scores", (None,))


@record
class Mistral(Rotary):
    """config.json of model_type mistral."""

    num_key_value_heads: int | None = count(
        "heads of the keys and values; they divide num_attention_heads, and null means as many", HEADS, "heads", 8
    )
    max_position_embeddings: int = count("longest sequence", POSITIONS, "tokens", 131072)
    tie_word_embeddings: bool = key("whether the embedding is the head", False, only=(False,))
    sliding_window: int | None = count("tokens that attention sees; null means all", POSITIONS, "tokens", 4096)


@record
class Multiplied:
    """The factors of Granite's families."""

    embedding_multiplier: float = key("what embedded tokens are multiplied by", 1.0, _FACTOR)
    residual_multiplier: float = key("what each half of a layer is multiplied by before it is added", 1.0, _FACTOR)
    attention_multiplier: float = key("what scores are multiplied by before the softmax", 1.0, _FACTOR)
    logits_scaling: float = key("what logits are divided by", 1.0, _FACTOR)


@record
class Granite(Multiplied, Rotary):
    """config.json of model_type granite, which Granite 3 has."""

    attention_bias: bool = switch("biases of attention's projections", (False,))
    mlp_bias: bool = switch("biases of the MLP's projections", (False,))


@record
class WithExperts:
    """The keys of the families whose layers have experts."""

    num_experts_per_tok: int = count("experts that a token gets", EXPERTS, "experts", 8)
    router_aux_loss_coef: float = key("factor of the loss that balances the experts' load", 0.001, _COEFFICIENT)
    output_router_logits: bool = key(
        "whether transformers adds that loss; training here does, by router_aux_loss_coef", False,
        written_by=TRANSFORMERS, carried=False,
    )  # fmt: skip


@record
class ManyExperts(WithExperts):
    """The same of the families whose experts are many and small."""

    num_experts: int = count("experts of a layer", EXPERTS, "experts", 128)
    norm_topk_prob: bool = key("whether the probabilities of a token's experts have the sum 1", False)


@record
class SomeLayers(ManyExperts):
    """The same of the families in which some layers may have an MLP, of another width than an expert."""

    moe_intermediate_size: int = count("width of an expert", FEED_FORWARD, "numbers", 768)
    decoder_sparse_step: int = count("each so-manieth layer has experts", LAYERS, "layers", 1)
    mlp_only_layers: list[int] | None = key("layers without experts, numbered from 0", None, Bounds(0, LAYERS))


@record
class Qwen2Moe(SomeLayers, Qwen2):
    """config.json of model_type qwen2_moe, which Qwen1.5-MoE has."""

    num_key_value_heads: int | None = count("heads of the keys and values", HEADS, "heads", 16)
    num_experts: int = count("experts of a layer", EXPERTS, "experts", 60)
    num_experts_per_tok: int = count("experts that a token gets", EXPERTS, "experts", 4)
    moe_intermediate_size: int = count("width of an expert", FEED_FORWARD, "numbers", 1408)
    shared_expert_intermediate_size: int = count(
        "width of the MLP that all tokens go through besides", FEED_FORWARD, "numbers", 5632
    )
    qkv_bias: bool = switch("biases of the projections to queries, keys and values", (True,))


@record
class Qwen3Moe(SomeLayers, Qwen3):
    """config.json of model_type qwen3_moe."""

    num_key_value_heads: int | None = count("heads of the keys and values", HEADS, "heads", 4)
    head_dim: int | None = count(  # type: ignore[assignment]  # Qwen3 without experts must say it
        "width of a head, an even number; null means hidden_size / num_attention_heads", WIDTH, "numbers", None
    )


@record
class Olmoe(ManyExperts, Rotary):
    """config.json of model_type olmoe, whose intermediate_size is the width of an expert."""

    rms_norm_eps: float = key("what a norm adds before the root", 1e-5, _FRACTION)
    max_position_embeddings: int = count("longest sequence", POSITIONS, "tokens", 4096)
    num_experts: int = count("experts of a layer", EXPERTS, "experts", 64)
    router_aux_loss_coef: float = key("factor of the loss that balances the experts' load", 0.01, _COEFFICIENT)
    attention_bias: bool = switch("biases of attention's projections", (False,))
    clip_qkv: float | None = switch("limit of queries, keys and values", (None,))
    bos_token_id: int | None = key("the token that begins a text", None, _TOKEN, "token id")
    eos_token_id: int | list[int] | None = key("the tokens that end one", 50279, _TOKEN, "token id")
    pad_token_id: int | None = key("the token that fills a batch", 1, _TOKEN_OR_NONE, "token id")


@record
class Mixtral(WithExperts, Rotary):
    """config.json of model_type mixtral, whose intermediate_size is the width of an expert."""

    rms_norm_eps: float = key("what a norm adds before the root", 1e-5, _FRACTION)
    num_key_value_heads: int | None = count("heads of the keys and values", HEADS, "heads", 8)
    max_position_embeddings: int = count("longest sequence", POSITIONS, "tokens", 131072)
    rope_theta: float = key("base of the rotary angles", 1e6, _THETA, carried=False)
    sliding_window: int | None = count("tokens that attention sees; null means all", POSITIONS, "tokens", None)
    num_local_experts: int = count("experts of a layer", EXPERTS, "experts", 8)
    num_experts_per_tok: int = count("experts that a token gets", EXPERTS, "experts", 2)
    router_jitter_noise: float = switch("noise of what the router sees in training", (0.0,))


@dataclass(frozen=True)
class Quantization:
    """quantization_config of weights that are stored in MXFP4, which are dequantized as they are read."""

    quant_method: str = field(metadata={"bounds": Bounds(among=("mxfp4",))})
    modules_to_not_convert: list[str] | None = None
    dequantize: bool | None = None


@record
class GptOss(WithExperts, Rotary):
    """config.json of model_type gpt_oss, whose intermediate_size is the width of an expert."""

    vocab_size: int = count("rows of the embedding and of the head", VOCABULARY, "tokens", 201088)
    hidden_size: int = count("width of a token between the layers", WIDTH, "numbers", 2880)
    intermediate_size: int = count("width of an expert", FEED_FORWARD, "numbers", 2880)
    num_hidden_layers: int = count("decoder layers", LAYERS, "layers", 36)
    num_attention_heads: int = count("heads of the queries", HEADS, "heads", 64)
    num_key_value_heads: int | None = count("heads of the keys and values", HEADS, "heads", 8)
    head_dim: int = count("width of a head, an even number", WIDTH, "numbers", 64)
    rms_norm_eps: float = key("what a norm adds before the root", 1e-5, _FRACTION)
    max_position_embeddings: int = count("longest sequence", POSITIONS, "tokens", 131072)
    rope_theta: float = key("base of the rotary angles", 150000.0, _THETA, carried=False)
    attention_bias: bool = switch("biases of attention's projections", (True,))
    sliding_window: int | None = count("tokens that attention sees in every other layer", POSITIONS, "tokens", 128)
    sliding_window_pattern: int = switch("every so manieth layer sees all tokens", (2,), theirs=())
    layer_types: list[str] | None = key(
        "the attention of each layer; null means by sliding_window_pattern",
        None,
        Bounds(among=("full_attention", "sliding_attention")),
    )
    num_local_experts: int = count("experts of a layer", EXPERTS, "experts", 128)
    num_experts_per_tok: int = count("experts that a token gets", EXPERTS, "experts", 4)
    router_aux_loss_coef: float = key(
        "not read: training has no such loss unless --moe_aux_loss_coeff asks for it", 0.9, _COEFFICIENT
    )
    swiglu_limit: float = switch("where the activation's input is clamped", (7.0,))
    experts_per_token: int | None = count(
        "what OpenAI calls num_experts_per_tok", EXPERTS, "experts", None, written_by=TRANSFORMERS, carried=False
    )
    initial_context_length: int | None = count(
        "the length of the first training", POSITIONS, "tokens", None, written_by=TRANSFORMERS, carried=False
    )
    quantization_config: Quantization | None = key(
        "how the experts' weights are stored", None, written_by=TRANSFORMERS, carried=False
    )
    bos_token_id: int | None = key("the token that begins a text", None, _TOKEN, "token id")
    eos_token_id: int | list[int] | None = key("the tokens that end one", None, _TOKEN, "token id")


@record
class GraniteMoe(WithExperts, Multiplied, Rotary):
    """config.json of model_type granitemoe, whose intermediate_size is the width of an expert."""

    num_local_experts: int = count("experts of a layer", EXPERTS, "experts", 8)
    num_experts_per_tok: int = count("experts that a token gets", EXPERTS, "experts", 2)
    attention_bias: bool = switch("biases of attention's projections", (False,))


@record
class Glam(WithExperts, Decoder):
    """config.json of model_type glam, this project's: GPT with experts, whose width is intermediate_size, too."""

    head_dim: int | None = count(
        "width of a head; null means hidden_size / num_attention_heads", WIDTH, "numbers", None
    )
    max_position_embeddings: int = count("learned positions: the longest sequence", POSITIONS, "tokens", 2048)
    num_experts: int = count("experts of a layer", EXPERTS, "experts", 64)
    num_experts_per_tok: int = count("experts that a token gets", EXPERTS, "experts", 2)
    router_aux_loss_coef: float = key("factor of the loss that balances the experts' load", 0.01, _COEFFICIENT)
    decoder_sparse_step: int = count("each so-manieth layer has experts", LAYERS, "layers", 2)
    hidden_activation: str = switch("the activation of MLPs and experts", ("gelu",))
    hidden_dropout_prob: float = switch("dropout of what is added to the residual", (0.0,))
    attention_probs_dropout_prob: float = switch("dropout of attention's weights", (0.0,))
    layer_norm_eps: float = key("what a norm adds before the root", 1e-5, _FRACTION)
    tie_word_embeddings: bool = key("the embedding is the head", True, only=(True,))


@record
class DeepseekV2(Rotary):
    """config.json of model_type deepseek_v2, which DeepSeek-V2 and DeepSeek-V2-Lite have."""

    kv_lora_rank: int = count("width of the latent vector of keys and values", WIDTH, "numbers", 512)
    q_lora_rank: int | None = count(
        "width of the queries' latent vector; null means that they have none", WIDTH, "numbers", 1536
    )
    qk_nope_head_dim: int = count("numbers of a head that are not rotated", WIDTH, "numbers", 128)
    qk_rope_head_dim: int = count("numbers of a head that are rotated, an even number", WIDTH, "numbers", 64)
    v_head_dim: int = count("width of a head of the values", WIDTH, "numbers", 128)
    qk_head_dim: int | None = count(
        "qk_nope_head_dim and qk_rope_head_dim together; nothing reads it", WIDTH, "numbers", None,
        written_by=TRANSFORMERS, carried=False,
    )  # fmt: skip
    head_dim: int | None = count(
        "what transformers calls qk_rope_head_dim, too; nothing reads it", WIDTH, "numbers", None,
        written_by=TRANSFORMERS, carried=False,
    )  # fmt: skip
    attention_bias: bool = switch("biases of attention's projections", (False,))
    moe_intermediate_size: int = count("width of an expert", FEED_FORWARD, "numbers", 1407)
    n_routed_experts: int = count("experts of a layer", EXPERTS, "experts", 64)
    n_shared_experts: int | None = count(
        "width, in experts, of the MLP that all tokens go through besides; null means none", EXPERTS, "experts", None
    )
    num_experts_per_tok: int = count("experts that a token gets", EXPERTS, "experts", 6)
    first_k_dense_replace: int = key("layers without experts, at the beginning", 0, Bounds(0, LAYERS), "layers")
    moe_layer_freq: int = count("each layer whose number it divides has experts", LAYERS, "layers", 1)
    scoring_func: str = key("of the router's logits", "softmax", only=("softmax",))
    topk_method: str = key(
        "how experts are chosen: of all, or of the groups with the best ones", "greedy",
        only=("greedy", "group_limited_greedy"),
    )  # fmt: skip
    n_group: int | None = count("groups of experts", EXPERTS, "groups", None)
    topk_group: int | None = count("groups from which a token's experts are chosen", EXPERTS, "groups", None)
    norm_topk_prob: bool = key("whether the probabilities of a token's experts have the sum 1", False, only=(False,))
    routed_scaling_factor: float = key("what these probabilities are multiplied by", 1.0, _FACTOR)
    aux_loss_alpha: float = key("factor of the loss that balances the experts' load", 0.001, _COEFFICIENT)
    seq_aux: bool = key("whether that loss is of each sequence by itself", True)
    ep_size: int | None = count(
        "processes that divided the experts in DeepSeek's own code", EXPERTS, "", 1, carried=False
    )
    pretraining_tp: int | None = count(
        "slices in which transformers computes the same products", HEADS, "", 1, written_by=TRANSFORMERS, carried=False
    )
    bos_token_id: int | None = key("the token that begins a text", 100000, _TOKEN, "token id")
    eos_token_id: int | list[int] | None = key("the tokens that end one", 100001, _TOKEN, "token id")

    @property
    def head_size(self) -> int:
        """Numbers of a head that are rotated."""
        return self.qk_rope_head_dim


@record
class DeepseekV3(DeepseekV2):
    """config.json of model_type deepseek_v3, which DeepSeek-V3, DeepSeek-R1 and Moonlight have."""

    max_position_embeddings: int = count("longest sequence", POSITIONS, "tokens", 4096)
    moe_intermediate_size: int = count("width of an expert", FEED_FORWARD, "numbers", 2048)
    n_routed_experts: int = count("experts of a layer", EXPERTS, "experts", 256)
    n_shared_experts: int | None = count(
        "width, in experts, of the MLP that all tokens go through besides; null means none", EXPERTS, "experts", 1
    )
    num_experts_per_tok: int = count("experts that a token gets", EXPERTS, "experts", 8)
    first_k_dense_replace: int = key("layers without experts, at the beginning", 3, Bounds(0, LAYERS), "layers")
    scoring_func: str = key("of the router's logits", "sigmoid", only=("sigmoid",))
    topk_method: str = key("how experts are chosen: by scores and a bias of each", "noaux_tc", only=("noaux_tc",))
    n_group: int | None = count("groups of experts", EXPERTS, "groups", 8)
    topk_group: int | None = count("groups from which a token's experts are chosen", EXPERTS, "groups", 4)
    norm_topk_prob: bool = key("whether the probabilities of a token's experts have the sum 1", True, only=(True,))
    routed_scaling_factor: float = key("what these probabilities are multiplied by", 2.5, _FACTOR)
    aux_loss_alpha: float = key(
        "factor of the loss that balances the experts' load, beside the bias; transformers has none", 0.0, _COEFFICIENT
    )
    rope_interleave: bool = switch("whether neighbouring numbers are rotated together", (True,))
    num_nextn_predict_layers: int | None = key(
        "layers that predict further tokens, whose weights are left out", 0, Bounds(0, LAYERS), "layers", carried=False
    )
    bos_token_id: int | None = key("the token that begins a text", 0, _TOKEN, "token id")
    eos_token_id: int | list[int] | None = key("the tokens that end one", 1, _TOKEN, "token id")


@record
class Gpt(Decoder):
    """config.json of model_type gpt, transformers' gpt2."""

    vocab_size: int = count("rows of the embedding", VOCABULARY, "tokens", 50257, paddlenlp=50304)
    hidden_size: int = count("width of a token between the layers", WIDTH, "numbers", 768, theirs=("n_embd",))
    intermediate_size: int | None = count(  # type: ignore[assignment]  # of the families only GPT may leave it out
        "width of the MLP; null means 4 x hidden_size",
        FEED_FORWARD,
        "numbers",
        None,
        theirs=("n_inner",),
        paddlenlp=3072,
    )
    num_hidden_layers: int = count("decoder layers", LAYERS, "layers", 12, theirs=("n_layer",))
    num_attention_heads: int = count("heads of the queries, keys and values", HEADS, "heads", 12, theirs=("n_head",))
    num_key_value_heads: int | None = count(
        "num_attention_heads, or null", HEADS, "heads", None, theirs=(), written_by=PADDLENLP, carried=False
    )
    max_position_embeddings: int = count(
        "learned positions: the longest sequence", POSITIONS, "tokens", 1024, theirs=("n_positions",),
        paddlenlp=512,
    )  # fmt: skip
    hidden_activation: str = key(
        "the MLP's activation", "gelu", theirs=("activation_function",), only=("gelu", "relu"),
        values={"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"},
    )  # fmt: skip
    hidden_dropout_prob: float = key(
        "dropout of what is added to the residual, and of the embedding", 0.1, _PROBABILITY,
        theirs=("resid_pdrop", "embd_pdrop"),
    )  # fmt: skip
    attention_probs_dropout_prob: float = key(
        "dropout of attention's weights", 0.1, _PROBABILITY, theirs=("attn_pdrop",)
    )
    bos_token_id: int | None = key("the token that begins a text", 50256, _TOKEN, "token id", paddlenlp=0)
    eos_token_id: int | list[int] | None = key("the tokens that end one", 50256, _TOKEN, "token id", paddlenlp=7)
    pad_token_id: int | None = key(
        "the token that fills a batch; -1 and null mean none", None, _TOKEN_OR_NONE, "token id", paddlenlp=0
    )
    tie_word_embeddings: bool = key("the embedding is the head", True, only=(True,))
    ignore_index: int = key(
        "the label that the loss leaves out; PaddleNLP's own default, 0, would leave out word 0",
        -100,
        _LABEL,
        "token id",
        theirs=(),
    )
    layer_norm_eps: float = switch("what a norm adds before the root", (1e-5,), theirs=("layer_norm_epsilon",))
    normalize_before: bool = switch("norms before attention and the MLP", (True,), theirs=(), written_by=PADDLENLP)
    scale_qk_coeff: float = switch("factor of the scores", (1.0,), theirs=(), written_by=PADDLENLP)
    rope_scaling: Scaling | None = switch("GPT has no rotary positions", (None,), theirs=(), written_by=PADDLENLP)
    scale_attn_weights: bool = switch(
        "whether scores are divided by the root of a head's width", (True,), written_by=TRANSFORMERS
    )
    scale_attn_by_inverse_layer_idx: bool = switch(
        "whether scores are divided by the layer's number", (False,), written_by=TRANSFORMERS
    )
    add_cross_attention: bool = switch("attention to an encoder's output", (False,), written_by=TRANSFORMERS)


SCHEMAS: dict[str, type[Decoder]] = {
    "llama": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "phi3": Phi3,
    "olmo2": Olmo2,
    "glm4": Glm4,
    "gemma2": Gemma2,
    "gemma3_text": Gemma3,
    "mistral": Mistral,
    "gpt": Gpt,
    "mixtral": Mixtral,
    "qwen2_moe": Qwen2Moe,
    "qwen3_moe": Qwen3Moe,
    "olmoe": Olmoe,
    "granite": Granite,
    "granitemoe": GraniteMoe,
    "glam": Glam,
    "gpt_oss": GptOss,
    "deepseek_v2": DeepseekV2,
    "deepseek_v3": DeepseekV3,
}


def keys_of(record: type[Decoder]) -> dict[str, Key]:
    """Return {PaddleNLP's word: Key} of a family."""
    return {entry.name: entry.metadata["key"] for entry in fields(record)}


def words_of(name: str, said: Key, theirs: bool) -> tuple[str, ...]:
    """Return config.json's words for a key, transformers' (theirs) or PaddleNLP's; () where transformers has none."""
    return said.theirs if theirs and said.theirs is not None else (name,)
