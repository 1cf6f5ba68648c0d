"""What DeepSeek-V3 and others share: their mixture of experts, and blocks that predict further tokens.  arXiv:2412.19437."""

import re
from collections.abc import Collection, Iterator
from typing import ClassVar

from lm.errors import ConfigError
from lm.hf.families.llama import Llama
from lm.hf.io.family import Pair, activation, gated, same, without
from lm.hf.io.transforms import Copies
from lm.schema import Tree

MTP_LAYERS = "num_nextn_predict_layers"


class DeepSeekMoE(Llama):
    """Llama with a mixture of experts after the first layers, chosen by groups and with a correction bias, beside shared experts."""

    usual_dense: ClassVar[int]  # width of the first layers' feed-forward, where the file names none
    fields = {
        **without(Llama.fields, "ffn.*"),
        "ffn.expert.activation": ("hidden_act", "silu"),
        "ffn.expert.hidden": ("moe_intermediate_size", 1408),
        "ffn.n_experts": ("n_routed_experts", 128),
        "ffn.n_shared": ("n_shared_experts", 1),
        "ffn.top_k": ("num_experts_per_tok", 8),
        "ffn.first_dense": ("first_k_dense_replace", 1),
        "ffn.router.n_groups": ("n_group", 1),
        "ffn.router.top_groups": ("topk_group", 1),
        "ffn.router.normalize": ("norm_topk_prob", True),
        "ffn.router.scale": ("routed_scaling_factor", 1.0),
    }
    further: ClassVar[tuple[str, ...]] = ("intermediate_size",)
    fixed = {
        "kind": "decoder", "norm.kind": "rms", "norm.place": "pre", "attention.kind": "gqa", "ffn.kind": "moe", "ffn.expert.gated": True,
        "ffn.router.kind": "sigmoid", "block.kind": "sequential",
    }  # fmt: skip
    fixed_there = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}

    def read(self, hf: Tree) -> Tree:
        said = {ours: hf.get(key, missing) for ours, key, missing in self.places()}
        if not said["ffn.n_shared"]:
            raise ConfigError("config.json: n_shared_experts=0 has no form in transformers, which wants one or more.")
        self._require_groups(hf)
        if said["ffn.n_experts"] < 2 * (groups := said.get("ffn.router.n_groups", 1)):
            raise ConfigError(f"config.json: n_group={groups} leaves fewer than two experts a group, which transformers wants.")
        if not said.get("ffn.first_dense", hf.get("first_k_dense_replace")):  # the latter, where each layer is told by itself
            return {"ffn.dense": None}
        hidden = hf.get("intermediate_size", self.usual_dense)
        return {"ffn.dense.hidden": hidden, "ffn.dense.activation": activation(hf, "hidden_act", "silu")}

    def _require_groups(self, hf: Tree) -> None:
        if null := next((key for key in ("n_group", "topk_group") if hf.get(key, 1) is None), None):
            raise ConfigError(f"config.json: {null} is null, and transformers computes with a number. Write 1 where there are no groups.")

    def write(self, ours: Tree) -> Tree:
        return {"intermediate_size": ours["ffn.dense.hidden"]} if ours["ffn.first_dense"] else {}

    def ffn(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        """Yields the pairs of a dense layer's feed-forward, and those of a layer with experts."""
        yield from gated(f"{here}.ffn", f"{there}.mlp", ours["ffn.n_experts"])
        yield same(f"{here}.ffn.router.correction_bias", f"{there}.mlp.gate.e_score_correction_bias")
        for name in ("gate", "up", "down"):
            yield same(f"{here}.ffn.shared.{name}.weight", f"{there}.mlp.shared_experts.{name}_proj.weight")


class FurtherTokens(DeepSeekMoE):
    """The same with multi-token prediction, whose blocks are layers after the last one: README_WEIGHTS.md of
    github.com/deepseek-ai/DeepSeek-V3."""

    further: ClassVar[tuple[str, ...]] = (*DeepSeekMoE.further, MTP_LAYERS)
    renamed = {"num_mtp_layers": MTP_LAYERS}

    def as_stored(self, hf: Tree, names: Collection[str]) -> Tree:
        """Counts the multi-token prediction layers in the file: transformers writes their number, and leaves their tensors out."""
        beyond = [re.compile(pattern) for pattern in self._beyond(hf)]
        return {**hf, MTP_LAYERS: sum(any(pattern.fullmatch(name) for name in names) for pattern in beyond)}

    def ignores(self, hf: Tree) -> tuple[str, ...]:
        return (*self.ignored, *self._beyond(hf))

    def _beyond(self, hf: Tree) -> list[str]:
        """Returns for each layer after the last one, which predicts a further token, a pattern of its tensors' names; nothing in families
        that have left such layers out."""
        if MTP_LAYERS not in self.further:
            return []
        first, n = hf.get("num_hidden_layers"), hf.get(MTP_LAYERS, 1)
        return [rf"(model\.)?layers\.{first + k}\..*" for k in range(n)] if isinstance(first, int) and isinstance(n, int) else []

    def read(self, hf: Tree) -> Tree:
        depth = hf.get(MTP_LAYERS, 1)
        return {**super().read(hf), **({"mtp.depth": depth} if depth else {"mtp": None})}

    def write(self, ours: Tree) -> Tree:
        return {MTP_LAYERS: ours.get("mtp.depth", 0), **super().write(ours)}

    def pairs(self, ours: Tree) -> Iterator[Pair]:
        """Yields all pairs; each layer that predicts a further token has copies of the embedding and the head in the file."""
        further = [f"model.layers.{ours['n_layers'] + k}" for k in range(ours.get("mtp.depth", 0))]
        heads = [f"{there}.shared_head.head.weight" for there in further]
        copies = {"embed.weight": [f"{there}.embed_tokens.weight" for there in further], "head.weight": heads}
        if ours["head.tied"]:
            copies["embed.weight"] += heads
        for pair in super().pairs(ours):
            theirs = (*pair.theirs, *copies.get(pair.ours[0], []))
            yield Pair(pair.ours, theirs, Copies(len(theirs))) if pair.ours[0] in copies else pair
        for k, there in enumerate(further):
            for name, their_name in (("token_norm", "enorm"), ("hidden_norm", "hnorm"), ("join", "eh_proj"), ("norm", "shared_head.norm")):
                yield same(f"mtp.{k}.{name}.weight", f"{there}.{their_name}.weight")
            yield from self.block(f"mtp.{k}.block", there, ours)
