"""A model as EleutherAI's lm-evaluation-harness sees one: the three things that it asks of a language model."""

import json
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

from paddle_te.data.chat_template import ChatTemplate, Renderer
from paddle_te.data.conversations import Conversation
from paddle_te.data.tokenizer import AnyTokenizer
from paddle_te.hosts.paddlenlp.evaluation.model import without_template
from paddle_te.hosts.paddlenlp.evaluation.tasks import Request, Scorer, begun, tokenize, windows
from paddle_te.hosts.paddlenlp.generation import generate_tokens

MAX_NEW_TOKENS = 256  # the harness's own, where a task says nothing
_SETTINGS = {"temperature", "top_k", "top_p"}  # of sampling, under the harness's and PaddleNLP's names


class Asked(Protocol):
    """A request of the harness."""

    args: tuple[Any, ...]


class HarnessModel:
    """The methods of `lm_eval.api.model.LM`, to be derived from together with it.

    scorer: the model and the number of tokens that it sees. tokenizer: of `load_tokenizer`, and name: the user's name
    for it. template: of chats, None where there is none.
    """

    def __init__(
        self, scorer: Scorer, tokenizer: AnyTokenizer, template: ChatTemplate | None = None, name: str = ""
    ) -> None:
        super().__init__()
        self.scorer, self.tok, self.template, self.name = scorer, tokenizer, template, name
        self._renderer: Renderer | None = None  # once the harness has made a chat; then all its prompts are chats

    @property
    def tokenizer_name(self) -> str:
        """Tell the harness's caches of prompts from those of other tokenizers and templates."""
        return "__".join([str(self.name).replace("/", "__"), self.template.fingerprint if self.template else "none"])

    def chat_template(self, chat_template: bool | str | None = False) -> str | None:
        """The template of the harness's name for it, which is then the one that is used, or of True; for its records.

        Raises ValueError where there is none.
        """
        if chat_template is False or chat_template is None:
            return None
        if self.template is None:
            raise ValueError("--apply_chat_template: " + without_template(self.name))
        if isinstance(chat_template, str):
            self.template = self.template.named(chat_template)
        return self.template.sources.get("default")

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of messages, which asks for the assistant's turn; or whose last turn, the assistant's, has begun."""
        if self._renderer is None:
            self.chat_template(True)  # raises where there is none
            self._renderer = Renderer(cast(ChatTemplate, self.template)).__enter__()
            weakref.finalize(self, self._renderer.__exit__)
        asked = Conversation("a prompt of the harness", [dict(message) for message in chat_history])
        return self._renderer.prompt(asked) if add_generation_prompt else self._renderer.begun(asked)

    def _tokens(self, context: str) -> list[int]:
        """Return a context's tokens. A chat has those that begin a text: its template writes them."""
        return self.tok.encode(context, add_special_tokens=self._renderer is None)

    def loglikelihood(self, requests: Sequence[Asked]) -> list[tuple[float, bool]]:
        """Return [(log p(continuation | context), whether greedy decoding gives it)] of (context, continuation)."""
        answers = self.scorer([self._request(*request.args) for request in requests], "loglikelihood")
        return [(answer.logprob, answer.is_greedy) for answer in answers]

    def loglikelihood_rolling(self, requests: Sequence[Asked]) -> list[float]:
        """Return [log p(text)] of (text,): after a token that begins a text, in windows of what the model sees."""
        texts = [begun(self.tok, *request.args) for request in requests]
        of_texts = [list(windows(tokens, self.scorer.max_seq_length)) for tokens in texts]
        answers = iter(self.scorer([window for text in of_texts for window in text], "loglikelihood_rolling"))
        return [sum(next(answers).logprob for _ in text) for text in of_texts]

    def generate_until(self, requests: Sequence[Asked]) -> list[str]:
        """Return [continuation] of (context, settings): up to the first of the texts in settings["until"]."""
        alike = defaultdict(list)
        for number, request in enumerate(requests):
            alike[json.dumps(request.args[1], sort_keys=True)].append(number)
        texts = [""] * len(requests)
        for settings, numbers in alike.items():
            made = self._generate([requests[number].args[0] for number in numbers], **json.loads(settings))
            for number, text in zip(numbers, made, strict=True):
                texts[number] = text
        return texts

    def _request(self, context: str, continuation: str) -> Request:
        if context:
            return tokenize(self.tok, context, continuation, add_special_tokens=self._renderer is None)
        begin, *rest = begun(self.tok, continuation)
        return Request([begin], rest)

    def _generate(
        self,
        contexts: Sequence[str],
        until: str | Sequence[str] = (),
        max_gen_toks: int = MAX_NEW_TOKENS,
        do_sample: bool = False,
        **settings: Any,
    ) -> list[str]:
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
        prompts = [(self._tokens(context) or begun(self.tok, ""))[-room:] for context in contexts]
        model, size = self.scorer.model, self.scorer.batch_size
        rows = generate_tokens(model, self.tok, prompts, size, max_new_tokens=max_gen_toks, **sampling)
        texts = [self.tok.decode(row, skip_special_tokens=True) for row in rows]
        return [_before(text, [until] if isinstance(until, str) else until) for text in texts]


def _before(text: str, ends: Iterable[str]) -> str:
    """Return a text up to the first of some texts."""
    return text[: min([position for end in ends if end and (position := text.find(end)) >= 0], default=len(text))]
