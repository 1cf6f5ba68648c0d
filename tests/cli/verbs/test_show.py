"""`lm show`: the tree of a model and its figures, without weights, data or tokenizer."""

import re
from pathlib import Path

import pytest

from lm.cli.compose.compose import compose
from lm.data.kinds import BytesConfig
from lm.schema import Tree
from lm.storage.model_folder import save_model
from lm.storage.run_folder import RunFolder
from lm.training.plan import estimate
from tests.conftest import Lm
from tests.nn.models import NORMS, config, redrawn
from tests.runs import older


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


@pytest.mark.parametrize(("model", "windowed"), [("mistral_7b", True), ("llama3_8b", False)])
def test_a_window_is_told_of_where_there_is_one(lm: Lm, model: str, windowed: bool) -> None:
    assert ("until a sliding window is full" in lm("show", f"model={model}")[1]) == windowed


def test_layers_that_run_again_are_told_of(lm: Lm) -> None:
    again = "passes      a token goes through the layers 3 times"
    assert again in lm("show", "model=nano", "model/residual=loop", "model.residual.times=3")[1]
    assert "passes" not in lm("show", "model=nano")[1]


def test_a_trained_model_is_shown_from_its_folder(lm: Lm, tmp_path: Path) -> None:
    model = redrawn(config())
    save_model(tmp_path / "runs" / "x" / "model", model.cfg.tree(), dict(model.named_parameters()), BytesConfig().build().save, {})
    code, out, err = lm("show", "from=runs/x", "data.seq_len=32", "optim=adamw")
    assert (code, err) == (0, "")
    assert f"parameters  {sum(p.numel() for p in model.parameters()):,}" in out


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_models_of_every_norm_are_shown(lm: Lm, norm: Tree) -> None:
    """Seen to fail: layer norms without a weight, as in OLMo 1, ended in a traceback."""
    options = [f"model.norm.{key}={str(value).lower()}" for key, value in norm.items() if key != "kind"]
    code, out, err = lm("show", "model=llama_tiny", f"model/norm={norm['kind']}", *options)
    assert (code, err) == (0, "") and "blocks.0" in out
    assert ("Norm 384" in out) == norm.get("weight", True)


def test_rows_and_optimizer_of_a_run_are_those_that_it_was_trained_with(lm: Lm, tmp_path: Path) -> None:
    model = redrawn(config())
    run = RunFolder(tmp_path / "runs" / "x")
    run.write_config(compose(["optim=sgd", "data.seq_len=16", "data.global_batch=6", "trainer.micro_batch=3"]).config().tree())
    save_model(run.model, model.cfg.tree(), dict(model.named_parameters()), BytesConfig().build().save, {})
    assert "of a step of 3 x 16 tokens in fp32 with sgd" in lm("show", "from=runs/x")[1]
    assert (
        "of a step of 2 x 8 tokens in fp32 with adamw"
        in lm("show", "from=runs/x", "data.seq_len=8", "trainer.micro_batch=2", "optim=adamw")[1]
    )


def test_a_run_that_was_begun_with_another_name_of_a_key_is_shown_as_it_is_now(lm: Lm, tmp_path: Path) -> None:
    model, cfg = redrawn(config()), compose([AGAIN, HALF]).config().tree()
    run = RunFolder(tmp_path / "runs" / "x")
    save_model(run.model, model.cfg.tree(), dict(model.named_parameters()), BytesConfig().build().save, {})
    run.write_config(cfg)
    now = lm("show", "from=runs/x")
    run.write_config(older(cfg))
    assert now[0] == 0 and lm("show", "from=runs/x") == now
    run.write_config(compose([]).config().tree())
    assert lm("show", "from=runs/x")[1] != now[1]


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
        (["model=deepseek_v3", "model.mtp.depth=1"], ["blocks.0-2", "blocks.3-60", "mtp.0"]),
        (["model=tiny", "model.n_layers=1"], ["blocks.0"]),
    ],
)
def test_equal_blocks_are_one_row(lm: Lm, args: list[str], labels: list[str]) -> None:
    _, out, _ = lm("show", *args)
    assert re.findall(r"^ +((?:blocks|mtp)\S+)", out, re.MULTILINE) == labels


