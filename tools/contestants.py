"""Who takes turns in `tools/bench.py`: our models, and the same shapes by others, each with its loss."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.losses.tokens import causal_reader
from lm.nn.batch import Batch
from lm.nn.transformer import DecoderConfig, build_model
from lm.schema import Tree, from_tree

EXPERTS, TOP_K = 8, 2


@dataclass(frozen=True)
class Size:
    """Widths of a model and its batch; `hidden` is that of a gated feed-forward, and of the two experts of a token together."""

    d: int
    layers: int
    heads: int
    hidden: int
    vocab: int = 8192
    rows: int = 8
    length: int = 256
    chunk: int = 1024  # tokens whose logits exist at once, in our loss


SIZES = {
    "14m": Size(384, 6, 6, 1024),
    "50m": Size(640, 9, 10, 1728),
    "124m": Size(768, 12, 12, 2048, vocab=50304, rows=16, length=1024, chunk=8192),
    "1b": Size(2048, 16, 16, 5632, vocab=50304, rows=4, length=2048, chunk=8192),
}
"""By the parameters of the Llama. The last two are for a GPU."""

LossOf = Callable[[Tensor, Tensor], Tensor]
Contestant = tuple[nn.Module, LossOf]
Maker = Callable[[Size], Contestant]


def plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def contestant(size: Size, tree: Tree) -> Contestant:
    """One of our models, with our loss."""
    sizes = {"vocab_size": size.vocab, "max_seq_len": size.length, "d_model": size.d, "n_layers": size.layers}
    model = build_model(from_tree(DecoderConfig, sizes | tree), seed=0)

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        total: Tensor = model(Batch(ids), read=causal_reader(labels, chunk=size.chunk)).total
        return total / labels.numel()

    return model, loss


def our_llama(size: Size, ffn: Tree | None = None) -> Contestant:
    parts = {"norm": {"kind": "rms"}, "position": {"kind": "rope"}, "attention": {"kind": "gqa", "n_heads": size.heads}}
    return contestant(size, parts | {"ffn": ffn or {"kind": "mlp", "hidden": size.hidden}})


def our_mixtral(size: Size) -> Contestant:
    return our_llama(size, {"kind": "moe", "n_experts": EXPERTS, "top_k": TOP_K, "expert": {"hidden": size.hidden // TOP_K}})


def litgpt(size: Size, experts: bool = False) -> Contestant:
    from litgpt import GPT, Config

    mixture = {"moe_intermediate_size": size.hidden // TOP_K, "n_expert": EXPERTS, "n_expert_per_token": TOP_K}
    ffn = {"mlp_class_name": "LLaMAMoE"} | mixture if experts else {"mlp_class_name": "LLaMAMLP", "intermediate_size": size.hidden}
    model = GPT(
        Config(
            block_size=size.length, padded_vocab_size=size.vocab, vocab_size=size.vocab, n_layer=size.layers, n_head=size.heads,
            n_embd=size.d, rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm", **ffn,
        )
    )  # fmt: skip
    model.lm_head.weight = model.transformer.wte.weight
    return model, lambda ids, labels: plain_loss(model(ids), labels)


def transformers_llama(size: Size) -> Contestant:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocab, hidden_size=size.d, intermediate_size=size.hidden, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, max_position_embeddings=size.length, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    return model, lambda ids, labels: plain_loss(model(ids).logits, labels)


def transformers_mixtral(size: Size) -> Contestant:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=size.vocab, hidden_size=size.d, intermediate_size=size.hidden // TOP_K, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.heads, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K,
        max_position_embeddings=size.length, sliding_window=None, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    return model, lambda ids, labels: plain_loss(model(ids).logits, labels)


def x_transformers(size: Size) -> Contestant:
    from x_transformers import Decoder, TransformerWrapper

    head = size.d // size.heads
    layers = Decoder(
        dim=size.d, depth=size.layers, heads=size.heads, attn_dim_head=head, rotary_pos_emb=True, rotary_emb_dim=head, ff_glu=True,
        ff_swish=True, ff_no_bias=True, ff_mult=size.hidden / size.d, use_rmsnorm=True, attn_flash=True,
    )  # fmt: skip
    model = TransformerWrapper(
        num_tokens=size.vocab, max_seq_len=size.length, use_abs_pos_emb=False, tie_embedding=True, attn_layers=layers
    )
    return model, lambda ids, labels: plain_loss(model(ids), labels)


def our_gpt2(size: Size) -> Contestant:
    attention = {"kind": "gqa", "n_heads": size.heads, "qkv_bias": True, "out_bias": True}
    mlp = {"kind": "mlp", "hidden": 4 * size.d, "gated": False, "activation": "gelu_tanh", "bias": True}
    return contestant(size, {"norm": {"kind": "layer"}, "position": {"kind": "learned"}, "attention": attention, "ffn": mlp})


def transformers_gpt2(size: Size) -> Contestant:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size.vocab, n_positions=size.length, n_embd=size.d, n_layer=size.layers, n_head=size.heads, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    return model, lambda ids, labels: plain_loss(model(ids).logits, labels)


class PlainBlock(nn.Module):
    """GPT-2's block out of torch's own parts, queries, keys and values from one product."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(approximate="tanh"), nn.Linear(4 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # (b, s, 3, h, c) -> 3 (b, h, s, c)
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(read.transpose(1, 2).flatten(2))  # (b, h, s, c) -> (b, s, hc)
        return x + self.mlp(self.before_mlp(x))


class PlainGPT2(nn.Module):
    """As little as trains: what a file of 300 lines would be."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(size.vocab, size.d), nn.Embedding(size.length, size.d)
        self.blocks = nn.Sequential(*(PlainBlock(size.d, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.d)
        for table in (self.embed, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        return F.linear(self.norm(self.blocks(x)), self.embed.weight)


def plain_gpt2(size: Size) -> Contestant:
    model = PlainGPT2(size)
    return model, lambda ids, labels: plain_loss(model(ids), labels)


SHAPES: dict[str, dict[str, Maker]] = {
    "llama": {"slotlm": our_llama, "litgpt": litgpt, "transformers": transformers_llama, "x-transformers": x_transformers},
    "gpt2": {"slotlm": our_gpt2, "transformers": transformers_gpt2, "plain torch": plain_gpt2},
    "mixtral": {
        "slotlm": our_mixtral,
        "litgpt": lambda size: litgpt(size, experts=True),
        "transformers": transformers_mixtral,
        "our dense": our_llama,
    },
}
"""By shape, those who train it. "our dense" is the Llama that has as many parameters as a token of the mixture passes."""
