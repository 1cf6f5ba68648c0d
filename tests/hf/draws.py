"""Random models that some family holds, or nearly: every option of every slot is drawn by its type, so that a new one is among them."""

import random
from contextlib import suppress
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from lm.errors import ConfigError
from lm.hf.io.family import TRAINING_ONLY, families
from lm.hf.options.context import changes_at
from lm.nn.model_config import ModelConfig, model_config
from lm.schema import Config, Tree, find_field, flatten, from_tree, members, nest, variants
from tests.hf.harness import LENGTH, VOCAB

INDEXER: Tree = {"attention.indexer.n_heads": 13, "attention.indexer.head_dim": 12, "attention.indexer.top_k": 4}
SIZES: Tree = {"vocab_size": VOCAB, "max_seq_len": 2 * LENGTH, "d_model": 32, "n_layers": 4, "attention.n_heads": 4, "mtp": None}
WRITTEN: dict[str, Tree] = {  # what a family writes of all that it reads, or of few numbers that are drawn
    "umt5": {"head.tied": True}, "eurobert": {"head.tied": False},  # a tied one has no weight, and is written as a body unless it was read
    "mamba": {"recurrent.width": 64}, "falcon_mamba": {"recurrent.width": 64},
    "jamba": {"recurrent.width": 64}, "glm4_moe_lite": {"position.kind": "rope"}, "deepseek_v3": {"position.kind": "rope"},
    "mistral4": {"position.kind": "rope", "position.scaling.kind": "yarn", "ffn.router.n_groups": 1, "ffn.router.top_groups": 1},
    "axk1": {"position.kind": "rope", "attention.q_rank": 6},
    **{name: {"position.kind": "rope", "attention.q_rank": 6, **INDEXER} for name in ("deepseek_v32", "glm_moe_dsa")},
    "nemotron_h": {"pattern": ["recurrent", "ffn", "attention", "ffn"]},
}  # fmt: skip
KEPT = (*SIZES, "attention.indexer.n_heads")  # with few heads, scores are 0 together, and of equal ones transformers chooses any
_TRIES = 50
INTS, FLOATS = (1, 2, 3, 4, 6, 8, 12), (0.25, 0.5, 1.0, 1.7, 4.0, 30.0)
BY_NAME: dict[str, tuple[Any, ...]] = {
    "eps": (1e-6, 1e-5, 0.1), "theta": (500.0, 1e4, 1e6), "original_len": (16, 32, 2 * LENGTH), "factor": (1.0, 2.0, 8.0),
    "pattern": (["attention"], ["recurrent", "attention"], ["recurrent", "recurrent", "recurrent", "attention"]),
    "short_factor": ([1.0, 1.1, 1.2, 1.5],), "long_factor": ([1.0, 1.5, 2.0, 4.0],), "latent_eps": (1e-6, 1e-5),
    "input_scales": ([0.5, 1.2, 0.7, 1.4, 0.8],), "attention_factor": (None, 0.5, 2.0), "labels": (["no", "yes"],),
    "sizes": ([2], [2, 3], [3, 5]),
}  # fmt: skip


def drawn(source: random.Random, name: str, mutations: int) -> ModelConfig:
    """Returns a model that this family holds, but for so many options."""
    while True:
        try:
            cfg = model_config(_mutated(source, held(source, name), mutations))
        except ConfigError:
            continue
        if changes_at(cfg.replace(max_seq_len=2 * LENGTH)) is None:  # of which an export tells that the logits of some rows differ
            return cfg


def held(source: random.Random, name: str) -> ModelConfig:
    """What of a random model comes back from a family's config.json. Raises ConfigError where its options do not fit each other."""
    family = families()[name]
    given = SIZES | family.fixed | WRITTEN.get(name, {})
    tree: Tree = {"kind": given["kind"]}
    cls = ModelConfig.kinds()[given["kind"]]
    for key, field in cls.model_fields.items():
        tree[key] = _value(source, field, key, given)
    return family.config(family.hf(model_config(nest(flatten(tree)))))


def _mutated(source: random.Random, cfg: ModelConfig, mutations: int) -> Tree:
    tree = cfg.tree()
    for _ in range(mutations):
        path = source.choice([path for path in flatten(tree) if path not in KEPT and not path.startswith(TRAINING_ONLY)])
        _, field = find_field(type(cfg), tree, path.split("."))
        if field is not None and not path.endswith("kind"):
            tree = nest(flatten(tree) | {path: _one(source, field, path, {})})
    return tree


def _value(source: random.Random, field: Any, path: str, given: Tree) -> Any:
    """The family's; or the default, half of the time; or any of this type."""
    if path in given:
        return given[path]
    fixed = any(key.startswith(f"{path}.") for key in given)
    if not fixed and not field.is_required() and (path.startswith(TRAINING_ONLY) or source.random() < 0.5):
        default = field.get_default(call_default_factory=True)
        return default.tree() if isinstance(default, Config) else default
    return _one(source, field, path, given)


def _one(source: random.Random, field: Any, path: str, given: Tree) -> Any:
    kinds = variants(field.annotation)
    parts = [part for part in members(field.annotation) if part is not NoneType]
    if NoneType in members(field.annotation) and not any(key.startswith(f"{path}.") for key in given) and source.random() < 0.3:
        return None
    if kinds:
        kind = given.get(f"{path}.kind") or source.choice(sorted(kinds))
        fields = kinds[kind].model_fields.items()
        for _ in range(_TRIES):  # part by part, since almost no draw of all options at once fits together
            tree = {key: _value(source, field, f"{path}.{key}", given) for key, field in fields} | ({"kind": kind} if kind else {})
            with suppress(ConfigError):
                from_tree(kinds[kind], nest(flatten(tree)))
                break
        return tree
    part, last = parts[0], path.rpartition(".")[2]
    if last in BY_NAME:
        return source.choice(BY_NAME[last])
    if get_origin(part) is Literal:
        return source.choice(get_args(part))
    return source.choice({bool: (True, False), int: INTS, float: FLOATS}[part])
