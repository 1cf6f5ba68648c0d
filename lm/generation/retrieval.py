"""How well a model's vectors find the documents that answer a query: nDCG, recall and the reciprocal rank."""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.embed import Embedding, read_texts
from lm.generation.lines import read_lines
from lm.nn.transformer import LM
from lm.schema import Tree

AT, RECALL_AT = 10, (1, 10, 100)  # places that nDCG and the reciprocal rank look at, and those of recall
_MOST = 1 << 22  # cosines that are held at a time


@dataclass(frozen=True)
class Retrieval:
    """Texts by their ids, and for each query that counts the documents which answer it, each with how well (1 or more)."""

    documents: dict[str, str]
    queries: dict[str, str]
    answers: dict[str, dict[str, int]]


def read_retrieval(path: Path) -> Retrieval:
    """Returns what is in a folder as BEIR has it (Thakur et al. 2021, arXiv:2104.08663): `corpus.jsonl` with _id, text and perhaps title,
    which stands before the text; `queries.jsonl` with _id and text; `qrels/test.tsv` with query-id, corpus-id and score, of which 0 is no
    answer. Raises ConfigError where a file is missing or does not fit the others.  path: the folder, or another file of qrels in it."""
    folder, judged = (path.parent.parent, path) if path.suffix == ".tsv" else (path, path / "qrels" / "test.tsv")
    documents, queries, answers = _texts(folder / "corpus.jsonl"), _texts(folder / "queries.jsonl"), dict[str, dict[str, int]]()
    for number, line in enumerate(_table(judged), 2):
        try:
            query, document, score = line["query-id"], line["corpus-id"], int(line["score"])
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                f"{judged}: line {number} is no query-id, corpus-id and whole score. Head the columns so, with tabs."
            ) from None
        for given, known, name in ((query, queries, "queries"), (document, documents, "corpus")):
            if given not in known:
                raise ConfigError(f"{judged}: line {number} names {given[:80]!r}, which is not in {name}.jsonl. Restore one of the files.")
        if score > 0:
            answers.setdefault(query, {})[document] = score
    if not answers:
        raise ConfigError(f"{judged}: no query has an answer with a score above 0. Name another file of qrels.")
    return Retrieval(documents, {name: queries[name] for name in answers}, answers)


def retrieve(
    model: LM,
    tokenizer: Tokenizer,
    found: Retrieval,
    *,
    prompts: Mapping[str, str] | None = None,
    dims: int | None = None,
    told: Callable[[str, int, int], None] = lambda what, n, n_cut: None,
) -> Tree:
    """Returns the figures of a model: ndcg@10, mrr@10 and recall@1, 10 and 100, each the mean over queries, and how many of each there are.

    For each query all documents are ranked by the cosine; those of equal ones in their order. A document with the id of the query is left
    out.  prompts: of these `query` and `document` are written before texts.  dims: as in `lm.embed`.  told: called with what is embedded,
    how many of it, and how many of these are longer than the model reads, before that.
    """
    before, vectors = prompts or {}, list[NDArray[np.float32]]()
    for what, prompt, texts in (("documents", "document", found.documents), ("queries", "query", found.queries)):
        read = read_texts(model, tokenizer, [before.get(prompt, "") + text for text in texts.values()])
        embedding = Embedding(model, read, dims=dims)
        told(what, embedding.n, embedding.n_cut)
        vectors.append(np.stack(embedding.all()))
    names, ranked = [*found.documents], list[list[str]]()
    most, queries = max(AT, *RECALL_AT), [*found.queries]
    rows = max(1, _MOST // len(names))
    for start in range(0, len(queries), rows):
        cosines = vectors[1][start : start + rows] @ vectors[0].T
        for query, row in zip(queries[start : start + rows], np.argsort(-cosines, axis=1, kind="stable")[:, : most + 1], strict=True):
            ranked.append([names[i] for i in row.tolist() if names[i] != query][:most])
    each = [figures(rank, found.answers[query]) for query, rank in zip(queries, ranked, strict=True)]
    means = {name: sum(one[name] for one in each) / len(each) for name in each[0]}
    return means | {"queries": len(queries), "documents": len(names)}


def figures(ranked: Sequence[str], answers: Mapping[str, int]) -> dict[str, float]:
    """Returns the figures of one query.  ranked: documents, the nearest first.  answers: how well each of the right ones answers.

    nDCG takes the scores as gains and divides by log2(1 + place), as trec_eval does; recall@k is the part of the answers among the first
    k; mrr is one over the place of the first answer.
    """
    gains, ideal = [answers.get(name, 0) for name in ranked], sorted(answers.values(), reverse=True)
    first = next((place for place, gain in enumerate(gains[:AT], 1) if gain), None)
    recalled = {f"recall@{k}": sum(gain > 0 for gain in gains[:k]) / len(answers) for k in RECALL_AT}
    return {f"ndcg@{AT}": _discounted(gains) / _discounted(ideal), f"mrr@{AT}": 1 / first if first else 0.0, **recalled}


def _discounted(gains: Sequence[int]) -> float:
    return float(sum(gain / np.log2(1 + place) for place, gain in enumerate(gains[:AT], 1)))


def _texts(file: Path) -> dict[str, str]:
    """Returns the texts of a file of JSON lines by their ids."""
    found: dict[str, str] = {}
    for line, where in read_lines(file, "retrieval"):
        name, text = (line.get("_id"), line.get("text")) if isinstance(line, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise ConfigError(f"{where}: it is no object with texts in _id and text. Fix the line.")
        if name in found:
            raise ConfigError(f"{where}: the _id {name[:80]!r} is there twice. Remove one.")
        found[name] = f"{title} {text}" if isinstance(title := line.get("title"), str) and title else text
    if not found:
        raise ConfigError(f"{file}: it holds no text. Restore the file.")
    return found


def _table(file: Path) -> list[dict[str, str]]:
    try:
        with open(file, encoding="utf-8", newline="") as opened:
            return [*csv.DictReader(opened, delimiter="\t")]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        others = ", ".join(sorted(map(str, file.parent.glob("*.tsv"))))
        raise ConfigError(f"{file}: it cannot be read ({error}). {f'Name one of {others}' if others else 'Restore the file'}.") from None
