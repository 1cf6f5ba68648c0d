"""The initial weights of a run, and the model that it started from."""

from collections.abc import Container, Iterable
from pathlib import Path

import torch

from lm.adapters.adapter import AdapterConfig, adapting, round_beside
from lm.data.tokenizer.config import TokenizerConfig, TokenizerFileConfig
from lm.data.tokenizer.fitting import grown
from lm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from lm.errors import CheckpointError, ConfigError
from lm.generation import teacher
from lm.generation.growing import ROWS, grown_model, grown_weights
from lm.generation.load import load, unfilled
from lm.losses.measure import Start
from lm.nn.init import init_weights
from lm.nn.materialize import Fill
from lm.nn.model_config import model_config
from lm.nn.transformer import LM, build_model
from lm.storage.adapted import read_merged
from lm.storage.checkpoint import CheckpointReader, Piece
from lm.storage.model_folder import copy_weights, read_config, require_same_shapes, resolve_model
from lm.training.config import TrainConfig
from lm.training.weights.freeze import on_meta


def drawn(seed: int) -> Fill:
    """Returns a fill with random weights, each a function of the seed and the parameter's name."""

    def fill(model: LM, names: Container[str]) -> None:
        init_weights(model, model.cfg.init, model.cfg.growth(), model.sublayers, seed, names)

    return fill


def tokenizer_of(cfg: TrainConfig) -> Tokenizer:
    """Returns the tokenizer of a run with init_from: the parent's, with the special tokens that the run adds. Raises ConfigError where the
    run freezes the rows of these."""
    own = load_tokenizer(resolve_model(str(cfg.init_from)))
    found = grown(own, cfg.tokenizer.specials) if isinstance(cfg.tokenizer, TokenizerFileConfig) else own
    built = on_meta(cfg, cfg.sized_model(found.vocab_size)) if found is not own else None
    if built is not None and (still := [name for name, p in built.named_parameters() if name in ROWS and not p.requires_grad]):
        remedy = "Name it in adapter.whole" if cfg.adapter is not None else "Leave it out of trainer.freeze"
        raise ConfigError(
            f"tokenizer.specials: new tokens start as one and the same row of {still[0]}, and this run freezes it. {remedy}, so that they"
            " are told apart."
        )
    return found


def _new_head(model: LM, cfg: TrainConfig, source: Path) -> set[str]:
    """Returns the names of the head's weights where it tells other things apart than that of the folder, so that it begins anew. Raises
    ConfigError where an adapter would leave it so."""
    found = model.cfg.new_in_head(model_config(read_config(source)["model"]))
    if cfg.adapter is not None and found & dict(model.named_parameters()).keys() - cfg.adapter.own(model).keys():
        raise ConfigError("adapter.whole: the head tells other things apart than that of init_from, and begins anew. Name it: [head].")
    return found


def given_tokenizer(cfg: TrainConfig) -> Tokenizer | TokenizerConfig:
    """Returns `tokenizer_of` where there is init_from, else the config's."""
    return tokenizer_of(cfg) if cfg.init_from is not None else cfg.tokenizer


def copied(cfg: TrainConfig, tokenizer: Tokenizer) -> Fill:
    """Returns a fill with the weights of init_from, a run, model or checkpoint folder; a new head is drawn. With init_optimizer these are
    the weights that the state is of, not their average. The fill raises CheckpointError where shapes differ.  tokenizer: may have more
    special tokens than the folder's."""
    source, own = resolve_model(str(cfg.init_from)), drawn(cfg.seeds.init)
    if cfg.init_optimizer:
        reader = CheckpointReader(source)
        weights = {name: reader.read(name, "iterate" if "iterate" in reader.kinds(name) else "weight") for name in reader.names()}
    else:
        weights = grown_weights(read_merged(source)[1], load_tokenizer(source), tokenizer)
    fits = False

    def fill(model: LM, names: Container[str]) -> None:
        nonlocal fits
        new = _new_head(model, cfg, source)
        if not fits:  # on the first call, before any weight is sharded
            _require_same(_shapes(model), {name: tuple(weight.shape) for name, weight in weights.items()}, new, source)
            fits = True
        own(model, [name for name in new if name in names])
        mine = [(name, p) for name, p in model.named_parameters() if name in names and name not in new]
        copy_weights(mine, {name: weights.pop(name) for name, _ in mine}, str(source))

    return fill


