"""`lm embed`, and `lm.embed`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lm as api
from lm.data.tokenizer.config import BytesConfig
from lm.errors import ConfigError
from lm.generation.embed import Embedding
from lm.nn.model_config import model_config
from lm.nn.transformer import LM
from lm.storage.model_folder import save_model
from lm.testing.models import BASE
from tests.conftest import Lm
from tests.nn.models import config, random_model, redrawn, with_kinds

TEXTS = ["x" * 40, "a", "the sea", "", "a line\nbreak", "the sea is wet"]  # of which the first is cut


def built(kind: str, pooling: str = "token") -> LM:
    cfg = model_config(with_kinds({**BASE, "kind": kind, "vocab_size": 320, "max_seq_len": 32}))
    return random_model(cfg.replace(head=cfg.head.replace(pooling=pooling)))


@pytest.fixture
def made(tmp_path: Path) -> str:
    api.save(redrawn(config(vocab_size=320, max_seq_len=32)), BytesConfig().build(), tmp_path / "made")
    return "from=made"


def test_a_vector_is_the_state_of_a_text_alone_where_the_head_would_read_it() -> None:
    """By a forward over the ids of one text: of a decoder the last, of an encoder the first, which ends with eos, or the mean."""
    tokenizer = BytesConfig().build()
    for kind, pooling in (("decoder", "token"), ("encoder", "token"), ("decoder", "mean"), ("encoder", "mean")):
        model = built(kind, pooling)
        found = api.embed(model, tokenizer, TEXTS)
        assert found.shape == (len(TEXTS), model.cfg.d_model) and found.dtype == torch.float32 and found.device.type == "cpu"
        for text, vector in zip(TEXTS, found, strict=True):
            after = tokenizer.suffix if kind == "encoder" else []
            ids = [*[*tokenizer.prefix, *tokenizer.encode(text)][: 32 - len(after)], *after]
            with torch.no_grad():
                hidden = model(torch.tensor([ids]), read=lambda hidden, head, ctx: hidden)[0]
            expected = hidden[0 if kind == "encoder" else -1] if pooling == "token" else hidden.mean(0)
            torch.testing.assert_close(vector, expected / expected.norm(), atol=1e-5, rtol=1e-5)
    assert api.embed(model, tokenizer, []).shape == (0, model.cfg.d_model)


def test_cosines_or_a_vector_are_printed(made: str, lm: Lm, tmp_path: Path) -> None:
    vectors = api.embed(*api.load(tmp_path / "made"), TEXTS[1:4])
    code, table, _ = lm("embed", made, *(f"text={text}" for text in TEXTS[1:4]))
    head, *rows = table.splitlines()
    assert code == 0 and head.split() == ["1", "2", "3", "text"] and rows[1].endswith("the sea")
    assert [[float(cell) for cell in row.split()[1:4]] for row in rows] == [
        [pytest.approx(float(one @ other), abs=1e-4) for other in vectors] for one in vectors
    ]
    [told] = json.loads(lm("embed", made, "text=the sea", "format=json")[1])
    assert told["text"] == "the sea" and told["embedding"] == pytest.approx(vectors[1].tolist(), abs=1e-6)
    code, whole, note = lm("embed", made, "text=the sea")
    assert json.loads(whole) == told["embedding"] and "longer" not in note
    for n, cut in ((31, False), (32, True)):  # beside [bos]
        assert ("1 of 1 is longer than the model reads" in lm("embed", made, f"text={'x' * n}")[2]) == cut


def test_a_file_gets_embeddings_or_becomes_a_matrix(made: str, lm: Lm, tmp_path: Path) -> None:
    """The numbers of a line are those of the matrix, bit for bit."""
    given = [{"of": {"text": text}, "id": i} for i, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, given)) + "\n\n")
    code, _, note = lm("embed", made, "texts=a.jsonl", "field=of.text", "out=b.jsonl")
    found = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    cut = "texts: 1 of 6 is longer than the model reads: the end is left out"
    assert (
        code == 0 and "6 texts embedded, 6 now" in note and cut in note and [{k: line[k] for k in ("of", "id")} for line in found] == given
    )
    assert lm("embed", made, "texts=a.jsonl", "field=of.text", "out=new/b.npy")[0] == 0
    matrix = np.load(tmp_path / "new" / "b.npy")
    assert matrix.dtype == np.float32 and np.array_equal(matrix, np.array([line["embedding"] for line in found], np.float32))
    torch.testing.assert_close(torch.from_numpy(matrix), api.embed(*api.load(tmp_path / "made"), TEXTS))
    assert "it exists already" in lm("embed", made, "texts=a.jsonl", "field=of.text", "out=new/b.npy")[2]
    assert lm("embed", made, "texts=b.jsonl", "field=of.text", "out=new/b.npy", "overwrite=true")[0] == 0
    assert "would hold JSON lines, and .csv is" in lm("embed", made, "texts=a.jsonl", "field=of.text", "out=c.csv")[2]
    assert "it is the file that is read" in lm("embed", made, "texts=a.jsonl", "field=of.text", "out=a.jsonl", "overwrite=true")[2]
    assert "embedding already" in lm("embed", made, "texts=b.jsonl", "field=of.text", "out=c.jsonl")[2]


def test_a_prompt_that_the_model_knows_is_written_before_each_text(made: str, lm: Lm, tmp_path: Path) -> None:
    model, tokenizer = api.load(tmp_path / "made")
    assert "'query' is no prompt that the model knows. It knows none" in lm("embed", made, "text=a", "prompt=query")[2]
    save_model(tmp_path / "knows", model.cfg.tree(), dict(model.named_parameters()), tokenizer.save, {"prompts": {"query": "ask: "}})
    expected = api.embed(model, tokenizer, ["ask: a", "ask: the sea"])
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "the sea"}\n')
    assert lm("embed", "from=knows", "texts=a.jsonl", "out=a.npy", "prompt=query")[0] == 0
    assert lm("embed", "from=knows", "texts=a.jsonl", "out=a.jsonl.out", "prompt=query")[0] == 0
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl.out").read_text().splitlines()]
    told = json.loads(lm("embed", "from=knows", "text=a", "text=the sea", "prompt=query", "format=json")[1])
    for found in (np.load(tmp_path / "a.npy"), [each["embedding"] for each in lines], [each["embedding"] for each in told]):
        torch.testing.assert_close(torch.tensor(np.array(found), dtype=torch.float32), expected, atol=1e-6, rtol=1e-5)
    assert [each["text"] for each in lines] == [each["text"] for each in told] == ["a", "the sea"]
    code, _, note = lm("embed", "from=knows", "text=a")
    assert code == 0 and "prompt: none is written before the texts, and the model knows query: prompt=query" in note
    assert "'quary' is no prompt that the model knows. Did you mean 'query'" in lm("embed", "from=knows", "text=a", "prompt=quary")[2]


def test_the_first_numbers_of_vectors_are_vectors(made: str, lm: Lm, tmp_path: Path) -> None:
    model, tokenizer = api.load(tmp_path / "made")
    whole, first = api.embed(model, tokenizer, TEXTS), api.embed(model, tokenizer, TEXTS, dims=5)
    torch.testing.assert_close(first, torch.nn.functional.normalize(whole[:, :5], dim=-1))
    assert api.embed(model, tokenizer, [], dims=5).shape == (0, 5)
    assert json.loads(lm("embed", made, "text=the sea", "dims=5")[1]) == pytest.approx(first[2].tolist(), abs=1e-6)
    (tmp_path / "a.jsonl").write_text('{"text": "the sea"}\n')
    assert lm("embed", made, "texts=a.jsonl", "out=a.npy", "dims=5")[0] == 0
    assert np.load(tmp_path / "a.npy")[0].tolist() == pytest.approx(first[2].tolist(), abs=1e-6)
    d = model.cfg.d_model
    assert f"dims: {d + 1} is given, and a vector of the model has {d} numbers" in lm("embed", made, "text=a", f"dims={d + 1}")[2]


def test_a_file_that_a_kill_has_left_is_gone_on_with(made: str, lm: Lm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "x" * (1 + 7 * i % 31)}) + "\n" for i in range(70)))
    assert lm("embed", made, "texts=a.jsonl", "out=whole.jsonl")[0] == 0
    real, seen = Embedding.found, []

    def ended(*args: Any) -> Any:
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(args)
        return real(*args)

    monkeypatch.setattr(Embedding, "found", ended)
    code, _, error = lm("embed", made, "texts=a.jsonl", "out=b.jsonl")
    assert code == 130 and "what is embedded is kept" in error
    assert lm("embed", made, "texts=a.jsonl", "out=b.npy")[0] == 130 and not [*tmp_path.glob("*b.npy*")]
    monkeypatch.setattr(Embedding, "found", real)
    assert lm("embed", made, "texts=a.jsonl", "out=b.jsonl")[2].endswith("70 texts embedded, 6 now.\n")
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_what_has_no_vector_is_told(made: str, lm: Lm, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": ["a"]}\n')
    (tmp_path / "half.jsonl").write_text('{"text": "a"}\n{"text": "a\\ud800"}\n')
    refused = {
        (): "text: give text=TEXT, or texts=FILE and out=FILE",
        ("text=a", "field=b"): "field: it is of texts=FILE",
        ("text=a", "out=b"): "needs out=FILE",
        ("texts=a.jsonl", "out=b"): "a.jsonl, line 2: it is no object with a text in text",
        ("texts=half.jsonl", "out=b"): r"texts: number 2 of 2: character 1 ('\ud800') is not valid Unicode",
        ("texts=half.jsonl", "out=b.npy"): r"texts: number 2 of 2: character 1 ('\ud800') is not valid Unicode",
        ("txt=a",): "txt: there is no such key. Did you mean 'text'",
    }
    for given, says in refused.items():
        code, _, error = lm("embed", made, *given)
        assert code == 2 and says in error, error
    tokenizer = BytesConfig().build()
    given: list[Any] = [0, 999, 2.5]
    for dims, says in zip(given, ("dims: 0 is given", "dims: 999 is given", "dims: float was given"), strict=True):
        with pytest.raises(ConfigError, match=says):
            api.embed(built("decoder"), BytesConfig().build(), ["a"], dims=dims)
    with pytest.raises(ConfigError, match="embed: the model is an encoder-decoder, and its vectors are of no whole text"):
        api.embed(built("encoder_decoder"), tokenizer, ["a"])
    wrong: list[Any] = ["a", [("a", "b")], None]
    for texts in wrong:
        with pytest.raises(ConfigError, match=r"is no list of texts. Give one, such as \['a text'\]"):
            api.embed(built("decoder"), tokenizer, texts)


def test_a_file_of_plain_lines_is_one_of_texts(made: str, lm: Lm, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"the sea\r\n\n  a line\n")
    code, _, err = lm("embed", made, "texts=a.txt", "out=a.jsonl")
    found = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert code == 0, err
    assert [line["text"] for line in found] == ["the sea", "  a line"]
    vectors = api.embed(*api.load(tmp_path / "made"), ["the sea", "  a line"])
    torch.testing.assert_close(torch.tensor([line["embedding"] for line in found]), vectors, atol=1e-5, rtol=1e-5)
    (tmp_path / "b.txt").write_bytes(b"\xff\n")
    assert "b.txt, line 1: it is not UTF-8" in lm("embed", made, "texts=b.txt", "out=b.jsonl")[2]


def test_a_table_has_a_row_for_each_text(made: str, lm: Lm, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfid,said\r\n7,"the sea,\nor not"\r\n8,a line\r\n')
    (tmp_path / "a.TSV").write_text("id\tsaid\n7\tthe sea\n")
    vectors = api.embed(*api.load(tmp_path / "made"), ["the sea,\nor not", "a line", "the sea"])
    for name, rows in (
        ("a.csv", [{"id": "7", "said": "the sea,\nor not"}, {"id": "8", "said": "a line"}]),
        ("a.TSV", [{"id": "7", "said": "the sea"}]),
    ):
        code, _, err = lm("embed", made, f"texts={name}", "field=said", f"out={name}.jsonl")
        found = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert code == 0 and [{key: line[key] for key in ("id", "said")} for line in found] == rows, err
        expected = vectors[:2] if name == "a.csv" else vectors[2:]
        torch.testing.assert_close(torch.tensor([line["embedding"] for line in found]), expected, atol=1e-5, rtol=1e-5)
    assert "a.csv, row 1: it is no object with a text in text, which has id, said" in lm("embed", made, "texts=a.csv", "out=b.jsonl")[2]
    (tmp_path / "b.csv").write_bytes(b"text\n\xff\n")
    assert "b.csv: it is not UTF-8" in lm("embed", made, "texts=b.csv", "out=c.jsonl")[2]


def test_a_line_with_other_fields_is_refused_with_their_names(made: str, lm: Lm, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"query": "a", "positive": "b"}\n')
    said = "a.jsonl, line 1: it is no object with a text in text, which has query, positive. Fix the line, or set field."
    assert said in lm("embed", made, "texts=a.jsonl", "out=b.jsonl")[2]
