"""From a model of ours to a folder that transformers, and all that reads its format, loads with no code of ours."""

from collections.abc import Collection, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from lm.hf.io.bodies import bodies, headless
from lm.hf.io.classifier import classifiers
from lm.hf.io.family import Family, families, resolved
from lm.hf.io.files import INDEX, SINGLE
from lm.hf.io.generation import GENERATION, generation_config
from lm.hf.io.reading import CONFIG
from lm.hf.io.tokenizer import save_tokenizer
from lm.nn.model_config import ModelConfig
from lm.nn.transformer import LM, build_model
from lm.schema import Tree
from lm.storage.atomic import write_json
from lm.storage.checkpoint import require_finite

SHARD_BYTES = 5_000_000_000


def family_for(cfg: ModelConfig, wanted: str | None = None, among: Collection[str] | None = None, imported: str | None = None) -> Family:
    """Returns the family that can hold this model; of several the one that it was imported from, or else the most general that other
    programs know, so Llama before families derived from it, and Mistral before CWM.

    wanted: the only family that may; None: all in `among`. among: names of families; None: all. Raises ConfigError naming the options that
    have no place in the nearest family.
    """
    every = families()
    if among is None:
        headed = {wanted, imported} & (every.keys() - bodies().keys())  # EuroBERT's head may have no weight of its own
        every = classifiers() if cfg.head.labels is not None else bodies() if headless(cfg) and not headed else every
    known = {name: family for name, family in every.items() if among is None or name in among}
    if wanted is not None and wanted not in known:
        raise ConfigError(f"family={wanted!r} is not known. Known are {', '.join(known)}.")
    if wanted is None and imported in known and not known[imported].homeless(cfg):
        return known[imported]
    homeless = {name: known[name].homeless(cfg) for name in ([wanted] if wanted is not None else known)}
    kind = None if cfg.recurrent is None else cfg.recurrent.kind

    def farness(name: str) -> tuple[int, bool, int, bool]:
        family = known[name]
        far = sum(_distance(option, family) for option in homeless[name])
        return far, family.rare, len(type(family).mro()), kind is None and family.recurrent_kind is not None

    mixing = [name for name in homeless if kind is not None and known[name].recurrent_kind == kind]
    nearest = min(mixing or homeless, key=farness)
    if not homeless[nearest]:
        return known[nearest]
    where = f"family={wanted} cannot hold this model: there" if wanted else f"no family can hold this model: in {nearest}, the nearest,"
    if not homeless[nearest][0].startswith("model."):
        raise ConfigError(f"{where} {homeless[nearest][0]}.")
    other = ", or export with mtp=drop" if any(option.startswith("model.mtp") for option in homeless[nearest]) else ""
    raise ConfigError(f"{where} {', and '.join(homeless[nearest][:5])}. Train with that{other}.")


def _distance(option: str, family: Family) -> int:
    """Returns how far off a family is by this option: by another kind of model the most, then by a refusal, which names no option to train
    with, by another kind of a slot, and by another number. Where a family has but one kind of a slot, its others were not compared."""
    key = option.removeprefix("model.").partition("=")[0]
    if not key.endswith("kind"):
        return 1 if option.startswith("model.") else 25
    return 100 if key == "kind" else 20 if key in family.fixed else 10


def drop_mtp(model: LM) -> None:
    """Removes the blocks of multi-token prediction from the model, which computes the same logits without them."""
    model.cfg, model.mtp = model.cfg.replace(mtp=None), nn.ModuleList()


def to_hf(family: Family, cfg: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors under the family's names."""
    names = dict(build_model(cfg, device="meta").named_parameters()).keys()
    pairs = [pair for pair in family.pairs(resolved(cfg)) if pair.ours[0] in names]
    assert names == {name for pair in pairs for name in pair.ours}, f"{family.name} does not name every tensor"
    found: dict[str, Tensor] = {}
    for pair in pairs:
        theirs = pair.transform.to_theirs([weights[name] for name in pair.ours])
        named = zip(pair.theirs, theirs, strict=True)
        found |= {key: tensor.contiguous() for key, tensor in named if not key.endswith(family.unwritten) or tensor.any()}
    dtype = next(iter(found.values())).dtype
    return found | {key: tensor.to(dtype, copy=True) for key, tensor in family.constants(resolved(cfg)).items()}


def write_hf(
    folder: Path,
    family: Family,
    cfg: ModelConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer | None,
    sampling: Tree | None = None,
    embeds: bool = False,
) -> None:
    """Writes config.json, generation_config.json, safetensors (with an index beyond 5 GB) and tokenizer files into a folder.

    sampling: what generation_config.json says of it beside the special tokens.  embeds: as in `save_tokenizer`.
    Raises NumericsError for a tensor that is not finite, ConfigError for a tokenizer whose padding token is not the family's.
    """
    theirs = to_hf(family, cfg, weights)
    dtype = str(next(iter(theirs.values())).dtype).removeprefix("torch.")
    config: Tree = {**family.hf(cfg), "torch_dtype": dtype, "dtype": dtype, "use_cache": True}
    if tokenizer is not None:
        if family.pad not in (None, tokenizer.pad):
            raise ConfigError(
                f"family={family.name}: its positions begin behind the padding token {family.pad}, and this tokenizer pads with"
                f" {tokenizer.pad}. Choose another family."
            )
        config |= {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.pad}
    for name, tensor in theirs.items():
        require_finite(name, tensor, f"export in {dtype}", "Use dtype=bf16 or fp32, or another checkpoint")
    folder.mkdir(exist_ok=True)
    _save_shards(folder, theirs)
    write_json(folder / CONFIG, config)
    if cfg.head.labels is None:
        write_json(folder / GENERATION, generation_config(config, cfg, tokenizer, sampling))
    if tokenizer is not None:
        save_tokenizer(folder, tokenizer, cfg, embeds)


def _save_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        if size + tensor.nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE, metadata={"format": "pt"})
        return
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
