"""The modules of a model as rows of text; equal blocks are listed once."""

from collections.abc import Iterator

from torch import nn

from lm.adapters.adapter import n_weights
from lm.nn.linear import AskedLinear, Out
from lm.nn.transformer import LM

Row = tuple[str, str, str]
_ORDER = ["embed", "ngrams", "position", "segment", "embed_norm", "widen", "smear", "per_layer", "encoder", "blocks", "norm", "mtp", "head"]


def outline(model: LM) -> list[Row]:
    """Returns (name, description, parameters) of every module that has parameters; equal blocks have one row, with one of them below it."""
    tied = model.head if model.head.weight is model.embed.weight else None
    rows = list(_rows(model, "", 0, tied))
    width = max(len(number) for _, _, number in rows)
    return [(name, what, number.rjust(width)) for name, what, number in rows]


def _rows(module: nn.Module, name: str, depth: int, tied: nn.Module | None, times: int = 1) -> Iterator[Row]:
    children = [(key, child) for key, child in module.named_children() if any(True for _ in child.parameters())]
    children.sort(key=lambda pair: _ORDER.index(pair[0]) if pair[0] in _ORDER else 0)
    own = [(key, p) for key, p in module.named_parameters(recurse=False) if not (module is tied and key == "weight")]
    if isinstance(module, nn.ModuleList):
        for label, block, n in _distinct(module):
            yield from _rows(block, f"{name}.{label}", depth, tied, n)
    elif len(children) == 1 and not own and module is not tied:
        yield from _rows(children[0][1], f"{name}.{children[0][0]}", depth, tied)
    else:
        number = n_weights(module)
        if module is tied:
            number -= module.get_parameter("weight").numel()
        what = _what(module) + (", tied to embed" if module is tied else "")
        yield "  " * depth + (name or type(module).__name__), what if name else "", f"{times} x {number:,}" if times > 1 else f"{number:,}"
        if children:
            for key, p in own:
                yield "  " * (depth + 1) + key, " x ".join(map(str, p.shape)), f"{p.numel():,}"
        for key, child in children:
            yield from _rows(child, key, depth + 1, tied)


def _distinct(blocks: nn.ModuleList) -> Iterator[tuple[str, nn.Module, int]]:
    """Yields (label, first block, number of blocks) of each kind of block, in the order of the first blocks."""
    kinds: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for i, block in enumerate(blocks):
        kinds.setdefault(tuple((name, _what(module)) for name, module in block.named_modules()), []).append(i)
    for where in kinds.values():
        yield _label(where), blocks[where[0]], len(where)


def _label(where: list[int]) -> str:
    """Returns the blocks' indices as 0-31, as 0,2..30 with a step, or as a list."""
    step = where[1] - where[0] if len(where) > 1 else 1
    if len(where) < 3 or where != list(range(where[0], where[-1] + 1, step)):
        return ",".join(map(str, where))
    return f"{where[0]}-{where[-1]}" if step == 1 else f"{where[0]},{where[1]}..{where[-1]}"


def _what(module: nn.Module) -> str:
    """Returns a module's class with its extra_repr; for torch's own modules a short form."""
    kind = "Linear" if isinstance(module, Out | AskedLinear) else type(module).__name__
    match module:
        case nn.Embedding():
            return f"{kind} {module.num_embeddings} x {module.embedding_dim}"
        case nn.Linear():
            return f"{kind} {module.in_features} -> {module.out_features}{', bias' if module.bias is not None else ''}"
        case nn.LayerNorm():
            return f"{kind} {module.normalized_shape[0]}"
    return f"{kind} {module.extra_repr()}".rstrip()
