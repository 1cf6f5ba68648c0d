"""How text is continued, and what held-out text is asked, in numbers."""

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from lm.errors import ConfigError
from lm.schema import MOST, Config

if TYPE_CHECKING:
    from torch import Tensor

    from lm.nn.model_config import ModelConfig

Dtype = Literal["saved", "fp32", "bf16", "fp16", "int8", "int4"]
"""How decoding holds the matrices of a model."""
CacheForm = Literal["bf16", "int8"]
"""How decoding holds keys and values, where not as they are computed."""


class SamplingConfig(Config):
    """How text is continued."""

    other_names = {
        "beams": "beam beam_size beam_width num_beams",
        "first_token": "forced_bos_token forced_bos_token_id",
        "json_schema": "guided_json response_format",
        "max_tokens": "length max_completion_tokens max_gen_toks max_length max_new_tokens n_predict num_predict",
        "n": "best_of num_return_sequences num_samples",
        "no_repeat_ngram": "no_repeat_ngram_size",
        "regex": "guided_regex",
        "repetition_penalty": "repeat_penalty",
        "seed": "random_seed",
        "stop": "eos eos_token_id stop_sequences stop_strings stop_token_ids stop_words stopping_criteria until",
        "temperature": "do_sample temp",
        "temperature=0": "greedy",
    }

    max_tokens: int = Field(256, gt=0)
    """Most new tokens."""
    temperature: float = Field(0.8, ge=0)
    """Logits are divided by it; 0 takes the likeliest token each time."""
    top_k: int | None = Field(None, gt=0)
    """Draw from the k likeliest tokens (Fan et al. 2018, arXiv:1805.04833). null: off."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Draw from the fewest tokens that together have this probability (Holtzman et al. 2019, arXiv:1904.09751). null: off."""
    min_p: float | None = Field(None, gt=0, le=1)
    """Draw from tokens with at least this part of the likeliest one's probability (Nguyen et al. 2024, arXiv:2407.01082). null: off."""
    repetition_penalty: float = Field(1.0, ge=1e-6, le=1e9)
    """Above 1 makes every token of the text so far less likely (Keskar et al. 2019, arXiv:1909.05858). 1: off."""
    presence_penalty: float = Field(0.0, ge=-100, le=100)
    """Taken off the logit of every token that was generated already, once. 0: off."""
    frequency_penalty: float = Field(0.0, ge=-100, le=100)
    """Taken off the logit of every token as often as it was generated already. 0: off."""
    no_repeat_ngram: int | None = Field(None, gt=0)
    """No sequence of so many tokens stands twice in prompt and output together, as in transformers. null: off."""
    logit_bias: dict[int, Annotated[float, Field(ge=-1e4, le=1e4)]] = {}
    """Added to the logits of tokens, by id, as in {"13": -100}; -100 as good as forbids one, 100 as good as forces it."""
    first_token: str | None = None
    """Special token that each answer of an encoder-decoder begins with, as forced_bos_token_id of transformers: the language into which
    M2M-100 and NLLB translate, deu_Latn say. null: the model's own (model.first_token), if any."""
    n: int = Field(1, gt=0, le=1024)
    """Samples of each prompt, which is read once: the i-th is what the prompt gives where it is given for the i-th time. Or best beams."""
    logprobs: int | None = Field(None, ge=0, le=1024)
    """Tell of each token log p under the model itself, before temperature, penalties and filters, and so many likeliest tokens with theirs.
    null: off."""
    seed: int = Field(0, ge=0)
    """Another seed gives other samples; the same one the same samples, alone or in a batch."""
    stop: str | list[str] = Field([])
    """Texts that end the output, and are not part of it."""
    json_schema: str | None = None
    """The output is JSON of this schema, and a text only where max_tokens did not cut it: {} for any. null: off. In Python and in a request
    an object as well."""
    regex: str | None = None
    """The output matches this, from its first to its last character, in the syntax of Rust's regexes. null: off."""
    grammar: str | None = None
    """The output is a text of this grammar, in the syntax of Lark. null: off."""
    beams: int = Field(1, gt=0, le=1024)
    """Above 1: the likeliest of so many continuations that go on side by side, instead of one that is drawn; penalties, no_repeat_ngram and
    logit_bias act on log p, as in transformers."""
    length_penalty: float = Field(1.0, ge=-10, le=10)
    """A beam's score is its log-probability over length^length_penalty: above 0 favours long ones (Wu et al. 2016, arXiv:1609.08144)."""
    early_stopping: bool | Literal["never"] = False
    """true: as many ended beams as `beams` are enough. false: until the best running one, as long as it is, is no better than those.
    never: until none could be better at max_tokens."""
    prefill_chunk: int = Field(512, gt=0, le=MOST)
    """Tokens of a prompt that are read at a time: fewer need less memory. A source is read whole."""

    def told(self, logits: "Tensor") -> "Tensor":
        """Returns the logits of which `logprobs` tells."""
        return logits

    @property
    def form(self) -> str | None:
        """Returns the key of what the output must be; None where it may be anything."""
        given = {"json_schema": self.json_schema, "regex": self.regex, "grammar": self.grammar}
        return next((name for name, value in given.items() if value is not None), None)

    @field_validator("json_schema", mode="before")
    @classmethod
    def _as_text(cls, given: Any) -> Any:
        return json.dumps(given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if sum(form is not None for form in (self.json_schema, self.regex, self.grammar)) > 1:
            raise ValueError("json_schema, regex and grammar exclude each other. Leave one of them out.")
        return self

    @model_validator(mode="after")
    def _draws_or_searches(self) -> Self:
        filters = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p, "logprobs": self.logprobs}
        filters |= {"temperature": self.temperature} if self.temperature and self._sets("temperature") else {}
        filters |= {"seed": self.seed} if self._sets("seed") else {}
        if self.beams > 1 and (given := [f"{name}={value}" for name, value in filters.items() if value is not None]):
            raise ValueError(f"{given[0]} is for draws, and beams={self.beams} draws nothing. Leave one of them out.")
        if self.beams == 1 and (given := [name for name in ("length_penalty", "early_stopping") if self._sets(name)]):
            raise ValueError(f"{given[0]} is of beams, and there are none. Set beams=2 or more, or leave it out.")
        if self.n > self.beams > 1:
            raise ValueError(f"n={self.n} is more than beams={self.beams}. Raise beams.")
        return self

    def _sets(self, name: str) -> bool:
        """Whether a field is another than it would be."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @property
    def stops(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def require(self, n_tokens: int) -> None:
        """Raises ConfigError where a token is named that is none of so many."""
        if beyond := [token for token in self.logit_bias if not 0 <= token < n_tokens]:
            raise ConfigError(f"logit_bias: {beyond[0]} is not one of the {n_tokens} tokens, 0 to {n_tokens - 1}. Leave it out.")


class GenerateConfig(SamplingConfig):
    """How text is continued, and by which drafts it comes sooner: at most one, and none of them changes it."""

    other_names = SamplingConfig.other_names | {
        "draft": "assistant_model draft_model speculative_model",
        "draft_tokens": "num_assistant_tokens num_draft_tokens num_speculative_tokens",
        "lookup": "prompt_lookup_num_tokens",
    }

    draft: str | None = None
    """Folder of a smaller model whose tokenizer has all tokens of the model's, with the same ids, or mtp: the model's own blocks for
    further tokens (model.mtp). It proposes tokens that the model checks several at a time (Leviathan et al. 2022, arXiv:2211.17192). null:
    off."""
    lookup: int | None = Field(None, gt=0, le=64)
    """Propose what followed the last so many tokens, or fewer, where they stood before in prompt or output. null: off."""
    draft_tokens: int = Field(4, gt=0, le=64)
    """Tokens to propose at a time; of the model's own blocks no more than there are."""

    @model_validator(mode="after")
    def _one_draft(self) -> Self:
        given = [f"{name}={value}" for name, value in (("draft", self.draft), ("lookup", self.lookup)) if value is not None]
        if len(given) > 1 or (given and self.beams > 1):
            raise ValueError(
                f"{given[0]} and {given[1] if len(given) > 1 else f'beams={self.beams}'} exclude each other. Leave one of them out."
            )
        if not given and self._sets("draft_tokens"):
            raise ValueError("draft_tokens: nothing proposes any. Set draft or lookup as well, or leave it out.")
        return self


