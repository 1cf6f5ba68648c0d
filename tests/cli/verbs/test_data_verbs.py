"""`lm prepare`, `lm tokenizer`, `lm data show`."""

import json
import re
import sys
from pathlib import Path

import pytest

from lm import config
from lm.data.store.prepare import prepare
from lm.data.tokenizer.config import BytesConfig
from lm.data.tokenizer.tokenizer import Specials, Tokenizer, load_tokenizer
from lm.storage.model_folder import save_model
from tests.conftest import Lm


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Overrides for five small files, in an own cache."""
    for name in range(5):
        records = [{"text": f"file {name} line {n} " * (n % 9 + 1), "source": f"{n}", "target": f"t{n}"} for n in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return ["data=text", f"data.files={tmp_path}/*.jsonl", f"data.cache_dir={tmp_path}/cache", "tokenizer=bytes", "data.seq_len=32"]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "index.json"}


@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("pairs", [False, True])
def test_parts_joined_are_what_one_machine_makes(lm: Lm, files: list[str], tmp_path: Path, parts: int, pairs: bool) -> None:
    if pairs:
        files = ["data=pairs", "objective=seq2seq", *files[1:]]
    for part in reversed(range(1, parts + 1)):
        code, out, err = lm("prepare", *files, f"part={part}/{parts}")
        assert code == 0 and f".part-{part}-of-{parts}" in out, err
    code, out, err = lm("prepare", *files, f"merge={parts}")
    assert code == 0, err
    joined = Path(out.strip())
    again = [arg.replace("/cache", "/other") for arg in files]
    whole = Path(lm("prepare", *again)[1].strip())
    assert joined.name == whole.name and contents(joined) == contents(whole)
    assert (joined / "index.json").read_bytes() == (whole / "index.json").read_bytes()
    assert lm("prepare", *files)[1].strip() == str(joined)  # found, as training finds it


def test_a_damaged_part_is_not_joined(lm: Lm, files: list[str]) -> None:
    """Seen to fail: its damage was given a checksum of its own."""
    folder = Path([lm("prepare", *files, f"part={part}/2")[1].strip() for part in (1, 2)][1])
    data = bytearray((folder / "train-00000.bin").read_bytes())
    data[20] ^= 1
    (folder / "train-00000.bin").write_bytes(data)
    code, _, err = lm("prepare", *files, "merge=2")
    assert code == 2 and f"{folder}/train-00000.bin: the token cache is damaged: it has another checksum" in err.splitlines()[-1]


def test_a_part_whose_validation_text_is_damaged_is_not_joined(lm: Lm, files: list[str]) -> None:
    folder = Path([lm("prepare", *files, f"part={part}/2")[1].strip() for part in (1, 2)][1])
    text = folder / "val.texts.jsonl"
    whole = text.read_bytes()
    text.write_bytes(whole[:-9])
    code, _, err = lm("prepare", *files, "merge=2")
    assert code == 2 and f"{text}: the token cache is damaged: it has another checksum than the index says" in err.splitlines()[-1]
    text.unlink()
    code, _, err = lm("prepare", *files, "merge=2")
    assert code == 2 and f"{text}: the token cache is damaged: it is missing" in err.splitlines()[-1]


MISTAKES = {
    "no part": (["part=5/4"], ["part", "'5/4'", "1 <= I <= N"]),
    "part of a part": (["part=a"], ["part", "1/4"]),
    "too many": (["part=1/9"], ["part=1/9", "5 files"]),
    "missing": (["merge=2"], ["merge=2", "2 are missing", "part-1-of-2"]),
    "no number": (["merge=two"], ["merge", "'two'"]),
    "both": (["merge=2", "part=1/2"], ["merge=2", "Give one of them"]),
    "ray without parts": (["engine=ray"], ["engine=ray", "parts=16"]),
    "parts without ray": (["parts=2"], ["parts=2", "Write engine=ray"]),
    "cores without ray": (["cpus=2"], ["cpus=2", "Write engine=ray"]),
    "a part of ray": (["engine=ray", "parts=2", "part=1/2"], ["engine=ray", "Leave part and merge out"]),
    "twice": (["merge=2", "merge=3"], ["merge", "twice"]),
    "sweep": (["-m"], ["-m", "lm train"]),
    "key": (["data.nothing=1"], ["data.nothing", "no such key"]),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_answered_with_one_sentence(lm: Lm, files: list[str], case: str) -> None:
    args, parts = MISTAKES[case]
    code, out, err = lm("prepare", *files, *args)
    assert code == 2 and not out and "Traceback" not in err
    assert all(part in err.splitlines()[-1] for part in parts), err


def test_without_ray_the_engine_says_what_to_install(lm: Lm, files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = lm("prepare", *files, "engine=ray", "parts=2")
    assert code == 2 and "pip install 'slotlm[ray]'" in err.splitlines()[-1]


@pytest.mark.parametrize("kind", ["byte_bpe", "unigram", "wordpiece", "bytes"])
def test_a_tokenizer_is_trained_saved_and_measured(lm: Lm, files: list[str], tmp_path: Path, kind: str) -> None:
    size = [] if kind == "bytes" else ["vocab_size=300", "pattern=gpt2", "specials=['<|a|>','<|b|>']"]
    given = [arg for arg in files if not arg.startswith("tokenizer")]
    code, out, err = lm("tokenizer", "out=tok", f"kind={kind}", *size, *given)
    assert code == 0, err
    tokenizer = load_tokenizer(tmp_path / "tok")
    assert f"{tokenizer.vocab_size:,} tokens" in out and "bytes a token" in out
    assert (tokenizer.special(["<|a|>"]) is not None) == (kind != "bytes")
    text = "file 3 line 7, 中文 العربية 👩‍👩‍👧 <|eos|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    rate = float(out.splitlines()[-1].split()[0])
    assert (rate == 1.0) if kind == "bytes" else rate > 1.1


def test_a_tokenizer_needs_a_folder_and_a_known_kind(lm: Lm, files: list[str]) -> None:
    assert lm("tokenizer", *files)[2].splitlines()[-1].startswith("out: none was given")
    assert "Did you mean 'wordpiece'?" in lm("tokenizer", "out=x", "kind=wordpeice")[2].splitlines()[-1]


def test_rows_are_shown_with_what_is_read_and_said(lm: Lm, files: list[str]) -> None:
    code, out, err = lm("data", "show", *files, "rows=0,3")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("row 0 of ") and any(line.startswith("row 3 of ") for line in lines)
    reads = next(line for line in lines if "reads 0:" in line).split(":", 1)[1].strip().split("│")
    says = next(line for line in lines if "says 0:" in line).split(":", 1)[1].strip().split("│")
    assert reads[0] == "<|bos|>" and reads[1:] == says[: len(reads) - 1] and "\x1b" not in out


def test_masks_and_sources_are_shown(lm: Lm, files: list[str]) -> None:
    """Seen to fail: the masks were those of seed=0, whatever the seed."""
    masked = ["data", "show", *files, "objective=mlm", "model=bert_base", "rows=1", "split=val"]
    out, *others = [lm(*masked, seed)[1] for seed in ("seed=0", "seed=3", "seed.data=3")]
    assert others[0] == others[1] != out
    assert "<|mask|>" in out and "·" in next(line for line in out.splitlines() if "says" in line)
    pairs = ["data=pairs", *files[1:]]
    out = lm("data", "show", *pairs, "objective=seq2seq", "rows=0")[1]
    assert "source 0: <|bos|>" in out and out.splitlines()[-1].endswith("<|eos|>")


def test_an_encoder_decoders_rows_begin_as_the_model_that_training_starts_from_has_it(lm: Lm, files: list[str]) -> None:
    """Seen to fail: the start token was the tokenizer's bos, and no first token was shown."""
    tree = {key: value for key, value in config().model.tree().items() if key != "mtp"}
    tokenizer = BytesConfig().build()
    tree |= {"kind": "encoder_decoder", "vocab_size": 320, "max_seq_len": 64, "start_token": tokenizer.eos, "first_token": tokenizer.bos}
    save_model(Path("parent"), tree, {}, tokenizer.save, {})
    given = ["data=pairs", *(file for file in files[1:] if not file.startswith("tokenizer")), "objective=seq2seq", "init_from=parent"]
    code, out, err = lm("data", "show", *given, "rows=0")
    reads, says = (next(line for line in out.splitlines() if what in line).split(": ", 1)[1].strip() for what in ("reads", "says"))
    assert code == 0 and reads.startswith("<|eos|>│<|bos|>│") and says.startswith("<|bos|>│"), err


