"""`lm export format=gguf`: the file read back, and what is refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Tokenizers

from lm.data.kinds import UnigramConfig
from lm.data.tokenizer.splits import SPLITS
from lm.data.tokenizer.tokenizer import Specials, Tokenizer
from lm.errors import ConfigError
from lm.hf.gguf.vocabulary import unnamed_ends, vocabulary
from lm.hf.gguf.writing import ARCHITECTURES, architecture_for
from lm.hf.io.export import export
from lm.hf.io.handing_on import uses_of_gguf
from lm.nn.model_config import model_config
from lm.nn.transformer import LM
from lm.schema import Tree, from_tree
from lm.storage.model_folder import save_model
from tests.conftest import Lm
from tests.hf.gguf_models import FAMILIES, HEADS, LAYER, MLP, MODELS, ROPE, SIZES, built, trained, written

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return trained("qwen2")


@pytest.mark.parametrize("name", MODELS)
def test_a_file_has_the_names_of_its_architecture_and_all_numbers_of_the_model(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = built(name)
    reader = gguf.GGUFReader(written(tmp_path, model, tokenizer, family=FAMILIES.get(name)))
    said = {key: field.contents() for key, field in reader.fields.items()}
    arch = name.split(" ")[0].rstrip(",")
    assert said["general.architecture"] == arch
    numbers = ("context_length", "embedding_length", "block_count", "vocab_size", "attention.head_count")
    assert [said[f"{arch}.{key}"] for key in numbers] == [128, 64, 3, 352, 4]
    kind = next(kind for kind, theirs in gguf.MODEL_ARCH_NAMES.items() if theirs == arch)
    known = {gguf.TENSOR_NAMES[tensor].format(bid=layer) for tensor in gguf.MODEL_TENSORS[kind] for layer in range(3)}
    found = {tensor.name: torch.tensor(np.array(tensor.data)) for tensor in reader.tensors}
    assert {key.rpartition(".")[0] for key in found} <= known
    rope = [tensor for key, tensor in found.items() if key.startswith("rope")]
    added = sum(map(torch.numel, rope)) + (found["output.weight"].numel() if name == "olmo2" else 0)  # its head is the embedding, here too
    assert sum(map(torch.numel, found.values())) - added == sum(p.numel() for p in model.parameters())
    assert torch.equal(found["token_embd.weight"], model.embed.weight)
    last = dict(model.blocks[2].ffn.named_parameters())
    theirs, ours = ("ffn_down_exps", "experts.down") if "experts.down" in last else ("ffn_down", "down.weight")
    assert torch.equal(found[f"blk.2.{theirs}.weight"], last[ours])


@pytest.mark.parametrize(("dtype", "rounded"), [("f16", 2**-11), ("bf16", 2**-8), ("q8_0", 1 / 120)])
def test_matrices_are_rounded_and_the_rest_is_not(dtype: str, rounded: float, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = built("qwen3moe")
    for tensor in gguf.GGUFReader(written(tmp_path, model, tokenizer, dtype)).tensors:
        matrix = len(tensor.shape) > 1 and "gate_inp" not in tensor.name
        assert tensor.tensor_type.name == (dtype.upper() if matrix else "F32")
        if tensor.name == "blk.1.ffn_up.weight" or tensor.name == "output.weight":
            found = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            largest = model.head.weight.abs().max()
            assert 0 < (found - model.head.weight).abs().max() <= rounded * largest


def test_the_vocabulary_says_what_each_token_is(tokenizer: Tokenizer) -> None:
    found = vocabulary(tokenizer, 352)
    kinds = found["tokenizer.ggml.token_type"]
    assert [kinds.count(kind) for kind in (1, 3, 5)] == [337, 3, 12]  # ordinary ones, specials, rows without a token
    assert found["tokenizer.ggml.tokens"][:4] == ["<|bos|>", "<|eos|>", "<|pad|>", "!"]
    assert (found["tokenizer.ggml.pre"], found["tokenizer.ggml.add_bos_token"], found["tokenizer.ggml.eos_token_id"]) == ("qwen2", True, 1)
    assert len(found["tokenizer.ggml.merges"]) == 340 - 259


@pytest.mark.parametrize(
    ("further", "said", "left_out"), [([2], [0, 2, None], []), ([2, 3], [0, 2, 3], []), ([5, 4, 3, 2], [0, 2, 3], ["d", "e"])]
)
def test_every_token_that_ends_a_text_is_named_as_far_as_there_are_names(
    further: list[int], said: list[int | None], left_out: list[str]
) -> None:
    """Llama 3.1 and gpt-oss have three. Seen to fail: more than two ended in a traceback."""
    raw = Tokenizers(models.BPE(vocab={}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.add_special_tokens(["</s>", "a", "b", "c", "d", "e", "<|end|>"])
    made = Tokenizer(raw, Specials(None, "</s>", None))
    made.further_ends = further
    found = vocabulary(made, 8)
    assert [found.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")] == said
    assert unnamed_ends(made) == left_out
    made.chat_template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    assert vocabulary(made, 8)["tokenizer.ggml.eot_token_id"] == 6  # llama.cpp ends a turn by it


def saved(folder: Path, model: LM, tokenizer: Tokenizer) -> Path:
    save_model(folder, model.cfg.tree(), dict(model.named_parameters()), tokenizer.save, {})
    return folder


def test_the_command_writes_a_folder_with_the_file(lm: Lm, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = built("qwen3")
    folder = saved(tmp_path / "m", model, tokenizer)
    code, out, err = lm("export", f"from={folder}", "format=gguf", "dtype=q8_0", f"out={tmp_path / 'out'}")
    assert code == 0, err
    assert f"{tmp_path / 'out'}: qwen3, " in out
    assert f"llama.cpp: llama-completion -m {tmp_path / 'out'}/model.gguf -no-cnv -p TEXT\n" in out
    assert uses_of_gguf("m", Path("out"), chats=True)[0].command == "llama-cli -m out/model.gguf"
    assert f"Ollama: cd {tmp_path / 'out'} && ollama create NAME && ollama run NAME\n" in out
    assert (tmp_path / "out" / "model.gguf").read_bytes() == written(tmp_path, model, tokenizer, "q8_0").read_bytes()


DRAWS: Tree = {"do_sample": True, "temperature": 1, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.5, "num_beams": 1}
GREEDY = DRAWS | {"do_sample": False}
PENALTY = {"penalty_repeat": 1.5, "penalty_last_n": -1}


@pytest.mark.parametrize(("sampling", "said"), [(DRAWS, {"temp": 1, "top_k": 20, "min_p": 0.1, **PENALTY}), (GREEDY, PENALTY), ({}, {})])
def test_the_file_says_what_it_is_and_how_the_imported_model_draws(
    sampling: Tree, said: Tree, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The names that model browsers show, and llama.cpp's defaults. Seen to fail: none of them was there."""
    for name, label in (("qwen3", r"\d+K"), ("qwen3moe", r"\dx\d+K")):
        model = built(name)
        save_model(tmp_path / name, model.cfg.tree(), dict(model.named_parameters()), tokenizer.save, {"run": "mine", "sampling": sampling})
        export(tmp_path / name, tmp_path / f"{name} out", format="gguf")
        fields = gguf.GGUFReader(tmp_path / f"{name} out" / "model.gguf").fields
        found = {key.removeprefix("general."): field.contents() for key, field in fields.items() if key.startswith("general.")}
        assert (found["type"], found["name"]) == ("model", "mine") and re.fullmatch(label, found["size_label"])
        assert {k.removeprefix("sampling."): v for k, v in found.items() if k.startswith("sampling.")} == pytest.approx(said)


