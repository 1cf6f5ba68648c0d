"""What sentence-transformers reads beside a model in the format of transformers: how the vector of a text is read off its states."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from lm.errors import CheckpointError
from lm.hf.io.bodies import headless
from lm.nn.model_config import ModelConfig
from lm.schema import Tree
from lm.storage.atomic import write_json
from lm.storage.reading import parse_json, read_bytes
from lm.storage.run_folder import RunFolder

MODULES, TEXTS, MODEL = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
_LONE = re.compile("[\ud800-\udfff]")  # halves of surrogate pairs, which no text has
_POOLING, _NORMALIZE = "1_Pooling", "2_Normalize"
_MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
Pooling = Literal["token", "mean"]
T = TypeVar("T", list[Any], dict[str, Any])


def embeds(model: Path, cfg: ModelConfig) -> bool:
    """Returns whether vectors of texts are what this model is for: the run around its folder has trained it so, or it has no head, or reads
    the mean of a text, of which it predicts nothing."""
    if headless(cfg) or (cfg.head.labels is None and cfg.head.pooling == "mean"):
        return True
    run = RunFolder.around(model)
    return run is not None and (run.config().get("objective") or {}).get("kind") == "contrastive"


def mode_of(cfg: ModelConfig) -> str:
    """Returns the pooling that reads what `row_vectors` does."""
    return "mean_tokens" if cfg.head.pooling == "mean" else "cls_token" if cfg.kind == "encoder" else "lasttoken"


def serving_dims(model: Path, cfg: ModelConfig) -> list[int]:
    """Returns of how many first numbers vectors serve, all of them too, as the run around a model has trained; [] where only all do."""
    run = RunFolder.around(model)
    found = [] if run is None else (run.config().get("objective") or {}).get("first_dims") or []
    return [*sorted(found), cfg.d_model] if found else []


def write_sentences(folder: Path, cfg: ModelConfig, prompts: Mapping[str, str], dims: Sequence[int]) -> None:
    """Writes the files into the folder of a model, so that SentenceTransformer(folder) gives the vectors of `lm.embed`.

    prompts: what is written before texts, by its name.  dims: as of `serving_dims`, which vLLM reads in config.json.
    """
    kinds = [("", "Transformer"), (_POOLING, "Pooling"), (_NORMALIZE, "Normalize")]
    module = "sentence_transformers.models"
    found = [{"idx": i, "name": str(i), "path": path, "type": f"{module}.{kind}"} for i, (path, kind) in enumerate(kinds)]
    (folder / MODULES).write_text(json.dumps(found, indent=1), encoding="utf-8")
    for name in (_POOLING, _NORMALIZE):
        (folder / name).mkdir()
    pooling: Tree = {f"pooling_mode_{mode}": mode == mode_of(cfg) for mode in _MODES}
    write_json(folder / _POOLING / "config.json", {"word_embedding_dimension": cfg.d_model, **pooling, "include_prompt": True})
    write_json(folder / _NORMALIZE / "config.json", {})  # else the folder would be lost on its way through git
    write_json(folder / TEXTS, {"max_seq_length": cfg.max_seq_len, "do_lower_case": False})
    write_json(folder / MODEL, {"prompts": dict(prompts), "default_prompt_name": None, "similarity_fn_name": "cosine"})
    if dims:
        write_json(folder / "config.json", _read(folder / "config.json", dict) | {"matryoshka_dimensions": [*dims]})


class Sentences(NamedTuple):
    """How a folder reads the vector of a text.  prompts: what it writes before texts, by name.  notes: what is not so here."""

    pooling: Pooling
    prompts: dict[str, str]
    notes: list[str]


def read_sentences(folder: Path, cfg: ModelConfig) -> Sentences | None:
    """Returns what sentence-transformers would do with a folder; None where it has none of its files. Raises CheckpointError for files that
    are no JSON."""
    if not (folder / MODULES).is_file():
        return None
    notes, modules = list[str](), [each for each in _read(folder / MODULES, list) if isinstance(each, dict)]
    named = {str(each.get("type")).rpartition(".")[2]: str(each.get("path")) for each in modules}
    if further := named.keys() - {"Transformer", "Pooling", "Normalize"}:
        notes.append(f"{MODULES}: left out: {', '.join(sorted(further))[:200]}: expect other vectors here")
    if "Normalize" not in named:
        notes.append(f"{MODULES}: it names no Normalize, and vectors here have length 1")
    told = _read(folder / named.get("Pooling", _POOLING) / "config.json", dict)
    modes = told.get("pooling_mode") or [mode for mode in _MODES if told.get(f"pooling_mode_{mode}")] or "mean"
    found = [*map(str, modes)] if isinstance(modes, list) else [str(modes)]
    pooling: Pooling = "mean" if found in (["mean"], ["mean_tokens"]) else "token"
    ours = mode_of(cfg.replace(head=cfg.head.replace(pooling=pooling)))
    if found not in ([ours], [ours.removesuffix("_token").removesuffix("_tokens")]):
        notes.append(f"{_POOLING}: {', '.join(found)[:200]} has no form here, and vectors are those of {ours}: expect other ones")
    prompts = _prompts(_read(folder / MODEL, dict), notes)
    if prompts and pooling == "mean" and told.get("include_prompt") is False:
        notes.append(f"{_POOLING}: its means leave prompts out, and here they count: expect other vectors behind a prompt")
    texts = _read(folder / TEXTS, dict)
    if texts.get("do_lower_case"):
        notes.append(f"{TEXTS}: do_lower_case is not kept: write texts in small letters yourself")
    most, own = texts.get("max_seq_length"), cfg.max_seq_len
    if isinstance(most, int) and own is not None and most < own:
        notes.append(f"{TEXTS}: it cuts texts at {most} tokens, and this model at {own}: for that import with max_seq_len={most}")
    return Sentences(pooling, prompts, notes)


def _prompts(told: Tree, notes: list[str]) -> dict[str, str]:
    """Returns the prompts of a model by their names; adds to `notes` what is none."""
    given = told.get("prompts") or {}
    named = given if isinstance(given, dict) else {}
    prompts = {name: text for name, text in named.items() if isinstance(text, str) and text and not _LONE.search(text)}
    if wrong := [name for name, text in named.items() if text and name not in prompts] if named else ["prompts"] * bool(given):
        notes.append(f"{MODEL}: left out, as it is no text by a name: {', '.join(wrong)[:200]}")
    if isinstance(usual := told.get("default_prompt_name"), str) and usual in prompts:
        notes.append(f"{MODEL}: a text gets the prompt {usual} where none is asked for, and here none: give prompt={usual}")
    return prompts


def _read(path: Path, kind: type[T]) -> T:
    """Returns the list or object that a file holds; an empty one where there is no file."""
    if not path.is_file():
        return kind()
    try:
        found = parse_json(read_bytes(path), foreign=True)
    except ValueError as error:
        raise CheckpointError(f"{path}: the file is damaged: it is not JSON ({error}). Use another folder.") from None
    if not isinstance(found, kind):
        what = "list" if kind is list else "object"
        raise CheckpointError(f"{path}: the file is damaged: it holds no {what} in JSON. Use another folder.")
    return found
