"""Prompts: conversations as transformers asks for their next turn, and texts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paddle_te.data.chat_template import ChatTemplate, Renderer
from paddle_te.data.conversations import Conversation
from paddle_te.data.prompts import PromptMaker
from paddle_te.data.tokenizer import load_tokenizer
from tests import chats, small_tokenizers

EXPECTED = json.loads((Path(__file__).parent / "prompts_of_transformers.json").read_text())  # see tests/chats.py


@pytest.fixture
def maker(tmp_path):
    """A function of a template in Jinja."""

    def make(template, **settings):
        tokenizer = load_tokenizer(chats.save_tokenizer(tmp_path / "tokenizer", template))
        return PromptMaker(tokenizer, ChatTemplate.of(tokenizer, "folder"), **settings)

    return make


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("name", EXPECTED)
def test_prompts_are_those_of_transformers(maker, tmp_path, name):
    records = [chats.CONVERSATIONS[called] for called in EXPECTED[name]]
    asked = [record | {"messages": chats.asking(record["messages"])} for record in records]
    made = maker(chats.PLAIN[name]).of_file(write(tmp_path / "prompts.jsonl", *asked))
    assert [prompt.tokens for prompt in made] == list(EXPECTED[name].values())
    assert not any("tgt" in prompt.given for prompt in made)


def test_an_answer_at_the_end_is_what_is_asked_for(maker, tmp_path):
    """Such are the files of fine-tuning."""
    record = chats.CONVERSATIONS["plain"]
    (made,) = maker(chats.PLAIN["llama"]).of_file(write(tmp_path / "dev.json", record))
    assert made.tokens == EXPECTED["llama"]["plain"]
    assert made.given == {"messages": chats.asking(record["messages"]), "tgt": "<2>"}


def test_texts_are_chats_where_that_is_asked_for(maker):
    plain, chat = maker(chats.PLAIN["chatml"]), maker(chats.PLAIN["chatml"], as_chats=True, system="Be kind.")
    (text,) = plain.of_texts("--prompts", ["Hi"])
    assert text.tokens == plain.tokenizer.encode("Hi") and text.given == {"src": "Hi"}
    (prompt,) = chat.of_texts("--prompts", ["Hi"])
    assert prompt.tokens == EXPECTED["chatml"]["system"] and prompt.given == {"src": "Hi"}


def test_a_conversation_keeps_its_own_system_turn(maker, tmp_path):
    file = write(tmp_path / "prompts.jsonl", chats.CONVERSATIONS["system"], {"text": "Hi"})
    made = maker(chats.PLAIN["chatml"], system="Be short.").of_file(file)
    assert made[0].tokens == EXPECTED["chatml"]["system"]
    assert len(made[1].tokens) < 3, "a text is no chat by itself"


def test_variables_go_to_the_template(maker):
    source = "{{ 'no' if enable_thinking is defined and not enable_thinking else 'yes' }}{{ bos_token }}"
    both = [maker(source, as_chats=True)]
    both.append(replace(both[0], template=both[0].template.with_variables({"enable_thinking": False})))
    assert [each.tokenizer.decode(each.of_texts("a", ["b"])[0].tokens) for each in both] == ["yes<s>", "no<s>"]
    with pytest.raises(ValueError, match="--chat_template_kwargs: messages is what"):
        both[0].template.with_variables({"messages": []})


@pytest.mark.parametrize("kind", ["llama", "llama3", "mistral", "deepseek"])
def test_one_token_begins_a_text(tmp_path, kind):
    """These tokenizers write it before a text, and the template does, too."""
    tokenizer = load_tokenizer(small_tokenizers.write(tmp_path / kind, small_tokenizers.folders()[kind]))
    template = ChatTemplate({"default": chats.PLAIN["llama"]}, kind, tokenizer.special_tokens)
    (prompt,) = PromptMaker(tokenizer, template, as_chats=True).of_texts("--prompts", ["hello"])
    assert tokenizer.encode("hello")[0] == tokenizer.bos_token_id == prompt.tokens[0]
    assert prompt.tokens.count(tokenizer.bos_token_id) == 1


def test_a_record_of_another_form_is_told(maker, tmp_path):
    with pytest.raises(ValueError, match='a.jsonl:1: needs "text", "messages", .*; it has query'):
        maker(None).of_file(write(tmp_path / "a.jsonl", {"query": "a"}))


def test_questions_need_no_template(maker, tmp_path):
    alone = replace(maker(None), template=None)
    file = write(tmp_path / "dev.json", {"src": "Hi", "tgt": "Hello"})
    (made,) = alone.of_file(file)
    assert made.tokens == alone.tokenizer.encode("Hi") and made.given["tgt"] == "Hello"
    with pytest.raises(ValueError, match="dev.json:1: is a conversation, and the tokenizer has no chat template"):
        replace(alone, system="s").of_file(file)


@pytest.mark.parametrize(
    "text, message", [("a\udcff", "--prompts, text 1: holds U.DCFF, half of a surrogate pair"), ("", "has no tokens")]
)
def test_what_is_no_prompt_is_told(maker, text, message):
    with pytest.raises(ValueError, match=message):
        maker(None).of_texts("--prompts", [text])


@pytest.mark.parametrize("last, ends", [("It is", "It is"), (" It is ", "It is "), ("¶", "¶")])
def test_a_turn_that_has_begun_goes_on(maker, last, ends):
    """As transformers' continue_final_message."""
    conversation = Conversation("x", chats.turns("What?", last))
    with Renderer(maker(chats.PLAIN["chatml"]).template) as renderer:
        text = renderer.begun(conversation)
    assert text == f"<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n{' ' if last[0] == ' ' else ''}{ends}"


def test_a_template_by_name(maker):
    template = ChatTemplate({"default": "a", "tool_use": "b"}, "folder")
    assert template.named("tool_use").sources == {"default": "b"}
    with pytest.raises(ValueError, match="folder has no chat template 'rag', but default, tool_use"):
        template.named("rag")
