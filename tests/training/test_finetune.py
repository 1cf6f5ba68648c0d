"""Starting from a checkpoint: its weights, its tokenizer, a fresh optimizer, and a record of the parent."""

from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from lm.cli.compose.compose import compose_config
from lm.errors import CheckpointError, ConfigError
from lm.nn.model_config import model_config
from lm.nn.transformer import build_model
from lm.storage.checkpoint import CheckpointReader
from lm.storage.reading import read_json
from lm.training.plan import plan
from lm.training.run import train_rank
from lm.training.weights.carried import require_state
from tests.training.conftest import Before, Configure, read, settled, write_text


@pytest.fixture
def parent(configure: Configure, tmp_path: Path) -> Path:
    train_rank(configure("trainer.max_steps=6", "run.name=parent"))
    return tmp_path / "parent"


def child(parent: Path, *more: str) -> list[str]:
    text = write_text(parent.parent / "other.txt", seed=1)
    return [
        f"init_from={parent}", "data=text", f"data.files={text}", "data.seq_len=32", "data.global_batch=8", "data.val_rows=8", "optim=sgd",
        f"data.cache_dir={parent.parent / 'cache'}", "trainer.max_steps=2", "schedule.warmup_steps=1", "trainer.device=cpu",
        "trainer.sample_prompts=[]", f"run.dir={parent.parent}", "run.name=child", *more,
    ]  # fmt: skip


def test_the_first_step_starts_from_the_parents_weights_and_the_parent_is_recorded(parent: Path) -> None:
    summary = train_rank(compose_config(child(parent, "optim.lr=1e-12")))
    before, after = (load_file(folder / "model" / "model.safetensors") for folder in (parent, parent.parent / "child"))
    assert before.keys() == after.keys()
    for name in before:
        torch.testing.assert_close(after[name], before[name], atol=1e-9, rtol=0)
    assert summary["parent"] == str(parent)
    assert read_json(parent.parent / "child" / "model" / "config.json")["parent"] == str(parent)
    assert (parent / "model" / "tokenizer.json").read_bytes() == (parent.parent / "child" / "model" / "tokenizer.json").read_bytes()


def test_a_checkpoint_will_do_as_a_parent(parent: Path) -> None:
    checkpoint = parent / "checkpoints" / "step-00000006"
    train_rank(compose_config([*child(parent, "optim.lr=1e-12"), f"init_from={checkpoint}"]))
    assert read(parent.parent / "child" / "metrics.jsonl")[1]["step"] == 1


def test_the_parent_is_validated_first_and_once(parent: Path) -> None:
    """Also where the run was killed before its first save."""
    cfg = compose_config(child(parent, "optim.lr=1e-12"))
    with pytest.raises(ValueError, match="stop"):
        train_rank(cfg, callbacks=[Before(1, Mock(side_effect=ValueError("stop")))])
    train_rank(cfg)
    lines = [line for line in read(parent.parent / "child" / "metrics.jsonl") if "val_loss" in line]
    assert [line["step"] for line in lines] == [0, 2]
    assert lines[0]["val_loss"] == pytest.approx(lines[1]["val_loss"], rel=1e-6)


def test_overrides_that_change_no_shape_apply(parent: Path) -> None:
    config = compose_config(child(parent, "model.dropout=0.25", "model.attention.window=8"))
    assert config.model.dropout == 0.25 and config.model.attention.window == 8
    assert config.model.d_model == 32
    train_rank(config)


def test_overrides_that_change_a_shape_are_refused_with_the_shapes(parent: Path) -> None:
    cfg = compose_config(child(parent, "model.ffn.hidden=96"))
    for go, of in ((train_rank, cfg), (partial(plan, say=print), cfg.replace(plan=True))):
        with pytest.raises(CheckpointError, match=r"up.weight is 64x32 there and 96x32 in the model"):
            go(of)
    plan(compose_config(child(parent, "plan=true")), print)


