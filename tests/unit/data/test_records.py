"""Records of data sets, whatever form their files have."""

import json

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from paddle_te.data.records import DEV, TRAIN, find_files, has_split, read_records
from tests import chats

RECORDS = [chats.CONVERSATIONS["plain"], {"messages": chats.turns("a", "b")}]


def write_arrow(folder):
    """What datasets' save_to_disk writes."""
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(RECORDS)
    with ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))


def write(folder, form):
    folder.mkdir(exist_ok=True)
    if form == "lines":
        (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    elif form == "array":
        (folder / "train.json").write_text(json.dumps(RECORDS, indent=1))
    elif form == "parquet":
        (folder / "data").mkdir()
        parquet.write_table(pa.Table.from_pylist(RECORDS), folder / "data/train-00000-of-00001.parquet")
    else:
        write_arrow(folder / "train")


@pytest.mark.parametrize("form", ["lines", "array", "parquet", "arrow"])
def test_every_form_gives_the_same_records(tmp_path, form):
    write(tmp_path, form)
    files = find_files(tmp_path, TRAIN)
    assert [record for _, record in read_records(files)] == RECORDS
    assert len(list(read_records(files, limit=1))) == 1
    assert not has_split(tmp_path, DEV)


def test_a_split_has_several_names_and_files(tmp_path):
    for name in ("validation-00001.jsonl", "validation-00000.jsonl", "training-notes.json", "test.json"):
        (tmp_path / name).write_text(json.dumps(RECORDS[0]))
    assert [path.name for path in find_files(tmp_path, DEV)] == ["validation-00000.jsonl", "validation-00001.jsonl"]
    with pytest.raises(FileNotFoundError, match="no data for training"):
        find_files(tmp_path, TRAIN)


@pytest.mark.parametrize("names", [("train.json", "train.jsonl"), ("train_sft-00000.json", "train_gen-00000.json")])
def test_files_of_two_splits_are_not_one(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text(json.dumps(RECORDS[0]))
    with pytest.raises(ValueError, match="only one can be the split"):
        find_files(tmp_path, TRAIN)


@pytest.mark.parametrize(
    "text, message",
    [
        ('[{"a": 1},\n {"a" 1}]', "train.json:2: is not JSON"),
        ('[{"a": 1},\n\n 3]', "train.json:3: is not a JSON object"),
        ('[{"a": 1}\n', "train.json:2: is not JSON: the file ends"),
        ('[{"a": 1}]\n[]', "train.json:2: something follows"),
        ("[]", "has no records"),
        ("\n", "has no records"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path, text, message):
    (tmp_path / "train.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        list(read_records(find_files(tmp_path, TRAIN)))


def test_a_damaged_table_is_named(tmp_path):
    for name in ("train.parquet", "train.arrow"):
        (tmp_path / name).write_bytes(b"PAR1 and no more")
        with pytest.raises(ValueError, match=f"{name}: row 1"):
            list(read_records([tmp_path / name]))
