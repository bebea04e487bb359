"""tools/docs_docstrings.py: how docstrings look on the site."""

from tools.docs_docstrings import as_list


def test_lines_that_name_arguments_become_a_list():
    text = "What it does: all of it.\n\nx: [b, s].\na_b, c: both,\n    of them.\nRaises ValueError: never."
    assert as_list(text) == (
        "What it does: all of it.\n\n\n- `x`: [b, s].\n- `a_b, c`: both,\n    of them.\n\nRaises ValueError: never."
    )


def test_other_text_stays():
    text = "One sentence.\n\nAnother: with a colon.\n    indented: code"
    assert as_list(text) == text
