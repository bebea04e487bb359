"""Preference records of all forms, and the rows of tokens that are made of them."""

import json

import numpy as np
import pytest

from paddle_te.data.chat_template import ChatTemplate
from paddle_te.data.conversations import ConversationError
from paddle_te.data.preference_samples import PairMaker, pairs_of
from paddle_te.data.preferences import parse_judged
from paddle_te.data.questions import IGNORED
from paddle_te.data.samples import SampleMaker
from tests import chats
from tests.small_checkpoints import write_lines


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


ONE_TURN = [
    {"messages": [user("q")], "chosen": bot("good"), "rejected": bot("bad")},
    {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "good"},
        "rejected": {"from": "gpt", "value": "bad"},
    },
    {"src": ["q"], "tgt": [], "response": ["bad", "good"], "sort": [0, 1]},
    {"src": "q", "response": ["good", "bad"], "sort": [2, -1]},
    {"prompt": "q", "chosen": "good", "rejected": "bad"},
    {"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"},
    {"prompt": [user("q")], "chosen": [bot("good")], "rejected": [bot("bad")]},
    {"prompt": "q", "chosen": [user("q"), bot("good")], "rejected": [user("q"), bot("bad")]},
    {"chosen": [user("q"), bot("good")], "rejected": [user("q"), bot("bad")]},
]


@pytest.mark.parametrize("record", ONE_TURN)
def test_all_forms_say_the_same(record):
    better, worse = parse_judged("f:1", record).answers
    assert better.conversation.messages == [user("q"), bot("good")] and better.good
    assert worse.conversation.messages == [user("q"), bot("bad")] and not worse.good
    assert (better.asked, better.answer) == (1, [bot("good")])


def test_longer_conversations_keep_their_turns_and_what_stands_beside_them():
    turns = [user("a"), bot("b"), user("c")]
    forms = [
        {"messages": turns, "chosen": bot("d"), "rejected": bot("e"), "system": "s"},
        {"src": ["a", "c"], "tgt": ["b"], "response": ["d", "e"], "sort": [1, 0], "system": "s"},
        {"chosen": [*turns, bot("d")], "rejected": [*turns, bot("e")], "system": "s"},
    ]
    system = {"role": "system", "content": "s"}
    for record in forms:
        better, worse = parse_judged("f:1", record).answers
        assert better.conversation.messages == [system, *turns, bot("d")] and better.asked == worse.asked == 4
        assert worse.answer == [bot("e")] and not worse.plain


LABELLED = [
    {"messages": [user("q"), bot("a")], "label": False},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "kto_tag": False},
    {"instruction": "q", "output": "a", "kto_tag": False},
    {"src": ["q"], "tgt": [], "response": ["a"], "sort": [0]},
    {"prompt": "q", "completion": "a", "label": 0},
    {"prompt": [user("q")], "completion": [bot("a")], "label": False},
]


@pytest.mark.parametrize("record", LABELLED)
def test_one_answer_with_a_label(record):
    (answer,) = parse_judged("f:1", record).answers
    assert answer.conversation.messages == [user("q"), bot("a")] and not answer.good and answer.asked == 1


@pytest.mark.parametrize(
    "changes, fault",
    [
        (dict(rejected="good"), "equal"),
        (dict(chosen=" \n"), "empty"),
        (dict(rejected=[bot("")]), "empty"),
        (dict(rejected={"role": "assistant", "content": None}), "empty"),
    ],
)
def test_pairs_that_teach_nothing_are_told_apart(changes, fault):
    judged = parse_judged("f:1", {"prompt": "q", "chosen": "good", "rejected": "bad"} | changes)
    assert judged.fault == fault and not judged.answers


@pytest.mark.parametrize(
    "record, says",
    [
        ({"prompt": "q"}, '"chosen" and "rejected".*it has "prompt"'),
        ({"chosen": "a", "rejected": "b"}, "has no question"),
        ({"src": ["q"], "response": ["a", "b"], "sort": [1, 1]}, "1 twice"),
        ({"src": ["q", "r"], "tgt": [], "response": ["a", "b"], "sort": [1, 0]}, '"src" has 2 texts and "tgt" 0'),
        ({"src": ["q"], "response": ["a", "b"], "sort": [1]}, "lists of two"),
        ({"prompt": "q", "completion": "a", "label": "yes"}, "must be true or false"),
        ({"messages": [user("q")], "label": True}, "no question before it"),
        ({"prompt": "q", "chosen": [user("x")], "rejected": "b"}, "must end with a turn of the assistant|nothing to"),
        ({"prompt": [3], "chosen": "a", "rejected": "b"}, '"prompt" must be a text, a turn'),
        ({"prompt": [user("")], "chosen": "a", "rejected": "b"}, "turn 1.*empty"),
    ],
)
def test_other_records_are_refused_in_one_line(record, says):
    with pytest.raises(ConversationError, match=f"^f:1.*({says})") as error:
        parse_judged("f:1", record)
    assert "\n" not in str(error.value)


class Encoder:
    kind, eos_token_id = "Encoder", 1

    def __init__(self):
        self.backend = chats.make_tokenizer()

    def encoding(self, text, add_special_tokens):
        return self.backend.encode(text, add_special_tokens=add_special_tokens)

    def __call__(self, text, add_special_tokens=True):
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return {"input_ids": [0, *ids] if add_special_tokens else ids}

    def decode(self, tokens):
        return self.backend.decode(list(tokens), skip_special_tokens=False)


