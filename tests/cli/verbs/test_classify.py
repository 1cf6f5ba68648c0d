"""`lm classify`."""

import json
from pathlib import Path
from typing import Any

import pytest

import lm as api
from lm.data.tokenizer.config import BytesConfig
from lm.errors import ConfigError
from lm.generation import classify as module
from lm.nn.transformer import build_model
from tests.conftest import Lm
from tests.nn.models import config

NAMES = ["calm", "wild"]


@pytest.fixture
def made(lm: Lm, tmp_path: Path) -> str:
    cfg = config(vocab_size=320, max_seq_len=32)
    api.save(build_model(cfg.replace(head=cfg.head.telling(NAMES, bias=False)), seed=0), BytesConfig().build(), tmp_path / "made")
    return "from=made"


def test_texts_are_told_in_a_table_or_as_json(made: str, lm: Lm) -> None:
    code, table, _ = lm("classify", made, "text=the sea", "text=a line\nbreak")
    head, *rows = table.splitlines()
    assert code == 0 and head.split() == [*NAMES, "text"] and [row.split(maxsplit=2)[2] for row in rows] == ["the sea", "a line\\nbreak"]
    code, told, _ = lm("classify", made, "text=the sea", "format=json")
    [found] = json.loads(told)
    assert found["text"] == "the sea" and found["probabilities"]["calm"] == pytest.approx(float(rows[0].split()[0]), abs=1e-4)
    assert found["label"] == max(found["probabilities"], key=found["probabilities"].__getitem__)


def test_a_file_of_texts_gets_what_was_predicted(made: str, lm: Lm, tmp_path: Path) -> None:
    """Each line keeps what else is in it, in its place; long and short texts are as they are alone."""
    given = [{"text": "x" * n, "label": "wild", "id": n} for n in (40, 1, 7, 31, 3)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, given)) + "\n\n")
    code, _, note = lm("classify", made, "texts=a.jsonl", "out=b.jsonl")
    found = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert code == 0 and "5 texts classified" in note
    assert [{key: line[key] for key in ("text", "label", "id")} for line in found] == given
    alone = [json.loads(lm("classify", made, f"text={line['text']}", "format=json")[1])[0] for line in given]
    for line, one in zip(found, alone, strict=True):
        assert line["predicted"]["probabilities"] == pytest.approx(one["probabilities"], abs=1e-5)
    assert lm("classify", made, "texts=a.jsonl", "out=b.jsonl")[0] == 2
    assert lm("classify", made, "texts=b.jsonl", "out=new.jsonl")[2].count("predicted already") == 1
    assert lm("classify", made, "texts=a.jsonl", "out=b.jsonl", "overwrite=true")[0] == 0


