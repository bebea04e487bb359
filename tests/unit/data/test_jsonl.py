import pytest

from paddle_te.data.jsonl import field, read_json_lines


def test_records_and_where_they_stand(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes('\ufeff{"text": "ä"}\r\n\n{"text": "\u2028"}'.encode())  # byte order mark, blank line, no last end
    assert read_json_lines(path) == [(f"{path}:1", {"text": "ä"}), (f"{path}:3", {"text": "\u2028"})]
    assert len(read_json_lines(path, limit=1)) == 1


@pytest.mark.parametrize(
    "line, message",
    [
        (b'{"a" 1}', "data.jsonl:2: is not JSON: Expecting ':' delimiter .character 6.$"),
        (b"{", "data.jsonl:2: is not JSON"),
        (b"[1]", "data.jsonl:2: is not a JSON object"),
        (rb'{"text": "a \ud800"}', "data.jsonl:2: holds U.D800, half of a surrogate pair"),
        (rb'{"a": [{"\udfff b": 1}]}', "data.jsonl:2: holds U.DFFF, half of a surrogate pair"),
        ('{"text": "ä"}'.encode("latin-1"), "data.jsonl:2: is not JSON: 'utf-8' codec"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        read_json_lines(path)


def test_no_file_no_records_no_field(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_json_lines(tmp_path / "data.jsonl")
    (tmp_path / "data.jsonl").write_text("\n \n")
    with pytest.raises(ValueError, match="has no records"):
        read_json_lines(tmp_path / "data.jsonl")
    with pytest.raises(ValueError, match='x:1: needs "a", a str; it has b'):
        field("x:1", {"b": 1}, "a", str)


def test_a_whole_surrogate_pair_is_a_character(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(rb'{"text": "\ud83d\ude00"}')
    assert read_json_lines(tmp_path / "data.jsonl")[0][1] == {"text": "😀"}
