"""PaddleNLP's chat_template.json, rendered as PaddleNLP renders it."""

import json

import pytest
from paddlenlp.transformers.tokenizer_utils import ChatTemplate as PaddleNLPs

from paddle_te.data.chat_template import ChatTemplate, Renderer
from paddle_te.data.conversations import ConversationError, parse
from paddle_te.data.host_tokenizer import HostTokenizer
from paddle_te.data.paddlenlp_template import as_template
from paddle_te.data.tokenizer import TokenizerError, load_tokenizer
from tests import chats

CHATML = {
    "system": "<|im_start|>system\nBe kind.<|im_end|>\n",
    "conversation": ["<|im_start|>user\n{{user}}<|im_end|>\n<|im_start|>assistant\n", "{{bot}}<|im_end|>\n"],
    "query": "<|im_start|>user\n{{query}}<|im_end|>\n<|im_start|>assistant\n",
}
BLANKS = {  # beside tags, where Jinja would take them away
    "system": None,
    "conversation": [
        "{% for i in [1] %} {{i}}\n {% endfor %}\n{{user}} {{index}}\n",
        "\n\n{{bot}}{% if is_last %}\n{% endif %} ",
    ],
    "query": None,
}


@pytest.mark.parametrize("said", [CHATML, BLANKS])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_it_writes_what_paddlenlp_writes(said, count):
    rounds = [[f" q{i}\n", f"\nanswer {i} "] for i in range(count)]
    theirs, context = PaddleNLPs.from_dict(said), {"is_training": True}
    text, spans = theirs.render_system(context), []
    for i, pair in enumerate(rounds):
        context |= dict(is_first=i == 0, is_last=i == count - 1)
        user, bot = theirs.render_conversation(pair, index=i, context_data=context)
        spans.append([len(text + user), len(text + user + bot)])
        text += user + bot
    asked = theirs([*rounds[:-1], rounds[-1][:1]], context_data={"is_training": False})
    questions, answers = zip(*rounds, strict=True)
    conversation = parse("f:1", {"src": list(questions), "tgt": list(answers)})
    with Renderer(ChatTemplate({"default": as_template(said)}, "folder")) as renderer:
        (found,) = renderer.render([conversation])
        assert (found.text, found.spans) == (text, spans)
        assert renderer.prompt(conversation.up_to(2 * count - 2)) == asked
        for messages in (chats.turns("a", "b", system="s"), chats.turns("a", "b", "c")[1:]):
            with pytest.raises(ConversationError, match="no turn of the system|questions and answers in turn"):
                list(renderer.render([parse("f:1", {"messages": messages})]))


class OfAHost:
    """A host's tokenizer, as far as its template goes."""

    special_tokens_map, init_kwargs = {}, {}

    def __init__(self, template):
        self.chat_template = template


def test_a_hosts_tokenizer_has_it_or_refuses():
    assert HostTokenizer(OfAHost(None)).chat_templates == {}
    assert HostTokenizer(OfAHost(PaddleNLPs.from_dict(CHATML))).chat_templates == {"default": as_template(CHATML)}
    compiled = HostTokenizer(OfAHost(PaddleNLPs._compile_jinja_template("{{ 1 }}"))).chat_templates
    with (
        Renderer(ChatTemplate(compiled, "folder")) as renderer,
        pytest.raises(ConversationError, match="OfAHost.*file"),
    ):
        list(renderer.render([parse("f:1", {"src": "a", "tgt": "b"})]))


def test_a_tokenizers_folder_has_it(tmp_path):
    folder = chats.save_tokenizer(tmp_path / "tokenizer", "{{ 1 }}")
    (folder / "chat_template.json").write_text(json.dumps(CHATML))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_templates == {"default": as_template(CHATML)}
    tokenizer.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").chat_templates == tokenizer.chat_templates
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of transformers' processors"}))
    assert load_tokenizer(folder).chat_templates == {"default": "{{ 1 }}"}
    (folder / "chat_template.json").write_text(json.dumps({"query": "{{query}}"}))
    with pytest.raises(TokenizerError, match="chat_template.json: needs .conversation."):
        load_tokenizer(folder)
