"""Another architecture that begins with a model's weights: what `lm remodel` does."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lm.data.tokenizer.tokenizer import load_tokenizer
from lm.errors import ConfigError
from lm.nn.batch import Batch
from lm.nn.ffn.experts import Experts
from lm.nn.init import initializer_of, into_residual
from lm.nn.mixers.grouped import GQA
from lm.nn.mixers.sharing import SharedConfig
from lm.nn.model_config import ModelConfig, model_config, shortest
from lm.nn.parts import RECURRENT
from lm.nn.transformer import LM, build_model
from lm.plugins import used
from lm.storage.adapted import read_merged
from lm.storage.model_folder import IMPORTED, copy_weights, resolve_model, save_model
from lm.storage.out import require_free
from lm.units import counted

Weights = dict[str, Tensor]
_MIXERS = ("attention", "recurrent", "both")
_PROBE = 512  # tokens whose logits are compared
_AGREES = 1e-5  # of the logits' norm: rounding of float32


@dataclass(frozen=True)
class Remodeled:
    """What became of a model's weights."""

    folder: Path
    n_parameters: int
    kept: int
    """Weights that are as they were, in their old place or, of repeated layers, in several."""
    made: int
    """Those that were made of others: copied into experts, averaged or repeated over heads, or set to 0."""
    drawn: dict[str, int]
    """Names of those that had to be drawn, layers as `*` -> how many."""
    left: dict[str, int]
    """Names of the old model's that have no place in the new one -> how many."""
    apart: float
    """Norm of the difference of both models' logits for a row of random tokens, as a part of that of the old model's."""
    probed: int
    """Tokens of that row."""

    @property
    def agrees(self) -> bool:
        """Whether the new model computes what the old one did, up to rounding, in rows of so many tokens."""
        return self.apart < _AGREES


def remodel(
    model: str | Path,
    out: str | Path,
    cfg: ModelConfig | None = None,
    *,
    layers: Sequence[int] | None = None,
    silent: bool = False,
    seed: int = 0,
    overwrite: bool = False,
) -> Remodeled:
    """Writes a model folder with the architecture of `cfg` and, as far as they have a place there, the weights of a run, model or
    checkpoint folder; an adapter is merged first.

    Weights of the same name and shape are copied. Each expert of a mixture begins as the feed-forward that it replaces (sparse upcycling:
    Komatsuzaki et al. 2022, arXiv:2212.05055). Heads of keys and values that become fewer are means of those that they replace (Ainslie et
    al. 2023, arXiv:2305.13245, section 2.1), or copies where they become more. A head of its own begins as the embedding that it was tied
    to, times the matrix that narrowed what it read, if any. A recurrent mixer of another kind takes no weights of the old one. All else is
    drawn as at the start of a training, from `seed`; of that, what writes to the residual stream is 0 at first.

    cfg: of the same kind, width and vocabulary; None: the old one. layers: the old layer, from 0, that each new one begins as, and by whose
    slot it is mixed where cfg has the old pattern; None: each stays (Kim et al. 2023, arXiv:2312.15166: [*range(24), *range(8, 32)] of 32).
    silent: what a layer's second and later copies add to the residual stream is 0 at first (Wu et al. 2024, arXiv:2401.02415), unless a
    norm stands behind it.  Raises ConfigError where nothing changes, for a layer that is not there, for other labels, and for a weight
    whose new shape no rule above gives.
    """
    target = require_free(out, overwrite, model)
    folder = resolve_model(str(model))
    tree, own = read_merged(folder)
    before = model_config(tree["model"], str(folder))
    cfg = _checked(cfg, before, layers, silent, folder)
    built = build_model(cfg, seed)
    found = _Carried(built, own, [*range(before.n_layers)] if layers is None else [*layers], before, folder)
    if silent and layers is not None:
        found.silence({i for i, layer in enumerate(layers) if layer in layers[:i]})
    probed = min(_PROBE, before.max_seq_len or _PROBE, cfg.max_seq_len or _PROBE)
    apart = _apart(before, dict(own), built, probed)
    tokenizer = load_tokenizer(folder)
    told = {"parent": str(model), "layers": None if layers is None else [*layers], "silent": silent, "seed": seed}
    extra = {key: tree[key] for key in IMPORTED if key != "family" and tree.get(key) is not None}
    extra |= {"remodeled": told, "tokenizer_hash": tokenizer.hash, "plugins": used(cfg)}
    like = {name: own["embed.weight"].dtype for name, _ in built.named_parameters()} | dict.fromkeys(built.self_updated(), torch.float32)
    weights = {name: p.detach().to(own[name].dtype if name in own else like[name]) for name, p in built.named_parameters()}
    save_model(target, cfg.tree(), weights, tokenizer.save, extra, overwrite)
    n = sum(p.numel() for p in built.parameters())
    return Remodeled(target, n, found.kept, found.made, found.drawn, found.left(), apart, probed)


