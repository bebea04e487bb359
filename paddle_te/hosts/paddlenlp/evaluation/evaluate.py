"""Evaluate a checkpoint with decoder layers of backend none, paddle or transformer_engine.

    python run_eval.py --model_name_or_path CKPT --tokenizer_name_or_path TOKENIZER \
        --perplexity docs.jsonl --boolq val.jsonl --lambada test.jsonl --multiple_choice questions.jsonl
    python run_eval.py --model_name_or_path CKPT --prompts "What is 1 + 1?" --apply_chat_template
    python run_eval.py --model_name_or_path CKPT --prompts_file chats.jsonl
    python run_eval.py --model_name_or_path CKPT --lm_eval hellaswag my_task.yaml
    python run_eval.py arguments.json [--flag value …]
    python -m paddle.distributed.launch --devices 0,1 run_eval.py …    # tensor parallelism over two devices
    python -m paddle.distributed.launch --devices 0,1 run_eval.py … --pipeline_parallel_degree 2

Formats of the files: `evaluation.tasks`, and of chats `data.conversations`. Prints the results and, with --output_file,
writes them as JSON. Errors in the arguments or the data end the run with status 2, before the model is read.
"""

import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist

from paddle_te import device
from paddle_te.data.chat_template import ChatTemplate
from paddle_te.data.prompts import Prompt, PromptMaker
from paddle_te.data.records import read_records
from paddle_te.data.samples import Sample, SampleMaker, read_conversations
from paddle_te.data.tokenizer import AnyTokenizer
from paddle_te.host import HostModel
from paddle_te.hosts.paddlenlp.evaluation import harness
from paddle_te.hosts.paddlenlp.evaluation.model import (
    EvaluatedModel,
    make_model,
    make_scorer,
    make_template,
    read_length,
)
from paddle_te.hosts.paddlenlp.evaluation.tasks import (
    TASKS,
    Metrics,
    Scorer,
    evaluate_task,
    open_corpus,
    perplexity_of_corpus,
    perplexity_of_documents,
    perplexity_of_samples,
    read_documents,
    read_examples,
)
from paddle_te.hosts.paddlenlp.generation import check_generates, check_room, generate_text
from paddle_te.hosts.paddlenlp.loading import check_token_ids, load_config, load_tokenizer
from paddle_te.hosts.paddlenlp.training.arguments import ScriptParser
from paddle_te.hosts.paddlenlp.training.ending import refusing_wrong_input
from paddle_te.options import with_options
from paddle_te.options.evaluation import EVALUATION_TASKS
from paddle_te.outputs import NotWritten, check_file, write_file
from paddle_te.runs import screen

Measure = Callable[[Scorer], Metrics]
logger = logging.getLogger(__name__)


@dataclass
@with_options(*EVALUATION_TASKS)
class EvalArguments(EvaluatedModel):
    """What to evaluate, how, and on what."""

    def __post_init__(self) -> None:
        super().__post_init__()
        prompts = self.prompts or self.prompts_file
        if not any([self.perplexity, prompts, self.lm_eval, *(getattr(self, task) for task in TASKS)]):
            names = ", --".join(["perplexity", *TASKS, "lm_eval", "prompts"])
            raise ValueError(f"nothing to do: give --{names} or --prompts_file")
        if self.lm_eval:
            harness.check_installed()
        if self.output_file is not None:
            check_file("--output_file", self.output_file)
        if prompts:
            check_generates(self)
        if (self.top_k or self.top_p != 1) and not self.temperature:
            raise ValueError("--top_k and --top_p choose what is sampled from: give --temperature as well, such as 1")
        if self.system_instruction is not None and not (self.apply_chat_template or self.prompts_file or self.lm_eval):
            raise ValueError(
                "--system_instruction is a turn of chats: add --apply_chat_template, or give --prompts_file"
            )


@dataclass(frozen=True)
class Evaluation:
    """What is to be done, with all data read: {task: what makes its metrics, with a Scorer}, and the prompts."""

    tasks: dict[str, Measure]
    prompts: list[Prompt]


def read_data(args: EvalArguments, tokenizer: AnyTokenizer, template: ChatTemplate | None, length: int) -> Evaluation:
    """Read the data. length: tokens that the model sees. Raise ValueError or FileNotFoundError for unfit data."""
    tasks: dict[str, Measure] = {}
    if args.perplexity:
        tasks["perplexity"] = _read_perplexity(args, tokenizer, template, length)
    for task in TASKS:
        if path := getattr(args, task):
            examples = read_examples(task, path, args.limit)
            tasks[task] = partial(evaluate_task, tokenizer=tokenizer, task=task, examples=examples)
    maker = PromptMaker(tokenizer, template, args.apply_chat_template, args.system_instruction)
    prompts = maker.of_texts("--prompts", args.prompts or ())
    prompts += maker.of_file(args.prompts_file, args.limit) if args.prompts_file else []
    return Evaluation(tasks, prompts)