@pytest.mark.parametrize(
    ("args", "said"), [(["shwo"], "Did you mean 'show'?"), (["show", "rows=x"], "rows.0: 'x'"), (["show", "split=test"], "data.test_frac")]
)
def test_a_wrong_question_is_answered(lm: Lm, args: list[str], said: str) -> None:
    code, _, err = lm("data", *args)
    assert code == 2 and said in err.splitlines()[-1]


def test_a_row_that_is_not_there_is_named(lm: Lm, files: list[str]) -> None:
    code, _, err = lm("data", "show", *files, "rows=99999")
    assert code == 2 and err.splitlines()[-1].startswith("rows: 99999 was asked for, and there are ")


def test_of_fewer_rows_than_are_shown_unasked_there_are_those(lm: Lm, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({"prompt": a, "completion": a}) + "\n" for a in "abcde"))
    source = [f"data.files={tmp_path / 'pairs.jsonl'}", f"data.cache_dir={tmp_path}", "data.seq_len=64", "data.val_frac=0.3"]
    code, out, err = lm("data", "show", "data=chat", "objective=sft", "tokenizer=bytes", *source)
    assert code == 0 and [line for line in out.splitlines() if line.startswith("row ")] == ["row 0 of 1"], err


def test_rows_for_a_parent_are_of_its_own_tokenizer_and_template(lm: Lm, tmp_path: Path) -> None:
    """Seen to fail: the template was `plain`, and the end the one of the usual names."""
    tokenizer = Tokenizer(BytesConfig().build(extra=["<|turn|>"])._raw, Specials(None, "<|turn|>", None), adds_bos=False)
    answers = "{% if add_generation_prompt %}<assistant>{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}" + answers
    save_model(tmp_path / "parent", config().model.tree(), {}, tokenizer.save, {})
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"prompt": a, "completion": a}) + "\n" for a in "abcde"))
    given = ["data=chat", "data.files=chats.jsonl", "objective=sft", "data.packing=none", f"data.cache_dir={tmp_path}", "init_from=parent"]
    code, out, err = lm("data", "show", *given, "rows=0")
    reads = next(line for line in out.splitlines() if "reads 0:" in line).split(":", 1)[1].replace("│", "").strip()
    assert code == 0 and re.fullmatch(r"<user>([a-e])<\|turn\|><assistant>\1", reads), err
    prepared = lm("prepare", *given)[1].strip()
    own = prepare(config(overrides=given).data, load_tokenizer(tmp_path / "parent"), log=lambda line: None)
    assert [str(source.folder) for source in own.parts.values()] == [prepared]


def test_the_rating_of_an_answer_is_shown(lm: Lm, tmp_path: Path) -> None:
    """Seen to fail: a good answer and a bad one looked alike."""
    lines = [{"prompt": "x" * (1 + i), "completion": "good" if i % 3 else "evil", "label": bool(i % 3)} for i in range(30)]
    (tmp_path / "rated.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ("data=rated", f"data.files={tmp_path / 'rated.jsonl'}", "objective=kto", "tokenizer=bytes", "data.seq_len=96")
    code, out, err = lm("data", "show", *given, "rows=0,1,2,3,4,5")
    shown = ["".join(row.split("says 0:")[1].split("│")).replace("·", "") for row in out.split("row ")[1:]]
    assert code == 0 and {"good" in row for row in shown} == {True, False}, err
    for row, said in zip(out.split("row ")[1:], shown, strict=True):
        assert row.splitlines()[0].endswith(", good answer" if "good" in said else ", bad answer")
