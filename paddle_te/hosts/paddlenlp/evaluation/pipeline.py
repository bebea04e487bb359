"""Likelihoods from a model whose layers are divided among pipeline stages."""

from collections.abc import Sequence
from typing import Any

import paddle.distributed as dist
from paddle import Tensor
from paddle.distributed import fleet

from paddle_te.distributed import gather_objects
from paddle_te.host import HostModel
from paddle_te.hosts.paddlenlp.evaluation.tasks import Likelihood, Scorer


class PipelineScorer(Scorer):
    """A Scorer of a PaddleNLP pipeline model: every process asks, the last stage answers, and all get the answers.

    A batch passes through the stages as one micro-batch. So one stage computes while the others wait: stages are for
    models that are too large for fewer devices, and tensor parallelism is faster where it does.
    """

    def __init__(self, model: HostModel, *arguments: Any, **settings: Any) -> None:
        super().__init__(model, *arguments, **settings)
        self._stages = fleet.distributed_model(model)

    def _answers(self, ids: Tensor, rows: Sequence[list[int]], counts: Sequence[int]) -> list[Likelihood]:
        self._stages._p2p_helper.clear_meta_cache()  # batches differ in shape, which stages tell each other once
        outputs = self._stages.eval_batch(iter([(ids, None)]))
        mine = self._read(outputs[0], rows, counts) if self._stages.is_pipeline_last_stage() else None
        return gather_objects(mine, dist.get_world_size())[-1] or []  # ranks of the last stage are the last
