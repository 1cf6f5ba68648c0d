import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from lm.data.kinds import TextConfig
from lm.data.sources.files import TextSource
from lm.data.sources.found import find_files, left_out
from lm.errors import ConfigError
from tests.conftest import unprivileged

Read = Callable[..., list[tuple[str, str]]]
PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}
_MIB = 1 << 20
TEXT = "".join(f"line {n}: Ünïcode 日本 👧\n" for n in range(400))


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """The (split, text) of all documents; `skipped` is kept on the function."""

    def run(files: object, skipped: int = 0, **options: object) -> list[tuple[str, str]]:
        given = [str(file) for file in files] if isinstance(files, list) else str(files)
        source = TextSource(TextConfig.model_validate({"files": given, **options}), tmp_path)
        found: list[tuple[str, str]] = [(document.split, "".join(document.chunks)) for document in source.documents()]
        assert source.skipped == skipped and source.position() == source.total
        assert found == [(document.split, "".join(document.chunks)) for document in source.documents()]
        return found

    return run


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("val_frac", [0.1, 0.25, 0.333, 0.5])
def test_the_end_of_a_lone_text_file_is_validation(read: Read, tmp_path: Path, ending: str, val_frac: float) -> None:
    path = write(tmp_path / f"a.txt{ending}", PACK[ending](TEXT.encode()))
    (first, train), (second, val) = read(path, val_frac=val_frac)
    assert (first, second) == ("train", "val") and train + val == TEXT
    assert 0 <= len(train.encode()) - int(len(TEXT.encode()) * (1 - val_frac)) <= 3


def test_a_text_file_longer_than_a_chunk_is_read_whole(read: Read, tmp_path: Path) -> None:
    text = "日本語 " * 500_000  # 5 MB, and 1 MiB is no multiple of 3
    for ending, pack in PACK.items():
        assert read(write(tmp_path / f"a.txt{ending}", pack(text.encode())), val_files=str(tmp_path / f"a.txt{ending}"))[1] == (
            "train",
            text,
        )


def test_several_frames_of_zstd_are_one_file(read: Read, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt.zst", zstandard.compress(b"one ") + zstandard.compress(b"two"))
    assert [text for _, text in read([path, write(tmp_path / "b.txt", "three")], val_frac=0.001)] == ["one two", "three"]


def test_zstd_with_a_long_window_is_read(read: Read, tmp_path: Path) -> None:
    """Seen to fail with the library's own limit of 128 MiB: the file was called damaged."""
    packer = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters.from_level(1, window_log=28)).compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(packer.compress(b'{"text": "a"}\n{"text": "b"}\n') + packer.flush())
    assert [text for _, text in read(tmp_path / "a.jsonl.zst")] == ["a", "b"]


def test_a_byte_order_mark_is_no_text(read: Read, tmp_path: Path) -> None:
    files = [write(tmp_path / "a.txt", b"\xef\xbb\xbfone"), write(tmp_path / "b.jsonl", b'\xef\xbb\xbf{"text": "two"}\n')]
    assert [text for _, text in read(files)] == ["one", "two"]


@pytest.mark.parametrize("ending", PACK)
def test_jsonl_gives_a_document_per_line_whatever_blank_lines_there_are(read: Read, tmp_path: Path, ending: str) -> None:
    lines = [json.dumps({"text": f"document {n}\n"}) for n in range(300)]
    path = write(tmp_path / f"a.jsonl{ending}", PACK[ending](("\n \n".join(lines) + "\n\n").encode()))
    documents = read(path, val_frac=0.2)
    assert [text for _, text in documents] == [f"document {n}\n" for n in range(300)]
    assert 30 < sum(split == "val" for split, _ in documents) < 90


def test_equal_documents_are_in_one_split_and_stay_there(read: Read, tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"document {n % 50}"}) + "\n" for n in range(200))
    splits: dict[str, set[str]] = {}
    for split, text in read(write(tmp_path / "a.jsonl", lines), val_frac=0.3):
        splits.setdefault(text, set()).add(split)
    assert all(len(found) == 1 for found in splits.values()) and len(splits) == 50
    assert (splits["document 7"], splits["document 8"]) == ({"train"}, {"train"})  # on every machine


