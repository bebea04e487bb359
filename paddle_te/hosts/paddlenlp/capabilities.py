"""What PaddleNLP's own classes have, family by family: what runs with backend none, and what their weights can be.

Imports nothing, so that launcher, planner and converter may read it.
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
