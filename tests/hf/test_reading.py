"""What of a Hugging Face folder is read, what is refused, and what is told."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

from lm.errors import CheckpointError, ConfigError, NumericsError  # noqa: E402
from lm.hf.io.family import families  # noqa: E402
from lm.hf.io.hub import local_folder  # noqa: E402
from lm.hf.io.reading import read_hf  # noqa: E402
from lm.hf.io.unread import WHY, refusal  # noqa: E402
from tests.hf.harness import change  # noqa: E402


def test_missing_and_unknown_tensors_are_named(theirs: Path) -> None:
    weights = load_file(theirs / "model.safetensors")
    weights["model.layers.0.self_attn.extra"] = weights.pop("model.layers.1.self_attn.k_proj.weight").clone()
    save_file(weights, theirs / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        read_hf(theirs)
    assert "1 tensors are missing (model.layers.1.self_attn.k_proj.weight)" in str(error.value)
    said = "1 tensors are not known (model.layers.0.self_attn.extra); the config names another model. Use the config.json that belongs to"
    assert said in str(error.value)


def test_two_names_of_one_option_that_disagree_are_refused(theirs: Path) -> None:
    """Seen to fail: the last one in the file was read, which in transformers depends on the class."""
    model = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=64, hidden_size=32, n_head=4, n_layer=1))
    model.save_pretrained(theirs / "bloom")
    change(theirs / "bloom", num_attention_heads=4)
    assert read_hf(theirs / "bloom").config.attention.n_heads == 4
    change(theirs / "bloom", num_attention_heads=8)
    with pytest.raises(ConfigError, match=r"num_attention_heads=8 and n_head=4 are two names of one option\. Restore the file"):
        read_hf(theirs / "bloom")


def test_a_model_with_another_head_is_told_by_its_class(theirs: Path) -> None:
    """Seen to fail: 'the config names another model', of a reward model whose config names itself."""
    weights = load_file(theirs / "model.safetensors")
    save_file(weights | {"score.weight": torch.ones(1, 32)}, theirs / "model.safetensors")
    change(theirs, architectures=["LlamaForTokenClassification"])
    with pytest.raises(CheckpointError, match=r"not known \(score.weight\); the config names LlamaForTokenClassification, and lm reads L"):
        read_hf(theirs)


def test_a_model_whose_many_small_tensors_are_wider_has_the_dtype_of_its_matrices(tmp_path: Path) -> None:
    """Seen to fail: all in float32, twice the size, since states, biases and norms in float32 are more tensors than matrices in bf16."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "head_dim": 16, "num_heads": 4, "n_groups": 1, "vocab_size": 320}
    folder = tmp_path / "theirs"
    transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes)).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    save_file({name: w.bfloat16() if w.ndim > 1 else w for name, w in stored.items()}, folder / "model.safetensors")
    assert 2 * sum(w.ndim > 1 for w in stored.values()) < len(stored)
    assert {weight.dtype for weight in read_hf(folder).weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize(("prefix", "by"), [("module.", "Distributed"), ("_orig_mod.", "torch.compile"), ("base_model.model.", "peft")])
def test_names_with_the_prefix_of_a_wrapper_are_told(prefix: str, by: str, theirs: Path) -> None:
    weights = load_file(theirs / "model.safetensors")
    save_file({prefix + name: tensor for name, tensor in weights.items()}, theirs / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"begin with '{prefix}', which {by}.* puts there"):
        read_hf(theirs)


def test_what_lies_beside_no_config_is_named(theirs: Path, tmp_path: Path) -> None:
    for step in (90, 100):
        shutil.copytree(theirs, tmp_path / "run" / f"checkpoint-{step}")
    with pytest.raises(CheckpointError, match=r"2 checkpoints of a training. Name one of them: .*/checkpoint-100\.$"):
        read_hf(tmp_path / "run")
    (tmp_path / "g").mkdir()
    with pytest.raises(CheckpointError, match=r"g: config.json is missing, so this is no model in the format"):
        read_hf(tmp_path / "g")
    (tmp_path / "g" / "m.gguf").touch()
    with pytest.raises(CheckpointError, match=r"config.json is missing; m.gguf is of llama.cpp"):
        read_hf(tmp_path / "g")
    with pytest.raises(CheckpointError, match=r"m.gguf: this is no folder .* no GGUF of llama.cpp"):
        local_folder(str(tmp_path / "g" / "m.gguf"))


def test_a_misshapen_tensor_is_named(theirs: Path) -> None:
    weights = load_file(theirs / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(31)
    save_file(weights, theirs / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight gives norm\.weight the shape \(31,\), and the config asks for \(32,\)"):
        read_hf(theirs)


def test_a_truncated_file_and_nan_are_refused(theirs: Path) -> None:
    file = theirs / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = torch.full((32,), float("nan"))
    save_file(weights, file)
    with pytest.raises(NumericsError, match=r"model\.norm\.weight holds NaN"):
        read_hf(theirs)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        read_hf(theirs)


def test_an_index_that_points_outside_is_refused(theirs: Path, tmp_path: Path) -> None:
    shutil.move(theirs / "model.safetensors", tmp_path / "outside.safetensors")
    names = load_file(tmp_path / "outside.safetensors")
    for target in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), "pytorch_model.bin"):
        (theirs / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, target)}))
        with pytest.raises(CheckpointError, match="is not the name of a safetensors file in this folder"):
            read_hf(theirs)


