"""A step that is recorded once and replayed, against the step as ever. What is recorded here are torch's operations with the very tensors
that they had, as a CUDA graph has them; tests/gpu/test_replayed.py has the graphs."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lm.errors import ConfigError
from lm.generation.config import SamplingConfig
from lm.generation.decode import decode, rows_of
from lm.generation.drafting.base import Lookup
from lm.generation.engine import Engine, Request
from lm.generation.loop import Vocabulary
from lm.generation.weights import prepare as preparing
from lm.generation.weights.compiled import Step
from lm.generation.weights.prepare import prepare
from lm.generation.weights.replayed import Replayed, Run
from lm.nn.batch import Batch
from lm.nn.context import Context
from lm.nn.ffn import experts
from lm.nn.head import every_position, last_position
from lm.nn.model_config import model_config
from lm.nn.transformer import LM
from lm.testing.models import Doubles, random_model, same, tokens
from tests.generation.drawing import generate
from tests.generation.test_step import ALL, PROMPTS
from tests.nn.grid import PARTS, decoding
from tests.nn.models import ATTENTIONS, MIXING, MIXTURES, SMEARED, config, redrawn


class Tape(TorchDispatchMode):
    """Operations as they come, whose tensors stay where they are; a number that is asked for cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a number was asked for")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Recorder:
    """Counts what was recorded, and how often it was replayed."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, run: Run) -> Run:
        tape = Tape()
        with tape:
            out = run()
        self.recorded += 1

        def replay() -> Tensor:
            tape.replay()
            self.replayed += 1
            return out

        return replay


def replaying(model: LM) -> tuple[LM, Recorder]:
    made, recorder = copy.deepcopy(model), Recorder()
    made.fast_path = Replayed(made, recorder)
    return made, recorder


def stepped(model: LM, ids: Tensor) -> Tensor:
    """What the head read, of a prompt and of one token a step, with a few that are forgotten between; then the rows change places."""
    batch, length = ids.shape
    cache, out = model.new_cache(batch, length), []
    source = {"source_tokens": tokens(batch, 5, 2)} if model.cfg.kind == "encoder_decoder" else {}
    for start, stop in ((0, 6), *((i, i + 1) for i in range(6, 12)), *((i, i + 1) for i in range(10, length))):
        if start < cache.length:
            cache.rewind(cache.length - start)
        if start == 14:
            cache.reorder(torch.tensor([1, 0]))
            ids = ids.flip(0)
        at = torch.arange(start, stop).expand(batch, -1)
        out.append(model(Batch(ids[:, start:stop], positions=at, padded=False, **source), read=every_position, cache=cache)[0][:, -1])
        source = {}
    return torch.stack(out, 1)


def agree(model: LM) -> None:
    made, recorder = replaying(model)
    with torch.inference_mode():
        same(stepped(made, tokens(2, 20)), stepped(model, tokens(2, 20)))
    assert recorder.recorded == 2 and recorder.replayed == 14  # one anew where rows changed places; each is preceded by a step as ever


@pytest.fixture(autouse=True)
def grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the host reads how many tokens each expert has; on CUDA a kernel does."""
    product = lambda x, weight, bias, ends, chosen: torch.einsum("noi,ni->no", weight[chosen], x) + (0 if bias is None else bias[chosen])  # noqa: E731
    monkeypatch.setattr(experts, "by_expert", product)


CHOSEN = [
    *ALL[::4],
    *({"attention": ATTENTIONS[n]} for n in (11, 15)),
    {"residual": {"kind": "loop", "times": 3}},
    *MIXING[1:4],
    {"ffn": MIXTURES[0]},
    SMEARED,
]
EVERY = [*ALL, *({"ffn": each} for each in MIXTURES if not each.get("reference"))]


@pytest.mark.parametrize("changes", CHOSEN, ids=str)
def test_a_replayed_step_gives_what_the_step_does(changes: dict[str, Any]) -> None:
    with Doubles():
        agree(redrawn(config(**changes)).double())


@pytest.mark.slow
@pytest.mark.parametrize("changes", [each for each in EVERY if each not in CHOSEN], ids=str)
def test_every_value_of_a_slot_is_replayed(changes: dict[str, Any]) -> None:
    with Doubles():
        agree(redrawn(config(**changes)).double())


