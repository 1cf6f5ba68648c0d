"""From the bodies of requests to prompts and settings that the engine takes; unknown keys are refused by name."""

import secrets
import sys
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from lm.data.rows.reading import Read, Reading
from lm.data.tokenizer.chat import ChatTemplate
from lm.data.tokenizer.gap import Gap
from lm.data.tokenizer.stream import Stream
from lm.errors import ConfigError
from lm.generation.config import SamplingConfig
from lm.generation.decode import begin
from lm.generation.embed import Embedding, require_embeds
from lm.generation.engine import Request
from lm.generation.grammar_trial import Trial
from lm.generation.text import chat_template, ends_of, ids_of
from lm.generation.whole import numbered
from lm.generation.writer import Writer
from lm.schema import Tree, from_tree
from lm.serving.bodies import TOP, AnyBody, Body, ChatBody, CompletionBody, EmbeddingBody, Ids
from lm.serving.calls import Marks, declared, grammar_of, marks_of
from lm.serving.config import ServeConfig
from lm.spelling import did_you_mean
from lm.storage.reading import parse_asked

_SAMPLES = 128  # of one request
_TEXTS = 2048  # that become vectors in one request, as many as OpenAI's API takes
_STOPS = 16
_FORMS = {"json_schema", "regex", "grammar"}
_DRAWN = (  # fields of SamplingConfig; a server does not search by beams
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "no_repeat_ngram", "logit_bias", "first_token", "n", "logprobs", "seed", "stop", "json_schema", "regex", "grammar",
)  # fmt: skip

B = TypeVar("B", bound="AnyBody")


