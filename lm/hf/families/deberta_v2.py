"""DeBERTa v2 and v3 with their head for masked tokens.  He et al. 2020, arXiv:2006.03654, and 2021, arXiv:2111.09543."""

import math
from collections.abc import Iterator
from typing import ClassVar

from lm.errors import ConfigError
from lm.hf.families.bert import Bert
from lm.hf.io.family import Pair, module, same, without
from lm.schema import Tree

_HEAD = {
    **{f"cls.predictions.transform.{part}.{kind}": f"{part}.{kind}" for part in ("dense", "LayerNorm") for kind in ("weight", "bias")},
    "cls.predictions.bias": "bias",
}
"""Tensors of the head -> of that of files with legacy=false, the published ones."""

_NORM, _VECTORS = r"(deberta\.)?encoder\.LayerNorm\.(weight|bias)", r"(deberta\.)?encoder\.rel_embeddings\.weight"


class DebertaV2(Bert):
    """BERT whose scores have terms of distances, and whose embedding has positions in some models alone."""

    name = "deberta-v2"
    architecture = "DebertaV2ForMaskedLM"
    rare = True
    ignored = (r"deberta\.embeddings\.position_ids", r"cls\.predictions\.decoder\.bias", r"mask_predictions\..*")
    older_endings: ClassVar[dict[str, str]] = {ours: f"lm_predictions.lm_head.{theirs}" for ours, theirs in _HEAD.items()}
    fields = {**Bert.fields, "norm.eps": ("layer_norm_eps", 1e-7)}
    further = (
        *Bert.further, "relative_attention", "pos_att_type", "position_buckets", "max_relative_positions", "share_att_key", "norm_rel_ebd",
        "position_biased_input", "conv_kernel_size", "embedding_size", "legacy",
    )  # fmt: skip
    idle = ("pooler_dropout", "pooler_hidden_size", "conv_act", "conv_groups")
    respelled = ("legacy", "pos_att_type", "position_buckets", "max_relative_positions", "norm_rel_ebd")
    fixed = without(Bert.fixed, "position.kind")
    fixed_there = {"pooler_hidden_act": "gelu"}

    def ignores(self, hf: Tree) -> tuple[str, ...]:
        """A model without distances may have the norm of their vectors, and one whose scores name no terms these themselves."""
        if hf.get("relative_attention", False):
            return self.ignored
        return (*self.ignored, _NORM) if _terms(hf) else (*self.ignored, _NORM, _VECTORS)

    def read(self, hf: Tree) -> Tree:
        there = {"conv_kernel_size": (0, "a convolution"), "embedding_size": (hf["hidden_size"], "an embedding of that width")}
        for key, (needed, what) in there.items():
            if hf.get(key, needed) != needed:
                raise ConfigError(f"config.json: {key}={hf[key]}: {what} has no place in lm's {self.name}. Import another model.")
        terms = _terms(hf)
        return {
            **super().read(hf),
            "embed.segments": hf.get("type_vocab_size") or None,
            "position.kind": "learned" if hf.get("position_biased_input", True) else "none",
            "attention.scale": 1 / math.sqrt(hf["hidden_size"] // hf["num_attention_heads"] * (1 + len(terms))),
            "attention.disentangled": self._distances(hf, terms) if hf.get("relative_attention", False) else None,
        }

    def _distances(self, hf: Tree, terms: list[str]) -> Tree:
        if not terms:
            raise ConfigError("config.json: pos_att_type names neither c2p nor p2c, and relative_attention is true. Set it to false.")
        most = hf.get("max_relative_positions", -1)
        most = most if most > 0 else hf.get("max_position_embeddings", 512)
        n = hf.get("position_buckets", -1)
        return {
            "n_buckets": n if n > 0 else most,
            "max_distance": most if n > 0 else None,
            "terms": "query_and_key" if len(terms) > 1 else {"c2p": "query", "p2c": "key"}[terms[0]],
            "projections": "shared" if hf.get("share_att_key", False) else "own",
            "norm": "layer_norm" in (each.strip() for each in hf.get("norm_rel_ebd", "none").lower().split("|")),
        }

    def write(self, ours: Tree) -> Tree:
        distances = {key.removeprefix(_OURS): value for key, value in ours.items() if key.startswith(_OURS)}
        if distances:
            n, most = distances["n_buckets"], distances["max_distance"]
            told: Tree = {
                "relative_attention": True,
                "pos_att_type": {"query": ["c2p"], "key": ["p2c"], "query_and_key": ["p2c", "c2p"]}[distances["terms"]],
                "position_buckets": -1 if most is None else n,
                "max_relative_positions": n if most is None else most,
                "share_att_key": distances["projections"] == "shared",
                "norm_rel_ebd": "layer_norm" if distances["norm"] else "none",
            }
        else:  # a class makes scores smaller by the terms that it names, with or without distances
            n = round(1 / (ours["attention.scale"] ** 2 * ours["attention.head_dim"])) - 1
            told = {"relative_attention": False, "pos_att_type": ["p2c", "c2p"][: max(0, n)]}
        own = {"position_biased_input": ours["position.kind"] == "learned", "legacy": True}
        return {"type_vocab_size": ours["embed.segments"] or 0, **told, **own}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        yield same("blocks.0.attention.table.weight", "deberta.encoder.rel_embeddings.weight")
        yield from module("blocks.0.attention.table_norm", "deberta.encoder.LayerNorm")
        for i in range(ours["n_layers"]):
            for name, theirs in (("q", "query"), ("k", "key")):
                yield from module(f"blocks.{i}.attention.distance_{name}", f"deberta.encoder.layer.{i}.attention.self.pos_{theirs}_proj")
        for pair in super().pairs(ours):
            yield pair.renamed(_renamed)


_OURS = "attention.disentangled."


def _terms(hf: Tree) -> list[str]:
    """Returns the terms of distances that a config.json names, as a list or in one text."""
    named = hf.get("pos_att_type") or []
    named = [each.strip() for each in named.lower().split("|")] if isinstance(named, str) else named
    return [each for each in ("p2c", "c2p") if each in named]


def _renamed(path: str) -> str:
    path = f"deberta.{path.removeprefix('bert.')}" if path.startswith("bert.") else path
    for name in ("query", "key", "value"):
        path = path.replace(f".attention.self.{name}.", f".attention.self.{name}_proj.")
    return path


FAMILY = DebertaV2()
