"""Families of models: what each is called, and in what its decoder layers differ from the others'.

What the classes of a host have stands with the host: `paddle_te.hosts.paddlenlp.capabilities`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

Config: TypeAlias = Any  # a model's configuration: a dict, or an object of a host's, which has no types


@dataclass(frozen=True)
class Family:
    """What one family is.

    model_type: as in config.json; PaddleNLP also puts it before the names of all weights but lm_head's.
    title: what PaddleNLP's and transformers' names of classes begin with.
    normalization: RMSNorm or LayerNorm, whose norms have biases.
    biases: the GEMMs that have some: none, those of "qkv", or "all".
    qk_norm: AttentionSpec's (`configs.spec`). latent: keys and values are made of a latent vector (its LatentSpec).
    norms: LayerSpec's. interleaved: RotationSpec's.
    gated: the MLP's activation is. learned_positions: there is an embedding of positions, and no rotation.
    tied: the head is always the embedding; else config.json says it.
    names: what PaddleNLP and transformers call its weights (`weights.names`).
    hf_model_type, hf_architecture: transformers' words, where they are not PaddleNLP's.
    window: attention is to the last `sliding_window` tokens, unless that is None. PaddleNLP's own layers see all. Where
    config.json has a sliding_window_pattern, every so manieth layer sees all.
    sinks: AttentionSpec's. router_bias: ExpertsSpec's. activation: the MLP's, where config.json's words do not tell it.
    aux_loss: config.json's router_aux_loss_coef counts; gpt-oss's, 0.9, is one that nobody trains with.
    zero_centered: norms multiply by 1 + weight. scaled: embedded tokens are multiplied by √hidden_size.
    part_of: the model_type of folders whose `text_config` says all this, beside what sees pictures.
    in_transformers: transformers has models of it, in whose folders its weights may be.
    """

    model_type: str
    title: str
    normalization: str = "RMSNorm"
    biases: str | None = None
    qk_norm: str | None = None
    latent: bool = False
    norms: str = "before"
    interleaved: bool = False
    gated: bool = True
    learned_positions: bool = False
    tied: bool = False
    names: str = "llama"
    hf_model_type: str | None = None
    hf_architecture: str | None = None
    window: bool = False
    sinks: bool = False
    router_bias: bool = False
    activation: str | None = None
    aux_loss: bool = True
    zero_centered: bool = False
    scaled: bool = False
    part_of: str | None = None
    in_transformers: bool = True

    @property
    def architecture(self) -> str:
        """The name of the class of a whole model, PaddleNLP's and transformers'."""
        return f"{self.title}ForCausalLM"

    def has_bias(self, part: str) -> bool:
        """Return whether a part of a layer, a norm or a projection such as q or down, has a bias."""
        if part.endswith("norm"):
            return self.normalization == "LayerNorm"
        if part in ("router", "shared_expert_gate"):
            return part == "router" and self.router_bias
        return self.biases == "all" or self.biases == "qkv" and part in ("q", "k", "v")


LLAMA = Family("llama", "Llama")
QWEN2 = Family("qwen2", "Qwen2", biases="qkv")
MISTRAL = Family("mistral", "Mistral", window=True)
QWEN3 = Family("qwen3", "Qwen3", qk_norm="head")
PHI3 = Family("phi3", "Phi3", names="phi3", window=True)
OLMO2 = Family("olmo2", "Olmo2", names="olmo2", qk_norm="all", norms="after")
GLM4 = Family("glm4", "Glm4", names="glm4", norms="both", interleaved=True)
MIXTRAL = Family("mixtral", "Mixtral", names="mixtral", window=True)
QWEN2_MOE = Family("qwen2_moe", "Qwen2Moe", biases="qkv", names="shared_experts")
QWEN3_MOE = Family("qwen3_moe", "Qwen3Moe", qk_norm="head", names="experts")
OLMOE = Family("olmoe", "Olmoe", qk_norm="all", names="experts")
GRANITE = Family("granite", "Granite")
GRANITE_MOE = Family("granitemoe", "GraniteMoe", names="granitemoe")
GPT_OSS = Family(
    "gpt_oss",
    "GptOss",
    biases="all",
    names="gpt_oss",
    window=True,
    sinks=True,
    router_bias=True,
    activation="clamped_swiglu",
    aux_loss=False,
)
DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2", names="deepseek", latent=True, interleaved=True)
DEEPSEEK_V3 = Family("deepseek_v3", "DeepseekV3", names="deepseek", latent=True, interleaved=True)
_GEMMA: Any = dict(names="gemma", norms="both", window=True, zero_centered=True, scaled=True)
GEMMA2 = Family("gemma2", "Gemma2", **_GEMMA)
GEMMA3 = Family("gemma3_text", "Gemma3", qk_norm="head", part_of="gemma3", **_GEMMA)
_GPT: Any = dict(normalization="LayerNorm", biases="all", gated=False, learned_positions=True, tied=True)
GPT = Family("gpt", "GPT", names="gpt", hf_model_type="gpt2", hf_architecture="GPT2LMHeadModel", **_GPT)
GLAM = Family("glam", "GLaM", names="experts", in_transformers=False, **_GPT)
_DENSE = (LLAMA, QWEN2, QWEN3, PHI3, OLMO2, GLM4, GEMMA2, GEMMA3, GRANITE, MISTRAL, GPT)
_MIXTURES = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITE_MOE, GLAM, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3)
_ALL = (*_DENSE, *_MIXTURES)
FAMILIES = {family.model_type: family for family in _ALL}


def value(config: Config, name: str, default: Any = None) -> Any:
    """Return what a model's configuration, a dict or PaddleNLP's object, says about something."""
    return config.get(name, default) if isinstance(config, dict) else getattr(config, name, default)


def is_tied(config: Config) -> bool:
    """Return whether a model's head is its embedding. config: its configuration, a dict or PaddleNLP's object, or None.

    PaddleNLP's GPT has no other, and leaves that out of its config.json.
    """
    if config is None:
        return False
    return bool(value(config, "tie_word_embeddings")) or family_of(config).tied


def family_of(config: Config) -> Family:
    """Return the Family of a model's configuration, a dict or PaddleNLP's object; Llama's where it names none.

    Raises:
        ValueError: it is none of FAMILIES, which are listed.
    """
    name = value(config, "model_type")
    if name is None:
        return LLAMA
    for family in FAMILIES.values():
        if name in (family.model_type, family.hf_model_type):
            return family
    raise ValueError(f"model_type={name!r} is not supported; it may be one of: {', '.join(FAMILIES)}")
