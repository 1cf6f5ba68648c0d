"""Well-known models of transformers that no family here can hold, and what of them has no form in lm."""

from collections.abc import Collection

from lm.schema import Tree, did_you_mean

_SPARSE = "most of its tokens attend to a few places only, by a pattern"
_CHOSEN = "a second, small attention chooses which tokens the first may see"
_JOINED = "its decoder reads source and target in one attention, behind one softmax"
_STREAMS = "its streams are mixed by gates for each channel, and its attention chooses which tokens it sees"
_WIDTHS = "each layer reads a projection of the embedding, and heads are wider in layers without a window"
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
    "deepseek_v32": _CHOSEN,
    "deepseek_v4": "its layers attend to groups of tokens that are compressed to one key",
    "doge": "its values choose which few tokens others may see",
    "electra": "its embedding is narrower than its layers",
    "esm": "it scales its embeddings by how many tokens of a row are masked",
    "embedding_gemma2": _WIDTHS,
    "embedding_gemma2_text": _WIDTHS,
    "flint": "its layers without a window are not evenly spaced",
    "gemma3n_text": "it has four residual streams that predict each other",
    "glm5_next_text": _CHOSEN,
    "glm_moe_dsa": _CHOSEN,
    "gpt_neox_japanese": "the last of its layers alone has a bias behind its attention",
    "gte": "its feed-forward has a bias behind the last matrix alone",
    "hy_v4": _CHOSEN,
    "inkling_text": "keys, values and what each sublayer gives pass short convolutions",
    "jetmoe": "its attention has experts, too",
    "laguna": "what its attention reads is multiplied by a softplus",
    "led": _SPARSE,
    "longcat_flash": "some of its experts give back what they read, and each layer attends twice",
    "longformer": _SPARSE,
    "mimo_v2_flash": "layers with a window have other numbers of heads",
    "minimax": "what its norms give is the residual stream itself, and its linear attention decays by fixed rates",
    "minimax_m3_vl_text": _CHOSEN,
    "mpnet": "it has learned positions and a bias of distances at once",
    "nllb-moe": "the class of transformers sends every token to the first two of its experts, whatever its router says",
    "paligemma": "prompts are read in both directions",
    "pegasus_x": _SPARSE,
    "phimoe": "its router scores each of a token's experts against those that are left (SparseMixer)",
    "qwen4_exp": _STREAMS,
    "qwen4_exp_text": _STREAMS,
    "rembert": "its embedding is narrower than its layers",
    "step3p5": "layers with a window may have other numbers of heads",
    "t5gemma": "its encoder has an embedding and a window of its own",
    "t5gemma2": _JOINED,
    "zamba2": "layers share the weights of one attention",
    "zaya": "its queries and keys pass convolutions, and its router is a network of several layers",
}
"""model_type -> what is particular to it."""


def refusal(hf: Tree, known: Collection[str]) -> str:
    """Returns why a config.json whose model_type is none of the known ones cannot be read, with the remedy."""
    kind, text = hf.get("model_type"), hf.get("text_config")
    inner = text.get("model_type") if isinstance(text, dict) else None
    if name := next((name for name in (kind, inner) if isinstance(name, str) and name in WHY), None):
        return f"model_type={name!r} has no form in lm: {WHY[name]}. Import another model."
    if isinstance(text, dict) and text:
        return f"model_type={kind!r} has a text_config beside other inputs, and lm reads models of text. {did_you_mean(str(inner), known)}"
    return f"model_type={kind!r} is not known. {did_you_mean(str(kind), known)}"
