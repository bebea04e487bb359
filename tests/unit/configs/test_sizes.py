"""Models that no machine holds: refused by the count of their parameters, in each program, before anything is built."""

import argparse
import json
import re
import time

import pytest

from paddle_te import configs
from paddle_te.hosts.paddlenlp import room
from paddle_te.hosts.paddlenlp.loading import from_pretrained, read_config
from paddle_te.hosts.paddlenlp.training.arguments import ArgumentParser
from paddle_te.launch.checks import read_config as launchers
from paddle_te.launch.errors import LaunchError
from paddle_te.planner.command import _config as planners
from paddle_te.planner.model import Model, check_size
from tests.unit.configs.test_reading import sized

HUGE = dict(num_hidden_layers=10_000, hidden_size=2**20, intermediate_size=2**22, num_attention_heads=2**10)
HUGE |= dict(num_key_value_heads=2**10)
LARGE = dict(num_hidden_layers=100, hidden_size=2**15, intermediate_size=2**17, num_attention_heads=2**8)
LARGE |= dict(num_key_value_heads=2**8)


@pytest.fixture
def folder(tmp_path):
    def write(**changes):
        (tmp_path / "config.json").write_text(json.dumps(sized("llama", **changes)))
        return tmp_path

    return write


def launched(name):
    return launchers(argparse.Namespace(model_name=str(name), HOST="paddlenlp", backend="pd"))


@pytest.mark.parametrize("reader, error", [(launched, LaunchError), (lambda path: planners(str(path)), ValueError)])
def test_no_machine_holds_it(folder, reader, error):
    """The count by hand: of a layer 4 h² for attention, 3 h f for the MLP and two norms; embedding, head, last norm."""
    h, f = HUGE["hidden_size"], HUGE["intermediate_size"]
    count = 10_000 * (4 * h * h + 3 * h * f + 2 * h) + 2 * 128 * h + h
    start = time.process_time()
    with pytest.raises(
        error, match=f"num_hidden_layers=10000, hidden_size={h}, .* make {count:,} parameters, and no mac"
    ):
        reader(folder(**HUGE))
    assert time.process_time() - start < 1


@pytest.mark.parametrize("name", ["gpt-175b", "meta-llama/Meta-Llama-3.1-70B", "Qwen/Qwen2.5-72B"])
def test_the_largest_of_ours_are_held(name):
    check_size(configs.read(name), name)


@pytest.mark.parametrize("degrees, sharing", [({}, 1), (dict(tensor_parallel_degree=4, pipeline_parallel_degree=2), 8)])
@pytest.mark.parametrize("dtype, in_fp8, width", [("float32", False, 4), ("bfloat16", False, 2), ("bfloat16", True, 1)])
def test_the_machines_memory(folder, monkeypatch, degrees, sharing, dtype, in_fp8, width):
    """A processes' share of the weights against its memory, to the byte."""
    config = read_config(folder(**LARGE))
    for name, value in degrees.items():
        setattr(config, name, value)
    needed = Model.of(config).parameters * width // sharing
    monkeypatch.setattr(room.device, "host_memory", lambda: needed)
    room.check_room(config, dtype, in_fp8)
    monkeypatch.setattr(room.device, "host_memory", lambda: needed - 1)
    with pytest.raises(
        ValueError, match=f"make {Model.of(config).parameters:,} parameters.*: {needed / 1e9:,.0f} GB of"
    ):
        room.check_room(config, dtype, in_fp8)


def test_before_a_model_is_built(folder, monkeypatch):
    """Nor are files read: there are none."""
    path = folder(**LARGE)
    monkeypatch.setattr(room.device, "host_memory", lambda: 10**9)
    with pytest.raises(ValueError, match="GB of weights in bfloat16 for each process, and this machine has 1 GB"):
        from_pretrained(None, path, read_config(path), "bfloat16")


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"num_hidden_layers": 10**9},
            "config.json: num_hidden_layers=1000000000: it must be a whole number from 1 to",
        ),
        ({"hidden_size": 10**12}, "config.json: hidden_size=1000000000000: it must be a whole number from 1 to"),
        ({"vocab_size": 10**12}, "config.json: vocab_size=1000000000000: it must be a whole number from 1 to"),
        ({"alibi": True}, "config.json: alibi=True: backends paddle and transformer_engine have only False"),
        ({"rope_scaling": "yes"}, "config.json: rope_scaling='yes': it must be an object"),
    ],
)
def test_every_program_says_the_same(folder, changes, message):
    path = folder(**changes)
    flags = ["--model_name_or_path", str(path), "--output_dir", "unused", "--transformer_engine_backend", "paddle"]
    doors = [
        lambda: launched(path),
        lambda: planners(str(path)),
        lambda: read_config(path, "paddle"),
        lambda: parsed(flags),
    ]
    for door in doors:
        with pytest.raises(ValueError) as error:
            door()
        assert re.search(message, str(error.value)) and "\n" not in str(error.value)


def parsed(flags):
    from paddle_te.hosts.paddlenlp.training.arguments import ModelArguments, PreTrainingArguments
    from paddle_te.hosts.paddlenlp.training.datasets import DataArguments

    words = [*flags, "--mock_data", "true"]
    return ArgumentParser((ModelArguments, DataArguments, PreTrainingArguments)).parse_args_into_dataclasses(words)


def test_unknown_keys_are_told_once(folder, capsys, caplog):
    path = folder(our_note="x")
    for _ in range(2):
        launched(path)
        config = read_config(path)
    assert capsys.readouterr().err.count("nothing here knows 'our_note'; the model is built without") == 1
    assert caplog.text.count("nothing here knows 'our_note'") == 1
    assert not hasattr(config, "our_note")
