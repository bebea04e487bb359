"""Evaluate a checkpoint with decoder layers of backend none, paddle or transformer_engine.

    python run_eval.py --model_name_or_path CKPT --tokenizer_name_or_path TOKENIZER \
        --perplexity docs.jsonl --boolq val.jsonl --lambada test.jsonl --multiple_choice questions.jsonl
    python run_eval.py --model_name_or_path CKPT --lm_eval hellaswag my_task.yaml
    python run_eval.py arguments.json [--flag value …]
    python -m paddle.distributed.launch --devices 0,1 run_eval.py …    # tensor parallelism over two devices
    python -m paddle.distributed.launch --devices 0,1 run_eval.py … --pipeline_parallel_degree 2

Formats of the files: `evaluation.tasks`. Prints the results and, with --output_file, writes them as JSON. Errors in the
arguments or the data end the run with status 2.
"""

import json
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import paddle
import paddle.distributed as dist

from paddle_te import device
from paddle_te.hosts.paddlenlp.evaluation import harness
from paddle_te.hosts.paddlenlp.evaluation.model import EvaluatedModel, make_model, make_scorer
from paddle_te.hosts.paddlenlp.evaluation.tasks import (
    TASKS,
    evaluate_task,
    perplexity_of_corpus,
    perplexity_of_documents,
)
from paddle_te.hosts.paddlenlp.generation import check_generates, generate_text
from paddle_te.hosts.paddlenlp.loading import load_tokenizer
from paddle_te.hosts.paddlenlp.training.arguments import ScriptParser
from paddle_te.hosts.paddlenlp.training.ending import refusing_wrong_input
from paddle_te.options import with_options
from paddle_te.options.scripts import EVALUATION_TASKS
from paddle_te.outputs import NotWritten, check_file, write_file
from paddle_te.runs import screen

logger = logging.getLogger(__name__)


@dataclass
@with_options(*EVALUATION_TASKS)
class EvalArguments(EvaluatedModel):
    """What to evaluate, how, and on what."""

    def __post_init__(self):
        super().__post_init__()
        if not any([self.perplexity, self.prompts, self.lm_eval, *(getattr(self, task) for task in TASKS)]):
            raise ValueError(f"nothing to do: give --perplexity, --{', --'.join(TASKS)}, --lm_eval or --prompts")
        if self.lm_eval:
            harness.check_installed()
        if self.output_file is not None:
            check_file("--output_file", self.output_file)
        if self.prompts:
            check_generates(self)


def evaluate(args, model, tokenizer):
    """{task: metrics}; "generation" has the continuations of the prompts."""
    scorer = make_scorer(args, model)
    results = {}
    if args.perplexity:
        if Path(args.perplexity).is_file() and Path(args.perplexity).suffix not in (".bin", ".idx"):
            results["perplexity"] = perplexity_of_documents(scorer, tokenizer, args.perplexity, args.limit)
        else:
            results["perplexity"] = perplexity_of_corpus(scorer, args.perplexity, args.limit)
    for task in TASKS:
        if getattr(args, task):
            results[task] = evaluate_task(scorer, tokenizer, task, getattr(args, task), args.limit)
    if args.lm_eval:
        found = harness.evaluate_tasks(scorer, tokenizer, args.lm_eval, args.limit)
        results |= {f"lm_eval {task}": metrics for task, metrics in found.items()}
    if scorer.truncated:
        length = scorer.max_seq_length
        logger.warning(f"{scorer.truncated} sequences were longer than {length} tokens: their beginnings were cut off")
    if args.prompts:
        paddle.seed(args.seed)
        names = ("max_new_tokens", "decode_strategy", "top_k", "top_p", "temperature")
        settings = {name: getattr(args, name) for name in names}
        texts = generate_text(model, tokenizer, args.prompts, args.batch_size, **settings)
        results["generation"] = [{"src": src, "output": text} for src, text in zip(args.prompts, texts, strict=True)]
    return results


def show(results):
    for task, metrics in results.items():
        if task == "generation":
            for item in metrics:
                print(f"{item['src']} ▸ {item['output']}")
        else:
            values = (
                f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}" for key, value in metrics.items()
            )
            print(f"{task}: {', '.join(values)}")


def make_parser():
    return ScriptParser((EvalArguments,))


@screen.shown()
def main():
    """The command. Ends the process with 2 for wrong arguments or data, with 1 where results cannot be written."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with refusing_wrong_input():
        (args,) = make_parser().parse()
        device.check_name(args.device)
        paddle.set_device(args.device)
        tokenizer = load_tokenizer(args.tokenizer_name_or_path, args.model_name_or_path)
        model = make_model(args)
        results = evaluate(args, model, tokenizer)
    if dist.get_rank() > 0:
        return
    show(results)
    if args.output_file:
        run = {"model": args.model_name_or_path, "backend": args.transformer_engine_backend, "dtype": args.dtype}
        try:
            write_file("--output_file", args.output_file, json.dumps(run | {"results": results}, indent=2) + "\n")
        except NotWritten as error:
            logger.error(str(error))
            sys.exit(1)
