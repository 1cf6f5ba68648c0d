"""Plant one-line faults in lm/nn/, lm/ops/ and rooms beside them one at a time, and see the suite fail each time. A fault that survives is a hole in the tests.

python tools/mutate.py              # all; prints caught/total as JSON, exit 1 if one survives
python tools/mutate.py jobs=4       # on four processes at once
python tools/mutate.py only=3,7-12

Each fault names the tests that should see it, so that a run is short; that these pass without a fault is the suite's to say. Before the
first is planted, all are looked for: one whose text is not in its file exactly once is an error.
"""

import itertools
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.options import options, refuse

ROOT = Path(__file__).resolve().parent.parent

# each kind of stack
GRID = [f"nn/test_invariants.py::test_the_invariants_hold_for_every_pair_of_slot_values[{start}]" for start in (0, 20)]
REFERENCES, MASKS, POSITIONS = ["nn/test_references.py"], ["ops/test_masks.py"], ["nn/test_positions.py"]
PARITY = [f"hf/families/test_{family}.py" for family in ("llama", "qwen3", "gpt2")]
CACHE, STACKS, MOE, MLA = ["ops/test_cache.py"], ["nn/test_stacks.py"], ["nn/test_moe.py"], ["nn/mixers/test_mla.py"]
CONV = ["nn/mixers/test_short_conv.py"]
STATES = ["nn/mixers/test_recurrence.py"]
CHANNELS = ["nn/mixers/test_rg_lru.py", *CONV]
SLICES, BLOCKWISE = ["training/launch/test_tensor.py"], ["ops/test_blockwise.py"]
PAIRS, REWRITTEN = ["training/objectives/test_objectives.py"], ["data/tokenizer/test_rewritten.py"]