def test_sizes_that_nothing_states_are_said_to_be_assumed(lm: Lm) -> None:
    _, out, _ = lm("show", "model=gpt2", "tokenizer=bytes", "data.seq_len=128")
    assert "vocabulary  320, from tokenizer=bytes" in out
    assert "positions   128, from data.seq_len" in out
    _, out, _ = lm("show", "model=gpt2", "tokenizer=file", "model.vocab_size=50257", "model.max_seq_len=1024")
    assert "parameters  124,439,808;" in out
    assert "vocabulary" not in out


LLAMA, BLOCK, WIDTH = 8_030_261_248, 218_112_000, 4096  # parameters in all and of a block; d_model
AGAIN, HALF, RENDEZVOUS = "trainer.recompute=block", "trainer.recompute_every=2", "launch.rendezvous=a:1"


def memory_rows(lm: Lm, *args: str) -> dict[str, float]:
    """MiB, as printed."""
    given = [] if any(arg.startswith("trainer.micro_batch=") for arg in args) else ["trainer.micro_batch=1"]
    code, out, err = lm("show", "model=llama3_8b", *given, *args)
    left = [line for line in err.splitlines() if "left out optim.embed_lr=0.05" not in line]  # the default recipe's, of another optimizer
    assert (code, left) == (0, [])
    rows = [line.split() for line in out.split("\n\n")[-2].splitlines()[1:]]
    return {row[0]: float(row[1].replace(",", "")) * (1024 if row[2] == "GiB" else 1) for row in rows}


def mib(n: float) -> object:
    """Bytes, as closely as they are printed."""
    return pytest.approx(n / 2**20, abs=0.006 * (1024 if n >= 2**30 else 1))


def test_memory_follows_the_trainer(lm: Lm) -> None:
    plain, other = memory_rows(lm, "optim=adamw"), memory_rows(lm, "optim=sgd", "trainer.precision=bf16-true", "trainer.micro_batch=4")
    assert plain["weights"] == plain["gradients"] == mib(LLAMA * 4)
    assert other["weights"] == mib(LLAMA * 2)
    assert other["optimizer"] == 0
    assert other["activations"] == pytest.approx(4 / 2 * plain["activations"], rel=0.01)


def test_memory_is_that_of_one_rank(lm: Lm) -> None:
    whole, ddp, sliced = (
        memory_rows(lm, "optim=adamw", *spread)
        for spread in ([], ["strategy=ddp", "launch.devices=8"], ["strategy=fsdp", "launch.devices=4", "launch.nodes=2", RENDEZVOUS])
    )
    assert whole == ddp
    assert sliced["weights"] == mib(LLAMA * 4 / 8 + (LLAMA - 31 * BLOCK) * 4)  # a slice, and whole what lies outside of the other blocks
    assert (sliced["gradients"], sliced["optimizer"]) == (mib(LLAMA * 4 / 8), mib(LLAMA * 8 / 8))
    assert (sliced["activations"], sliced["loss"]) == (whole["activations"], whole["loss"])


def test_rows_of_a_micro_batch_are_those_that_training_takes(lm: Lm) -> None:
    def heading(*args: str) -> str:
        return next(line for line in lm("show", "model=llama3_8b", *args)[1].splitlines() if line.startswith("memory"))

    assert "step of 6 x 256 tokens in fp32" in heading("data.global_batch=12", "trainer.micro_batch=8")  # 2 x 6, for 8 does not divide 12
    spread = heading("data.global_batch=12", "trainer.micro_batch=8", "optim=adamw", "strategy=zero1", "launch.devices=3")
    assert spread == "memory of the tensors of a step of 4 x 256 tokens in fp32 with adamw, on each of 3 ranks with zero1"