def made(tmp_path, records, labelled=False, name="chatml", tokens=1000, asked=1000):
    template = name and ChatTemplate({"default": chats.PLAIN[name]}, "folder", chats.SPECIAL)
    maker = PairMaker(SampleMaker(Encoder(), template, 10, 20), tokens, asked)
    return pairs_of([write_lines(tmp_path / "train.json", records)], maker, labelled), maker.tally


def learned(sample):
    return Encoder().decode(sample.labels[sample.labels != IGNORED])


@pytest.mark.parametrize("record", ONE_TURN)
def test_a_pair_learns_its_answers_only(tmp_path, record):
    (pair,), _ = made(tmp_path, [record])
    assert [learned(sample) for sample in pair.samples] == ["good<|im_end|>\n", "bad<|im_end|>\n"]
    first, second = (sample.input_ids[: pair.repeated + 1] for sample in pair.samples)
    assert np.array_equal(first, second)
    assert Encoder().decode(first) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert len(pair) == sum(len(sample.input_ids) for sample in pair.samples)


def test_answers_before_the_last_are_not_learned(tmp_path):
    turns = [user("a"), bot("b"), user("c")]
    (pair,), _ = made(tmp_path, [{"messages": turns, "chosen": bot("d"), "rejected": bot("e")}])
    assert [learned(sample) for sample in pair.samples] == ["d<|im_end|>\n", "e<|im_end|>\n"]


def test_without_a_template_texts_are_joined_as_paddlenlp_does(tmp_path):
    record = {"src": ["a", "c"], "tgt": ["b"], "response": ["d", "e"], "sort": [1, 0]}
    (pair,), _ = made(tmp_path, [record], name=None)
    word = lambda text: Encoder()(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    asked = [0, *word("a"), *word("b"), 1, 0, *word("c")]
    assert pair.samples[0].input_ids.tolist() == [*asked, *word("d")]
    assert pair.samples[0].labels.tolist() == [IGNORED] * (len(asked) - 1) + [*word("d"), 1]
    with pytest.raises(ConversationError, match="has no chat template"):
        made(tmp_path, [ONE_TURN[0]], name=None)


def test_what_is_left_out_is_counted(tmp_path):
    long = "x" * 60
    records = [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": "q", "chosen": "good", "rejected": "good"},
        {"prompt": "q", "chosen": "", "rejected": "bad"},
        {"prompt": "q", "chosen": long, "rejected": "bad"},
        {"prompt": long, "chosen": "good", "rejected": "bad"},
    ]
    (pair,), _ = made(tmp_path, records[:1])
    room = len(pair) + 40
    pairs, tally = made(tmp_path, records, tokens=room)
    assert len(pairs) == 1
    assert tally.words("pairs", "--max_seq_len 9") == (
        "1 pairs; left out: 1 with equal answers, 1 with an empty answer, 2 with more tokens than --max_seq_len 9"
    )
    pairs, tally = made(tmp_path, records, asked=50)
    assert len(pairs) == 2 and tally.left_out["long"] == 1
    with pytest.raises(ValueError, match="no pair is left"):
        made(tmp_path, records[1:3])


def test_kto_puts_the_answer_of_the_record_before_behind_a_question(tmp_path):
    records = [{"prompt": p, "completion": c, "label": n != 1} for n, (p, c) in enumerate(["qa", "rb", "sc"])]
    pairs, _ = made(tmp_path, records, labelled=True)
    assert [[learned(sample) for sample in pair.samples] for pair in pairs] == [
        [f"{mine}<|im_end|>\n", f"{other}<|im_end|>\n"] for mine, other in ("ac", "ba", "cb")
    ]
    assert [pair.good for pair in pairs] == [True, False, True]
    asked = [pair.samples[1].input_ids[: pair.repeated + 1] for pair in pairs]
    assert [Encoder().decode(tokens).count(p) > 0 for tokens, p in zip(asked, "qrs", strict=True)] == [True] * 3


def test_kto_takes_pairs_apart_and_cuts_the_other_answer(tmp_path):
    record = {"prompt": "q", "chosen": "a", "rejected": "b" * 9}
    pairs, _ = made(tmp_path, [record], labelled=True)
    assert [pair.good for pair in pairs] == [True, False]
    room = len(pairs[0].samples[0].input_ids) + pairs[0].repeated + 1
    (cut,), tally = made(tmp_path, [record], labelled=True, tokens=room)
    assert len(cut) == room and learned(cut.samples[1]) == "b"
    assert tally.left_out["long"] == 1
    with pytest.raises(ConversationError, match="which is KTO's"):
        made(tmp_path, [{"prompt": "q", "completion": "a", "label": True}])


def test_files_may_be_arrays(tmp_path):
    (tmp_path / "train.json").write_text(json.dumps(ONE_TURN))
    maker = PairMaker(SampleMaker(Encoder(), ChatTemplate({"default": chats.PLAIN["chatml"]}, "f"), 9, 9), 1000, 1000)
    assert len(pairs_of([tmp_path / "train.json"], maker, labelled=False)) == len(ONE_TURN)
