"""Tasks of EleutherAI's lm-evaluation-harness (the package lm_eval), asked of our models.

    paddle-te evaluate --model_name_or_path CKPT --lm_eval hellaswag my_task.yaml
    paddle-te lm_eval --model paddle_te --model_args pretrained=CKPT,dtype=bfloat16 --tasks hellaswag

The first is run_eval.py with the harness's tasks among its own. The second is the harness's command, `lm_eval`, with
all its arguments, and with paddle_te among its models (`paddle_te.evaluation.registered`). The command that the harness
installs knows its own models only: it does not look for those of other packages.

The harness asks a language model for three things, which `HarnessModel` answers. It is an extra, since it brings many
packages along: pip install 'paddle_te[lm_eval]'.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections import defaultdict

from paddle_te.evaluation.tasks import Request, Scorer, begun, tokenize, windows
from paddle_te.models.generation import generate_tokens
from paddle_te.training.ending import refusing_wrong_input
from paddle_te.upstream import deferred_imports

MAX_NEW_TOKENS = 256  # the harness's own, where a task says nothing
_SETTINGS = {"temperature", "top_k", "top_p"}  # of sampling, under the harness's and PaddleNLP's names


def check_installed():
    """Raises ValueError, with the command that installs it, where there is no harness."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("EleutherAI's harness is not installed: pip install 'paddle_te[lm_eval]'")


class HarnessModel:
    """A model as the harness sees one: the methods of `lm_eval.api.model.LM`, to be derived from together with it.

    scorer: the model and the number of tokens that it sees. tokenizer: PaddleNLP's.
    """

    def __init__(self, scorer: Scorer, tokenizer):
        super().__init__()
        self.scorer, self.tok = scorer, tokenizer

    def loglikelihood(self, requests):
        """[(log p(continuation | context), whether greedy decoding gives it)] of (context, continuation)."""
        answers = self.scorer([self._request(*request.args) for request in requests], "loglikelihood")
        return [(answer.logprob, answer.is_greedy) for answer in answers]

    def loglikelihood_rolling(self, requests):
        """[log p(text)] of (text,): after a token that begins a text, in windows of the tokens that the model sees."""
        texts = [begun(self.tok, *request.args) for request in requests]
        of_texts = [list(windows(tokens, self.scorer.max_seq_length)) for tokens in texts]
        answers = iter(self.scorer([window for text in of_texts for window in text], "loglikelihood_rolling"))
        return [sum(next(answers).logprob for _ in text) for text in of_texts]

    def generate_until(self, requests):
        """[continuation] of (context, settings): up to the first of the texts in settings["until"]."""
        alike = defaultdict(list)
        for number, request in enumerate(requests):
            alike[json.dumps(request.args[1], sort_keys=True)].append(number)
        texts = [""] * len(requests)
        for settings, numbers in alike.items():
            made = self._generate([requests[number].args[0] for number in numbers], **json.loads(settings))
            for number, text in zip(numbers, made, strict=True):
                texts[number] = text
        return texts

    def _request(self, context, continuation):
        if context:
            return tokenize(self.tok, context, continuation)
        begin, *rest = begun(self.tok, continuation)
        return Request([begin], rest)

    def _generate(self, contexts, until=(), max_gen_toks=MAX_NEW_TOKENS, do_sample=False, **settings):
        if others := settings.keys() - _SETTINGS:
            raise ValueError(
                f"a task of the harness generates with {', '.join(sorted(others))}, which is not supported"
            )
        sampling = {"decode_strategy": "sampling"} | settings if do_sample else {"decode_strategy": "greedy_search"}
        room = self.scorer.max_seq_length - max_gen_toks
        if room < 1:
            raise ValueError(
                f"a task of the harness generates up to {max_gen_toks} tokens, and the model sees "
                f"{self.scorer.max_seq_length}: give a larger max_seq_length"
            )
        prompts = [(self.tok(context)["input_ids"] or begun(self.tok, ""))[-room:] for context in contexts]
        model, size = self.scorer.model, self.scorer.batch_size
        rows = generate_tokens(model, self.tok, prompts, size, max_new_tokens=max_gen_toks, **sampling)
        texts = [self.tok.decode(row, skip_special_tokens=True) for row in rows]
        return [_before(text, [until] if isinstance(until, str) else until) for text in texts]


def _before(text, ends):
    """A text up to the first of some texts."""
    return text[: min([position for end in ends if end and (position := text.find(end)) >= 0], default=len(text))]


def evaluate_tasks(scorer: Scorer, tokenizer, tasks: list[str], limit: int | None = None) -> dict[str, dict]:
    """{task: metrics} of tasks of the harness, by their names or by paths to their .yaml files.

    limit: of examples in each. Raises ValueError for a task that there is not.
    """
    deferred_imports.undo()  # the harness uses Hugging Face's datasets, and scikit-learn
    from lm_eval import simple_evaluate

    from paddle_te.evaluation.registered import PaddleTE

    try:
        found = simple_evaluate(PaddleTE(scorer, tokenizer), tasks=list(tasks), limit=limit, log_samples=False)
    except KeyError as error:
        raise ValueError(f"--lm_eval: {error.args[0]}") from None
    return {task: _metrics(values) for task, values in found["results"].items()}


def _metrics(values):
    """The harness names a metric "acc,none": by the filter of the answers as well, which mostly is none."""
    return {name.removesuffix(",none"): value for name, value in values.items() if isinstance(value, (int, float))}


def make_parser():
    """For `paddle-te completion`, which completes none of the harness's own arguments."""
    return argparse.ArgumentParser(add_help=False)


def main():
    """The harness's own command, which knows our models. Ends the process with 2 for wrong arguments or data."""
    with refusing_wrong_input():
        check_installed()
        deferred_imports.undo()
        # of ranks that share a model, the harness has only the one with this number show results
        os.environ.setdefault("LOCAL_RANK", os.environ.get("PADDLE_TRAINER_ID", "0"))
        from lm_eval.__main__ import cli_evaluate

        from paddle_te.evaluation import registered  # noqa: F401

        cli_evaluate()
