"""What keeps the documents of packed sequences apart in a batch.

"rows" are lists of the documents' lengths, one for each row of the batch, which sum up to the row's tokens.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_te.data.questions import IGNORED
from paddle_te.host import HostArguments
from paddle_te.hosts.paddlenlp.training.datasets import DOCUMENT_FLAGS, DataArguments, collate_fn
from paddle_te.models.backend import is_native, ops_of
from paddle_te.ops import documents

Collate = Callable[[Sequence[Any]], dict[str, NDArray[Any]]]  # samples to a batch
logger = logging.getLogger(__name__)


def needs_mask(config: Any) -> bool:
    """Return whether a model's or a run's backend keeps documents apart by a mask on this device.

    PaddleNLP's layers always do. te does where cuDNN has no attention over packed documents, which the log says.
    """
    if is_native(config):
        return True
    try:
        ops_of(config).check_packed_attention()
    except ValueError as reason:
        logger.warning(f"{reason}; a mask of sequence × sequence numbers keeps the documents apart, which is slower")
        return True
    return False


def separation(rows: Sequence[Sequence[int]], masked: bool, pipeline: bool = False) -> dict[str, NDArray[Any]]:
    """Return {name: array} of what a model takes so that documents do not see each other.

    masked: a mask, bool [b, 1, s, s] (see `needs_mask`). Else the boundaries: cu_seqlens, or for a pipeline, whose
    stages exchange tensors of one shape, FlashMask's rows.
    """
    if masked:
        tokens = np.arange(sum(rows[0]))
        return {"attention_mask": (tokens[:, None] >= tokens) & (tokens[:, None] < documents.flash_mask(rows)[:, None])}
    if pipeline:
        return {"attn_mask_startend_row_indices": documents.flash_mask(rows)}
    return {"cu_seqlens": documents.cu_seqlens(rows)}


def split_at(end_of_document: int, tokens: NDArray[Any]) -> list[list[int]]:
    """Return the lengths of the documents in each row of tokens [b, s]; that token, or a row's end, ends one."""
    rows = []
    for row in tokens:
        inside = np.flatnonzero(row[:-1] == end_of_document) + 1
        rows.append(np.diff([0, *inside, len(row)]).tolist())
    return rows


@dataclass(frozen=True)
class DocumentCollator:
    """Make batches of sequences that hold several documents each.

    They are those of `datasets.collate_fn`, and with them what keeps the documents apart.

    end_of_document: the token that ends one. reset_attention_mask, reset_position_ids, eod_mask_loss: as Megatron's
    flags, the last one as its `get_ltor_masks_and_position_ids`: without the loss where that token is the input, of
    which the label is the first token of the next document. masked, pipeline: as `separation`'s.
    """

    end_of_document: int
    reset_attention_mask: bool
    reset_position_ids: bool
    eod_mask_loss: bool
    masked: bool
    pipeline: bool
    vocab_size: int | None = None

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
        batch = collate_fn(samples, self.vocab_size)
        rows = split_at(self.end_of_document, batch["input_ids"])
        if self.reset_position_ids:
            batch["position_ids"] = documents.positions(rows)
        if self.eod_mask_loss:
            batch["labels"] = np.where(batch["input_ids"] == self.end_of_document, IGNORED, batch["labels"])
        if self.reset_attention_mask:
            batch |= separation(rows, self.masked, self.pipeline)
        return batch


def make_collator(
    data_args: DataArguments, training_args: HostArguments, end_of_document: int | None, vocab_size: int | None = None
) -> Collate:
    """Return what makes batches of pretraining's samples.

    end_of_document: a token, or None where there is none. vocab_size: the model's, as `collate_fn` takes it.

    Raises ValueError for arguments that do not fit each other.
    """
    flags = {name: getattr(data_args, name) for name in DOCUMENT_FLAGS}
    if not any(flags.values()):
        return partial(collate_fn, vocab_size=vocab_size)
    flag = "--" + next(name for name, given in flags.items() if given)
    if end_of_document is None:
        raise ValueError(
            f"{flag}: neither the tokenizer nor the model's configuration has an eos token, which ends documents"
        )
    return DocumentCollator(
        end_of_document,
        **flags,
        masked=data_args.reset_attention_mask and needs_mask(training_args),
        pipeline=training_args.pipeline_parallel_degree > 1,
        vocab_size=vocab_size,
    )
