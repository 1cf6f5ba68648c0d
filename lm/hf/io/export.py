"""From a model folder of ours to one of Hugging Face, or to GGUF: what `lm export` and its Python callers do."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from lm import printing
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import CheckpointError, ConfigError, expect
from lm.generation.embed import require_embeds
from lm.generation.load import load
from lm.generation.prefill import sees_whole
from lm.hf.gguf.vocabulary import normalises, unnamed_ends
from lm.hf.gguf.writing import FILE, TYPES, architecture_for, require_gguf, write_gguf
from lm.hf.io import card
from lm.hf.io import check as theirs
from lm.hf.io.family import Family
from lm.hf.io.handing_on import use_of_sentences, uses_of_gguf, uses_of_hf
from lm.hf.io.sentences import embeds as is_for_vectors
from lm.hf.io.sentences import serving_dims, write_sentences
from lm.hf.io.writing import drop_mtp, family_for, write_hf
from lm.hf.io.written import Written
from lm.hf.options.context import settled
from lm.nn.transformer import LM
from lm.ops.defaults import unset
from lm.spelling import did_you_mean
from lm.storage.model_folder import read_config, resolve_model
from lm.storage.out import out_folder, require_free
from lm.units import counted

Say = Callable[[str], None]
DType = Literal["keep", "fp32", "bf16", "fp16", "f32", "f16", "q8_0"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@unset()
def export(
    model: str | os.PathLike[str],
    out: str | Path,
    *,
    format: Literal["hf", "gguf"] = "hf",
    family: str | None = None,
    dtype: DType = "keep",
    mtp: Literal["drop", "keep"] = "drop",
    license: str | None = None,
    base: str | None = None,
    embeds: bool | None = None,
    check: bool = True,
    overwrite: bool = False,
    say: Say = printing.say,
) -> Written:
    """Writes what transformers, vLLM, MLX and lm-eval load: config, safetensors, tokenizer and model card; or model.gguf, for llama.cpp.

    model: a run, model or checkpoint folder. out: a folder that does not exist, or with `overwrite` one that a verb has written.
    family: the model type to write (llama, gpt2, t5, ...); None: the one that it was imported from, or else the most general that can hold
    the model. dtype: of the weights, under the names that the format has. mtp: what becomes of the blocks that predict further tokens.
    license, base: what the model card says, such as apache-2.0 and owner/name; None: what it said of the hub's model that this is of.
    embeds: of format=hf, whether sentence-transformers finds how the vector of a text is read, and the tokenizer puts around each text what
    `lm.embed` does; None: where objective=contrastive has trained the model, or it reads the mean of a text.
    check: whether to compare logits with transformers, where it is installed. Raises ConfigError naming the option that no family has,
    NumericsError for a weight that is not finite in `dtype`, CheckpointError where transformers computes other logits; nothing is written
    then.
    """
    expect("model", model, (str, os.PathLike), "Give the folder of the run or model")
    folder = require_free(out, overwrite, model)
    _require_known(format, dtype, mtp)
    said = {key: value for key, value in (("base_model", base), ("license", license)) if value is not None}
    if said and format != "hf":
        raise ConfigError(f"license, base: format={format} has no model card. Leave them out.")
    if embeds and format != "hf":
        raise ConfigError(f"embeds=true: format={format} has no place for how the vector of a text is read. Leave it out.")
    found, tokenizer = load(model, "cpu")
    _without_mtp(found, mtp, say)
    settle(found, say)
    if sees_whole(found):
        say("prompts: this model sees them from all sides, as its objective has had them, and other programs read them from left to right")
    if format == "gguf":
        return _as_gguf(model, folder, found, tokenizer, family, dtype, overwrite, say)
    source = resolve_model(str(model))
    about, read_as = read_config(source), found.cfg
    if embeds is None:
        embeds = read_as.kind != "encoder_decoder" and is_for_vectors(source, read_as)
    if embeds:
        require_embeds(found)
        found.cfg = read_as.replace(head=read_as.head.replace(pooling="token"))  # how vectors are read is told beside the model
    home = family_for(found.cfg, family, imported=about.get("family"))
    if dtype != "keep":
        found = found.to(_DTYPES[dtype])
    weights = {name: p.detach() for name, p in found.named_parameters()}
    prompts: dict[str, str] = about.get("prompts") or {}
    uses = [use_of_sentences(folder, prompts)] if embeds else uses_of_hf(str(model), folder, home, found, tokenizer, about.get("family"))
    with out_folder(folder, overwrite, sum(weight.nbytes for weight in weights.values())) as half:
        write_hf(half, home, found.cfg, weights, tokenizer, about.get("sampling"), embeds)
        if embeds:
            write_sentences(half, read_as, prompts, serving_dims(source, read_as))
        (half / card.CARD).write_text(card.model_card(about, str(model), home, found, said, embeds), encoding="utf-8")
        compared = compared_with_theirs(half, home, found, say) if check else None
    if not check:
        say("not compared with transformers (check=false)")
    return Written(folder, home.architecture, sum(weight.numel() for weight in weights.values()), compared, uses)


def _require_known(format: str, dtype: str, mtp: str) -> None:
    if format not in ("hf", "gguf"):
        raise ConfigError(f"format={format!r}: export writes hf and gguf, and export_adapter what peft loads. Choose one of those.")
    known = ["keep", *(TYPES if format == "gguf" else _DTYPES)]
    if dtype not in known:
        raise ConfigError(f"dtype={dtype}: format={format} has {', '.join(known)}. Choose one of those.")
    if mtp not in ("drop", "keep"):
        raise ConfigError(f"mtp={mtp!r} is not an option. {did_you_mean(str(mtp), ['drop', 'keep'])}")


def _without_mtp(model: LM, mtp: str, say: Say) -> None:
    further = len(model.mtp)
    if mtp == "keep" and not further:
        raise ConfigError("mtp=keep: the model has no blocks that predict further tokens (model.mtp is null). Leave it out.")
    if mtp == "drop" and further:
        say(f"model.mtp: left out: {counted(further, 'block')} for further tokens")
        drop_mtp(model)


def settle(model: LM, say: Say) -> None:
    """Writes a dynamic scaling of the model's positions as the base that it comes to in its longest rows, which other libraries have."""
    kept, model.cfg = model.cfg.position, settled(model.cfg)
    if model.cfg.position != kept:
        theta = model.cfg.position.tree()["theta"]
        say(f"model.position.scaling: dynamic for rows of {model.max_seq_len} is written as the base that it comes to, {theta:.6g}")


