"""Classifiers: the body of a family with a head for labels instead of tokens, `...ForSequenceClassification` of transformers."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple

from lm.errors import ConfigError
from lm.hf.io.bodies import BODIES, OTHER_HEADS, bodies
from lm.hf.io.family import Family, Pair, families, module, without
from lm.nn.model_config import ModelConfig
from lm.schema import Tree

TASK = "ForSequenceClassification"
_LANGUAGE = re.compile("(ForCausalLM|LMHeadModel|ForMaskedLM)$")
_MOST = 100_000  # labels, each of which gets a name
_ONE, _SEVERAL, _NUMBER = "single_label_classification", "multi_label_classification", "regression"


class _Head(NamedTuple):
    """Where the head's weights are in the file.  dense, act: of the layer before the matrix; None: as before tokens, if any."""

    matrix: str
    dense: str | None = None
    act: Literal["gelu", "relu", "tanh"] | None = None


HEADS: dict[str, _Head] = {
    **dict.fromkeys(
        ("arcee", "biogpt", "bloom", "deepseek_v2", "deepseek_v3", "diffllama", "exaone4", "falcon", "gemma", "gemma2", "gemma3_text",
         "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe",
         "llama", "minicpm3", "ministral", "ministral3", "mistral", "mixtral", "mpt", "nemotron", "olmo", "olmo2", "olmo3", "openai-gpt",
         "opt", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss",
         "smollm3", "stablelm", "starcoder2"),
        _Head("score"),
    ),
    **dict.fromkeys(("bert", "megatron-bert"), _Head("classifier", "bert.pooler.dense", "tanh")),
    "albert": _Head("classifier", "albert.pooler", "tanh"),
    "deberta-v2": _Head("classifier", "pooler.dense", "gelu"),
    "electra": _Head("classifier.out_proj", "classifier.dense", "gelu"),
    "ernie": _Head("classifier", "ernie.pooler.dense", "tanh"),
    "nomic_bert": _Head("classifier", "nomic_bert.pooler.dense", "tanh"),
    **dict.fromkeys(
        ("roberta", "camembert", "xlm-roberta", "roberta-prelayernorm", "data2vec-text", "xlm-roberta-xl", "jina_embeddings_v3"),
        _Head("classifier.out_proj", "classifier.dense", "tanh"),
    ),
    "distilbert": _Head("classifier", "pre_classifier", "relu"),
    "modernbert": _Head("classifier"),
}  # fmt: skip
"""By family. A decoder's label is read off at the last token that is no padding, an encoder's at the first, or off the mean."""


@cache
def classifiers() -> dict[str, Family]:
    """Returns the families of `HEADS` with a head for labels, by model_type."""
    return {name: _with_labels(family) for name, family in families().items() if name in HEADS}


def _with_labels(family: Family) -> Family:
    body, head = type(family), HEADS[family.name]
    encoder = body.fixed["kind"] == "encoder"
    own = {
        "body": body,
        "head": head,
        "architecture": _LANGUAGE.sub(TASK, body.architecture),
        "auto": f"AutoModel{TASK}",
        "fields": {ours: theirs for ours, theirs in body.fields.items() if not _of_tokens(ours)},
        "further": (*body.further, "id2label", "label2id", "num_labels", "problem_type"),
        "idle": (*body.idle, *(key for ours, key, _ in family.places() if _of_tokens(ours))),
        "fixed": {ours: value for ours, value in body.fixed.items() if not _of_tokens(ours)} | {"head.tied": False, "head.bias": encoder},
    }
    return type(f"{body.__name__}{TASK}", (_Classifier, body), own)(family.even_heads)


def _of_tokens(ours: str) -> bool:
    return ours.startswith("head.") and ours != "head.transform_bias"


class _Classifier(Family):
    """What such a family does otherwise than the one whose body it has, which stands behind it in the order of classes."""

    body: ClassVar[type[Family]]
    head: ClassVar[_Head]

    def read(self, hf: Tree) -> Tree:
        names, n = hf.get("id2label"), hf.get("num_labels", 2)
        if not names and (type(n) is not int or not 0 < n <= _MOST):
            raise ConfigError(f"config.json: num_labels={n!r} does not fit; there are 1 to {_MOST:,}. Restore the file.")
        names = names or {i: f"LABEL_{i}" for i in range(n)}
        if (problem := hf.get("problem_type")) == _NUMBER and len(names) > 1:
            raise ConfigError(f"config.json: problem_type={problem} of {len(names)} numbers, and lm's models tell one. Import another.")
        read = self.body.read(self, without(hf, "tie_word_embeddings"))  # of a head of tokens
        found = {ours: value for ours, value in read.items() if not _of_tokens(ours) or self._keeps(ours)}
        before: Tree = {"head.transform": self.head.act, "head.transform_norm": False} if self.head.act is not None else {}
        if "classifier_pooling" in self.further:
            before["head.pooling"] = "mean" if hf.get("classifier_pooling", "cls") == "mean" else "token"
        labels = [str(name) for _, name in sorted((int(i), name) for i, name in names.items())]
        return found | before | {"head.labels": labels, "head.several": problem == _SEVERAL}

    def write(self, ours: Tree) -> Tree:
        names = dict(enumerate(ours["head.labels"] or []))
        told = {"id2label": {str(i): name for i, name in names.items()}, "label2id": {name: i for i, name in names.items()}}
        pooling = "mean" if ours["head.pooling"] == "mean" else "cls"
        pooled: Tree = {"classifier_pooling": pooling} if "classifier_pooling" in self.further else {}
        problem = _SEVERAL if ours["head.several"] else _ONE if len(names) > 1 else _NUMBER
        return {**self.body.write(self, ours), **told, **pooled, "problem_type": problem}

    def hf(self, cfg: ModelConfig) -> Tree:
        return self.body.hf(self, cfg) | ({"tie_word_embeddings": False} if "tie_word_embeddings" in self.idle else {})

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        for pair in self.body.pairs(self, ours):
            if not pair.ours[0].startswith("head.") or self._keeps(pair.ours[0]):
                yield pair
        yield from module("head", self.head.matrix)
        if self.head.dense is not None:
            yield from module("head.dense", self.head.dense)

    def _keeps(self, name: str) -> bool:
        """Whether an option or a weight is of what stands before the matrix here as it does before tokens."""
        return self.head.dense is None and name.startswith(("head.transform", "head.dense", "head.norm", "head.narrow"))


def known_task(hf: Tree) -> dict[str, Family]:
    """Returns the families that a config.json can be of: by its architecture those of classifiers, of encoders without a head, or of
    language models."""
    named: Any = hf.get("architectures")
    architecture, kind = str(named[0]) if isinstance(named, list) and named else "", hf.get("model_type")
    if kind in BODIES and (architecture.endswith("Model") or architecture in OTHER_HEADS):
        return bodies()
    return classifiers() if architecture.endswith(TASK) and kind in HEADS else families()
