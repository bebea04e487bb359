"""Chat templates: the text and the assistant's part of it, as transformers tells them, and what none may do."""

import json
from pathlib import Path

import pytest

from paddle_te.data.chat_template import ChatTemplate, Renderer
from paddle_te.data.conversations import ConversationError, parse
from paddle_te.data.samples import token_mask
from tests import chats

EXPECTED = json.loads((Path(__file__).parent / "transformers.json").read_text())  # see tests/chats.py
CASES = [(name, called) for name, found in EXPECTED.items() for called in found]


def rendered(source, *records):
    template = ChatTemplate({"default": source}, "folder", chats.SPECIAL)
    with Renderer(template) as renderer:
        return list(renderer.render(parse(f"data:{i}", record) for i, record in enumerate(records, 1)))


@pytest.mark.parametrize("form", ["MARKED", "PLAIN"])
@pytest.mark.parametrize("name", EXPECTED)
def test_tokens_and_masks_are_those_of_transformers(name, form):
    """With and without marks of its own in the template."""
    cases = EXPECTED[name]
    found = rendered(getattr(chats, form)[name], *(chats.CONVERSATIONS[called] for called in cases))
    for (called, (ids, mask)), each in zip(cases.items(), found, strict=True):
        encoding = chats.make_tokenizer().encode(each.text, add_special_tokens=False)
        assert encoding.ids == ids, called
        assert "".join(str(int(bit)) for bit in token_mask(encoding, each.spans)) == mask, called


def test_arguments_of_calls_are_a_text_where_a_template_wants_one():
    (found,) = rendered(chats.PLAIN["thinker"], chats.CONVERSATIONS["calls"])
    assert 'sum{"of": [1, 2]}' in found.text


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_template_that_leaves_calls_out_is_refused(name):
    """Of a call without content Llama 2's would write the word None, and Gemma's an empty turn."""
    calls = chats.CONVERSATIONS["calls"]
    with pytest.raises(
        ConversationError, match=r"^data:1, turn 4 \(assistant\): .* tool_calls \('sum'\).*--chat_template"
    ):
        rendered(chats.PLAIN[name], calls)
    with Renderer(ChatTemplate({"default": chats.PLAIN[name]}, "folder", chats.SPECIAL)) as renderer:
        with pytest.raises(ConversationError, match="turn 4"):
            renderer.prompt(parse("data:1", calls))


@pytest.mark.parametrize(
    "source, message",
    [
        ("{{ 'a' * 10**10 }}", "too much memory"),
        ("{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}", "writes more than"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes more than"),
        ("{{ 3 ** 300000000 }}", "takes more than"),  # without coming back to Python
        ("{% for m in messages %}{{ m.__class__.__mro__ }}{% endfor %}", "turn 1 .user.*'__class__' .* is unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for m in messages %}{{ raise_exception('no ' ~ m.role) }}{% endfor %}", "data:1, turn 1 .user.*: no user"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{% if %}", "TemplateSyntaxError.*line 1"),
        ("{{ messages[1].content }}", "turn 2 .assistant.*--chat_template"),
    ],
)
def test_what_a_template_may_not_do_is_told_in_a_line(source, message):
    with pytest.raises(ValueError, match=message) as error:
        rendered(source, chats.CONVERSATIONS["plain"])
    assert "\n" not in str(error.value) and "folder" in str(error.value)


def test_a_template_that_begins_turns_otherwise_than_its_prompt_is_refused():
    source = chats.PLAIN["chatml"].replace("'<|im_start|>assistant\\n'", "'Answer: '")
    with pytest.raises(ConversationError, match="turn 2 .assistant.*'Answer: '"):
        rendered(source, chats.CONVERSATIONS["plain"])
