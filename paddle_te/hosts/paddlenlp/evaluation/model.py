"""The model that is evaluated: its arguments, the processes that share it, its weights, and who asks it."""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import paddle.distributed as dist
from paddle.distributed import fleet

from paddle_te import fp8, upstream
from paddle_te.configs.rope import longest_sequence
from paddle_te.data.chat_template import ChatTemplate, Renderer
from paddle_te.data.tokenizer import AnyTokenizer
from paddle_te.host import HostConfig, HostModel
from paddle_te.hosts.paddlenlp.evaluation.pipeline import PipelineScorer
from paddle_te.hosts.paddlenlp.evaluation.tasks import Scorer
from paddle_te.hosts.paddlenlp.loading import load_model, stage_layer_names
from paddle_te.hosts.paddlenlp.training.arguments import check_weights_folder
from paddle_te.hosts.paddlenlp.training.health import not_finite
from paddle_te.models.decoder import recipe_of
from paddle_te.options import LAYER_OPTIONS, Option, check_values, with_options
from paddle_te.options.evaluation import EVALUATED_MODEL


@dataclass
@with_options(*EVALUATED_MODEL)
class EvaluatedModel:
    """Which model is evaluated, and how it computes. Raises ValueError and FileNotFoundError for what cannot be."""

    if TYPE_CHECKING:  # the options
        __options__: ClassVar[dict[str, Option]]

        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        check_values(self)
        check_weights_folder(self)
        self.tokenizer_name_or_path: str = getattr(self, "tokenizer_name_or_path", None) or self.model_name_or_path
        processes = dist.get_world_size()
        if processes % self.pipeline_parallel_degree:
            raise ValueError(
                f"--pipeline_parallel_degree {self.pipeline_parallel_degree}: it must divide the number of processes, "
                f"{processes}; paddle.distributed.launch starts several"
            )
        self.template_variables()

    def template_variables(self) -> dict[str, Any]:
        """Return --chat_template_kwargs, of which the harness makes an object by itself. Raise ValueError."""
        given = self.chat_template_kwargs
        try:
            variables = json.loads(given) if isinstance(given, str) else given or {}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"--chat_template_kwargs {given}: is not JSON: {error}") from error
        if not isinstance(variables, dict):
            raise ValueError(f'--chat_template_kwargs {given}: give an object, such as {{"enable_thinking": false}}')
        return variables


def make_template(args: EvaluatedModel, tokenizer: AnyTokenizer) -> ChatTemplate | None:
    """Return the chat template of a file or of the tokenizer. Raise ValueError for one that is not there."""
    template = ChatTemplate.of(tokenizer, str(args.tokenizer_name_or_path), args.chat_template)
    asked = getattr(args, "apply_chat_template", False)
    if template is not None:
        template = template.with_variables(args.template_variables())
        with Renderer(template) if asked else nullcontext():  # the harness would compile it after the model is read
            return template
    if args.template_variables():
        raise ValueError("--chat_template_kwargs: " + without_template(args.tokenizer_name_or_path))
    if asked:
        raise ValueError("--apply_chat_template: " + without_template(args.tokenizer_name_or_path))
    return None


def without_template(tokenizer_name: str) -> str:
    """Return what to do about a tokenizer without a chat template."""
    return (
        f"the tokenizer {tokenizer_name} has no chat template: give one in a file to --chat_template (Jinja, as "
        "Hugging Face's chat_template.jinja)"
    )


def read_length(args: EvaluatedModel, config: HostConfig) -> int:
    """Return how many tokens a model of this configuration sees. Raise ValueError for more than its positions."""
    longest = longest_sequence(config)
    if (args.max_seq_length or 0) > longest:
        raise ValueError(f"--max_seq_length {args.max_seq_length}: the model has {longest} positions")
    length = getattr(config, "seq_length", None) or config.max_position_embeddings
    return args.max_seq_length or min(length, longest)


def _shared_by_processes(stages: int) -> dict[str, Any]:
    """Return what a model's configuration has where all processes of this run share it; {} in a single one.

    They are those that paddle.distributed.launch has started. stages: of the pipeline; the processes of one stage have
    a part of each of its layers.
    """
    size = dist.get_world_size()
    if size == 1:
        return {}
    upstream.apply()  # first: some repairs are of what fleet begins with
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = dict(dp_degree=1, mp_degree=size // stages, pp_degree=stages)
    fleet.init(is_collective=True, strategy=strategy)
    return dict(
        tensor_parallel_degree=size // stages,
        tensor_parallel_rank=fleet.get_hybrid_communicate_group().get_model_parallel_rank(),
        tensor_parallel_output=False,
        pipeline_parallel_degree=stages,
    )


def make_model(args: EvaluatedModel) -> HostModel:
    """Return the model of an EvaluatedModel, in evaluation mode; of a pipeline, this process's stage.

    Raises ValueError, FileNotFoundError and what `load_model` raises.
    """
    upstream.apply("promotion_notices")
    settings = _shared_by_processes(args.pipeline_parallel_degree)
    settings |= {name: getattr(args, name) for name in LAYER_OPTIONS if hasattr(args, name)}
    if args.max_seq_length:
        settings["seq_length"] = args.max_seq_length
    folder, backend = args.model_name_or_path, args.transformer_engine_backend
    model = load_model(folder, backend, args.dtype, args.verify_checkpoint, args.lora_path, **settings)
    recipe = recipe_of(model.config)
    if recipe and recipe.kind == "delayed":
        states = sorted(Path(args.model_name_or_path).glob("fp8_state.pp*.pdparams"))
        if not states:
            raise FileNotFoundError(
                f"{args.model_name_or_path}: has no fp8_state.pp00.pdparams: delayed scaling needs the scales of "
                "training; or --fp8_recipe current"
            )
        fp8.load(states, model, recipe, stage_layer_names(model))
    _check_weights(model, args.lora_path or args.model_name_or_path)
    return model


def _check_weights(model: HostModel, folder: str) -> None:
    """Raise ValueError for weights that are not finite: Paddle's CPU makes a plausible loss of them."""
    broken = not_finite([*model.named_parameters(), *model.named_buffers()])
    if broken:
        others = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise ValueError(
            f"the weights of {folder} hold NaN or infinity: {broken[0]}{others}; nothing was evaluated: take an "
            "earlier checkpoint"
        )


def make_scorer(args: EvaluatedModel, model: HostModel) -> Scorer:
    """Return the Scorer that asks an EvaluatedModel's model for likelihoods."""
    length = read_length(args, model.config)
    scorer = PipelineScorer if args.pipeline_parallel_degree > 1 else Scorer
    return scorer(model, length, args.batch_size, progress=dist.get_rank() == 0)