def _read_perplexity(
    args: EvalArguments, tokenizer: AnyTokenizer, template: ChatTemplate | None, length: int
) -> Measure:
    path = Path(args.perplexity)
    if not path.is_file() or path.suffix in (".bin", ".idx"):
        return partial(perplexity_of_corpus, tokens=open_corpus(path), limit=args.limit)
    ((_, first),) = read_records([path], 1)
    if "text" in first:
        documents = read_documents(path, args.limit)
        return partial(perplexity_of_documents, tokenizer=tokenizer, documents=documents)
    return partial(perplexity_of_samples, samples=_samples(args, tokenizer, template, length))


def _samples(args: EvalArguments, tokenizer: AnyTokenizer, template: ChatTemplate | None, length: int) -> list[Sample]:
    """Return the conversations of --perplexity as fine-tuning learns them."""
    maker = SampleMaker(tokenizer, template, src_length=length // 2, max_length=length + 1)
    samples = list(maker.samples(read_conversations([Path(args.perplexity)], args.limit)))
    if not samples:
        raise ValueError(f"--perplexity {args.perplexity}: no first answer ends within {length} tokens")
    if maker.tally.cut or maker.tally.dropped:
        words = f"{maker.tally.cut} conversations are cut after an answer, {maker.tally.dropped} are left out"
        logger.warning(f"--perplexity {args.perplexity}: {words}, for they have more than {length} tokens")
    return samples


def evaluate(
    args: EvalArguments,
    model: HostModel,
    tokenizer: AnyTokenizer,
    template: ChatTemplate | None,
    evaluation: Evaluation,
) -> Iterator[tuple[str, Any]]:
    """Yield (task, metrics) as they are known; "generation" has the continuations of the prompts."""
    scorer = make_scorer(args, model)
    for task, measure in evaluation.tasks.items():
        yield task, measure(scorer)
    if args.lm_eval:
        found = harness.evaluate_tasks(args, scorer, tokenizer, template)
        yield from ((f"lm_eval {task}", metrics) for task, metrics in found.items())
    if scorer.truncated:
        length = scorer.max_seq_length
        logger.warning(f"{scorer.truncated} sequences were longer than {length} tokens: their beginnings were cut off")
    if evaluation.prompts:
        yield "generation", _generate(args, model, tokenizer, evaluation.prompts)


def _generate(
    args: EvalArguments, model: HostModel, tokenizer: AnyTokenizer, prompts: Sequence[Prompt]
) -> list[dict[str, Any]]:
    paddle.seed(args.seed)
    settings: dict[str, object] = {"decode_strategy": "greedy_search"}
    if args.temperature:
        settings = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
        settings["decode_strategy"] = "sampling"
    tokens, length = [prompt.tokens for prompt in prompts], args.max_new_tokens
    texts = generate_text(model, tokenizer, tokens, args.batch_size, max_new_tokens=length, **settings)
    return [prompt.given | {"output": text} for prompt, text in zip(prompts, texts, strict=True)]


def show(results: Mapping[str, Any]) -> None:
    for task, metrics in results.items():
        if task == "generation":
            for item in metrics:
                asked = item["src"] if "src" in item else item["messages"][-1].get("content")
                print(f"{asked} ▸ {item['output']}")
        else:
            values = (
                f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}" for key, value in metrics.items()
            )
            print(f"{task}: {', '.join(values)}")


def make_parser() -> ScriptParser:
    return ScriptParser((EvalArguments,))


@screen.shown()
def main() -> None:
    """Evaluate as the command line says. Exit with 2 for wrong arguments or data, 1 where results cannot be written."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with refusing_wrong_input():
        (args,) = make_parser().parse()
        device.check_name(args.device)
        paddle.set_device(args.device)
        if args.lm_eval:
            harness.check_tasks(args.lm_eval)
        tokenizer = load_tokenizer(args.tokenizer_name_or_path, args.model_name_or_path)
        template = make_template(args, tokenizer)
        config = load_config(args.model_name_or_path, args.transformer_engine_backend)
        evaluation = read_data(args, tokenizer, template, read_length(args, config))
        tokens = [prompt.tokens for prompt in evaluation.prompts]
        check_token_ids(tokens, config)
        check_room(tokens, args.max_new_tokens, config)
        results: dict[str, Any] = {}
        model = make_model(args)
        try:
            results.update(evaluate(args, model, tokenizer, template, evaluation))
        except BaseException as error:
            if results:
                _leave(args, {"unfinished": str(error) or type(error).__name__, "results": results})
            raise
    if not _leave(args, {"results": results}):
        sys.exit(1)


def _leave(args: EvalArguments, found: dict[str, Any]) -> bool:
    """Return whether the results could be written, which comes first: the terminal may be closed."""
    if dist.get_rank() > 0:
        return True
    run = {"model": args.model_name_or_path, "backend": args.transformer_engine_backend, "dtype": args.dtype}
    fault: NotWritten | None = None
    if args.output_file:
        try:
            write_file("--output_file", args.output_file, json.dumps(run | found, indent=2) + "\n")
        except NotWritten as error:
            fault = error
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    show(found["results"])
    if fault:
        logger.error(str(fault))
    return fault is None
