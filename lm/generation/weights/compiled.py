"""The decoding step over one token of one row as a few compiled pieces: the operations between two modules that read the cache are one
piece, and pieces that are alike share one function, so that compiling takes as long for many layers as for three."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.fx.passes.split_module import split_module

from lm.errors import ConfigError
from lm.generation.weights.fused import FusedGQA
from lm.generation.weights.inference_linear import InferenceLinear
from lm.nn.context import Context
from lm.nn.ffn.base import Mixture
from lm.nn.mixers.base import Mixer
from lm.nn.per_layer import TokenRows
from lm.nn.transformer import LM

_LIBRARY = torch.library.Library("slotlm", "FRAGMENT")
_LIBRARY.define("live(Tensor[] inputs, str name, int before) -> Tensor")
_CUT = torch.ops.slotlm.live.default


def _live(inputs: list[Tensor], name: str, before: int) -> Tensor:
    """Returns a tensor of the shape and dtype that the live part gives: of its first input, in the dtype of the last."""
    return torch.empty(inputs[0].shape, dtype=inputs[-1].dtype, device=inputs[0].device)


torch.library.register_fake("slotlm::live", _live, lib=_LIBRARY)
_here: ContextVar[dict[int, Context]] = ContextVar("here")  # the contexts of the step that this thread computes, by the layers before


class Live(Protocol):
    """A part of the model that is not compiled, as it reads or writes the cache, or chooses what it computes (a mixture of experts)."""

    def __call__(self, *inputs: Tensor, ctx: Context) -> Tensor: ...


class Step:
    """The blocks and the last norm, compiled, over one token of one row with a cache.  The compiler: Ansel et al. 2024 (PyTorch 2)."""

    def __init__(self, model: LM) -> None:
        """Compiles the step. Raises ConfigError for a model that cannot be compiled."""
        with torch.no_grad():
            whole, constants = traced(model)
            pieces = split_module(whole, whole, _piece_of(whole), keep_original_order=True)
            made: dict[str, Callable[..., Any]] = {}
            for name, piece in [*pieces.named_children()]:
                assert isinstance(piece, fx.GraphModule)
                marks = [node.args[1:] for node in piece.graph.nodes if node.target is _CUT]
                delattr(pieces, name)
                if marks:
                    [(live, before)] = marks
                    setattr(pieces, name, partial(_call, live_of(model.get_submodule(cast(str, live))), before))
                    continue
                key = description(piece.graph)
                if key not in made:
                    made[key] = compiled(piece)
                setattr(pieces, name, made[key])
        self.kinds = len(made)
        self._run = partial(pieces.forward, *constants)

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        """(1, 1, d) -> (1, 1, d); None for any other input, which the model computes without this step."""
        if ctx.cache is None or x.shape[:2] != (1, 1):
            return None
        before = _here.set({0: ctx})
        try:
            out: Tensor = self._run(x, ctx.mask.q_positions.long())
        finally:
            _here.reset(before)
        return out


def _call(live: Live, before: int, *inputs: Tensor) -> Tensor:
    """Runs a live part in the context of its pass.  before: how many layers of earlier passes come before it."""
    passes = _here.get()
    if before not in passes:
        passes[before] = passes[0].again(before)
    return live(*inputs, ctx=passes[before]).contiguous()


def live_of(module: nn.Module) -> Live:
    """Returns the part of a module that is not compiled: of a FusedGQA attention over the cache, else the whole module."""
    return cast(Live, getattr(module, _live_method(module)))


def _live_method(module: nn.Module) -> str:
    return "read" if isinstance(module, FusedGQA) else "forward"


def is_live(module: nn.Module) -> bool:
    """Returns whether a part of the module is not compiled."""
    return isinstance(module, Mixer | Mixture | TokenRows)


class _Unseen:
    """In place of the parts of a Context that compiled pieces do not have: raises ConfigError where a layer reads one. As a cache it knows
    how many layers of earlier passes are `before` it."""

    def __init__(self, before: int = 0) -> None:
        self.before = before

    def behind(self, n: int) -> "_Unseen":
        return _Unseen(n)

    def __getitem__(self, name: str) -> NoReturn:
        self.__getattr__(name)

    def __getattr__(self, name: str) -> NoReturn:
        raise ConfigError(
            f"compile=true: a layer reads {name} of what all layers share, and what is compiled knows none of it. Leave it out."
        )


class _Whole(nn.Module):
    """All that happens between the embedding and the head."""

    def __init__(self, model: LM) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        position, unseen = self.model.position, cast(Any, _Unseen())
        ctx = Context(position, unseen, position.angles(positions), unseen, memory_mask=unseen, tokens=unseen)
        ctx.shared = unseen
        out: Tensor = self.model.norm(self.model.through_blocks(x, ctx))
        return out


def row_of(held: InferenceLinear, like: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns the product of a matrix with one row, compiled.  like: an embedded token, (1, 1, d)."""
    graph, constants = _traced(held, (like,))
    return partial(compiled(graph), *constants)


