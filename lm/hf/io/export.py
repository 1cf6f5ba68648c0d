"""From a model folder of ours to one of Hugging Face, or to GGUF: what `lm export` and its Python callers do."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from torch import Tensor

from lm import printing
from lm.adapters.adapter import LoRAConfig
from lm.data.tokenizer.fitting import new_ids
from lm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from lm.errors import CheckpointError, ConfigError, expect
from lm.generation.embed import require_embeds
from lm.generation.growing import grown_weights
from lm.generation.load import load
from lm.hf.gguf.vocabulary import normalises, unnamed_ends
from lm.hf.gguf.writing import FILE, TYPES, architecture_for, require_gguf, write_gguf
from lm.hf.io import card, vllm
from lm.hf.io import check as theirs
from lm.hf.io.family import TRAINING_ONLY, Family, alike, differs, resolved
from lm.hf.io.handing_on import use_of_sentences, uses_of_gguf, uses_of_hf
from lm.hf.io.peft import highest_rank, write_peft
from lm.hf.io.sentences import embeds as is_for_vectors
from lm.hf.io.sentences import serving_dims, write_sentences
from lm.hf.io.tokenizer import save_tokenizer
from lm.hf.io.writing import drop_mtp, family_for, write_hf
from lm.hf.io.written import Written
from lm.hf.options.context import changes_at, settled, with_amplitude
from lm.nn.model_config import ModelConfig, model_config
from lm.nn.transformer import LM
from lm.ops.defaults import unset
from lm.spelling import did_you_mean
from lm.storage.adapted import Adapted, read_merged
from lm.storage.model_folder import copy_weights, read_config, read_model, resolve_model
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
    _settle(found, say)
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
        compared = _compared(half, home, found, say) if check else None
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


def _settle(model: LM, say: Say) -> None:
    kept, model.cfg = model.cfg.position, settled(model.cfg)
    if model.cfg.position != kept:
        theta = model.cfg.position.tree()["theta"]
        say(f"model.position.scaling: dynamic for rows of {model.max_seq_len} is written as the base that it comes to, {theta:.6g}")


def _not_of(base: ModelConfig, cfg: ModelConfig) -> str | None:
    """Returns the first option by which a model computes otherwise than the base of its adapter does; None where there is none. A longer
    vocabulary has come with rows for it."""
    ours, theirs = (
        resolved(settled(each.replace(position=with_amplitude(each.position, each.max_seq_len or 0)))) | {"max_seq_len": changes_at(each)}
        for each in (cfg, base)
    )
    keys = [key for key in dict.fromkeys([*ours, *theirs]) if not key.startswith((*TRAINING_ONLY, "mtp", "vocab_size"))]
    return next((differs(key, ours, theirs) for key in keys if not alike(ours.get(key), theirs.get(key))), None)


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


def export_adapter(
    model: str | os.PathLike[str],
    out: str | Path,
    *,
    family: str | None = None,
    base: str | None = None,
    check: bool = True,
    overwrite: bool = False,
    say: Say = printing.say,
) -> Written:
    """Writes the adapter that a run has trained as peft loads it on the exported parent: adapter_config.json and safetensors; and the run's
    tokenizer, which may have a chat template that the parent's lacks.

    base: what the config names as the parent's home; None: where the parent was imported from, or else the parent.  check: whether to
    compare logits with peft on transformers, where both are installed.  out, family, overwrite, errors: as of `export`.
    """
    folder, source = require_free(out, overwrite, model), resolve_model(str(model))
    tree, own = read_model(source)
    if (adapted := Adapted.of(source, tree)) is None or not isinstance(adapted.adapter, LoRAConfig):
        raise ConfigError(f"{model}: it holds a whole model, and format=peft is of adapters. Use format=hf, or train with adapter=lora.")
    found, tokenizer = load(source, "cpu")
    if found.mtp:
        drop_mtp(found)
    parent = adapted.source(source)
    about = read_config(parent)
    before_cfg = model_config(about["model"], f"{parent}: model")
    new_head = found.cfg.new_in_head(before_cfg) if found.cfg.head.labels is not None else set()
    if (other := _not_of(before_cfg.replace(head=found.cfg.head) if new_head else before_cfg, found.cfg)) is not None and base is None:
        raise ConfigError(
            f"format=peft: an adapter brings no options of a model, and {other} for that of {parent}. Use format=hf, which merges it, or"
            " name as base= an export with this option."
        )
    _settle(found, say)
    home = family_for(found.cfg, family, imported=tree.get("family"))
    named = base or str((about.get("parent") if "parent_hash" not in about else None) or adapted.parent)  # an import's parent is its source
    before = load_tokenizer(parent)
    weights = grown_weights(read_merged(parent)[1], before, tokenizer)
    if new_head:  # which is not of the parent, and was trained whole
        trained = {name: weight for name, weight in adapted.adapter.whole_of(own).items() if name in new_head}
        weights = {name: weight for name, weight in weights.items() if name not in new_head} | trained
    adapted.adapter.round(weights, own)
    with out_folder(folder, overwrite, sum(tensor.nbytes for tensor in own.values())) as half:
        write_peft(half, home, found.cfg, adapted.adapter, own, weights, named)
        save_tokenizer(half, tokenizer, found.cfg)
        compared = None
        for what in ["DoRA"] * adapted.adapter.dora + ["modules_to_save"] * bool(adapted.adapter.whole):
            say(f"vLLM refuses adapters with {what}; the merged model (format=hf) has no such limit")
        if found.cfg.kind == "decoder" and (rank := highest_rank(half)) > vllm.MAX_RANK:
            most = vllm.rank_for(rank)
            remedy = f"start it with --max-lora-rank {most}" if most else "serve the merged model (format=hf)"
            say(f"vLLM takes ranks up to {vllm.MAX_RANK} unless told otherwise, and this adapter has one of {rank}: {remedy}")
        if adapted.adapter.base != "saved":
            how = "was trained beside rounded matrices, and is compared on these; on the base as it was saved its logits differ"
            say(f"adapter.base={adapted.adapter.base}: it {how}. format=hf writes the merged model")
        if new := len(new_ids(before, tokenizer)):
            more = f"it has {counted(new, 'token')} more than the base's: before peft loads it, call"
            say(f"tokenizer: {more} model.resize_token_embeddings({found.vocab_size})")
        if new_head:
            names = dict(enumerate(found.cfg.head.labels or []))
            call = f"{home.auto}.from_pretrained({named!r}, id2label={names})"
            say(f"its head is new to the base: before peft loads it, make the base by {call}")
        left_out = theirs.why_not(home, "peft") if check else "check=false"
        if left_out is None:
            with TemporaryDirectory() as beside:
                write_hf(Path(beside), home, found.cfg, {name: weights[name] for name, _ in found.named_parameters()}, tokenizer)
                compared = _compared(Path(beside), home, _unrounded(found, adapted.adapter, weights, own), say, half)
        else:
            say(f"not compared with peft ({left_out})")
    if base is not None:
        said = "" if other is None else f"; {other.split(' must be ')[0]} is an option that it must have"
        say(f"base={base}: its weights were not compared with those of {parent}{said}")
    return Written(folder, f"peft adapter of {home.architecture}", sum(tensor.numel() for tensor in own.values()), compared)


def _unrounded(model: LM, adapter: LoRAConfig, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> LM:
    """Returns the model in float32 with the adapter merged into it there, as peft computes beside the matrices; its own weights are rounded
    where they have 16 bits.  weights: of the parent, as the adapter was trained beside them."""
    exact = {name: weight.float() for name, weight in weights.items()}
    adapter.replace(base="saved").merge(exact, {name: weight.float() for name, weight in own.items()})
    model = model.float()
    copy_weights(model.named_parameters(), {name: exact.pop(name) for name, _ in model.named_parameters()}, "the adapter's model")
    return model


def _compared(folder: Path, family: Family, model: LM, say: Say, adapter: Path | None = None) -> theirs.Comparison | None:
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
