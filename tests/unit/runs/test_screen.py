"""What of a training's log records stands on the screen, and what in the file of details."""

import logging
import warnings

import pytest

from paddle_te.runs import screen


@pytest.fixture
def theirs(capsys):
    """A logger as PaddleNLP's: it prints all that it is told, on the stderr that is captured, and passes nothing on."""
    logger = logging.getLogger("theirs")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.handlers = [logging.StreamHandler()]
    yield logger
    logger.handlers = []


def test_the_screen_has_our_lines_and_others_warnings_and_the_file_has_all(tmp_path, theirs, capsys):
    ours, silent = logging.getLogger("paddle_te.some.module"), logging.getLogger("another")
    with screen.shown():
        ours.info("before there is a folder")
        theirs.info("a table of arguments")
        screen.keep_details(tmp_path, 3)
        ours.debug("for developers")
        ours.warning("look at this")
        theirs.debug("another table")
        theirs.error("no memory")
        silent.warning("old file")
        warnings.warn("deprecated", stacklevel=1)
    lines = [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()]
    path = tmp_path / "logs/details.3.log"
    told = f"the messages of PaddleNLP and Paddle are in {path}"
    shown = ["before there is a folder", told, "warning: look at this", "error: no memory", "warning: old file"]
    assert lines == shown
    details = path.read_text()
    hidden = ["a table of arguments", "for developers", "another table", "UserWarning: deprecated"]
    for message in ["before there is a folder", "look at this", "no memory", "old file", *hidden]:
        assert details.count(message) == 1, message


def test_afterwards_all_is_as_before(theirs):
    before = {logger: list(logger.handlers) for logger in (theirs, logging.root, logging.getLogger("paddle_te"))}
    with pytest.raises(ValueError), screen.shown():
        assert {logger: logger.handlers for logger in before} != before
        raise ValueError
    assert {logger: logger.handlers for logger in before} == before


def test_a_full_disk_does_not_fill_the_screen(tmp_path, theirs, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/details.0.log").symlink_to("/dev/full")
    with screen.shown():
        screen.keep_details(tmp_path, 0)
        theirs.info("a table")
    assert len(capsys.readouterr().err.splitlines()) == 1
