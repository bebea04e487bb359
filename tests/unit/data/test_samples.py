"""Samples of conversations: labels, and what becomes of those that are too long."""

import numpy as np
import pytest

from paddle_te.data.chat_template import ChatTemplate
from paddle_te.data.conversations import ConversationError, parse
from paddle_te.data.packs import pack
from paddle_te.data.questions import IGNORED
from paddle_te.data.samples import SampleMaker
from tests import chats


class Encoder:
    kind, eos_token_id = "Encoder", 0

    def __init__(self):
        self.backend = chats.make_tokenizer()

    def encoding(self, text, add_special_tokens):
        return self.backend.encode(text, add_special_tokens=add_special_tokens)


def maker(max_length, name="chatml"):
    template = name and ChatTemplate({"default": chats.PLAIN[name]}, "folder", chats.SPECIAL)
    return SampleMaker(Encoder(), template, max_length // 2, max_length)


def length(messages, name="chatml"):
    (sample,) = maker(10**4, name).samples([parse("f:1", {"messages": messages})])
    return len(sample.input_ids) + 1


def test_a_label_is_the_next_token_of_an_answer():
    (sample,) = maker(100).samples([parse("f:1", {"messages": chats.turns("Hi", "yes", "q", "no")})])
    decode = Encoder().backend.decode
    learned = [token for token in sample.labels.tolist() if token != IGNORED]
    assert decode(learned, skip_special_tokens=False) == "yes<|im_end|>\nno<|im_end|>\n"
    known = sample.labels[:-1] != IGNORED
    assert np.array_equal(sample.labels[:-1][known], sample.input_ids[1:][known])


@pytest.mark.parametrize("name", ["chatml", "rethinker"])
def test_long_conversations_end_after_an_answer(name):
    """rethinker writes the last turn otherwise than those before it."""
    texts = ["a", "b", "c", "d", "e", "f" * 50]
    room = length(chats.turns(*texts[:4]), name)
    made = maker(room, name)
    samples = list(made.samples(parse("f:1", {"messages": chats.turns(*texts[:n])}) for n in (6, 4)))
    assert np.array_equal(samples[0].input_ids, samples[1].input_ids) and len(samples[0].input_ids) == room - 1
    assert (made.tally.kept, made.tally.cut, made.tally.dropped) == (2, 1, 0)
    needed = length(chats.turns(*texts[:2]), name)
    made = maker(needed - 1, name)
    longer = chats.turns("a" * 50, "b")
    assert not list(made.samples(parse("f:1", {"messages": turns}) for turns in (chats.turns(*texts), longer)))
    assert (made.tally.dropped, made.tally.shortest) == (2, needed)


def test_without_a_template_a_conversation_is_refused_with_both_remedies():
    with pytest.raises(ConversationError, match="f:1.*--chat_template.*--tokenizer_name_or_path"):
        list(maker(100, None).samples([parse("f:1", {"messages": chats.turns("a", "b")})]))


class OfAHost:
    """A tokenizer as a host has it: without `encoding`."""

    kind, eos_token_id = "Llama3Tokenizer", None


@pytest.mark.parametrize(
    "name, message", [("chatml", "Llama3Tokenizer is .*--chat_template none"), (None, "no eos_token")]
)
def test_a_tokenizer_that_cannot_make_samples_is_refused_before(name, message):
    template = name and ChatTemplate({"default": chats.PLAIN[name]}, "folder", chats.SPECIAL)
    with pytest.raises(ValueError, match=message):
        SampleMaker(OfAHost(), template, 8, 16)


def test_a_template_whose_marks_are_empty_is_refused():
    made = maker(100)
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}{% endgeneration %}"
    made.template = ChatTemplate({"default": source}, "folder", {})
    with pytest.raises(ConversationError, match="f:1.*marks nothing"):
        list(made.samples([parse("f:1", {"messages": chats.turns("a", "b")})]))


def test_packs_hold_each_sample_once_and_no_more_than_fits(seed):
    lengths = np.random.default_rng(seed).integers(1, 60, 1200).tolist()
    packs = {greedy: pack(lengths, 64, greedy) for greedy in (False, True)}
    for found in packs.values():
        assert sorted(number for packed in found for number in packed) == list(range(1200))
        assert all(sum(lengths[number] for number in packed) <= 64 for packed in found)
    assert [number for packed in packs[False] for number in packed] == list(range(1200))
    assert len(packs[True]) < len(packs[False])