# (what goes wrong, file below lm, text, what it becomes, the tests that should see it); the text must stand in the file exactly once
MUTATIONS = [
    ("an off-by-one window", "ops/attention/mask.py", "(q - k).abs() < limit", "(q - k).abs() <= limit", MASKS),
    ("a window of the past only lets all of the future in", "ops/attention/mask.py", "(q - k).abs() < limit", "q - k < limit", MASKS),
    ("a token sees the next one", "ops/attention/mask.py", "earlier = k <= q", "earlier = k <= q + 1", MASKS),
    ("packed documents see each other", "ops/attention/mask.py", "seen & (self.q_documents.unsqueeze(-1) == self.k_documents.unsqueeze(-2))", "seen", MASKS),
    ("padding is seen", "ops/attention/mask.py", "seen = (k >= 0) & (q >= 0)", "seen = (k >= -1) & (q >= -1)", MASKS),
    ("an explicit mask is forgotten", "ops/attention/mask.py", "return seen if self.explicit is None else seen & self.explicit", "return seen", STACKS),
    ("a prefix is taken for a plain row", "ops/attention/mask.py", "self.k_prefix is not None or self.explicit is not None", "self.explicit is not None", MASKS),
    ("the prefix is of the queries", "ops/attention/mask.py", "earlier | self.k_prefix.unsqueeze(-2)", "earlier | self.k_prefix.unsqueeze(-1)", MASKS),
    ("a bidirectional plain row becomes causal", "ops/attention/attend.py", 'None, plain == "causal", how, sinks)', "None, True, how, sinks)", [*GRID, *STACKS]),
    ("rows that see nothing are not numbers", "ops/attention/attend.py", "scores.softmax(-1)[..., : k.shape[2]].masked_fill(~allowed.any(-1, keepdim=True), 0.0)", "scores.softmax(-1)[..., : k.shape[2]]", MASKS),
    ("the sink's weight goes to the last key", "ops/attention/attend.py", "scores.softmax(-1)[..., : k.shape[2]]", "scores.softmax(-1)[..., 1:] if sinks is not None else scores.softmax(-1)", MASKS),
    ("the fused sink is capped at nothing", "ops/attention/attend.py", "sink = sinks.to(q.dtype)[:, None, None]", "sink = 0 * sinks.to(q.dtype)[:, None, None]", MASKS),
    ("the fused bias misses the mask", "ops/attention/attend.py", "shown = shown + bias.to(q.dtype)", "shown = bias.to(q.dtype)", MASKS),
    ("a flex prefix is not seen", "ops/attention/flex.py", "key <= query if prefix is None else (key <= query) | prefix[r, j]", "key <= query", ["ops/test_flex.py"]),
    ("oneDNN's product has no gradient of its bias", "ops/linear.py", "outs.sum(0) if of_bias else None", "None", ["ops/test_linear.py"]),
    ("qkv bias dropped from the values", "nn/mixers/grouped.py", "self.v = Linear(d_model, kv_width, bias=cfg.qkv_bias)", "self.v = nn.Linear(d_model, kv_width, bias=False)", PARITY),
    ("q and k norms are swapped", "nn/mixers/grouped.py", "self._normed(self.q(x), self.q_norm)", "self._normed(self.q(x), self.k_norm)", PARITY),
    ("layers at one place of every n are the first of them", "nn/spacing.py", "(every - 1 if at is None else at)", "(0 if at is None else at)", ["nn/test_model.py", *POSITIONS]),
    ("scores scaled by the head's width, not its root", "nn/mixers/grouped.py", "1 / math.sqrt(self.width(d_model))", "1 / self.width(d_model)", PARITY),
    ("cross-attention keeps the window", "nn/mixers/gqa.py", "self.replace(**off, **none, chunked=False, value_residual=False, forget=False, qk_norm=normed)", "self", GRID),
    ("cross-attention is causal", "nn/transformer.py", "batch.source_documents, causal=False, square=square", "batch.source_documents, causal=True, square=square", STACKS),
    ("a layer mixes its own values in twice", "nn/mixers/gqa.py", "of_first * first + own * v", "of_first * v + own * v", ["nn/mixers/test_value_residual.py"]),
    ("a gate is half as wide open", "nn/mixers/token_values.py", "self.cfg.most * F.linear", "F.linear", ["nn/mixers/test_token_values.py"]),
    ("the first tokens stand where they are", "nn/mixers/streaming.py", "for angles in (ctx.angles, near)", "for angles in (ctx.angles, ctx.angles)", ["nn/mixers/test_streaming.py"]),
    ("the first tokens stand one too far", "nn/mixers/streaming.py", "(self.how.window or 0) - 1", "(self.how.window or 0)", ["nn/mixers/test_streaming.py"]),
    ("a bias knows where the first tokens are", "nn/mixers/streaming.py", "far if near is None else torch.where(", "far if near is None else torch.where(False & ", ["nn/mixers/test_streaming.py"]),
    ("the first tokens are forgotten", "ops/attention/mask.py", "near | (k < first) if first else near", "near", ["nn/mixers/test_streaming.py"]),
    ("what is kept of the first tokens is written anew", "ops/cache/ring.py", "(positions >= 0) & (positions < self.first)", "positions < self.first * self.n", ["nn/mixers/test_streaming.py"]),
    ("the first tokens are seen twice where they are in the ring", "ops/cache/ring.py", "seen.masked_fill(seen < self.first, -1)", "seen", ["nn/mixers/test_streaming.py"]),
    ("a row that joins brings other first tokens", "ops/cache/cache.py", "theirs.where_first(slots.first), rows)", "theirs.where_first(slots.first) * 0, rows)", CACHE),
    ("neighbours are a pair of heads", "nn/mixers/differential.py", "more, less = read.chunk(2, 1)", "more, less = read[:, ::2], read[:, 1::2]", ["nn/mixers/test_differential.py"]),
    ("the share of the second map starts alike in all layers", "nn/mixers/differential.py", "math.exp(-0.3 * layer)", "math.exp(-0.3)", ["nn/mixers/test_differential.py"]),
    ("feed-forwards that are not there count at the start", "nn/stack.py", "(self.parts[0].sublayers + (self.per_layer is not None))", "2", ["nn/test_no_ffn.py"]),
    ("what is no feed-forward adds something", "nn/ffn/none.py", "        return x\n", "        return x + sublayer(x)\n", ["nn/test_no_ffn.py"]),
    ("dropout of weights in eval", "nn/mixers/base.py", "self.how if self.training else self.how_in_eval", "self.how", ["nn/test_model.py"]),
    ("a memory's keys and values are swapped", "nn/mixers/gqa.py", "k, v = ctx.memory_keys(", "v, k = ctx.memory_keys(", STACKS),
    ("every layer reads the first one's memory", "nn/context.py", "return self.cache.memory[layer]", "return self.cache.memory[0]", GRID),
    ("a cached prefix is forgotten", "nn/context.py", "self.mask.k_prefix if first else None", "None", MASKS),
    ("a new source keeps the old keys", "ops/cache/cache.py", "self.memory, self.memory_positions = {}, positions", "self.memory_positions = positions", STACKS),
    ("beams keep the memory of other rows", "ops/cache/cache.py", "(k.index_select(0, rows), v.index_select(0, rows))", "(k, v.index_select(0, rows))", STACKS),
    ("a ring buffer one slot short", "ops/cache/cache.py", "(window + slack for window in", "(window + slack - 2 for window in", CACHE),
    ("rewind keeps a token", "ops/cache/ring.py", "[written - n for written, n in zip(self.written, ns, strict=True)]\n\n", "[written - n + 1 for written, n in zip(self.written, ns, strict=True)]\n\n", CACHE),
    ("a state is rewound one step too few", "ops/cache/cache.py", "back = max(ns) - torch.tensor(ns,", "back = max(ns) - 1 - torch.tensor(ns,", CONV),
    ("beams keep the state of other rows", "ops/cache/cache.py", "([x.index_select(0, rows) for x in tensors] for tensors in self.after)", "(tensors for tensors in self.after)", CONV),
    ("a state that is gone is rewound to", "ops/cache/cache.py", "return max(ns) < len(self.after)", "return max(ns) <= len(self.after)", CONV),
    ("a convolution sees the document before", "ops/recurrence/convolve.py", "((then == at) & (then >= 0))", "(then >= 0)", CONV),
    ("a convolution sees padding", "ops/recurrence/convolve.py", "((then == at) & (then >= 0))", "(then == then)", CONV),
    ("the kernel is turned round", "ops/recurrence/convolve.py", "* kernel[:, before - n]", "* kernel[:, n - 1]", CONV),
    ("padding comes between the state and the chunk", "ops/recurrence/convolve.py", "real.long().argsort(dim=1, stable=True)", "real.long().argsort(dim=1, stable=True).sort(1).values", CONV),
    ("a state forgets padding behind the chunk", "ops/recurrence/convolve.py", "real.cumsum(1)[:, before:][:, -(slack + 1) :]", "torch.ones_like(real).cumsum(1)[:, before:][:, -(slack + 1) :]", CONV),
    ("a depthwise kernel starts as small as a matrix", "nn/mixers/short_conv.py", '{"kernel": by_inputs}', "{}", CONV),
    ("a document's state goes on into the next one", "ops/recurrence/matrix.py", "enters * (of == before).unsqueeze(-1)", "enters", STATES),
    ("a chunk sees the documents before", "ops/recurrence/matrix.py", "seen & (of.unsqueeze(-1) == of.unsqueeze(-2))", "seen", STATES),
    ("the delta rule forgets what the state holds", "ops/recurrence/matrix.py", "new - held[n] @ state", "new", STATES),
    ("padding fades the state", "ops/recurrence/matrix.py", "self.each(lambda x: x.masked_fill(hidden, 0))", "self", CONV),
    ("the state is kept one token late", "nn/mixers/scan.py", "last, states = reference(flow.part(begun, s), state)", "last, states = reference(flow.part(begun, s), state); states = [states[0], *states[:-1]]", CONV),
    ("a channel's state goes on into the next document", "nn/mixers/rg_lru.py", 'torch.where(at == 0, float("-inf"), 0.0)', "torch.where(at == 0, log_a, 0.0)", CHANNELS),
    ("padding fades a channel", "nn/mixers/rg_lru.py", "torch.where(at > 0, log_a,", "torch.where(at != 0, log_a,", CHANNELS),
    ("padding is added to a channel", "nn/mixers/rg_lru.py", "torch.where(at < 0, 0.0, wide(x)", "torch.where(at < -1, 0.0, wide(x)", CHANNELS),
    ("a channel adds more than it lost", "nn/mixers/rg_lru.py", "torch.expm1(2 * log_a)", "torch.expm1(log_a)", CHANNELS),
    ("a chunk of a channel begins with nothing", "ops/recurrence/channels.py", "return torch.stack([h + f * before", "return torch.stack([h + 0 * before", CHANNELS),
    ("a channel's state is kept one token early", "ops/recurrence/channels.py", "h[:, -ends.shape[1] :])", "h[:, : ends.shape[1]])", CHANNELS),
    ("what fades and what is let in are swapped", "nn/mixers/rg_lru.py", "self.rate(mixed), self.write(mixed)", "self.write(mixed), self.rate(mixed)", CHANNELS),
    ("a frozen weight is counted as self-updated", "cost/memory.py", "for p in model.self_updated().values())", "for p in model.parameters() if not p.requires_grad)", ["cost/test_memory.py"]),
    ("a layer mixes as the one before", "nn/model_config.py", "self.pattern[layer % len(self.pattern)]", "self.pattern[(layer - 1) % len(self.pattern)]", ["nn/test_model.py"]),
    ("keys are not rotated", "nn/mixers/grouped.py", "self.layer), ctx.position.rotate(k, ctx.angles, self.layer), v", "self.layer), k, v", PARITY),
    ("queries are rotated twice", "nn/mixers/grouped.py", "return ctx.position.rotate(q, ctx.angles", "return ctx.position.rotate(ctx.position.rotate(q, ctx.angles, self.layer), ctx.angles", PARITY),
    ("layers without rotation are always the last", "nn/position/rope.py", "not is_there(layer, self.cfg.none_every, self.cfg.none_at)", "not is_there(layer, self.cfg.none_every, None)", POSITIONS),
    ("ALiBi rises with the distance", "nn/position/bias.py", "return -self._here", "return self._here", POSITIONS),
    ("T5's distance is turned round", "nn/position/bias.py", "k_positions.unsqueeze(-2) - q_positions.unsqueeze(-1)", "q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)", POSITIONS),
    ("ALiBi's odd heads", "ops/distance.py", "range(1, 2 * (n_heads - below), 2)", "range(2, 2 * (n_heads - below) + 1, 2)", POSITIONS),
    ("T5's buckets of the future", "ops/distance.py", "(distance > 0).long() * n_buckets", "(distance >= 0).long() * n_buckets", POSITIONS),
    ("T5's far distances", "ops/distance.py", "(exact + growth.long()).clamp(max=n_buckets - 1)", "(exact + growth.long()).clamp(max=n_buckets - 2)", POSITIONS),
    ("the rotation turns the wrong way in one half", "ops/rotation.py", "second * cos + first * sin", "second * cos - first * sin", REFERENCES),
    ("the fast rotation's gradient turns forward", "ops/rotation.py", "rotate(grads[0], cos, -sin)", "rotate(grads[0], cos, sin)", ["nn/test_precision.py"]),
    ("interleaved pairs are not neighbours", "ops/rotation.py", "unflatten(-1, (-1, 2)).transpose(-1, -2)", "unflatten(-1, (2, -1)).transpose(-1, -2)", POSITIONS),
    ("the amplitude is on the cosine alone", "ops/rotation.py", "angles.cos() * amplitude, angles.sin() * amplitude", "angles.cos() * amplitude, angles.sin()", POSITIONS),
    ("dynamic NTK divides once", "nn/position/scaling.py", "self.factor * longer - (self.factor - 1)", "self.factor * longer", POSITIONS),
    ("YaRN's ramp falls", "nn/position/scaling.py", "kept * (1 - ramp) + kept / self.factor * ramp", "kept * ramp + kept / self.factor * (1 - ramp)", POSITIONS),
    ("YaRN's ends are not rounded", "nn/position/scaling.py", "low, high = math.floor(low), math.ceil(high)", "low, high = low, high", POSITIONS),
    ("llama3's ramp falls", "nn/position/scaling.py", "kept * smooth + kept / self.factor * (1 - smooth)", "kept * (1 - smooth) + kept / self.factor * smooth", POSITIONS),
    ("longrope's lists are swapped", "nn/position/scaling.py", "self.long_factor if max_len > self.original_len else self.short_factor", "self.short_factor if max_len > self.original_len else self.long_factor", POSITIONS),
    ("pre-norm becomes output-norm", "nn/norm.py", "self.branch(sublayer(self.norm(x)))", "self.branch(self.norm(sublayer(x)))", PARITY),
    ("post-norm leaves the residual out", "nn/norm.py", "self.norm(x + self.branch(sublayer(x)))", "self.norm(self.branch(sublayer(x)))", STACKS),
    ("rms norm forgets eps", "ops/norm.py", "mean_square.add_(eps).rsqrt_()", "mean_square.rsqrt_()", ["nn/test_precision.py", "nn/test_norm.py"]),
    ("the rms gradient loses its mean term", "ops/norm.py", "dx.addcmul_((g.sum(-1) if w is None else g @ w).unsqueeze(-1), inverse / d)", "dx.add_(0)", ["nn/test_precision.py", "nn/test_norm.py"]),
    ("zero-centred weights are not", "nn/norm.py", "return 1.0 + self.weight", "return 1.0 * self.weight", ["nn/test_norm.py"]),
    ("a sublayer is added unscaled", "nn/norm.py", "return x if self.scale == 1.0 else x * self.scale", "return x", ["nn/test_norm.py"]),
    ("LayerScale multiplies nothing", "nn/norm.py", "return super().forward(x) * self.gain", "return super().forward(x) + 0 * self.gain", ["nn/test_norm.py"]),
    ("the gate is applied to the wrong side", "nn/ffn/mlp.py", "return act(gate) * up", "return gate * act(up)", PARITY),
    ("gpt-oss's up has no lower bound", "nn/ffn/mlp.py", "up.clamp(-limit, limit)", "up.clamp(max=limit)", MOE),
    ("the parallel block reads one norm twice", "nn/block.py", "g = h if self.ffn_norm is None else self.ffn_norm(x)", "g = h", GRID),
    ("cross-attention comes after the feed-forward", "nn/block.py", "x = self.cross_residual(x, lambda h: self.cross(h, ctx))\n        return self.ffn_residual(x, lambda h: self.ffn(h, ctx))", "x = self.ffn_residual(x, lambda h: self.ffn(h, ctx))\n        return self.cross_residual(x, lambda h: self.cross(h, ctx))", STACKS),
    ("softmax weights do not sum to 1", "nn/ffn/router.py", "weights = weights / weights.sum(-1, keepdim=True)\n        return", "weights = 1.0 * weights\n        return", MOE),
    ("the correction bias weighs", "nn/ffn/router.py", "weights = scores.gather(-1, experts)", "weights = (scores + self.correction_bias).gather(-1, experts)", MOE),
    ("groups are ranked by their best expert alone", "ops/routing.py", "groups.topk(min(counted, groups.shape[-1]), dim=-1)", "groups.topk(1, dim=-1)", MOE),
    ("sigmoid weights miss their factor", "nn/ffn/router.py", "weights * self.cfg.scale, scores", "weights, scores", MOE),
    ("softmax weights miss their factor", "nn/ffn/router.py", "weights * self.cfg.scale, probabilities", "weights, probabilities", MOE),
    ("groups of a softmax are ranked by two experts", "nn/ffn/router.py", "allowed(probabilities, 1)", "allowed(probabilities, 2)", MOE),
    ("the bias feeds the busiest expert", "nn/ffn/router.py", "torch.sign(load.mean() - load)", "torch.sign(load - load.mean())", MOE),
    ("padding takes capacity", "ops/routing.py", "F.one_hot(order, n_experts) * real.repeat(1, k).unsqueeze(-1)", "F.one_hot(order, n_experts)", MOE),
    ("one token too many per expert", "ops/routing.py", "(place <= capacity)", "(place <= capacity + 1)", MOE),
    ("second choices come before the next token's first", "ops/routing.py", "order = experts.transpose(1, 2).flatten(1)", "order = experts.flatten(1)", MOE),
    ("padding counts in the balance loss", "ops/routing.py", "total((scores * real.unsqueeze(-1)).sum(1))", "total(scores.sum(1))", MOE),
    ("padding counts in the loads", "ops/routing.py", "(none.scatter(-1, experts, 1.0) * real.unsqueeze(-1)).sum(1)", "none.scatter(-1, experts, 1.0).sum(1)", MOE),
    ("the shared expert is left out", "nn/ffn/moe.py", "if self.shared is None:", "if self.shared is None or True:", MOE),
    ("experts' layers one too early", "nn/ffn/moe.py", "(layer + 1) % self.every != 0", "layer % self.every != 0", MOE),
    ("grouped rows come back in another order", "ops/experts.py", "return _summed(rows, weights, back)", "return _summed(rows, weights, back.flip(-1))", MOE),
    ("a grouped row's gradient has another choice's weight", "ops/experts.py", "back.flatten(), weights.flatten()", "back.flatten(), weights.flip(-1).flatten()", MOE),
    ("a sum over a token's experts is rounded at each", "ops/experts.py", "dtype=wide_dtype(rows)), back", "dtype=rows.dtype), back", ["ops/test_experts.py"]),
    ("rows behind an expert's own count in its gradient", "ops/experts.py", "F.pad(gradient[first:last], (0, 0, first - begin, end - last))", "gradient[begin:end]", ["ops/test_experts.py"]),
    ("the last expert's rows are another's", "ops/experts.py", "into[first - begin : last - begin]", "into[: last - first]", ["ops/test_experts.py"]),
    ("a grouped bias is of the wrong expert", "ops/experts.py", "out + bias[chosen].to", "out + bias[chosen - 1].to", MOE),
    ("MLA's latent is not normed", "nn/mixers/mla.py", "self.kv_norm(latent).unsqueeze(1), k_rope", "latent.unsqueeze(1), k_rope", MLA),
    ("MLA's shared key is not rotated", "nn/mixers/mla.py", "k_rope = ctx.position.rotate(k_rope, ctx.angles, self.layer)", "k_rope = 1 * k_rope", MLA),
    ("MLA scores by the width without rotation", "nn/mixers/mla.py", "Scoring(cfg.scale or 1 / math.sqrt(width)", "Scoring(cfg.scale or 1 / math.sqrt(cfg.nope_dim)", MLA),
    ("the absorbed values are not expanded by head", "nn/mixers/mla.py", "out @ self.v_up.matrix().unflatten(0, (cfg.n_heads, -1)).transpose(-1, -2)", "out @ self.v_up.matrix().unflatten(0, (-1, cfg.n_heads)).transpose(0, 1).transpose(-1, -2)", MLA),
    ("the absorbed key leaves the rotated part out", "nn/mixers/mla.py", "torch.cat([q_nope, q_rope], dim=-1), torch.cat([latent", "torch.cat([q_nope, 0 * q_rope], dim=-1), torch.cat([latent", MLA),
    ("the final norm is skipped", "nn/transformer.py", "x = self.norm(self.through_blocks(x, ctx))", "x = self.through_blocks(x, ctx)", PARITY),
    ("the encoder's last norm is skipped", "nn/transformer.py", "return encoder.norm(x), positions", "return x, positions", STACKS),
    ("the source's padding is seen", "nn/transformer.py", "return encoder.norm(x), positions.expand(len(tokens), -1)", "return encoder.norm(x), positions.clamp_min(0).expand(len(tokens), -1)", STACKS),
    ("sources of other documents are seen", "nn/transformer.py", "Mask(q, source, batch.documents, batch.source_documents, causal=False", "Mask(q, source, None, None, causal=False", GRID),
    ("the encoder is causal", "nn/transformer.py", "mask = Mask(positions, positions, documents, documents, causal=False", "mask = Mask(positions, positions, documents, documents, causal=True", STACKS),
    ("a further token is of the one before", "nn/transformer.py", "self.embed(shifted(batch.tokens, n, 0))", "self.embed(shifted(batch.tokens, n - 1, 0))", ["nn/test_mtp.py"]),
    ("a further token's embedding is not scaled", "nn/transformer.py", "self.embed(shifted(batch.tokens, n, 0)) * self.embed_scale", "self.embed(shifted(batch.tokens, n, 0))", ["nn/test_mtp.py"]),
    ("blocks of multi-token prediction are never computed again", "nn/transformer.py", "hidden = self.through(block, len(self.blocks) + n - 1, ctx, hidden, later)", "hidden = block(hidden, later, ctx)", ["ops/test_recompute.py"]),
    ("a block computed again is another one", "ops/recompute.py", "layer % self.every == 0", "layer % self.every == 1", ["ops/test_recompute.py"]),
    ("kernels that drop weights are kept", "ops/recompute.py", "in _KEPT and not _draws(op, args)", "in _KEPT", ["ops/test_recompute.py"]),
    ("kept products may be changed in place", "ops/recompute.py", " and self._kept & _storages(args[:1])", " and False", ["ops/test_recompute.py"]),
    ("products are computed again", "ops/recompute.py", "_KEPT = PRODUCTS | KERNELS |", "_KEPT = KERNELS |", ["ops/test_recompute.py"]),
    ("what kernels give is not counted", "cost/memory.py", "parts.kernel_outputs()]), Activations(0, out)", "Activations(0, 0)]), Activations(0, out)", ["cost/test_recomputed_memory.py"]),
    ("cross-attention does not count as a sublayer", "nn/parts.py", "return sum(mixer.sublayers for mixer in self.mixers) + self.ffn.sublayers", "return 1 + self.ffn.sublayers", ["nn/test_model.py"]),
    ("segments are passed over", "nn/stack.py", "elif segments is not None:", "elif False:", ["nn/test_slot_errors.py"]),
    ("a cache may pass the last learned position", "nn/position/absolute.py", "if start + s > self.max_seq_len:", "if s > self.max_seq_len:", ["nn/test_slot_errors.py"]),
    ("embeddings are scaled after positions", "nn/stack.py", "x = self.position.embed(x, ctx.positions)", "x = self.position.embed(x / self.embed_scale, positions) * self.embed_scale", POSITIONS),
    ("the soft-cap of the head is skipped", "nn/head.py", "return logits if self.softcap is None else", "return logits if True else", REFERENCES),
    ("the head's scale comes too late", "nn/head.py", "else x * self.scale", "else x", ["nn/test_norm.py"]),
    ("the head reads the places without a label", "losses/tokens.py", "(labels == IGNORED).byte()", "(labels != IGNORED).byte()", ["losses/test_tokens.py"]),
    ("an unlabelled token counts", "losses/cross_entropy.py", "logsumexp(-1).square() * counted).sum()", "logsumexp(-1).square()).sum()", ["losses/test_tokens.py"]),
    ("what has no label is taught", "losses/cross_entropy.py", "else warm, beta) * counted.squeeze(-1)).sum()", "else warm, beta)).sum()", ["losses/test_teacher.py"]),
    ("further labels cross into the next document", "losses/tokens.py", "return later if documents is None else", "return later if True else", ["nn/test_mtp.py"]),
    ("every row's auxiliary loss weighs the same", "losses/tokens.py", "Auxiliary.of(ctx.reported, counted.sum(-1))", "Auxiliary.of(ctx.reported, labels.shape[-1])", MOE),
    ("a token of another rank has this one's first vector", "ops/ranks/vocabulary.py", "F.embedding(at, weight) * here.unsqueeze(-1)", "F.embedding(at, weight)", SLICES),
    ("a label of another rank is read here", "ops/ranks/vocabulary.py", "here.float().unsqueeze(-1)", "torch.ones_like(at).float().unsqueeze(-1)", SLICES),
    ("each rank's probabilities sum to 1", "ops/ranks/vocabulary.py", "highest + self._reduced((logits - highest).exp_().sum(-1, keepdim=True)).log()", "highest + (logits - highest).exp_().sum(-1, keepdim=True).log()", SLICES),
    ("the likeliest token is this rank's", "ops/ranks/vocabulary.py", "mine.indices + self._start", "mine.indices", SLICES),
    ("a slice's log-softmax forgets the other slices", "ops/ranks/vocabulary.py", "logits.sub_(self.log_z(logits))", "F.log_softmax(logits, -1)", SLICES),
    ("each chunk's gradient of the head is the first chunk's", "losses/tokens.py", "some.add_(more)", "some.add_(0 * more)", ["losses/test_tokens.py"]),
    ("the matrix of the head is not cast", "nn/head.py", "weight.to(torch.get_autocast_dtype(device))", "weight.half().float()", ["losses/test_tokens.py"]),
    ("float8 has the scale of gradients for numbers", "ops/float8.py", "rounded(weight, NUMBERS)\n            dx", "rounded(weight, GRADIENTS)\n            dx", ["adapters/test_float8.py"]),
    ("float8 keeps the caller's order", "ops/float8.py", "x.contiguous(), torch.finfo", "x, torch.finfo", ["adapters/test_float8.py"]),
    ("a length that no kernel takes is summed in float8", "ops/float8.py", "if of_weight and len(ins) % ROUND", "if of_weight and not len(ins) % ROUND", ["adapters/test_float8.py"]),
    ("an unlabelled token has a probability", "ops/ranks/vocabulary.py", "(labels >= 0).float()", "torch.ones_like(labels).float()", ["losses/test_tokens.py"]),
    ("each rank adds the whole bias", "ops/ranks/tensor_parallel.py", "out - linear.bias * (1 - 1 / self.n)", "out", SLICES),
    ("rows of slices are taken for ranks' rows", "ops/ranks/tensor_parallel.py", "torch.cat(x.chunk(n, 1)), group=group)", "x.contiguous(), group=group)", SLICES),
    ("gathered tokens have one rank's gradient", "ops/ranks/tensor_parallel.py", "return _reduce_scatter(grads[0], *ctx.way), None, None", "return grads[0].chunk(ctx.way[1], 1)[0], None, None", SLICES),
    ("ranks share a slice", "ops/ranks/tensor_parallel.py", "slice(size * rank // self.n, size * (rank + 1) // self.n)", "slice(0, size // self.n)", SLICES),
    ("tokens come back from their experts' ranks in another order", "ops/ranks/dispatch.py", "sorting.gather(back, weights)", "sorting.gather(back.flip(0), weights)", SLICES),
    ("an expert is sent another token", "ops/ranks/dispatch.py", "_Sent.apply(sorting.spread(x)", "_Sent.apply(sorting.spread(x.flip(0))", SLICES),
    ("a token counts as of another expert", "ops/ranks/dispatch.py", "repeat_interleave(each.flatten())", "repeat_interleave(each.flip(0).flatten())", SLICES),
    ("the blockwise gradient sees later keys", "ops/attention/blockwise.py", "float(\"-inf\"), dtype=q.dtype).triu_(1)", "0.0, dtype=q.dtype).triu_(1)", BLOCKWISE),
    ("the blockwise gradient of scores misses what their rows sum to", "ops/attention/blockwise.py", "grad = _with(grad, -torch", "grad = _with(grad, -0 * torch", BLOCKWISE),
    ("the blockwise gradient of keys is unscaled", "ops/attention/blockwise.py", "d_scores.mT, asking[..., :c], alpha=scale)", "d_scores.mT, asking[..., :c])", BLOCKWISE),
    ("what is taken from scores is rounded", "ops/attention/blockwise.py", "(more - high).to(x.dtype).unsqueeze(-1)", "(0 * high).unsqueeze(-1)", BLOCKWISE),
    ("an expert takes its part of all places", "ops/routing.py", "real.sum(1, keepdim=True).to(widest(real.device)) *", "torch.ones_like(real).sum(1, keepdim=True).to(widest(real.device)) *", ["ops/test_routing.py"]),
    ("padding counts in the router's z-loss", "ops/routing.py", "logits.logsumexp(-1).square() * real", "logits.logsumexp(-1).square()", ["ops/test_routing.py"]),
    ("loads are counted in the default dtype", "ops/routing.py", "device=experts.device, dtype=torch.float32)", "device=experts.device)", ["ops/test_routing.py"]),
    ("IPO's gain is a sum, not a mean over tokens", "losses/pairs.py", "super().worth(after, before, lengths) / lengths", "super().worth(after, before, lengths)", PAIRS),
    ("IPO draws the gain to twice as much", "losses/pairs.py", "(self.margin(better, other) - 0.5)", "(self.margin(better, other) - 1.0)", PAIRS),
    ("no pair is taken to be the wrong way round", "losses/pairs.py", "self.smoothing * F.logsigmoid(-margin)", "self.smoothing * F.logsigmoid(margin)", PAIRS),
    ("the nats beside are the worse answer's", "losses/pairs.py", "-(after / lengths)[0::2]", "-(after / lengths)[1::2]", PAIRS),
    ("dynamic NTK is written with the base of pretraining", "hf/options/context.py", "theta=position.scaling.theta(position.rotary_dim(rotary), position.theta, max_len)", "theta=position.theta", POSITIONS),
    ("what a tool returns is learned", "data/tokenizer/chat.py", "told = told and end <= ", "told = told and 0 <= ", REWRITTEN),
    ("the next message's first token ends an answer", "data/tokenizer/chat.py", "ends = bool(self._first_end(around[-1][1]))", "ends = True", REWRITTEN),
    ("thoughts before an answer are given", "data/tokenizer/chat.py", "return any(thought in given for thought in thoughts) or", "return", REWRITTEN),
]  # fmt: skip


