"""Grouped-query attention in which some layers have other heads, values that are made of keys, or the keys of another layer."""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator
from torch import Tensor, nn

from lm.nn.activation_memory import Activations, sum_activations
from lm.nn.context import Context
from lm.nn.mixers.base import Mixer, MixerConfig
from lm.nn.mixers.grouped import GQA, GroupedConfig
from lm.nn.norm import NormConfig
from lm.nn.position.base import PositionConfig
from lm.ops.cache.cache import State
from lm.schema import MOST, MOST_LAYERS, Config, Tree

Values = Literal["own", "keys"]


class GlobalHeads(Config):
    """What is other in layers that ignore the window (Gemma 4: fewer and wider heads, whose keys are values too)."""

    n_heads: int | None = Field(None, gt=0, le=MOST)
    """Number of query heads. null: as in the others, and so below."""
    n_kv_heads: int | None = Field(None, gt=0, le=MOST)
    """Number of key and value heads."""
    head_dim: int | None = Field(None, gt=0, le=MOST)
    """Width of one head."""
    values: Values | None = None
    """What values are made of."""

    def given(self) -> Tree:
        """Returns the options that are other, by name."""
        return {name: value for name, value in self.tree().items() if value is not None}


class SharingConfig(GroupedConfig):
    """What such layers are configured by."""

    value_norm: bool = False
    """Values have an RMS norm of each head, without a weight (Gemma 4)."""
    values: Values = "own"
    """What values are made of: a projection of their own, or what keys are before their norm and rotation (Gemma 4)."""
    global_heads: GlobalHeads | None = None
    """What is other in layers that ignore the window. null: nothing."""
    shared_layers: int = Field(0, ge=0, le=MOST_LAYERS)
    """So many of the last layers have queries alone; each reads the keys and values of the last layer before them that sees as far (Brandon
    et al. 2024, arXiv:2405.12981; Gemma 3n and 4)."""

    @model_validator(mode="after")
    def _global_heads_fit(self) -> Self:
        if self.global_heads is None:
            return self
        if self.global_every is None:
            raise ValueError("global_heads are of layers that ignore the window, and none does. Set global_every, or drop global_heads.")
        heads = self.global_heads.n_heads or self.n_heads
        groups = self.global_heads.n_kv_heads or self.kv_heads
        if heads % groups:
            raise ValueError(f"global_heads: n_heads={heads} is not a multiple of n_kv_heads={groups}. Make that a divisor.")
        return self

    def of_layer(self, layer: int) -> Self:
        """Returns the config with the heads that this layer has."""
        return self if self.global_heads is None else self.of(self.layer_window(layer) is None)

    def of(self, sees_all: bool) -> Self:
        """Returns the config with the heads of layers that ignore the window, or of the others."""
        given = {} if self.global_heads is None or not sees_all else self.global_heads.given()
        return self.replace(global_heads=None, **given)

    def in_layer(self, layer: int, layers: Sequence[int]) -> MixerConfig:
        alone = self.of_layer(layer)
        if not self.shared_layers:
            return alone
        source = source_of(layer, [(each, self.layer_window(each) is None) for each in layers], self.shared_layers)
        return alone if source is None else SharedConfig(attention=alone, source=source)

    def windowed_width(self, d_model: int) -> int:
        return self.width(d_model)

    def rotary_width(self, d_model: int) -> int:
        return self.of(True).width(d_model)

    def whence(self, d_model: int) -> str:
        return "" if self.of(True).head_dim is not None else super().whence(d_model)

    def require(self, d_model: int, position: PositionConfig) -> None:
        super().require(d_model, position)
        if self.global_heads is None:
            return
        self.of(True).require(d_model, position)
        if self.global_heads.n_heads not in (None, self.n_heads) and position.acts == "bias":
            raise ValueError(f"position={position.kind} has a bias for each of {self.n_heads} heads, and global_heads.n_heads="
                             f"{self.global_heads.n_heads}. Make them alike, or use position=rope.")  # fmt: skip

    def require_layers(self, layers: Sequence[int], drafts: bool) -> None:
        super().require_layers(layers, drafts)
        for layer in layers:
            self.in_layer(layer, layers)

    def heads(self) -> dict[str, int]:
        """Returns how many heads of queries, and of keys, there are, by option, those of layers that ignore the window last."""
        found = {"n_heads": self.n_heads, "n_kv_heads": self.kv_heads}
        there = None if self.global_heads is None else self.of(True).heads()
        return found | {f"global_heads.{name}": n for name, n in (there or {}).items() if n != found[name]}

    def alters_values(self) -> bool:
        """Returns whether values are not just a projection."""
        return self.value_norm or self.values != "own"

    def further(self) -> str | None:
        """Returns the first option here that changes how keys and values are made, as it is written; None without one."""
        of_global = None if self.global_heads is None else self.global_heads.values
        used = {
            "value_norm=true": self.value_norm, f"values={self.values}": self.values != "own",
            f"global_heads.values={of_global}": of_global == "keys", f"shared_layers={self.shared_layers}": self.shared_layers > 0,
        }  # fmt: skip
        return next((said for said, there in used.items() if there), None)

    def saved_keys_values(self, d_model: int) -> int:
        """Returns how many numbers of a token's keys and values autograd saves."""
        keys = 1 + (self.qk_norm != "none")  # before and behind their norm
        values = 1 + self.value_norm
        both = self.values == "keys" and keys + values > 2  # keys as projected are values before their norm
        return (keys + values - both) * self.kv_width(d_model)

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        usual = (1 + (self.qk_norm != "none") + 1) * self.kv_width(d_model)
        further = Activations(0, self.saved_keys_values(d_model) - usual)
        return sum_activations([super().saved_activations(d_model, layer), further])

    def why_not_context_parallel(self, n: int) -> str | None:
        uneven = [f"model.attention.{name}={heads}" for name, heads in self.heads().items() if name.endswith("n_heads") and heads % n]
        return f"{uneven[0]} is not a multiple of it, and each rank attends with as many. Choose a divisor" if uneven else None

    def implied(self, d_model: int, layers: Sequence[int]) -> Tree:
        """Global heads are null where no layer has them, and written out where some have; where all have, they are those of all."""
        whole = {self.layer_window(layer) is None for layer in layers}
        names = [f"global_heads.{name}" for name in GlobalHeads.model_fields]
        if self.global_heads is None or whole != {True, False}:
            here = self.of(True) if whole == {True} else self
            mine = super(SharingConfig, here).implied(d_model, layers) | {"n_heads": here.n_heads, "values": here.values}
            return mine | dict.fromkeys(names if self.global_heads is not None else ())
        there = self.of(True)
        values = there.n_heads, there.kv_heads, there.width(d_model), there.values
        return super().implied(d_model, layers) | dict(zip(names, values, strict=True))


