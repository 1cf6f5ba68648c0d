"""What a user can get wrong in a model's config and in a batch: each message names the key, the value, the rule and the remedy."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lm.errors import ConfigError
from lm.nn.batch import Batch
from lm.nn.mixers.base import AttentionConfig
from lm.nn.model_config import ModelConfig, model_config
from lm.nn.transformer import build_model
from lm.schema import Config, Tree, variants
from lm.testing.models import BASE, tokens
from tests.nn.models import BESIDE, CONV, DELTA, EXPERT, MAMBA2, MIXTURES, MLA, RG_LRU, with_kinds

MOE = MIXTURES[0]
DENSE = {"kind": "mlp", "hidden": 24}
INDEXER = {"n_heads": 2, "head_dim": 8, "top_k": 4}
LONG = {"kind": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_len": 16}


def scaled(**scaling: Any) -> Tree:
    return {"position": {"kind": "rope", "scaling": scaling}}


def attention(**fields: Any) -> Tree:
    return {"attention": {"n_heads": 4} | fields}


def moe(**fields: Any) -> Tree:
    return {"ffn": MOE | fields}


def sigmoid(**fields: Any) -> Tree:
    return {"ffn": MOE | {"router": {"kind": "sigmoid"} | fields}}


ENCODER_DECODER: Tree = {"kind": "encoder_decoder"}

MISTAKES: list[tuple[Tree, str]] = [
    (attention(window=0), "attention.window: 0 does not fit. The value must be greater than 0."),
    (attention(window=-3), "attention.window: -3 does not fit. The value must be greater than 0."),
    (attention(softcap=0.0), "attention.softcap: 0.0 does not fit. The value must be greater than 0."),
    (attention(keep_first=4), "attention: keep_first=4 has no effect without a window. Set window, or drop keep_first."),
    (attention(window=8, keep_first=4, value_residual=True), "keep_first=4 has no form with value_residual=true. Leave one of them out."),
    (attention(window=8, keep_first=4, qk_norm="rotated"), "keep_first=4 has no form with qk_norm=rotated. Leave one of them out."),
    (attention(value_residual=True, qk_norm="rotated"), "value_residual=true has no form with qk_norm=rotated. Leave one of them out."),
    (attention(value_residual=True, query_growth={"rate": 0.1, "every": 8}), "value_residual=true has no form with query_growth."),
    (attention(value_residual=True, value_embedding={}), "value_embedding has no form with value_residual=true. Leave one of them out."),
    (attention(window=8, keep_first=4, value_embedding={}), "value_embedding has no form with keep_first=4. Leave one of them out."),
    (attention(query_growth={"rate": 0.1, "every": 8}, value_embedding={}), "value_embedding has no form with query_growth. Leave one of"),
    (attention(value_embedding={"at": 2}), "attention.value_embedding: at=2 is none of every=2 layers. Lower it, or drop it."),
    (attention(value_embedding={"every": 4}), "value_embedding.every=4 is of no layer that attends. Lower it, or set at."),
    (attention(value_embedding={"channels": 33}), "value_embedding.channels=33 is above d_model=32. Lower it."),
    (attention(value_embedding={}) | {"mtp": {"depth": 1}}, "value_embedding looks up the token of a place, and the blocks of mtp read tw"),
    (attention(global_heads={"head_dim": 8}), "global_heads are of layers that ignore the window, and none does. Set global_every, or dro"),
    (
        attention(window=8, global_every=2, global_heads={"n_kv_heads": 3}),
        "global_heads: n_heads=4 is not a multiple of n_kv_heads=3. Make that a divisor.",
    ),
    (
        attention(window=8, global_every=2, global_heads={"n_heads": 8, "head_dim": 4}) | {"position": {"kind": "alibi"}},
        "position=alibi has a bias for each of 4 heads, and global_heads.n_heads=8. Make them alike, or use position=rope.",
    ),
    (attention(window=8, global_every=2, global_heads={"head_dim": 7}), "position.fraction=1.0 of head_dim=7 rotates 7 dimensions. Choose"),
    (attention(window=8, global_every=2, global_heads={"n_heads": 3, "n_kv_heads": 3}), "d_model=32 is not a multiple of n_heads=3. Chan"),
    (attention(shared_layers=3), "shared_layers=3 leaves none of 3 layers its own keys. Lower it."),
    (
        attention(window=8, global_every=2, shared_layers=2),
        "shared_layers=2 leaves layer 1 no earlier one of its own keys that sees as far. Lower it.",
    ),
    (attention(shared_layers=1, forget=True), "forget=true has no form with shared_layers=1. Leave one of them out."),
    (attention(value_norm=True, value_residual=True), "value_residual=true has no form with value_norm=true. Leave one of them out."),
    (attention(values="keys", value_embedding={}), "value_embedding has no form with values=keys. Leave one of them out."),
    (
        attention(window=8, global_every=2, global_heads={"head_dim": 8}, value_residual=True),
        "value_residual=true mixes values of heads that are alike, and global_heads are not. Leave one out.",
    ),
    ({"embed": {"per_layer": {"channels": 4}}, "block": {"kind": "parallel"}}, "embed.per_layer is read behind the feed-forward, and bloc"),
    ({"embed": {"per_layer": {"channels": 4}}, "residual": {"kind": "hyper"}}, "embed.per_layer adds to one residual stream, and residual"),
    ({"embed": {"per_layer": {"channels": 4}}, "mtp": {"depth": 1}}, "embed.per_layer has a vector for each layer, and blocks of mtp are"),
    (ENCODER_DECODER | {"embed": {"per_layer": {"channels": 4}}}, "embed.per_layer has no form in layers with cross-attention. Set it to"),
    (
        ENCODER_DECODER | {"block": {"kind": "sequential", "stream_gain": True}},
        "block.stream_gain=true has no form in layers with cross-attention. Set it to false in an encoder-decoder.",
    ),
    ({"ffn": {"kind": "mlp", "last": {"n": 3, "hidden": 8}}}, "ffn.last.n=3 is not less than 3 layers. Lower it, or set ffn.hi"),
    (moe(expert=EXPERT | {"last": {"n": 1, "hidden": 8}}), "expert.last is of layers that all have one feed-forward. Set expert.las"),
    ({"ffn": BESIDE | {"n_shared": 1}}, "n_shared has no form in ffn=beside, whose mlp every token passes. Leave it out, or use ffn=moe."),
    ({"ffn": BESIDE, "norm": {"kind": "rms", "place": "post"}}, "ffn=beside has norms before its parts, and norm.place=post none. Use pl"),
    (
        {"ffn": BESIDE, "block": {"kind": "sequential", "recurrent_place": "post"}, "recurrent": CONV, "pattern": ["recurrent"]},
        "ffn=beside has norms before its parts, and recurrent_place=post none. Use place=pre or sandwich.",
    ),
    ({"ffn": BESIDE, "block": {"kind": "parallel"}}, "ffn=beside reads the residual stream itself, and in block=parallel what a norm"),
    (attention(kind="differential", qk_norm="rotated"), "qk_norm=rotated has no form in attention=differential. Use qk_norm=head."),
    (attention(window=8, keep_first=4) | {"position": {"kind": "learned"}}, "position=learned has told already where they stand."),
    (attention(window=8, keep_first=4, chunked=True), "keep_first=4 has no form with chunked=true. Leave one of them out."),
    (attention(chunked=True), "chunked=true cuts documents into chunks of window tokens, and window is null. Set window, or drop chunked."),
    (attention(kind="differential", qk_norm="l2"), "qk_norm=l2 has no form in attention=differential. Use qk_norm=head."),
    (attention(qk_norm="l2") | {"position": {"kind": "alibi"}}, "qk_norm=l2 is of layers that rotate, and position=alibi rotates none."),
    (attention(query_growth={"rate": 0.1, "every": 8, "unrotated": True}), "unrotated=true leaves out layers that rotate, and all do. Set"),
    (moe(weigh_inputs=True, expert={"kind": "mlp", "bias": True}), "weigh_inputs=true lets an expert read nothing of a token that"),
    (attention(forget=True, window=8, keep_first=4), "keep_first=4 has no form with forget=true. Leave one of them out."),
    (attention(forget=True, value_residual=True), "value_residual=true has no form with forget=true. Leave one of them out."),
    (attention(forget=True, qk_norm="l2"), "qk_norm=l2 has no form with forget=true. Leave one of them out."),
    (attention(forget=True, query_growth={"rate": 0.1, "every": 8}), "query_growth has no form with forget=true. Leave one of them out."),
    (attention(kind="differential", forget=True), "attention.forget: there is no such key."),
    (attention(forget=True, indexer=INDEXER), "indexer has no form with forget=true. Leave one of them out."),
    (attention(forget=True, disentangled={}), "forget=true has no form with disentangled. Leave one of them out."),
    (attention(shared_layers=1, disentangled={}), "disentangled has no form with shared_layers=1. Leave one of them out."),
    (attention(disentangled={}), "disentangled reads distances of its own, beside position=rope. Use position=none, or learned."),
    (attention(disentangled={}) | {"position": {"kind": "none"}, "mtp": {"depth": 1}},
     "disentangled has its vectors of distances in layer 0, which the blocks of mtp draft without. Set mtp=null."),
    (attention(disentangled={}) | {"position": {"kind": "none"}, "recurrent": CONV, "pattern": ["recurrent", "attention"]},
     "disentangled has its vectors of distances in layer 0, which does not attend. Begin the pattern with attention."),
    (attention(indexer=INDEXER) | {"position": {"kind": "alibi"}}, "which position=alibi does not bias. Use position=rope"),
    (attention(window=8, indexer=INDEXER | {"every": 2}), "indexer.every=2 has no form with a window, which layers may see otherwise."),
    (attention(indexer=INDEXER | {"every": 2}) | {"mtp": {"depth": 1}}, "every=2 has no form with mtp, whose blocks draft alone. Set it"),
    (attention(indexer=INDEXER | {"head_dim": 6}), "indexer.head_dim=6 is below the 8 dimensions that rotate. Raise it, or use position"),
    (attention(kind="mla", kv_rank=8, nope_dim=4, rope_dim=10, v_dim=4, indexer=INDEXER), "indexer.head_dim=8 is below the 10 dimensions"),
    ({"attention": MLA | {"indexer": INDEXER, "query_growth": {"rate": 0.1, "every": 8}}}, "query_growth has no form with indexer. Leave"),
    (
        attention(indexer=INDEXER | {"every": 2}) | {"n_layers": 4, "recurrent": CONV, "pattern": ["recurrent", "attention"]},
        "indexer.every=2 has layer 1 see what layer 0 chooses, which does not attend. Set it to 1.",
    ),
    (attention(global_every=2), "attention: global_every=2 has no effect without a window. Set window, or drop global_every."),
    (attention(window=8, global_at=2), "attention: global_at=2 has no effect without global_every. Set it, or drop global_at."),
    (attention(window=8, global_every=2, global_at=2), "attention: global_at=2 is none of global_every=2 layers. Lower it, or drop it."),
    (attention(n_kv_heads=3), "attention: n_heads=4 is not a multiple of n_kv_heads=3. Make that one of 1, 2, 4, say."),
    (attention(qk_norm="heads"), "attention.qk_norm: 'heads' is not an option. Did you mean 'head'?"),
    (attention(dropout=1.0), "attention.dropout: 1.0 does not fit. The value must be less than 1."),
    (attention(sinks=True), "attention.sinks: there is no such key."),
    (attention(kind="mqa"), "attention.kind: 'mqa' is not an option."),
    ({"norm": "rms"}, "norm: 'rms' is a text. Write norm={'kind': 'rms'}."),
    ({"ffn": {"kind": "swiglu"}}, "Options: beside, mlp, moe, none. What model/ffn=NAME chooses in a shell is lm.config("),
    (attention(n_heads=5), "d_model=32 is not a multiple of n_heads=5. Change one, or set head_dim."),
    (attention(kind="differential", n_kv_heads=1), "n_kv_heads=1 is odd, and attention=differential takes half of the heads off the"),
    (attention(kind="differential", n_heads=1), "n_heads=1 is odd, and attention=differential takes half of the heads off the others. Use"),
    (attention(kind="differential", dropout=0.1), "attention.dropout: there is no such key."),
    (attention(head_dim=9), "position.fraction=1.0 of head_dim=9 rotates 9 dimensions. Choose an even number above 0."),
    ({"position": {"kind": "rope", "fraction": 0.4}}, "fraction=0.4 of head_dim=8 (d_model=32 / n_heads=4) rotates 3 dimensions."),
    ({"position": {"kind": "rope", "fraction": 0.01}}, "fraction=0.01 of head_dim=8 (d_model=32 / n_heads=4) rotates 0 dimensions."),
    ({"position": {"kind": "rope", "none_every": 1}}, "position.none_every: 1 does not fit. The value must be greater than 1."),
    ({"position": {"kind": "rope", "none_at": 1}}, "position: none_at=1 has no effect without none_every. Set it, or drop none_at."),
    ({"position": {"kind": "rope", "none_every": 2, "none_at": 2}}, "none_at=2 is none of none_every=2 layers. Lower it, or drop it."),
    ({"position": {"kind": "t5_relative", "n_buckets": 7}}, "position.n_buckets: 7 does not fit. The value must be a multiple of 2."),
    ({"position": {"kind": "t5_relative", "shared": False}, "mtp": {"depth": 1}}, "shared=false has a table for each layer, and mtp"),
    ({"position": {"kind": "t5_relative", "max_distance": 16}}, "max_distance=16 leaves nothing to share beyond the 16 exact distances of"),
    (scaled(kind="linear", factor=0.5), "position.scaling.factor: 0.5 does not fit. The value must be greater than or equal to 1."),
    (scaled(kind="linear"), "position.scaling.factor: a value is missing (New context length / old one). Set it."),
    (scaled(kind="proportional"), "a value is missing (Part of the pairs that turn, the fast ones (LFM3: 0.5, Gemma 4: 0.25)). Set it"),
    (scaled(kind="ntk", factor=2.0), "position.scaling.kind: 'ntk' is not an option."),
    (scaled(kind="yarn", factor=2.0, original_len=16, beta_fast=1.0), "beta_fast=1.0 is not over beta_slow=1.0. Raise beta_fast, or lower"),
    (scaled(kind="llama3", factor=2.0, original_len=16, low_freq_factor=5.0), "high_freq_factor=4.0 is under low_freq_factor=5.0."),
    (scaled(**LONG | {"long_factor": [1.0] * 3}), "scaling.long_factor has 3 factors, and 4 pairs rotate. Give one factor a pair."),
    (scaled(**LONG | {"short_factor": []}), "position.scaling.short_factor has 0 factors, and 4 pairs rotate. Give one factor a pair."),
    (scaled(**LONG | {"short_factor": [1.0, 1.0, 0.0, 1.0]}), "position.scaling.short_factor.2: 0.0 does not fit."),
    (scaled(kind="proportional", partial_rotary_factor=0.2), "scaling.partial_rotary_factor=0.2 of 4 pairs turns none. Raise it."),
    (
        {"position": {"kind": "rope", "fraction": 0.5, "scaling": {"kind": "proportional", "partial_rotary_factor": 0.5}}},
        "fraction=0.5 leaves out dimensions, and so does scaling.partial_rotary_factor=0.5. Set fraction=1.",
    ),
    ({"attention": MLA, "position": {"kind": "alibi"}}, "keeps 8 dimensions for rotation, and position=alibi does not rotate."),
    ({"attention": MLA | {"query_growth": {"rate": 0.1, "every": 8, "unrotated": True}}}, "unrotated=true leaves out layers that rotate"),
    ({"attention": MLA | {"rope_dim": 7}}, "attention.rope_dim: 7 does not fit. The value must be a multiple of 2."),
    ({"attention": {"kind": "mla", "n_heads": 4}}, "attention.kv_rank: a value is missing (Width of the latent"),
    ({"attention": MLA | {"window": 8}}, "attention.window: there is no such key."),
    (moe(expert=EXPERT | {"activation": "xielu"}), "ffn: expert.activation=xielu has weights, and experts have none for it. Choose"),
    (moe(out_norm={"kind": "rms", "place": "output"}), "out_norm.place=output is of norms around a sublayer, and this one is within."),
    (moe(top_k=5), "ffn: top_k=5 is over n_experts=4. Lower top_k, or add experts."),
    (moe(top_k=0), "ffn.top_k: 0 does not fit. The value must be greater than 0."),
    (moe(top_k=1), "ffn: top_k=1 makes the one weight of each token 1 whatever its score, so that the router learns nothing."),
    (moe(n_experts=1), "ffn.n_experts: 1 does not fit. The value must be greater than 1."),
    (moe(capacity=3, capacity_factor=1.0), "ffn: capacity=3 and capacity_factor=1.0 say the same twice. Set one of them."),
    (moe(capacity_factor=0.0), "ffn.capacity_factor: 0.0 does not fit. The value must be greater than 0."),
    (moe(first_dense=1), "ffn: first_dense=1 and every=1 leave dense layers. Set dense.hidden for them."),
    (moe(every=2), "ffn: first_dense=0 and every=2 leave dense layers. Set dense.hidden for them."),
    (moe(dense=DENSE), "ffn: dense has no effect where every layer has experts. Drop it, or set first_dense or every."),
    (moe(dense=DENSE, first_dense=3), "ffn.first_dense=3 and ffn.every=1 leave no layer of 3 with experts. Lower them, or use ffn=mlp."),
    (moe(dense=DENSE, every=4), "ffn.first_dense=0 and ffn.every=4 leave no layer of 3 with experts."),
    (moe(expert=EXPERT | {"kind": "moe"}), "ffn.expert.kind: 'moe' is not an option."),
    (moe(router={"kind": "softmax", "jitter": 1.0}), "ffn.router.jitter: 1.0 does not fit. The value must be less than 1."),
    (sigmoid(n_groups=3), "ffn: router.n_groups=3 does not divide n_experts=4. Choose a divisor."),
    (sigmoid(n_groups=2, top_groups=3), "ffn: router.top_groups=3 is over router.n_groups=2. Lower top_groups."),
    (sigmoid(n_groups=4, top_groups=1), "ffn: top_k=2 experts are not in 1 groups of 1. Lower top_k, or raise router.top_groups."),
    (sigmoid(bias=True), "ffn.router.bias: there is no such key."),
    ({"ffn": {"gated": False, "gpt_oss_limit": 7.0}}, "ffn: gpt_oss_limit=7.0 has no meaning without a gate. Set gated=true, or drop"),
    ({"ffn": {"activation": "swish"}}, "ffn.activation: 'swish' is not an option."),
    ({"norm": {"kind": "rms", "weight": False, "zero_centered": True}}, "norm: weight=false leaves nothing to learn, and zero_centered=t"),
    ({"norm": {"kind": "layer", "weight": False}}, "norm: weight=false leaves nothing to learn, and bias=true. Set bias=false, or"),
    ({"norm": {"kind": "rms", "place": "front"}}, "norm.place: 'front' is not an option."),
    ({"norm": {"kind": "rms", "place": "post"}, "block": {"kind": "parallel"}}, "place=post has no meaning in block=parallel. Use"),
    ({"ffn": {"kind": "none"}, "block": {"kind": "parallel"}}, "has a feed-forward beside each mixer, and ffn=none is none. Use block=s"),
    ({"ffn": {"kind": "none", "hidden": 8}}, "ffn.hidden: there is no such key."),
    ({"norm": {"kind": "rms", "place": "post"}, "block": {"kind": "sequential", "first_norm": False}}, "a mixer, and norm.place=post."),
    ({"block": {"kind": "parallel", "residual_scale": 0.5}}, "block.residual_scale: there is no such key."),
    (
        {"block": {"kind": "parallel"}, "parametrization": {"kind": "completep", "base_width": 8, "base_depth": 1}},
        "block=parallel has no residual_scale, which parametrization=completep sets. Use block=sequential.",
    ),
    (
        {"attention": {"n_heads": 4, "scale": 0.3}, "parametrization": {"kind": "mup", "base_width": 8, "base_head_dim": 4}},
        "parametrization=mup sets attention.scale by base_head_dim, and it is given, or has no place. Leave one out.",
    ),
    ({"head": {"transform": "sine"}}, "head.transform: 'sine' is not an option."),
    ({"head": {"transform_bias": False}}, "head: transform_bias=false has no effect without transform. Set transform, or drop it."),
    ({"head": {"scale": 0.0}}, "head.scale: 0.0 does not fit. The value must be greater than 0."),
    ({"block": {"layer_scale": 1e300}}, "block.layer_scale: 1e+300 does not fit. The value must be one that float32 holds, up to 3.4e38."),
    ({"block": {"kind": "sequential", "layer_dropout_grows": False}}, "layer_dropout_grows=false has no effect without layer_dropout."),
    ({"block": {"kind": "parallel", "layer_dropout": 1.0}}, "block.layer_dropout: 1.0 does not fit. The value must be less than 1."),
    ({"embed": {"smear": {"channels": 33}}}, "embed.smear.channels=33 is above d_model=32. Lower it."),
    ({"embed": {"segments": 0}}, "embed.segments: 0 does not fit. The value must be greater than 0."),
    ({"mtp": {"depth": 0}}, "mtp.depth: 0 does not fit. The value must be greater than 0."),
    ({"pattern": ["recurrent"]}, "pattern=[recurrent] names recurrent layers, and recurrent is null. Choose one, as in"),
    ({"recurrent": CONV}, "recurrent=short_conv mixes in no layer of 3 with pattern=[attention]. Set pattern=[recurrent,attention], say,"),
    ({"recurrent": CONV, "pattern": 3 * ["attention"] + ["recurrent"]}, "recurrent=short_conv mixes in no layer of 3 with pattern=[attent"),
    ({"recurrent": CONV, "pattern": ["recurrent"]}, "position=rope acts within attention, and pattern=[recurrent] leaves none in 3"),
    ({"pattern": ["attention", "ffn"]}, "pattern=[attention,ffn] names layers of a feed-forward alone, which are of block=single. "),
    ({"pattern": ["both"]}, "pattern=[both] names recurrent layers, and recurrent is null. Choose one, as in"),
    ({"block": {"kind": "sequential", "recurrent_scale": 0.5}}, "recurrent_scale=0.5 has no layer, as pattern=[attention] names none"),
    ({"block": {"kind": "sequential", "ffn_scale": 0.5}, "ffn": {"kind": "none"}}, "ffn_scale=0.5 is of feed-forwards, and ffn=none"),
    ({"ffn": {"kind": "mlp", "gated": False, "gate_scale": 0.5}}, "gate_scale=0.5 has no meaning without a gate. Set gated=true, or drop"),
    ({"recurrent": {"kind": "mamba", "width": 8, "rank": 2, "inner_weight": True}, "pattern": ["recurrent", "attention"]},
     "inner_weight=true is of norms, and inner_eps=null leaves them out. Set inner_eps=1e-6, or inner_weight=false."),
    ({"recurrent": MAMBA2 | {"input_scales": [1.0]}, "pattern": ["recurrent", "attention"]}, "input_scales=[1.0] are of five projections"),
    (
        {"block": {"kind": "single"}, "pattern": ["attention", "ffn"], "n_layers": 1},
        "pattern=[attention,ffn], which n_layers=1 cuts short, names none. Name ffn in it",
    ),
    ({"block": {"kind": "single"}}, "block=single has its feed-forwards in layers of their own, and pattern=[attention] names none. Na"),
    ({"block": {"kind": "single"}, "pattern": ["ffn"], "position": {"kind": "none"}}, "pattern=[ffn] leaves no layer in which tokens read"),
    ({"block": {"kind": "single"}, "pattern": ["attention", "ffn"], "ffn": {"kind": "none"}},
     "block=single has layers of feed-forwards, and ffn=none is none. Use block=sequential."),
    ({"block": {"kind": "single"}, "pattern": ["ffn", "attention"], "ffn": MIXTURES[1]},
     "ffn.first_dense=0 and ffn.every=2 leave no layer of 2 with experts. Lower them, or use ffn=mlp."),
    ({"recurrent": CONV, "pattern": ["conv"]}, "pattern.0: 'conv' is not an option. Options: "),
    ({"recurrent": CONV, "pattern": []}, "pattern: [] is empty."),
    ({"recurrent": CONV | {"kernel": 1}, "pattern": ["recurrent"]}, "recurrent.kernel: 1 does not fit. The value must be greater than 1."),
    ({"kind": "encoder", "recurrent": CONV, "pattern": ["recurrent", "attention"]}, "recurrent=short_conv reads from left to right,"),
    ({"recurrent": DELTA | {"n_k_heads": 3}, "pattern": ["recurrent"]}, "n_k_heads=3 does not divide n_heads=4. Choose a divisor."),
    ({"recurrent": MAMBA2 | {"groups": 3}, "pattern": ["recurrent"]}, "groups=3 does not divide n_heads=4. Choose a divisor."),
    ({"recurrent": RG_LRU | {"n_heads": 5}, "pattern": ["recurrent"]}, "n_heads=5 does not divide width=24. Choose a divisor."),
    ({"recurrent": CONV, "pattern": ["recurrent", "attention"], "attention": {"n_heads": 4, "value_residual": True}},
     "value_residual=true mixes in the values of layer 0, which does not attend. Begin the pattern with attention."),
    ({"mtp": {"depth": 1}, "attention": {"n_heads": 4, "value_residual": True}}, "value_residual=true reads layer 0, without which the"),
    ({"n_layers": 0}, "n_layers: 0 does not fit. The value must be greater than 0."),
    ({"kind": "encoder", "mtp": {"depth": 1}}, "mtp: there is no such key."),
    ({"kind": "encoder_decoder", "block": {"kind": "parallel"}}, "block=parallel has no place for cross-attention. Use block=sequential"),
    ({"kind": "encoder_decoder", "attention": {"kind": "differential", "n_heads": 4}}, "attention=differential has no form for cross-"),
    ({"kind": "encoder_decoder", "attention": MLA}, "attention=mla has no form for cross-attention. Use attention=gqa"),
    ({"kind": "encoder_decoder", "start_token": 61}, "start_token=61 is not below vocab_size=61. Choose a token of the vocabulary."),
    (
        attention(shared_layers=2) | {"kind": "encoder_decoder", "n_encoder_layers": 2},
        "in an encoder of 2 layers, shared_layers=2 leaves none of 2 layers its own keys. Lower it.",
    ),
    ({"kind": "encoder_decoder", "n_encoder_layers": 0}, "n_encoder_layers: 0 does not fit. The value must be greater than 0."),
    ({"kind": "prefix_lm"}, "model.kind: 'prefix_lm' is not an option."),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=lambda value: value[:60] if isinstance(value, str) else "")
def test_a_mistake_is_named_with_its_remedy(changes: Tree, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        model_config(with_kinds(BASE | {"kind": "decoder"} | changes), "model.yaml")
    line = str(error.value).splitlines()[-1]
    assert line.startswith("model.yaml: ") and line.endswith(".") and message in line


def test_what_the_mistakes_were_made_from_is_right() -> None:
    for changes in ({}, moe(), sigmoid(n_groups=2, top_groups=2), scaled(**LONG), {"attention": MLA}, {"kind": "encoder_decoder"}):
        model_config(with_kinds(BASE | {"kind": "decoder"} | changes))


LEARNED: Tree = {"position": {"kind": "learned"}}
ROWS: list[tuple[Tree, Tree, str]] = [
    ({}, {"segments": torch.zeros(2, 9, dtype=torch.int64)}, "batch.segments was given, and model.embed.segments is null."),
    ({}, {"source_tokens": tokens(2, 5)}, "batch.source_tokens was given, and a model of kind decoder reads no source."),
    (LEARNED, {"tokens": tokens(2, 49)}, "a row is 49 tokens long, and position=learned has vectors for model.max_seq_len=48."),
    (LEARNED, {"positions": torch.arange(40, 49).expand(2, -1)}, "a row is 49 tokens long, and position=learned has vectors for"),
    (LEARNED | ENCODER_DECODER, {"source_tokens": tokens(2, 50)}, "a row is 50 tokens long, and position=learned has vectors for"),
    (ENCODER_DECODER, {}, "cross-attention needs a source, and batch.source_tokens is None."),
]


def built(changes: Tree) -> Any:
    return build_model(model_config(with_kinds(BASE | {"kind": "decoder"} | changes)), seed=0)


@pytest.mark.parametrize(("changes", "given", "message"), ROWS, ids=lambda value: value[:60] if isinstance(value, str) else "")
def test_a_row_that_the_model_has_no_place_for_is_refused(changes: Tree, given: Tree, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        built(changes)(Batch(**{"tokens": tokens(2, 9)} | given))
    assert str(error.value).endswith(".")


@torch.no_grad()
def test_learned_positions_are_refused_where_a_cache_passes_their_end() -> None:
    model = built(LEARNED)
    cache = model.new_cache(2, 60)
    model(Batch(tokens(2, 48)), cache=cache)
    with pytest.raises(ConfigError, match="a row is 49 tokens long"):
        model(Batch(tokens(2, 1)), cache=cache)
    with pytest.raises(ConfigError, match="a row is 49 tokens long"):  # where no position is looked at, as on a GPU
        model.position.places(1, torch.device("meta"), start=48)


def fields(cls: type[Config]) -> Iterator[tuple[str, str]]:
    """(class.field, description) of a config and all below it."""
    for name, field in cls.model_fields.items():
        yield f"{cls.__name__}.{name}", field.description or ""
        for inner in variants(field.annotation).values():
            yield from fields(inner)


OF_A_FAMILY = {
    "MLAConfig.latent_eps": "DeepSeek", "MLAConfig.bias": "DeepSeek", "SoftmaxRouterConfig.jitter": "Switch",
    "SoftmaxRouterConfig.bias": "gpt-oss", "SigmoidRouterConfig.n_groups": "DeepSeek", "SigmoidRouterConfig.top_groups": "DeepSeek",
    "SigmoidRouterConfig.bias_rate": "DeepSeek", "SigmoidRouterConfig.scale": "DeepSeek", "MoEConfig.n_shared": "DeepSeek",
    "MoEConfig.first_dense": "DeepSeek", "MoEConfig.every": "Switch", "MLPConfig.gpt_oss_limit": "gpt-oss",
    "GQAConfig.gpt_oss_sinks": "gpt-oss", "GQAConfig.softcap": "Gemma 2", "RMSNormConfig.zero_centered": "Gemma",
    "LayerNormConfig.zero_centered": "Nemotron", "RMSNormConfig.weight": "nanochat", "LayerNormConfig.weight": "OLMo 1",
    "LayerNormConfig.bias": "PaLM", "HeadConfig.bias": "BERT", "HeadConfig.transform": "BERT", "HeadConfig.softcap": "Gemma 2",
    "HeadConfig.scale": "T5 1.0", "GQAConfig.global_at": "ModernBERT", "SequentialConfig.first_norm": "ModernBERT",
    "HeadConfig.transform_bias": "ModernBERT",
    "EmbedConfig.segments": "BERT", "EmbedConfig.norm": "BERT", "SequentialConfig.residual_scale": "Granite",
    "ParallelConfig.shared_norm": "GPT-NeoX", "EncoderDecoderConfig.start_token": "BART", "RopeConfig.interleaved": "DeepSeek",
    "RopeConfig.fraction": "GPT-NeoX", "ProportionalScaling.partial_rotary_factor": "Gemma 4", "YarnScaling.truncate": "gpt-oss",
    "YarnScaling.mscale": "DeepSeek", "YarnScaling.mscale_all_dim": "DeepSeek", "DecoderConfig.mtp": "DeepSeek",
    "ShortConvConfig.kernel": "LFM2", "SigmoidRouterConfig.floor": "LFM2", "SigmoidRouterConfig.corrected": "Kolibri 1",
    "QueryGrowth.rate": "Ministral 3",
    "ValueEmbedding.most": "nanochat", "SinusoidalConfig.halves": "Marian", "SinusoidalConfig.exact": "M2M-100",
    "SinusoidalConfig.first": "M2M-100",
}  # fmt: skip


def test_what_few_families_need_names_one_of_them() -> None:
    described = dict(pair for cls in variants(ModelConfig).values() for pair in fields(cls))
    assert len(described) >= 80
    assert {name: described[name] for name, family in OF_A_FAMILY.items() if family not in described[name]} == {}


def test_heads_of_an_attention_of_ones_own_make_up_the_width_unless_it_says_otherwise() -> None:
    cfg = model_config(with_kinds(BASE))
    AttentionConfig.require(cfg.attention, 3 * cfg.attention.n_heads, cfg.position)
    assert AttentionConfig.rotary_width(cfg.attention, 3 * cfg.attention.n_heads) == 3
    with pytest.raises(ValueError, match=rf"d_model=25 is not a multiple of n_heads={cfg.attention.n_heads}\. Change one\."):
        AttentionConfig.require(cfg.attention, 25, cfg.position)
