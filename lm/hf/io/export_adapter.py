"""From an adapter of ours to one of peft: what `lm export format=peft` and its Python callers do."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from lm import printing
from lm.adapters.adapter import LoRAConfig
from lm.data.tokenizer.fitting import new_ids
from lm.data.tokenizer.tokenizer import load_tokenizer
from lm.errors import CheckpointError, ConfigError
from lm.generation.growing import grown_weights
from lm.generation.load import load
from lm.hf.io import check as theirs
from lm.hf.io import vllm
from lm.hf.io.differing import alike, differs
from lm.hf.io.export import Say, compared_with_theirs, settle
from lm.hf.io.family import TRAINING_ONLY, resolved
from lm.hf.io.peft import highest_rank, write_peft
from lm.hf.io.reading import CONFIG, read_hf
from lm.hf.io.tokenizer import save_tokenizer
from lm.hf.io.writing import drop_mtp, family_for, write_hf
from lm.hf.io.written import Written
from lm.hf.options.context import changes_at, settled, with_amplitude
from lm.nn.model_config import ModelConfig, model_config
from lm.nn.transformer import LM
from lm.storage.adapted import Adapted, read_merged
from lm.storage.model_folder import copy_weights, is_ours, read_config, read_model, resolve_model
from lm.storage.out import out_folder, require_free
from lm.storage.reading import read_json
from lm.units import counted


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

    base: what the config names as the parent's home; None: where the parent was imported from, or else the parent. Of a folder that lm
    reads the layers are compared with the parent's.  check: whether to compare logits with peft on transformers, where both are
    installed.  out, family, overwrite, errors: as of `export`.
    """
    folder, source = require_free(out, overwrite, model), resolve_model(str(model))
    tree, own = read_model(source)
    if (adapted := Adapted.of(source, tree)) is None or not isinstance(adapted.adapter, LoRAConfig):
        raise ConfigError(f"{model}: it holds a whole model, and format=peft is of adapters. Use format=hf, or train with adapter=lora.")
    found, tokenizer = load(source, "cpu")
    if found.mtp:
        drop_mtp(found)
    parent, adapter = adapted.source(source), adapted.adapter
    about = read_config(parent)
    before_cfg = model_config(about["model"], f"{parent}: model")
    new_head = found.cfg.new_in_head(before_cfg) if found.cfg.head.labels is not None else set()
    if (other := _not_of(before_cfg.replace(head=found.cfg.head) if new_head else before_cfg, found.cfg)) is not None and base is None:
        raise ConfigError(
            f"format=peft: an adapter brings no options of a model, and {other} for that of {parent}. Use format=hf, which merges it, or"
            " name as base= an export with this option."
        )
    settle(found, say)
    home = family_for(found.cfg, family, imported=tree.get("family"))
    named = base or str((about.get("parent") if "parent_hash" not in about else None) or adapted.parent)  # an import's parent is its source
    before = load_tokenizer(parent)
    weights = grown_weights(read_merged(parent)[1], before, tokenizer)
    if new_head:  # which is not of the parent, and was trained whole
        trained = {name: weight for name, weight in adapter.whole_of(own).items() if name in new_head}
        weights = {name: weight for name, weight in weights.items() if name not in new_head} | trained
    checked = base is not None and _is_of(base, weights, parent)
    adapter.round(weights, own)
    with out_folder(folder, overwrite, sum(tensor.nbytes for tensor in own.values())) as half:
        write_peft(half, home, found.cfg, adapter, own, weights, named)
        save_tokenizer(half, tokenizer, found.cfg)
        for remark in _to_know(
            found, adapter, highest_rank(half), len(new_ids(before, tokenizer)), f"{home.auto}.from_pretrained({named!r}", new_head
        ):
            say(remark)
        compared = None
        if (left_out := theirs.why_not(home, "peft") if check else "check=false") is None:
            with TemporaryDirectory() as beside:
                write_hf(Path(beside), home, found.cfg, {name: weights[name] for name, _ in found.named_parameters()}, tokenizer)
                compared = compared_with_theirs(Path(beside), home, _unrounded(found, adapter, weights, own), say, half)
        else:
            say(f"not compared with peft ({left_out})")
    if base is not None and not checked:
        said = "" if other is None else f"; {other.split(' must be ')[0]} is an option that it must have"
        say(f"base={base}: its weights were not compared with those of {parent}{said}")
        imported = about.get("parent") if "parent_hash" not in about else None
        if imported is not None and Path(imported).name != Path(base).name:
            say(f"base={base}: the adapter was trained beside {imported}. Beside other weights it computes something else")
    return Written(folder, f"peft adapter of {home.architecture}", sum(tensor.numel() for tensor in own.values()), compared)