class Refusal(Exception):
    """Refuses a request, with an HTTP status.  sentence: as of an LmError; code: of OpenAI's errors."""

    def __init__(self, status: int, sentence: str, code: str | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.code = status, sentence, code


@dataclass(frozen=True)
class Asked:
    """A request, read and checked, and ready for the engine."""

    body: CompletionBody | ChatBody
    writer: Writer
    requests: list[Request]
    """One of each prompt, with the rows of its samples."""
    echoes: list[str]
    """What the text of each prompt's samples begins with."""
    n_prompt: int
    """Tokens of all prompts."""
    marks: Marks | None
    """Of the calls of tools in an answer; None where no tools are given, or their calls are not told apart, and stay text."""


@dataclass(frozen=True)
class Texts:
    """A request for vectors, read and checked."""

    body: EmbeddingBody
    work: Embedding
    n_tokens: int
    """Of all texts."""


class Reader:
    """Reads bodies into requests. It works in one thread, since the process behind a chat template answers one question at a time."""

    def __init__(self, writer: Writer, name: str, cfg: ServeConfig) -> None:
        """writer: of texts. Raises ConfigError for a model that neither continues them nor makes vectors of them."""
        if writer.model.cfg.kind == "encoder_decoder":
            begin(writer.model, [0])
        self.writer, self.name = writer, name
        self.chat = chat_template(writer.tokenizer) if writer.tokenizer.chat_template is not None else None
        self._marks = None if self.chat is None else marks_of(self.chat)
        self._most_tokens = cfg.tokens or 2 * writer.model.max_seq_len
        self._most_rows, self._chunk = min(cfg.rows, _SAMPLES), cfg.prefill_chunk
        self._reading = Reading(writer.model.cfg, writer.tokenizer, sys.maxsize)
        self._trial = Trial(writer.tokenizer, ends_of(writer.tokenizer))

    def completion(self, data: bytes) -> Asked:
        """Reads a body of /v1/completions. Raises ConfigError and Refusal."""
        body, tree = _parsed(CompletionBody, data)
        begin(self.writer.model, [0])
        prompts = _several(body.prompt, "prompt")
        if len(prompts) > _SAMPLES:  # before time is spent on them
            raise ConfigError(f"prompt: {len(prompts)} prompts are too many for a request; at most {_SAMPLES}. Ask for fewer.")
        encoded = self._encoded(prompts) if body.suffix is None else self._in_gaps(prompts, body)
        if body.echo and self.writer.answers:
            raise ConfigError("echo: the prompt is a source to this model, which its answer does not go on. Leave it out.")
        only_read = body.echo and tree.get("max_tokens") == 0
        cfg = self._sampling(tree | ({"max_tokens": 1} if only_read else {}))
        asked = self._asked(body, tree, cfg, encoded, [self._text(prompt) if body.echo else "" for prompt in prompts])
        for request in asked.requests:
            request.scores = cfg.logprobs if body.echo else None
            for row in request.rows:
                row.limit = 0 if only_read else row.limit
        return asked

    def chat_completion(self, data: bytes) -> Asked:
        """Reads a body of /v1/chat/completions. Raises ConfigError and Refusal."""
        body, tree = _parsed(ChatBody, data)
        begin(self.writer.model, [0])
        if self.chat is None:
            raise ConfigError("messages: the model's tokenizer has no chat template. Use /v1/completions, or a model fine-tuned on chats.")
        if body.logprobs:
            tree["logprobs"] = body.top_logprobs or 0
        elif body.top_logprobs is not None:
            raise ConfigError(f"top_logprobs: {body.top_logprobs} has no effect without logprobs=true. Set it, or leave this out.")
        if (form := body.response_format.form) and (also := tree.keys() & _FORMS):
            raise ConfigError(f"response_format: {min(also)} says too what the answer is. Leave one of them out.")
        tools = body.tools if body.tool_choice != "none" else None
        template = self.chat.with_tools if tools else self.chat
        _require_written(body, bool(tools), template)
        messages, names = [message.shown() for message in body.messages], body.chat_template_kwargs | ({"tools": tools} if tools else {})
        parts = self.chat.asking(messages, names, body.continue_final_message)
        forced = self._forced(body, bool(form or tree.keys() & _FORMS))
        cfg = self._sampling(tree | form | forced)
        try:
            return self._asked(body, tree, cfg, [ids_of(self.writer.tokenizer, parts)], [""], self._marks if tools else None)
        except ConfigError as error:
            if not forced or not str(error).startswith("grammar: "):
                raise
            raise ConfigError(f"tools: tool_choice enforces their schemas; {str(error).removeprefix('grammar: ')}") from None

    def texts(self, data: bytes) -> Texts:
        """Reads a body of /v1/embeddings. Raises ConfigError and Refusal."""
        body, _ = _parsed(EmbeddingBody, data)
        self._require_name(body)
        model, given = self.writer.model, _several(body.input, "input")
        require_embeds(model)
        if not 0 < (dims := body.dimensions or model.cfg.d_model) <= model.cfg.d_model:
            raise ConfigError(f"dimensions: {dims} is given, and a vector of the model has {model.cfg.d_model} numbers. Give fewer.")
        if len(given) > _TEXTS:
            raise ConfigError(f"input: {len(given)} texts are too many for a request; at most {_TEXTS}. Send fewer.")
        read = [self._read(given[i], numbered(i + 1, len(given))) for i in range(len(given))]
        return Texts(body, Embedding(model, read, self._chunk, dims), sum(len(each.ids) for each in read))

    def _read(self, given: str | Ids, which: str) -> Read:
        """Returns what the model reads of a text, which is not cut. Raises ConfigError for one of no tokens, Refusal for one that is too
        long.  which: its number, for messages."""
        if isinstance(given, str):
            read = self._reading.text(given)
        else:
            read = self._reading.as_it_is(np.array(self._checked(given, "input"), np.int64))
        if not len(read.ids):
            raise ConfigError(f"input: {which} has no tokens, and a model reads at least one. Leave it out.")
        if len(read.ids) > (most := self.writer.model.max_seq_len):
            told = f"input: {which} has {len(read.ids):,} tokens, and the model reads {most:,}. Shorten it."
            raise Refusal(400, told, "context_length_exceeded")
        return read

    def _forced(self, body: ChatBody, formed: bool) -> Tree:
        """Returns the field of SamplingConfig that lets the answer be calls of tools alone, where tool_choice asks for them; else {}.
        formed: something else says too what the answer is."""
        if body.tool_choice in ("auto", "none"):
            return {}
        if formed:
            raise ConfigError("tool_choice: another key says too what the answer is. Leave one of them out.")
        if self._marks is None or self._marks.listed:
            raise ConfigError("tool_choice: how the model's chat template writes calls is not known here. Leave it out, for calls as text.")
        if body.function not in (None, *(names := [declared(tool)[0] for tool in body.tools or []])):
            raise ConfigError(f"tool_choice: {body.function!r} is none of the tools. {did_you_mean(str(body.function), names)}")
        return {"grammar": grammar_of(self._marks, body.tools or [], body.function, body.parallel_tool_calls is False)}

    def _encoded(self, prompts: list[str] | list[Ids]) -> list[Ids]:
        return [self.writer.ids(prompt) if isinstance(prompt, str) else self._checked(prompt, "prompt") for prompt in prompts]

    def _in_gaps(self, prompts: list[str] | list[Ids], body: CompletionBody) -> list[Ids]:
        """Returns the ids of prompts whose gaps to the body's suffix are to be filled. Raises ConfigError."""
        if body.echo:
            raise ConfigError("echo: with a suffix, the model reads more than the prompt's text. Leave one of them out.")
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if len(texts) < len(prompts):
            raise ConfigError("suffix: it goes with a prompt that is text, and token ids are given. Give the text, or write the ids whole.")
        writer = self.writer.in_gaps()
        return [writer.ids(Gap(text, body.suffix or "")) for text in texts]

    def _text(self, prompt: str | Ids) -> str:
        """Returns the text of a prompt, without a character at the end that new tokens may complete."""
        return prompt if isinstance(prompt, str) else "".join(map(Stream(self.writer.tokenizer).push, prompt))

    def _checked(self, ids: Ids, key: str) -> Ids:
        """Returns the ids. Raises ConfigError for one that is no token of the vocabulary.  key: of the body, which holds them."""
        n_tokens = self.writer.tokenizer.vocab_size
        if unknown := [token for token in ids if not 0 <= token < n_tokens]:
            raise ConfigError(f"{key}: {unknown[0]} is not one of the {n_tokens} tokens. Use the model's own tokenizer.")
        return ids

    def _require_name(self, body: AnyBody) -> None:
        if body.model not in (None, self.name):
            raise Refusal(404, f"model: {body.model!r} is not served here. Ask for {self.name!r}.", "model_not_found")

    def _sampling(self, tree: Tree) -> SamplingConfig:
        """Returns the sampling options of a body, with a seed of its own where it gives none. Raises ConfigError."""
        cfg = from_tree(SamplingConfig, {"seed": secrets.randbits(31)} | tree)
        if cfg.logprobs is not None and cfg.logprobs > TOP:
            raise ConfigError(f"logprobs: {cfg.logprobs} is over {TOP}. Ask for fewer.")
        if len(cfg.stops) > _STOPS:
            raise ConfigError(f"stop: {len(cfg.stops)} texts are over {_STOPS}. Give fewer.")
        return cfg

    def _asked(
        self,
        body: CompletionBody | ChatBody,
        told: Tree,
        cfg: SamplingConfig,
        prompts: list[Ids],
        echoes: list[str],
        marks: Marks | None = None,
    ) -> Asked:
        """Returns the request, checked against the server's limits. Raises ConfigError and Refusal.  told: sampling options in the body."""
        self._require_name(body)
        if cfg.n > self._most_rows or len(prompts) * cfg.n > _SAMPLES:
            most = f"{self._most_rows} samples of a prompt, {_SAMPLES} of a request"
            raise ConfigError(f"n: {len(prompts)} x {cfg.n} samples are too many; at most {most}. Ask for fewer.")
        longest = max(map(len, prompts))
        if "max_tokens" not in told:
            cfg = cfg.replace(max_tokens=max(1, min(cfg.max_tokens, self._most_tokens - longest)))
        if longest + cfg.max_tokens > self._most_tokens:
            given = f"{longest} tokens of prompt and max_tokens={cfg.max_tokens}"
            raise Refusal(400, f"prompt: {given} are over {self._most_tokens} together. Shorten one.", "context_length_exceeded")
        if isinstance(body, CompletionBody):
            writer = replace(self.writer, cfg=cfg, goes_on=True, fills=body.suffix is not None)
        else:
            writer = replace(self.writer, cfg=cfg, goes_on=body.continue_final_message)
        self._trial.require(cfg)
        rows = writer.rows(prompts)
        requests = [Request(rows[start : start + cfg.n], cfg, writer.vocabulary.ends) for start in range(0, len(rows), cfg.n)]
        return Asked(body, writer, requests, echoes, sum(map(len, prompts)), marks)


def _require_written(body: ChatBody, tools: bool, template: ChatTemplate) -> None:
    """Raises ConfigError for a part of a chat that its template would leave out, silently.  tools: the model may call some."""
    if any(message.tool_calls for message in body.messages) and not template.mentions("tool_calls"):
        raise ConfigError("messages: the model's chat template writes no tool_calls. Leave them out, or use one fine-tuned with tools.")
    if any(message.thoughts for message in body.messages) and not template.thought_fields:
        raise ConfigError("messages: the model's chat template writes no thoughts. Leave out reasoning_content and reasoning.")
    if tools and not template.mentions("tools"):
        raise ConfigError("tools: the model's chat template does not read any. Leave them out, or use a model fine-tuned with tools.")
    if unread := sorted(name for name in body.chat_template_kwargs if not template.mentions(name)):
        raise ConfigError(f"chat_template_kwargs: the model's chat template does not read {unread[0][:80]}. Leave it out.")


def _parsed(kind: type[B], data: bytes) -> tuple[B, Tree]:
    """Returns the body, and the sampling options that it came with. Raises ConfigError."""
    try:
        tree = parse_asked(data)
        if not isinstance(tree, dict):
            raise ConfigError('body: it must be a JSON object. Send one, such as {"prompt": "def main("}.')
        own, rest = _divided(kind, {key: value for key, value in tree.items() if value is not None})
        return from_tree(kind, own), rest
    except ConfigError as error:  # of several keys, it names the first of them behind this
        raise ConfigError(error.sentence.removeprefix("config: ")) from None
    except ValueError as error:
        raise ConfigError(f"body: it is not JSON ({str(error)[:200]}). Send a JSON object.") from None
    except RecursionError:
        raise ConfigError("body: it is nested too deeply. Send a flatter one.") from None


def _divided(kind: type[AnyBody], tree: Tree) -> tuple[Tree, Tree]:
    """Returns the values of the body's own keys, and those of sampling options. Raises ConfigError for a key that is neither."""
    drawn = _DRAWN if issubclass(kind, Body) else ()
    if drawn and "max_completion_tokens" in tree and "max_tokens" in tree:
        raise ConfigError("max_tokens: max_completion_tokens is its new name, and both were given. Leave one of them out.")
    if drawn and "max_completion_tokens" in tree:
        tree["max_tokens"] = tree.pop("max_completion_tokens")
    own = {key: value for key, value in tree.items() if key in kind.model_fields}
    rest = {key: value for key, value in tree.items() if key not in own}
    if unknown := [key for key in rest if key not in drawn]:
        known = list(dict.fromkeys([*kind.model_fields, *drawn]))
        raise ConfigError(f"{unknown[0][:80]}: there is no such key. {did_you_mean(unknown[0][:80], known)}")
    return own, rest


def _several(given: str | Ids | list[str] | list[Ids], key: str) -> list[str] | list[Ids]:
    """Returns texts as a list, even where there is one. Raises ConfigError for an empty list."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise ConfigError(f"{key}: it is an empty list. Give a text, token ids, or several of either.")
    return [given] if isinstance(given[0], int) else given
