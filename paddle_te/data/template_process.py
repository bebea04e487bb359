"""Render chat templates in a process of its own, which `data.chat_template` starts and asks.

A template is code from a stranger. It runs in Jinja's sandbox, as transformers runs it, and the kernel bounds the time
and memory of the process and the sizes of its files, so that no template can stop or fill a run. The process imports
Jinja and Python's own library only. It reads a JSON object a line from standard input, and answers with one:

    {"templates": {name: source}}                      → {}
    {"template": name, "messages": …, "tools": …, "variables": …, "spans": true}
                                                       → {"text": …, "spans": [[begin, end], …], "rewords": …}
    {…, "generation_prompt": true or false}            → {"text": …}

An answer may be {"error": …, "turn": number or null} instead. Spans are the characters that the assistant writes.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import traceback
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

SECONDS = 2  # of the processor, for one answer; then an error, and a second later the kernel ends the process
MEMORY = 2**30  # bytes
CHARACTERS = 2**22  # of one text: a million tokens
TIME_IS_UP = (signal.SIGPROF, signal.SIGVTALRM)  # signals that end a process that does not come back to Python

Messages = list[dict[str, Any]]
Span = list[int]


class RenderError(Exception):
    """What is wrong with a conversation or its template; `turn`: the message it is about, counted from 0."""

    def __init__(self, what: str, turn: int | None = None):
        super().__init__(what)
        self.turn = turn


@dataclass
class Trace:
    """What a template has written so far, and for which message.

    turns: {number of a message: [begin, end]} of the text that the template's loop over the messages writes for it.
    tail: where the last turn ends, None where no loop has written one. marks: of each {% generation %} where it begins,
    and its text.
    """

    messages: Messages
    length: int = 0
    turns: dict[int, Span] = field(default_factory=dict)
    tail: int | None = None
    marks: list[tuple[int, str]] = field(default_factory=list)
    open: tuple[int, int] | None = None  # loop and message that are being written
    begin: int = 0

    def __post_init__(self) -> None:
        self.numbers = {id(message): number for number, message in enumerate(self.messages)}

    def turn_begins(self, loop: int, items: tuple[Any, ...]) -> None:
        """Note that the body of a loop begins, whose variables are `items`."""
        number = next((self.numbers[id(item)] for item in items if id(item) in self.numbers), None)
        if number is not None:
            self.close()
            self.open, self.begin = (loop, number), self.length

    def loop_ends(self, loop: int) -> None:
        if self.open and self.open[0] == loop:
            self.close()
            self.tail = self.length

    def close(self) -> None:
        """End the turn that is open. A loop that writes nothing, to count or to search, leaves no turn."""
        if self.open and self.length > self.begin:
            self.turns[self.open[1]] = [self.begin, self.length]
        self.open = None


class Tracker(jinja2.ext.Extension):
    """The tag {% generation %} as transformers has it, and a note of each loop's turns in a trace."""

    tags = {"generation"}
    environment: Sandbox
    trace: Trace  # `Template._render` sets it

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.marked = True
        return nodes.CallBlock(self.call_method("_generation"), [], [], body).set_lineno(line)

    def _generation(self, caller: Any) -> str:
        text = caller()
        self.trace.marks.append((self.trace.length, text))
        return text

    def _turn_begins(self, loop: int, *items: Any) -> str:
        self.trace.turn_begins(loop, items)
        return ""

    def _loop_ends(self, loop: int) -> str:
        self.trace.loop_ends(loop)
        return ""


class Watched(NodeTransformer):
    """Let each loop of a template say which item its body begins with, and when it has ended."""

    def __init__(self, tracker: Tracker):
        self.tracker, self.loops = tracker, 0

    def visit_For(self, loop: nodes.For) -> list[nodes.Node]:
        self.loops += 1
        number = nodes.Const(self.loops)
        targets = loop.target.items if isinstance(loop.target, nodes.Tuple) else [loop.target]
        items: list[nodes.Expr] = [nodes.Name(each.name, "load") for each in targets if isinstance(each, nodes.Name)]
        self.generic_visit(loop)
        loop.body.insert(0, self._call("_turn_begins", [number, *items], loop.lineno))
        return [loop, self._call("_loop_ends", [number], loop.lineno)]

    def _call(self, name: str, arguments: list[nodes.Expr], line: int) -> nodes.Node:
        call = nodes.ExprStmt(self.tracker.call_method(name, arguments))
        for node in (call, *call.find_all(nodes.Node)):
            node.lineno = line
        return call


