"""What llama.cpp computes under one name of `general.architecture`: which of our options it has, and its names for keys and tensors."""

from abc import ABC
from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from lm.errors import ConfigError
from lm.hf.io.differing import alike
from lm.hf.io.rules import unlike
from lm.nn.model_config import ModelConfig
from lm.nn.position.rope import RopeConfig
from lm.nn.position.scaling import ScalingConfig, YarnScaling, frequencies
from lm.schema import Tree

ROUTING = {"softmax": 1, "sigmoid": 2}  # llama.cpp's numbers of what makes weights of a router's scores


class Architecture(ABC):
    """Options are named by dotted path, as on the command line without `model.`; tensors of a layer without `blocks.0.` and `blk.0.`."""

    name: ClassVar[str]
    families: ClassVar[tuple[str, ...]]  # model types of the models that it can hold
    fixed: ClassVar[Tree] = {"attention.window": None, "position.scaling.kind": (None, "linear", "yarn"), "position.fraction": 1.0}
    """Values, or tuples of them, that it has and no others, beside what the families fix."""
    square: ClassVar[bool] = False  # all heads together are as wide as the model
    halves: ClassVar[bool] = True  # it rotates the two halves of a head against each other, and not neighbours
    own_head: ClassVar[bool] = False  # it wants a head even where that is the embedding
    fused: ClassVar[dict[str, tuple[str, ...]]] = {}  # tensors there that are several of ours, one below the other
    names: ClassVar[dict[str, str]] = {
        "attention_residual.norm": "attn_norm",
        "attention_residual.norm_out": "post_attention_norm",
        "attention.q": "attn_q",
        "attention.k": "attn_k",
        "attention.v": "attn_v",
        "attention.o": "attn_output",
        "attention.q_norm": "attn_q_norm",
        "attention.k_norm": "attn_k_norm",
        "ffn_residual.norm": "ffn_norm",
        "ffn_residual.norm_out": "post_ffw_norm",
        "ffn.gate": "ffn_gate",
        "ffn.up": "ffn_up",
        "ffn.down": "ffn_down",
    }
    around: ClassVar[dict[str, str]] = {
        "embed": "token_embd",
        "embed_norm": "token_embd_norm",
        "position": "position_embd",
        "norm": "output_norm",
        "head": "output",
    }
    """Tensors that no layer has."""

    def refuse(self, ours: Tree) -> None:
        """Raises ConfigError naming an option that the architecture does not have."""
        if wrong := unlike(ours, self.fixed, self.square):
            raise self.lacks(wrong)

    def lacks(self, what: str) -> ConfigError:
        """Returns the ConfigError for something that the architecture does not have."""
        return ConfigError(f"format=gguf: llama.cpp's {self.name} has no {what}. Train with that, or export with format=hf.")

    def keys(self, cfg: ModelConfig, ours: Tree) -> Tree:
        """Returns the model's keys of the metadata, without their prefix, which is `name`."""
        found: Tree = {
            "context_length": ours["max_seq_len"],
            "embedding_length": ours["d_model"],
            "block_count": ours["n_layers"],
            "vocab_size": ours["vocab_size"],
            "attention.head_count": ours["attention.n_heads"],
            **{f"attention.{kind}_epsilon": ours["norm.eps"] for kind in ("layer_norm", "layer_norm_rms")},
            **self.attention(ours),
            **self.ffn(ours),
        }
        return found | (self.rotation(cfg, ours) if ours["position.kind"] == "rope" else {})

    def attention(self, ours: Tree) -> Tree:
        """Returns the keys of the attention heads."""
        head_dim = ours["attention.head_dim"]
        return {
            "attention.head_count_kv": ours["attention.n_kv_heads"],
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
        }

    def ffn(self, ours: Tree) -> Tree:
        """Returns the keys of the feed-forward."""
        if ours["ffn.kind"] == "mlp":
            return {"feed_forward_length": ours["ffn.hidden"]}
        return {
            "feed_forward_length": ours.get("ffn.dense.hidden") or ours["ffn.expert.hidden"],
            "expert_feed_forward_length": ours["ffn.expert.hidden"],
            "expert_count": ours["ffn.n_experts"],
            "expert_used_count": ours["ffn.top_k"],
            "expert_gating_func": ROUTING[ours["ffn.router.kind"]],
        }

    def rotation(self, cfg: ModelConfig, ours: Tree) -> Tree:
        """Returns the keys of rotary positions. Raises ConfigError for a scaling that llama.cpp computes otherwise."""
        assert isinstance(cfg.position, RopeConfig)
        found: Tree = {"rope.dimension_count": rotated(ours), "rope.freq_base": cfg.position.theta}
        scaling = cfg.position.scaling
        if scaling is None:
            return found
        return found | self.scaling(scaling, ours)

    def scaling(self, scaling: ScalingConfig, ours: Tree) -> Tree:
        """Returns the keys of rotary scaling, here of linear and YaRN, which llama.cpp computes itself."""
        found: Tree = {"rope.scaling.type": scaling.kind, "rope.scaling.factor": ours["position.scaling.factor"]}
        if not isinstance(scaling, YarnScaling):
            return found
        plain = scaling.replace(attention_factor=None, mscale=None, mscale_all_dim=None)
        if not scaling.truncate or not alike(scaling.amplitude(0), plain.amplitude(0)):
            raise self.lacks("YaRN with another amplitude than 0.1 ln(factor) + 1, or with position.scaling.truncate=false")
        return found | {
            "rope.scaling.original_context_length": scaling.original_len,
            "rope.scaling.yarn_beta_fast": scaling.beta_fast,
            "rope.scaling.yarn_beta_slow": scaling.beta_slow,
        }

    def tensors(self, cfg: ModelConfig, ours: Tree, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor under its name there."""
        for name, tensor in weights.items():
            if not name.startswith("blocks."):
                module, _, kind = name.rpartition(".")
                yield f"{self.around[module]}.{kind}", self.changed(module, tensor, ours)
        if self.own_head and "head.weight" not in weights:
            yield "output.weight", weights["embed.weight"]
        layers: dict[int, dict[str, Tensor]] = {number: {} for number in range(ours["n_layers"])}
        for name, tensor in weights.items():
            if name.startswith("blocks."):
                _, layer, rest = name.split(".", 2)
                layers[int(layer)][rest] = tensor
        for number, of_layer in layers.items():
            yield from ((f"blk.{number}.{name}", tensor) for name, tensor in self.layer(of_layer, ours))

    def layer(self, weights: Mapping[str, Tensor], ours: Tree) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of one layer under their names there."""
        joined = {part: (name, parts) for name, parts in self.fused.items() for part in parts}
        for name, tensor in weights.items():
            module, _, kind = name.rpartition(".")
            if module not in joined:
                theirs = self.names.get(name) or f"{self.names[module]}.{kind}"
                yield theirs, self.changed(module, tensor, ours)
            elif module == joined[module][1][0]:
                whole, parts = joined[module]
                yield f"{whole}.{kind}", torch.cat([self.changed(part, weights[f"{part}.{kind}"], ours) for part in parts])

    def changed(self, module: str, tensor: Tensor, ours: Tree) -> Tensor:
        """Returns a tensor of this module as llama.cpp stores it."""
        if ours["position.kind"] == "rope" and module in ("attention.q", "attention.k") and not self.halves:
            return neighbours(tensor, ours["attention.n_heads" if module.endswith("q") else "attention.n_kv_heads"])
        return tensor


def rotated(ours: Tree) -> int:
    """Returns how many dimensions of a head rotate."""
    return int(ours["attention.head_dim"] * ours["position.fraction"])


def neighbours(tensor: Tensor, n_heads: int) -> Tensor:
    """Returns the rows of each head reordered, so that rows half a head apart become neighbours; (h*c, ...)."""
    return tensor.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def divisors(cfg: ModelConfig, ours: Tree) -> Tensor | None:
    """Returns the number that the frequency of each rotated pair is divided by, (r/2,); None without a scaling."""
    position = cfg.position
    assert isinstance(position, RopeConfig)
    if position.scaling is None:
        return None
    plain = frequencies(rotated(ours), position.theta)
    return plain / position.scaling.frequencies(rotated(ours), position.theta, ours["max_seq_len"])
