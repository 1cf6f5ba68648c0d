"""`lm train plan=true`: what a run takes, from its config alone."""

import math
import re
from pathlib import Path

import pytest

import lm
from lm.errors import ConfigError
from lm.training.plan import step_law
from lm.units import duration
from tests.conftest import Lm

GPT2 = ["recipes=pretrain/gpt2_124m", "plan=true"]  # its data are of the hub, its device is a GPU: neither is asked for


def test_the_plan_of_a_published_run_multiplies_out_and_leaves_nothing(lm: Lm, tmp_path: Path) -> None:
    """Seen to fail with the FLOPs of a forward alone."""
    code, out, err = lm("train", *GPT2, "strategy=ddp", "launch.devices=8", "budget.gpu=H100", "budget.mfu=0.5", "budget.price=3")
    assert (code, err, list(tmp_path.iterdir())) == (0, "", [])
    assert "plan: 124,475,904 parameters; 9,999,745,024 tokens in 19,073 steps are 80.3 a parameter (Chinchilla: 20)" in out
    matrices = 12 * 12 * 768**2 + 768 * 50304
    flops = 3 * (2 * matrices + 12 * 4 * 1024 * 768) * 9_999_745_024  # of scores both products, as Chowdhery et al. count them
    hours = flops / 989e12 / 0.5 / 3600
    assert f"{flops / 1e18:.2f} EFLOPs take {duration(hours / 8 * 3600)} on 8 x H100 at 50% of 989 TFLOP/s, " in out
    price = re.search(r"([\d.]+)  ?GPU-hours at 3: ([\d.]+);", out)
    assert price and float(price[1]) == pytest.approx(hours, rel=0.005) and float(price[2]) == pytest.approx(3 * hours, abs=0.01)


def test_a_group_that_matches_no_weight_is_refused_by_the_plan_as_by_the_run(lm: Lm) -> None:
    code, _, err = lm("train", "plan=true", "model=nano", "optim.groups=[{match:emded,lr:0.1}]")
    assert code == 2 and "optim.groups: no weight that is trained has a name like 'emded'. Near are embed.weight" in err


def test_a_plan_counts_as_show_does(lm: Lm) -> None:
    args = ["model=llama3_8b", "data.seq_len=4096", "strategy=fsdp", "launch.devices=8", "trainer.precision=bf16-mixed", "optim=adamw"]
    shown, planned = lm("show", *args)[1], lm("train", *args, "plan=true")[1]
    rows = re.findall(r"^ *(weights|gradients|optimizer|activations|loss) +([\d.,]+ [GM]iB)$", shown, re.MULTILINE)
    assert len(rows) == 5 and all(f"{name} {size}" in planned for name, size in rows)
    total = re.search(r"^ *total +([\d.,]+ [GM]iB)", shown, re.MULTILINE)
    assert total and f"by formula each of 8 ranks' tensors take {total[1]} (" in planned


def test_without_a_gpu_nothing_is_said_of_time_and_of_money(lm: Lm) -> None:
    out = lm("train", "plan=true", "trainer.device=cpu")[1]
    assert "FLOPs; budget.gpu=H100, say, tells in what time" in out and " at " not in out and "GPU-hour" not in out


def test_a_clock_ends_the_planned_run_too(lm: Lm) -> None:
    out = lm("train", *GPT2, "budget.gpu=A100", "trainer.max_minutes=60", "schedule=wsd")[1]
    assert "take 60 min" in out.replace("1 h 00 min", "60 min") and "19,073 steps" not in out
    longer = lm("train", *GPT2, "budget.gpu=A100", "trainer.max_minutes=60", "schedule=wsd", "trainer.max_steps=1000000000")[1]
    assert longer.splitlines() == out.splitlines()  # the law of rate and batch is told for as many tokens too


def test_a_plan_says_where_the_gpu_cannot_hold_the_step(lm: Lm) -> None:
    """Seen to fail: 831 GiB on H100s passed in silence."""
    args = ["model=llama3_2_1b", "data.seq_len=2048", "trainer.precision=bf16-mixed", "optim=adamw", "plan=true"]
    told = {gpu: lm("train", *args, f"budget.gpu={gpu}", "trainer.micro_batch=4")[1] for gpu in ("4090", "H100")}
    total = re.search(r"tensors take ([\d.]+ GiB) ", told["4090"])
    assert total and f"plan: that is more than the 24 GiB of one 4090 ({total[1]}): a smaller trainer.micro_batch" in told["4090"]
    assert "that is more than" not in told["H100"]


