"""Who takes turns in `tools/bench.py`: our models, and the same shapes by others, each with its loss."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.losses.tokens import causal_reader
from lm.nn.batch import Batch
from lm.nn.transformer import DecoderConfig, build_model
from lm.schema import Tree, from_tree

VOCAB, D, LAYERS, HEADS, HIDDEN, ROWS, LENGTH = 8192, 384, 6, 6, 1024, 8, 256

LossOf = Callable[[Tensor, Tensor], Tensor]
Contestant = tuple[nn.Module, LossOf]


def plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def contestant(tree: Tree) -> Contestant:
    """One of our models, with our loss."""
    model = build_model(from_tree(DecoderConfig, tree), seed=0)

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        total: Tensor = model(Batch(ids), loss=causal_reader(labels)).total
        return total / labels.numel()

    return model, loss


def ours() -> Contestant:
    tree = {
        "vocab_size": VOCAB, "max_seq_len": LENGTH, "d_model": D, "n_layers": LAYERS, "norm": {"kind": "rms"},
        "position": {"kind": "rope"}, "attention": {"kind": "gqa", "n_heads": HEADS}, "ffn": {"kind": "mlp", "hidden": HIDDEN},
    }  # fmt: skip
    return contestant(tree)


def litgpt() -> Contestant:
    from litgpt import GPT, Config

    model = GPT(
        Config(
            block_size=LENGTH, padded_vocab_size=VOCAB, vocab_size=VOCAB, n_layer=LAYERS, n_head=HEADS, n_embd=D, rotary_percentage=1.0,
            parallel_residual=False, bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", intermediate_size=HIDDEN,
        )
    )  # fmt: skip
    model.lm_head.weight = model.transformer.wte.weight
    return model, lambda ids, labels: plain_loss(model(ids), labels)


def transformers() -> Contestant:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=D, intermediate_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        max_position_embeddings=LENGTH, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    return model, lambda ids, labels: plain_loss(model(ids).logits, labels)


def x_transformers() -> Contestant:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=D, depth=LAYERS, heads=HEADS, attn_dim_head=D // HEADS, rotary_pos_emb=True, rotary_emb_dim=D // HEADS, ff_glu=True,
        ff_swish=True, ff_no_bias=True, ff_mult=HIDDEN / D, use_rmsnorm=True, attn_flash=True,
    )  # fmt: skip
    model = TransformerWrapper(num_tokens=VOCAB, max_seq_len=LENGTH, use_abs_pos_emb=False, tie_embedding=True, attn_layers=layers)
    return model, lambda ids, labels: plain_loss(model(ids), labels)


LLAMA: dict[str, Callable[[], Contestant]] = {
    "slotlm": ours,
    "litgpt": litgpt,
    "transformers": transformers,
    "x-transformers": x_transformers,
}


def our_gpt2() -> Contestant:
    mlp = {"kind": "mlp", "hidden": 4 * D, "gated": False, "activation": "gelu_tanh", "bias": True}
    tree = {
        "vocab_size": VOCAB, "max_seq_len": LENGTH, "d_model": D, "n_layers": LAYERS, "norm": {"kind": "layer"},
        "position": {"kind": "learned"}, "attention": {"kind": "gqa", "n_heads": HEADS, "qkv_bias": True, "out_bias": True}, "ffn": mlp,
    }  # fmt: skip
    return contestant(tree)


def transformers_gpt2() -> Contestant:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=D, n_layer=LAYERS, n_head=HEADS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    return model, lambda ids, labels: plain_loss(model(ids).logits, labels)


class PlainBlock(nn.Module):
    """GPT-2's block out of torch's own parts, queries, keys and values from one product."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(approximate="tanh"), nn.Linear(4 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # (b, s, 3hc) -> 3 (b, h, s, c)
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(read.transpose(1, 2).flatten(2))  # (b, h, s, c) -> (b, s, hc)
        return x + self.mlp(self.before_mlp(x))


class PlainGPT2(nn.Module):
    """As little as trains: what a file of 300 lines would be."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, D), nn.Embedding(LENGTH, D)
        self.blocks, self.norm = nn.Sequential(*(PlainBlock() for _ in range(LAYERS))), nn.LayerNorm(D)
        for table in (self.embed, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        return F.linear(self.norm(self.blocks(x)), self.embed.weight)


def plain_gpt2() -> Contestant:
    model = PlainGPT2()
    return model, lambda ids, labels: plain_loss(model(ids), labels)


GPT2: dict[str, Callable[[], Contestant]] = {"slotlm": our_gpt2, "transformers": transformers_gpt2, "plain torch": plain_gpt2}


def mixture(n_experts: int) -> Contestant:
    """d 256, 4 layers: a feed-forward of 1,024, or experts of 512 of which a token passes two."""
    expert = {"hidden": 512}
    moe = {"kind": "moe", "n_experts": n_experts, "top_k": 2, "expert": expert, "balance_loss": 0.01}
    tree = {
        "vocab_size": VOCAB, "max_seq_len": LENGTH, "d_model": 256, "n_layers": 4, "norm": {"kind": "rms"}, "position": {"kind": "rope"},
        "attention": {"kind": "gqa", "n_heads": 4}, "ffn": moe if n_experts else {"kind": "mlp", "hidden": 1024},
    }  # fmt: skip
    return contestant(tree)