def _checked(cfg: ModelConfig | None, before: ModelConfig, layers: Sequence[int] | None, silent: bool, folder: Path) -> ModelConfig:
    """Returns the new config, with as many layers as are named. Raises ConfigError as `remodel`."""
    n, found = before.n_layers, before if cfg is None else cfg
    if layers is not None:
        if before.kind == "encoder_decoder":
            raise ConfigError(f"layers: {folder} has layers of an encoder and of a decoder, and one list cannot name both. Leave it out.")
        if not layers or (wrong := [i for i in layers if not 0 <= i < n]):
            said = f"{wrong[0]} is none" if layers else "none is named"
            raise ConfigError(f"layers: {folder} has {counted(n, 'layer')}, from 0, and {said}. Write layers=0-{n - 1}, say.")
        found = _as_before(found, before, layers)
    if silent and len(set(layers or ())) == len(layers or ()):
        raise ConfigError(
            "silent: it is for copies of layers that are there twice, and none is. Name one twice in layers, or leave it out."
        )
    if layers is None and found.tree() == before.tree():
        raise ConfigError(f"{folder}: nothing about the model changes. Give options, such as model/ffn=moe, or layers.")
    if found.head.labels != before.head.labels:
        raise ConfigError(f"{folder}: model.head.labels stay as they are. Other ones come with lm train objective=classify.")
    if found.kind != before.kind:
        raise ConfigError(f"{folder}: its model is of kind {before.kind}, and model.kind={found.kind} reads otherwise. Leave that out.")
    return found


def _as_before(cfg: ModelConfig, before: ModelConfig, layers: Sequence[int]) -> ModelConfig:
    """Returns the config with so many layers, each mixed by the slot of the old one that it begins as, unless the pattern is another."""
    slots = [before.slot(i) for i in layers]
    if cfg.pattern != before.pattern or slots == [cfg.slot(i) for i in range(len(layers))]:
        return cfg.replace(n_layers=len(layers))
    gone = {"recurrent": None} if cfg.recurrent == before.recurrent and {*RECURRENT}.isdisjoint(slots) else {}
    return cfg.replace(n_layers=len(layers), pattern=shortest(slots), **gone)


class _Carried:
    """Fills a model, whose weights are drawn, with those of another one, and counts."""

    def __init__(self, model: LM, own: Weights, layers: Sequence[int], before: ModelConfig, folder: Path) -> None:
        self.model, self.own, self.layers, self.n_before, self.folder = model, own, layers, before.n_layers, folder
        mixers = {layer: before.parts(layer).mixer for layer in range(before.n_layers)}
        self.recurs_alike = _recurrent_kind(before) == _recurrent_kind(model.cfg)
        self.sources = {layer: mixer.source for layer, mixer in mixers.items() if isinstance(mixer, SharedConfig)}
        self.kept, self.made, self.drawn, self.used = 0, 0, dict[str, int](), set[str]()
        attending = [(at, dict(at.named_children())) for at in model.modules() if isinstance(at, GQA)]
        heads = {id(parts[name]): at.head_dim for at, parts in attending for name in ("k", "v", "k_norm") if name in parts}
        for prefix, module in model.named_modules():
            for name, p in module.named_parameters(recurse=False):
                if not (model.cfg.head.tied and p is model.embed.weight and prefix == "head"):
                    self._fill(self._there(f"{prefix}.{name}"), module, name, p, heads.get(id(module)))

    def _there(self, name: str) -> str:
        """Returns a parameter's name with the number of the old layer that this one begins as; vectors of distances, which all layers
        have, stay in the first."""
        return re.sub(r"^blocks\.(\d+)\.(?!attention\.table(_norm)?\.)", lambda found: f"blocks.{self.layers[int(found[1])]}.", name)

    @torch.no_grad()
    def _fill(self, name: str, module: nn.Module, local: str, p: nn.Parameter, head_dim: int | None) -> None:
        if name == "head.weight" and (narrow := self.own.get("head.narrow.weight")) is not None and self.model.head.narrow is None:
            p.copy_(self.own["embed.weight"].float() @ narrow.float())  # (v, width) (width, d) -> (v, d)
            self.used.add("head.narrow.weight")
            self.made += p.numel()
            return
        alike = self.recurs_alike or ".recurrent." not in name  # weights of one name mean something else in another kind
        for source in (name, *self._of_source(name), *_others(name, module, local)) if alike else ():
            if source not in self.own:
                continue
            weight = _fitting(self.own[source], p.shape, head_dim)
            if weight is None:
                there, here = ("x".join(map(str, each.shape)) for each in (self.own[source], p))
                raise ConfigError(
                    f"{self.folder}: {source} is {there}, and the new model's would be {here}. lm remodel --help says what can change."
                )
            p.copy_(weight)
            self.used.add(source)
            if source == name and self.own[source].shape == p.shape:
                self.kept += p.numel()
            else:
                self.made += p.numel()
            return
        if initializer_of(module, local, p) is into_residual:
            p.zero_()
        self.drawn[_starred(name)] = self.drawn.get(_starred(name), 0) + p.numel()

    def _of_source(self, name: str) -> list[str]:
        """Returns the name of the keys' or values' weight of the old layer that this one read."""
        found = re.fullmatch(r"blocks\.(\d+)\.(attention\.(?:[kv]|k_norm)\..*)", name)
        return [f"blocks.{self.sources[int(found[1])]}.{found[2]}"] if found and int(found[1]) in self.sources else []

    @torch.no_grad()
    def silence(self, layers: set[int]) -> None:
        """Sets to 0 what these layers add to the residual stream."""
        for module in (module for i in sorted(layers) for module in self.model.blocks[i].modules()):
            own = dict(module.named_parameters(recurse=False))
            last = {name for name, p in own.items() if initializer_of(module, name, p) is into_residual}
            for name in own.keys() & {*last, *(f"{each}_bias" for each in last), *(["bias"] if "weight" in last else [])}:
                own[name].zero_()
                self.kept, self.made = self.kept - own[name].numel(), self.made + own[name].numel()

    def left(self) -> dict[str, int]:
        """Returns the old model's weights that were not used, layers as `*`."""
        found: dict[str, int] = {}
        gone = {f"blocks.{i}" for i in range(self.n_before)} - {f"blocks.{i}" for i in self.layers}
        for name in sorted(self.own.keys() - self.used):
            whole = ".".join(name.split(".", 2)[:2])
            key = whole if whole in gone else _starred(name)
            found[key] = found.get(key, 0) + self.own[name].numel()
        return found


