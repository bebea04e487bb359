"""Evaluate a checkpoint with decoder layers of backend none, paddle or transformer_engine.

    python run_eval.py --model_name_or_path CKPT --tokenizer_name_or_path TOKENIZER \
        --perplexity docs.jsonl --boolq val.jsonl --lambada test.jsonl --multiple_choice questions.jsonl
    python run_eval.py --model_name_or_path CKPT --lm_eval hellaswag my_task.yaml
    python run_eval.py arguments.json [--flag value …]
    python -m paddle.distributed.launch --devices 0,1 run_eval.py …    # tensor parallelism over two devices

Formats of the files: `paddle_te.evaluation.tasks`. Prints the results and, with --output_file, writes them as JSON.
Errors in the arguments or the data end the run with status 2.
"""

import json
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import paddle
import paddle.distributed as dist
from paddle.distributed import fleet

from paddle_te import device, fp8, upstream
from paddle_te.evaluation import harness
from paddle_te.evaluation.tasks import TASKS, Scorer, evaluate_task, perplexity_of_corpus, perplexity_of_documents
from paddle_te.models.decoder import fp8_recipe
from paddle_te.models.generation import check_generates, generate_text
from paddle_te.models.loading import load_model, load_tokenizer
from paddle_te.models.lora import load_lora
from paddle_te.models.modeling import check_fp8_lm_head
from paddle_te.options import LAYER_OPTIONS, check_values, with_options
from paddle_te.options.scripts import EVALUATION
from paddle_te.runs import screen
from paddle_te.runs.checkpoints import check_writable
from paddle_te.training.arguments import ScriptParser, check_weights_folder
from paddle_te.training.ending import refusing_wrong_input
from paddle_te.training.health import not_finite

logger = logging.getLogger(__name__)


@dataclass
@with_options(*EVALUATION)
class EvalArguments:
    """What to evaluate, how, and on what."""

    def __post_init__(self):
        check_values(self)
        check_weights_folder(self)
        self.tokenizer_name_or_path = self.tokenizer_name_or_path or self.model_name_or_path
        if not any([self.perplexity, self.prompts, self.lm_eval, *(getattr(self, task) for task in TASKS)]):
            raise ValueError(f"nothing to do: give --perplexity, --{', --'.join(TASKS)}, --lm_eval or --prompts")
        if self.lm_eval:
            harness.check_installed()
        if self.lora_path and dist.get_world_size() > 1:
            raise ValueError("--lora_path: several processes evaluate whole models only; merge the adapter first")
        if self.output_file:
            check_writable("--output_file", Path(self.output_file).parent)
            if Path(self.output_file).is_dir():
                raise ValueError(f"--output_file {self.output_file}: it is a folder")
        check_fp8_lm_head(self)
        if self.prompts:
            check_generates(self)


def check_weights(model, folder):
    """Raises ValueError for weights that are not finite: Paddle's CPU makes a plausible loss of them."""
    broken = not_finite([*model.named_parameters(), *model.named_buffers()])
    if broken:
        others = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise ValueError(
            f"the weights of {folder} hold NaN or infinity: {broken[0]}{others}; nothing was evaluated: take an "
            "earlier checkpoint"
        )


def shared_by_processes():
    """What a model's configuration has where all processes of this run share it, each with its part of every layer.

    They are those that paddle.distributed.launch has started; {} in a single one.
    """
    size = dist.get_world_size()
    if size == 1:
        return {}
    upstream.apply()  # first: some repairs are of what fleet begins with
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = dict(dp_degree=1, mp_degree=size, pp_degree=1)
    fleet.init(is_collective=True, strategy=strategy)
    return dict(tensor_parallel_degree=size, tensor_parallel_rank=dist.get_rank(), tensor_parallel_output=False)


def make_model(args):
    settings = shared_by_processes() | {name: getattr(args, name) for name in LAYER_OPTIONS if hasattr(args, name)}
    if args.max_seq_length:
        settings["seq_length"] = args.max_seq_length
    model = load_model(args.model_name_or_path, args.transformer_engine_backend, args.dtype, **settings)
    if args.use_fp8 and args.fp8_recipe == "delayed":
        state = Path(args.model_name_or_path) / "fp8_state.pp00.pdparams"
        if not state.is_file():
            raise FileNotFoundError(f"{state}: delayed scaling needs the scales of training; or --fp8_recipe current")
        fp8.load(str(state), model, fp8_recipe(model.config))
    return load_lora(model, args.lora_path, args.transformer_engine_backend) if args.lora_path else model


def evaluate(args, model, tokenizer):
    """{task: metrics}; "generation" has the continuations of the prompts."""
    length = args.max_seq_length or getattr(model.config, "seq_length", None) or model.config.max_position_embeddings
    scorer = Scorer(model, length, args.batch_size, progress=dist.get_rank() == 0)
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
        tokenizer = load_tokenizer(args.tokenizer_name_or_path)
        model = make_model(args)
        check_weights(model, args.lora_path or args.model_name_or_path)
        results = evaluate(args, model, tokenizer)
    if dist.get_rank() > 0:
        return
    show(results)
    if args.output_file:
        run = {"model": args.model_name_or_path, "backend": args.transformer_engine_backend, "dtype": args.dtype}
        try:
            Path(args.output_file).parent.mkdir(parents=True, exist_ok=True)
            Path(args.output_file).write_text(json.dumps(run | {"results": results}, indent=2) + "\n")
        except OSError as error:
            logger.error(f"--output_file {args.output_file} could not be written: {error.strerror}")
            sys.exit(1)
