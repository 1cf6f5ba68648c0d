"""A model on data: what `lm eval` prints and `lm.evaluate` returns."""

import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Literal, NotRequired, Self, cast

import torch
from pydantic import Field
from torch import nn

from lm import plugins
from lm.adapters.adapter import round_beside
from lm.data.kinds import DataConfig, ObjectiveConfig
from lm.data.order import spread
from lm.data.rows.base import usual
from lm.data.rows.build import split_rows
from lm.data.rows.policy import PolicyConfig
from lm.data.sources.base import SPLITS
from lm.data.sources.fingerprint import changed_files
from lm.data.store.prepare import prepare
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import CheckpointError, ConfigError, NumericsError, expect
from lm.generation.config import Dtype, EvalConfig, why_no_places
from lm.generation.evaluate import Evaluation, Evaluator
from lm.generation.further import by_source, further
from lm.generation.growing import grown_model
from lm.generation.load import load
from lm.generation.rollouts import held_out_rewards
from lm.generation.teacher import require_teacher
from lm.losses.measure import Start
from lm.nn.model_config import ModelConfig
from lm.nn.transformer import LM
from lm.ops.defaults import device_unset
from lm.schema import Config, Tree, from_tree
from lm.spelling import did_you_mean
from lm.storage.adapted import Adapted, near, place, placed
from lm.storage.checkpoint import checkpoints, read_meta
from lm.storage.model_folder import folder_hash, number_bytes, read_config, resolve_model
from lm.storage.run_folder import RunFolder
from lm.units import counted

Split = Literal["val", "train", "test", "all"]


class Examination(Evaluation):
    """An `Evaluation`, and `zlib_bits_per_byte`: of the validation text under zlib at level 9, where bits are told and no other split was
    read; `reliability`: how often the likeliest token is right, by its probability; `loss_by_place`: the loss at the places 0, 1, 2-3, 4-7
    ... of documents."""

    zlib_bits_per_byte: NotRequired[float]
    reliability: list[Tree]
    loss_by_place: list[Tree]


class Examined(Config):
    """What a model is examined on, and which model objectives compare it with that have a parent."""

    data: DataConfig
    eval: EvalConfig = EvalConfig()
    objective: ObjectiveConfig | None = None
    init_from: str | None = None
    seed: int = Field(0, ge=0)
    """Of what an objective draws of its rows: masks, spans, cuts."""

    @classmethod
    def of_run(cls, run: RunFolder, log: Callable[[str], None] = lambda line: None) -> Self:
        """Returns what the run's config says of it, but for data.remote: a run may be a stranger's, and what files it names would be put at
        the stranger's URL. Raises CheckpointError where it cannot be read, ConfigError where it needs a plugin."""
        tree = placed(run.config(), run.path)
        if isinstance(data := tree.get("data"), dict) and (remote := data.get("remote")) is not None:
            tree["data"] = {**data, "remote": None}
            log(f"data.remote={remote} of the run is left aside, since anybody may have written its config. Give it again to use it.")
        try:
            seed = tree.get("seed", 0)
            drawn = {"seed": seed.get("data", 0) if isinstance(seed, dict) else seed}
            return from_tree(cls, {key: tree[key] for key in cls.model_fields if key in tree} | drawn)
        except ConfigError as error:
            plugins.require(tree, run.config_file)
            raise CheckpointError(
                f"{run.config_file}: its data cannot be read ({error.sentence}). Restore the file, or give data=..."
            ) from None


