"""--freeze: weights of a whole model that are not trained."""

from collections.abc import Sequence

import paddle.distributed as dist

from paddle_te.configs.families import is_tied
from paddle_te.configs.spec import spec_of
from paddle_te.distributed import gather_objects
from paddle_te.host import HostArguments, HostConfig, HostModel
from paddle_te.hosts.paddlenlp.loading import layout_of
from paddle_te.weights.frozen import check_patterns, matching


def check_freeze(config: HostConfig, args: HostArguments) -> None:
    """Refuse what cannot be frozen, before the model is made.

    config: the model's. args: TrainingArguments with `freeze`. Raises ValueError.
    """
    if not args.freeze:
        return
    said = f"--freeze {' '.join(args.freeze)}"
    layout, tied = layout_of(config), is_tied(config)
    embedding, head = (layout.model_name(part) for part in ("embed", "lm_head"))
    names = [layout.full_name(place) for place in layout.tensors(spec_of(config))]
    check_patterns([name for name in names if not (tied and name == head)], args.freeze)
    if tied and args.pipeline_parallel_degree > 1 and matching([embedding], args.freeze):
        raise ValueError(
            f"{said} with --pipeline_parallel_degree {args.pipeline_parallel_degree}: the first and the last stage "
            f"have copies of {embedding}, whose gradients Paddle adds up; leave it out"
        )


def freeze(model: HostModel, patterns: Sequence[str] | None) -> None:
    """Freeze the weights in whose names in the whole model one of the patterns is found.

    They are those of a model, or of this pipeline stage. Collective. Raises ValueError where a stage would have
    nothing to train.
    """
    if not patterns:
        return
    weights = model.state_dict()
    for name in matching(weights, patterns):
        weights[name].stop_gradient = True
    trains = any(not weight.stop_gradient for weight in model.parameters())
    stages = gather_objects(trains, dist.get_world_size())
    if not all(stages):
        raise ValueError(
            f"--freeze {' '.join(patterns)}: rank {stages.index(False)} would have nothing to train, and a pipeline's "
            "stages must; freeze less, or take fewer stages"
        )