class ValueGQA(GQA):
    """GQA whose values have a norm without a weight, are made of what keys are projected to, or both.  Gemma 4, Google 2026."""

    def __init__(self, cfg: SharingConfig, norm: NormConfig, d_model: int, layer: int) -> None:
        super().__init__(cfg, norm, d_model, layer)
        self.of_keys = cfg.values == "keys"
        if self.of_keys:
            del self.v
        self.v_norm = norm.build_l2(self.head_dim) if cfg.value_norm else nn.Identity()

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k = self.k(x)
        return self._normed(k, self.k_norm), self.v_norm(self._heads(k if self.of_keys else self.v(x)))


def keys_seen(layer: GQA) -> str:
    """Returns by what name layers that see as far find keys and values."""
    return "keys" if layer.how.window is None else "keys in a window"


class TellingGQA(GQA):
    """GQA whose keys and values later layers read."""

    def kept(self, k: Tensor, v: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        told = ctx.shared[keys_seen(self)] = super().kept(k, v, ctx)
        return told


class TellingValueGQA(TellingGQA, ValueGQA):
    """Both."""


class ReadingGQA(GQA):
    """GQA that has queries alone, and reads the keys and values of an earlier layer.  Brandon et al. 2024, arXiv:2405.12981."""

    def __init__(self, cfg: SharingConfig, norm: NormConfig, d_model: int, layer: int, source: int) -> None:
        super().__init__(cfg, norm, d_model, layer)
        del self.k, self.v, self.k_norm
        self.source = source

    def extra_repr(self) -> str:
        return f"{self.q.out_features // self.head_dim} heads of {self.head_dim}, keys of layer {self.source}"

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        q = ctx.position.rotate(self.queries(x), ctx.angles, self.layer)
        k, v = ctx.shared[keys_seen(self)]
        return self.output(x, self.weighted(q, k, v, ctx.mask if ctx.cache is None else ctx.keys(self.source), ctx.position))


class SharedConfig(MixerConfig):
    """The mixer of a layer whose keys and values others read, or that reads those of another one."""

    attention: SharingConfig
    source: int
    """The layer whose keys and values it reads."""

    def reads(self, layer: int) -> bool:
        """Returns whether they are another layer's."""
        return layer != self.source

    def build(self, norm: NormConfig, d_model: int, layer: int) -> Mixer:
        if self.reads(layer):
            return ReadingGQA(self.attention, norm, d_model, layer, self.source)
        return (TellingValueGQA if self.attention.alters_values() else TellingGQA)(self.attention, norm, d_model, layer)

    def flops(self, d_model: int, layer: int, seq_len: int) -> int:
        return self.attention.flops(d_model, layer, seq_len)

    def saved_activations(self, d_model: int, layer: int) -> Activations:
        """Counts keys and values where they are made."""
        whole = self.attention.saved_activations(d_model, layer)
        return sum_activations([whole, Activations(0, -self.attention.saved_keys_values(d_model))]) if self.reads(layer) else whole

    def kernel_outputs(self, d_model: int, layer: int) -> Activations:
        return self.attention.kernel_outputs(d_model, layer)

    def saved_scores(self, seq_len: int, device: str) -> Activations:
        return self.attention.saved_scores(seq_len, device)

    def exchanged_activations(self, d_model: int, n: int) -> Activations:
        return self.attention.exchanged_activations(d_model, n)

    def states(self, d_model: int, layer: int) -> tuple[State, ...]:
        return () if self.reads(layer) else self.attention.states(d_model, layer)

    def divided(self, d_model: int, n: int) -> Self:
        return self.replace(attention=self.attention.divided(d_model, n))

    def why_not_context_parallel(self, n: int) -> str | None:
        return self.attention.why_not_context_parallel(n)


def source_of(layer: int, sees_all: Sequence[tuple[int, bool]], shared: int) -> int | None:
    """Returns the layer whose keys and values this one reads: itself where others read its own; None where it shares none.

    sees_all: the layers that attend, in order, and whether each has no window; shared: how many of the last of them read others' keys.
    Raises ValueError where there is no layer that sees as far.
    """
    if shared >= len(sees_all):
        raise ValueError(f"shared_layers={shared} leaves none of {len(sees_all)} layers its own keys. Lower it.")
    makers, readers = sees_all[: len(sees_all) - shared], dict(sees_all[len(sees_all) - shared :])
    last = {whole: at for at, whole in makers}
    if layer in readers:
        if (source := last.get(readers[layer])) is None:
            what = f"shared_layers={shared} leaves layer {layer} no earlier one of its own keys that sees as far"
            raise ValueError(f"{what}. Lower it.")
        return source
    return layer if any(last.get(whole) == layer for whole in readers.values()) else None
