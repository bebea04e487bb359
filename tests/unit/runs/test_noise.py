"""Which lines of Paddle and PaddleNLP stay off the screen, and that all others stand there at once."""

import logging
import os
import sys

import pytest

from paddle_te.runs import noise, screen

PROMOTION = (
    "W1125 14:09:54.015506 17235 dygraph_functions.cc:122072] Got different data type, run type promotion "
    "automatically, this may cause data type been changed."
)
KNOWN = [
    PROMOTION,
    "    reading sizes...",
    " > only one epoch required, setting separate_last_epoch to False",
    "    using:\n     number of documents:       591\n     sequence length:           64",
    f"{' Modified FLAGS detected ':=^71}",
    "FLAGS(name='FLAGS_tcp_store_using_libuv', current_value=False, default_value=True)",
    "While using ClipGradByGlobalNorm in GroupShardedStage3, the grad clip of original optimizer will be changed.",
]
NEEDED = [
    "W1125 14:09:54.015506 17235 gpu_resources.cc:12] Got different driver, nothing will work.",
    "E1125 14:09:54.015506 17235 dygraph_functions.cc:122072] Got different data type",
    "There was an error trying to create the data cache directory (/data)",
    "    reading sizes... failed",
    f"{KNOWN[-1]}\nbut for one rank",
    "=====",
    "test:",
    "",
]


@pytest.mark.parametrize("text", KNOWN)
def test_what_is_known(text):
    assert noise.is_known(text) and noise.is_known(f"{text}\n")


@pytest.mark.parametrize("text", NEEDED)
def test_what_is_not(text):
    assert not noise.is_known(text)


def test_every_entry_says_why():
    assert all(known.why.endswith(".") and known.lines for known in noise.KNOWN)


def test_prints_go_to_the_details_or_stay(tmp_path, capsys):
    with screen.shown():
        screen.keep_details(tmp_path, 0)
        for text in KNOWN:
            print(text)
            sys.stderr.write(f"{text}\n")
        print("callbacks:", "[<paddleformers.trainer.Callback>]")  # word by word
        sys.stderr.write("50%")  # as a progress bar
        assert capsys.readouterr().err.endswith("50%")
        print("\n".join(NEEDED))
        logging.getLogger("paddle").warning(KNOWN[-1])
        logging.getLogger("paddle").warning("no memory")
    shown = capsys.readouterr()
    assert shown.out == "\n".join(NEEDED) + "\n"
    assert "no memory" in shown.err and shown.err.count("\n") == 1
    details = (tmp_path / "logs/details.0.log").read_text()
    lines = [line.strip() for text in KNOWN[:-1] for line in text.splitlines()]
    assert all(details.count(line) == 2 for line in lines) and details.count(KNOWN[-1]) == 3


def test_what_c_code_writes(capfd, caplog):
    with caplog.at_level("DEBUG"), noise.kept_out_of_descriptor(2):
        os.write(2, f"{PROMOTION}\n{NEEDED[0]}\n".encode())
    assert capfd.readouterr().err == f"{NEEDED[0]}\n" and PROMOTION in caplog.text
