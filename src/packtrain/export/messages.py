"""The messages of the HTTP service: what requests may say, what responses say, and their OpenAPI description.

The same classes check requests, make responses and are described, so that the description is true.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from typing_extensions import TypedDict  # pydantic accepts that of typing from Python 3.12 on

from packtrain.errors import printable
from packtrain.job.part import faults, in_schema

MAX_INPUTS = 256
MAX_TURNS = 100
MAX_BEAM = 32
_MAX_SEED = 2**62
_SHOWN = 200  # characters of a place in a request, which errors repeat


class RequestFault(Exception):
    """A request that cannot be answered: the status, and an error in the shape that OpenAI's clients parse."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str = "invalid_request",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, " ".join(message.split()), code, param
        self.headers = dict(headers or {})

    @property
    def body(self) -> ErrorResponse:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return ErrorResponse(error=ErrorBody(message=self.message, type=kind, param=self.param, code=self.code))


class _RequestModel(BaseModel):
    """Part of a request: unknown fields are refused, and `"3"` is not a number."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class _LenientModel(_RequestModel):
    """Part of a request of OpenAI's clients, which send fields that do not matter here."""

    model_config = ConfigDict(extra="ignore")


class _ResponseModel(BaseModel):
    """Part of a response. Fields that are set are always there, so the description calls them required."""

    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)


def _unsupported(*harmless: Any) -> PlainValidator:
    """Return the validator of a field of OpenAI's that may have only values that change nothing."""

    def check(value: object) -> object:
        # True is 1 in Python, but not in JSON.
        if not any(
            value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in (None, *harmless)
        ):
            raise ValueError("is not supported; remove it")
        return value

    values = ", ".join(json.dumps(allowed) for allowed in (*harmless, None))
    schema = in_schema(enum=[None, *harmless], description=f"Not supported; must be {values}.")
    return PlainValidator(check, json_schema_input_type=schema)


Beam = Annotated[int, Field(ge=1, le=MAX_BEAM)]


class PredictOptions(_RequestModel):
    """How outputs are generated; null leaves the choice to the model."""

    beam: Beam | None = Field(None, description="Beam size.")
    nucleus: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Sample from the most likely tokens that add up to this probability."
    )
    temperature: Annotated[float, Field(ge=0.01, le=100)] | None = Field(
        None, description="Sampling temperature; higher is more random."
    )
    repetition: Annotated[float, Field(ge=1, le=100)] | None = Field(
        None, description="Repetition penalty; values above 1 discourage repeats."
    )
    seed: Annotated[int, Field(ge=0, le=_MAX_SEED)] | None = Field(
        None, description="Random seed: the same request gets the same sampled outputs."
    )
    n_best: Beam | None = Field(None, description="Return this many outputs with their scores.")


class PredictRequest(PredictOptions):
    """Either `inputs`, or for chat the `turns` of a conversation."""

    inputs: Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)] | None = Field(
        None, description="Texts; for a model of images, files in base64 or as data: URLs."
    )
    turns: Annotated[list[str], Field(min_length=1, max_length=MAX_TURNS)] | None = Field(
        None, description="A conversation; the last turn is answered."
    )


class ScoredOutput(_ResponseModel):
    output: str
    score: float = Field(description="Log-probability, normalized by length.")


class ClassProbability(_ResponseModel):
    class_: str = Field(alias="class")
    probability: float


class WordMap(_ResponseModel):
    word: str
    attention: list[list[float]] = Field(description="Rows of the image from the top; all values add up to 1.")


class PredictedOutput(_ResponseModel):
    """The output for one input. Which fields it has depends on the model."""

    model_config = ConfigDict(extra="allow", json_schema_serialization_defaults_required=False)

    output: str
    score: float | None = Field(None, description="Log-probability, normalized by length.")
    n_best: list[ScoredOutput] | None = Field(None, description="With `n_best`: the outputs, the best first.")
    top5: list[ClassProbability] | None = Field(None, description="For classes: the most likely ones.")
    words: list[WordMap] | None = Field(None, description="For captions: where the model looked for each word.")
    note: str | None = Field(None, description="A warning about the input.")


class PredictResponse(_ResponseModel):
    model: str
    predictions: list[PredictedOutput] = Field(description="One for each input, in order.")


class ErrorBody(_ResponseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(_ResponseModel):
    error: ErrorBody


# What OpenAI's clients send and expect.


class TextPart(_LenientModel):
    type: Literal["text"]
    text: str


class ChatMessage(_LenientModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(text_part.text for text_part in self.content)


class StreamOptions(_LenientModel):
    include_usage: bool | None = None


class OpenAiRequest(_LenientModel):
    """The fields that both kinds of completions share."""

    model: str | None = Field(None, description="The name in /v1/models; may be left out.")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None, description="Above 0 the output is sampled; without it, or with 0, the model's own search is used."
    )
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Beam | None = Field(None, description="How many outputs to return.")
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # These would change the answer: better refused than ignored.
    frequency_penalty: Annotated[Any, _unsupported(0)] = None
    presence_penalty: Annotated[Any, _unsupported(0)] = None
    logit_bias: Annotated[Any, _unsupported({})] = None
    response_format: Annotated[Any, _unsupported({"type": "text"})] = None
    best_of: Annotated[Any, _unsupported(1)] = None

    @property
    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]


