"""`lm import` and `lm export` as they are typed, and what they refuse."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lm.data.config import BytesConfig
from lm.data.tokenizer import build_tokenizer
from lm.errors import CheckpointError, ConfigError
from lm.generation.load import generate, load
from lm.hf.family import families
from lm.hf.reading import read_hf
from lm.hf.writing import family_for, write_hf
from lm.model_folder import save_model
from lm.nn.batch import Batch
from tests.nn.models import config, redrawn

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def lm(tmp_path: Path) -> Run:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "lm", *args], cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def saved(folder: Path, **changes: Any) -> Path:
    """A model folder of ours with every tensor redrawn."""
    model = redrawn(config(vocab_size=320, **changes))
    tokenizer = build_tokenizer(BytesConfig(), ())
    save_model(folder, model.cfg.tree(), dict(model.named_parameters()), tokenizer.save, {"run": "base", "step": 7})
    return folder


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A Llama in Hugging Face's format, written by transformers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
    folder = tmp_path / "theirs"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    build_tokenizer(BytesConfig(), ()).save(folder)
    return folder


def change(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def test_a_model_goes_to_transformers_and_comes_back_bit_for_bit(tmp_path: Path, lm: Run) -> None:
    pytest.importorskip("transformers")
    saved(tmp_path / "base", position={"kind": "rope", "theta": 700.0}, attention={"n_heads": 4, "n_kv_heads": 2})
    done = lm("export", "from=base", "format=hf", "out=hf")
    assert done.returncode == 0, done.stderr
    difference = float(done.stdout.split("transformers: ")[1].split()[0])
    assert 0 < difference < 1e-4
    files = {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in (tmp_path / "hf").iterdir()} >= files
    assert "| Optimizer steps | 7 |" in (tmp_path / "hf/README.md").read_text()
    done = lm("import", "from=hf", "out=back")
    assert done.returncode == 0, done.stderr
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    texts = [generate(*load(tmp_path / name), "def ", max_tokens=8, temperature=0.0) for name in ("base", "back")]
    assert texts[0] == texts[1]


def test_config_json_has_the_rotary_keys_of_both_versions(tmp_path: Path, lm: Run) -> None:
    saved(tmp_path / "base", position={"kind": "rope", "theta": 700.0, "scaling": {"kind": "linear", "factor": 2.0}})
    assert lm("export", "from=base", "format=hf", "out=hf", "check=false").returncode == 0
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 700.0
    assert config["rope_scaling"]["type"] == config["rope_parameters"]["rope_type"] == "linear"
    old_only = {key: value for key, value in config.items() if key != "rope_parameters"}
    (tmp_path / "hf/config.json").write_text(json.dumps(old_only))
    position = read_hf(tmp_path / "hf").config.position
    assert position.kind == "rope"
    assert position.theta == 700.0
    assert position.scaling is not None


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"attention": {"n_heads": 4, "softcap": 5.0, "qk_norm": "full"}}, "model.attention."),
        ({"position": {"kind": "sinusoidal"}}, "model.position."),
        ({"norm": {"kind": "layer", "place": "output"}, "position": {"kind": "learned"}}, "model.norm."),
    ],
)  # fmt: skip
def test_an_option_without_a_home_is_named(tmp_path: Path, lm: Run, changes: dict[str, Any], option: str) -> None:
    saved(tmp_path / "base", **changes)
    done = lm("export", "from=base", "format=hf", "out=hf")
    assert done.returncode == 2
    assert option in done.stderr.splitlines()[-1]
    assert not (tmp_path / "hf").exists()


def test_a_model_that_several_families_can_hold_is_of_the_most_general(theirs: Path) -> None:
    found = read_hf(theirs).config
    assert family_for(found, "granite").name == "granite"
    assert family_for(found).name == "llama"


def test_a_wanted_family_says_what_it_lacks(tmp_path: Path, lm: Run) -> None:
    saved(tmp_path / "base", attention={"n_heads": 4, "softcap": 5.0})
    done = lm("export", "from=base", "format=hf", "out=hf", "family=llama")
    assert done.returncode == 2
    assert "model.attention.softcap=5.0 has no home in llama" in done.stderr


def test_nothing_is_overwritten(tmp_path: Path, lm: Run, theirs: Path) -> None:
    (tmp_path / "there").mkdir()
    done = lm("import", f"from={theirs}", "out=there")
    assert done.returncode == 2
    assert "out=there: it exists already" in done.stderr


def test_missing_and_unknown_tensors_are_named(theirs: Path) -> None:
    weights = load_file(theirs / "model.safetensors")
    weights["model.layers.0.self_attn.extra"] = weights.pop("model.layers.1.self_attn.k_proj.weight").clone()
    save_file(weights, theirs / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        read_hf(theirs)
    assert "1 tensors are missing (model.layers.1.self_attn.k_proj.weight)" in str(error.value)
    assert "1 tensors are not known (model.layers.0.self_attn.extra)" in str(error.value)


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
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds NaN"):
        read_hf(theirs)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        read_hf(theirs)


def test_a_pickle_is_refused_and_not_opened(theirs: Path, tmp_path: Path, lm: Run) -> None:
    (theirs / "model.safetensors").unlink()
    canary = tmp_path / "canary"
    (theirs / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch %s'\ntR." % str(canary).encode())
    done = lm("import", f"from={theirs}", "out=new")
    assert done.returncode == 3
    assert "pytorch_model.bin is a pickle" in done.stderr.splitlines()[-1]
    assert not canary.exists()


def test_code_of_the_model_is_never_run(theirs: Path, tmp_path: Path, lm: Run) -> None:
    change(theirs, auto_map={"AutoModelForCausalLM": "modeling_x.Model"})
    (theirs / "modeling_x.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    done = lm("import", f"from={theirs}", "out=new")
    assert done.returncode == 0, done.stderr
    assert "auto_map names code of the model's own, which is not run" in done.stderr
    assert not (tmp_path / "canary").exists()
    assert not list((tmp_path / "new").glob("*.py"))


def test_an_index_that_points_outside_is_refused(theirs: Path, tmp_path: Path) -> None:
    shutil.move(theirs / "model.safetensors", tmp_path / "outside.safetensors")
    names = load_file(tmp_path / "outside.safetensors")
    for target in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), "pytorch_model.bin"):
        (theirs / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, target)}))
        with pytest.raises(CheckpointError, match="is not the name of a safetensors file in this folder"):
            read_hf(theirs)


def test_sharded_files_are_read_as_one(theirs: Path) -> None:
    whole = read_hf(theirs)
    weights = load_file(theirs / "model.safetensors")
    (theirs / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, theirs / file)
    where = {name: file for file, part in parts.items() for name in part}
    (theirs / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    found = read_hf(theirs)
    assert all(torch.equal(found.weights[name], weight) for name, weight in whole.weights.items())
    (theirs / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors: .* cannot be read"):
        read_hf(theirs)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "lama"}, "model_type='lama' is not known. Did you mean 'llama'"),
        ({"model_type": None}, "model_type=None is not known"),
        ({"hidden_act": "mish"}, "hidden_act='mish' is not known"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None}, "d_model=32 is not a multiple of n_heads=5"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type='spiral' is not known"),
        ({"model_type": ["llama"]}, "model_type=['llama'] is not known"),
        ({"hidden_act": ["silu"]}, "a value does not fit llama"),
        ({"rope_parameters": None, "rope_scaling": "linear"}, "a value does not fit llama"),
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


def test_a_key_that_is_not_used_is_told(theirs: Path) -> None:
    change(theirs, residual_magic=0.5)
    assert any("residual_magic=0.5" in note for note in read_hf(theirs).notes)


def test_neither_folder_nor_hub_model(lm: Run) -> None:
    for name in ("nowhere", "nobody/nothing-at-all"):
        done = lm("import", f"from={name}", "out=new")
        assert done.returncode == 3
        assert name in done.stderr.splitlines()[-1]


def test_a_folder_that_was_not_imported_says_how_to(theirs: Path) -> None:
    with pytest.raises(CheckpointError, match=r"this is a Hugging Face model\. Make it ours first: lm import from="):
        load(theirs)


def test_a_revision_of_a_folder_is_refused(theirs: Path, lm: Run) -> None:
    done = lm("import", f"from={theirs}", "out=new", "revision=main")
    assert done.returncode == 2
    assert "only models of the hub have revisions" in done.stderr


def test_asking_every_family_never_fails() -> None:
    for attention in ({"n_heads": 4, "scale": 2.0}, {"n_heads": 4, "window": 5, "global_every": 3}, {"n_heads": 4, "softcap": 5.0}):
        cfg = config(attention=attention)
        assert all(isinstance(family.homeless(cfg), list) for family in families().values())


@torch.no_grad()
def test_what_is_over_the_size_of_a_shard_is_written_in_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    model = redrawn(config(vocab_size=320))
    weights = dict(model.named_parameters())
    monkeypatch.setattr("lm.hf.writing.SHARD_BYTES", 20_000)
    family = family_for(model.cfg)
    write_hf(tmp_path / "hf", family, model.cfg, weights, None)
    assert len(list((tmp_path / "hf").glob("model-*-of-*.safetensors"))) > 1
    again = read_hf(tmp_path / "hf").weights
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())
    ids = torch.arange(20)[None]
    theirs = getattr(transformers, family.auto).from_pretrained(tmp_path / "hf").eval()
    torch.testing.assert_close(theirs(ids).logits, model(Batch(ids)), atol=1e-4, rtol=0)
