"""Convert checkpoints: between layouts, file formats and degrees of parallelism.

    paddle-te convert --mode pd2te --input_ckpt_path DIR --output_ckpt_path NEW_DIR
    paddle-te convert --inspect --input_ckpt_path DIR

Layouts: pd, PaddleNLP's native one; te, Transformer Engine's; hf, Hugging Face's. `--mode reshard` keeps the layout.
te2formers and pd2formers write hf, with the optimizer's and the Trainer's state from which PaddleFormers resumes.
Files: single, sharded with an index, or one to each tensor and pipeline parallel rank (model_state.tp00_pp01.pdparams);
other degrees and another format may be asked for in every mode.

The output folder must be new or empty and appears only when it is complete; the input is only read. The heads come
from config.json; without one they must be given. Conversions to pd give unfused weights, or weights fused as they were
before pd2te (noted in config.json); --[no-]fuse_attention_qkv and --[no-]fuse_attention_ffn decide otherwise.

--lora_path adds a LoRA adapter to the weights on the way. An adapter's own folder as the input becomes PEFT's with
--mode te2hf or pd2hf.
"""

import argparse
import re
import sys
from typing import Any

from paddle_te.folders import is_adapter
from paddle_te.options.option import PATH, RANKS, WORKERS
from paddle_te.options.training import LEVELS
from paddle_te.weights import CheckpointError, convert
from paddle_te.weights.adapters.peft import convert_adapter
from paddle_te.weights.conversion import FORMATS, MODES
from paddle_te.weights.inspection import inspect
from paddle_te.weights.tensors import NUMBERS
from paddle_te.weights.verification import FULL


def size(text: str) -> int:
    """Return the bytes of "5GB", "500MB" or a plain number."""
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r}: a size such as 5GB or 500MB")
    return int(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " ")


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input_ckpt_path", type=PATH.argument, required=True, help="folder of the checkpoint to convert"
    )
    parser.add_argument("--output_ckpt_path", type=PATH.argument, help="new or empty folder for the result")
    parser.add_argument(
        "--mode", choices=MODES, help="from which layout to which (pd2te; with --lora_path reshard, the input's)"
    )
    parser.add_argument(
        "--lora_path",
        type=PATH.argument,
        help="folder of a LoRA adapter, PEFT's, PaddleNLP's or PaddleFormers', to add to the weights",
    )
    parser.add_argument(
        "--inspect",
        action="store_true",
        help="only show what the input holds: layout, dtypes, degrees, step, names and shapes; reads no tensor",
    )
    parser.add_argument("--num_attention_heads", type=RANKS.argument, help="only where there is no config.json")
    parser.add_argument("--num_key_value_heads", type=RANKS.argument, help="likewise; as many as heads if left out")
    for flag in ("--fuse_attention_qkv", "--fuse_attention_ffn"):
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, help="fuse these weights, or not (to pd)")
    parser.add_argument("--format", choices=FORMATS, help="of the output; if left out, as the input")
    for flag in ("--tensor_parallel_degree", "--pipeline_parallel_degree"):
        parser.add_argument(flag, type=RANKS.argument, help="of the output; if left out, as the input; 1 merges")
    parser.add_argument("--virtual_pp_degree", type=RANKS.argument, help="of the output; if left out, 1")
    parser.add_argument("--dtype", choices=NUMBERS, help="of the output; if left out, as the input")
    parser.add_argument("--max_shard_size", type=size, help="larger files are written in shards (10GB)")
    parser.add_argument("--workers", type=WORKERS.argument, default=1, help="files written at the same time (1)")
    parser.add_argument(
        "--with_optimizer",
        action="store_true",
        help="carry optimizer and Trainer state along (fp8 scales from te to te), as a unified checkpoint that "
        "training resumes in any degrees with --unified_checkpoint 1",
    )
    parser.add_argument(
        "--verify_checkpoint",
        choices=LEVELS,
        default=FULL,
        help="what an input with a manifest must first agree with it in: sizes and checksums, sizes, nothing (full)",
    )
    parser.add_argument("--verify", action="store_true", help="first compare the input with its checksums.json")
    parser.add_argument("--checksums", action="store_true", help="write checksums.json (SHA-256) for the output")
    return parser


def _convert_adapter(
    input_path: str, output_path: str, arguments: dict[str, Any], parser: argparse.ArgumentParser
) -> None:
    """Make PEFT's folder of an adapter's. Raises CheckpointError for flags that an adapter has no use for."""
    used = "mode", "dtype", "verify_checkpoint", "workers"
    for name, value in arguments.items():
        if name not in used and value != parser.get_default(name):
            raise CheckpointError(f"--{name}: {input_path} holds a LoRA adapter, which it is not for; leave it out")
    mode, dtype, verify_checkpoint = (arguments[name] for name in used[:3])
    convert_adapter(input_path, output_path, mode, dtype, verify_checkpoint, tell=_warn)


def main() -> None:
    parser = make_parser()
    arguments = vars(parser.parse_args())
    input_path, output_path = arguments.pop("input_ckpt_path"), arguments.pop("output_ckpt_path")
    only_inspect = arguments.pop("inspect")
    if output_path is None and not only_inspect:
        parser.error("--output_ckpt_path: say where the result goes, or give --inspect to look at the input only")
    try:
        if only_inspect:
            print(inspect(input_path, arguments["num_attention_heads"], arguments["num_key_value_heads"]))
            return
        if is_adapter(input_path):
            _convert_adapter(input_path, output_path, arguments, parser)
            left_out = []
        else:
            left_out = convert(input_path, output_path, **arguments, tell=_warn)
    except (CheckpointError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{output_path}: complete")
    if left_out:
        print(f"not carried over: {', '.join(left_out)}")
