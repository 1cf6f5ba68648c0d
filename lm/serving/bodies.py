"""Bodies of requests to OpenAI's API, as configs."""

import json
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from lm.data.sources.base import ROLES
from lm.schema import Config, MaybeEmpty, Tree
from lm.spelling import did_you_mean

_GIVEN = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}  # variables of templates that are set elsewhere
TOP = 20  # likeliest tokens told beside each
Ids = list[int]


class StreamOptions(Config):
    """What a stream tells beside the text."""

    include_usage: bool = False
    """A last chunk counts the tokens."""


class AnyBody(Config):
    """What requests of all kinds hold."""

    model: str | None = None
    """The served one's name."""
    user: MaybeEmpty | None = None
    """Whom it is for; not used."""


class Body(AnyBody):
    """What requests for text hold, beside how tokens are drawn."""

    stream: bool = False
    """Chunks come as they are made."""
    stream_options: StreamOptions | None = None
    safety_identifier: MaybeEmpty | None = None
    """Not used either, as the next four, which change no answer."""
    prompt_cache_key: MaybeEmpty | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    store: Literal[False] | None = None

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: they have no effect without stream=true. Set it, or leave them out.")
        return self

    @property
    def counts(self) -> bool:
        """Whether a stream ends with counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(Body):
    """Of /v1/completions."""

    prompt: MaybeEmpty | Ids | list[MaybeEmpty] | list[Ids] = ""
    """Text to continue, or its token ids, or several of either."""
    suffix: MaybeEmpty | None = None
    """Text behind: what is written fills the gap between the prompt and it. null: none."""
    echo: bool = False
    """The prompt is part of the text, and of the logprobs."""

    @field_validator("prompt", mode="before")
    @classmethod
    def _of_one_kind(cls, given: Any) -> Any:
        return _of_one_kind(given, "prompt")


class EmbeddingBody(AnyBody):
    """Of /v1/embeddings."""

    input: MaybeEmpty | Ids | list[MaybeEmpty] | list[Ids]
    """Text that becomes a vector, or its token ids, or several of either."""
    encoding_format: Literal["float", "base64"] = "float"
    """base64: of the bytes of float32, the lowest first."""
    dimensions: int | None = Field(None, gt=0)
    """The first so many numbers of each vector, made to length 1. null: all."""

    @field_validator("input", mode="before")
    @classmethod
    def _of_one_kind(cls, given: Any) -> Any:
        return _of_one_kind(given, "input")


def _of_one_kind(given: Any, what: str) -> Any:
    """Returns it. Raises ValueError unless it is a text, token ids, or several of either."""
    one = given if isinstance(given, list) else [given]
    if not (_all(str, one) or _all(int, one) or (_all(list, one) and all(_all(int, each) for each in one))):
        raise ValueError(f"{json.dumps(given)[:80]} is no {what}. Give a text, token ids, or several of either.")
    return given


def _all(kind: type, values: list[Any]) -> bool:
    return all(isinstance(value, kind) and not isinstance(value, bool) for value in values)


class Part(Config):
    """A piece of a message."""

    type: Literal["text"]
    text: MaybeEmpty


class Message(Config):
    """What one side said."""

    role: str
    content: MaybeEmpty | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """Thoughts of an answer, as DeepSeek's API and vLLM return them beside the content; given to the template."""
    reasoning: str | None = None
    """The same, as OpenRouter's API does."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Drops keys that are null, as those of the body: clients send an answer back with all that it might have had."""
        return {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else given

    @field_validator("content", mode="before")
    @classmethod
    def _of_text(cls, given: Any) -> Any:
        if isinstance(given, list) and not all(isinstance(part, dict) and part.get("type") == "text" for part in given):
            raise ValueError(f"{json.dumps(given)[:80]} has parts that are no text, and only text is read here. Leave them out.")
        return given

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.role not in ROLES:
            raise ValueError(f"role: nobody is called {self.role!r}. {did_you_mean(self.role, ROLES)}")
        if self.content is None and not self.tool_calls:
            raise ValueError("content: it is missing, and nothing is called. Give what the message says.")
        return self

    @property
    def thoughts(self) -> Tree:
        """Returns the fields of the answer's thoughts that say something."""
        given = {"reasoning_content": self.reasoning_content, "reasoning": self.reasoning}
        return {name: said for name, said in given.items() if said}

    def shown(self) -> Tree:
        """Returns the message as a chat template reads it: parts joined to one text, and no key that was not given."""
        content = self.content if not isinstance(self.content, list) else "".join(part.text for part in self.content)
        given = {"name": self.name, "tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id, **self.thoughts}
        return {"role": self.role, "content": content or ""} | {key: value for key, value in given.items() if value is not None}


class Format(Config):
    """What the answer is."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None
    """Its `schema`, and what nothing reads: name, description, strict."""

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        given = self.json_schema
        if given is not None and self.type != "json_schema":
            raise ValueError(f"json_schema: it has no effect with type={self.type}. Set type=json_schema, or leave it out.")
        if self.type == "json_schema" and not isinstance((given or {}).get("schema"), dict | bool):
            raise ValueError('json_schema: it holds no schema. Write "json_schema": {"name": ..., "schema": {...}}.')
        if unknown := sorted((given or {}).keys() - {"schema", "name", "description", "strict"}):
            raise ValueError(f"json_schema.{unknown[0][:80]}: there is no such key. Put what describes the answer into its schema.")
        return self

    @property
    def form(self) -> Tree:
        """Returns the field of SamplingConfig that constrains the answer to this format; {} for any text."""
        schema = (self.json_schema or {})["schema"] if self.type == "json_schema" else {"type": "object"}
        return {} if self.type == "text" else {"json_schema": json.dumps(schema)}


class ChatBody(Body):
    """Of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    """All turns so far."""
    logprobs: bool = False
    """Tell log p of each token."""
    top_logprobs: int | None = Field(None, ge=0, le=TOP)
    """Tell of the likeliest tokens too."""
    continue_final_message: bool = False
    """The last message, the assistant's, is gone on with, and the answer is what comes behind it."""
    add_generation_prompt: bool | None = None
    """Of vLLM's clients, which send false with continue_final_message."""
    tools: list[dict[str, Any]] | None = None
    """Given to the template."""
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] = "auto"
    """none: the template is not told of tools; required: the answer is calls alone; or a single call, of the function that is named."""
    parallel_tool_calls: bool | None = None
    """false: a single call, where tool_choice asks for calls; else the model calls as many as it wants."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further variables of the template, such as Qwen3's enable_thinking; vLLM's name for them."""
    response_format: Format = Format(type="text")

    @property
    def function(self) -> str | None:
        """Returns the name of the function that must be called; None where none is named."""
        return str(self.tool_choice["function"]["name"]) if isinstance(self.tool_choice, dict) else None

    @field_validator("tool_choice")
    @classmethod
    def _names_one(cls, given: str | Tree) -> str | Tree:
        of = given.get("function") if isinstance(given, dict) else None
        name = of.get("name") if isinstance(of, dict) else None
        if isinstance(given, dict) and not (isinstance(name, str) and given == {"type": "function", "function": {"name": name}}):
            raise ValueError(f'{json.dumps(given)[:80]} names no function. Write {{"type": "function", "function": {{"name": ...}}}}.')
        return given

    @model_validator(mode="after")
    def _has_its_tools(self) -> Self:
        if self.tool_choice not in ("auto", "none") and not self.tools:
            raise ValueError("tool_choice: it asks for a call, and there are no tools. Give some, or leave it out.")
        return self

    @model_validator(mode="after")
    def _counts_calls(self) -> Self:
        if self.parallel_tool_calls is False and self.tool_choice == "auto" and self.tools:
            rule = "false holds where tool_choice asks for a call, and the model decides itself here"
            raise ValueError(f"parallel_tool_calls: {rule}. Set tool_choice to required, or leave it out.")
        return self

    @field_validator("chat_template_kwargs")
    @classmethod
    def _of_its_own(cls, given: Tree) -> Tree:
        if taken := sorted(given.keys() & _GIVEN):
            raise ValueError(f"{taken[0]} is not for requests to set. Use its own key, if it has one, or leave it out.")
        return given

    @model_validator(mode="after")
    def _begins_or_goes_on(self) -> Self:
        if self.add_generation_prompt is self.continue_final_message:
            given = str(self.add_generation_prompt).lower()
            raise ValueError(f"add_generation_prompt: {given} contradicts continue_final_message={given}. Leave it out.")
        return self
