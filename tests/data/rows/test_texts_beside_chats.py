"""Sources of plain texts in a mixture with chats: SFT learns all of them."""

import json
from pathlib import Path

import pytest
import torch

from lm.cli.compose.compose import compose_config
from lm.data.rows.build import Splits, build_splits, split_rows
from lm.data.store.prepare import prepare
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.nn.batch import IGNORED
from lm.training.run import train_rank
from tests.training.conftest import TINY, read, results, settled

TEXTS = "{name:texts,weight:1,data:{kind:text,files:texts.jsonl}}"
CHATS = "{name:chats,weight:1,data:{kind:text,files:chats.jsonl,record:{kind:chat,template:chatml}}}"
MIX = ["data=mix", f"data.sources=[{TEXTS},{CHATS}]"]
OWN = [*(each for each in TINY if each != "data=text"), "data.val_rows=null", "run.dir=.", "data.cache_dir=cache"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    texts = [{"text": "def return import class self " * (1 + n % 9)} for n in range(60)]
    said = [(f"What is {n}?", f"{n} is {'one more ' * (n % 4)}than {n - 1}.") for n in range(80)]
    chats = [{"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]} for asked, told in said]
    for name, records in (("texts", texts), ("chats", chats)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def splits(tokenizer: Tokenizer | None, *more: str) -> tuple[Splits, Tokenizer]:
    cfg = compose_config(settled(*OWN, "tokenizer=bytes", "data.seq_len=64", *more))
    prepared = prepare(cfg.data, cfg.tokenizer if tokenizer is None else tokenizer, log=lambda line: None)
    return build_splits(cfg.objective, cfg.data, prepared, None, 0), prepared.tokenizer


@pytest.mark.parametrize("packing", ["fit", "none"])
@pytest.mark.parametrize("prompt_loss", [False, True])
def test_rows_are_those_of_each_alone(packing: str, prompt_loss: bool) -> None:
    how = ["objective=sft", f"objective.prompt_loss={prompt_loss}", f"data.packing={packing}"]
    both, tokenizer = splits(None, *MIX, *how)
    chats, _ = splits(tokenizer, "data=chat", "data.files=chats.jsonl", "data.record.template=chatml", *how)
    texts, _ = splits(tokenizer, "data=text", "data.files=texts.jsonl", "objective=causal")
    n, m = len(texts.val), len(chats.val)
    assert len(both.val) == n + m
    whole, of_texts, of_chats = (
        rows.batch(torch.arange(size).numpy()) for rows, size in ((both.val, n + m), (texts.val, n), (chats.val, m))
    )
    for name in ("tokens", "labels", "positions", "documents"):
        found, first, second = (getattr(batch, name) for batch in (whole, of_texts, of_chats))
        assert torch.equal(found[:n], first)
        assert torch.equal(found[n:, : second.shape[1]], second)
    assert (of_texts.labels != IGNORED).float().mean() > 0.9
    if prompt_loss:  # what is measured as an answer
        assert torch.equal(whole.answers[:n], of_texts.labels) and torch.equal(
            whole.answers[n:, : of_chats.labels.shape[1]], of_chats.answers
        )
    assert both.val.n_labels == texts.val.n_labels + chats.val.n_labels
    if packing == "none":
        assert whole.tokens.shape[1] == 64 and both.val.widths(torch.arange(n + m).numpy())[0][:n].tolist() == [65] * n


def test_few_texts_are_measured_in_a_row_that_is_padded(folder: Path) -> None:
    """As by lm eval, which trains on none of them."""
    (folder / "texts.jsonl").write_text('{"text": "a short one"}\n' * 2)
    (folder / "held.jsonl").write_text('{"text": "another"}\n')
    held = TEXTS.replace("files:texts.jsonl", "files:texts.jsonl,val_files:held.jsonl")
    cfg = compose_config(settled(*OWN, "tokenizer=bytes", "data.seq_len=64", "data=mix", f"data.sources=[{held},{CHATS}]", "objective=sft"))
    prepared = prepare(cfg.data, cfg.tokenizer, log=lambda line: None)
    [rows, *_] = split_rows(cfg.objective, cfg.data, prepared, ["val"], None, short=True)
    assert (rows.batch(torch.arange(1).numpy()).labels != IGNORED).sum() == len("another") + 1


@pytest.mark.slow
def test_a_run_on_both_is_stopped_and_goes_on_to_the_bit(folder: Path) -> None:
    def run(*more: str) -> None:
        train_rank(compose_config(settled(*OWN, *MIX, "objective=sft", "data.seq_len=64", "trainer.micro_batch=4", *more)))

    run("trainer.max_steps=6", "schedule=constant", "run.name=other")
    run("schedule=constant", "run.name=other")
    run("schedule=constant", "run.name=at_once")
    assert results(folder / "other")[0] == results(folder / "at_once")[0]
    last = read(folder / "other" / "metrics.jsonl")[-1]
    assert last["val_loss/texts"] > 0 and last["val_loss/chats"] > 0


@pytest.mark.parametrize(
    ("objective", "data", "said"),
    [
        (["objective=causal"], MIX, "Choose other data, objective=sft or "),
        (
            ["objective=gkd", "objective.teacher=large"],
            MIX,
            "objective=gkd learns from records, and data.sources texts are plain texts",
        ),
        (["objective=sft"], ["data=mix", f"data.sources=[{TEXTS}]"], "objective=sft needs records of the kind chat or recall"),
    ],
)
def test_other_objectives_do_without_texts(objective: list[str], data: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        compose_config(settled(*OWN, *data, *objective))
    assert said in str(raised.value)
