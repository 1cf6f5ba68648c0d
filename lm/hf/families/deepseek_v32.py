"""DeepSeek-V3.2.  arXiv:2512.02556."""

from collections.abc import Iterator
from typing import ClassVar

from lm.errors import ConfigError
from lm.hf.families.deepseek_v3 import DeepSeekV3
from lm.hf.io.family import Pair, same, without
from lm.hf.io.transforms import Neighbours, Transform
from lm.hf.options.pattern import read_first_dense, write_first_dense
from lm.schema import Tree

_INDEXED = "indexed_attention"


class DeepSeekV32(DeepSeekV3):
    """DeepSeek-V3 whose attention sees what an indexer chooses. Its heads rotate halves, those of the large attention neighbours."""

    name = "deepseek_v32"
    architecture = "DeepseekV32ForCausalLM"
    usual_first_dense: ClassVar[int] = 3
    fields = {
        **without(DeepSeekV3.fields, "ffn.first_dense", "position.interleaved"),
        "attention.indexer.n_heads": ("index_n_heads", 64),
        "attention.indexer.head_dim": ("index_head_dim", 128),
        "attention.indexer.top_k": ("index_topk", 2048),
    }
    renamed = {**DeepSeekV3.renamed, "num_local_experts": "n_routed_experts"}
    further = (*DeepSeekV3.further, "mlp_layer_types", "first_k_dense_replace", "layer_types")
    idle = ("mlp_bias",)
    fixed = {**DeepSeekV3.fixed, "position.interleaved": True}

    def read(self, hf: Tree) -> Tree:
        if hf.get("q_lora_rank", self.fields["attention.q_rank"][1]) is None:
            raise ConfigError(
                "config.json: q_lora_rank is null, and transformers' class makes all queries of a latent. Import another model."
            )
        types = hf.get("layer_types") or []
        if other := [kind for kind in types if kind != _INDEXED]:
            raise ConfigError(f"config.json: layer_types names {other[0]!r}, and all layers here are {_INDEXED!r}. Import another model.")
        first = read_first_dense(hf, min(hf.get("first_k_dense_replace", self.usual_first_dense), hf["num_hidden_layers"]))
        return {**super().read({**hf, "first_k_dense_replace": first}), "ffn.first_dense": first, **self.indexers(hf)}

    def indexers(self, hf: Tree) -> Tree:
        """Returns which layers have an indexer."""
        return {"attention.indexer.every": 1, "attention.indexer.first": 1}

    def write(self, ours: Tree) -> Tree:
        first, types = ours["ffn.first_dense"], [_INDEXED] * ours["n_layers"]
        said = {"mlp_layer_types": write_first_dense(ours), "first_k_dense_replace": first, "layer_types": types}
        return {**super().write(ours), **said}

    def block(self, here: str, there: str, ours: Tree) -> Iterator[Pair]:
        yield from super().block(here, there, ours)
        mine, theirs = f"{here}.attention.indexer", f"{there}.self_attn.indexer"
        turned = self.turned(ours)
        yield Pair((f"{mine}.q.weight",), (f"{theirs}.wq_b.weight",), turned)
        yield Pair((f"{mine}.k.weight",), (f"{theirs}.wk.weight",), turned)
        for name in ("weight", "bias"):
            yield Pair((f"{mine}.k_norm.{name}",), (f"{theirs}.k_norm.{name}",), turned)
        yield same(f"{mine}.weights.weight", f"{theirs}.weights_proj.weight")

    def turned(self, ours: Tree) -> Transform:
        """Returns how the rows of an indexer's heads are in another order there."""
        return Neighbours(ours["attention.indexer.head_dim"], ours["attention.rope_dim"])


FAMILY = DeepSeekV32()