def in_shards(folder: Path, **more: dict[str, torch.Tensor]) -> None:
    """Two files of every second tensor, and an index; `more` is in the first file, or in the second, and not in the index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    for file, part in (("first", names[::2]), ("second", names[1::2])):
        save_file({name: weights[name] for name in part} | more.get(file, {}), folder / f"{file}.safetensors")
    where = {name: f"{('first', 'second')[i % 2]}.safetensors" for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def test_sharded_files_are_read_as_one(theirs: Path) -> None:
    whole = read_hf(theirs)
    in_shards(theirs)
    found = read_hf(theirs)
    assert all(torch.equal(found.weights[name], weight) for name, weight in whole.weights.items())
    (theirs / "second.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"theirs: second\.safetensors, which \S+ names, is missing\. Download the rest too\."):
        read_hf(theirs)
    (theirs / "first.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"first\.safetensors and 1 more, which \S+ names, are missing\."):
        read_hf(theirs)


def test_a_folder_without_weights_says_so(theirs: Path) -> None:
    """Seen to fail: 'Convert the model to safetensors first', of no model."""
    (theirs / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors is missing, and so are any other weights that lm reads\. Download them"):
        read_hf(theirs)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_git_lfs_has_not_fetched_is_told(name: str, theirs: Path) -> None:
    (theirs / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 135\n")
    with pytest.raises(CheckpointError, match=rf"{name}: this is a pointer of git-lfs, .*\. Run git lfs pull in its folder\."):
        read_hf(theirs)


def test_shards_that_count_themselves_need_no_index(theirs: Path) -> None:
    whole = read_hf(theirs)
    in_shards(theirs)
    (theirs / "model.safetensors.index.json").unlink()
    files = [theirs / f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
    for name, file in zip(("first", "second"), files, strict=True):
        (theirs / f"{name}.safetensors").rename(file)
    found = read_hf(theirs)
    assert all(torch.equal(found.weights[name], weight) for name, weight in whole.weights.items())
    save_file(load_file(files[0]) | load_file(files[1]), files[1])
    with pytest.raises(CheckpointError, match=r"is in model-00001-of-00002\.safetensors and in model-00002"):
        read_hf(theirs)
    files[0].unlink()
    with pytest.raises(CheckpointError, match=r"of 2 shards 1 are there, and model\.safetensors\.index\.json is missing"):
        read_hf(theirs)


@pytest.mark.parametrize("name", ["model.norm.extra", "model.norm.weight"])
def test_a_tensor_of_a_shard_that_the_index_does_not_have_is_refused(theirs: Path, name: str) -> None:
    in_shards(theirs, first={name: torch.ones(32)}, second={name: torch.ones(32)})
    with pytest.raises(CheckpointError, match=rf"\.safetensors: {name} is in it, and model\.safetensors\.index\.json does not say so"):
        read_hf(theirs)


def test_a_tensor_of_the_index_that_its_shard_lacks_is_refused(theirs: Path) -> None:
    in_shards(theirs)
    index = theirs / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("first.safetensors", "second.safetensors"))
    with pytest.raises(CheckpointError, match=r"second\.safetensors: \S+ is not in it, and model\.safetensors\.index\.json says"):
        read_hf(theirs)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "lama"}, "model_type='lama' is not known. Did you mean 'llama'? docs/huggingface.md lists"),
        ({"model_type": "gpt-oss"}, "model_type='gpt-oss' is not known. Did you mean 'gpt_oss'?"),
        ({"model_type": None}, "model_type is missing, which says how the weights are read"),
        ({"model_type": "rembert"}, "model_type='rembert' has no form in lm: embedding and head have each a width of their own. Import"),
        ({"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text"}}, "'gemma3n_text' has no form in lm: it has four"),
        ({"model_type": "paligemma", "text_config": {"model_type": "gemma"}}, "'paligemma' has no form in lm: prompts are read in both"),
        ({"model_type": "aria", "text_config": {"model_type": "aria_text"}}, "its text model, 'aria_text'. docs/hugg"),
        ({"model_type": "qwen2_vl", "text_config": {"model_type": "qwen2_vl_text"}}, "'vocab_size' is missing, and qwen2 needs it"),
        ({"hidden_act": "mish"}, "hidden_act='mish' is not known"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None}, "d_model=32 is not a multiple of n_heads=5"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type='spiral' is not known"),
        ({"model_type": ["llama"]}, "model_type=['llama'] is not known"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 means nothing in llama, which rotates whole heads"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention", "full_attention"], "use_sliding_window": True},
         "num_hidden_layers=2, and layer_types tells of 3 layers. Restore the file."),
        ({"model_type": "lfm2", "layer_types": ["conv"]}, "num_hidden_layers=2, and layer_types tells of 1 layer. Restore the file."),
        ({"num_hidden_layers": 10**9}, "1000000000 layers do not fit"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": -1}, "a value does not fit gemma2"),
        ({"model_type": "gpt_oss", "swiglu_limit": None}, "swiglu_limit is null"),
        ({"hidden_act": ["silu"]}, "a value does not fit llama"),
        ({"rope_parameters": None, "rope_scaling": "linear"}, "a value does not fit llama"),
        ({"model_type": "ministral3", "rope_parameters": "yarn"}, "a value does not fit ministral3 (rope_parameters='yarn')"),
        ({"model_type": "lfm3", "rope_parameters": [1]}, "a value does not fit lfm3 (rope_parameters=[1])"),
        ({"rope_parameters": None, "rope_theta": "x"}, "a value does not fit llama"),
        ({"rope_parameters": None, "rope_theta": 0.0}, "position.theta"),
        ({"model_type": "t5", "d_model": 0, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}, "d_model: 0 does not fit"),
        ({"model_type": "gpt_oss", "layer_types": 5, "num_local_experts": 4}, "gpt_oss"),
    ],
)  # fmt: skip
def test_configs_that_do_not_fit_are_refused(theirs: Path, keys: dict[str, Any], message: str) -> None:
    change(theirs, **keys)
    with pytest.raises(ConfigError) as error:
        read_hf(theirs)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("whisper", "is a model of sounds, and lm reads models of text. Import another model."),
        ("vit", "is no model of text, since this file names no vocabulary. Import another model."),
        ("clip", "has several kinds of inputs, and lm does not know its text model, 'clip_text_model'. docs/huggingface.md lists"),
        ("mllama", "has several kinds of inputs, and lm does not know its text model, 'mllama_text_model'. docs/huggingface.md lists"),
        ("ernie4_5_vl_moe", "lm does not know its text model, 'ernie4_5_vl_moe_text'. docs/huggingface.md lists"),
        ("phi4_multimodal", "has several kinds of inputs, and lm does not know the text model in it. docs/huggingface.md lists"),
        ("xlnet", "is not known. docs/huggingface.md lists the models that lm reads."),
        ("xlm", "is not known. docs/huggingface.md lists the models that lm reads."),
    ],
)
def test_a_model_that_lm_does_not_know_is_told_by_what_its_config_says(kind: str, said: str) -> None:
    """Seen to fail: the names of all families, and near ones that are of other models, such as phi of phi4_multimodal."""
    hf = transformers.CONFIG_MAPPING[kind]().to_dict()
    assert said in refusal(hf, families())


def test_what_is_told_of_models_that_are_not_read_is_of_such_models() -> None:
    assert WHY.keys() <= set(transformers.CONFIG_MAPPING.keys()) and not WHY.keys() & families().keys()


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 means something in gemma2"),
        ({"attention_multiplier": 1.0}, "attention_multiplier=1.0 means something in granite"),
        ({"logits_scaling": 8.0}, "logits_scaling=8.0 means something in granite"),
        ({"sliding_window": 4096}, "sliding_window=4096 means something in"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types="),
        ({"num_experts": 8}, "num_experts=8 means something in"),
        ({"rope_interleave": True}, "rope_interleave=True means something in deepseek_v3"),
        ({"use_parallel_residual": True}, "use_parallel_residual=True means something in gpt_neox"),
        ({"model_type": "gpt2", "n_positions": 8, "n_embd": 32, "n_layer": 2, "n_head": 4, "activation_function": "gelu"},
         "means something in afmoe, and model_type=gpt2 does not know it"),
    ],
)  # fmt: skip
def test_what_only_another_family_knows_is_refused(theirs: Path, keys: dict[str, Any], named: str) -> None:
    change(theirs, **keys)
    with pytest.raises(ConfigError) as error:
        read_hf(theirs)
    assert named in str(error.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"attn_logit_softcapping": None, "final_logit_softcapping": 0.0, "mlp_only_layers": [], "use_parallel_residual": False},
        {"embedding_multiplier": 1.0, "residual_multiplier": 1, "logits_scaling": 1.0},
        {"sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": False, "layer_types": ["full_attention"] * 2},
        {"n_layer": 2, "layer_norm_epsilon": 1e-6, "n_embd": 32},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "factor": None}},
    ],
)
def test_what_changes_nothing_is_neither_refused_nor_told(theirs: Path, keys: dict[str, Any]) -> None:
    change(theirs, **keys)
    assert read_hf(theirs).notes == []


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_theta": 5e5, "mrope_section": [2, 1, 1]}, "mrope_section=[2, 1, 1] among the rotary parameters"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "beta_fast=3.0 among the rotary parameters"),
        ({"rope_type": "default", "original_len": 3}, "original_len=3"),
        ({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}, "by type of layer (full_attention, sliding"),
        ({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e6}}, "Write those of all layers, without the types"),
        ({"full_attention": {"rope_theta": 1e6}, "rope_type": "default"}, "full_attention={'rope_theta': 1000000.0}"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_rotary_parameters_that_have_no_place_are_refused_by_name(theirs: Path, spelling: str, rope: dict[str, Any], named: str) -> None:
    change(theirs, **{"rope_parameters": None, spelling: rope})
    with pytest.raises(ConfigError) as error:
        read_hf(theirs)
    assert named in str(error.value)


@torch.no_grad()
def test_a_decoder_whose_tokens_see_those_behind_them_is_refused(theirs: Path) -> None:
    """As embedding models say it. Seen to fail: it was read as causal without a word, and transformers reads in both directions."""
    ids, load = torch.arange(2, 9)[None], transformers.AutoModelForCausalLM.from_pretrained
    causal = load(theirs)(ids).logits
    change(theirs, is_causal=True)
    assert torch.equal(load(theirs)(ids).logits, causal) and read_hf(theirs).config.kind == "decoder"
    change(theirs, is_causal=False)
    assert not torch.allclose(load(theirs)(ids).logits, causal)
    with pytest.raises(ConfigError, match=r"config\.json: is_causal=False lets each token of a decoder see those behind it"):
        read_hf(theirs)


def test_a_key_that_is_not_used_is_told(theirs: Path) -> None:
    change(theirs, residual_magic=0.5)
    assert any("residual_magic=0.5" in note for note in read_hf(theirs).notes)
