"""Evaluate a Llama checkpoint with decoder layers of backend none, paddle or transformer_engine, in one process.

    python run_eval.py --model_name_or_path CKPT --tokenizer_name_or_path TOKENIZER \
        --perplexity docs.jsonl --boolq val.jsonl --lambada test.jsonl --multiple_choice questions.jsonl
    python run_eval.py arguments.json [--flag value …]

Formats of the files: `paddle_te.evaluation.tasks`. Prints the results and, with --output_file, writes them as JSON.
Errors in the arguments or the data end the run with status 2.
"""

# ruff: noqa: UP006, UP035, UP045 (PaddleNLP's argument parser reads typing.Optional and typing.List only)

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import List, Optional

import paddle
from paddlenlp.utils.log import logger

from paddle_te import device, fp8
from paddle_te.evaluation.tasks import TASKS, Scorer, evaluate_task, perplexity_of_corpus, perplexity_of_documents
from paddle_te.models.llama.decoder import fp8_recipe
from paddle_te.models.llama.generation import generate_text
from paddle_te.models.llama.loading import load_model, load_tokenizer
from paddle_te.models.llama.lora import load_lora
from paddle_te.models.llama.modeling import check_fp8_lm_head
from paddle_te.training.arguments import ScriptParser, check_fp8_dpa, check_weights_folder


def option(default, help, **kwargs):
    return field(default=default, metadata={"help": help, **kwargs})


@dataclass
class EvalArguments:
    """What to evaluate, how, and on what."""

    model_name_or_path: str = field(
        metadata={"help": "Checkpoint folder, in the layout of the backend or Hugging Face's."}
    )
    tokenizer_name_or_path: Optional[str] = option(None, "Tokenizer folder or name. Default: model_name_or_path.")
    lora_path: Optional[str] = option(None, "Folder of a LoRA adapter, which is added to the weights.")
    transformer_engine_backend: str = option("none", "none, paddle or transformer_engine.")
    dtype: str = option("float32", "Of the weights: float32, bfloat16 or float16.")
    device: str = option("cpu", "cpu, gpu or nvgpu.")
    use_fp8: bool = option(False, "Run the decoder layers' GEMMs in fp8 (backend paddle emulates its rounding).")
    fp8_recipe: str = option("current", "current, or delayed: with the scales that the checkpoint's training left.")
    fp8_dpa: bool = option(False, "Attention in fp8 as well, as the checkpoint was trained (delayed scaling).")
    fp8_lm_head: bool = option(False, "The language model's head in fp8 as well, as the checkpoint was trained.")
    perplexity: Optional[str] = option(None, 'JSON lines {"text": …}, or the prefix of a .bin/.idx pair.')
    boolq: Optional[str] = option(None, 'JSON lines {"passage", "question", "answer"}.')
    lambada: Optional[str] = option(None, 'JSON lines {"text": …}: the last word is asked for.')
    multiple_choice: Optional[str] = option(None, 'JSON lines {"query", "choices", "gold"}.')
    limit: Optional[int] = option(None, "Read no more than so many examples (windows of a .bin/.idx pair).")
    max_seq_length: Optional[int] = option(None, "Tokens that the model sees. Default: its seq_length.")
    batch_size: int = option(8, "Sequences computed together.")
    prompts: Optional[List[str]] = field(default=None, metadata={"help": "Texts to continue."})
    max_new_tokens: int = option(32, "Length of a continuation.")
    decode_strategy: str = option("greedy_search", "greedy_search or sampling.")
    top_k: int = option(0, "Sampling: from so many likeliest tokens; 0: all.")
    top_p: float = option(1.0, "Sampling: from the likeliest tokens that have this probability together.")
    temperature: float = option(1.0, "Sampling: logits are divided by it.")
    seed: int = option(42, "Of sampling.")
    output_file: Optional[str] = option(None, "JSON file for the results.")

    def __post_init__(self):
        check_weights_folder(self)
        self.tokenizer_name_or_path = self.tokenizer_name_or_path or self.model_name_or_path
        if not any([self.perplexity, self.prompts, *(getattr(self, task) for task in TASKS)]):
            raise ValueError(f"nothing to do: give --perplexity, --{', --'.join(TASKS)} or --prompts")
        if self.decode_strategy not in ("greedy_search", "sampling"):
            raise ValueError(f"--decode_strategy {self.decode_strategy}: it may be greedy_search or sampling")
        for name in ("batch_size", "limit", "max_seq_length", "max_new_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: it must be at least 1")
        check_fp8_dpa(self)
        check_fp8_lm_head(self)
        if self.prompts and self.use_fp8 and self.transformer_engine_backend == "transformer_engine":
            raise ValueError("--prompts: fp8 GEMMs take 16 tokens at a time, decoding has one; leave out --use_fp8")


def make_model(args):
    model = load_model(
        args.model_name_or_path,
        args.transformer_engine_backend,
        args.dtype,
        use_fp8=args.use_fp8,
        fp8_recipe=args.fp8_recipe,
        fp8_dpa=args.fp8_dpa,
        fp8_lm_head=args.fp8_lm_head,
    )
    if args.use_fp8 and args.fp8_recipe == "delayed":
        state = Path(args.model_name_or_path) / "fp8_state.pp00.pdparams"
        if not state.is_file():
            raise FileNotFoundError(f"{state}: delayed scaling needs the scales of training; or --fp8_recipe current")
        fp8.load(str(state), model, fp8_recipe(model.config))
    return load_lora(model, args.lora_path, args.transformer_engine_backend) if args.lora_path else model


def evaluate(args, model, tokenizer):
    """{task: metrics}; "generation" has the continuations of the prompts."""
    length = args.max_seq_length or getattr(model.config, "seq_length", None) or model.config.max_position_embeddings
    scorer = Scorer(model, length, args.batch_size)
    results = {}
    if args.perplexity:
        if Path(args.perplexity).is_file() and Path(args.perplexity).suffix not in (".bin", ".idx"):
            results["perplexity"] = perplexity_of_documents(scorer, tokenizer, args.perplexity, args.limit)
        else:
            results["perplexity"] = perplexity_of_corpus(scorer, args.perplexity, args.limit)
    for task in TASKS:
        if getattr(args, task):
            results[task] = evaluate_task(scorer, tokenizer, task, getattr(args, task), args.limit)
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


def main():
    """The command. Ends the process with 2 for wrong arguments or data."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        (args,) = ScriptParser((EvalArguments,)).parse()
        device.check_name(args.device)
        paddle.set_device(args.device)
        tokenizer = load_tokenizer(args.tokenizer_name_or_path)
        results = evaluate(args, make_model(args), tokenizer)
    except (ValueError, OSError, RuntimeError) as error:
        logger.error(str(error))
        sys.exit(2)
    show(results)
    if args.output_file:
        run = {"model": args.model_name_or_path, "backend": args.transformer_engine_backend, "dtype": args.dtype}
        Path(args.output_file).parent.mkdir(parents=True, exist_ok=True)
        Path(args.output_file).write_text(json.dumps(run | {"results": results}, indent=2) + "\n")
