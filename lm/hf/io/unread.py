"""Models that no family here can hold: what of well-known ones has no form in lm, and what a config.json says of any other."""

import difflib
import re
from collections.abc import Collection

from lm.schema import Tree

_SPARSE = "most of its tokens attend to a few places only, by a pattern"
_CHOSEN = "a second, small attention chooses which tokens the first may see"
_JOINED = "its decoder reads source and target in one attention, behind one softmax"
_STREAMS = "its streams are mixed by gates for each channel, and its attention chooses which tokens it sees"
_WIDTHS = "each layer reads a projection of the embedding, and heads are wider in layers without a window"
WHY: dict[str, str] = {
    "axk2": "its norms are gated by their input",
    "bailing_hybrid": "the decay of its states has a least value, and latent attention an output gate",
    "big_bird": _SPARSE,
    "bigbird_pegasus": _SPARSE,
    "bitnet": "its matrices are rounded to three values wherever they multiply",
    "blenderbot-small": "a norm stands between its decoder's embedding and positions",
    "dbrx": "queries, keys and values are clipped",
    "deberta": "its queries and values have a bias, and its keys none, which read distances (deberta-v2 and v3 are read)",
    "deepseek_v4": "its layers attend to groups of tokens that are compressed to one key",
    "doge": "its values choose which few tokens others may see",
    "dory": "its hidden states are kept at length 1, as in nGPT",
    "esm": "it scales its embeddings by how many tokens of a row are masked",
    "embedding_gemma2": _WIDTHS,
    "embedding_gemma2_text": _WIDTHS,
    "flint": "its layers without a window are not evenly spaced",
    "gemma3n_text": "it has four residual streams that predict each other",
    "glm5_next_text": "its streams are mixed by gates, and an attention without softmax stands beside one that chooses groups of tokens",
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
    "rembert": "embedding and head have each a width of their own",
    "step3p5": "layers with a window may have other numbers of heads",
    "t5gemma": "its encoder has an embedding and a window of its own",
    "t5gemma2": _JOINED,
    "zamba2": "layers share the weights of one attention",
    "zaya": "its queries and keys pass convolutions, and its router is a network of several layers",
}
"""model_type -> what is particular to it."""
_SOUNDS = (
    "data2vec-audio", "hubert", "moonshine", "parakeet", "seamless_m4t", "speech", "unispeech", "vits", "wav2vec2", "wavlm", "whisper",
)  # fmt: skip
"""How a model_type begins of models of sounds that have a vocabulary, too."""
_INPUTS = ("text_config", "vision_config", "audio_config")
_LISTED = "docs/huggingface.md lists the models that lm reads."


def refusal(hf: Tree, known: Collection[str]) -> str:
    """Returns why a config.json whose model_type is none of the known ones cannot be read, with the remedy."""
    kind, text = hf.get("model_type"), hf.get("text_config")
    inner = text.get("model_type") if isinstance(text, dict) else None
    if name := next((name for name in (kind, inner) if isinstance(name, str) and name in WHY), None):
        return f"model_type={name!r} has no form in lm: {WHY[name]}. Import another model."
    if kind is None:
        return "model_type is missing, which says how the weights are read. Use the config.json that belongs to them."
    if any(isinstance(hf.get(key), dict) for key in _INPUTS):
        named = f"its text model, {inner!r}" if inner is not None else "the text model in it"
        return f"model_type={kind!r} has several kinds of inputs, and lm does not know {named}. {_near(str(inner), known)}{_LISTED}"
    if str(kind).startswith(_SOUNDS):
        return f"model_type={kind!r} is a model of sounds, and lm reads models of text. Import another model."
    if not any("vocab" in key for key in hf):
        return f"model_type={kind!r} is no model of text, since this file names no vocabulary. Import another model."
    return f"model_type={kind!r} is not known. {_near(str(kind), known)}{_LISTED}"


def _near(given: str, known: Collection[str]) -> str:
    """Returns the question whether another name was meant, where that is nearly the same word with the same numbers; else nothing."""
    numbers, plain = re.findall(r"\d+", given), {name.replace("-", "_"): name for name in known}
    others = [name for name in plain if re.findall(r"\d+", name) == numbers and abs(len(name) - len(given)) <= 1]
    found = difflib.get_close_matches(given.replace("-", "_"), others, n=1, cutoff=0.88)
    return f"Did you mean {plain[found[0]]!r}? " if found else ""