def test_the_two_memories_of_show_and_train_are_told_apart(lm: Lm) -> None:
    said = " ".join(lm("show")[1].split("\n\n")[-1].split())
    assert said.startswith("These are tensors alone. The column `memory` of a training has more: the peak of the whole process")


def test_checkpointed_blocks_take_less_memory(lm: Lm) -> None:
    plain, all_blocks, half = (memory_rows(lm, *every)["activations"] for every in ([], [AGAIN], [AGAIN, HALF]))
    inputs = 256 * WIDTH * 4  # of a block, or of the last norm
    one = (plain * 2**20 - 3 * inputs) / 32
    expected = [34 * inputs + one, 18 * inputs + 17 * one]  # three inputs beside those of blocks; one block is computed again at a time
    assert [all_blocks, half] == [pytest.approx(n / 2**20, rel=0.005) for n in expected]


def test_an_offloaded_optimizer_is_not_in_the_total(lm: Lm) -> None:
    spread = ["optim=adamw", "launch.devices=8"]
    here, there = memory_rows(lm, *spread, "strategy=zero3"), memory_rows(lm, *spread, "strategy=zero3_offload")
    assert there["total"] == pytest.approx(here["total"] - here["optimizer"], abs=21)
    assert there | {"total": 0.0} == here | {"total": 0.0}


def test_show_and_the_check_before_a_run_estimate_the_same(lm: Lm) -> None:
    args = ["optim=adamw", "strategy=zero2", "launch.devices=2", AGAIN, HALF, "trainer.precision=bf16-mixed"]
    cfg = compose(["model=llama3_8b", "trainer.micro_batch=1", *args]).config()
    assert memory_rows(lm, *args)["total"] == mib(estimate(cfg, cfg.model).total)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["model=mixtrl"], "Did you mean 'mixtral_8x7b'?"),
        (["model=mixtral_8x7b", "model.ffn.top_k=9"], "model.ffn: top_k=9 is over n_experts=8"),
        (["model=bert_base", "data.seq_len=1024"], "data.seq_len=1024 is over model.max_seq_len=512"),
        (["model=gpt2", "tokenizer=file", "tokenizer.path=x.json"], "Set model.vocab_size"),
        (["model=gpt2,tiny", "-m"], "only lm train runs sweeps"),
        (["launch.devices=8"], "strategy=single: this is one process, and launch asks for 8"),
        (["strategy=zero3", "launch.devices=8"], "optim=muon works on whole matrices"),
        (["strategy=ddp", "launch.devices=3"], "data.global_batch=8 is not a multiple of the 3 ranks"),
    ],
)
def test_mistakes_meet_one_sentence(lm: Lm, args: list[str], expected: str) -> None:
    code, out, err = lm("show", *args)
    assert (code, out) == (2, "")
    assert expected in err.splitlines()[-1]


@pytest.mark.slow
def test_a_base_in_fewer_bits_takes_the_memory_that_training_gives_it(lm: Lm) -> None:
    """Seen to fail: show told 4 bytes of each of its weights. All of them are counted, also those of which two share a byte."""

    def weights(base: str) -> float:
        out = lm("show", "model=llama3_2_1b", "adapter=lora", f"adapter.base={base}")[1]
        assert "trained     5,636,096 of 1,241,450,496 parameters" in out
        [found] = re.findall(r"^  weights +([\d.]+) GiB$", out, re.MULTILINE)
        return float(found)

    shares = {base: weights(base) / weights("saved") for base in ("bf16", "int8", "nf4")}
    assert shares == pytest.approx({"bf16": 0.61, "int8": 0.41, "nf4": 0.31}, abs=0.015)


def test_lengths_that_only_data_tell_do_not_matter(lm: Lm) -> None:
    """Seen to fail: `'2epochs' does not fit`."""
    plain, shares = ["show", "model=nano"], ["trainer.max_steps=2epochs", "trainer.val_every=10%", "trainer.log_every=1rows"]
    assert lm(*plain, *shares) == lm(*plain)
