"""The functions of `import lm`: what the verbs of the command line call."""

import gc
import inspect
import json
import logging
import os
import re
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lm
from lm.errors import ConfigError, ResourceError
from lm.training.module import TrainModule
from tests.conftest import Lm, on_linux
from tests.training.conftest import TINY, settled, write_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("api")
    write_text(where / "text.txt")
    return where


def overrides(folder: Path, *more: str) -> list[str]:
    where = [f"data.files={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}", f"run.dir={folder}"]
    return [*TINY, *where, "trainer.max_steps=4", *more]


def test_every_function_is_documented_and_typed() -> None:
    functions = {name: getattr(lm, name) for name in lm.__all__ if inspect.isfunction(getattr(lm, name))}
    assert {"config", "train", "load", "generate", "evaluate", "export", "compare"} <= functions.keys()
    for name, function in functions.items():
        assert (function.__doc__ or "").count(".") >= 1, name
        signature = inspect.signature(function)
        assert signature.return_annotation is not signature.empty
        assert all(parameter.annotation is not parameter.empty for parameter in signature.parameters.values()), name


def test_a_config_is_that_of_the_shell_by_recipe_or_preset(lm: Lm) -> None:
    import lm as library

    assert lm("train", "recipes=ablation/ffn", "optim.lr=0.5", "--cfg", "job")[1]
    assert library.config("ablation/ffn", ["optim.lr=0.5"]).optim.lr == 0.5
    assert library.config("nano").model == library.config(overrides=["model=nano"]).model
    with pytest.raises(ConfigError, match=r"'nanoo' is neither a recipe nor a model preset\. Did you mean 'nano'"):
        library.config("nanoo")


