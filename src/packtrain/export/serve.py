"""The HTTP service of an exported model: a page, a JSON interface, and OpenAI's for texts.

The way of a request:

    door       who may enter: token, or a client on this machine; one line in the log when it is done
    body       within the limit, in time, and within the memory for all bodies
    message    checked (messages.py)
    queue      429 if it is full (batching.py); left early if the client leaves or the time is over
    answer     computed with others in a batch (service.py)
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import signal
import socket
import sys
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import uvicorn
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from packtrain.errors import Mistake, quoted
from packtrain.export.batching import Batched, QueueFull
from packtrain.export.messages import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    CompletionRequest,
    Finish,
    ModelEntry,
    ModelList,
    OpenAiRequest,
    PredictedOutput,
    PredictOptions,
    PredictRequest,
    PredictResponse,
    RequestFault,
    ServiceState,
    TextChoice,
    TextCompletion,
    Usage,
    openapi,
    read_message,
    read_query,
)
from packtrain.export.predict import DecodeOptions
from packtrain.export.service import Answer, Manner, Question, ServedModel, Service, ServiceSettings, Written
from packtrain.http_server import (
    CLIENT_LEFT,
    FILE_KINDS,
    SendAnswer,
    Token,
    is_from_elsewhere,
    log_line,
    names_this_machine,
    page_files,
    server_config,
)
from packtrain.pack.vocabulary import MAX_TEXT_BYTES, is_too_long
from packtrain.process import end_process
from packtrain.units import show_bytes

OpenAiShape = TypeVar("OpenAiShape", bound=OpenAiRequest)

_FILES = {
    f"/{name.replace('index.html', '')}": path for name, path in page_files(Path(__file__).parent / "page").items()
}
# Without a token: the page has no secrets, and whoever asks for health does not have one.
_OPEN = {*_FILES, "/healthz", "/readyz"}
_WORK = {"/v1/predict", "/v1/chat/completions", "/v1/completions"}
_ROUTES = {*_OPEN, *_WORK, "/v1/models", "/openapi.json", "/metrics"}
_TICK_SECONDS = 0.05
_UNREAD_SECONDS = 5.0  # for a body that nobody needs
_BODIES = 16  # bodies of the largest size that may be in memory at once


def serve(
    model: ServedModel,
    settings: ServiceSettings,
    listener: socket.socket,
    token: str | None,
    log: Callable[[str], None],
) -> bool:
    """Serve until SIGTERM or SIGINT, and return when the requests that run have been answered: True after SIGINT."""
    server = ModelServer(Service(model, settings), listener, token, log)
    server.run(sockets=[listener])
    if server.service.failure is not None:
        raise server.service.failure
    if server.service.is_busy:
        # After a second signal, or if a batch does not end. Python's own end beside a thread that computes is a crash.
        end_process(128 + server.last_signal)
    return server.last_signal == signal.SIGINT


class ModelServer(uvicorn.Server):
    """Uvicorn, which at the first signal refuses new work and ends when the requests that run are answered."""

    def __init__(
        self, service: Service, listener: socket.socket, token: str | None, log: Callable[[str], None]
    ) -> None:
        self.service = service
        self._door = Door(application(service, token), service, token, log)
        self._log, self._address = log, listener.getsockname()[:2]
        self._was_ready = False
        self.last_signal = 0
        super().__init__(server_config(self._door))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        self.last_signal = sig
        # Not kept in uvicorn's list of signals: it would raise them again at the end, and the exit code would not be 0.
        if self.service.draining_since is not None:
            self.should_exit = self.force_exit = True
        self.service.drain()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.start()
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        service = self.service
        if service.is_loaded and not self._was_ready:
            self._was_ready = True
            self._log(f"ready: {service.model.name}")
        if service.draining_since is not None:
            is_late = time.monotonic() - service.draining_since > service.settings.timeout_seconds + 1
            self.should_exit |= is_late or not self._door.num_working
        self.should_exit |= service.failure is not None
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self.service.close()
        end = time.monotonic() + self.service.settings.timeout_seconds
        while self.service.is_busy and not self.force_exit and time.monotonic() < end:
            await asyncio.sleep(_TICK_SECONDS)


class Door:
    """Every request passes it, in and out."""

    def __init__(self, app: ASGIApp, service: Service, token: str | None, log: Callable[[str], None]) -> None:
        self._app, self._service, self._log = app, service, log
        self._token = None if token is None else Token(token)
        self.num_working = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, answer = time.perf_counter(), SendAnswer(send)
        is_work = scope["path"] in _WORK
        self.num_working += is_work
        try:
            try:
                self._admit(Request(scope))
                await self._app(scope, receive, answer)
            except RequestFault as fault:
                await _fault_response(fault)(scope, receive, answer)
        except asyncio.CancelledError:  # after a second signal; Uvicorn would print a traceback
            if answer.status == CLIENT_LEFT:
                await _fault_response(_ending())(scope, receive, answer)
        finally:
            self.num_working -= is_work
            seconds = time.perf_counter() - started
            # The path as metrics and the log have it: nothing that a client can choose freely.
            other_route = "/v1/models/{model}" if scope["path"].startswith("/v1/models/") else "other"
            route = scope["path"] if scope["path"] in _ROUTES else other_route
            self._service.metrics.count_request(route, answer.status, seconds)
            self._log(log_line(scope, route, answer.status, seconds, scope["state"].get("details", "")))

    def _admit(self, request: Request) -> None:
        """Raise RequestFault if the request may not enter."""
        if self._token is None:
            # A page of another site can make a browser on this machine send requests, under the name of that site.
            host = request.headers.get("host", "")
            if not names_this_machine(host):
                raise RequestFault(403, f"the host {quoted(host)} is not this machine; use localhost", "wrong_host")
            if is_from_elsewhere(request):
                raise RequestFault(403, "requests from pages of other sites are refused", "wrong_origin")
        elif request.scope["path"] not in _OPEN and not self._token.is_sent_in(request):
            message = "the token is missing or wrong; send it as 'Authorization: Bearer TOKEN'"
            raise RequestFault(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _fault_response(fault: RequestFault) -> Response:
    return _json(fault.body, fault.status, fault.headers)


def _json(body: BaseModel, status: int = 200, headers: dict[str, str] | None = None, full: bool = True) -> Response:
    text = body.model_dump_json(by_alias=True, exclude_none=not full)
    return Response(text, status, headers, "application/json")


# The application.


def application(service: Service, token: str | None) -> ASGIApp:
    """Return what is behind the door."""
    endpoints = Endpoints(service, token is not None)
    routes = [
        *(Route(path, _file(file)) for path, file in _FILES.items()),
        Route("/healthz", endpoints.health),
        Route("/readyz", endpoints.readiness),
        Route("/metrics", endpoints.metrics),
        Route("/openapi.json", endpoints.description),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{model}", endpoints.model),
        Route("/v1/predict", endpoints.predict, methods=["POST"]),
    ]
    if service.model.recipe.inputs == "texts":
        routes.append(Route("/v1/chat/completions", endpoints.chat_completions, methods=["POST"]))
        routes.append(Route("/v1/completions", endpoints.completions, methods=["POST"]))

    async def handle_fault(_: Request, error: Exception) -> Response:
        if isinstance(error, RequestFault):
            return _fault_response(error)
        if isinstance(error, Mistake):
            return _fault_response(RequestFault(400, str(error)))
        if isinstance(error, ClientDisconnect):
            return Response(status_code=CLIENT_LEFT)  # nobody reads it, but the log has the status
        assert isinstance(error, HTTPException)  # of the router
        words = {404: "no such path; see /openapi.json", 405: "this path needs another method; see /openapi.json"}
        return _fault_response(
            RequestFault(error.status_code, words.get(error.status_code, error.detail), headers=error.headers)
        )

    kinds = (RequestFault, Mistake, ClientDisconnect, HTTPException)
    return Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, handle_fault))


def _file(path: Path) -> Callable[[Request], Awaitable[Response]]:
    content, kind = path.read_bytes(), FILE_KINDS[path.suffix]

    async def endpoint(_: Request) -> Response:
        return Response(content, media_type=kind)

    return endpoint


class Endpoints:
    def __init__(self, service: Service, needs_token: bool) -> None:
        self._service = service
        self._description = openapi(service.entry, version("packtrain"), needs_token)
        self._bytes_held = 0
        service.metrics.add_gauge("packtrain_body_bytes", "Bytes of requests in memory.", lambda: self._bytes_held)

    # About the service.

    async def health(self, _: Request) -> Response:
        is_stuck = self._service.is_stuck
        return _json(ServiceState(status="stuck" if is_stuck else "ok"), 503 if is_stuck else 200)

    async def readiness(self, _: Request) -> Response:
        state = self._service.state
        return _json(ServiceState(status=state), 200 if state == "ready" else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def description(self, _: Request) -> Response:
        return JSONResponse(self._description)

    async def models(self, _: Request) -> Response:
        return _json(ModelList(data=self._served))

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return _json(self._service.entry)

    @property
    def _served(self) -> list[ModelEntry]:
        """The models that are answered now: clients choose from them."""
        return [self._service.entry] if self._service.state == "ready" else []

    def _check_model(self, name: str | None) -> None:
        if name is None or name in [entry.id for entry in self._served]:
            return
        served = f"this service has {self._service.model.name}" if self._served else "it is not ready"
        raise RequestFault(404, f"no model {quoted(name)}; {served}", "model_not_found", "model")

    # Packtrain's own interface.

    async def predict(self, request: Request) -> Response:
        async with self._body(request) as (body, deadline):
            message, questions = self._predict_message(request, body)
            options = DecodeOptions(
                **message.model_dump(include={"beam", "nucleus", "temperature", "repetition", "seed"})
            )
            is_conversation = isinstance(questions[0].value, tuple)
            manner = self._service.manner(options, message.n_best, is_conversation)
            answers = await self._answers(request, manner, questions, deadline)
        predictions = [
            PredictedOutput.model_validate(
                {"output": answer.prediction.text, **answer.prediction.details, "note": answer.prediction.note or None}
            )
            for answer in answers
        ]
        return _json(PredictResponse(model=self._service.model.name, predictions=predictions), full=False)

    def _predict_message(self, request: Request, body: bytes) -> tuple[PredictOptions, list[Question]]:
        facts = self._service.entry.packtrain
        if facts.inputs == "images" and _content_type(request).startswith("image/"):
            return read_query(PredictOptions, dict(request.query_params)), [Question(body)]
        if _content_type(request) != "application/json":
            accepted = "application/json" + (" or image/*" if facts.inputs == "images" else "")
            raise RequestFault(415, f"the content type must be {accepted}", "unsupported_media_type")
        message = read_message(PredictRequest, body)
        if (message.inputs is None) == (message.turns is None):
            raise RequestFault(400, "give either inputs or turns", param="inputs")
        if message.turns is not None:
            if not facts.chat:
                raise RequestFault(400, f"turns: {facts.recipe} does not support it; use inputs", param="turns")
            return message, [Question(tuple(_checked(message.turns, "turns")))]
        assert message.inputs is not None
        if facts.inputs == "images":
            return message, [Question(_decoded(text, number)) for number, text in enumerate(message.inputs)]
        return message, [Question(text) for text in _checked(message.inputs, "inputs")]

    # OpenAI's.

    async def chat_completions(self, request: Request) -> Response:
        async with self._body(request) as (body, deadline):
            message = self._openai_message(request, ChatRequest, body)
            spoken = [turn for turn in message.messages if turn.role in ("user", "assistant")]
            if not spoken or spoken[-1].role != "user":
                raise RequestFault(400, "messages: the last one must be of the user", param="messages")
            turns = _checked([turn.text for turn in spoken], "messages")
            is_conversation = self._service.entry.packtrain.chat
            value = tuple(turns) if is_conversation else turns[-1]
            rows = await self._completed(request, message, [Question(value, message.limit)], is_conversation, deadline)
        [(written, usage)] = rows
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self._service.model.name}
        outputs = [_stopped(output, message.stops) for output in written]
        if not message.stream:
            choices = [
                ChatChoice(index=index, message=AssistantMessage(content=text), finish_reason=finish)
                for index, (text, finish) in enumerate(outputs)
            ]
            return _json(ChatCompletion.model_validate({**head, "choices": choices, "usage": usage}))
        chunks: list[BaseModel] = []
        for index, (text, finish) in enumerate(outputs):
            for delta, reason in (({"role": "assistant", "content": text}, None), ({}, finish)):
                choice = {"index": index, "delta": delta, "finish_reason": reason}
                chunks.append(ChatChunk.model_validate({**head, "choices": [choice]}))
        if message.stream_options and message.stream_options.include_usage:
            chunks.append(ChatChunk.model_validate({**head, "choices": [], "usage": usage}))
        return _events(chunks)

    async def completions(self, request: Request) -> Response:
        async with self._body(request) as (body, deadline):
            message = self._openai_message(request, CompletionRequest, body)
            prompts = _checked(message.prompts, "prompt")
            questions = [Question(prompt, message.max_tokens) for prompt in prompts]
            rows = await self._completed(request, message, questions, False, deadline)
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self._service.model.name}
        outputs = [_stopped(output, message.stops) for written, _ in rows for output in written]
        usage = _usage(sum(usage.prompt_tokens for _, usage in rows), sum(usage.completion_tokens for _, usage in rows))
        choices = [
            TextChoice(index=index, text=text, finish_reason=finish) for index, (text, finish) in enumerate(outputs)
        ]
        if not message.stream:
            return _json(TextCompletion.model_validate({**head, "choices": choices, "usage": usage}))
        chunks = [TextCompletion.model_validate({**head, "choices": [choice], "usage": None}) for choice in choices]
        if message.stream_options and message.stream_options.include_usage:
            chunks.append(TextCompletion.model_validate({**head, "choices": [], "usage": usage}))
        return _events(chunks)

    def _openai_message(self, request: Request, shape: type[OpenAiShape], body: bytes) -> OpenAiShape:
        if _content_type(request) != "application/json":
            raise RequestFault(415, "the content type must be application/json", "unsupported_media_type")
        message = read_message(shape, body)
        self._check_model(message.model)
        return message

    async def _completed(
        self,
        request: Request,
        message: OpenAiRequest,
        questions: Sequence[Question],
        is_conversation: bool,
        deadline: float,
    ) -> list[tuple[list[Written], Usage]]:
        """Return `n` outputs for each question, and the tokens of both."""
        options, num_outputs = _sampling(message), message.n or 1
        if options.given and (reason := self._service.no_sampling) is not None:
            field = "temperature" if message.temperature else "top_p"
            raise RequestFault(400, f"{field}: {reason}", param=field)
        # Sampled outputs come from as many copies of the question; a beam search finds several for one.
        copies = num_outputs if options.given else 1
        manner = self._service.manner(options, None if copies == num_outputs else num_outputs, is_conversation)
        repeated = [question for question in questions for _ in range(copies)]
        answers = await self._answers(request, manner, repeated, deadline)
        rows = []
        for start in range(0, len(answers), copies):
            answers_of_one = answers[start : start + copies]
            written = [output for answer in answers_of_one for output in answer.outputs]
            num_written = sum(output.num_tokens for output in written)
            rows.append((written, _usage(answers_of_one[0].tokens_read, num_written)))
        return rows

    # What all requests that compute share.

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[tuple[bytes, float]]:
        """Read the body, and give it with the end of the request's time; refuse the request if the model is not ready.

        It counts as held until the request is answered, so that all together stay within memory.
        """
        state = self._service.state
        if state != "ready":
            await self._read_away(request)
            words = {"loading": "the model is being loaded", "draining": "the service is ending"}
            headers = {"Retry-After": "5", "Connection": "close"}
            raise RequestFault(503, f"{words.get(state, state)}; try again", "not_ready", headers=headers)
        deadline = asyncio.get_running_loop().time() + self._service.settings.timeout_seconds
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RequestFault(415, "compressed bodies are not accepted", "unsupported_media_type")
        held = bytearray()
        try:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._receive(request, held)
            except TimeoutError:
                raise RequestFault(408, "the body did not arrive in time", "timeout") from None
            yield bytes(held), deadline
        finally:
            self._bytes_held -= len(held)

    async def _read_away(self, request: Request) -> None:
        """Read a body that is not needed: if it arrived after the connection was closed, the answer would be lost."""
        remaining_bytes = self._service.settings.max_bytes
        with suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(_UNREAD_SECONDS):
                async for chunk in request.stream():
                    remaining_bytes -= len(chunk)
                    if remaining_bytes < 0:
                        return

    async def _receive(self, request: Request, held: bytearray) -> None:
        limit = self._service.settings.max_bytes
        too_large = RequestFault(413, f"the body is larger than {show_bytes(limit)}", "too_large")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:  # before anything is read
            raise too_large
        async for chunk in request.stream():
            if len(held) + len(chunk) > limit:
                raise too_large
            if self._bytes_held + len(chunk) > _BODIES * limit:
                raise RequestFault(
                    429, "too many bytes are being processed", "overloaded", headers={"Retry-After": "1"}
                )
            held += chunk
            self._bytes_held += len(chunk)

    async def _answers(
        self, request: Request, manner: Manner, questions: Sequence[Question], deadline: float
    ) -> list[Answer]:
        limit = self._service.settings.largest_request
        try:
            # In a thread: texts are tokenized and the headers of images read, which takes a while for many of them.
            async with asyncio.timeout_at(deadline):
                sizes = await asyncio.to_thread(self._service.sizes, manner, questions)
        except TimeoutError:
            raise _too_late() from None
        if sum(sizes) > limit:
            first = "which" if len(sizes) == len(questions) else f"of which the first {len(sizes)}"
            large = f", {first} count as {sum(sizes):,}," if sum(sizes) > len(sizes) else ""
            message = f"{len(questions)} inputs{large} exceed the limit of {limit:,}; send fewer at once"
            raise RequestFault(413, message, "too_large", param="inputs")
        try:
            submitted = self._service.submit(manner, questions, sizes)
        except QueueFull as full:
            headers = {"Retry-After": str(full.retry_seconds)}
            raise RequestFault(429, str(full), "queue_full", headers=headers) from None
        batched = await self._waited(request, submitted, deadline)
        alone = f" {len(questions)} of {batched.batch_size} in the batch"
        several = f" {len(questions)} in {batched.batches} batches"
        request.scope["state"]["details"] = alone if batched.batches == 1 else several
        self._service.count_answers(batched.outputs)
        return batched.outputs

    async def _waited(self, request: Request, submitted: Future[Batched[Answer]], deadline: float) -> Batched[Answer]:
        """Wait for the answer, for the client to leave, or for the end of the time."""
        disconnected = asyncio.ensure_future(_disconnected(request.receive))
        computed = asyncio.wrap_future(submitted)
        try:
            seconds = max(0.0, deadline - asyncio.get_running_loop().time())
            either: set[asyncio.Future[Any]] = {computed, disconnected}
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if computed.cancelled():
                raise _ending()
            if computed.done():
                return computed.result()
            if disconnected.done():
                raise ClientDisconnect
            raise _too_late()
        except (Mistake, RequestFault, ClientDisconnect):
            raise
        except Exception as error:
            # Where it happened, but not its message: that may repeat the input.
            print("".join(traceback.format_tb(error.__traceback__)) + type(error).__name__, file=sys.stderr, flush=True)
            raise RequestFault(500, "a defect of the service; its log says where", "internal_error") from None
        finally:
            disconnected.cancel()
            # What still waits of it is not computed. Not through asyncio, which would do so only after the response.
            submitted.cancel()


def _ending() -> RequestFault:
    return RequestFault(503, "the service is ending; try again", "not_ready", headers={"Retry-After": "5"})


def _too_late() -> RequestFault:
    return RequestFault(504, "the answer took too long; send less, or try again later", "timeout")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _checked(texts: Sequence[str], field: str) -> Sequence[str]:
    for number, text in enumerate(texts):
        if is_too_long(text):
            raise RequestFault(
                400, f"{field}.{number}: has more than {MAX_TEXT_BYTES:,} bytes; shorten it", param=f"{field}.{number}"
            )
    return texts


def _decoded(text: str, number: int) -> bytes:
    """Decode an image in base64, or in a data: URL as browsers make them."""
    if text.startswith("data:"):
        text = text.partition(";base64,")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RequestFault(400, f"inputs.{number}: not base64", param=f"inputs.{number}") from None


def _sampling(message: OpenAiRequest) -> DecodeOptions:
    """Return the options for a temperature and `top_p`; without either the model searches as it was evaluated."""
    is_sampled = message.temperature or (message.temperature is None and message.top_p not in (None, 1.0))
    if not is_sampled:
        return DecodeOptions()
    nucleus = 1.0 if message.top_p is None else message.top_p
    temperature = 1.0 if message.temperature is None else max(0.01, message.temperature)
    seed = None if message.seed is None else message.seed % 2**62
    return DecodeOptions(nucleus=nucleus, temperature=temperature, seed=seed)


def _stopped(written: Written, stops: Sequence[str]) -> tuple[str, Finish]:
    places = [place for stop in stops if (place := written.text.find(stop)) >= 0]
    if places:
        return written.text[: min(places)], "stop"
    return written.text, "length" if written.is_cut else "stop"


def _usage(read: int, written: int) -> Usage:
    return Usage(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)


def _events(chunks: Sequence[BaseModel]) -> Response:
    """Return a stream of events: searches finish before they know their best output, so it comes at once."""
    lines = [f"data: {chunk.model_dump_json()}\n\n" for chunk in chunks]
    return Response("".join([*lines, "data: [DONE]\n\n"]), media_type="text/event-stream")