def test_pairs_are_given_by_two_keys_or_two_fields(made: str, lm: Lm, tmp_path: Path) -> None:
    pairs = [("the sea", "is wet"), ("a", "")]
    model, tokenizer = api.load(tmp_path / "made")
    expected = api.classify(model, tokenizer, pairs)
    given = [each for first, second in pairs for each in (f"text={first}", f"text_pair={second}")]
    found = json.loads(lm("classify", made, *given, "format=json")[1])
    assert [(each["text"], each["text_pair"]) for each in found] == pairs
    assert found[0]["probabilities"] == pytest.approx(expected[0], abs=1e-5) != pytest.approx(expected[1], abs=1e-5)
    assert "the sea | is wet" in lm("classify", made, *given)[1]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"premise": one, "of": {"b": other}}) + "\n" for one, other in pairs))
    fields = ["field=premise", "field_pair=of.b"]
    assert lm("classify", made, "texts=a.jsonl", "out=b.jsonl", *fields)[0] == 0
    told = [json.loads(line)["predicted"]["probabilities"] for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert all(one == pytest.approx(other, abs=1e-5) for one, other in zip(told, expected, strict=True))
    code, _, error = lm("classify", made, "texts=a.jsonl", "out=c.jsonl", "field=premise", "field_pair=of.c")
    assert code == 2 and "line 1: it is no object with a text in premise and of.c" in error


def test_a_file_that_a_kill_has_left_is_gone_on_with(made: str, lm: Lm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a batch too; the lines are those of a start that nothing has ended. Asked otherwise it is refused."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "x" * (1 + 7 * i % 31), "b": str(i)}) + "\n" for i in range(70)))
    given = ["classify", made, "texts=a.jsonl"]
    assert lm(*given, "out=whole.jsonl")[2].endswith("70 texts classified, 70 now.\n")
    real, seen = module._chances, []

    def ended(*args: Any) -> Any:
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(args)
        return real(*args)

    monkeypatch.setattr(module, "_chances", ended)
    code, _, error = lm(*given, "out=b.jsonl")
    part = tmp_path / ".b.jsonl.part"
    assert code == 130 and "what is classified is kept" in error and part.read_bytes().count(b"\n") == 65
    part.write_bytes(b"".join(part.read_bytes().splitlines(keepends=True)[:51]) + b'{"text": "x')
    code, _, error = lm(*given, "out=b.jsonl", "field_pair=b")
    assert code == 2 and "50 answers are there of a start that asked otherwise (fields)" in error
    monkeypatch.setattr(module, "_chances", real)
    assert lm(*given, "out=b.jsonl")[2].endswith("70 texts classified, 20 now.\n")
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not part.exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["text=a", "text=b", "text_pair=c"], "text_pair: 1 were given for 2 of text"),
        (["text_pair=c"], "give text=TEXT, or"),
        (["text=a", "field_pair=b"], "field_pair: it is of texts=FILE, which is not set"),
        ([], "give text=TEXT, or texts=FILE and out=FILE"),
        (["text=a", "texts=a.jsonl", "out=b"], "give text=TEXT, or"),
        (["texts=a.jsonl"], "needs out=FILE"),
        (["text=a", "out=b"], "needs out=FILE"),
        (["text=a", "chat=true"], "texts: the model's tokenizer has no chat template"),
        (["texts=a.jsonl", "out=b", "chat=true"], "chat: lines of a file tell by their fields"),
        (["texts=chat.jsonl", "out=b"], "texts: the model's tokenizer has no chat template"),
        (["texts=two.jsonl", "out=b"], "two.jsonl, line 1: chosen and rejected are two chats. Set field=chosen, or field=rejected."),
        (["texts=odd.jsonl", "out=b"], "odd.jsonl, line 1: message 1: field 'content' is missing; the fields are role. Fix the line."),
        (["texts=gone.jsonl", "out=b"], "texts=gone.jsonl: there is no such file"),
        (["texts=bad.jsonl", "out=b"], "bad.jsonl, line 1: it is no object with a text in text"),
        (["texts=empty.jsonl", "out=b"], "it holds no text"),
        (["texts=half.jsonl", "out=b"], r"texts: number 2 of 2: character 1 ('\ud800') is not valid Unicode"),
        (["txt=a"], "txt: there is no such key. Did you mean 'text'"),
    ],
)
def test_what_cannot_be_classified_is_told(made: str, lm: Lm, tmp_path: Path, given: list[str], said: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "chat.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "two.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    (tmp_path / "odd.jsonl").write_text('{"messages": [{"role": "user"}]}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "half.jsonl").write_text('{"text": "a"}\n{"text": "a\\ud800"}\n')  # of a pair of surrogates
    code, _, error = lm("classify", made, *given)
    assert code == 2 and said in error


def test_of_many_labels_the_likeliest_are_told(lm: Lm, tmp_path: Path) -> None:
    """Seen to fail: a line of 200 columns."""
    cfg, names = config(vocab_size=320, max_seq_len=32), [f"kind {i}" for i in range(200)]
    api.save(build_model(cfg.replace(head=cfg.head.telling(names, bias=False)), seed=0), BytesConfig().build(), tmp_path / "made")
    head, row = lm("classify", "from=made", "text=the sea")[1].splitlines()
    [found] = json.loads(lm("classify", "from=made", "text=the sea", "format=json")[1])
    assert head.split() == ["likeliest", "text"] and len(row) < 80 and row.endswith("the sea")
    assert row.startswith(f"{found['label']} {found['probabilities'][found['label']]:.4f}, ") and row.count(", ") == 2


def test_the_matrices_may_be_held_in_fewer_bits(made: str, lm: Lm) -> None:
    [plain], [held] = (json.loads(lm("classify", made, "text=the sea", "format=json", *more)[1]) for more in ([], ["dtype=int8"]))
    assert plain["probabilities"]["calm"] == pytest.approx(held["probabilities"]["calm"], abs=0.02)


def test_long_texts_are_fewer_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that memory has a bound. Seen to fail: 32 texts, however long."""
    cfg, seen = config(vocab_size=320, max_seq_len=32), []
    model = build_model(cfg.replace(head=cfg.head.telling(NAMES, bias=False)), seed=0)
    texts = ["x" * (1 + 7 * i % 31) for i in range(90)]
    whole = api.classify(model, BytesConfig().build(), texts)
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].tokens.shape))
    monkeypatch.setattr("lm.generation.whole._TOKENS", 100)
    found = api.classify(model, BytesConfig().build(), texts)
    assert all(one == pytest.approx(other, abs=1e-5) for one, other in zip(found, whole, strict=True))
    assert max(rows * width for rows, width in seen) <= 100 and sum(rows for rows, _ in seen) == 90
    assert {rows for rows, _ in seen[:-1]} == {3, 6, 12}  # few numbers, since a GPU compiles its attention for each


def test_a_text_of_no_tokens_is_told_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, tokenizer = config(vocab_size=320, max_seq_len=32), BytesConfig().build()
    monkeypatch.setattr(type(tokenizer), "prefix", [])
    with pytest.raises(ConfigError, match="texts: number 2 of 3 has no tokens"):
        api.classify(build_model(cfg.replace(head=cfg.head.telling(NAMES, bias=False))), tokenizer, ["a", "", "b"])


def test_another_model_is_no_classifier(lm: Lm, tmp_path: Path) -> None:
    api.save(build_model(config(vocab_size=320), seed=0), BytesConfig().build(), tmp_path / "plain")
    code, _, error = lm("classify", "from=plain", "text=a")
    assert code == 2 and "Use one that objective=classify, multi_label, regression or reward has trained" in error