NARROW: dict[str, Any] = {"norm": {"kind": "rms", "place": "output"}, "attention": HEADS | {"qk_norm": "full", "head_dim": 8}}
REFUSED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "pairs that do not turn": (
        {"position": ROPE | {"scaling": {"kind": "proportional", "partial_rotary_factor": 0.5}}},
        [],
        ["llama.cpp's llama has no model.position.scaling.kind=proportional"],
    ),
    "a window": ({"attention": HEADS | {"window": 8, "qk_norm": "head"}}, [], ["qwen3", "model.attention.window=8", "null"]),
    "a type of the other format": ({}, ["dtype=fp16"], ["dtype=fp16", "format=gguf has keep, f32, f16, bf16, q8_0"]),
    "rows for no block": ({"ffn": MLP | {"hidden": 40}}, ["dtype=q8_0"], ["rows of 40", "blk.0.ffn_down.weight", "multiple of 32"]),
    "no architecture": ({"norm": LAYER, "position": {"kind": "t5_relative"}}, [], ["format=gguf: no family", "position.kind"]),
    "an activation": ({"ffn": MLP | {"activation": "gelu"}}, [], ["llama", "model.ffn.activation=gelu", "silu"]),
    "narrow heads": (NARROW, [], ["olmo2", "32", "model.d_model=64"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_form_there_is_refused_by_name(case: str, lm: Lm, tokenizer: Tokenizer, tmp_path: Path) -> None:
    changes, args, parts = REFUSED[case]
    folder = saved(tmp_path / "m", built(changes), tokenizer)
    code, _, err = lm("export", f"from={folder}", "format=gguf", f"out={tmp_path / 'out'}", *args)
    assert code == 2
    assert all(part in err.splitlines()[-1] for part in parts), err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("imported", "said"), [("stablelm", "lm writes no stablelm for llama.cpp."), (None, "Train with that.")])
def test_a_family_that_is_not_written_for_llama_cpp_is_sent_by_way_of_transformers(imported: str | None, said: str) -> None:
    """Whoever has imported the model need not train another one."""
    with pytest.raises(ConfigError) as caught:
        architecture_for(built({"norm": LAYER, "position": ROPE | {"fraction": 0.25}}).cfg, imported=imported)
    instead = " format=hf writes it as stablelm, and llama.cpp's convert_hf_to_gguf.py makes a file of that where llama.cpp knows stablelm."
    assert str(caught.value).startswith("format=gguf: ") and str(caught.value).endswith(said + instead)


@pytest.mark.parametrize(("layers", "width"), [(46, 16), (3, 32)])
def test_gemma_2_of_46_layers_has_another_scale_there(layers: int, width: int) -> None:
    """llama.cpp takes 1/sqrt(d_model / n_heads) for it, and 1/sqrt(head_dim) for the others."""
    gemma = MODELS["gemma2"]
    for scale in (16**-0.5, 32**-0.5):
        cfg = model_config(
            SIZES | {"vocab_size": 352} | gemma | {"n_layers": layers, "attention": gemma["attention"] | {"head_dim": 32, "scale": scale}}
        )
        if scale == width**-0.5:
            assert architecture_for(cfg).name == "gemma2"
            continue
        rule = "d_model / n_heads\\), since there are 46 layers" if layers == 46 else "head_dim"
        with pytest.raises(ConfigError, match=rf"gemma2 has no model.attention.scale={scale:.4g}, and there it must be .*, 1/sqrt\({rule}"):
            architecture_for(cfg)


def test_a_weight_that_half_precision_cannot_hold_is_refused(lm: Lm, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = built("llama")
    model.head.weight.data[3, 3] = 1e6
    folder = saved(tmp_path / "m", model, tokenizer)
    code, _, err = lm("export", f"from={folder}", "format=gguf", "dtype=f16", f"out={tmp_path / 'out'}")
    assert (code, (tmp_path / "out").exists()) == (4, False)
    assert "output.weight holds NaN or infinity" in err
    assert "dtype=bf16 or f32" in err


def imported(cuts: Any, eos: str | None = "<|eos|>", **model: Any) -> Tokenizer:
    raw = Tokenizers(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")], **model))
    raw.pre_tokenizer = cuts
    raw.add_special_tokens(["<|eos|>"])
    return Tokenizer(raw, Specials(None, eos, None))


GPT2, WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA3 = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLITS["llama3"]), "isolated"), WORDS])


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (imported(GPT2), "gpt-2"),
        (imported(LLAMA3), "dbrx"),
        (imported(LLAMA3, ignore_merges=True), "llama-bpe"),
        (trained("bytes"), "gpt-2"),
    ],
    ids=["GPT-2's", "Llama 3's with merges alone", "Llama 3's", "bytes"],
)
def test_an_imported_split_is_known_by_its_expression(made: Tokenizer, name: str) -> None:
    found = vocabulary(made, 352)
    assert found["tokenizer.ggml.pre"] == name
    assert found["tokenizer.ggml.merges"]  # llama.cpp wants one
    assert (found["tokenizer.ggml.bos_token_id"], found["tokenizer.ggml.add_bos_token"]) in [(3, False), (256, True)]