def _is_of(base: str, weights: Mapping[str, Tensor], parent: Path) -> bool:
    """Whether a folder of transformers has the parent's layers; False where it is no folder, or cannot be compared since its matrices are
    held in fewer bits or lm does not read it. Raises ConfigError where it has others.  weights: of the parent."""
    config = Path(os.path.expanduser(base)) / CONFIG
    if not config.is_file() or is_ours(config.parent) or "quantization_config" in read_json(config, foreign=True):
        return False
    try:
        there = read_hf(config.parent).weights
    except (ConfigError, CheckpointError):  # peft may read it all the same: pickles, or a model that lm has no family for
        return False
    layers = [name for name in weights if "blocks." in name]  # an embedding may have more rows there, and a head be another
    for name in layers:
        if name not in there or not torch.equal(weights[name].to(there[name].dtype), there[name]):
            what = f"it has other weights than {parent}, beside which the adapter was trained, the first of them {name}"
            raise ConfigError(f"base={base}: {what}. Give an export of that one, or leave base out.")
    return True


def _to_know(model: LM, adapter: LoRAConfig, rank: int, n_new: int, base: str, new_head: set[str]) -> Iterator[str]:
    """Yields what whoever loads the adapter needs to know.  rank: its highest.  n_new: tokens that the base's tokenizer lacks.  base: the
    call that makes the base, without its end.  new_head: weights of the head that the base lacks."""
    for what in ["DoRA"] * adapter.dora + ["modules_to_save"] * bool(adapter.whole):
        yield f"vLLM refuses adapters with {what}; the merged model (format=hf) has no such limit"
    if model.cfg.kind == "decoder" and rank > vllm.MAX_RANK:
        most = vllm.rank_for(rank)
        remedy = f"start it with --max-lora-rank {most}" if most else "serve the merged model (format=hf)"
        yield f"vLLM takes ranks up to {vllm.MAX_RANK} unless told otherwise, and this adapter has one of {rank}: {remedy}"
    if adapter.base != "saved":
        how = "was trained beside rounded matrices, and is compared on these; on the base as it was saved its logits differ"
        yield f"adapter.base={adapter.base}: it {how}. format=hf writes the merged model"
    if n_new:
        more = f"it has {counted(n_new, 'token')} more than the base's: before peft loads it, call"
        yield f"tokenizer: {more} model.resize_token_embeddings({model.vocab_size})"
    if new_head:
        names = dict(enumerate(model.cfg.head.labels or []))
        yield f"its head is new to the base: before peft loads it, make the base by {base}, id2label={names})"


def _not_of(base: ModelConfig, cfg: ModelConfig) -> str | None:
    """Returns the first option by which a model computes otherwise than the base of its adapter does; None where there is none. A longer
    vocabulary has come with rows for it."""
    ours, theirs = (
        resolved(settled(each.replace(position=with_amplitude(each.position, each.max_seq_len or 0)))) | {"max_seq_len": changes_at(each)}
        for each in (cfg, base)
    )
    keys = [key for key in dict.fromkeys([*ours, *theirs]) if not key.startswith((*TRAINING_ONLY, "mtp", "vocab_size"))]
    return next((differs(key, ours, theirs) for key in keys if not alike(ours.get(key), theirs.get(key))), None)


def _unrounded(model: LM, adapter: LoRAConfig, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> LM:
    """Returns the model in float32 with the adapter merged into it there, as peft computes beside the matrices; its own weights are rounded
    where they have 16 bits.  weights: of the parent, as the adapter was trained beside them."""
    exact = {name: weight.float() for name, weight in weights.items()}
    adapter.replace(base="saved").merge(exact, {name: weight.float() for name, weight in own.items()})
    model = model.float()
    copy_weights(model.named_parameters(), {name: exact.pop(name) for name, _ in model.named_parameters()}, "the adapter's model")
    return model
