"""Lengths in epochs, rows, tokens and shares of a run."""

from pathlib import Path

import pytest

from lm.cli.compose.compose import compose, compose_config
from lm.data.batches import Batches
from lm.errors import ConfigError
from lm.schema import flatten
from lm.training.config import TrainConfig
from tests.conftest import Lm


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides of a small run, within an empty folder."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"Line {n} of a text that is not long.\n" for n in range(400)))
    text = ["data=text", "data.files=text.txt", "data.cache_dir=cache", "data.max_contamination=1.0", "data.seq_len=32", "tokenizer=bytes"]
    return ["debug=fast", *text, "data.global_batch=4", "model=nano", "run.name=counted"]


def _n_rows(cfg: TrainConfig) -> int:
    return len(Batches(cfg.data, cfg.objective, cfg.tokenizer, cfg.model).train)


@pytest.mark.parametrize("epochs", ["1", "2.5", "0.1"])
def test_epochs_are_the_fewest_steps_that_read_so_many_rows(base: list[str], epochs: str) -> None:
    cfg = compose_config([*base, f"trainer.max_steps={epochs}epochs"])
    steps, n_rows = cfg.trainer.max_steps, _n_rows(cfg)
    assert n_rows > 20
    assert 4 * (steps - 1) < float(epochs) * n_rows <= 4 * steps