def test_held_out_files_are_validation_and_all_others_training(read: Read, tmp_path: Path) -> None:
    train, val = write(tmp_path / "a.txt", "one"), write(tmp_path / "b.txt", "two")
    assert read(train, val_files=str(val)) == [("val", "two"), ("train", "one")]


def test_held_out_files_in_the_folder_that_is_trained_on_are_left_out_of_training(read: Read, tmp_path: Path) -> None:
    """Seen to fail: they were in both, and the run was refused with the advice to hold out other documents."""
    files = [write(tmp_path / "data" / name, name) for name in ("a.txt", "b.txt", "c.txt")]
    held_out = str(tmp_path / "data" / ".." / "data" / "b.txt")
    assert read(tmp_path / "data", val_files=held_out) == [("val", "b.txt"), ("train", "a.txt"), ("train", "c.txt")]
    source = TextSource(TextConfig(files=str(tmp_path / "data"), val_files=held_out), tmp_path)
    assert source.remarks == ["data.files: 1 file left out of training, as data.val_files holds out the same."]
    assert read(files[0], val_files=str(files[0])) == [("val", "a.txt"), ("train", "a.txt")]  # which the preparation refuses


BAD_LINES: dict[str, tuple[str | bytes, str]] = {
    "broken": ('{"text": "x"', r"a.jsonl:3: the line is not JSON \("),
    "deep": ("[" * 100_000, r"a.jsonl:3: the line is not JSON"),
    "list": ("[1, 2]", r"a.jsonl:3: the line holds \[1, 2\], not an object"),
    "missing field": ('{"body": "x", "id": 1}', r"a.jsonl:3: field 'text' is missing; the fields are body, id. Set data.field"),
    "long field": (f'{{"{"x" * 5000}": 1}}', rf"the fields are {'x' * 60}\.\.\.\. Set data.field"),
    "many fields": ("{" + ", ".join(f'"f{n}": 1' for n in range(99)) + "}", r"f18, f19, \.\.\.\. Set data.field"),
    "number": ('{"text": 12}', r"a.jsonl:3: field 'text' holds 12, not a string"),
    "null": ('{"text": null}', r"a.jsonl:3: field 'text' holds null, not a string"),
    "surrogate": ('{"text": "\\ud83d"}', r"a.jsonl:3: field 'text' holds half a surrogate pair"),
    "not UTF-8": (b'{"text": "caf\xe9"}', r"a.jsonl:3: byte 32 is not UTF-8"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named_by_file_and_line_or_skipped_and_counted(read: Read, tmp_path: Path, case: str) -> None:
    """Seen to fail with bad records always skipped."""
    line, message = BAD_LINES[case]
    good = b'{"text": "good"}\n'
    bad = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path / "a.jsonl", good[:-2] + b" }\n\n" + bad + b"\n" + good)
    with pytest.raises(ConfigError, match=message + r".*set data.on_bad_record=skip"):
        read(path)
    assert [text for _, text in read(path, skipped=1, on_bad_record="skip")] == ["good", "good"]


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("before", [b"", b"12345", b"x" * _MIB, b"x" * (_MIB + 700), b"x" * (_MIB - 1), b"x" * (_MIB - 2) + "é".encode()])
@pytest.mark.parametrize("broken", [b"\xff", b"\xc3("])
def test_invalid_utf8_is_named_by_file_and_byte_or_skipped_and_counted(
    read: Read, tmp_path: Path, ending: str, before: bytes, broken: bytes
) -> None:
    """Seen to fail with a decoder that replaces what it cannot read."""
    content, at = before + broken + b"y" * 1000, len(before)
    bad, good = write(tmp_path / f"a.txt{ending}", PACK[ending](content)), write(tmp_path / "b.txt", "good")
    with pytest.raises(ConfigError, match=rf"a.txt{ending}: byte {at} is not UTF-8. Convert the file"):
        read([bad, good])
    assert [text for _, text in read([bad, good], skipped=1, on_bad_record="skip")] == ["good"]


def test_a_character_cut_off_at_the_end_of_the_file_is_not_utf8(read: Read, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "日本".encode()[:-1])
    with pytest.raises(ConfigError, match=r"a.txt: byte 3 is not UTF-8"):
        read(path, val_files=str(path))


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.json"])
@pytest.mark.parametrize("on_bad_record", ["error", "skip"])
def test_a_table_that_is_not_utf8_cannot_be_skipped_and_says_so(read: Read, tmp_path: Path, name: str, on_bad_record: str) -> None:
    """Seen to fail: the remedy was on_bad_record=skip, which changed nothing."""
    content = b'[{"text": "good"}, {"text": "caf\xe9"}]' if name == "a.json" else b"text\ngood\ncaf\xe9\n"
    told = rf"{name}: byte {content.index(0xE9)} is not UTF-8. Convert the file to UTF-8, or leave it out.$"
    with pytest.raises(ConfigError, match=told):
        read(write(tmp_path / name, content), on_bad_record=on_bad_record)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
@pytest.mark.parametrize("lost", [1, 9, 200])
def test_a_truncated_archive_is_named(read: Read, tmp_path: Path, ending: str, kind: str, lost: int) -> None:
    """Seen to fail with the end of the last frame unchecked (zst), and with EOFError passed on (gz)."""
    content = json.dumps({"text": os.urandom(5000).hex()}).encode()
    path = write(tmp_path / f"a.{kind}{ending}", PACK[ending](content)[:-lost])
    with pytest.raises(ConfigError, match=rf"a.{kind}{ending}: the file is truncated or damaged"):
        read([path, write(tmp_path / "b.txt", "good")])


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_file_that_is_no_archive_is_named(read: Read, tmp_path: Path, ending: str) -> None:
    with pytest.raises(ConfigError, match=rf"a.txt{ending}: the file is truncated or damaged"):
        read(write(tmp_path / f"a.txt{ending}", "plain text"))


def test_a_folder_means_its_readable_files_in_order_without_hidden_and_linked_ones(tmp_path: Path) -> None:
    """Seen to fail with links followed."""
    root = tmp_path / "data"
    wanted = [write(root / name, "x") for name in ("a.txt", "b/c.jsonl.gz", "b/d/e.TXT", "z.parquet", "q.csv")]
    for name in (".hidden.txt", ".git/a.txt", "notes.pdf", "archive.zip", "b/x.txt.bak", "p.parquet.gz"):
        write(root / name, "x")
    (root / "loop").symlink_to(root)
    (root / "gone.txt").symlink_to(root / "nowhere")
    assert find_files(str(root), "data.files") == sorted(wanted)
    assert find_files([str(root / "b" / "**" / "*.TXT"), str(root / "a.txt"), str(root / "a.*")], "data.files") == [
        root / "a.txt",
        root / "b/d/e.TXT",
    ]


def test_a_file_that_is_named_in_several_ways_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: its documents were read three times."""
    (tmp_path / "b").mkdir()
    for name in ("a.txt", "b/a.txt", "b/c.txt"):
        write(tmp_path / name, "x")
    monkeypatch.chdir(tmp_path)
    given = ["b", "b/a.txt", "b/../a.txt", "a.txt", str(tmp_path / "b/c.txt"), "b/../b"]
    wanted = [str(tmp_path / name) for name in ("a.txt", "b/a.txt", "b/c.txt")]
    assert sorted(map(os.path.realpath, find_files(given, "data.files"))) == wanted
    assert find_files("b", "data.files") == [Path("b/a.txt"), Path("b/c.txt")]


def test_a_name_with_brackets_is_a_file_before_it_is_a_glob(tmp_path: Path) -> None:
    path = write(tmp_path / "a[1].txt", "x")
    assert find_files(str(path), "data.files") == [path]


@pytest.mark.parametrize("name", ["gone.txt", "*.jsonl", "x" * 5000, "nul\0.txt"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"data.val_files: .* does not exist"):
        find_files(str(tmp_path / name), "data.val_files")


@pytest.mark.parametrize("name", ["a.pdf", "noending", "a.txt.bz2", "a.gz", "a.parquet.gz"])
def test_an_unknown_ending_is_refused_with_the_known_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"{name} has an ending that is not known. Known endings: .txt, .md, .*, .csv, .tsv, .parquet, and all but",
    ):
        find_files(str(write(tmp_path / name, "x")), "data.files")


@pytest.mark.parametrize("chunk", [5, 7, _MIB])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_of_records_in_json_is_read_as_the_same_lines_are(
    read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, indent: int | None
) -> None:
    monkeypatch.setattr("lm.data.sources.files._CHUNK", chunk)
    records = [{"text": f'{n} Ü "日本" [{{,'} for n in range(30)]
    lines = read(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records))))
    array = json.dumps(records, indent=indent, ensure_ascii=False)
    assert read(write(tmp_path / "a.json", array)) == lines and len(lines) == 30
    assert read(write(tmp_path / "b.json.gz", gzip.compress(f"\ufeff {array}\n".encode()))) == lines


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": "b"}', "record 1: .*there is .* must be.* name it .jsonl"),
        ('[{"text": "a"}, {"text": ]', "record 2: .*Expecting value"),
        ('[{"text": "a"} {"text": "b"}]', "record 2: .* where , or ] must be"),
        ('[{"text": "a"},]', "record 2: "),
        ('[{"text": "a"}', "record 2: .*it ends before its list does"),
        ('[{"text": "a"}] x', "record 2: .* where its end must be"),
        ('[{"text": "a', "record 1: .*Unterminated string"),
        ("[" * 100_000, "record 1: .*recursion"),
        ("", "record 1: .*it ends before"),
        ("[3]", "record 1: the line holds 3, not an object"),
    ],
)
def test_a_json_file_that_is_no_list_of_records_is_refused_with_the_place(read: Read, tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"a.json {message}"):
        read(write(tmp_path / "a.json", content))


def test_a_json_file_is_read_where_it_is_named_and_not_for_being_in_a_folder(tmp_path: Path) -> None:
    named = write(tmp_path / "a.json", "[]")
    other = write(tmp_path / "a.jsonl", "")
    assert find_files(str(tmp_path), "data.files") == [other] and find_files(str(named), "data.files") == [named]


def test_files_of_a_folder_that_look_like_data_and_are_not_read_are_told(tmp_path: Path) -> None:
    """Seen to fail: a folder of shards was read without those packed by xz, and nothing said so."""
    names = ("a.jsonl", "b.jsonl.xz", "c.txt.BZ2", "d.arrow", "e.parquet.gz", "f.json.gz", "LICENSE", "g.png", ".h.arrow")
    paths = {name: write(tmp_path / "data" / name, "") for name in names}
    given = str(tmp_path / "dat*")
    named = TextSource(TextConfig(files=[given, str(paths["f.json.gz"])]), tmp_path).remarks
    told = TextSource(TextConfig(files=str(tmp_path / "data")), tmp_path).remarks
    assert told == [f"data.files: 1 .json file left out ({paths['f.json.gz']}); name what is to be read.", *named]
    listed = ", ".join(str(paths[name]) for name in names[1:4])
    assert named == [f"data.files: 4 files of other kinds left out ({listed}, ...); convert what is to be read."]
    paths["a.jsonl"].unlink()
    paths["f.json.gz"].unlink()
    with pytest.raises(ConfigError, match=r"holds no file to read but 4 files of other kinds \(.*b.jsonl.xz, .*Give files ending in"):
        find_files(given, "data.files")


def test_tokens_of_other_programs_are_told_and_text_is_asked_for(tmp_path: Path) -> None:
    """Seen to fail: of a folder of nanoGPT's with train.bin and prepare.py the program was the text, and nothing said so."""
    tokens = [write(tmp_path / name, "x") for name in ("train.bin", "val.bin")]
    write(tmp_path / "prepare.py", "import os")
    told = TextSource(TextConfig(files=str(tmp_path)), tmp_path / "cache").remarks
    assert told == [f"data.files: 2 files of other kinds left out ({tokens[0]}, {tokens[1]}); convert what is to be read."]
    with pytest.raises(ConfigError, match=r"train\.bin has an ending that is not known\. Known .* give the text that these were made of\."):
        find_files(str(tokens[0]), "data.files")


def test_a_linked_folder_in_a_folder_is_told_unless_its_files_are_read(tmp_path: Path) -> None:
    """Seen to fail: a folder of links to shards on other disks was read without them, and nothing said so."""
    data, shards = tmp_path / "data", tmp_path / "shards"
    write(shards / "b.jsonl", '{"text": "b"}\n')
    data.mkdir()
    for name, target in (("more", shards), ("round", data), ("empty", tmp_path / "nothing")):
        target.mkdir(exist_ok=True)
        (data / name).symlink_to(target, target_is_directory=True)
    with pytest.raises(ConfigError, match=r"holds no file to read but 1 linked folder, read only where named, as data.files=.*more\. Give"):
        find_files(str(data), "data.files")
    write(data / "a.jsonl", '{"text": "a"}\n')
    told = TextSource(TextConfig(files=str(data)), tmp_path).remarks
    assert told == [f"data.files: 1 linked folder left out ({data / 'more'}); name what is to be read."]
    assert TextSource(TextConfig(files=[str(data), str(data / "more")]), tmp_path).remarks == []


def test_what_is_left_out_is_not_looked_up_in_a_list(tmp_path: Path) -> None:
    """Seen to fail: 50,000 texts beside as many pages took minutes, as each page was compared with each text."""

    class Listed(list[Path]):
        def __contains__(self, path: object) -> bool:
            raise AssertionError("compared with each")

    write(tmp_path / "a.html", "")
    assert "1 file of other kinds" in left_out(str(tmp_path), "data.files", Listed([write(tmp_path / "a.txt", "")]))[0]


def test_a_held_out_json_file_is_not_told_as_left_out(tmp_path: Path) -> None:
    """Seen to fail: the line said to name what is to be read, and it was named, as data.val_files."""
    write(tmp_path / "a.jsonl", "")
    named = write(tmp_path / "val.json", "[]")
    assert TextSource(TextConfig(files=str(tmp_path), val_files=str(named)), tmp_path).remarks == []


def test_a_folder_without_a_known_file_is_refused(tmp_path: Path) -> None:
    """Seen to fail with the check for files removed."""
    with pytest.raises(ConfigError, match=rf"data.files: {tmp_path} holds no file to read. Give files ending in .txt"):
        find_files(str(tmp_path), "data.files")


def test_a_folder_of_json_alone_is_refused_with_how_to_read_it(tmp_path: Path) -> None:
    """Seen to fail with .json among the endings to give, and no word of the file."""
    named = write(tmp_path / "a.json", "[]")
    with pytest.raises(ConfigError, match=rf"no file to read but 1 .json file, read only where named, as data.files={named}\.") as error:
        find_files(str(tmp_path), "data.files")
    assert ".jsonl, .csv" in str(error.value)


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail with the system's error passed on."""
    write(tmp_path / "a.txt", "x").chmod(0)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    with unprivileged(), pytest.raises(ConfigError, match=r"a.txt cannot be read \(Permission denied\)"):
        TextSource(TextConfig(files="a.txt"), Path("cache"))


@pytest.mark.parametrize("given", ["", "closed", "closed/a.txt", "closed/*.txt"])
def test_a_folder_that_cannot_be_read_is_named(public: Path, given: str) -> None:
    """Seen to fail: below a folder it was left out without a word, and else its files did not exist."""
    write(public / "a.txt", "x")
    (public / "closed").mkdir()
    write(public / "closed" / "a.txt", "x")
    (public / "closed").chmod(0)
    with unprivileged(), pytest.raises(ConfigError, match=rf"^data.files: {public}/closed cannot be read \(Permission denied\)\. Make it"):
        find_files(str(public / given), "data.files")
    (public / "closed").chmod(0o700)
    (public / "closed").rename(public / "lost+found")
    with unprivileged():
        assert find_files(str(public), "data.files") == [public / "a.txt"]


def test_an_empty_file_beside_a_lone_text_changes_nothing(read: Read, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    write(folder / "a.txt", TEXT)
    write(folder / "b.txt", "")
    (first, train), (second, val) = read(folder, val_frac=0.25)
    assert (first, second) == ("train", "val") and train + val == TEXT


@pytest.mark.parametrize(("n", "parts"), [(4, 3), (1, 1)])
def test_parts_of_few_files_hold_out_what_the_whole_does(read: Read, tmp_path: Path, n: int, parts: int) -> None:
    """Seen to fail: by hash none of four is held out, and parts knew no other rule; nor where a lone text is cut."""
    whole = read([write(tmp_path / f"{number}.txt", f"file {number}: {TEXT}") for number in range(n)])
    found = []
    for part in range(1, parts + 1):
        source = TextConfig(files=str(tmp_path / "*.txt")).open(tmp_path)
        source.select(part, parts)
        found += [(document.split, "".join(document.chunks)) for document in source.documents()]
    assert found == whole and [split for split, _ in whole].count("val") == 1
