"""Chat templates as strangers write them: no code runs, and each ends in a text with its spans, or in one line."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_te.data import template_process
from paddle_te.data.chat_template import ChatTemplate, Renderer
from paddle_te.data.conversations import ConversationError, parse
from tests.chats import MARKED, PLAIN, SPECIAL, turns
from tests.unit.damages.drawing import drawn

CONVERSATION = parse("data.json:1", {"messages": turns("Hi", "Hello <b>ü</b> 😀", "1 + 1?", "2")})
LOOP = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
SECONDS = 60  # of the clock, for what may take SECONDS of a processor that others share


def rendered(source: str):
    with Renderer(ChatTemplate({"default": source}, "the tokenizer", SPECIAL)) as renderer:
        return next(renderer.render([CONVERSATION]))


def refusal(source: str) -> str:
    start = time.monotonic()
    with pytest.raises(ValueError) as error:
        rendered(source)
    assert time.monotonic() - start < SECONDS
    text = str(error.value)
    assert len(text) < 1000 and all(c.isprintable() for c in text), ascii(text)
    return text


ESCAPES = {
    "a class": "{{ ''.__class__.__mro__ }}",
    "a filter's attribute": "{{ messages | map(attribute='__class__') | list }}",
    "a format string": "{{ '{0.__class__.__mro__}'.format(0) }}",
    "a stored format": "{% set f = '{0.__class__}'.format %}{{ f(0) }}",
    "a global's globals": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "the template itself": "{{ self.__init__.__globals__ }}",
    "a sort by attribute": "{{ messages | sort(attribute='__class__.__name__') }}",
    "a sum of attributes": "{{ messages | sum(attribute='__class__') }}",
    "a list that grows": "{% set _ = messages.append(1) %}",
    "a message that changes": "{% set _ = messages[0].update({'role': 'x'}) %}",
    "a file": "{% include '/etc/passwd' %}",
    "a module": "{% import 'os' as os %}{{ os }}",
    "an extension's tag": "{% debug %}",
}
# Without an error, but they find nothing: what stands in the text is empty.
NOTHING = {
    "attr": "{{ '' | attr('__class__') }}",
    "lipsum": "{{ lipsum.__globals__ }}",
    "a bound method's self": "{{ strftime_now.__self__ }}",
    "a function's globals": "{{ raise_exception.__globals__ }}",
    "a context": "{{ self._TemplateReference__context }}",
    "an item for an attribute": "{{ joiner['__init__'] }}",
}
ENDLESS = {
    "a range": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    "a number": ("{{ 10 ** 6000 }}", "4300 digits"),
    "a macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
    "a block": ("{% block a %}{{ self.a() }}{% endblock %}", "calls itself without end"),
    "a loop": ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "calls itself without end"),
    "brackets": ("{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}", "nested too deeply"),
    "blocks": ("{% for a in messages %}" * 40 + "{% endfor %}" * 40, "too many statically nested"),
    "padding": ("{{ 'a' | center(2**40) }}", "too much memory"),
    "a format": ("{{ '%10000000000d' % 1 }}", "too much memory"),
    "a replacement": ("{{ ('a' * 10**5).replace('a', 'a' * 10**5) }}", "too much memory"),
    "a batch": ("{{ range(3) | batch(10**9, 'x') | list }}", "too much memory"),
    "a text": ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "writes more than"),
    "C code that nothing interrupts": ("{% set n = range(9) | length %}{{ 7 ** (10**7 * n) % 2 }}", "takes more than"),
    "a name of another": ("{{ {}|xmlattr }}{{ 1 / 0 }}", "ZeroDivisionError"),
}
WORDS = {
    "lines and control characters": (r"{{ raise_exception('a\nb\x1b[2J') }}", r"a b\x1b[2J"),
    "a long word": ("{{ raise_exception('x' * 10**6) }}", "x" * 300),
    "half a surrogate pair in an error": (r"{{ raise_exception('\ud800') }}", r"\ud800"),
    "half a surrogate pair": (LOOP + r"{{ '\ud800' }}", "half of a surrogate pair"),
    "a surrogate pair in two": (r"{{ '\ud83d' }}{{ '\ude00' }}" + LOOP, "half of a surrogate pair"),
}
MARK = "{% generation %}{{ m.content }}{% endgeneration %}"
MISPLACED = {
    "a macro": "{% macro turn(m) %}<|t|>" + MARK + "{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}",
    "a variable": "{% set t %}{% for m in messages %}<|t|>" + MARK + "{% endfor %}{% endset %}{{ t }}",
    "a filter": "{% for m in messages %}{% filter upper %}<|t|>" + MARK + "{% endfilter %}{% endfor %}",
    "another one": "{% for m in messages %}{% generation %}<|t|>" + MARK + "{% endgeneration %}{% endfor %}",
}


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES)
def test_a_way_out_of_the_sandbox_is_refused(source):
    assert "the chat template of the tokenizer: " in refusal(source)


def test_attributes_of_python_are_not_there():
    source = "".join(f"[{each}]" for each in NOTHING.values()) + LOOP.replace("m.content", "m.content + '|'")
    assert rendered(source).text.startswith("[]" * len(NOTHING) + "<|user|>Hi|")


@pytest.mark.parametrize("source, said", ENDLESS.values(), ids=ENDLESS)
def test_what_does_not_end_is_bounded(source, said):
    assert said in refusal(source)


@pytest.mark.parametrize("source, said", WORDS.values(), ids=WORDS)
def test_a_templates_words_are_one_line_of_characters(source, said):
    assert said in refusal(source)


@pytest.mark.parametrize("source", MISPLACED.values(), ids=MISPLACED)
def test_marks_that_do_not_stand_where_they_are_counted(source):
    """Their spans, counted as transformers counts them, would be those of other text."""
    assert "its {% generation %} stands in a macro" in refusal(source)


def test_a_special_token_does_not_take_the_place_of_the_messages():
    for name in ("messages", "tools", "add_generation_prompt"):
        with Renderer(ChatTemplate({"default": LOOP}, "the tokenizer", {name: "<s>"})) as renderer:
            with pytest.raises(ConversationError, match=f"a special token is called {name}"):
                list(renderer.render([CONVERSATION]))


FRAGMENTS = [*ESCAPES.values(), *NOTHING.values(), *(source for source, _ in WORDS.values()), *MISPLACED.values()]
FRAGMENTS += [
    "{{",
    "}}",
    "{%",
    "%}",
    "{#",
    "{% endfor %}",
    "{% endif %}",
    "{% break %}",
    "{% raw %}",
    "\0",
    "é",
    "\ud800",
]
FRAGMENTS += [
    "{% generation %}",
    "{% endgeneration %}",
    "{% set messages = [] %}",
    "{% set messages = messages[::-1] %}",
]


@drawn
@given(st.data())
def test_a_changed_template_is_refused_or_tells_where_the_assistant_writes(data):
    name = data.draw(st.sampled_from(sorted(PLAIN)), "template")
    source = data.draw(st.sampled_from([PLAIN[name], MARKED[name]]))
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        begin = data.draw(st.integers(0, len(source)), "at")
        length = data.draw(st.integers(0, 12), "without")
        source = source[:begin] + data.draw(st.sampled_from(FRAGMENTS), "put in") + source[begin + length :]
    start = time.monotonic()
    try:
        found = rendered(source)
    except ValueError as error:
        assert all(c.isprintable() for c in str(error)) and "Traceback" not in str(error)
    else:
        flat = [place for span in found.spans for place in span]
        assert flat == sorted(flat) and all(0 <= place <= len(found.text) for place in flat)
        assert len(found.text.encode()) <= 4 * template_process.CHARACTERS
    assert time.monotonic() - start < SECONDS