def traced(model: LM) -> tuple[fx.GraphModule, list[Tensor]]:
    """Returns the graph of a step, whose inputs are the weights, the embedded token, (1, 1, d), and its position, (1, 1); and the weights.
    Raises ConfigError for a model that cannot be traced, or that changes a buffer as it computes."""
    weight = model.embed.weight
    examples = weight.new_zeros(1, 1, model.cfg.d_model), torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
    model.position.angles(examples[1])  # takes what it needs to the device, which what is traced may not keep
    with cut(model):
        return _traced(_Whole(model), examples)


def _traced(module: nn.Module, examples: tuple[Tensor, ...]) -> tuple[fx.GraphModule, list[Tensor]]:
    """Returns the graph of a module, whose inputs are its tensors and the examples; and these tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's own code
        try:
            program = torch.export.export(module, examples, strict=False).run_decompositions()
        except ConfigError:
            raise
        except Exception as error:  # torch has many
            said = f"compile=true: a layer cannot be traced ({str(error).strip().splitlines()[0]})"
            raise ConfigError(f"{said}. Leave it out.") from error
    if changed := sorted(program.graph_signature.buffers_to_mutate.values()):
        raise ConfigError(f"compile=true: a layer changes {changed[0].removeprefix('model.')} as it computes. Leave it out.")
    graph = program.graph_module
    for node in [*graph.graph.nodes]:
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.graph.erase_node(node)
    graph.graph.output_node().args = graph.graph.output_node().args[0]
    graph.recompile()
    specs = program.graph_signature.input_specs
    held = {**program.state_dict, **program.constants}
    return graph, [held[spec.target].detach() for spec in specs if spec.target is not None]


@contextmanager
def cut(model: LM) -> Iterator[None]:
    """Within the block, a live part leaves one marker operation in the traced graph, which is cut there later."""
    with ExitStack() as undo:
        for name, module in model.named_modules():
            if is_live(module):
                method = _live_method(module)
                vars(module)[method] = partial(_mark, name)
                undo.callback(vars(module).pop, method)
        yield


def _mark(name: str, *inputs: Any) -> Tensor:
    [ctx] = [each for each in inputs if isinstance(each, Context)]
    out: Tensor = _CUT([each for each in inputs if isinstance(each, Tensor)], name, cast(Any, ctx.cache).before)
    return out


def _piece_of(whole: fx.GraphModule) -> Callable[[fx.Node], int]:
    """Returns a function that gives the number of the piece an operation is in; a live part has a piece of its own."""
    count, found = 0, {}
    for node in whole.graph.nodes:
        count += node.target is _CUT
        found[node] = count
        count += node.target is _CUT
    return found.__getitem__


def description(graph: fx.Graph) -> str:
    """Returns a text that is the same for graphs that compute the same from tensors of the same shapes."""
    names: dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        names[node] = f"_{len(names)}"
        value = node.meta.get("val")
        form = (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else None
        given = () if node.op == "placeholder" else (node.target, map_arg((node.args, node.kwargs), lambda each: names[each]))
        lines.append(f"{node.op} {given} {form}")
    return "\n".join(lines)


def require_compiler() -> None:
    """Raises ConfigError where there is no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # loading it takes a second
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ConfigError("compile=true: no C++ compiler was found. Install g++ or clang++, or leave compile out.") from None


def compiled(piece: fx.GraphModule) -> Callable[..., Any]:
    """Returns the piece as a compiled function without guards, as its shapes never change. Raises ConfigError where the C++ compiler
    fails."""
    from torch._inductor import compile as inductor
    from torch._inductor.exc import CppCompileError, InductorError

    try:
        made: Callable[..., Any] = inductor(piece, [node.meta["val"] for node in piece.graph.nodes if node.op == "placeholder"])
    except (CppCompileError, InductorError) as error:
        said = f"compile=true: the compiler failed: {str(error).strip().splitlines()[-1]}"
        raise ConfigError(f"{said}. Try it by itself, or leave compile out.") from error
    return made
