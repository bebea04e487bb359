"""Converts Llama checkpoints between PaddleNLP's native layout (pd) and Transformer Engine's (te).

    python te_llama_ckpt_converter.py --input_ckpt_path DIR --output_ckpt_path NEW_DIR --mode pd2te

The output folder must be new or empty and appears only when it is complete; the input is only read. The heads come
from config.json; without one they must be given. te2pd gives back unfused weights, or weights fused as they were
before pd2te (noted in config.json); --[no-]fuse_attention_qkv and --[no-]fuse_attention_ffn decide otherwise.
"""

import argparse
import sys

from paddle_te.checkpoint import CheckpointError, convert
from paddle_te.checkpoint.converter import MODES


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input_ckpt_path", required=True, help="folder of the checkpoint to convert")
    parser.add_argument("--output_ckpt_path", required=True, help="new or empty folder for the result")
    parser.add_argument("--mode", required=True, choices=MODES, help="from which layout to which")
    parser.add_argument("--num_attention_heads", type=int, help="only where there is no config.json")
    parser.add_argument("--num_key_value_heads", type=int, help="likewise; as many as heads if left out")
    for flag in ("--fuse_attention_qkv", "--fuse_attention_ffn"):
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, help="fuse the native weights so (te2pd)")
    return parser.parse_args(arguments)


def main():
    arguments = vars(parse_arguments())
    input_path, output_path = arguments.pop("input_ckpt_path"), arguments.pop("output_ckpt_path")
    try:
        left_out = convert(input_path, output_path, **arguments)
    except (CheckpointError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{output_path}: complete")
    if left_out:
        print(f"not carried over: {', '.join(left_out)}")


if __name__ == "__main__":
    main()