def _recurrent_kind(cfg: ModelConfig) -> str | None:
    return None if cfg.recurrent is None else cfg.recurrent.kind


def _starred(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _others(name: str, module: nn.Module, local: str) -> list[str]:
    """Returns the names that a weight may have had in the old model where it was another part."""
    if isinstance(module, Experts):  # ffn.experts.up, ffn.experts.up_bias
        return [name.removesuffix(f"experts.{local}") + (f"{local[:-5]}.bias" if local.endswith("_bias") else f"{local}.weight")]
    if name == "head.weight":
        return ["embed.weight"]
    if re.search(r"\.(attention|recurrent)\.", name):  # alone, or side by side in a mixer that has both
        return [name.replace(".both.", ".") if ".both." in name else re.sub(r"(blocks\.\d+\.)", r"\1both.", name)]
    plain = re.sub(r"_residual\.sublayer\.norm\.|_norm\.", "_residual.norm.", name)  # a norm before a sublayer stays
    forms = [plain, *(plain.replace("_residual.norm.", form) for form in ("_residual.sublayer.norm.", "_norm."))]
    return [re.sub(r"\.(attention|recurrent|both)(?=_residual\.|_norm\.)", f".{mixer}", form) for form in forms for mixer in _MIXERS]


def _fitting(weight: Tensor, shape: torch.Size, head_dim: int | None) -> Tensor | None:
    """Returns a weight in this shape; None where no rule gives it.

    head_dim: the weight's rows are heads of this width, of keys or values.
    """
    if weight.shape == shape:
        return weight
    if weight.ndim + 1 == len(shape) and weight.shape == shape[1:]:
        return weight.expand(shape)  # (out, in) -> (e, out, in)
    if head_dim is None or weight.shape[1:] != shape[1:] or weight.shape[0] % head_dim or shape[0] % head_dim:
        return None
    old, new = weight.shape[0] // head_dim, shape[0] // head_dim
    heads = weight.view(old, head_dim, *weight.shape[1:])
    if old % new == 0:
        return heads.unflatten(0, (new, -1)).float().mean(1).flatten(0, 1)
    return heads.repeat_interleave(new // old, 0).flatten(0, 1) if new % old == 0 else None


@torch.no_grad()
def _apart(before: ModelConfig, own: Weights, now: LM, n: int) -> float:
    """Returns the norm of the difference of logits for one row of random tokens, as a part of that of the old model's logits."""
    old = build_model(before)
    copy_weights(old.named_parameters(), own, "the old model")
    tokens = torch.randint(old.vocab_size, (1, n), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens, source_tokens=tokens if before.kind == "encoder_decoder" else None)
    first, second = (model.eval()(batch).double() for model in (old, now))
    return float((first - second).norm() / first.norm())
