"""The launcher reads the first records of fine-tuning's data, and refuses what training would refuse of them."""

import json

import pytest

from paddle_te.data.records import DEV, TRAIN
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.tuning_data import check_data, check_preferences, questions
from tests import chats

CHAT = {"messages": chats.turns("Hi", "Hello")}
QUESTION = {"src": "Hi", "tgt": "Hello"}


def write(folder, *records, name="train.json"):
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, *[CHAT] * 3)
    return tmp_path


def check(folder, template=chats.PLAIN["chatml"], extra="", **flags):
    tokenizer = chats.save_tokenizer(folder / "tokenizer", template)
    told = dict(dataset_name_or_path=folder, tokenizer_name_or_path=tokenizer, src_length=32, max_length=64)
    check_data(told | flags, extra.split())


def test_what_training_takes_is_taken(folder):
    check(folder)
    write(folder, QUESTION)
    check(folder, template=None)
    check(folder, template="{% broken %}", extra="--chat_template none")


@pytest.mark.parametrize(
    "record, settings, message",
    [
        ({"text": "a"}, {}, r"train.json:4: needs .messages., .conversations.* it has .text."),
        ({"messages": chats.turns("Hi")}, {}, "train.json:4: has no turn of the assistant"),
        (QUESTION | {"tgt": " "}, {}, "train.json:4: .tgt. is empty"),
        (CHAT, dict(template=None), "train.json:1: .* CHAT_TEMPLATE .*[(]tokenizer_name[)]"),
        (CHAT, dict(template="{% broken %}"), "the chat template of .*tokenizer: TemplateSyntaxError"),
        (CHAT, dict(extra="--chat_template nowhere.jinja"), " --chat_template nowhere.jinja: cannot be read"),
        (CHAT, dict(max_length=16), "no conversation fits into max_seqlen 16; the shortest needs [0-9]+$"),
        (CHAT, dict(extra="--max_length 16"), "no conversation fits into --max_length 16"),
        (CHAT, dict(extra="--do_eval true"), "no data for evaluation"),
        (CHAT, dict(extra="--dataset_name_or_path nowhere"), "nowhere: no such file or folder"),
    ],
)
def test_what_training_refuses_is_refused(folder, record, settings, message):
    write(folder, CHAT, CHAT, CHAT, record)
    with pytest.raises(LaunchError, match=message) as error:
        check(folder, **settings)
    assert str(error.value).startswith("dataset: ") and "\n" not in str(error.value)


def test_a_class_that_only_a_host_reads_is_left_to_training(folder):
    check(folder, tokenizer_name_or_path="meta-llama/Meta-Llama-3-8B")
    write(folder, {"text": "a"})
    with pytest.raises(LaunchError, match="train.json:1"):
        check(folder, tokenizer_name_or_path="meta-llama/Meta-Llama-3-8B")


def test_paddleformers_reads_lines_of_questions(folder):
    with pytest.raises(LaunchError, match="train.json:1: HOST=paddleformers reads"):
        questions(folder, TRAIN)
    write(folder, QUESTION)
    write(folder, QUESTION, name="validation.jsonl")
    assert [questions(folder, split).name for split in (TRAIN, DEV)] == ["train.json", "validation.jsonl"]
    (folder / "train.json").write_text(json.dumps([QUESTION]))
    with pytest.raises(LaunchError, match="one file of JSON lines"):
        questions(folder, TRAIN)


def prefers(folder, *records, labelled=False, **flags):
    tokenizer = chats.save_tokenizer(folder / "tokenizer", chats.PLAIN["chatml"])
    write(folder, *records)
    told = dict(dataset_name_or_path=folder, tokenizer_name_or_path=tokenizer, max_seq_len=200, max_prompt_len=64)
    check_preferences(told | flags, [], labelled)


def test_preferences_that_training_takes(folder):
    pair = {"prompt": "Hi", "chosen": "Hello", "rejected": "What"}
    prefers(folder, pair, pair | {"rejected": "Hello"})
    prefers(folder, {"prompt": "Hi", "completion": "Hello", "label": True}, labelled=True)
    (folder / "other.jsonl").write_text(json.dumps(pair))
    prefers(folder, QUESTION, train_dataset_path=str(folder / "other.jsonl"))


def test_preferences_that_training_refuses(folder):
    with pytest.raises(LaunchError, match="dataset: .*train.json:1: needs .chosen. and .rejected."):
        prefers(folder, QUESTION)
    with pytest.raises(LaunchError, match="train.json:1: has one answer with a label, which is KTO's"):
        prefers(folder, {"prompt": "Hi", "completion": "Hello", "label": True})