def test_an_epoch_has_all_steps_that_learn_from_its_rows(default_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.training.epochs.counted_rows", lambda cfg: 10)
    asked = ["recipes=finetune/grpo_arithmetic", "data.global_batch=4", "objective.updates=3", "trainer.max_steps=2epochs"]
    assert compose_config(asked).trainer.max_steps == 3 * 2 * 10 / 4


@pytest.mark.slow
def test_what_is_told_but_once_of_the_data_is_not_lost_where_rows_are_counted(base: list[str], lm: Lm) -> None:
    """And what a run tells each time is told by it alone."""
    chat = '{"messages": [{"role": "user", "content": "ab %d"}, {"role": "assistant", "content": "ef"}]}\n'
    Path("chats.jsonl").write_text("".join(chat % n for n in range(60)) + '{"messages": []}\n')
    plain = [each for each in base if not each.startswith(("data=", "data.files"))]
    asked = [*plain, "data=chat", "data.files=chats.jsonl", "data.on_bad_record=skip", "objective=sft", "trainer.max_steps=0.5epochs"]
    _, out, err = lm("train", *asked)
    assert err.count("the first that is left out") == 1 and "the first that is left out" not in out
    assert out.count("1 record left out") == 1 and "1 record left out" not in err
    assert "the first that is left out" not in lm("train", *asked, "run.name=again")[2]


def test_epochs_are_of_the_rows_that_are_read(base: list[str]) -> None:
    few = compose_config([*base, "data.train_rows=10", "trainer.max_steps=2epochs"])
    assert few.trainer.max_steps == 5
    ramp = "data.ramp=[{until_step:3,global_batch:2}]"  # 6 rows in three steps, and 14 in four of the others
    assert compose_config([*base, "data.train_rows=10", ramp, "trainer.max_steps=2epochs"]).trainer.max_steps == 3 + 4


@pytest.mark.parametrize(
    ("length", "steps"),
    [("1ktokens", 8), ("1.28ktokens", 10), ("1281 tokens", 11), ("1e3token", 8), ("0.1krows", 25), ("101rows", 26), ("1row", 1)],
)
def test_rows_and_tokens_are_those_of_the_batches(base: list[str], length: str, steps: int) -> None:
    assert compose_config([*base, f"trainer.max_steps={length}"]).trainer.max_steps == steps


def test_two_texts_of_a_row_have_the_tokens_of_two(base: list[str]) -> None:
    asked = [*base, "data=preferences", "data.files=[x.jsonl]", "objective=orpo", "trainer.max_steps=1280tokens"]
    assert compose_config([each for each in asked if each not in ("data=text", "data.files=text.txt")]).trainer.max_steps == 5


def test_shares_are_of_the_run_and_all_are_told(base: list[str]) -> None:
    shares = ["schedule.warmup_steps=5%", "trainer.val_every=12.5%", "checkpoint.every=100rows", "trainer.log_every=1%"]
    composition = compose([*base, "trainer.max_steps=400rows", *shares])
    values = flatten(composition.full())
    found = {key: values[key] for key in ("trainer.max_steps", "schedule.warmup_steps", "trainer.val_every", "checkpoint.every")}
    assert list(found.values()) == [100, 5, 13, 25]
    assert composition.config().trainer.log_every == 1
    assert composition.notes[-5:] == [
        "trainer.max_steps=100: 400rows",
        "schedule.warmup_steps=5: 5% of the run",
        "trainer.val_every=13: 12.5% of the run",
        "trainer.log_every=1: 1% of the run",
        "checkpoint.every=25: 100rows",
    ]


def test_a_warmup_of_a_file_ends_in_a_run_that_turns_out_short(base: list[str]) -> None:
    asked = [each for each in base if each != "debug=fast"]
    composition = compose([*asked, "recipes=finetune/tiny_on_text", "init_from=null", "trainer.max_steps=20rows"])
    assert composition.config().schedule.warmup_steps == 0
    assert any(note.startswith("schedule.warmup_steps=0: a tenth of the 5 steps") for note in composition.notes)
    with pytest.raises(ConfigError, match=r"warmup_steps=7 is not below trainer.max_steps=5"):
        compose_config([*asked, "trainer.max_steps=20rows", "schedule.warmup_steps=7"])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["trainer.max_steps=3epoks"], "trainer.max_steps: '3epoks' does not fit. Give steps such as 300, or 3epochs, 10Mtokens, 80krows."),
        (["trainer.max_steps=10%"], "trainer.max_steps: '10%' does not fit. Give steps such as 300, or 3epochs, 10Mtokens, 80krows."),
        (["trainer.val_every=-3%"], "80krows, or a share of the run such as 3%."),
        (["trainer.max_steps=0epochs"], "trainer.max_steps: 0 does not fit. The value must be greater than 0."),
        (["schedule.warmup_steps=3%", "trainer.max_minutes=1"], "that trainer.max_minutes leaves to the clock. Give steps."),
        (["trainer.max_steps=1epochs", "data.files=no.txt"], "no.txt"),
    ],
)
def test_what_cannot_be_counted_is_refused(base: list[str], asked: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config([*base, *asked])
    assert message in str(caught.value)


@pytest.mark.slow
def test_the_same_command_finds_its_run_and_more_epochs_go_on(base: list[str], lm: Lm) -> None:
    asked = ["train", *base, "data.train_rows=10", "schedule=constant", "trainer.val_every=1epochs"]
    code, out, err = lm(*asked, "trainer.max_steps=1epochs")
    assert code == 0, err
    assert "3 steps, 1.2 epochs" in out and "trainer.max_steps=3: 1epochs of 10 rows" in err
    code, out, err = lm(*asked, "trainer.max_steps=1epochs")
    assert code == 0 and "finished already at step 3; nothing to do" in out
    code, out, err = lm(*asked, "trainer.max_steps=2epochs")
    assert code == 0 and "resumes at step 3" in out and "5 steps, 2 epochs" in out


SOURCES = "[" + ",".join(f"{{name:{name},data:{{kind:text,files:text.txt}}}}" for name in "ab") + "]"


def test_entries_of_lists_are_counted(base: list[str]) -> None:
    """Also beside steps, in any order, and as shares of a run whose length is counted too."""
    mixed = [each for each in base if not each.startswith(("data=", "data.files"))] + ["data=mix", f"data.sources={SOURCES}"]
    phases = "data.phases=[{until_step:2,weights:{a:1}},{until_step:512tokens,weights:{b:1}},{until_step:80%,weights:{a:1}}]"
    composed = compose([*mixed, phases, "trainer.max_steps=1280tokens", "checkpoint.keep_steps=[50%,1,0]"])
    cfg = composed.full()
    assert [phase["until_step"] for phase in cfg["data"]["phases"]] == [2, 4, 8] and cfg["data"]["phases"][1]["weights"] == {"b": 1}
    assert cfg["trainer"]["max_steps"] == 10 and cfg["checkpoint"]["keep_steps"] == [5, 1, 0]
    assert "data.phases[2].until_step=8: 80% of the run" in composed.notes
    with pytest.raises(ConfigError, match=r"^data\.phases\[0\]\.until_step: '50x' does not fit\. Give steps such as 300, or"):
        compose([*mixed, "data.phases=[{until_step:50x,weights:{a:1}}]"]).full()
    with pytest.raises(ConfigError, match=r"^checkpoint\.keep_steps\[1\]: '200%' is more than the whole run\. Give 100% or less"):
        compose([*base, "checkpoint.keep_steps=[1,200%]"]).full()
    with pytest.raises(ConfigError, match=r"until_step is 5, 1, and must rise"):
        compose([*mixed, "trainer.max_steps=10", "data.phases=[{until_step:50%,weights:{a:1}},{until_step:1,weights:{b:1}}]"]).full()
