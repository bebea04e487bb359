"""What PaddleNLP's own classes have, family by family: what runs with backend none, and what their weights can be.

Imports nothing, so that launcher, planner and converter may read it. A family that is not in the table has a model
class of ours only (`hosts.paddlenlp.own_model`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Capabilities:
    """PaddleNLP's own classes of one family.

    pipeline: there is a pipeline model. sequence_parallel: layers have sequence parallelism. segment_parallel: ranks
    may share sequences (sep). fused: q, k and v, and gate and up, may be in one weight each. packed: the model takes
    the mask of packed documents.
    """

    pipeline: bool = True
    sequence_parallel: bool = True
    segment_parallel: bool = False
    fused: bool = True
    packed: bool = True


PADDLENLP = {
    "llama": Capabilities(segment_parallel=True),
    "qwen2": Capabilities(),
    "mistral": Capabilities(pipeline=False, sequence_parallel=False, fused=False, packed=False),
    "gpt": Capabilities(packed=False),
}


def has_pipeline(model_type: str) -> bool:
    """Return whether there is a pipeline model of a family: PaddleNLP's, or ours where PaddleNLP has no class."""
    return model_type not in PADDLENLP or PADDLENLP[model_type].pipeline


def no_class(title: str) -> str:
    """Why a family, by its title, does not run with backend none."""
    return (
        f"backend none: PaddleNLP has no class for {title}; use pd (paddle) or te (transformer_engine), which compute "
        "it with a model of this project"
    )