def misplaced() -> list[str]:
    """A sentence for each fault that cannot be planted, or whose tests are not there."""
    found = []
    for number, (_, file, before, _, tests) in enumerate(MUTATIONS, 1):
        if (count := (ROOT / "lm" / file).read_text(encoding="utf-8").count(before)) != 1:
            found.append(f"fault {number}: {file} holds the text {count} times, not once: {before}")
        found += [f"fault {number}: there is no tests/{name}" for name in tests if not (ROOT / "tests" / name.split("::")[0]).is_file()]
    return found


def survives(copy: Path, file: str, before: str, after: str, tests: list[str]) -> bool:
    """Whether these tests pass on the mutated copy."""
    path = copy / "lm" / file
    original = path.read_text(encoding="utf-8")
    path.write_text(original.replace(before, after), encoding="utf-8")
    try:
        command = [
            sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *(f"tests/{name}" for name in tests)
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    finally:
        path.write_text(original, encoding="utf-8")
    if done.returncode not in (0, 1):  # a test that is not there, or a line that is not Python, sees nothing
        raise SystemExit(f"tools/mutate.py: the tests of {file} with {after!r} did not run:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    return done.returncode == 0


def run(numbers: Sequence[int], jobs: int) -> Iterator[bool]:
    """Whether each of these faults is caught, in order, told as soon as it is known."""
    with copies(jobs) as free:

        def caught(number: int) -> bool:
            what, file, before, after, tests = MUTATIONS[number - 1]
            copy = free.get()
            try:
                alive = survives(copy, file, before, after, tests)
            finally:
                free.put(copy)
            print(f"{number:3} {'SURVIVED' if alive else 'caught'}  {file}: {what}", flush=True)
            return not alive

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(caught, numbers)


@contextmanager
def copies(n: int) -> Iterator["queue.Queue[Path]"]:
    """Copies of the checkout, one for each fault that is planted at the same time."""
    free: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory() as folder:
        for i in range(n):
            copy = Path(folder) / str(i) / "lm"
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__"))
            free.put(copy)
        yield free


def numbers_in(text: str) -> list[int]:
    """Of 3,7-12: 3, 7, 8, ..., 12."""
    spans = [part.split("-") for part in text.split(",")]
    return list(itertools.chain.from_iterable(range(int(span[0]), int(span[-1]) + 1) for span in spans))


def main(args: list[str]) -> int:
    given = options(args, __doc__, {"only": f"1-{len(MUTATIONS)}", "jobs": 1})
    if faults := misplaced():
        raise SystemExit("tools/mutate.py: " + "\n".join(faults))
    written = re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", given["only"])
    numbers = numbers_in(given["only"]) if written else []
    if not numbers or not all(0 < number <= len(MUTATIONS) for number in numbers):
        refuse(f"only: {given['only']!r} was given. Write numbers from 1 to {len(MUTATIONS)}, such as 3,7-12.")
    caught = sum(run(numbers, given["jobs"]))
    print(json.dumps({"caught": caught, "total": len(numbers)}))
    return 0 if caught == len(numbers) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