def require_fit(model: LM, cfg: TrainConfig) -> None:
    """Raises CheckpointError where the shapes in `copied` would differ, from configs alone."""
    source = resolve_model(str(cfg.init_from))
    before = model_config(read_config(source)["model"])
    if isinstance(cfg.tokenizer, TokenizerFileConfig) and cfg.tokenizer.specials:
        before = before.replace(vocab_size=max(before.vocab_size or 0, tokenizer_of(cfg).vocab_size))
    _require_same(_shapes(model), _shapes(build_model(before, device="meta")), _new_head(model, cfg, source), source)


def _require_same(model: dict[str, tuple[int, ...]], there: dict[str, tuple[int, ...]], new: set[str], source: Path) -> None:
    mine, saved = ({name: shape for name, shape in each.items() if name not in new} for each in (model, there))
    require_same_shapes(mine, saved, str(source), "Leave out what changes the model, or rebuild it first, by lm remodel")


def beside(base: Fill, own: Fill) -> Fill:
    """Returns a fill of the adapter's weights by `own` and of all others by `base`."""

    def fill(model: LM, names: Container[str]) -> None:
        added = adapting(model)
        base(model, [name for name, _ in model.named_parameters() if name in names and name not in added])
        own(model, [name for name in added if name in names])

    return fill


def parent(path: str, adapter: AdapterConfig | None, tokenizer: Tokenizer, in_slices: bool = False, bf16: bool = False) -> LM:
    """Returns the frozen model that a run started from, on the CPU at first; all callers share one instance.  adapter: where given, the
    matrices are rounded as they are in training beside this adapter.  tokenizer: may have more special tokens than the folder's.
    in_slices: without an adapter it is `sliced` over the ranks, instead.  bf16: its weights are rounded as those of bf16-true are."""
    in_slices = in_slices and adapter is None

    def make() -> LM:
        if in_slices:
            from lm.generation.slices import sliced  # torch's engine takes a while to import

            bare, old, weights = unfilled(folder := resolve_model(path))
            weights = grown_weights(weights, old, tokenizer)
            wider = build_model(bare.cfg.replace(vocab_size=len(weights["embed.weight"])), device="meta")
            return sliced(wider.to(torch.bfloat16 if bf16 else bare.embed.weight.dtype), weights, str(folder))
        own, before = load(path, "cpu")
        model = grown_model(own, before, tokenizer)
        if bf16:
            model = model.to(torch.bfloat16)
        if adapter is not None:
            round_beside(model, adapter)
        return model

    return teacher.shared(f"{path} {adapter} {tokenizer.hash} {bf16}", make, in_slices)


def start_of(cfg: TrainConfig) -> Start:
    """Returns the model that a run started from, for its loss to compare with."""
    itself = cfg.adapter is not None and cfg.adapter.keeps_parent()
    how = cfg.strategy.slices_weights, cfg.trainer.precision == "bf16-true"
    return Start(None if itself else lambda: parent(str(cfg.init_from), cfg.adapter, tokenizer_of(cfg), *how))


def on_noise(cfg: TrainConfig) -> str | None:
    """Returns, as a remark, what makes the model another one in each step than the start that its loss compares with; None: nothing."""
    if not cfg.objective.runs_parent() or (drawn := cfg.draws()) is None:
        return None
    what = (
        f"{drawn} is drawn for the model, and not for its start, so that what objective={cfg.objective.kind} compares differs by that too"
    )
    return f"{what}; {drawn.partition('=')[0]}=0 takes it out"


def require_teacher(cfg: TrainConfig, tokenizer: Tokenizer | TokenizerConfig) -> None:
    """As that of lm.generation.teacher, for a run."""
    teacher.require_teacher(cfg.objective, cfg.model, cfg.data.seq_len, tokenizer, anew=cfg.init_from is None)


def empty(model: LM, names: Container[str]) -> None:
    """Fills nothing: each rank loads its slices from the checkpoint once the engine is set up."""


@torch.no_grad()
def load_pieces(pieces: Iterable[Piece], reader: CheckpointReader, remedy: str = "Set resume.fresh_optimizer=true") -> None:
    """Loads each live slice from its place in the checkpoint. Raises CheckpointError where the checkpoint lacks one.  remedy: what starts
    the optimizer anew."""
    for piece in pieces:
        if piece.kind not in reader.kinds(piece.name):
            raise CheckpointError(
                f"{reader.folder}: the optimizer's {piece.kind} of {piece.name} is missing, and the run needs it to go on. {remedy} to"
                " start the optimizer anew."
            )
        piece.tensor.copy_(reader.read(piece.name, piece.kind, piece.offset, tuple(piece.tensor.shape)))
    reader.close()


def _shapes(model: LM) -> dict[str, tuple[int, ...]]:
    added = adapting(model)
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters() if name not in added}