def test_trains_loads_generates_evaluates_and_compares(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen to fail in a clone where `lm compare` had been run."""
    monkeypatch.chdir(folder)
    run = lm.train(lm.config(overrides=overrides(folder)))
    assert run.path == folder / "run" and run.summary()["steps"] == 4
    assert [line["step"] for line in run.metrics.read() if "loss" in line] == [1, 2, 3, 4]
    model, tokenizer = lm.load(run.model)
    assert isinstance(model.embed.weight, Tensor)
    assert lm.generate(model, tokenizer, "def ", max_tokens=3, seed=1) == lm.generate(model, tokenizer, "def ", max_tokens=3, seed=1)
    found = lm.evaluate(run.path)
    assert found["val_loss"] == pytest.approx(run.summary()["val_loss"], rel=1e-6)
    data = lm.config(overrides=overrides(folder)).data
    assert lm.evaluate((model, tokenizer), data) == lm.evaluate(run.path, data) == found
    with pytest.raises(ConfigError, match="in no run folder"):
        lm.evaluate((model, tokenizer))
    assert lm.evaluate(run) == found and lm.load(run)[0].cfg == model.cfg
    table = lm.compare([run.path, str(run.path)])
    assert f"{found['val_bits_per_byte']:.4f}" in table and not Path("compare").exists()
    capsys.readouterr()


@pytest.mark.parametrize("seq_len", [64, 200])
def test_a_text_shorter_than_a_row_can_be_evaluated(folder: Path, seq_len: int) -> None:
    """Seen to fail: refused, with the advice to give more text."""
    run = lm.train(lm.config(overrides=overrides(folder)))
    (folder / "poem.txt").write_text("Words that rhyme, from time to time.")
    more = settled(*overrides(folder, f"data.val_files={folder / 'poem.txt'}", f"data.seq_len={seq_len}"))
    found = lm.evaluate(run.path, lm.config(overrides=more).data)
    model, tokenizer = lm.load(run.model, device="cpu")
    ids = torch.tensor([tokenizer.document("Words that rhyme, from time to time.")])
    with torch.inference_mode():
        logp = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
    assert found["tokens"] == logp.numel() < 64 and found["val_loss"] == pytest.approx(-logp.mean().item(), abs=1e-5)


@pytest.mark.slow
def test_what_a_program_has_set_in_torch_is_nothing_of_the_run_and_stays(folder: Path) -> None:
    """Seen to fail: float64 trained to the end, to be written by nobody, and bfloat16 without a word; under autocast, which keeps its casts
    of the weights, no step after the first one changed what was computed; inference mode and a device were errors of torch."""
    weights = []
    for number, block in enumerate(
        [nullcontext(), torch.inference_mode(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.device("meta")]
    ):
        torch.set_default_dtype(torch.float64 if number else torch.float32)
        try:
            with block:
                before = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), torch.empty(0).device
                run = lm.train(lm.config(overrides=overrides(folder, f"run.name=set{number}")))
                after = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), torch.empty(0).device
            assert before == after and torch.get_default_dtype() == (torch.float64 if number else torch.float32)
        finally:
            torch.set_default_dtype(torch.float32)
        weights.append((run.model / "model.safetensors").read_bytes())
    assert weights[1:] == weights[:1] * 4


def test_a_default_device_of_the_program_is_none_of_a_model_on_another(folder: Path) -> None:
    """As after torch.set_default_device("mps") or "cuda". Seen to fail in each: tensors on two devices."""
    run = lm.train(lm.config(overrides=overrides(folder)))
    model, tokenizer = lm.load(run.model, device="cpu")
    said, found = lm.generate(model, tokenizer, "def ", max_tokens=3, seed=1), lm.evaluate(run.path)
    with torch.device("meta"):
        assert lm.generate(model, tokenizer, "def ", max_tokens=3, seed=1) == said and lm.evaluate(run.path) == found
        assert lm.build_model(model.cfg, seed=0).embed.weight.is_cpu
        ready, _ = lm.load(run.model, device="cpu", dtype="saved")
        lm.export(run.path, folder / "exported", check=False)
        lm.import_model(folder / "exported", folder / "imported")
    ids = torch.tensor([tokenizer.encode("def ")])
    assert torch.allclose(ready(ids), model(ids), atol=1e-5), "the order of what is fused is no tensor of that device"
    assert lm.generate(*lm.load(folder / "imported", device="cpu"), "def ", max_tokens=3, seed=1) == said


def test_an_export_within_autocast_computes_what_transformers_does(folder: Path) -> None:
    """Seen to fail: other logits by 0.016, as ours were of bfloat16, with the advice to report it."""
    run = lm.train(lm.config(overrides=overrides(folder)))
    with torch.autocast("cpu", torch.bfloat16):
        assert lm.export(run.path, folder / "cast").check is not None


def test_a_model_of_a_loop_of_ones_own_is_saved_and_loaded(folder: Path) -> None:
    cfg = lm.config(overrides=overrides(folder))
    data = lm.batches(cfg)
    model = lm.build_model(cfg.model.replace(vocab_size=data.tokenizer.vocab_size, max_seq_len=cfg.data.seq_len), seed=5)
    saved = lm.save(model, data.tokenizer, folder / "saved")
    loaded, tokenizer = lm.load(saved, device="cpu")
    weights = dict(model.named_parameters())
    assert loaded.cfg == model.cfg and tokenizer.hash == data.tokenizer.hash
    assert all(p.equal(weights[name]) for name, p in loaded.named_parameters())
    assert lm.evaluate(saved, cfg.data) == lm.evaluate((model, data.tokenizer), cfg.data)
    with pytest.raises(ConfigError, match="exists already"):
        lm.save(model, tokenizer, saved)
    with pytest.raises(ConfigError, match="its weights are not those of its config"):
        lm.save(lm.load(saved, device="cpu", dtype="saved")[0], tokenizer, folder / "other")
    with pytest.raises(ConfigError, match="model: OptimizedModule was given"):
        lm.save(torch.compile(model), tokenizer, folder / "other")
    loaded.__class__ = type("Mine", (type(loaded),), {})
    with pytest.raises(ConfigError, match=r"^model: Mine was put there, .* makes DecoderLM of them"):
        lm.save(loaded, tokenizer, folder / "other")
    loaded.__class__ = type(model)
    loaded.norm = torch.nn.LayerNorm(loaded.cfg.d_model, bias=False)
    with pytest.raises(ConfigError, match=r"model\.norm: LayerNorm was put there, .* makes RMSNorm of them"):
        lm.save(loaded, tokenizer, folder / "other")


@pytest.mark.slow
@on_linux
def test_a_training_leaves_the_process_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: each call of a notebook kept the model, the optimizer and five open files of the one before."""

    def left() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), sum(isinstance(held, TrainModule) for held in gc.get_objects())

    monkeypatch.setenv("SLURM_PROCID", "3")
    gc.collect()
    before, state = left(), torch.get_rng_state()
    for name in ("first", "second"):
        lm.train(lm.config(overrides=overrides(folder, f"run.name={name}")))
    assert left() == before and torch.equal(torch.get_rng_state(), state) and os.environ["SLURM_PROCID"] == "3"


