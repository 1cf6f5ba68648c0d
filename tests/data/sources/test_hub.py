import csv
import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from lm.data.kinds import ChatRecord, HubConfig, LabelRecord, TextConfig
from lm.data.sources import hub as hub_module
from lm.data.sources.files import TextSource
from lm.data.sources.found import find_files
from lm.data.sources.hub import HubSource
from lm.data.sources.recorded import RecordedSource
from lm.errors import ConfigError

PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}
TEXTS = ["one, two", 'quoted "three"', "line\nbreak", "日本 👧", "", "NA", "12"]


def table(path: Path, column: list[Any], name: str = "text") -> Path:
    rows = pyarrow.table({"id": list(range(len(column))), name: column})
    if ".parquet" in path.name:
        pyarrow.parquet.write_table(rows, path, row_group_size=2)
    else:
        quoted = ['"' + str(text).replace('"', '""') + '"' for text in column]
        path.write_text("".join(f"{a},{b}\n" for a, b in zip(["id", *range(len(column))], [name, *quoted], strict=True)))
    ending = path.suffix if path.suffix in PACK else ""
    path.write_bytes(PACK[ending](path.read_bytes()))
    return path


def texts(path: Path, skipped: int = 0, **options: Any) -> list[str]:
    source = TextSource(TextConfig(files=str(path), **options), path.parent)
    found = ["".join(document.chunks) for document in source.documents()]
    assert source.skipped == skipped and source.position() == source.total
    return found


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.csv.zst", "a.parquet"])
def test_rows_are_documents(tmp_path: Path, name: str) -> None:
    assert texts(table(tmp_path / name, TEXTS)) == [text for text in TEXTS if text]


@pytest.mark.parametrize("kind", [".csv", ".parquet"])
def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path, kind: str) -> None:
    path = table(tmp_path / f"a{kind}", TEXTS, name="body")
    with pytest.raises(ConfigError, match=rf"a{kind} row 1: field 'text' is missing; the fields are id, body. Set data.field"):
        texts(path)
    assert len(texts(path, field="body")) == 6


def test_a_package_that_does_not_fit_is_not_told_as_a_fault_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen with pyarrow 26 and numpy 1.26, which pip installs side by side: the file was to be fixed, or left out."""
    path = table(tmp_path / "a.parquet", TEXTS)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"a\.parquet: a package that reads it is missing or does not fit \(.*datasets.*\)\. Install"):
        texts(path)


def test_of_a_table_with_texts_no_other_column_is_made_into_python_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: 36 further columns, one of 64 numbers a row, took two thirds of the time of a preparation."""
    made: set[str] = set()
    monkeypatch.setattr(hub_module, "_without_filled", lambda row: made.update(row) or row)
    path = table(tmp_path / "a.parquet", TEXTS)
    assert len(texts(path)) == len(hub(tmp_path)) == 6
    assert made == {"text"}