class Sandbox(ImmutableSandboxedEnvironment):
    """transformers' environment of chat templates, 4.51, whose loops are watched."""

    marked = False  # whether a template has {% generation %}

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Tracker, jinja2.ext.loopcontrols])
        now = datetime.now()  # all conversations of a run have the same day
        tracker = self.extensions[Tracker.identifier]
        assert isinstance(tracker, Tracker)
        self.tracker = tracker
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = now.strftime

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(Watched(self.tracker).visit(source), *args, **kwargs)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _has_objects(messages: Messages) -> bool:
    """Whether a tool call's arguments are an object."""
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    return any(isinstance(call.get("function", call).get("arguments"), dict) for call in calls)


def _with_text(messages: Messages) -> Messages:
    """The messages with the arguments of tool calls as JSON texts."""
    return [
        message | {"tool_calls": [_call_with_text(call) for call in calls]}
        if (calls := message.get("tool_calls"))
        else message
        for message in messages
    ]


def _call_with_text(call: dict[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return call | {"function": _call_with_text(call["function"])}
    arguments = call.get("arguments")
    return call if isinstance(arguments, str) else call | {"arguments": _tojson(arguments)}


class Template:
    """A chat template, and what has been found out about it.

    prompts, headers: of conversations with the same roles, which `Conversation` compares with each one's text.
    rewords: whether it writes turns otherwise when others follow: without the thoughts, or the system's turn.
    wants_text: whether it takes the arguments of tool calls as a JSON text (DeepSeek's), not as an object.
    """

    def __init__(self, source: str):
        self.environment = Sandbox()
        self.template = self.environment.from_string(source)
        self.prompts: dict[tuple[Any, ...], str] = {}
        self.headers: dict[tuple[Any, ...], str] = {}
        self.constant_tails: dict[str, bool] = {}
        self.rewords = False
        self.wants_text = False

    def render(self, messages: Messages, variables: dict[str, Any], prompt: bool = False) -> tuple[str, Trace]:
        """Return a conversation's text, with the prompt for the assistant's next turn if asked. Raises RenderError."""
        if not self.wants_text and _has_objects(messages):
            try:
                return self._render(messages, variables, prompt)
            except RenderError as error:
                if not isinstance(error.__cause__, TypeError):
                    raise
                written = self._render(_with_text(messages), variables, prompt)
                self.wants_text = True
                return written
        return self._render(_with_text(messages) if self.wants_text else messages, variables, prompt)

    def _render(self, messages: Messages, variables: dict[str, Any], prompt: bool) -> tuple[str, Trace]:
        trace, parts = Trace(messages), []
        self.environment.tracker.trace = trace
        try:
            for part in self.template.generate(messages=messages, add_generation_prompt=prompt, **variables):
                trace.length += len(part)
                if trace.length > CHARACTERS:
                    raise RenderError(f"it writes more than {CHARACTERS} characters")
                parts.append(part)
        except Exception as error:
            raise RenderError(describe(error), trace.open and trace.open[1]) from error
        trace.close()
        return _encodable("".join(parts)), trace

    def spans(self, messages: Messages, variables: dict[str, Any]) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and where the assistant writes in it.

        That is what the template marks, or where it marks nothing, each of the assistant's turns beyond the
        prompt that asks for it. Raises RenderError.
        """
        text, trace = self.render(messages, variables)
        if self.environment.marked:
            return text, [_found(text, *mark) for mark in trace.marks]
        conversation = Conversation(self, messages, variables, text, trace)
        answers = [n for n, message in enumerate(messages) if message.get("role") == "assistant"]
        return text, [conversation.answer(number) for number in answers]


@dataclass
class Conversation:
    """A conversation that is rendered, to find the assistant's text in it.

    The template itself tells a turn from its prompt: it writes the prompt when it is asked for one after the turns
    before. Where the turn does not begin with all of it (DeepSeek-R1's prompt opens a thought that its turns do not
    have), it begins with as much of it as a turn with another text does.
    """

    template: Template
    messages: Messages
    variables: dict[str, Any]
    text: str
    trace: Trace

    def answer(self, number: int) -> Span:
        """Raise RenderError where the template does not tell."""
        if number not in self.trace.turns:
            raise RenderError(f"it writes nothing for it in a loop over the messages, {MARK_IT}", number)
        begin, end = self.trace.turns[number]
        if number == len(self.messages) - 1:
            end = self._end
        header = self._prompt(number)
        if not self.text.startswith(header, begin):
            header = self._header(number, header)
        return [begin + len(header), end]

    @property
    def _roles(self) -> tuple[tuple[Any, bool], ...]:
        return tuple((message.get("role"), "tool_calls" in message) for message in self.messages)

    @cached_property
    def _end(self) -> int:
        """Where the last turn ends: with what follows the loop (an end of text), unless a prompt follows there, too."""
        tail = self.text[self.trace.tail :]
        known = self.template.constant_tails
        if tail and tail not in known:
            prompted, trace = self.template.render(self.messages, self.variables, prompt=True)
            known[tail] = prompted[trace.tail :].startswith(tail)
        end = self.trace.tail
        return end if end is not None and tail and known[tail] else len(self.text)

    def _prompt(self, number: int) -> str:
        """What the template writes after the turns before `number` to ask for the assistant's."""
        key, known = (self._roles[:number], bool(self.variables.get("tools"))), self.template.prompts
        if key not in known:
            before = self.messages[: max(number, 1)]
            plain, _ = self.template.render(before, self.variables)
            prompted, trace = self.template.render(before, self.variables, prompt=True)
            within = trace.tail in (None, len(prompted))  # the loop writes the prompt, too
            end = _shared(plain, prompted) if within else trace.tail
            known[key] = prompted[end:]
            if number and not self.text.startswith(prompted[:end]):
                self.template.rewords = True
        return known[key]

    def _header(self, number: int, prompt: str) -> str:
        """As much of the prompt as the turn begins with, when it holds another text, too.

        Raises RenderError where that is nothing, or where another role's turns begin with it.
        """
        key, known = (self._roles, number, prompt), self.template.headers
        if key not in known:
            known[key] = min((self._probed(number, prompt, text) for text in ("A", "0")), key=len)
        header = known[key]
        shared = _shared(header, self.text[self.trace.turns[number][0] :])
        header = header[:shared]
        others = [turn for n, turn in self.trace.turns.items() if self.messages[n].get("role") != "assistant"]
        if not header.strip() or any(self.text.startswith(header, begin) for begin, _ in others):
            raise RenderError(f"it asks for it with {prompt!r}, but does not begin it so, {MARK_IT}", number)
        return header

    def _probed(self, number: int, prompt: str, content: str) -> str:
        messages = list(self.messages)
        messages[number] = {"role": "assistant", "content": content}
        text, trace = self.template.render(messages, self.variables)
        turn = text[slice(*trace.turns.get(number, (0, 0)))]
        return turn[: _shared(turn, prompt)]


def _encodable(text: str) -> str:
    """The text. Raises RenderError for one with half of a surrogate pair, whose characters cannot be counted."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RenderError("it writes half of a surrogate pair, which is no character") from error
    return text


def _found(text: str, begin: int, marked: str) -> Span:
    """The span of a {% generation %} in the text. Raises RenderError where it does not stand there, as in a macro."""
    if not text.startswith(marked, begin):
        raise RenderError("its {% generation %} stands in a macro, in another one or in a block that changes its text")
    return [begin, begin + len(marked)]


MARK_IT = (
    "so what the assistant writes cannot be told: give a copy of the template to --chat_template in which "
    "{% generation %}…{% endgeneration %} stand around it"
)


def _shared(a: str, b: str) -> int:
    """How many characters two texts begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def describe(error: BaseException) -> str:
    """One line, with the template's line where it is known."""
    what = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(str(error).split())[:300])
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    line = error.lineno if isinstance(error, jinja2.TemplateSyntaxError) else lines[-1] if lines else None
    if isinstance(error, RenderError) or type(error) is jinja2.TemplateError:  # raise_exception's words
        return what
    kinds: dict[type[BaseException], str] = {
        MemoryError: "it needs too much memory",
        RecursionError: "it is nested too deeply, or calls itself without end",
    }
    kind = kinds.get(type(error))
    return (kind or f"{type(error).__name__}: {what}") + (f", in line {line} of it" if line else "")


# --------------------------------------------------------------------------------------------------- the process


def _too_long(*_: object) -> None:
    raise RenderError(f"it takes more than {SECONDS} seconds")


def limit_process() -> None:
    """Bound what the process may use, whatever it runs."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGVTALRM, _too_long)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends a process that does not come back to Python
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it


class Timer:
    """Bounds the processor's time of what it contains."""

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        signal.setitimer(signal.ITIMER_PROF, SECONDS + 1)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def answer(templates: dict[str, Template], request: dict[str, Any]) -> dict[str, Any]:
    """Return what the process says to a request; `templates` are those it knows."""
    try:
        with Timer():
            if "templates" in request:
                templates.update({name: Template(source) for name, source in request["templates"].items()})
                return {}
            template = templates[request["template"]]
            messages, variables = request["messages"], {"tools": request["tools"], "documents": None}
            if taken := sorted(request["variables"].keys() & {"messages", "add_generation_prompt", *variables}):
                raise RenderError(f"a special token is called {taken[0]}, as what each template is given")
            variables |= request["variables"]
            if not request.get("spans"):
                return {"text": template.render(messages, variables, prompt=request["generation_prompt"])[0]}
            text, spans = template.spans(messages, variables)
            return {"text": text, "spans": spans, "rewords": template.rewords}
    except Exception as error:
        return {"error": describe(error), "turn": getattr(error, "turn", None)}


def main() -> None:
    limit_process()
    templates: dict[str, Template] = {}
    for line in sys.stdin.buffer:
        for request in json.loads(line):
            sys.stdout.write(json.dumps(answer(templates, request)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