class FillConfig(Config):
    """How the masks of a text are filled in."""

    other_names = {
        "at_once": "tokens_per_step transfer_tokens",
        "block": "block_length block_size",
        "likeliest": "top",
        "max_tokens": SamplingConfig.other_names["max_tokens"],
        "order": "alg remasking",
        "seed": SamplingConfig.other_names["seed"],
        "temperature": SamplingConfig.other_names["temperature"],
    }

    max_tokens: int = Field(0, ge=0, le=MOST)
    """Masks that are put behind the text; what comes behind an end token among them is left out."""
    at_once: int = Field(1, gt=0)
    """Masks that one forward fills in: with more it is faster, and the tokens fit each other less."""
    order: Literal["sure", "random"] = "sure"
    """Which masks are filled in first: those of whose token the model is the surest (Nie et al. 2025, arXiv:2502.09992, algorithm 5), or
    any."""
    block: int | None = Field(None, gt=0)
    """So many masks, the first ones, are all filled in before the next ones (Nie et al. 2025, appendix B.4); 1: from left to right. null:
    all are one block."""
    temperature: float = Field(0.0, ge=0)
    """Logits are divided by it and a token is drawn; 0 takes the likeliest one each time."""
    top_k: int | None = Field(None, gt=0)
    """Draw from the k likeliest tokens. null: off."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Draw from the fewest tokens that together have this probability. null: off."""
    min_p: float | None = Field(None, gt=0, le=1)
    """Draw from tokens with at least this part of the likeliest one's probability. null: off."""
    seed: int = Field(0, ge=0)
    """Another seed draws other tokens; the same one the same tokens, alone or in a batch."""
    likeliest: int = Field(0, ge=0, le=1024)
    """Tell so many likeliest tokens of each mask, with log p, as it is filled in."""

    @model_validator(mode="after")
    def _draws(self) -> Self:
        drawing = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        if not self.temperature and (given := [f"{name}={value}" for name, value in drawing.items() if value is not None]):
            raise ValueError(f"{given[0]} is for draws, and temperature=0 draws nothing. Set temperature, or leave it out.")
        return self