@pytest.mark.slow
@pytest.mark.parametrize("start", PARTS)
def test_every_pair_of_slots_is_replayed(start: int) -> None:
    """But for the loop over experts, in which the host reads who goes where."""
    for tree in decoding(start):
        if "reference" in tree["ffn"]:
            tree["ffn"] = tree["ffn"] | {"reference": False}
        with Doubles():
            agree(random_model(model_config(tree)).double())


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])  # the latter compiles
def test_what_computes_one_row_alone_is_recorded_for_it_and_the_model_for_several(real: bool) -> None:
    model = prepare(redrawn(config(attention=ATTENTIONS[2])))
    plain, rows = copy.deepcopy(model), list[int]()
    step = Step(model) if real else None

    def one(x: Tensor, ctx: Context) -> Tensor | None:
        rows.append(len(x))
        through = step or (lambda x, ctx: model.norm(model.through_blocks(x, ctx)) if len(x) == 1 else None)
        return through(x, ctx)

    model.fast_path = Replayed(model, Recorder() if step is None else lambda run: run, one)
    options = SamplingConfig(max_tokens=20)
    assert generate(model, [[5, 6, 7]], options) == generate(plain, [[5, 6, 7]], options) and set(rows) == {1}
    assert generate(model, PROMPTS, options) == generate(plain, PROMPTS, options) and set(rows) == {1, len(PROMPTS)}


def test_what_fails_only_as_it_runs_is_left_out_and_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(x: Tensor, ctx: Context) -> Tensor:
        raise ConfigError("compile=true: no compiler. Leave it out.")

    model = redrawn(config())
    made, recorder = replaying(model)
    made.fast_path = Replayed(made, recorder, fails)
    for _ in range(2):
        assert generate(made, [[5, 6, 7]], SamplingConfig(max_tokens=8)) == generate(model, [[5, 6, 7]], SamplingConfig(max_tokens=8))
    assert recorder.recorded == 2 and capsys.readouterr().err == "compile=true: no compiler: a step is recorded as it is.\n"


