"""Turn JSON lines into the memory-mapped ``.bin``/``.idx`` pair that the hosts' causal datasets read.

    paddle-te prepare-data --input_path openwebtext2/ --output_prefix data/openwebtext2 \\
        --tokenizer_name facebook/llama-7b --workers 16
    paddle-te prepare-data --demo data/demo

Input is one JSON object a line, ``{"text": "..."}``, plain, ``.gz`` or ``.zst`` (the form of OpenWebText2). Output is
``PREFIX.bin`` (all token ids, one document after another), ``PREFIX.idx`` (where each begins) and ``PREFIX.json``
(counts; the largest token id, which `training.datasets` checks against the model's vocabulary). The bytes do
not depend on --workers.

``--demo`` needs no download: it makes a corpus from the docstrings, comments and documentation topics of Python's own
standard library, and trains a small sentencepiece tokenizer on it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from paddle_te import host
from paddle_te.data.prepare.demo import make_demo
from paddle_te.data.prepare.reading import SUFFIXES, PrepareError, find_others
from paddle_te.data.prepare.writing import prepare
from paddle_te.data.tokenizer import TokenizerError
from paddle_te.options.option import PATH, SEQUENCES, TEXT
from paddle_te.runs import noise, screen


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input_path", type=PATH.argument, nargs="+", metavar="PATH", help="files or folders of JSON lines"
    )
    parser.add_argument(
        "--output_prefix", type=PATH.argument, metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx, PREFIX.json"
    )
    parser.add_argument(
        "--tokenizer_name", type=PATH.argument, metavar="NAME", help="a tokenizer's folder, or the host's name of it"
    )
    parser.add_argument(
        "--json_key", type=TEXT.argument, default="text", help="key of the text in a line's object (%(default)s)"
    )
    parser.add_argument(
        "--append_eos", action=argparse.BooleanOptionalAction, default=True,
        help="end each document with the tokenizer's end-of-text token (default: yes)",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (%(default)s)")
    parser.add_argument("--skip_malformed", action="store_true", help="count malformed lines and go on")
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier run wrote")
    parser.add_argument(
        "--demo", type=PATH.argument, metavar="OUT_DIR", help="make a corpus and a tokenizer from this Python's library"
    )
    parser.add_argument(
        "--vocab_size", type=SEQUENCES.argument, default=4096, help="of the demo's tokenizer (%(default)s)"
    )
    parser.add_argument("--demo_sources", action="store_true", help="add the library's source code to the demo")
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(argv)
    needed = dict(input_path=args.input_path, output_prefix=args.output_prefix, tokenizer_name=args.tokenizer_name)
    if args.demo and any(needed.values()):
        parser.error("--demo has its own input, output and tokenizer: leave out " + ", ".join(f"--{k}" for k in needed))
    missing = [f"--{name}" for name, value in needed.items() if not value]
    if missing and not args.demo:
        parser.error(f"{', '.join(missing)} missing (or --demo OUT_DIR)")
    return args


def _warn_of_others(inputs: Sequence[str]) -> None:
    """Say which files in the folders are not read: a part of the corpus, such as C4's .json.gz, may be among them."""
    if others := find_others(inputs):
        names = f"{others[0]} is" if len(others) == 1 else f"{others[0]} and {len(others) - 1} more files are"
        ends = ", ".join(SUFFIXES)
        print(f"warning: {names} left out: a folder's {ends} are read, others by name", file=sys.stderr)


@noise.kept_out()
def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    screen.before_imports()
    try:
        if args.demo:
            summary = make_demo(
                args.demo, vocab_size=args.vocab_size, sources=args.demo_sources,
                workers=args.workers, overwrite=args.overwrite,
            )  # fmt: skip
            prefix = Path(args.demo) / "corpus"
        else:
            _warn_of_others(args.input_path)
            summary = prepare(
                args.input_path, args.output_prefix, args.tokenizer_name, json_key=args.json_key,
                append_eos=args.append_eos, workers=args.workers, skip_malformed=args.skip_malformed,
                overwrite=args.overwrite,
            )  # fmt: skip
            prefix = args.output_prefix
    except host.HostError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (PrepareError, TokenizerError, OSError) as error:
        where = "" if getattr(error, "filename", True) else f"{args.demo or args.output_prefix}: "  # a full disk's
        print(f"error: {where}{error}", file=sys.stderr)
        return 1
    if not summary.get("made", True):
        print(f"{args.demo} is already complete.")
    skipped = f", {summary['skipped_malformed']} malformed lines skipped" if summary["skipped_malformed"] else ""
    print(f"{prefix}.bin, .idx: {summary['documents']:,} documents, {summary['tokens']:,} tokens{skipped}")
    return 0