@pytest.mark.parametrize("error", [ResourceError, RuntimeError, None])
def test_a_session_that_keeps_an_error_or_a_callback_keeps_no_model(folder: Path, error: type[Exception] | None) -> None:
    """Of an error that is no sentence the variables stay, for a debugger, up to the next training, if nobody keeps it. Seen to fail: each
    interrupted run left its model and optimizer on the GPU, beside those of all runs behind it."""
    from lightning import Callback

    class Watches(Callback):
        model: Any = None

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.model is None:
                self.model = weakref.ref(pl_module.model)
                if error is not None:
                    raise error("train: it ends here. Nothing helps.")
            self.left = self.model() not in (None, pl_module.model)

    callback, kept, name = Watches(), list[Exception](), "none" if error is None else error.__name__
    try:
        lm.train(lm.config(overrides=overrides(folder, f"run.name=of-{name}")), [callback])
    except ResourceError as caught:
        kept.append(caught)
    except RuntimeError:
        pass
    assert error is RuntimeError or callback.model() is None
    lm.train(lm.config(overrides=overrides(folder, f"run.name=behind-{name}")), [callback])
    assert not callback.left


def test_a_thread_may_train(folder: Path) -> None:
    """Seen to fail: signals can be handled in the main thread only."""
    with ThreadPoolExecutor() as pool:
        run = pool.submit(lm.train, lm.config(overrides=overrides(folder, "run.name=thread"))).result()
    assert run.summary() is not None


