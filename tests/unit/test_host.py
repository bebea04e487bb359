"""Which host is there, and what to install where none is."""

import pytest

from paddle_te import host


@pytest.mark.parametrize(
    "there, arguments, message",
    [
        ([], dict(what="x"), "x needs PaddleNLP or PaddleFormers: pip install 'paddle_te[paddlenlp]' or 'paddle_te["),
        ([], dict(wanted="paddleformers", what="x"), "x needs PaddleFormers: pip install 'paddle_te[paddleformers]'"),
        (
            ["paddleformers"],
            dict(wanted="paddlenlp", what="x"),
            "x needs PaddleNLP, and this Python has PaddleFormers, which excludes it: pip install "
            "'paddle_te[paddlenlp]' in an environment of its own",
        ),
        (["paddlenlp", "paddleformers"], {}, "HOST: this Python has PaddleNLP and PaddleFormers"),
    ],
)
def test_what_to_install(monkeypatch, there, arguments, message):
    monkeypatch.setattr(host, "installed", lambda: there)
    with pytest.raises(host.HostError) as error:
        host.find(**arguments)
    assert str(error.value).startswith(message)


def test_the_one_that_is_there(monkeypatch):
    monkeypatch.setattr(host, "installed", lambda: ["paddlenlp", "paddleformers"])
    assert host.find(of=["paddlenlp"]) == "paddlenlp" and host.find("paddleformers") == "paddleformers"


def test_a_folder_of_that_name_is_none(monkeypatch, tmp_path):
    (tmp_path / "paddleformers").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(host, "HOSTS", {"paddleformers": "PaddleFormers"})
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert host.installed() == []
