"""The text model within a model of several kinds of inputs."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from lm.errors import CheckpointError
from lm.hf.io.family import Family
from lm.hf.io.files import Files
from lm.hf.io.unread import WHY
from lm.nn.head import HeadConfig
from lm.schema import Tree
from lm.units import counted

_ROOTS = ("language_model.", "text_model.")
"""What stands before, or within, the names of its tensors."""
_THINKER = "thinker."
"""What stands before the names of all tensors of the part that writes texts, where another part speaks them."""
_HEAD = "lm_head.weight"
_HEADS = ("lm_head", "score")
_LABELS = ("id2label", "label2id", "num_labels", "problem_type")
"""Which a whole that tells labels has beside its text_config, where others are of no account."""
_SAME = {
    "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4", "glm4v_moe_text": "glm4_moe", "qwen2_5_omni_text": "qwen2", "qwen3_omni_moe_text": "qwen3_moe",
}  # fmt: skip
"""Text models -> the family that they are of: in a text, the three numbers of their positions are one."""
_FUSED: dict[str, Tree] = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
"""Those whose files have the experts of a layer as one tensor, and the family's one by one -> what they always do."""
_OTHERWISE: dict[str, Tree] = {
    "glm4v_text": {"head_dim": None, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5},
    "glm4v_moe_text": {"attention_bias": True},
    "qwen2_vl_text": {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    "qwen2_5_vl_text": {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    "qwen2_5_omni_text": {"rope_theta": 1e6, "num_key_value_heads": 4},
    "qwen3_vl_text": {"rope_theta": 5e5},
    "qwen3_vl_moe_text": {"rope_theta": 5e5, "num_experts_per_tok": 4, "num_key_value_heads": 16},
    "qwen3_omni_moe_text": {"rope_theta": 1e6, "norm_topk_prob": True},
}
"""What transformers takes where theirs does not say, and the class of the family takes otherwise."""
_FLAT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
"""Whole models -> their text models, whose options older files have beside the others."""
_BESIDE = ("vision_config", "image_token_id", "video_token_id")
_GRID = ("mrope_section", "mrope_interleaved")


def _usual(vocab: int, longest: int, d_model: int, n_layers: int, n_heads: int, hidden: int) -> Tree:
    return {
        "vocab_size": vocab, "max_position_embeddings": longest, "hidden_size": d_model, "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads, "intermediate_size": hidden,
    }  # fmt: skip


USUAL: dict[str, Tree] = {
    "gemma3_text": _usual(262208, 131072, 2304, 26, 8, 9216),
    "llama": _usual(32000, 2048, 4096, 32, 32, 11008),
    "mistral": _usual(32000, 131072, 4096, 32, 32, 14336),
    "qwen2": _usual(151936, 32768, 4096, 32, 32, 22016),
    "qwen3": _usual(151936, 32768, 4096, 32, 32, 22016),
}
"""What transformers takes where a text_config does not say: files of transformers 4 have in it what is other alone (Gemma 3, LLaVA)."""


def thinker_of(hf: Tree) -> Tree:
    """Returns the config.json of the part that writes texts, where another part speaks them (Qwen Omni); else this one."""
    if not isinstance(thinker := hf.get("thinker_config"), dict):
        return hf
    return hf | {"tie_word_embeddings": False} | thinker | {"model_type": hf.get("model_type")}


def text_of(hf: Tree, families: Mapping[str, Family]) -> Tree | None:
    """Returns the config.json of the text model within this one; None where it has none of a known family, or is one itself."""
    kind = str(hf.get("model_type"))
    text = hf.get("text_config", hf | {"model_type": _FLAT[kind]} if kind in _FLAT else None)
    if kind in families or kind in WHY or not isinstance(text, dict):
        return None
    family = families.get(_SAME.get(str(text.get("model_type")), str(text.get("model_type"))))
    if family is None:
        return None
    shared = {key: hf[key] for key in ("tie_word_embeddings", "quantization_config", "auto_map") if hf.get(key) is not None}
    shared |= {key: hf[key] for key in _LABELS if key in hf}
    own = {key: _in_text(value) if key.startswith("rope_") else value for key, value in text.items() if key not in (*_BESIDE, *_LABELS)}
    classes = hf.get("architectures")
    labels = isinstance(classes, list) and len(classes) > 0 and str(classes[0]).endswith("Classification")
    named = {"model_type": family.name, "architectures": classes if labels else [family.architecture]}
    kind = str(text.get("model_type"))
    return {**USUAL.get(kind, {}), **_OTHERWISE.get(kind, {}), **own, **_FUSED.get(kind, {}), **shared, **named}


def _in_text(rope: Any) -> Any:
    """Returns rotary parameters without what tells how dimensions are divided among places in an image."""
    if not isinstance(rope, dict) or not {*_GRID} & {*rope}:
        return rope
    kinds = {key: "default" if rope[key] == "mrope" else rope[key] for key in ("type", "rope_type") if key in rope}
    return {key: value for key, value in (rope | kinds).items() if key not in _GRID}


@dataclass(frozen=True)
class _Matrix:
    """One matrix of an expert within the tensor that has those of a layer.  name: of the tensor; half: of its two; None: it is alone."""

    name: str
    expert: int
    half: int | None
    n: int  # experts
    d_model: int

    def of(self, layer: Tensor) -> Tensor:
        """Returns it, (out, in).  layer: (e, out, in), or (e, in, out) as transformers 4 has it. Raises CheckpointError for another."""
        wide = -1 if self.half is not None else -2  # where d_model stands: what is not alone reads the model's stream
        if layer.dim() != 3 or len(layer) != self.n or self.d_model not in layer.shape[1:]:
            rule = f"config.json has {self.n} experts and hidden_size={self.d_model}"
            raise CheckpointError(f"{self.name} has the shape {tuple(layer.shape)}, and {rule}. Restore one of the files.")
        found = layer[self.expert] if layer.shape[wide] == self.d_model else layer[self.expert].mT
        return found.contiguous() if self.half is None else found.chunk(2)[self.half].contiguous()


def _matrices(where: Mapping[str, str], text: Tree) -> dict[str, _Matrix]:
    """Returns the matrices of experts by the names that they have one by one.  where: the names of tensors."""
    found, n, d_model = dict[str, _Matrix](), text.get("num_local_experts", text.get("num_experts")), text.get("hidden_size")
    if type(n) is not int or type(d_model) is not int:  # which whoever reads the config refuses
        return found
    parts: dict[str, list[tuple[str, int | None]]] = {
        "experts.gate_up_proj": [("gate_proj", 0), ("up_proj", 1)], "experts.down_proj": [("down_proj", None)],
    }  # fmt: skip
    for key, name in where.items():
        layer = key.rpartition(".")[0]
        for part, half in parts.get(".".join(key.split(".")[-2:]), []):
            found |= {f"{layer}.{i}.{part}.weight": _Matrix(name, i, half, n, d_model) for i in range(n)}
    return found


class TextFiles:
    """Its tensors, by the names that they have in the file of a text model."""

    def __init__(self, files: Files, text: Tree) -> None:
        """text: `text_config`."""
        self._files, rooted = files, has_root(files.names)
        self._where = {key: name for name in files.names if (key := within(name, rooted)) is not None}
        self._experts = _matrices(self._where, text) if text.get("model_type") in _FUSED else {}
        whole = {matrix.name for matrix in self._experts.values()}
        self.names = {key for key, name in self._where.items() if name not in whole} | self._experts.keys()
        self._layer = lru_cache(maxsize=1)(files.read)  # which is read for each of its experts

    def read(self, key: str) -> Tensor:
        """As `Files.read`."""
        if (matrix := self._experts.get(key)) is None:
            return self._files.read(self._where[key])
        return matrix.of(self._layer(matrix.name))

    def tied(self, hf: Tree) -> Tree:
        """Returns config.json, which says whether the head is the embedding where only the tensors tell."""
        if _HEAD not in self.names:
            return {**hf, "tie_word_embeddings": True}
        return {"tie_word_embeddings": False, **hf}

    def notes(self, whole: Tree, head: HeadConfig) -> list[str]:
        """Returns what was left out, and what may differ there, for the user.  whole: config.json; head: of the text model."""
        kind, others = whole.get("model_type"), sorted(self._files.names - set(self._where.values()))
        parts = ", ".join(dict.fromkeys(".".join(name.split(".")[:2]) for name in others))
        left = f"{counted(len(others), 'tensor')} of other inputs" + (f" ({parts[:200]})" if others else "")
        found = [f"config.json: model_type={kind!r}: its text model alone is read; left out: {left}"]
        changed = {"scale": head.scale if head.scale != 1.0 else None, "softcap": head.softcap}
        found += [
            f"config.json: logits have model.head.{name}={value:g}, which the class of {kind} in transformers may leave out"
            for name, value in changed.items()
            if value is not None
        ]
        told = [each.get("tie_word_embeddings") for each in (whole, whole.get("text_config", {}))]
        if head.labels is None and _HEAD not in self.names and False in told and True not in told:
            found.append("config.json: tie_word_embeddings=False, and no tensor is a head: the embedding takes its place")
        return found


def has_root(names: Collection[str]) -> bool:
    """Returns whether the tensors of a text model have a root of their own among these names."""
    return any(root in name for name in names for root in _ROOTS)


def of_whole(names: Collection[str]) -> bool:
    """Returns whether these are names of tensors of a model of several kinds of inputs. Some have those of a text model alone."""
    return has_root(names) or any(name.startswith(_THINKER) for name in names)


def within(name: str, rooted: bool) -> str | None:
    """Returns the name that a tensor, or a module, of the text model has there; None for any other.  rooted: as `has_root` says of all."""
    name = name.removeprefix(_THINKER)
    for root in _ROOTS:
        if name.startswith(root) or f".{root}" in name:
            return name.replace(root, "", 1)
    beside = not rooted and name.startswith("model.") and not name.startswith("model.visual.")
    return name if name.partition(".")[0] in _HEADS or beside else None