def test_a_trainer_of_ones_own_tells_what_it_does_behind_a_training(folder: Path) -> None:
    """Seen to fail: it was silent."""
    before = [logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero")]
    lm.train(lm.config(overrides=overrides(folder, "run.name=loud")))
    assert [logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero")] == before
    assert logging.ERROR not in before


def test_objects_cannot_follow_into_other_processes(folder: Path) -> None:
    from lightning import Callback

    with pytest.raises(ConfigError, match="callbacks: Callback cannot follow into the ranks of strategy=ddp"):
        lm.train(lm.config(overrides=overrides(folder, "strategy=ddp", "launch.devices=2")), [Callback()])


def test_eval_takes_data_objective_and_recipes_as_train_does(lm: Lm, folder: Path) -> None:
    import lm as library

    run = library.train(library.config(overrides=overrides(folder)))
    text = [f"data.files={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}"]

    def found(*args: str) -> dict[str, float]:
        code, out, err = lm("eval", f"from={run.path}", "format=json", *args)
        assert code == 0, err
        return dict(json.loads(out.splitlines()[-1]))

    own = found()
    assert found("data.val_rows=1")["tokens"] < own["tokens"]  # of the run's own data
    assert found("data=text", *text, "data.seq_len=32", "data.val_rows=8") == own
    assert found("data=text", *text, "data.seq_len=16")["tokens"] > 0
    assert found("objective=causal") == own
    wrong = {"data=txt": "Did you mean 'text'?", "optim.lr=1": "optim.lr: lm eval has no such key", "-m": "only lm train runs sweeps"}
    for given, words in wrong.items():
        code, _, err = lm("eval", f"from={run.path}", given)
        assert code == 2 and words in err.splitlines()[-1], err


def test_a_config_is_named_by_preset_recipe_or_overrides() -> None:
    assert lm.config("tiny") == lm.config(["model=tiny"]) == lm.config("model=tiny")
    assert lm.config("ablation/ffn").run.name == "ablation-ffn"
    assert lm.config(["seed=1"], ["optim.lr=0.5"]).optim.lr == 0.5


@pytest.mark.parametrize(
    ("slot", "kinds"), [("norm", ["rms", "layer"]), ("position", ["rope", "alibi"]), ("attention", ["gqa"]), ("ffn", ["mlp"])]
)
def test_a_config_that_lacks_a_slot_says_which_kinds_there_are(slot: str, kinds: list[str]) -> None:
    given = {"norm": {"kind": "rms"}, "position": {"kind": "rope"}, "attention": {"kind": "gqa", "n_heads": 4}, "ffn": {"kind": "mlp"}}
    sizes = {"vocab_size": 256, "max_seq_len": 64, "d_model": 64, "n_layers": 2}
    lm.build_model(lm.DecoderConfig(**sizes, **given), device="meta")
    with pytest.raises(ConfigError) as error:
        lm.DecoderConfig(**sizes, **{name: value for name, value in given.items() if name != slot})
    assert str(error.value).startswith(f"{slot}: a value is missing. Set its kind, one of ")
    assert all(kind in str(error.value) for kind in kinds)
    with pytest.raises(ConfigError, match=rf"^{slot}\.kind: 'none of these' is not an option"):
        lm.DecoderConfig(**sizes, **{**given, slot: {"kind": "none of these"}})
    with pytest.raises(ConfigError, match=r"^d_model: a number of 71 bits"):
        lm.DecoderConfig(**{**sizes, "d_model": 2**70}, **given)


def test_what_a_function_does_not_know_is_refused_in_one_sentence(folder: Path) -> None:
    calls: dict[str, Callable[[], object]] = {
        "split='vall' is not an option. Did you mean 'val'?": lambda: lm.evaluate(folder, split="vall"),
        "micro_batch=0: rows are read": lambda: lm.evaluate(folder, micro_batch=0),
        "format='htm' is not an option.": lambda: lm.compare(folder, format="htm"),
        "x='stp' is not an option. Did you mean 'step'?": lambda: lm.compare(folder, x="stp"),
        "format='onnx': export writes hf and gguf": lambda: lm.export(folder, "out", format="onnx"),
        "mtp='kep' is not an option. Did you mean 'keep'?": lambda: lm.export(folder, "out", mtp="kep"),
    }
    for said, call in calls.items():
        with pytest.raises(ConfigError, match=re.escape(said)):
            call()


def test_eval_draws_masks_as_the_run_did(lm: Lm, folder: Path) -> None:
    import lm as library

    more = [
        "objective=mlm",
        "model=bert_tiny",
        "model.d_model=16",
        "model.n_layers=1",
        "model.attention.n_heads=2",
        "seed=3",
        "run.name=masks",
    ]
    run = library.train(library.config(overrides=overrides(folder, *more)))
    found = json.loads(lm("eval", f"from={run.path}", "format=json")[1].splitlines()[-1])
    assert found["val_loss"] == pytest.approx(run.summary()["val_loss"], rel=1e-5)
    other = library.evaluate(run.path, library.config(overrides=overrides(folder, *more)).data, seed=4)
    assert other["val_loss"] != pytest.approx(found["val_loss"], rel=1e-5)


def test_a_model_without_sizes_is_refused_in_one_sentence() -> None:
    import lm as library

    with pytest.raises(ConfigError, match="vocab_size and max_seq_len are not set"):
        library.build_model(library.config("tiny").model)


UNTYPED: Any = lm  # as a program has it that no type checker reads


def a_model() -> Any:
    return lm.build_model(lm.config("nano").model.sized(64, 8))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: UNTYPED.train({}), "train: dict is no config of a run. Write lm.train(lm.config("),
        (lambda: lm.config(overrides="debug=fast"), "overrides: 'debug=fast' is one text. Give a list, ['debug=fast']."),
        (lambda: UNTYPED.config("nano", {"optim.lr": 1}), "overrides: dict was given. Give a list, such as ['optim.lr=0.01']."),
        (lambda: UNTYPED.batches(["a"]), "cfg: list was given. Give what lm.config returned."),
        (lambda: UNTYPED.evaluate("runs/a", ["data=text"]), "data: list was given. Give lm.config(overrides=["),
        (
            lambda: UNTYPED.generate(a_model(), "x", "y"),
            "tokenizer: str was given. Give the model and the tokenizer that lm.load returned.",
        ),
        (lambda: UNTYPED.export(a_model(), "zz"), "model: DecoderLM was given. Give the folder of the run or model."),
        (lambda: UNTYPED.export("runs/a", None), "out: NoneType was given. Give the folder to write."),
        (lambda: a_model()(torch.zeros(1, 2)), "batch: tokens of torch.float32 were given, and ids are int64 or int32. Give ids.long()."),
        (
            lambda: a_model()(torch.tensor([[0, 64, 9]])),
            "batch: token 64 is not below vocab_size=64. Give ids of the model's own tokenizer.",
        ),
        (lambda: a_model()(torch.tensor([[0, -100]])), "batch: token -100 is negative. Give ids of the model's own tokenizer."),
        (lambda: a_model()("abc"), "batch: str was given. Give a Batch, or a tensor of token ids of shape (rows, tokens)."),
        (lambda: UNTYPED.evaluate(a_model()), "model: DecoderLM comes without a tokenizer."),
        (lambda: UNTYPED.evaluate((a_model(),)), "model: NoneType was given. Give a folder, or the pair of model and tokenizer"),
        (lambda: UNTYPED.evaluate("runs/a", lm.config("nano")), "data: TrainConfig was given. Give lm.config("),
        (lambda: UNTYPED.evaluate("runs/a", None, lm.config("nano")), "objective: TrainConfig was given. Give lm.config("),
        (lambda: UNTYPED.evaluate("runs/a", wanted={"seq_len": [8]}), "wanted: dict was given. Give lm.config("),
        (lambda: UNTYPED.evaluate("runs/a", micro_batch="8"), "micro_batch: str was given. Give a whole number of rows."),
        (lambda: UNTYPED.config(Path("nano")), "name: PosixPath was given. Give a recipe or a model preset, such as 'nano'"),
        (lambda: UNTYPED.config("nano", [5]), "overrides: int was given. Each is a text, such as 'optim.lr=0.01'."),
        (lambda: UNTYPED.build_model(lm.config("nano")), "cfg: TrainConfig was given. Give that of a model, such as lm.config("),
        (lambda: UNTYPED.train(lm.config("nano"), 5), "callbacks: int was given. Give a list of Lightning callbacks."),
        (lambda: UNTYPED.compare(None), "runs: NoneType was given. Give the folder of a run, or a list of several."),
        (lambda: UNTYPED.compare([None]), "runs: NoneType was given. Each is the folder of a run."),
        (lambda: UNTYPED.compare("runs/a", 5), "out: int was given. Give a folder or a file to write."),
        (lambda: UNTYPED.import_model("runs/a", None), "out: NoneType was given. Give the folder to write."),
        (lambda: UNTYPED.import_model(None, "zz"), "source: NoneType was given. Give the folder of a model, or its owner/name"),
        (lambda: UNTYPED.export("runs/a", "zz", overwrite="false"), "overwrite: str was given. Give True or False."),
        (
            lambda: a_model()(torch.tensor([1, 2])),
            "batch: a tensor of shape (2,) was given. Give token ids of shape (rows, tokens): of one row ids.unsqueeze(0).",
        ),
    ],
)
def test_arguments_of_another_kind_are_refused_in_one_sentence(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        call()
