"""--merge_lora: write the model with the adapter in its weights when a run ends, and leave one that is there."""

import logging
from pathlib import Path

from paddle_te.data.tokenizer import AnyTokenizer
from paddle_te.folders import MERGED_FROM, weights_in
from paddle_te.host import HostArguments
from paddle_te.hosts.paddlenlp.training.finetune_trainer import FinetuneModelArguments
from paddle_te.manifest import write_through
from paddle_te.models.backend import is_native
from paddle_te.runs.checkpoints import MERGED, CheckpointNotSaved, move_aside
from paddle_te.runs.heartbeat import SAVING, Heartbeat
from paddle_te.runs.identity import fingerprint
from paddle_te.weights import CheckpointError, convert
from paddle_te.weights.contents import merge_command
from paddle_te.weights.files import check_new, check_place
from paddle_te.weights.folder import open_checkpoint
from paddle_te.weights.verification import SIZE

logger = logging.getLogger(__name__)


def _folder(args: HostArguments) -> Path:
    return Path(args.output_dir, MERGED)


def check_mergeable(args: HostArguments) -> None:
    """Raise CheckpointError where no merged model can be written.

    A run that trains may find one there, of its own end before it was started again.
    """
    (check_place if args.do_train else check_new)(_folder(args))


def merge(args: HostArguments, model_args: FinetuneModelArguments, tokenizer: AnyTokenizer) -> None:
    """Write the model with the adapter in its weights, in the layout of the run's layers, unless it is there.

    Another one that is there is moved aside. The base's files are read once more, tensor by tensor, so that neither fp8
    nor a layout of ranks matters. Raises CheckpointNotSaved.
    """
    base, folder = model_args.model_name_or_path, _folder(args)
    adapter = args.output_dir if args.do_train else str(model_args.lora_path)
    what = f"the model of {base} with the adapter in {adapter} in its weights"
    try:
        origin = _origin(base, adapter, args)
        if _is_of(folder, origin):
            logger.info(f"{folder} is there already: {what}")
            return
        _move_other(folder)
        _write(base, adapter, folder, args)
        tokenizer.save_pretrained(str(folder))
        write_through(folder / MERGED_FROM, origin.encode())
    except (CheckpointError, OSError) as error:
        raise CheckpointNotSaved(
            f"{error}. The adapter in {adapter} is whole: {merge_command(adapter, base)} merges it"
        ) from error
    logger.info(f"{folder} is complete: {what}")


def _origin(base: str, adapter: str, args: HostArguments) -> str:
    """Return a text that tells a merged model from that of other weights, or in another form."""
    return fingerprint([*weights_in(base), *weights_in(adapter)], [args.model_dtype, _layout(args)])


def _layout(args: HostArguments) -> str:
    return "pd" if is_native(args) else "te"


def _is_of(folder: Path, origin: str) -> bool:
    """Return whether a merged model is there, whole, and of this origin."""
    mark = folder / MERGED_FROM
    return mark.is_file() and mark.read_bytes() == origin.encode()


def _move_other(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()):
        kept = move_aside(folder.parent, [folder])
        logger.warning(f"{folder} was of other weights, or not complete, and was moved to {kept}")


def _write(base: str, adapter: str, folder: Path, args: HostArguments) -> None:
    kind, wanted, beat = open_checkpoint(base).layout.kind, _layout(args), Heartbeat().beat
    convert(
        base,
        folder,
        "reshard" if kind == wanted else f"{kind}2{wanted}",
        lora_path=adapter,
        dtype=args.model_dtype,
        tensor_parallel_degree=1,
        pipeline_parallel_degree=1,
        verify_checkpoint=SIZE,  # loading has compared the rest
        progress=False,
        tell=logger.warning,
        alive=lambda: beat(SAVING),
    )