def test_a_plan_knows_what_is_frozen(lm: Lm) -> None:
    """Seen to fail with nothing frozen."""
    sizes = re.compile(r"weights ([\d.]+) MiB, gradients ([\d.]+) MiB, optimizer ([\d.]+) MiB")
    whole, frozen = (sizes.findall(lm("train", "plan=true", *more)[1]) for more in ([], ["trainer.freeze=[embed.*]"]))
    weights, gradients, optimizer = map(float, *whole)
    embedding = 4096 * 256 * 4 / 2**20
    assert [float(size) for size in frozen[0]] == pytest.approx([weights, gradients - embedding, optimizer - 2 * embedding], abs=0.02)


def test_a_plan_says_what_multiplies_float8_and_refuses_where_nothing_would(lm: Lm) -> None:
    float8 = ["plan=true", "trainer.float8=true", "trainer.precision=bf16-mixed"]
    code, out, _ = lm("train", "recipes=pretrain/gpt2_124m", *float8)
    assert code == 0 and "plan: 72 of 72 linear layers in blocks multiply float8; " in out
    narrow = ["model=tiny", "model.d_model=72", "model.attention.n_heads=3", "model.attention.n_kv_heads=3", "model.ffn.hidden=200"]
    code, _, err = lm("train", *float8, *narrow)
    assert code == 2 and err.startswith("trainer.float8=true: no linear layer of a block has widths that are multiples of 16.")


def test_the_law_of_rate_and_batch() -> None:
    """Its figures by logarithms; and what it says of twice the parameters, twice the tokens."""
    lr, batch = step_law(10**9, 10**11)
    assert math.log10(lr) == pytest.approx(math.log10(1.79) - 0.713 * 9 + 0.307 * 11)
    assert math.log10(batch) == pytest.approx(math.log10(0.58) + 0.571 * 11)
    assert step_law(2 * 10**9, 10**11) == (pytest.approx(lr * 0.61, rel=0.001), batch)
    assert step_law(10**9, 2 * 10**11)[1] == pytest.approx(batch * 1.4856, rel=0.001)


def test_the_law_is_of_models_that_begin_anew(lm: Lm, tmp_path: Path) -> None:
    out = lm("train", *GPT2)[1]
    lr, batch = step_law(124_475_904 - 50304 * 768 - 1024 * 768, 9_999_745_024)
    assert f"a peak rate of {lr:.2g} and {batch / 1000:.0f} k tokens a step are the step law's" in out
    assert "here optim=adamw has 0.0006, and a step 524 k" in out


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["budget.price=2"], "budget is what a plan reckons with, and this is none. Write plan=true as well, or leave it out."),
        (["plan=true", "budget.gpu=H900"], "gpu=H900 has no known peak. Choose one of B200, GH200, "),
        (["plan=true", "budget.mfu=1.5"], "budget.mfu"),
        (["plan=true", "tokenizer=file", "tokenizer.path=no.json"], "no.json"),
    ],
)
def test_each_mistake_is_one_sentence(lm: Lm, args: list[str], expected: str) -> None:
    code, out, err = lm("train", *args)
    assert (code, out) == (2, "") and expected in err and "Traceback" not in err


def test_a_plan_is_not_trained_from_python_either() -> None:
    with pytest.raises(ConfigError, match="plan=true: a run that is only planned is not trained"):
        lm.train(lm.config("pretrain/tiny", ["plan=true"]))


def test_a_preset_for_another_tokenizer_is_told(lm: Lm) -> None:
    said = "plan: model.vocab_size=128256, and the tokenizer has 259 tokens: no step uses the other rows. null takes as many\n"
    assert said in lm("train", "model=llama3_8b", "model.n_layers=1", "tokenizer=bytes", "plan=true")[1]
    assert (
        "no step uses" not in lm("train", "model=llama3_8b", "model.n_layers=1", "tokenizer=bytes", "model.vocab_size=null", "plan=true")[1]
    )


def test_a_gpu_may_be_named_in_any_case(lm: Lm) -> None:
    assert " on 1 x h100 at 40% of 989 TFLOP/s" in lm("train", "model=nano", "plan=true", "budget.gpu=h100")[1]
