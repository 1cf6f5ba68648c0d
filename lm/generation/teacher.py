"""A further model that training learns from: a teacher, or a reward model."""

from collections.abc import Callable
from weakref import WeakValueDictionary

import torch

from lm.data.rows.base import ObjectiveConfig
from lm.data.tokenizer.config import TokenizerConfig
from lm.data.tokenizer.fitting import unlike
from lm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from lm.errors import CheckpointError, ConfigError
from lm.generation.load import load, unfilled
from lm.nn.model_config import ModelConfig, model_config
from lm.nn.transformer import LM, EncoderDecoderConfig
from lm.storage.model_folder import folder_hash, read_config, resolve_model

_held: WeakValueDictionary[str, LM] = WeakValueDictionary()
_in_slices: dict[str, LM] = {}


def shared(key: str, make: Callable[[], LM], in_slices: bool = False) -> LM:
    """Returns a frozen model, of which all who ask by the same key share one instance, for as long as one of them holds it.

    in_slices: it is kept for good. Ranks must make it together, and each would drop it only when its garbage collector happens to run, so
    that some would have it still at the next call, and others not.
    """
    model = _held.get(key)
    if model is None:
        with torch.inference_mode(False):  # a validation may be the first to ask
            model = _held[key] = make().requires_grad_(False)
    if in_slices:
        _in_slices[key] = model
    return model


def frozen(path: str, in_slices: bool) -> LM:
    """Returns the model of a folder, for a loss to learn from or an answer to be judged by, as `shared`; at first it is on the CPU.
    in_slices: or `sliced` over the ranks."""
    folder = resolve_model(path)

    def make() -> LM:
        if not in_slices:
            return load(path, "cpu")[0]
        from lm.generation.slices import sliced  # torch's engine takes a while to import

        model, _, weights = unfilled(folder)
        return sliced(model, weights, str(folder))

    return shared(f"{folder_hash(folder)} {in_slices}", make, in_slices)


def require_teacher(
    objective: ObjectiveConfig, model: ModelConfig, seq_len: int, tokenizer: Tokenizer | TokenizerConfig, anew: bool = False
) -> None:
    """Raises ConfigError where the objective has a teacher or reward model that cannot say anything of what the model is to predict, as far
    as that is known: a tokenizer that is still to be trained on the text is not compared.  anew: the model is trained from the start."""
    if (teacher := objective.learns_from()) is None:
        return
    key, path = teacher
    try:
        source = resolve_model(path)
    except CheckpointError as error:
        raise CheckpointError(f"{key}={error.sentence}") from None
    its = model_config(read_config(source)["model"])
    where, remedy = f"{key}={path}", f"Choose another {key.partition('.')[2].replace('_', ' ')}"
    model = objective.headed(model)
    if (why := objective.why_not_from(its.head, model.head)) is not None:
        raise ConfigError(f"{where}: {why}. {remedy}.")
    if its.kind != model.kind:
        raise ConfigError(f"{where}: its model.kind is {its.kind}, and that of the model {model.kind}. {remedy}.")
    if its.max_seq_len is not None and its.max_seq_len < seq_len:
        raise ConfigError(f"{where}: it takes rows of {its.max_seq_len} tokens, and data.seq_len={seq_len}. Lower that.")
    if not isinstance(tokenizer, Tokenizer):
        if tokenizer.n_chars():
            return
        tokenizer = tokenizer.build(extra=objective.specials())
    theirs = load_tokenizer(source)
    if (other := unlike(theirs, tokenizer)) is not None:
        own = f"Train with its own, by tokenizer=file tokenizer.path={source}"
        raise ConfigError(
            f"{where}: it has another tokenizer, {other}, so what it says is of other tokens."
            f" {own if anew else 'Choose one that has all tokens of this run'}."
        )
    if (begun := _begun(its, theirs)) != _begun(model, tokenizer):
        raise ConfigError(f"{where}: its decoder begins otherwise, and both read the same rows. Set {begun}.")


def _begun(cfg: ModelConfig, tokenizer: Tokenizer) -> str:
    """Returns the options of how the decoder of an encoder-decoder begins; '' for other models."""
    if not isinstance(cfg, EncoderDecoderConfig):
        return ""
    start, first = tokenizer.start if cfg.start_token is None else cfg.start_token, cfg.first_token
    return f"model.start_token={start} model.first_token={'null' if first is None else first}"
