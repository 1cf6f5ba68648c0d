"""Jina Embeddings v3, without its adapters.  Sturua et al. 2024, arXiv:2409.10173."""

from lm.hf.families.bert import Bert
from lm.hf.families.nomic_bert import NomicBert
from lm.hf.families.roberta import Roberta
from lm.schema import Tree


class JinaEmbeddingsV3(NomicBert):
    """XLM-RoBERTa with rotary positions instead of learned ones."""

    name = "jina_embeddings_v3"
    architecture = "JinaEmbeddingsV3ForMaskedLM"
    root = "roberta."
    theta = 20000.0
    attention = "mixer"
    matrices = {"up": "fc1", "down": "fc2"}
    before = {"head.dense": "lm_head.dense", "head.norm": "lm_head.layer_norm"}
    logits = "lm_head"
    ignored = Roberta.ignored
    renamed = {}
    fields = {**Bert.fields, "max_seq_len": ("max_position_embeddings", 8194), "norm.eps": ("layer_norm_eps", 1e-5)}
    respelled = ()
    fixed = {**Bert.fixed, "position.kind": "rope"}
    fixed_there = {}

    def read(self, hf: Tree) -> Tree:
        segments = {"type_vocab_size": hf.get("type_vocab_size", 1)}
        return super().read(hf | segments) | {"head.transform": "gelu"}  # before the head whatever is within


FAMILY = JinaEmbeddingsV3()