@device_unset()
def evaluate(
    model: str | os.PathLike[str] | tuple[LM, Tokenizer],
    data: DataConfig | None = None,
    objective: ObjectiveConfig | None = None,
    *,
    wanted: EvalConfig | None = None,
    parent: str | Path | None = None,
    seed: int = 0,
    split: Split = "val",
    micro_batch: int = 8,
    device: str = "auto",
    dtype: Dtype | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Examination:
    """Returns the loss (nats per predicted token), bits per byte and further figures of a model on data.

    model: a run, model or checkpoint folder, or what `lm.load` returned. data: such as `lm.config(overrides=["data=wikitext103"]).data`,
    with rows of its `seq_len`; None: the data, objective, seed and parent of the run that the folder belongs to. objective: None:
    what models of this kind are trained for on such data. wanted: further figures, such as val_loss/512. parent: the reference model of a
    pair loss such as DPO's; None: no such loss is told. seed: of what an objective draws of its rows (masks, spans, cuts). split: the part
    of the data that training would validate on (val), train on (train), or set aside for the test (test), or all of it. dtype: how the
    matrices are held, as in `lm.load`.
    Raises ConfigError where data, objective and model do not fit, CheckpointError where the folder cannot be read, NumericsError for a loss
    that is not finite.
    """
    _require_arguments(model, data, objective, wanted, split, micro_batch)
    folder = resolve_model(str(model)) if not isinstance(model, tuple) else None
    if data is None:
        of_run = _of_run(folder, log)
        data, objective, parent, seed = of_run.data, objective or of_run.objective, parent or of_run.init_from, of_run.seed
    if split == "test" and not data.test_frac:
        raise ConfigError("split=test: nothing is set aside for it. Raise data.test_frac.")
    lm, tokenizer = model if isinstance(model, tuple) else load(model, device, dtype=dtype)
    objective = objective or usual(lm.cfg.kind, data.shape)
    parent = _parent(folder, objective, parent, log)
    wanted = wanted or EvalConfig()
    _require_fit(lm, data, objective, wanted)
    judged = _judged(lm.cfg, tokenizer, data, objective, log)
    prepared = prepare(data, tokenizer, log=log)
    if data.seq_len > lm.max_seq_len:
        log(f"data.seq_len={data.seq_len} is over model.max_seq_len={lm.max_seq_len}: the rows are longer than any in training.")
    if folder is not None:
        compared = [("init_from", str(parent))] if objective.needs_parent and parent is not None else []
        learned = [objective.learns_from()] if judged and isinstance(objective, PolicyConfig) else []
        _tell_what_has_changed(folder, data, prepared.files, filter(None, [*compared, *learned]), log)
    splits = [of for of in SPLITS if split in (of, "all") and prepared.n_tokens(of)]
    where = str(lm.embed.weight.device)
    measure = objective.measure(None if parent is None else Start(lambda: _reference(parent, where, folder, tokenizer)))
    evaluator = Evaluator(lm, tokenizer, micro_batch, measure)
    parts = [(rows, spread(len(rows), data.val_rows)) for rows in split_rows(objective, data, prepared, splits, lm.cfg, seed, short=True)]
    whole = reduce(operator.add, [evaluator.totals(rows, ids, closely=True) for rows, ids in parts])
    assert whole.curves is not None
    more = further(evaluator, wanted, objective, data, prepared, splits, seed)
    more |= held_out_rewards(evaluator, objective, parts) if judged else {}
    more |= by_source(evaluator, [rows for rows, _ in parts], data.val_rows)
    curves = {"reliability": whole.curves.reliability(), "loss_by_place": whole.curves.by_place()}
    found = cast(Examination, {**whole.figures(), **more, **curves})
    if not math.isfinite(found["val_loss"]):
        said = f"the loss is {found['val_loss']} over {found['tokens']:,} tokens"
        raise NumericsError(f"eval: {said}, and only finite ones compare. Use an earlier checkpoint.")
    compares = split == "val" and "val_bits_per_byte" in found
    return {**found, "zlib_bits_per_byte": prepared.zlib_bits_per_byte} if compares else found


def _of_run(folder: Path | None, log: Callable[[str], None]) -> Examined:
    """Returns what the run of a model folder was examined on. Raises ConfigError where there is no such run, and as `Examined.of_run`."""
    run = RunFolder.around(folder) if folder is not None else None
    if run is None:
        raise ConfigError("data: the model is in no run folder, so the data must be given. Pass data=lm.config(...).data.")
    return Examined.of_run(run, log)


def _parent(folder: Path | None, objective: ObjectiveConfig, parent: str | Path | None, log: Callable[[str], None]) -> str | Path | None:
    """Returns the model that the objective compares with; None where it compares with none, or where that is gone, which `log` is told."""
    if objective.own_answers:  # rewards are told of them, which compare with no parent
        return None
    found = near(str(parent), folder) if parent is not None and folder is not None else parent
    if objective.needs_parent and (found is None or not Path(os.path.expanduser(found)).exists()):
        which = "none is given" if found is None else "there is no such model"
        log(f"init_from={found}: {which}, and objective={objective.kind} compares with one; its loss is not told.")
        return None
    return found


def _require_arguments(model: object, data: object, objective: object, wanted: object, split: object, micro_batch: int) -> None:
    """Raises ConfigError for what is not of the type that `evaluate` asks for."""
    if split not in (*SPLITS, "all"):
        raise ConfigError(f"split={split!r} is not an option. {did_you_mean(str(split), [*SPLITS, 'all'])}")
    expect("micro_batch", micro_batch, int, "Give a whole number of rows")
    if micro_batch < 1:
        raise ConfigError(f"micro_batch={micro_batch}: rows are read one by one at the least. Make it 1 or more.")
    if not isinstance(model, str | os.PathLike | tuple):
        raise ConfigError(f"model: {type(model).__name__} comes without a tokenizer. Give a folder, or what lm.load returned.")
    if isinstance(model, tuple):
        for part, kind in zip((*model, None), (nn.Module, Tokenizer), strict=False):
            expect("model", part, kind, "Give a folder, or the pair of model and tokenizer that lm.load returned")
    expect("data", data, (DataConfig, type(None)), "Give lm.config(overrides=['data=text', 'data.files=held.txt']).data")
    expect("objective", objective, (ObjectiveConfig, type(None)), "Give lm.config(overrides=['objective=causal']).objective")
    expect("wanted", wanted, (EvalConfig, type(None)), "Give lm.config(overrides=['eval.seq_len=[512]']).eval")


def _require_fit(model: LM, data: DataConfig, objective: ObjectiveConfig, wanted: EvalConfig) -> None:
    """Raises ConfigError where the model cannot be asked this, or not on these data."""
    try:
        objective.require_fit(model.cfg.kind, data)
        if (head := objective.headed(model.cfg).head).labelling() != (its := model.cfg.head).labelling():
            rule = f"asks for {head.labels}, and the model's labels are {its.labels}" + (", any number at once" if its.several else "")
            raise ValueError(f"objective={objective.kind} {rule}. Leave out what asks so.")
    except ValueError as error:
        raise ConfigError(f"objective: {error}") from None
    no_places = why_no_places("data.seq_len", data.seq_len, model.cfg, model.max_seq_len)
    if (refused := no_places or wanted.why_not(model.cfg, data.seq_len, objective.kind)) is not None:
        raise ConfigError(refused)


def _judged(model: ModelConfig, tokenizer: Tokenizer, data: DataConfig, objective: ObjectiveConfig, log: Callable[[str], None]) -> bool:
    """Returns whether answers can be judged; `log` is told where a reward model is gone. Raises ConfigError for one that does not fit."""
    if not isinstance(objective, PolicyConfig) or (judge := objective.learns_from()) is None:
        return True
    option, path = judge
    if not Path(os.path.expanduser(path)).exists():
        log(f"{option}={path}: there is no such model, so rewards are not told.")
        return False
    require_teacher(objective, model, data.seq_len, tokenizer)
    return True


def _reference(parent: str | Path, device: str, folder: Path | None, tokenizer: Tokenizer) -> LM:
    """Returns the parent as reference model, with rows for special tokens that only `tokenizer` has. For a folder that holds an adapter,
    its weights are rounded as in the adapter's training; for one whose weights are bf16, to those that training started from."""
    model = grown_model(*load(parent, device), tokenizer)
    if folder is None:
        return model
    if (adapted := Adapted.of(folder, read_config(folder))) is not None:
        round_beside(model, adapted.adapter)
    elif number_bytes(folder) == 2:
        model = model.to(torch.bfloat16)
    return model


def _tell_what_has_changed(
    folder: Path, data: DataConfig, files: Mapping[str, str], used: Iterable[tuple[str, str]], log: Callable[[str], None]
) -> None:
    """Tells `log` why figures are not those of the run: of models that are compared with or learned from, and of the data's files."""
    run = RunFolder.around(folder)
    if run is None or not (saved := checkpoints(run.checkpoints)):
        return
    with suppress(CheckpointError):  # it is the model that is examined
        for which in _made_anew(run, saved[0], used):
            log(f"{which}: another model by now than the run has used, so these figures are not those that the run told.")
    with suppress(CheckpointError):
        if changed := _changed_since(run, saved[0], data, files):
            others = f" (and {counted(len(changed) - 1, 'other file')})" if len(changed) > 1 else ""
            log(f"{changed[0]}{others} since the run read it, so these figures are not of what it validated on.")


def _made_anew(run: RunFolder, newest: Path, used: Iterable[tuple[str, str]]) -> list[str]:
    """Returns those of the models used, each an option and a folder, that the run used too and that are others since its newest
    checkpoint."""
    own, meta = Examined.of_run(run), read_meta(newest)
    teacher = own.objective.learns_from() if own.objective is not None else None
    named = [("init_from", own.init_from, "parent_hash"), *([(*teacher, "teacher_hash")] if teacher is not None else [])]
    hashes = {(option, place(path, run.path, True)): meta.get(key) for option, path, key in named if path is not None}
    found = {each: hashes.get((each[0], place(each[1], run.path, True))) for each in used}
    return ["=".join(each) for each, before in found.items() if before not in (None, folder_hash(resolve_model(each[1])))]


def _changed_since(run: RunFolder, newest: Path, data: DataConfig, files: Mapping[str, str]) -> list[str]:
    """Returns the files of `data` that have changed since the run's newest checkpoint; none where `data` is not the run's own."""
    before, now = ({place(name, run.path, True): file for name, file in each.items()} for each in (read_meta(newest)["files"], files))
    if not (found := changed_files(before, now)):
        return []
    own = Examined.of_run(run).data
    return found if own.replace(seq_len=data.seq_len, val_rows=data.val_rows, remote=data.remote) == data else []
