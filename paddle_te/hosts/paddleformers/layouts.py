"""Which layouts of several processes PaddleFormers 1.2.0 has for a Llama: the others are refused before work starts."""

from dataclasses import dataclass

from paddleformers.transformers import AutoConfig

_SHARDING = {"": 0, "stage1": 1, "stage2": 2, "stage3": 3}


@dataclass(frozen=True)
class Layout:
    """What a recipe says of a run's parallelism. Degrees are 1 where there is none; stage is sharding's, 0 for none."""

    tensor: int
    pipeline: int
    data: int
    stage: int
    sequence: dict  # {PaddleFormers' word: how many ranks share a sequence}

    @classmethod
    def of(cls, recipe, ranks):
        """The layout of a recipe in so many processes. Raises ValueError for more tensor parallel ranks and stages than
        these are, which PaddleFormers would leave out without a word, and for an unknown stage of sharding."""
        tensor, pipeline = (_degree(recipe, f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline"))
        if ranks % (tensor * pipeline):
            raise ValueError(
                f"tensor_model_parallel_size: {tensor} and pipeline_model_parallel_size: {pipeline} need a number of "
                f"processes that {tensor * pipeline} divides, and this is started with {ranks}; see "
                "docs/paddleformers.md for the command"
            )
        rest, value = ranks // (tensor * pipeline), recipe.get("sharding", "stage1") or ""
        if value not in _SHARDING:
            raise ValueError(f"sharding: {value!r}: it may be stage1, stage2, stage3, or '' for none")
        shares = (_degree(recipe, "sharding_parallel_size", rest) if value else 1) if rest > 1 else 1
        stage = _SHARDING[value] if shares > 1 else 0
        words = ("sep_parallel_size", "context_parallel_size")
        return cls(tensor, pipeline, rest // shares, stage, {word: _degree(recipe, word) for word in words})


def check_layout(recipe, ranks):
    """Raises ValueError, in one sentence with a remedy, for a layout of a recipe in so many processes that
    PaddleFormers 1.2.0 does not have for a Llama, with its own layers or with ours."""
    config = AutoConfig.from_pretrained(recipe["model_name_or_path"])
    if config.model_type == "llama":
        for problem in _missing(Layout.of(recipe, ranks), recipe, config):
            raise ValueError(problem)


def _missing(layout, recipe, config):
    """What PaddleFormers lacks for a recipe, a sentence each."""
    own_layers = recipe.get("transformer_engine_backend", "none") == "none"
    main_gradients, lora = recipe.get("amp_master_grad", False), recipe.get("fine_tuning") == "lora"
    for word, degree in layout.sequence.items():
        if degree > 1:
            yield (
                f"{word}: {degree}: PaddleFormers' Llama has no attention for sequences that ranks share; leave it at "
                "1, or train with PaddleNLP"
            )
    if layout.stage > 1 and layout.pipeline > 1:
        yield f"sharding: stage{layout.stage}: PaddleFormers has stage 1 alone in pipelines; set sharding: stage1"
    if layout.stage > 1 and layout.data > 1:
        yield (
            f"sharding: stage{layout.stage}: PaddleFormers has stage 1 alone beside data parallelism; leave "
            "sharding_parallel_size out, or set sharding: stage1"
        )
    if layout.stage == 3 and layout.tensor > 1:
        yield "sharding: stage3: PaddleFormers has stages 1 and 2 alone beside tensor parallelism; take one of these"
    if layout.stage == 3 and lora:
        yield "sharding: stage3: PaddleFormers cannot save a LoRA adapter of stage 3; set sharding: stage1 or stage2"
    if layout.stage and not main_gradients:
        yield (
            f"sharding: stage{layout.stage}: PaddleFormers shards the optimizer with float32 main gradients only; set "
            "bf16: true, fp16_opt_level: O2 and amp_master_grad: true, or sharding: '' for none"
        )
    if layout.tensor * layout.pipeline > 1 and not main_gradients and float(recipe.get("max_grad_norm", 1.0)) > 0:
        yield (
            "max_grad_norm: PaddleFormers clips gradients under tensor parallelism and in pipelines with float32 main "
            "gradients only; set bf16: true, fp16_opt_level: O2 and amp_master_grad: true, or max_grad_norm: 0"
        )
    if layout.pipeline > 1 and recipe.get("lora_path"):
        yield "lora_path: PaddleFormers loads no LoRA adapter in pipelines; train from it in another layout"
    if layout.pipeline > 1 and own_layers and _scales_positions(config):
        yield (
            "pipeline_model_parallel_size: PaddleFormers' own pipelines read neither the rope scaling nor the theta in "
            "rope_parameters; set transformer_engine_backend to paddle or transformer_engine"
        )
    if recipe.get("resume_from_checkpoint") and own_layers and _cannot_load(layout, recipe):
        yield (
            "resume_from_checkpoint: PaddleFormers' own layers cannot load its checkpoints in sharding stage 2; set "
            "transformer_engine_backend to paddle or transformer_engine"
        )


def _degree(recipe, word, default=1):
    """A degree of a recipe, in which PaddleFormers takes -1 for none said."""
    degree = int(recipe.get(word) or -1)
    return default if degree < 1 else degree


def _cannot_load(layout, recipe):
    """Whether PaddleFormers' own Trainer fails where it loads a checkpoint of its default format."""
    flex = (recipe.get("load_checkpoint_format") or "flex_checkpoint") == "flex_checkpoint"
    return flex and layout.stage == 2


def _scales_positions(config):
    """Whether a model's angles are others than those of config.rope_theta alone."""
    rope = config.rope_parameters
    return rope.get("rope_type", "default") != "default" or rope["rope_theta"] != config.rope_theta