class ChatRequest(OpenAiRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_TURNS)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[Any, _unsupported(False)] = None
    top_logprobs: Annotated[Any, _unsupported(0)] = None
    tools: Annotated[Any, _unsupported([])] = None
    tool_choice: Annotated[Any, _unsupported("none", "auto")] = None
    functions: Annotated[Any, _unsupported([])] = None
    function_call: Annotated[Any, _unsupported("none", "auto")] = None
    modalities: Annotated[Any, _unsupported(["text"])] = None
    audio: Annotated[Any, _unsupported()] = None
    prediction: Annotated[Any, _unsupported()] = None
    web_search_options: Annotated[Any, _unsupported()] = None
    reasoning_effort: Annotated[Any, _unsupported("none")] = None
    verbosity: Annotated[Any, _unsupported("medium")] = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(OpenAiRequest):
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
    echo: Annotated[Any, _unsupported(False)] = None
    suffix: Annotated[Any, _unsupported("")] = None
    logprobs: Annotated[Any, _unsupported(False)] = None

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


Finish = Literal["stop", "length"]


class Usage(_ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AssistantMessage(_ResponseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(_ResponseModel):
    index: int
    message: AssistantMessage
    logprobs: None = None
    finish_reason: Finish


class ChatCompletion(_ResponseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(TypedDict, total=False):
    """A change of a message. A field without a change is left out: clients would take null for a change."""

    role: Literal["assistant"]
    content: str


class ChatChunkChoice(_ResponseModel):
    model_config = ConfigDict(json_schema_serialization_defaults_required=False)  # for the delta

    index: int
    delta: ChatDelta
    logprobs: None = None
    finish_reason: Finish | None = None


class ChatChunk(_ResponseModel):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class TextChoice(_ResponseModel):
    index: int
    text: str
    logprobs: None = None
    finish_reason: Finish | None


class TextCompletion(_ResponseModel):
    """A completion, or one event of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None


class ServiceLimits(_ResponseModel):
    max_bytes: int = Field(description="Of the body of a request.")
    max_inputs: int
    timeout_seconds: float


class ActionWords(_ResponseModel):
    """Words for what the model does: what to ask of it, while it works, of its inputs, and of its outputs."""

    action: str
    doing: str
    done: str
    result: str


class ModelFacts(_ResponseModel):
    """The model and the inputs and options that it accepts; clients of OpenAI ignore these facts."""

    recipe: str
    form: str
    precision: str
    step: int
    inputs: Literal["texts", "images"]
    chat: bool
    words: ActionWords
    options: list[str] = Field(description="Options that /v1/predict accepts.")
    beam: int = Field(description="Beam size without the option.")
    limits: ServiceLimits


class ModelEntry(_ResponseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["packtrain"] = "packtrain"
    packtrain: ModelFacts


class ModelList(_ResponseModel):
    object: Literal["list"] = "list"
    data: list[ModelEntry]


class ServiceState(_ResponseModel):
    status: Literal["ok", "loading", "ready", "draining", "failed", "stuck"]


Shape = TypeVar("Shape", bound=BaseModel)


def read_message(shape: type[Shape], body: bytes) -> Shape:
    """Check the body of a request; raise RequestFault with the first fault."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise RequestFault(400, f"the body is not valid UTF-8 at byte {error.start:,}") from None
    try:
        return shape.model_validate_json(text)
    except ValidationError as error:
        raise _in_one_line(error, shape) from None


def read_query(shape: type[Shape], query: Mapping[str, str]) -> Shape:
    """Check the parameters of a URL, which are text whatever they mean."""
    try:
        return shape.model_validate_strings(dict(query))
    except ValidationError as error:
        raise _in_one_line(error, shape) from None


def _in_one_line(error: ValidationError, shape: type[BaseModel]) -> RequestFault:
    details = error.errors(include_url=False)
    # The first fault, except that a list is no string where a list is accepted too: what is wrong in it comes next.
    is_other_type = [detail["type"] == "string_type" and isinstance(detail["input"], list) for detail in details]
    at = is_other_type.index(False) if False in is_other_type else 0
    detail = details[at]
    if detail["type"] == "json_invalid":
        return RequestFault(400, f"the body is not valid JSON: {printable(str(detail['ctx']['error']), _SHOWN)}")
    if detail["type"] == "model_type":
        return RequestFault(400, "the body must be a JSON object")
    location, words, _ = faults(error)[at]
    # In a union, the location also names the alternative that was tried, such as `list[str]`.
    steps = [
        step for step in location if isinstance(step, int) or (step.isidentifier() and step not in ("str", "dict"))
    ]
    place = printable(".".join(map(str, steps)), _SHOWN)
    if detail["type"] == "extra_forbidden":
        words = f"unknown field; known: {', '.join(shape.model_fields)}"
    return RequestFault(400, f"{place}: {words}" if place else words, param=place or None)


# The description.

_JSON = "application/json"
_FAULTS: Mapping[int, str] = {
    400: "The request is wrong; the message says where.",
    401: "The token is missing or wrong.",
    403: "The request comes from a page of another site.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large, or its inputs need more work than the queue accepts.",
    415: "The type of the body is not accepted.",
    429: "Too many requests are waiting; try again after `Retry-After` seconds.",
    500: "A defect of the service; its log has the traceback.",
    503: "The model is not loaded yet, or the service is ending.",
    504: "The answer took too long.",
}
_WORK_FAULTS = (400, 401, 403, 408, 413, 415, 429, 500, 503, 504)
_SHAPES: Sequence[tuple[type[BaseModel], JsonSchemaMode]] = [
    *((shape, "validation") for shape in (PredictRequest, ChatRequest, CompletionRequest)),
    *(
        (shape, "serialization")
        for shape in (
            PredictResponse, ChatCompletion, ChatChunk, TextCompletion, ModelList, ModelEntry, ServiceState,
            ErrorResponse,
        )
    ),
]  # fmt: skip


def openapi(model: ModelEntry, version: str, needs_token: bool) -> dict[str, Any]:
    _, definitions = models_json_schema(_SHAPES, ref_template="#/components/schemas/{model}")
    facts = model.packtrain
    accepted: dict[str, Any] = {_JSON: _schema(PredictRequest)}
    predict = _operation("predict", "Predict for one or more inputs.", accepted, {_JSON: _schema(PredictResponse)})
    if facts.inputs == "images":
        accepted["image/*"] = {"schema": {}}  # the file itself
        options = PredictOptions.model_json_schema()["properties"]
        predict["parameters"] = [
            {"name": name, "in": "query", "required": False, "schema": options[name], "description": "With image/*."}
            for name in facts.options
        ]
    paths: dict[str, Any] = {"/v1/predict": {"post": predict}}
    if facts.inputs == "texts":
        for path, name, request, response, chunk in (
            ("/v1/chat/completions", "createChatCompletion", ChatRequest, ChatCompletion, ChatChunk),
            ("/v1/completions", "createCompletion", CompletionRequest, TextCompletion, TextCompletion),
        ):
            content = {_JSON: _schema(response), "text/event-stream": _schema(chunk)}
            paths[path] = {"post": _operation(name, "As OpenAI's clients ask.", {_JSON: _schema(request)}, content)}
    parameter = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    closed = (401, 403)
    paths |= {
        "/v1/models": {"get": _read("listModels", "The model that is served.", {_JSON: _schema(ModelList)}, closed)},
        "/v1/models/{model}": {
            "parameters": [parameter],
            "get": _read("getModel", "The model with this name.", {_JSON: _schema(ModelEntry)}, (*closed, 404)),
        },
        "/metrics": {"get": _read("metrics", "For Prometheus.", {"text/plain": _any("string")}, closed)},
        "/openapi.json": {"get": _read("describe", "This description.", {_JSON: _any("object")}, closed)},
        "/healthz": {"get": _state("health", "Whether the process works.")},
        "/readyz": {"get": _state("readiness", "Whether requests are answered now.")},
    }
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": f"{model.id} ({facts.recipe})", "version": version},
        "paths": paths,
        "components": {"schemas": definitions["$defs"]},
    }
    if needs_token:
        described["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"token": []}]
    return described


def _schema(shape: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{shape.__name__}"}}


def _any(kind: str) -> dict[str, Any]:
    return {"schema": {"type": kind}}


def _operation(name: str, summary: str, request: Mapping[str, Any], response: Mapping[str, Any]) -> dict[str, Any]:
    return {**_read(name, summary, response, _WORK_FAULTS), "requestBody": {"required": True, "content": request}}


def _read(name: str, summary: str, response: Mapping[str, Any], codes: Sequence[int]) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": response}}
    for code in codes:
        responses[str(code)] = {"description": _FAULTS[code], "content": {_JSON: _schema(ErrorResponse)}}
    return {"operationId": name, "summary": summary, "responses": responses}


def _state(name: str, summary: str) -> dict[str, Any]:
    content = {_JSON: _schema(ServiceState)}
    responses = {"200": {"description": "Yes.", "content": content}, "503": {"description": "No.", "content": content}}
    return {"operationId": name, "summary": summary, "responses": responses, "security": []}
