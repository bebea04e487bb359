"""The model that is evaluated: its arguments, the processes that share it, its weights, and who asks it."""

from dataclasses import dataclass
from pathlib import Path

import paddle.distributed as dist
from paddle.distributed import fleet

from paddle_te import fp8, upstream
from paddle_te.hosts.paddlenlp.evaluation.pipeline import PipelineScorer
from paddle_te.hosts.paddlenlp.evaluation.tasks import Scorer
from paddle_te.hosts.paddlenlp.loading import load_model, stage_layer_names
from paddle_te.hosts.paddlenlp.modeling import check_fp8_lm_head
from paddle_te.hosts.paddlenlp.training.arguments import check_weights_folder
from paddle_te.hosts.paddlenlp.training.health import not_finite
from paddle_te.models.decoder import fp8_recipe
from paddle_te.options import LAYER_OPTIONS, check_values, with_options
from paddle_te.options.scripts import EVALUATED_MODEL


@dataclass
@with_options(*EVALUATED_MODEL)
class EvaluatedModel:
    """Which model is evaluated, and how it computes. Raises ValueError and FileNotFoundError for what cannot be."""

    def __post_init__(self):
        check_values(self)
        check_weights_folder(self)
        self.tokenizer_name_or_path = self.tokenizer_name_or_path or self.model_name_or_path
        processes = dist.get_world_size()
        if processes % self.pipeline_parallel_degree:
            raise ValueError(
                f"--pipeline_parallel_degree {self.pipeline_parallel_degree}: it must divide the number of processes, "
                f"{processes}; paddle.distributed.launch starts several"
            )
        check_fp8_lm_head(self)


def _shared_by_processes(stages):
    """What a model's configuration has where all processes of this run share it; {} in a single one.

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


def make_model(args):
    """The model of an EvaluatedModel, in evaluation mode; of a pipeline, this process's stage.

    Raises ValueError, FileNotFoundError and what `load_model` raises.
    """
    upstream.apply("promotion_notices")
    settings = _shared_by_processes(args.pipeline_parallel_degree)
    settings |= {name: getattr(args, name) for name in LAYER_OPTIONS if hasattr(args, name)}
    if args.max_seq_length:
        settings["seq_length"] = args.max_seq_length
    folder, backend = args.model_name_or_path, args.transformer_engine_backend
    model = load_model(folder, backend, args.dtype, args.verify_checkpoint, args.lora_path, **settings)
    if args.use_fp8 and args.fp8_recipe == "delayed":
        states = sorted(Path(args.model_name_or_path).glob("fp8_state.pp*.pdparams"))
        if not states:
            raise FileNotFoundError(
                f"{args.model_name_or_path}: has no fp8_state.pp00.pdparams: delayed scaling needs the scales of "
                "training; or --fp8_recipe current"
            )
        fp8.load(states, model, fp8_recipe(model.config), stage_layer_names(model))
    _check_weights(model, args.lora_path or args.model_name_or_path)
    return model


def _check_weights(model, folder):
    """Raises ValueError for weights that are not finite: Paddle's CPU makes a plausible loss of them."""
    broken = not_finite([*model.named_parameters(), *model.named_buffers()])
    if broken:
        others = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise ValueError(
            f"the weights of {folder} hold NaN or infinity: {broken[0]}{others}; nothing was evaluated: take an "
            "earlier checkpoint"
        )


def make_scorer(args, model):
    """The Scorer that asks an EvaluatedModel's model for likelihoods."""
    length = args.max_seq_length or getattr(model.config, "seq_length", None) or model.config.max_position_embeddings
    scorer = PipelineScorer if args.pipeline_parallel_degree > 1 else Scorer
    return scorer(model, length, args.batch_size, progress=dist.get_rank() == 0)
