"""`lm eval retrieval=FOLDER`: what a model's vectors find."""

import json
import math
from pathlib import Path

import pytest
import torch

import lm as api
from lm.data.tokenizer.config import BytesConfig
from lm.errors import ConfigError
from lm.generation import retrieval
from lm.generation.retrieval import figures, read_retrieval, retrieve
from tests.conftest import Lm
from tests.nn.models import config, redrawn

QUERIES = {"q1": "the sea", "q2": "a line", "d3": "wet", "q4": "not judged"}
DOCUMENTS = {"d1": "the sea is wet", "d2": "a line of text", "d3": "wet", "d4": "salt", "d5": "the sea"}
JUDGED = {"q1": {"d5": 2, "d1": 1, "d2": 0}, "q2": {"d2": 1}, "d3": {"d1": 1}}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    (tmp_path / "beir" / "qrels").mkdir(parents=True)
    corpus = [{"_id": name, "title": "", "text": text} for name, text in DOCUMENTS.items()]
    corpus[1] |= {"title": "a line", "text": "of text"}
    for name, lines in (("corpus", corpus), ("queries", [{"_id": name, "text": text} for name, text in QUERIES.items()])):
        (tmp_path / "beir" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [f"{query}\t{document}\t{score}" for query, each in JUDGED.items() for document, score in each.items()]
    (tmp_path / "beir" / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *rows, ""]))
    api.save(redrawn(config(vocab_size=320, max_seq_len=32)), BytesConfig().build(), tmp_path / "made")
    return tmp_path / "beir"


def test_figures_of_a_query_are_those_of_trec_eval() -> None:
    """By hand: gains 0, 1, 0, 2 where 2, 1 would be best, of three answers."""
    found = figures(["x", "b", "y", "a"], {"a": 2, "b": 1, "c": 1})
    ideal = 2 + 1 / math.log2(3) + 1 / math.log2(4)
    assert found["ndcg@10"] == pytest.approx((1 / math.log2(3) + 2 / math.log2(5)) / ideal)
    assert (found["mrr@10"], found["recall@1"], found["recall@10"], found["recall@100"]) == (0.5, 0.0, pytest.approx(2 / 3), 2 / 3)
    late = figures([*map(str, range(10)), "a"], {"a": 1})
    assert (late["ndcg@10"], late["mrr@10"], late["recall@10"], late["recall@100"]) == (0.0, 0.0, 0.0, 1.0)
    assert figures(["a", "b"], {"a": 2, "b": 1})["ndcg@10"] == 1.0


@pytest.mark.parametrize("most", [1 << 22, 1])
def test_documents_are_ranked_by_their_cosine_without_the_query_itself(made: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against `lm.embed` and a plain sort, in one product and query by query."""
    monkeypatch.setattr(retrieval, "_MOST", most)
    model, tokenizer = api.load(made.parent / "made")
    found = retrieve(model, tokenizer, read_retrieval(made), prompts={"query": "q: "}, dims=8)
    texts = api.embed(model, tokenizer, [*DOCUMENTS.values()], dims=8)
    each = []
    for query, answers in JUDGED.items():
        cosines = (texts @ api.embed(model, tokenizer, [f"q: {QUERIES[query]}"], dims=8)[0]).tolist()
        ranked = [name for _, name in sorted(zip((-cosine for cosine in cosines), DOCUMENTS, strict=True)) if name != query]
        each.append(figures(ranked, {name: score for name, score in answers.items() if score}))
    means = {name: sum(one[name] for one in each) / 3 for name in each[0]}
    assert found == {name: pytest.approx(value) for name, value in means.items()} | {"queries": 3, "documents": 5}
    assert 0 < found["ndcg@10"] < 1 and not torch.allclose(texts[:, 0], texts[:, 1])


def test_texts_that_are_cut_are_told(made: Path, lm: Lm) -> None:
    """Seen to fail: they were read in part without a word."""
    with (made / "corpus.jsonl").open("a") as file:
        file.write(json.dumps({"_id": "long", "text": "wet " * 20}) + "\n")
    assert (
        "6 documents to embed; the ends of 1, longer than the model reads, are left out\n"
        in lm("eval", "from=made", f"retrieval={made}")[2]
    )


def test_the_figures_are_printed(made: Path, lm: Lm) -> None:
    code, out, err = lm("eval", "from=made", f"retrieval={made}", "format=json")
    found = json.loads(out)
    assert code == 0 and found == pytest.approx(retrieve(*api.load(made.parent / "made"), read_retrieval(made)))
    assert "prompts before texts: none" in err and "3 queries to embed" in err
    code, table, _ = lm("eval", "from=made", f"retrieval={made}/qrels/test.tsv")
    assert code == 0 and table.splitlines()[0].split() == ["ndcg@10", f"{found['ndcg@10']:.4f}"]


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("qrels/test.tsv", None, r"test\.tsv: it cannot be read \(.*\)\. Restore the file\."),
        ("qrels/test.tsv", "a\tb\n", r"no query has an answer"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\td9\t1\n", r"line 2 names 'd9', which is not in corpus\.jsonl"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\td1\tx\n", r"line 2 is no query-id, corpus-id and whole score"),
        ("qrels/test.tsv", "q1\td1\t1\nq2\td2\t1\n", r"line 2 is no query-id, corpus-id and whole score\. Head the columns"),
        ("queries.jsonl", '{"_id": 3, "text": "x"}\n', r"queries\.jsonl, line 1: it is no object with texts in _id and text"),
        ("corpus.jsonl", '{"_id": "a", "text": "x"}\n' * 2, r"the _id 'a' is there twice"),
        ("corpus.jsonl", "", r"corpus\.jsonl: it holds no text"),
        ("corpus.jsonl", None, r"retrieval=.*corpus\.jsonl: there is no such file"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(made: Path, file: str, text: str | None, said: str) -> None:
    (made / file).unlink() if text is None else (made / file).write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_retrieval(made)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["retrieval=beir", "tasks=arc_easy"], "retrieval: it has no tasks. Leave one of them out."),
        (["retrieval=beir", "micro_batch=2"], "retrieval: it has no micro_batch. Leave one of them out."),
        (["retrieval=beir", "data=text"], "data: there is no such key."),
        (["dims=8", "tasks=arc_easy"], "dims=8: it is of vectors"),
        (["dims=8"], "dims=8: it is of vectors, and without retrieval none are made."),
    ],
)
def test_what_retrieval_does_not_take_is_refused(made: Path, lm: Lm, more: list[str], said: str) -> None:
    code, _, err = lm("eval", "from=made", *more)
    assert code == 2 and said in err