def _as_gguf(
    source: str | os.PathLike[str], folder: Path, model: LM, tokenizer: Tokenizer, family: str | None, dtype: str, overwrite: bool, say: Say
) -> Written:
    require_gguf()
    if len(model.mtp):
        raise ConfigError("mtp=keep: format=gguf has no place for the blocks that predict further tokens. Leave it out.")
    about = read_config(resolve_model(str(source)))
    home = architecture_for(model.cfg, family, about.get("family"))
    kept = {torch.float16: "f16", torch.bfloat16: "bf16"}.get(model.embed.weight.dtype, "f32")
    if (changed := normalises(tokenizer)) is not None:
        say(f"tokenizer: it brings text into the form {changed} first, and llama.cpp does not: give it such text")
    if left_out := unnamed_ends(tokenizer):
        say(f"tokenizer: the file has no place for {', '.join(left_out)} as an end of texts: tell llama.cpp where it is run")
    with out_folder(folder, overwrite, sum(p.nbytes for p in model.parameters())) as half:
        half.mkdir(exist_ok=True)
        write_gguf(
            half / FILE, home, model, tokenizer, kept if dtype == "keep" else dtype, card.name(about, str(source)), about.get("sampling")
        )
    uses = uses_of_gguf(str(source), folder, tokenizer.chat_template is not None)
    return Written(folder, home.name, sum(p.numel() for p in model.parameters()), uses=uses)


def compared_with_theirs(folder: Path, family: Family, model: LM, say: Say, adapter: Path | None = None) -> theirs.Comparison | None:
    """Compares what transformers computes from the folder, with peft where an adapter lies beside it, with the model; None where it cannot.

    Raises CheckpointError where that is something else.
    """
    if (left_out := theirs.why_not(family)) is not None:
        say(f"not compared with transformers ({left_out})")
        return None
    compared = theirs.compare(folder, family, model, adapter)
    if compared.left_out is not None:
        say(f"not compared with transformers: {compared.left_out}")
    if not compared.difference <= 1e-3 * max(1.0, compared.spread):
        raise CheckpointError(
            f"export: transformers computes other {compared.what}s from it, by up to {compared.difference:.2g}, so nothing is written."
            " Report it."
        )
    return compared
