"""`lm show`: the tree of a model and its figures, without weights, data or tokenizer."""

import re

import pytest

from tests.cli.conftest import Lm


def sizes(out: str, depth: int) -> list[int]:
    """Parameters of the rows at this depth, repeated ones as often as they are there."""
    tree = out.split("\n\n")[0].splitlines()
    rows = [re.split(r" {2,}", line.strip()) for line in tree if len(line) - len(line.lstrip()) == 2 * depth]
    numbers = [row[-1].replace(",", "").split(" x ") for row in rows]
    return [int(number[0]) * int(number[-1]) if len(number) == 2 else int(number[0]) for number in numbers]


def test_mixtral_has_the_figures_of_its_paper(lm: Lm) -> None:
    code, out, err = lm("show", "model=mixtral_8x7b")
    assert (code, err) == (0, "")
    assert "parameters  46,702,792,704; 12,879,925,248 for one token" in out  # arXiv:2401.04088: 47 B and 13 B
    assert f"cache       {2 * 32 * 2 * 8 * 128:,} bytes per token" in out
    assert "32 x 1,451,270,144" in out
    assert "blocks.1" not in out


@pytest.mark.parametrize("preset", ["t5_small", "bert_base", "bart_base", "switch_base_8", "deepseek_v3", "gpt_oss_20b", "gpt2"])
def test_the_rows_of_the_tree_add_up(lm: Lm, preset: str) -> None:
    _, out, _ = lm("show", f"model={preset}")
    [total] = sizes(out, 0)
    assert total > 1e7
    assert sum(sizes(out, 1)) == total


@pytest.mark.parametrize(
    ("args", "labels"),
    [
        (["model=deepseek_v3"], ["blocks.0-2", "blocks.3-60"]),
        (["model=gemma2_2b"], ["blocks.0,2..24", "blocks.1,3..25"]),
        (["model=switch_base_8"], ["blocks.0,2..10", "blocks.1,3..11"] * 2),
        (["model=deepseek_v3", "model.ahead.depth=1"], ["blocks.0-2", "blocks.3-60", "ahead.0"]),
        (["model=tiny", "model.n_layers=1"], ["blocks.0"]),
    ],
)
def test_equal_blocks_are_one_row(lm: Lm, args: list[str], labels: list[str]) -> None:
    _, out, _ = lm("show", *args)
    assert re.findall(r"^ +((?:blocks|ahead)\S+)", out, re.MULTILINE) == labels


def test_sizes_that_nothing_states_are_said_to_be_assumed(lm: Lm) -> None:
    _, out, _ = lm("show", "model=gpt2", "tokenizer=bytes", "data.seq_len=128")
    assert "vocabulary  320, from tokenizer=bytes" in out
    assert "positions   128, from data.seq_len" in out
    _, out, _ = lm("show", "model=gpt2", "tokenizer=file", "model.vocab_size=50257", "model.max_seq_len=1024")
    assert "parameters  124,439,808;" in out
    assert "vocabulary" not in out


def test_memory_follows_the_trainer(lm: Lm) -> None:
    def rows(*args: str) -> dict[str, str]:
        lines = lm("show", "model=llama3_8b", *args)[1].split("\n\n")[-1].splitlines()[1:]
        return dict(line.strip().split(maxsplit=1) for line in lines)

    plain, other = rows("optim=adamw"), rows("optim=sgd", "trainer.precision=bf16-true", "trainer.micro_batch=4")
    assert plain["weights"].split() == plain["gradients"].split() == [f"{8_030_261_248 * 4 / 2**30:.2f}", "GiB"]
    assert other["weights"].split()[0] == f"{8_030_261_248 * 2 / 2**30:.2f}"
    assert other["optimizer"].split() == ["0.00", "MiB"]
    assert float(plain["activations"].split()[0]) == pytest.approx(4 * float(other["activations"].split()[0]), rel=0.01)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["model=mixtrl"], "Did you mean 'mixtral_8x7b'?"),
        (["model=mixtral_8x7b", "model.ffn.top_k=9"], "model.ffn: top_k=9 is over n_experts=8"),
        (["model=bert_base", "data.seq_len=1024"], "data.seq_len=1024 is over model.max_seq_len=512"),
        (["model=gpt2", "tokenizer=file", "tokenizer.path=x.json"], "Set model.vocab_size"),
        (["model=gpt2,tiny", "-m"], "one model at a time"),
    ],
)
def test_mistakes_meet_one_sentence(lm: Lm, args: list[str], expected: str) -> None:
    code, out, err = lm("show", *args)
    assert (code, out) == (2, "")
    assert expected in err.splitlines()[-1]
