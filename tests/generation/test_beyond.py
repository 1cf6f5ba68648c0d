"""Beyond the context that a model was trained with: what may go on does, and says so; what cannot is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

import lm as library
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.generation.config import SamplingConfig
from lm.nn.transformer import DecoderLM
from lm.storage.model_folder import save_model
from lm.testing.models import tokens
from tests.conftest import Lm
from tests.generation.drawing import generate
from tests.nn.models import MLA, config, redrawn

ENDLESS: list[dict[str, Any]] = [
    {"kind": "none"}, {"kind": "sinusoidal"}, {"kind": "rope"}, {"kind": "alibi"},
    {"kind": "t5_relative", "n_buckets": 8, "max_distance": 12},
]  # fmt: skip
PROMPTS = [tokens(1, 10)[0].tolist(), tokens(1, 60, seed=2)[0].tolist()]  # of 48 places
GREEDY = SamplingConfig(temperature=0, max_tokens=90)


@pytest.mark.slow
@pytest.mark.parametrize("position", ENDLESS, ids=lambda position: position["kind"])
def test_generation_slides_as_a_model_whose_every_layer_has_the_context_as_its_window(position: dict[str, Any]) -> None:
    """One whose context would have been long enough, with the same weights."""
    attention = {"n_heads": 4, "n_kv_heads": 2}
    model, wide = redrawn(config(position=position, attention=attention)), config(position=position, attention=attention | {"window": 48})
    reference = DecoderLM(wide.replace(max_seq_len=512))
    reference.load_state_dict(model.state_dict())
    found = generate(model, PROMPTS, GREEDY)
    assert found == generate(reference.eval(), PROMPTS, GREEDY) == [generate(model, [prompt], GREEDY)[0] for prompt in PROMPTS]
    assert [len(new) for new in found] == [90, 90]
    unbounded = DecoderLM(config(position=position, attention=attention).replace(max_seq_len=512))
    unbounded.load_state_dict(model.state_dict())
    assert found != generate(unbounded.eval(), PROMPTS, GREEDY)


@pytest.mark.parametrize("attention", [MLA, {"n_heads": 4, "window": 7, "global_every": 2}])
def test_generation_within_the_context_is_that_of_a_longer_one(attention: dict[str, Any]) -> None:
    model = redrawn(config(attention=attention))
    longer = DecoderLM(config(attention=attention).replace(max_seq_len=512))
    longer.load_state_dict(model.state_dict())
    within, found = GREEDY.replace(max_tokens=39), generate(model, PROMPTS, GREEDY)[0][:39]
    assert generate(model, PROMPTS[:1], within) == generate(longer.eval(), PROMPTS[:1], within) == [found]


@pytest.fixture
def rotary(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    model = redrawn(config(vocab_size=320))
    save_model(tmp_path / "runs" / "r" / "model", model.cfg.tree(), dict(model.named_parameters()), tokenizer.save, {})
    return tmp_path / "runs" / "r"


def test_the_command_goes_on_and_says_so(lm: Lm, rotary: Path) -> None:
    code, _, err = lm("generate", f"from={rotary}", "prompt=abcdefg", "max_tokens=41")
    assert (code, err) == (0, "")
    code, _, err = lm("generate", f"from={rotary}", f"prompt={'ab ' * 30}", "max_tokens=9")
    assert code == 0 and err == "went on beyond the context of 48: each token has seen no more than 48 up to itself.\n"


def test_eval_reads_the_same_text_in_longer_rows(lm: Lm, rotary: Path, tmp_path: Path) -> None:
    """Also where a run has validated on some rows only."""
    (tmp_path / "a.txt").write_text("".join(f"line {i}: {i * i} and {i % 7}\n" for i in range(120)))
    where = [f"from={rotary}", "data=text", f"data.files={tmp_path / 'a.txt'}", f"data.cache_dir={tmp_path / 'c'}", "format=json"]
    found = [json.loads(lm("eval", *where, f"data.seq_len={n}")[1]) for n in (24, 48, 96, 130)]
    assert len({(each["bytes"], each["tokens"]) for each in found}) == 1 and len({each["val_loss"] for each in found}) == 4
    for each in found:
        places, sure = each["loss_by_place"], each["reliability"]
        assert sum(part["tokens"] for part in places) == sum(part["tokens"] for part in sure) == each["tokens"]
        assert sum(part["loss"] * part["tokens"] for part in places) == pytest.approx(each["val_loss"] * each["tokens"], rel=1e-5)
    assert [part["from"] for part in found[3]["loss_by_place"]] == [0, 1, 2, 4, 8, 16, 32, 64, 128]
    where.remove("format=json")
    code, out, err = lm("eval", *where, "data.seq_len=24", "eval.seq_len=[96]", "eval.own_tokens=4")
    assert code == 0, err
    told = {line.split()[0]: line.split()[1] for line in out.splitlines() if line}
    assert told["val_loss/96"] == f"{found[2]['val_loss']:.4f}" and told["16-31"] == f"{found[0]['loss_by_place'][-1]['loss']:.4f}"
    assert float(told["val_exposure"]) == pytest.approx(abs(float(told["val_own_entropy"]) - float(told["val_true_entropy"])), abs=2e-4)
    config = {"data": {"kind": "text", "files": str(tmp_path / "a.txt"), "cache_dir": str(tmp_path / "c"), "seq_len": 48, "val_rows": 2}}
    (rotary / "config.yaml").write_text(json.dumps(config))
    _, out, err = lm("eval", f"from={rotary}", "data.seq_len=96", "format=json")
    assert json.loads(out) == found[2] and "data.val_rows=2 is left aside" in err and "longer than any in training" in err


def test_learned_positions_are_refused_by_both(lm: Lm, model_folder: Path) -> None:
    code, out, err = lm("generate", f"from={model_folder}", f"prompt={'a' * 48}")
    assert (code, out) == (2, "") and "position=learned has no more places" in err.splitlines()[-1]
    for key in ("data.seq_len=49", "eval.seq_len=[49]"):
        code, out, err = lm("eval", f"from={model_folder}", "data=stdlib", key)
        assert (code, out) == (2, "") and "position=learned has no more places" in err.splitlines()[-1]
    with pytest.raises(ConfigError, match="position=learned has no more places"):
        model, tokenizer = library.load(model_folder, device="cpu")
        library.generate(model, tokenizer, "a" * 48)