def test_a_row_without_text_is_named_or_skipped_and_counted(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", ["one", None, "three"])
    with pytest.raises(ConfigError, match=r"a.parquet row 2: field 'text' holds null, not a string"):
        texts(path)
    assert texts(path, skipped=1, on_bad_record="skip") == ["one", "three"]


def test_the_keys_that_arrow_fills_in_reach_no_tool_and_no_call_of_one(tmp_path: Path) -> None:
    """Seen to fail: each call came with the arguments of all others, null, and was written and learned so."""
    calls = [{"function": {"name": name, "arguments": of}} for name, of in (("add", {"a": 1}), ("find", {"text": "b", "at": {"page": 2}}))]
    tools = [{"name": name, "parameters": {"properties": {of: {"type": "string"}}}} for name, of in (("add", "a"), ("find", "text"))]
    said = [{"role": "user", "content": "?"}, *({"role": "assistant", "content": "", "tool_calls": [call]} for call in calls)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": said, "tools": tools}]), tmp_path / "a.parquet")
    (found,) = TextSource(TextConfig(files=str(tmp_path / "a.parquet"), record=ChatRecord()), tmp_path).documents()
    assert json.loads(found.turns[0].text) == tools and [turn.also for turn in found.turns[:2]] == ["", ""]
    assert [json.loads(turn.also) for turn in found.turns[2:]] == [{"tool_calls": [call]} for call in calls]


def test_a_parquet_file_cut_in_half_is_named(tmp_path: Path) -> None:
    """Seen to fail with the readers' errors passed on."""
    path = table(tmp_path / "a.parquet", TEXTS)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ConfigError, match=r"a.parquet: cannot be read \("):
        texts(path)


def test_a_csv_row_with_too_many_fields_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,text\n1,one\n2,two,three,four\n")
    with pytest.raises(ConfigError, match=r"a.csv: cannot be read \(.*line 3"):
        texts(path)


@pytest.mark.parametrize("rows", ["one, two\nthree, four\n", "one,\ntwo,three\n"])
def test_a_first_csv_row_with_too_many_fields_is_named_too(tmp_path: Path, rows: str) -> None:
    """Seen to fail with pandas, which took the first column for an index: the text was ' two'."""
    (tmp_path / "a.csv").write_text(f"text\n{rows}")
    with pytest.raises(ConfigError, match=r"a.csv: cannot be read \(line [23] has 2 fields, and the header 1\)"):
        texts(tmp_path / "a.csv")


def test_a_comma_at_the_end_of_each_csv_row_moves_no_column(tmp_path: Path) -> None:
    """Seen to fail with pandas: the text was '1'."""
    (tmp_path / "a.csv").write_text("text,label\none,1,\ntwo,2,\nthree\n")
    assert texts(tmp_path / "a.csv") == ["one", "two", "three"]


def test_of_csv_columns_with_one_name_the_first_counts(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,text\none,two\n")
    assert texts(tmp_path / "a.csv") == ["one"]


def test_a_csv_field_without_an_end_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text\none\n"two\nthree\n')
    with pytest.raises(ConfigError, match=r"a.csv: cannot be read \(a quoted field has no end\)"):
        texts(tmp_path / "a.csv")


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 17])
def test_csv_is_read_alike_in_chunks_of_any_size(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.data.sources.files._CHUNK", size)
    lines = ["\ufeffid,text", '1,"line\r\nbreak"', "", "2,a \x00 zero", "3,\x85\u2028日本", '4,"b ""c"""', "5," + "long" * (size << 4)]
    (tmp_path / "a.csv").write_bytes("\r\n".join(lines).encode())
    found = texts(tmp_path / "a.csv")
    assert found == ["line\r\nbreak", "a \x00 zero", "\x85\u2028日本", 'b "c"', "long" * (size << 4)]


def test_a_tsv_is_read_as_tables_are_written_and_a_quote_that_only_begins_a_field_is_named(tmp_path: Path) -> None:
    """Seen to fail with such quotes read as those of csv: fields that have none around them lost their own, or were one of several rows."""
    rows = ["a, b", '"so" she said', "tab\tand\nline", "日本", ""]
    with (tmp_path / "a.tsv").open("w", newline="") as file:
        csv.writer(file, "excel-tab").writerows([("id", "text"), *enumerate(rows)])
    assert texts(tmp_path / "a.tsv") == rows[:-1]
    (tmp_path / "a.tsv").write_text('text\tid\nso "she" said\t1\n"so" she said\t2\n')
    with pytest.raises(ConfigError, match=r"a.tsv: cannot be read \(line 3: a quote begins a field and does not end it\). Fix the file"):
        texts(tmp_path / "a.tsv")


def test_csv_that_is_not_utf8_is_named_by_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"id,text\n1,caf\xe9\n")
    with pytest.raises(ConfigError, match=r"a.csv: byte 13 is not UTF-8"):
        texts(path)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_truncated_packed_table_is_named(tmp_path: Path, ending: str) -> None:
    path = table(tmp_path / f"a.csv{ending}", [f"text {n}" for n in range(500)])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ConfigError, match=rf"a.csv{ending}: the file is truncated or damaged"):
        texts(path)


def hub(path: Path, **options: Any) -> list[tuple[str, str]]:
    """A local folder stands for a dataset of the hub: `datasets` reads both by the same call."""
    source = HubSource(HubConfig(name=str(path), **options))
    return [(document.split, "".join(document.chunks)) for document in source.documents()]


def test_a_dataset_is_read_by_its_splits(tmp_path: Path) -> None:
    table(tmp_path / "train.parquet", TEXTS)
    table(tmp_path / "test.parquet", ["held out"])
    found = hub(tmp_path, val_split="test", max_documents=3)
    assert found == [("val", "held out"), *(("train", text) for text in TEXTS[:3])]


def test_a_dataset_without_a_validation_split_is_divided_by_hash(tmp_path: Path) -> None:
    table(tmp_path / "train.parquet", [f"text {n}" for n in range(400)])
    found = hub(tmp_path, val_frac=0.25)
    assert found == hub(tmp_path, val_frac=0.25) and 60 < sum(split == "val" for split, _ in found) < 140


def test_a_dataset_that_is_not_there_or_lacks_the_split_or_column_is_named(tmp_path: Path) -> None:
    table(tmp_path / "train.parquet", TEXTS)
    with pytest.raises(ConfigError, match=rf"data.name: {tmp_path}, split gone: cannot be read \(.*Check data.name"):
        hub(tmp_path, split="gone")
    with pytest.raises(ConfigError, match=r"split train row 1: field 'body' is missing; the fields are id, text"):
        hub(tmp_path, field="body")
    with pytest.raises(ConfigError, match=r"split train row 1: field 'id' holds 0, not a string"):
        hub(tmp_path, field="id")
    with pytest.raises(ConfigError, match=r"data.name: .*nowhere, split train: cannot be read"):
        hub(tmp_path / "nowhere")