UNKNOWN: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "our own split": (lambda: trained("own"), "by tokenizer.pattern=own, "),
    "unigram": (lambda: from_tree(UnigramConfig, {"vocab_size": 300}).build(["some text, some more"] * 9), "it is Unigram"),
    "digits first": (lambda: imported(pre_tokenizers.Sequence([pre_tokenizers.Digits(), GPT2])), "by Digits and tokenizer.pattern=gpt2"),
    "a space before": (lambda: imported(pre_tokenizers.ByteLevel(add_prefix_space=True)), "a space before each text"),
    "whitespace": (lambda: imported(pre_tokenizers.Whitespace()), "BPE, not over bytes"),
    "no end": (lambda: imported(GPT2, eos=None), "no eos"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_tokenizer_that_llama_cpp_lacks_is_refused_with_the_remedy(case: str) -> None:
    made, part = UNKNOWN[case]
    with pytest.raises(ConfigError) as raised:
        vocabulary(made(), 352)
    assert part in str(raised.value)
    assert "tokenizer.pattern=qwen2" in str(raised.value)


CANNOT: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "narrow heads": ({}, "qwen2", ["no command for vLLM: heads are 16 numbers wide, and it has 32, 64, ", "llama.cpp: lm export from="]),
    "a family that vLLM lacks": (
        {
            "norm": {"kind": "layer"},
            "position": {"kind": "learned"},
            "ffn": MLP | {"activation": "gelu", "gated": False, "bias": True},
            "attention": {"kind": "gqa", "n_heads": 2, "head_dim": 32, "out_bias": True, "scale": 1.0},
        },
        "qwen2",
        ["no command for vLLM: it has no GPTNeoForCausalLM", "no command for llama.cpp: "],
    ),
    "a scaling that was not looked at": (
        {"position": {"kind": "rope", "scaling": {"kind": "proportional", "partial_rotary_factor": 0.5}}},
        "qwen2",
        ["no command for vLLM: whether it has model.position.scaling.kind=proportional was not checked"],
    ),
    "our split": (
        {"attention": HEADS | {"head_dim": 32}},
        "own",
        ["vLLM: vllm serve ", "MLX: mlx_lm.generate --model ", "no command for llama.cpp: tokenizer: it splits "],
    ),
    "an activation": (
        {"ffn": MLP | {"activation": "gelu"}},
        "qwen2",
        [
            "no command for MLX: its LlamaForCausalLM has no model.ffn.act",
            "no command for llama.cpp: llama.cpp's llama has no model.ffn.act",
        ],
    ),
}


@pytest.mark.parametrize("case", CANNOT)
def test_an_export_says_which_programs_take_it_and_why_others_cannot(case: str, lm: Lm, tmp_path: Path) -> None:
    changes, pattern, parts = CANNOT[case]
    folder = saved(tmp_path / "m", built(changes), trained(pattern))
    code, out, err = lm("export", f"from={folder}", "format=hf", "check=false", f"out={tmp_path / 'out'}")
    assert code == 0, err
    assert all(f"\n{part}" in out for part in [*parts, 'transformers: python -c "', "lm-eval: lm_eval --model hf "]), out


def test_every_architecture_is_tried() -> None:
    assert {one.name for one in ARCHITECTURES} == {name.split(" ")[0].rstrip(",") for name in MODELS}
