"""Queries that grow with their position, as Mistral AI's files tell it: a rate among the rotary parameters."""

from lm.errors import ConfigError
from lm.hf.options.rope import write_rope
from lm.schema import Tree

RATE = "llama_4_scaling_beta"
_ORIGINAL = "original_max_position_embeddings"
_SCALED = ("llama3", "yarn", "longrope")  # kinds whose original length transformers completes


def rate_apart(hf: Tree, usual: Tree) -> Tree:
    """Returns config.json with the rate beside the rotary parameters, not among them.  usual: these, where the file has none."""
    told = hf.get("rope_scaling") or hf.get("rope_parameters") or usual
    rope = {key: value for key, value in told.items() if key not in (RATE, "max_position_embeddings")}
    return {**hf, "rope_scaling": None, "rope_parameters": rope, RATE: told.get(RATE)}


def read_growth(hf: Tree, name: str) -> Tree:
    """Returns our option.  hf: of `rate_apart`; name: of the family."""
    rope, rate = hf["rope_parameters"], hf[RATE]
    every = rope.get(_ORIGINAL)
    if rope.get("rope_type", rope.get("type")) in _SCALED:
        every = hf.get(_ORIGINAL) or every or hf["max_position_embeddings"]
    if missing := next((key for key, value in ((RATE, rate), (_ORIGINAL, every)) if value is None), None):
        raise ConfigError(f"config.json: {missing} is missing among the rotary parameters, and {name} needs it. Restore the file.")
    return {"attention.query_growth": {"rate": rate, "every": every} if rate else None}


def write_growth(ours: Tree) -> Tree:
    """Returns the rotary keys of config.json, the rate among them."""
    there, growth = write_rope(ours), {key: ours.get(f"attention.query_growth.{key}") for key in ("rate", "every")}
    every = growth["every"] or there["rope_parameters"].get(_ORIGINAL) or ours["max_seq_len"]
    grown = {**there["rope_parameters"], RATE: growth["rate"] or 0.0, _ORIGINAL: every}
    return {**there, "rope_scaling": None, "rope_parameters": grown}  # transformers would take the former, without a rate