def test_a_dataset_saved_to_disk_is_read_by_its_folder(tmp_path: Path) -> None:
    """Seen to fail: refused by both sources, with advice that did not help."""
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": [f"text {n}" for n in range(9)]}).save_to_disk(folder, num_shards=2)
    found = hub(folder, val_frac=0.3)
    assert [text for _, text in found] == [f"text {n}" for n in range(9)]
    parts = [HubSource(HubConfig(name=str(folder), val_frac=0.3)) for _ in range(2)]
    for number, source in enumerate(parts, 1):
        source.select(number, 2)
    assert ["".join(document.chunks) for source in parts for document in source.documents()] == [text for _, text in found]
    with pytest.raises(ConfigError, match=r"split test: cannot be read \(the folder is one dataset .* no other splits\)"):
        hub(folder, val_split="test")
    with pytest.raises(ConfigError, match=rf"data.files: {folder} was written by save_to_disk. Read it with data=hub data.name={folder}\."):
        find_files(str(folder), "data.files")


def test_a_dataset_of_several_splits_saved_to_disk_is_named_as_what_it_is(tmp_path: Path) -> None:
    """Seen to fail: it was said to hold no file but its .json."""
    datasets.DatasetDict(test=datasets.Dataset.from_dict({"text": ["a", "b"]})).save_to_disk(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"was written by save_to_disk. Read it with data=hub"):
        find_files(str(tmp_path / "saved"), "data.files")
    assert sorted(hub(tmp_path / "saved", split="test", val_frac=0.5)) == [("train", "b"), ("val", "a")]
    with pytest.raises(ConfigError, match=r"cannot be read \(save_to_disk wrote there the splits test\). Check data.name"):
        hub(tmp_path / "saved", split="train", val_frac=0.5)


@pytest.mark.parametrize("form", ["hub", "saved", "parquet"])
def test_labels_that_datasets_has_as_numbers_are_read_by_their_names(form: str, tmp_path: Path) -> None:
    """But for -1, of a text that has none, which is left out. Seen to fail: the numbers, which objective.labels in another order took for
    others."""
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    found = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 1, -1]}, features=features)
    if form == "saved":
        found.save_to_disk(tmp_path / "set")
    else:
        (tmp_path / "set").mkdir()
        found.to_parquet(tmp_path / "set" / "train.parquet")
    own: dict[str, Any] = {"record": LabelRecord(), "val_frac": 0.5}
    source: RecordedSource = HubSource(HubConfig(name=str(tmp_path / "set"), **own))
    if form == "parquet":
        source = TextSource(TextConfig(files=str(tmp_path / "set"), **own), tmp_path)
    assert [document.turns[1].text for document in source.documents()] == ["neg", "pos"]
    assert source.skipped == 1


def test_lists_of_labels_are_read_by_their_names(tmp_path: Path) -> None:
    """As in go_emotions."""
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.Sequence(datasets.ClassLabel(names=["neg", "pos"]))})
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [[0, 1], [], [1]]}, features=features).to_parquet(
        tmp_path / "set/a.parquet"
    )
    source = HubSource(HubConfig(name=str(tmp_path / "set"), record=LabelRecord(), val_frac=0.5))
    assert [document.turns[1].text for document in source.documents()] == ['["neg", "pos"]', "[]", '["pos"]']


@pytest.mark.parametrize(
    ("parts", "options"), [(2, {}), (3, {"max_documents": 50}), (3, {"max_documents": 2}), (2, {"max_documents": 999})]
)
def test_all_parts_of_a_dataset_are_the_whole(tmp_path: Path, parts: int, options: dict[str, int]) -> None:
    """Seen to fail with max_documents taken from each part."""
    for number in range(2):
        table(tmp_path / f"train-{number}.parquet", [f"text {number} {n}" for n in range(40)])
    found = []
    for part in range(1, parts + 1):
        source = HubSource(HubConfig(name=str(tmp_path), val_frac=0.5, **options))
        source.select(part, parts)
        found += [(document.split, "".join(document.chunks)) for document in source.documents()]
    assert found == hub(tmp_path, val_frac=0.5, **options) and len(found) == min(80, options.get("max_documents", 80))


def test_a_dataset_of_fewer_files_than_parts_is_refused_by_each_part(tmp_path: Path) -> None:
    """Seen to fail: all parts but the last were made, which said 'list index out of range'."""
    table(tmp_path / "train.parquet", TEXTS)
    source = HubSource(HubConfig(name=str(tmp_path)))
    source.select(1, 2)
    with pytest.raises(ConfigError, match=r"part=1/2: 2 parts cannot be made of 1 file. Use fewer, or prepare it whole"):
        list(source.documents())


def test_a_folder_that_stands_for_a_dataset_is_known_by_its_content(tmp_path: Path) -> None:
    """Seen to fail: after a change of its files the tokens of the old ones were found."""
    folder = tmp_path / "set"
    folder.mkdir()
    files = [HubConfig(name=str(folder)).open(tmp_path).files for n in range(2) if table(folder / "train.parquet", [f"text {n}"])]
    assert files[0].keys() == files[1].keys() == {"train.parquet"} and files[0] != files[1]
    assert not HubConfig(name="lone/dataset").open(tmp_path).files
