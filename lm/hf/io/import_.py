"""From a folder of Hugging Face to a model folder of ours: what `lm import` and its Python callers do."""

import os
from collections.abc import Callable
from pathlib import Path

from lm import printing
from lm.data.tokenizer.fitting import fitted, grown, new_ids
from lm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from lm.errors import CheckpointError, ConfigError, expect
from lm.generation.text import require_fit
from lm.hf.io.bodies import headless
from lm.hf.io.card import stated
from lm.hf.io.generation import GENERATION, further_ends, sampling, with_first
from lm.hf.io.hub import local_folder
from lm.hf.io.older import read_foreign
from lm.hf.io.peft import CONFIG as ADAPTER
from lm.hf.io.peft_reading import read_peft
from lm.hf.io.reading import read_hf
from lm.hf.io.sentences import read_sentences
from lm.hf.io.whole import with_rows_of
from lm.hf.io.writing import family_for
from lm.hf.io.written import Written
from lm.nn.model_config import model_config
from lm.ops.defaults import device_unset
from lm.schema import Tree
from lm.storage.adapted import read_merged
from lm.storage.model_folder import IMPORTED, folder_hash, is_ours, read_config, resolve_model, save_model
from lm.storage.out import require_free
from lm.storage.reading import read_json
from lm.units import counted


@device_unset()
def import_model(
    source: str | Path,
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    max_seq_len: int | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = printing.say,
) -> Written:
    """Writes a Hugging Face model as a model folder, which `load`, `init_from`, `evaluate` and `export` take. Runs no code of it.

    source: a folder with config.json and safetensors, or owner/name on the hub, there at `revision`. tokenizer: tokenizer.json or a
    folder with one; None: the model's own. max_seq_len: a shorter context than its own. out, overwrite: as in `lm.export`. Raises
    ConfigError, CheckpointError, or NumericsError for a weight that is not finite.
    """
    expect("source", source, (str, os.PathLike), "Give the folder of a model, or its owner/name on the hub")
    expect("tokenizer", tokenizer, (str, os.PathLike, type(None)), "Give the path of tokenizer.json, or a folder with one")
    expect("max_seq_len", max_seq_len, (int, type(None)), "Give a whole number of tokens")
    target = require_free(out, overwrite, source)
    folder = _foreign(source, revision)
    if (folder / ADAPTER).is_file():
        raise ConfigError(f"{source}: this is an adapter, which belongs to a model. Name that, once it is imported, as base=FOLDER.")
    found = read_hf(folder, max_seq_len)
    for note in found.notes:
        say(note)
    if headless(found.config):
        say("config.json: the model has no head: lm embed makes vectors by it, and objective=contrastive or classify trains it")
    own = read_foreign(Path(os.path.expanduser(tokenizer)) if tokenizer else folder, say)
    assert found.config.vocab_size is not None
    own, beyond = fitted(own, found.config.vocab_size) if tokenizer is None else (own, [])
    if beyond:
        names = f"{', '.join(beyond[:5])}{', ...' if len(beyond) > 5 else ''}"
        say(f"tokenizer.json: left out: {counted(len(beyond), 'token')} for which the embedding has no row: {names}")
    require_fit(own, found.config.vocab_size, str(folder / "tokenizer.json"))
    own.further_ends, plain = further_ends(folder, own)
    if plain:
        say(f"eos_token_id: {', '.join(map(str, plain[:5]))} is no added token of the tokenizer, and ends no text here")
    drawn, not_kept = sampling(folder)
    if not_kept:
        say(f"{GENERATION}: not kept: {', '.join(not_kept)[:300]}")
    extra = {"parent": str(source), "tokenizer_hash": own.hash, "family": found.family.name, "sampling": drawn}
    extra["card"] = stated(folder, str(source))
    config = with_first(found.config, folder)
    if (sentences := read_sentences(folder, config)) is not None:
        config = config.replace(head=config.head.replace(pooling=sentences.pooling))
        extra["prompts"] = sentences.prompts or None
        for note in sentences.notes:
            say(note)
    save_model(target, config.tree(), found.weights, own.save, extra, overwrite)
    n = sum(weight.numel() for weight in found.weights.values())
    return Written(target, found.family.name, n, embeds=headless(config))


def import_adapter(
    source: str | Path,
    out: str | Path,
    *,
    base: str | Path,
    revision: str | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = printing.say,
) -> Written:
    """Writes an adapter of peft as a model folder that names `base`, a run, model or checkpoint folder of ours, as its parent.

    source: a folder with adapter_config.json and adapter_model.safetensors, or owner/name on the hub, there at `revision`. Raises
    ConfigError for what is no LoRA or DoRA of the base's matrices, CheckpointError for files that do not fit.
    """
    target, parent = require_free(out, overwrite, source, base), resolve_model(str(base))
    known, tokenizer = read_config(parent), load_tokenizer(parent)
    tree = known["model"]
    cfg, folder = model_config(tree, f"{parent}: model"), _foreign(source, revision)
    home = family_for(cfg, imported=known.get("family"))
    adapter, own = read_peft(folder, home, cfg, read_merged(parent)[1], say)
    if (doubt := _of_another(folder, known)) is not None:
        say(doubt)
    tokenizer, cfg = _grown_beside(tokenizer, folder), with_rows_of(cfg, own)
    assert cfg.vocab_size is not None
    require_fit(tokenizer, cfg.vocab_size, str(folder / "tokenizer.json"))
    extra = {"adapter": adapter.tree(), "parent": str(base), "parent_hash": folder_hash(parent), "tokenizer_hash": tokenizer.hash}
    extra |= {key: known[key] for key in IMPORTED if known.get(key) is not None}
    save_model(target, tree | {"vocab_size": cfg.vocab_size}, own, tokenizer.save, extra, overwrite)
    return Written(target, f"adapter of {home.name}", sum(tensor.numel() for tensor in own.values()))


def _of_another(adapter: Path, base: Tree) -> str | None:
    """Returns a line where a base that was imported has another name than what the adapter says it was trained beside; else None.
    base: what its config.json holds."""
    theirs, ours = read_json(adapter / ADAPTER, foreign=True).get("base_model_name_or_path"), base.get("parent")
    if not (isinstance(theirs, str) and isinstance(ours, str)) or base.get("step") is not None:
        return None
    if Path(theirs).name in ("", Path(ours).name):
        return None
    return f"{ADAPTER}: it was trained beside {theirs}, and base was imported from {ours}. Beside other weights it computes something else"


def _foreign(source: str | Path, revision: str | None) -> Path:
    """Returns the folder of what is imported. Raises CheckpointError where there is none, or it is of lm already."""
    folder = local_folder(str(source), revision)
    if is_ours(folder):
        raise CheckpointError(
            f"{source}: this is a model of lm already. Use it as it is: init_from={source} in lm train, from={source} elsewhere."
        )
    return folder


def _grown_beside(tokenizer: Tokenizer, adapter: Path) -> Tokenizer:
    """Returns the base's tokenizer with the special tokens that only the one in the adapter's folder has, and that one's chat template."""
    if not (adapter / "tokenizer.json").is_file():
        return tokenizer
    theirs = load_tokenizer(adapter, foreign=True)
    names = {i: theirs.special_names[i] for i in new_ids(tokenizer, theirs)}
    if not names:
        return tokenizer
    found = grown(tokenizer, [*names.values()])
    if any(found.special([name]) != i for i, name in names.items()):
        raise ConfigError(f"{adapter}: its tokenizer is not that of the base with further special tokens. Give the base that it is of.")
    found.templates = theirs.templates or found.templates
    return found