@pytest.mark.parametrize("why", ["triton is not installed", "a layer that cannot be traced", None])
def test_a_gpu_records_what_cannot_be_compiled_and_says_so(
    why: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compiled(model: LM) -> object:
        if why is not None:
            raise ConfigError(f"compile=true: {why}. Leave it out.")
        return model.norm

    model, absent = redrawn(config()), why == "triton is not installed"
    monkeypatch.setattr(preparing, "_compiled", compiled)
    monkeypatch.setattr(preparing, "why_not_compiled", lambda device: why if absent else None)
    made = preparing._step(model, torch.device("cuda"))
    assert isinstance(made, Replayed) and made.one is (model.norm if why is None else None)
    told = f"compile=true: {why}: a step is recorded as it is.\n"
    assert capsys.readouterr().err == ("" if why is None else told)


def test_texts_of_uneven_prompts_are_those_of_the_model_as_it_is() -> None:
    """Rows end one by one, and the rest go on."""
    model = redrawn(config(attention=ATTENTIONS[2])).double()
    made, recorder = replaying(model)
    for options in (SamplingConfig(max_tokens=24), SamplingConfig(max_tokens=24, temperature=0.9, top_p=0.9, n=2)):
        assert generate(made, PROMPTS, options, ends=[7, 21]) == generate(model, PROMPTS, options, ends=[7, 21])
    assert recorder.recorded > 2 and recorder.replayed > 24


@pytest.mark.parametrize("changes", [{"attention": ATTENTIONS[3]}, MIXING[3]], ids=str)
def test_drafts_and_single_tokens_take_turns(changes: dict[str, Any]) -> None:
    model = redrawn(config(**changes)).double()
    made, recorder = replaying(model)
    options, prompt = SamplingConfig(max_tokens=60), [[5, 6, 7, 5, 6, 7, 5, 6]]
    found = decode(made, prompt, options, drafter=(drafter := Lookup(3, 2)))
    assert [row.new for row in found] == generate(model, prompt, options)
    assert recorder.replayed > 0 and drafter.tally.drafted > 0


def test_requests_that_come_and_go_are_answered_as_alone() -> None:
    model = redrawn(config(attention=ATTENTIONS[1])).double()
    made, recorder = replaying(model)
    engine, requests = Engine(made, Vocabulary(61), 3), []
    for i, prompt in enumerate([*PROMPTS, *PROMPTS[::-1]]):
        cfg = SamplingConfig(max_tokens=5 + 3 * i, seed=i)
        requests.append((prompt, cfg, Request(rows_of(made, [prompt], cfg, Vocabulary(61)), cfg)))
        engine.add(requests[-1][2])
        engine.step()
    while engine.waiting or engine.running:
        engine.step()
    for prompt, cfg, request in requests:
        assert [row.new for row in request.rows] == generate(model, [prompt], cfg)
    assert recorder.replayed > 10


@pytest.mark.parametrize("changes", [{"attention": ATTENTIONS[1]}, {"attention": ATTENTIONS[11]}, MIXING[1]], ids=str)
def test_what_is_recorded_goes_on_where_a_row_takes_the_place_of_another(changes: dict[str, Any]) -> None:
    model = redrawn(config(**changes)).double()
    made, recorder = replaying(model)
    engine, cfg = Engine(made, Vocabulary(61), 2), SamplingConfig(max_tokens=12)
    requests = [Request(rows_of(made, [[n, 5, n + 1]], cfg, Vocabulary(61)), cfg) for n in range(8)]
    for request in requests:
        engine.add(request)
    while engine.waiting or engine.running:
        engine.step()
    for n, request in enumerate(requests):
        assert [row.new for row in request.rows] == generate(model, [[n, 5, n + 1]], cfg)
    assert recorder.recorded <= 3 and recorder.replayed > 30


@pytest.mark.slow
def test_a_long_row_looks_at_twice_as_many_slots_when_it_has_filled_them() -> None:
    model = redrawn(config(max_seq_len=1024)).double()
    made, recorder = replaying(model)
    options = SamplingConfig(max_tokens=330)
    assert generate(made, [[5, 6, 7]], options) == generate(model, [[5, 6, 7]], options)
    assert recorder.recorded == 2  # 256 slots and 332


class Elsewhere(TorchDispatchMode):
    """Raises where an operation takes numbers from another device, which waits for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        assert all(x.is_meta or x.ndim == 0 for x in given), f"{func} takes numbers from the CPU"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", [None, pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "changes", [*CHOSEN, *(pytest.param(each, marks=pytest.mark.slow) for each in EVERY if each not in CHOSEN)], ids=str
)
def test_what_is_recorded_never_waits_for_the_device(changes: dict[str, Any], form: str | None) -> None:
    """On the meta device, where whatever asks for a number raises; as on a GPU, where experts are in bfloat16."""
    model, runs = redrawn(config(**changes)).bfloat16().to("meta"), []
    model.cache_form = form

    def record(run: Run) -> Run:
        runs.append(run)
        with Elsewhere():
            run()
        return run

    model.fast_path = Replayed(model, record)
    cache = model.new_cache(2, 20)
    with torch.inference_mode():
        for start, stop in ((0, 14), (14, 15), (15, 16), (16, 17)):
            at = torch.arange(start, stop, device="meta").expand(2, -1)
            model(Batch(tokens(2, stop - start).to("meta"), positions=at, padded=False), read=last_position, cache=cache)
    assert len(runs) == 1


class Odd(nn.Module):
    """A feed-forward of one's own that reads what a recorded step does not know."""

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return x if ctx.cache is None else x * ctx.cache.length


def test_a_layer_that_reads_the_length_is_refused() -> None:
    model = redrawn(config())
    model.set_submodule("blocks.1.ffn", Odd())
    model.fast_path = Replayed(model, Recorder())
    with pytest.raises(ConfigError, match=r"^compile=true: a layer reads the length of the cache, .* Leave it out.$"):
        generate(model, [[5, 6]], SamplingConfig(max_tokens=4))


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^compile=true is for CPUs and CUDA, and the model is on meta. Leave it out.$"):
        prepare(redrawn(config()).to("meta"), compiled=True)