class EvalConfig(Config):
    """What held-out text is asked beside its loss: by a training of the test behind its last step."""

    seq_len: list[Annotated[int, Field(gt=1, le=MOST)]] = []
    """Other lengths of rows of as much text, told as test_loss/512; over the model's context where the position has no limit."""
    own_tokens: int | None = Field(None, gt=0, le=MOST)
    """Last tokens of each row that the model writes itself, for test_exposure: how much less or more sure it is behind its own tokens than
    behind the true ones, in nats a token. null: none."""

    @property
    def wanted(self) -> bool:
        """Returns whether anything is asked."""
        return bool(self.seq_len) or self.own_tokens is not None

    def figures(self) -> list[str]:
        """Returns the names of what is told, without what stands before them."""
        lengths = [f"{name}/{n}" for n in self.seq_len for name in ("loss", "bits_per_byte", "ece")]
        return lengths + (["exposure", "own_entropy", "true_entropy"] if self.own_tokens is not None else [])

    def why_not(self, model: "ModelConfig", seq_len: int, objective: str) -> str | None:
        """Returns why such a model cannot be asked this, as one sentence with the remedy; None where it can.  seq_len: of its rows."""
        own = self.own_tokens
        if self.seq_len and (said := why_no_places("eval.seq_len", max(self.seq_len), model, seq_len)) is not None:
            return said
        if own is not None and (model.kind != "decoder" or objective != "causal"):
            return (
                f"eval.own_tokens={own} goes on behind a text, and objective={objective} of model.kind={model.kind} does not. Leave it out."
            )
        if own is not None and own >= seq_len:
            return f"eval.own_tokens={own} leaves nothing of data.seq_len={seq_len} to go on behind. Lower it."
        return None


def why_no_places(key: str, seq_len: int, model: "ModelConfig", otherwise: int) -> str | None:
    """Returns why rows are too long, as one sentence with the remedy.  otherwise: the model's context where its config leaves it open."""
    limit = model.max_seq_len or otherwise
    if seq_len <= limit or not model.position.by_place:
        return None
    given = f"{key}={seq_len} is over model.max_seq_len={limit}"
    return f"{given}, and position={model.position.kind} has no more places. Lower it, or leave it out."
