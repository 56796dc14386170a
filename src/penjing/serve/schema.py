"""The request fields. Unknown fields are ignored; an error names the wrong field.

Numbers must not be strings, and must be finite. null means that the field is absent. Names and meanings are OpenAI's;
`top_k`, `min_p`, `repetition_penalty`, `enable_thinking`, `chat_template_kwargs` and `continue_ids` are extensions.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from penjing.infer.grammar import ANY_OBJECT
from penjing.serve import limits
from penjing.serve.errors import ApiError

Name = Annotated[str, Field(min_length=1, max_length=256)]
Id = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[Id], Field(min_length=1, fail_fast=True)]
StopText = Annotated[str, Field(max_length=limits.MAX_STOP_CHARACTERS)]


def _check_size(value: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(value)) > limits.MAX_SCHEMA_CHARACTERS:
        raise ValueError(f"has more than {limits.MAX_SCHEMA_CHARACTERS:,} characters")
    return value


JsonSchema = Annotated[dict[str, Any], AfterValidator(_check_size)]


def _check_bias(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > limits.MAX_LOGIT_BIAS:
        raise ValueError(f"has more than {limits.MAX_LOGIT_BIAS:,} entries")
    return value


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool | None = None


class SamplingFields(_Body):
    """Sampling settings, the same for both endpoints."""

    model: Name
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            BeforeValidator(_check_bias),  # pydantic checks all entries before their number
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=limits.MAX_STOP, fail_fast=True)] | None = None
    n: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    continue_ids: Annotated[list[Id], Field(fail_fast=True)] | None = None
    user: Annotated[str, Field(max_length=256)] | None = None

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether the last chunk of a stream contains the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=limits.MAX_ANSWERS, fail_fast=True)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=limits.MAX_ANSWERS, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None


class TextPart(_Body):
    type: Literal["text"]
    text: str


class RefusalPart(_Body):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def _check_kind(value: Any) -> Any:
    if value == "custom":
        raise ValueError("custom tools are not served, only functions")
    return value


Kind = Annotated[Literal["function"], BeforeValidator(_check_kind)]


class CalledFunction(_Body):
    name: Name
    arguments: str | dict[str, Any] | None = None


class PastCall(_Body):
    id: str | None = None
    type: Kind = "function"
    function: CalledFunction


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str
        | Annotated[
            list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]],
            Field(max_length=limits.MAX_PARTS, fail_fast=True),
        ]
        | None
    ) = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[PastCall], Field(max_length=limits.MAX_TOOLS, fail_fast=True)] | None = None


Messages = Annotated[list[ChatMessage], Field(max_length=limits.MAX_MESSAGES, fail_fast=True)]


class OfferedFunction(_Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]
    description: str | None = None
    parameters: JsonSchema | None = None


class OfferedTool(_Body):
    type: Kind
    function: OfferedFunction


class NamedFunction(_Body):
    name: Name


class NamedTool(_Body):
    type: Kind
    function: NamedFunction


class Allowed(_Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=limits.MAX_TOOLS, fail_fast=True)]


class AllowedTools(_Body):
    type: Literal["allowed_tools"]
    allowed_tools: Allowed


def _choice_kind(value: Any) -> str:
    return str(value.get("type")) if isinstance(value, dict) else "mode"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    Discriminator(
        _choice_kind,
        custom_error_type="tool_choice",
        custom_error_message="should be none, auto, required, a function or allowed_tools; custom tools are not served",
    ),
]


class NamedSchema(_Body):
    name: Name
    json_schema: JsonSchema | None = Field(default=None, alias="schema")


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class TemplateFields(_Body):
    """`chat_template_kwargs`, as clients of vLLM and MiniMind send them."""

    enable_thinking: bool | None = Field(
        default=None, validation_alias=AliasChoices("enable_thinking", "open_thinking")
    )


class ChatRequest(SamplingFields, TemplateFields):
    """POST /v1/chat/completions."""

    messages: Annotated[Messages, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=limits.MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    chat_template_kwargs: TemplateFields | None = None

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        """The JSON schema of the answer; None: any text. Raises ApiError if it is missing."""
        form = self.response_format
        if form is None or form.type != "json_schema":
            return ANY_OBJECT if form is not None and form.type == "json_object" else None
        if form.json_schema is None or form.json_schema.json_schema is None:
            raise ApiError(400, "response_format: json_schema needs a schema", param="response_format")
        return form.json_schema.json_schema

    @property
    def thinking(self) -> bool | None:
        """Whether the answer begins with thoughts; None: the model decides."""
        more = self.chat_template_kwargs
        return self.enable_thinking if self.enable_thinking is not None or more is None else more.enable_thinking

    @property
    def requires_tool_call(self) -> bool:
        """Whether the answer must be a tool call. (`isinstance` of pydantic's classes costs 0.1 ms.)"""
        allowed = getattr(self.tool_choice, "allowed_tools", None)
        return (allowed.mode if allowed else self.tool_choice) not in (None, "none", "auto")

    @property
    def required_tool(self) -> str | None:
        """The name of the tool to call; None for any."""
        name: str | None = getattr(getattr(self.tool_choice, "function", None), "name", None)
        return name

    @property
    def allowed_tools(self) -> list[str] | None:
        """The names of the tools that may be offered; None for all."""
        allowed = getattr(self.tool_choice, "allowed_tools", None)
        names = allowed and [tool.function.name for tool in allowed.tools]
        return [] if self.tool_choice == "none" else names


class TokenizeRequest(ChatRequest):
    """POST /tokenize: a conversation, or the prompt of a completion."""

    messages: Messages = []
    prompt: str | None = None


class ToolCallRequest(_Body):
    """POST /api/tools/call."""

    name: Name
    arguments: dict[str, Any] = {}
