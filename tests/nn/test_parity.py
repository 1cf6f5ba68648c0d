"""The dense decoder against transformers' Llama, Qwen3 and GPT-2, every tensor redrawn, weights copied by name."""

import pytest
import torch

from lm.nn.batch import Batch
from lm.nn.transformer import DecoderConfig, DecoderLM, build_model
from lm.testing.models import redraw
from tests.nn.models import CLOSE, config

pytestmark = pytest.mark.usefixtures("doubles")

transformers = pytest.importorskip("transformers")


def load(model: DecoderLM, weights: dict[str, torch.Tensor]) -> DecoderLM:
    model.load_state_dict(weights, strict=True)
    return model.eval()


def llama_names(layers: int, bias: bool, qk_norm: bool = False) -> dict[str, str]:
    """Our names and those of transformers' Llama family."""
    names = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}
    suffixes = ["weight", "bias"] if bias else ["weight"]
    for i in range(layers):
        ours, them = f"blocks.{i}", f"model.layers.{i}"
        names[f"{ours}.attention_residual.norm.weight"] = f"{them}.input_layernorm.weight"
        names[f"{ours}.ffn_residual.norm.weight"] = f"{them}.post_attention_layernorm.weight"
        for s in suffixes:
            names |= {f"{ours}.attention.{p}.{s}": f"{them}.self_attn.{p}_proj.{s}" for p in "qkvo"}
            names |= {f"{ours}.ffn.{p}.{s}": f"{them}.mlp.{p}_proj.{s}" for p in ("gate", "up", "down")}
        if qk_norm:
            names |= {f"{ours}.attention.{p}_norm.weight": f"{them}.self_attn.{p}_norm.weight" for p in "qk"}
    return names


def require_same_logits(theirs: torch.nn.Module, names: dict[str, str], cfg: DecoderConfig) -> None:
    redraw(theirs)
    t = theirs.state_dict()
    ours = load(build_model(cfg, seed=0), {ours: t[them] for ours, them in names.items()})
    ids = torch.randint(0, 61, (3, 50), generator=torch.Generator().manual_seed(0))
    expected = theirs(ids).logits
    assert expected.std() >= 1
    torch.testing.assert_close(ours(Batch(ids)), expected, **CLOSE)


@pytest.mark.parametrize(("n_kv_heads", "bias", "tied"), [(3, False, False), (1, True, True), (6, False, True)])
@torch.no_grad()
def test_llama_gives_the_same_logits(n_kv_heads: int, bias: bool, tied: bool) -> None:
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=61, hidden_size=48, intermediate_size=72, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=n_kv_heads,
            head_dim=10, max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 500.0}, attention_bias=bias,
            mlp_bias=bias, tie_word_embeddings=tied, rms_norm_eps=1e-5,
        )
    ).eval()  # fmt: skip
    cfg = config(
        d_model=48, max_seq_len=64, norm={"kind": "rms", "eps": 1e-5}, position={"kind": "rope", "theta": 500.0}, head={"tied": tied},
        attention={"n_heads": 6, "n_kv_heads": n_kv_heads, "head_dim": 10, "qkv_bias": bias, "out_bias": bias},
        ffn={"hidden": 72, "bias": bias},
    )  # fmt: skip
    require_same_logits(theirs, llama_names(3, bias), cfg)


@torch.no_grad()
def test_qwen3_with_its_query_and_key_norms_gives_the_same_logits() -> None:
    theirs = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=61, hidden_size=48, intermediate_size=72, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
            head_dim=10, max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 500.0}, rms_norm_eps=1e-5,
            tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    cfg = config(
        d_model=48, max_seq_len=64, norm={"kind": "rms", "eps": 1e-5}, position={"kind": "rope", "theta": 500.0}, head={"tied": False},
        attention={"n_heads": 6, "n_kv_heads": 2, "head_dim": 10, "qk_norm": "head"}, ffn={"hidden": 72},
    )  # fmt: skip
    require_same_logits(theirs, llama_names(3, bias=False, qk_norm=True), cfg)


@torch.no_grad()
def test_gpt2_gives_the_same_logits() -> None:
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=61, n_positions=64, n_embd=48, n_layer=3, n_head=4)).eval()
    redraw(theirs)
    t = {name.removeprefix("transformer."): tensor for name, tensor in theirs.state_dict().items()}
    ours = {"embed.weight": t["wte.weight"], "position.weight": t["wpe.weight"], "head.weight": t["wte.weight"]}
    ours |= {"norm.weight": t["ln_f.weight"], "norm.bias": t["ln_f.bias"]}
    for i in range(3):
        for s in ("weight", "bias"):
            ours[f"blocks.{i}.attention_residual.norm.{s}"] = t[f"h.{i}.ln_1.{s}"]
            ours[f"blocks.{i}.ffn_residual.norm.{s}"] = t[f"h.{i}.ln_2.{s}"]
            for name, piece in zip("qkv", t[f"h.{i}.attn.c_attn.{s}"].chunk(3, dim=-1), strict=True):
                ours[f"blocks.{i}.attention.{name}.{s}"] = piece.t()
            for name, them in (("attention.o", "attn.c_proj"), ("ffn.up", "mlp.c_fc"), ("ffn.down", "mlp.c_proj")):
                ours[f"blocks.{i}.{name}.{s}"] = t[f"h.{i}.{them}.{s}"].t()
    cfg = config(
        d_model=48, max_seq_len=64, norm={"kind": "layer"}, position={"kind": "learned"},
        attention={"n_heads": 4, "qkv_bias": True, "out_bias": True},
        ffn={"activation": "gelu_tanh", "gated": False, "bias": True},
    )  # fmt: skip
    model = load(build_model(cfg, seed=0), ours)
    ids = torch.randint(0, 61, (3, 50), generator=torch.Generator().manual_seed(0))
    expected = theirs(ids).logits
    assert expected.std() >= 1
    torch.testing.assert_close(model(Batch(ids)), expected, **CLOSE)