@pytest.mark.parametrize("override", ["tokenizer=bytes", "tokenizer=bpe", "model=tiny", "model/ffn=geglu", "model.residual.kind=loop"])
def test_another_tokenizer_or_slot_is_refused_by_name(parent: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{override}: init_from=.* brings its own"):
        compose_config(child(parent, override))


def test_a_kind_without_options_of_its_own_may_be_chosen(parent: Path) -> None:
    """Seen to be refused, as if it were a slot."""
    scaled = compose_config(child(parent, "model.position.scaling.kind=linear", "model.position.scaling.factor=2"))
    assert scaled.model.position.tree()["scaling"]["factor"] == 2


def test_rows_longer_than_the_parents_context_are_refused(parent: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.seq_len=64 is over model.max_seq_len=32"):
        compose_config(child(parent, "data.seq_len=64"))


def test_a_model_of_another_size_is_refused_before_the_data_are_prepared(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    with pytest.raises(CheckpointError, match=r"blocks\.\d\.\S+ is missing there .* or rebuild it first, by lm remodel\."):
        train_rank(compose_config(child(parent, "model.n_layers=9")))
    assert "train: 1 document" not in capsys.readouterr().out
    train_rank(compose_config(child(parent)))
    assert "train: 1 document" in capsys.readouterr().out


MANY = f"tokenizer.specials=[{','.join(f'<{i}>' for i in range(99))}]"
ONWARD = ("model.dropout=0", "data.train_rows=8", "schedule=constant", "schedule.warmup_steps=0", "optim=adamw", "optim.lr=1e-2")
"""Each step reads the same rows at the same rate, so that a run's second half can be had from a checkpoint too."""


@pytest.mark.slow
def test_a_run_that_takes_the_optimizers_state_over_goes_on_as_the_parent_did(tiny: list[str], tmp_path: Path) -> None:
    train_rank(compose_config(settled(*tiny, *ONWARD, "trainer.max_steps=12", "checkpoint.keep_steps=[6]", "run.name=parent")))
    half = tmp_path / "parent" / "checkpoints" / "step-00000006"
    runs = {"child": ["init_optimizer=true"], "anew": []}
    for name, more in runs.items():
        own = settled(*tiny, *ONWARD, f"init_from={half}", "trainer.max_steps=6", f"run.name={name}", *more)
        train_rank(compose_config([arg for arg in own if not arg.startswith(("model", "tokenizer"))]))
    found = {name: load_file(tmp_path / name / "model" / "model.safetensors") for name in ("parent", *runs)}
    apart = {
        name: max((weight - found["parent"][key]).abs().max().item() for key, weight in found[name].items()) for name in ("child", "anew")
    }
    assert apart["child"] < 1e-4 and apart["anew"] > 1e-2


def test_a_state_goes_on_with_the_weights_that_it_is_of_not_with_their_average(tiny: list[str], tmp_path: Path) -> None:
    """Seen to begin with the average, beside the moments of the weights: the loss went from 2.97 to 4.88 at the first step."""
    onward = [*tiny, *ONWARD, "trainer.ema_decay=0.99"]
    train_rank(compose_config(settled(*onward, "run.name=parent", "trainer.max_steps=8", "checkpoint.keep_steps=[4]")))
    onward = [arg for arg in onward if not arg.startswith(("model", "tokenizer"))]
    half = tmp_path / "parent" / "checkpoints" / "step-00000004"
    train_rank(compose_config(settled(*onward, "run.name=child", "trainer.max_steps=4", "init_optimizer=true", f"init_from={half}")))
    ends = [CheckpointReader(tmp_path / name / "checkpoints" / f"step-{n:08}") for name, n in (("parent", 8), ("child", 4))]
    assert max((ends[0].read(name) - ends[1].read(name)).abs().max().item() for name in ends[0].names()) < 1e-4


@pytest.mark.parametrize(
    ("where", "more", "told"),
    [
        ("", [], r"parent/model holds weights alone\. Give init_from a run's checkpoint, such as .*/parent/checkpoints/step-00000006\.$"),
        ("checkpoints/step-00000006", ["optim=adamw"], r"the state of optim=muon, and this run has optim=adamw\. Take the same"),
        ("checkpoints/step-00000006", ["optim=muon", MANY], r"no state for embed\.weight as this run has it"),
    ],
)
def test_a_state_that_the_run_cannot_go_on_with_is_refused(parent: Path, where: str, more: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=f"^init_optimizer=true: .*{told}"):
        train_rank(compose_config(settled(*child(parent), "init_optimizer=true", f"init_from={parent / where}", *more)))


@pytest.mark.parametrize(
    ("option", "told"), [("one_sided=true", "false, .*one_sided=true"), ("max_precondition_dim=20", "10000, .*max_precondition_dim=20")]
)
def test_moments_in_another_basis_are_refused(configure: Configure, tmp_path: Path, option: str, told: str) -> None:
    train_rank(configure("optim=soap", "trainer.max_steps=4", "run.name=parent"))
    where = tmp_path / "parent" / "checkpoints" / "step-00000004"
    onward = [*child(tmp_path / "parent")[1:-1], "init_optimizer=true", f"init_from={where}", "optim=soap"]
    model = build_model(model_config(CheckpointReader(where).meta["model"]), device="meta")
    require_state(model, compose_config([*onward, "optim.precondition_frequency=7"]))
    with pytest.raises(ConfigError, match=f"has the state of optim.{option.split('=')[0]}={told}. Take the same, or leave it out"):
        require_state(model, compose_config([*onward, f"optim.{option}"]))


def test_a_loss_that_would_compare_with_the_average_of_the_weights_is_refused(configure: Configure, tmp_path: Path) -> None:
    """Seen to call every answer better at step 0: the model was that of the state, and the one to compare with its average."""
    train_rank(configure("optim=adamw", "trainer.ema_decay=0.9", "trainer.max_steps=4", "run.name=parent"))
    where = tmp_path / "parent" / "checkpoints" / "step-00000004"
    onward = [*child(tmp_path / "parent"), "init_optimizer=true", f"init_from={where}", "optim=adamw"]
    model = build_model(model_config(CheckpointReader(where).meta["model"]), device="meta")
    require_state(model, compose_config(settled(*onward)))
    with pytest.raises(ConfigError, match=r"has averages of its weights, with which objective=dpo would compare.* Leave it out"):
        require_state(model, compose_config(settled(*onward, "data=preferences", "objective=dpo")))


def test_the_state_of_a_head_that_told_other_things_is_refused_whatever_its_shape(configure: Configure, tmp_path: Path) -> None:
    train_rank(configure("model.head.tied=false", "trainer.max_steps=4", "run.name=parent"))
    where = tmp_path / "parent" / "checkpoints" / "step-00000004"
    cfg = compose_config([*child(tmp_path / "parent")[1:-1], "init_optimizer=true", f"init_from={where}"])
    cfg = cfg.replace(optim={"kind": "muon"})
    before = model_config(CheckpointReader(where).meta["model"])
    require_state(build_model(before, device="meta"), cfg)
    labels = [str(i) for i in range(before.vocab_size or 0)]
    with pytest.raises(ConfigError, match=r"has no state for head\.weight as this run has it"):
        require_state(build_model(before.replace(head=before.head.telling(labels, bias=False)), device="meta"), cfg)


def test_a_state_of_nothing_is_refused(configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"init_optimizer=true goes on with .* and there is no init_from\. Leave it out\."):
        configure("init_optimizer=true")
