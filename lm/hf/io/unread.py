"""Well-known models of transformers that no family here can hold, and what of them has no form in lm."""

from collections.abc import Collection

from lm.schema import Tree, did_you_mean

_SPARSE = "most of its tokens attend to a few places only, by a pattern"
_CHOSEN = "a second, small attention chooses which tokens the first may see"
_PER_LAYER = "each layer reads an embedding of the tokens of its own"
WHY: dict[str, str] = {
    "albert": "its embedding is narrower than its layers",
    "axk2": _CHOSEN,
    "bailing_hybrid": "the decay of its states has a least value, and latent attention an output gate",
    "big_bird": _SPARSE,
    "bigbird_pegasus": _SPARSE,
    "bitnet": "its matrices are rounded to three values wherever they multiply",
    "blenderbot-small": "a norm stands between its decoder's embedding and positions",
    "dbrx": "queries, keys and values are clipped",
    "deberta": "its scores add those of contents and of distances, either with a projection of its own",
    "deberta-v2": "its scores add those of contents and of distances, either with a projection of its own",
    "deepseek_v4": "its layers attend to groups of tokens that are compressed to one key",
    "deepseek_v32": _CHOSEN,
    "electra": "its embedding is narrower than its layers",
    "esm": "it scales its embeddings by how many tokens of a row are masked",
    "gemma3n_text": _PER_LAYER,
    "gemma4_text": _PER_LAYER,
    "gte": "its feed-forward has a bias behind the last matrix alone",
    "glm5_next_text": _CHOSEN,
    "glm_moe_dsa": _CHOSEN,
    "hy_v4": _CHOSEN,
    "jetmoe": "its attention has experts, too",
    "led": _SPARSE,
    "longcat_flash": "some of its experts give back what they read, and each layer attends twice",
    "longformer": _SPARSE,
    "mpnet": "it has learned positions and a bias of distances at once",
    "phimoe": "its router scores each of a token's experts against those that are left (SparseMixer)",
    "zamba2": "layers share the weights of one attention",
}
"""model_type -> what is particular to it."""


def refusal(hf: Tree, known: Collection[str]) -> str:
    """Returns why a config.json whose model_type is none of the known ones cannot be read, with the remedy."""
    kind, text = hf.get("model_type"), hf.get("text_config")
    inner = text.get("model_type") if isinstance(text, dict) else None
    if name := next((name for name in (kind, inner) if isinstance(name, str) and name in WHY), None):
        return f"model_type={name!r} has no form in lm: {WHY[name]}. Import another model."
    if isinstance(text, dict) and text:
        alone = f", of model_type={inner!r}" if isinstance(inner, str) and inner in known else ""
        return f"model_type={kind!r} has a text_config beside other inputs, and lm reads models of text. Save that one alone{alone}."
    return f"model_type={kind!r} is not known. {did_you_mean(str(kind), known)}"
