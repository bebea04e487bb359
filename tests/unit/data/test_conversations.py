"""Records as conversations: the forms that people have, and what is wrong with a record."""

import pytest

from paddle_te.data.conversations import ConversationError, parse, parse_prompt
from tests import chats

USER, ANSWER = chats.turns("a", "b")


@pytest.mark.parametrize(
    "record, messages",
    [
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, [USER, ANSWER]),
        ({"conversations": [USER, ANSWER]}, [USER, ANSWER]),
        ({"src": "a", "tgt": "b"}, [USER, ANSWER]),
        ({"src": ["a", "a"], "tgt": ["b", "b"]}, [USER, ANSWER] * 2),
        ({"instruction": "a", "input": "", "output": "b"}, [USER, ANSWER]),
        ({"instruction": "a", "input": "c", "output": "b"}, chats.turns("a\nc", "b")),
        ({"instruction": "", "input": "a", "output": "b", "history": None, "text": "all"}, [USER, ANSWER]),
        ({"instruction": "c", "output": "d", "history": [["a", "b"]]}, chats.turns("a", "b", "c", "d")),
        ({"instruction": "a", "output": "b", "system": "s"}, chats.turns("a", "b", system="s")),
        ({"instruction": "c", "output": "d", "conversations": [USER, ANSWER, USER]}, [USER, ANSWER, USER]),
        ({"messages": [USER, ANSWER], "system": "s"}, chats.turns("a", "b", system="s")),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, ANSWER]}, [USER, ANSWER]),
        ({"messages": [USER, ANSWER | {"tool_calls": None}]}, [USER, ANSWER]),
        ({"messages": [USER, ANSWER | {"weight": 1}]}, [USER, ANSWER | {"weight": 1}]),
    ],
)
def test_forms(record, messages):
    assert parse("f:1", record).messages == messages


@pytest.mark.parametrize("record", [{"src": "a", "tgt": "b"}, {"instruction": "a", "output": "b"}])
def test_a_question_and_its_answer_need_no_template(record):
    """Unless more stands beside them."""
    assert parse("f:1", record).question and not parse("f:1", record | {"system": "s"}).question
    more = {"src": ["a", "a"], "tgt": ["b", "b"]} if "src" in record else record | {"history": [["a", "b"]]}
    assert not parse("f:1", more).question


def test_calls_of_tools_have_objects_as_arguments():
    wanted = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    record = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": "[{}]"}
    conversation = parse("f:1", record)
    assert conversation.messages[1]["tool_calls"] == wanted and conversation.tools == [{}]
    shared = {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}
    assert parse("f:1", {"conversations": [USER, shared]}).messages[1]["tool_calls"] == wanted


@pytest.mark.parametrize(
    "record, message",
    [
        ({"text": "a"}, '"messages", "conversations".*it has "text"'),
        ({"messages": [USER], "src": "a"}, "one of these forms"),
        ({"messages": []}, "must be a list of turns"),
        ({"messages": [USER]}, "no turn of the assistant"),
        ({"messages": [USER, ANSWER | {"weight": 0}, USER, ANSWER]}, '"weight" of an answer is 0'),
        ({"messages": [USER, {"role": "helper", "content": "b"}]}, "turn 2: .*'helper'"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "turn 2 .assistant.: .content. is empty"),
        ({"messages": [USER, {"role": "assistant", "content": 3}]}, "turn 2 .assistant.: .content. must be"),
        ({"messages": [USER, {"role": "assistant", "content": "\ud800"}]}, "turn 2 .assistant.: is no text"),
        ({"conversations": [{"from": "narrator", "value": "a"}]}, "turn 1: .from. is 'narrator'"),
        ({"messages": [USER, ANSWER], "tools": "{"}, '"tools" is no JSON'),
        ({"src": ["a", "b"], "tgt": ["c"]}, '"src" has 2 texts and "tgt" 1'),
        ({"src": "a"}, '"tgt"'),
        ({"src": "a", "tgt": 5}, '"tgt" must be a text or a list of texts, not 5'),
        ({"src": "a", "tgt": "b", "history": [["c", "d"]]}, '"history" stands beside "src"'),
        ({"instruction": "a"}, 'needs "output"'),
        ({"instruction": "a", "history": [["b", "c"]]}, 'needs "output"'),
        ({"instruction": "a", "output": ""}, "turn 2 .assistant.: .content. is empty"),
        ({"instruction": "", "input": "", "output": "b"}, "turn 1 .user.: .content. is empty"),
        ({"instruction": "a", "output": "b", "history": ["c", "d"]}, '"history" must be a list of pairs'),
        ({"instruction": "a", "output": "b", "history": [["c", 5]]}, "turn 2 .assistant.: .content. must be a text"),
        ({"instruction": ["a"], "output": "b"}, '"instruction" and "input" must be texts'),
        ({"output": "b"}, '"instruction" and "output", one of these forms'),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]}, "no text .image_url."),
    ],
)
def test_a_record_that_is_no_conversation_is_told_with_its_turn(record, message):
    with pytest.raises(ConversationError, match=message) as error:
        parse("train.json:7", record)
    assert str(error.value).startswith("train.json:7") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "record, count, answer",
    [
        ({"messages": [USER]}, 1, None),
        ({"messages": [USER, ANSWER, USER]}, 3, None),
        ({"messages": [USER, ANSWER, USER, ANSWER]}, 3, "b"),
        ({"src": "a"}, 1, None),
        ({"src": "a", "tgt": "b"}, 1, "b"),
        ({"src": ["a", "a"], "tgt": ["b"]}, 3, None),
        ({"instruction": "a"}, 1, None),
        ({"instruction": "a", "output": "b"}, 1, "b"),
        ({"conversations": [{"from": "human", "value": "a"}], "system": "s"}, 2, None),
    ],
)
def test_a_prompt_ends_where_the_assistant_answers(record, count, answer):
    conversation, wanted = parse_prompt("f:1", record)
    everything = [USER, ANSWER, USER, ANSWER]
    system = chats.turns(system="s") if "system" in record else []
    assert (conversation.messages, wanted) == ([*system, *everything][:count], answer)


@pytest.mark.parametrize(
    "record, message",
    [
        ({"messages": [ANSWER]}, "nothing that the assistant could answer"),
        ({"src": ["a", "b", "c"], "tgt": ["d"]}, "each question needs its answer"),
        ({"tgt": "d"}, 'needs "src"'),
        ({"text": "a"}, "one of these forms"),
    ],
)
def test_a_record_that_asks_for_nothing_is_told(record, message):
    with pytest.raises(ConversationError, match=message):
        parse_prompt("f:1", record)
