# ruff: noqa: ARG002 (the networks below ignore most of what they are given)
"""A real server on loopback and real clients; the network echoes its input, so that answers are known."""

from __future__ import annotations

import base64
import io
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray
from openapi_spec_validator import validate
from PIL import Image

from pack.corpus import job_of
from pack.pictures import with_size
from packtrain.cli.servers import serve as serve_command
from packtrain.data.pack import Pack
from packtrain.errors import Mistake, PacktrainError
from packtrain.export.export import ExportOptions, export_run
from packtrain.export.service import Manner, Question, ServedModel, ServiceSettings
from packtrain.recipes import Decoding, Recipe, recipe_class
from packtrain.recipes.caption import CaptionNetwork
from packtrain.recipes.classify import ClassifierNetwork
from packtrain.recipes.pairs import TextNetwork
from packtrain.recipes.recipe import Hypothesis, Network
from parts.browser import CHROMIUM, browser_at, expect
from parts.models import commit_model, packed_run
from parts.service import RunningService, running, wait_until
from recipes.small import SMALL

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

TOKEN = "a-token-of-this-test"
JSON = {"Content-Type": "application/json"}

pytestmark = pytest.mark.usefixtures("processes")


class EchoText(TextNetwork):
    """Writes what it reads, when its gate is open, and records the decoding and the size of every batch."""

    search_tokens = 100_000

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[tuple[int, Decoding]] = []
        self.numbers: list[int] = []
        self.defect: Exception | None = None

    def search(
        self, source: NDArray[np.int64], limits: NDArray[np.int64], decoding: Decoding, numbers: Sequence[int]
    ) -> list[list[Hypothesis]]:
        self.batches.append((len(source), decoding))
        self.numbers += numbers
        assert self.gate.wait(30)
        if self.defect:
            raise self.defect
        rows = [[token for token in row if token > 3] for row in source.tolist()]
        return [[Hypothesis(row, -0.5 - place) for place in range(decoding.n_best)] for row in rows]

    def losses(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.zeros(len(source))

    @property
    def sizes(self) -> list[int]:
        return [size for size, _ in self.batches[1:]]  # without the warm-up


class BrightClassifier(ClassifierNetwork):
    """Prefers the first class for dark images and the last for bright ones."""

    def logits(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        bright = pixels.reshape(len(pixels), -1).mean(1) / 25.5
        return np.stack([10 - bright, np.zeros(len(pixels)), bright], 1).astype(np.float32)


class DrawnCaptioner(CaptionNetwork[int]):
    """Says the same of every image."""

    def __init__(self, recipe: Recipe) -> None:
        [self.tokens] = recipe.pack.vocabulary.encode(["a red square"])

    def encode(self, pixels: NDArray[np.uint8]) -> int:
        return len(pixels)

    def search(self, encoded: int, beam: int, n_best: int = 1) -> list[list[Hypothesis]]:
        return [[Hypothesis(self.tokens, -1.0)] * n_best for _ in range(encoded)]

    def losses(self, encoded: int, images: NDArray[np.int64], captions: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.zeros(len(captions))

    def attention(self, encoded: int, image: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        return np.full((len(tokens), 2, 2), 0.25, np.float32)


Make = Callable[..., Recipe]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Recipe]:
    made: dict[str, Recipe] = {}

    def make(**changes: Any) -> Recipe:
        folder = tmp_path_factory.mktemp("recipe")
        run = packed_run(folder, job_of(folder, **changes))
        return recipe_class(str(run.job.recipe))(run.job, Pack(run.store, run.pack_name(), folder / "cache"))

    def recipe(word: str) -> Recipe:
        if word not in made:
            made[word] = SMALL[word](make, tmp_path_factory.mktemp(word))
        return made[word]

    return recipe


def served(recipe: Recipe, network: Network) -> ServedModel:
    return ServedModel("greetings-1", recipe, lambda: network, "echo", "fp32", 10, 1_700_000_000.0)


@pytest.fixture
def echo() -> EchoText:
    return EchoText()


@pytest.fixture
def service(recipes: Callable[[str], Recipe], echo: EchoText) -> Iterator[RunningService]:
    with running(served(recipes("translate"), echo)) as one:
        yield one


@pytest.fixture
def client(service: RunningService) -> Iterator[httpx.Client]:
    with service.client() as one:
        yield one


@pytest.fixture(scope="module")
def shared(recipes: Callable[[str], Recipe]) -> Iterator[httpx.Client]:
    """A client of one service, for tests that leave no trace in it."""
    with running(served(recipes("translate"), EchoText())) as one, one.client() as client:
        yield client


@contextmanager
def serving(recipe: Recipe, network: Network, token: str | None = None, **settings: Any) -> Iterator[RunningService]:
    # No batch is smaller because the machine is slow: tests know what is in it.
    with running(served(recipe, network), ServiceSettings(turn_seconds=3600.0, **settings), token) as one:
        yield one


@contextmanager
def closed(echo: EchoText) -> Iterator[None]:
    """The network computes only after the block."""
    echo.gate.clear()
    try:
        yield
    finally:
        echo.gate.set()


def error_of(response: httpx.Response) -> str:
    """Return the message of an error, which is one line in the shape that OpenAI's clients parse."""
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return str(error["message"])


def outputs(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [one["output"] for one in response.json()["predictions"]]


# Packtrain's interface.


def test_every_input_gets_its_prediction_in_order(client: httpx.Client) -> None:
    texts = ["good night", "", "guten Morgen früh", "hello"]
    response = client.post("/v1/predict", json={"inputs": texts})
    assert outputs(response) == texts
    assert response.json()["predictions"][0] == {"output": "good night", "score": -0.5}


def test_options_reach_the_network(client: httpx.Client, echo: EchoText) -> None:
    response = client.post("/v1/predict", json={"inputs": ["hello"], "beam": 3, "repetition": 1.5, "n_best": 2})
    assert response.json()["predictions"][0]["n_best"] == [
        {"output": "hello", "score": -0.5},
        {"output": "hello", "score": -1.5},
    ]
    assert echo.batches[-1][1] == Decoding(beam=3, repetition=1.5, n_best=2)


def test_a_seed_is_used_as_given_and_without_one_every_request_samples_anew(
    client: httpx.Client, echo: EchoText
) -> None:
    for body in ({"seed": 7}, {"seed": 7}, {}, {}):
        assert client.post("/v1/predict", json={"inputs": ["hello"], "nucleus": 0.9, **body}).status_code == 200
    seeds = [decoding.seed for _, decoding in echo.batches[1:]]
    assert seeds[:2] == [7, 7]
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b"{", "the body is not valid JSON: EOF while parsing an object at line 1 column 1"),
        (b"[1]", "the body must be a JSON object"),
        (b'{"inputs": ["\xff"]}', "the body is not valid UTF-8 at byte 13"),
        (b'{"inputs": ["\\ud800"]}', "the body is not valid JSON: unexpected end of hex escape at line 1 column 20"),
        (b"{}", "give either inputs or turns"),
        (b'{"inputs": []}', "inputs: must have at least 1 entry"),
        (b'{"inputs": "hello"}', "inputs: must be a list, not a string"),
        (b'{"inputs": [3]}', "inputs.0: must be a string, not an integer; put it in quotes"),
        (b'{"inputs": ["a"], "beam": "3"}', "beam: must be an integer, not a string; remove the quotes"),
        (b'{"inputs": ["a"], "beam": 1000}', "beam: must be at most 32"),
        (b'{"inputs": ["a"], "bean": 3}', "bean: unknown field; known: beam, nucleus"),
        (b'{"inputs": ["a"], "seed": 3}', "seed: only sampling uses it"),
        (b'{"inputs": ["a"], "beam": 2, "nucleus": 0.5}', "beam and n_best: beam search excludes sampling"),
        (b'{"inputs": ["a"], "beam": 2, "n_best": 3}', "n_best: 3 is more than beam, 2"),
        (b'{"turns": ["a"]}', "turns: translate does not support it; use inputs"),
        (json.dumps({"inputs": ["a"] * 257}).encode(), "inputs: must have at most 256 entries"),
        (json.dumps({"inputs": ["a", "long " * 9000]}).encode(), "inputs.1: has more than 16,000 bytes; shorten it"),
        (json.dumps({"inputs": ["good " * 3000]}).encode(), "the input has 3,002 tokens, more than 1,000; shorten it"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_in_one_line(shared: httpx.Client, body: bytes, fault: str) -> None:
    response = shared.post("/v1/predict", content=body, headers=JSON)
    assert response.status_code == 400
    assert error_of(response).startswith(fault)


def test_other_types_of_bodies_are_refused(shared: httpx.Client) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "image/png", ""):
        response = shared.post("/v1/predict", content=b'{"inputs": ["a"]}', headers={"Content-Type": kind})
        assert (response.status_code, error_of(response)) == (415, "the content type must be application/json")
    packed = shared.post("/v1/predict", content=b"x", headers={**JSON, "Content-Encoding": "gzip"})
    assert (packed.status_code, error_of(packed)) == (415, "compressed bodies are not accepted")


def test_other_paths_and_methods_are_refused(shared: httpx.Client) -> None:
    assert shared.get("/nothing").status_code == 404
    assert shared.get("/../../etc/passwd").status_code == 404
    response = shared.get("/v1/predict")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


def test_a_body_over_the_limit_is_refused_with_and_without_its_length(
    recipes: Callable[[str], Recipe], echo: EchoText
) -> None:
    with serving(recipes("translate"), echo, max_bytes=1000) as one, one.client() as client:
        body = json.dumps({"inputs": ["x" * 2000]}).encode()
        chunked = (body[start : start + 100] for start in range(0, len(body), 100))
        for content in (body, chunked):
            response = client.post("/v1/predict", content=content, headers=JSON)
            assert (response.status_code, error_of(response)) == (413, "the body is larger than 1.0 kB")
        assert outputs(client.post("/v1/predict", json={"inputs": ["hello"]})) == ["hello"]
        assert one.metric("packtrain_body_bytes") == 0


# Batches, queue, time.


def ask_many(url: str, texts: Sequence[str]) -> list[httpx.Response]:
    with ThreadPoolExecutor(len(texts)) as pool:
        return list(pool.map(lambda text: httpx.post(f"{url}/v1/predict", json={"inputs": [text]}, timeout=30), texts))


def test_concurrent_requests_are_computed_in_batches(recipes: Callable[[str], Recipe], echo: EchoText) -> None:
    texts = [f"good morning {number}" for number in range(50)]
    with serving(recipes("translate"), echo, batch=64) as one:
        with closed(echo), ThreadPoolExecutor(1) as pool:
            answers = pool.submit(ask_many, one.url, texts)
            wait_until(lambda: sum(echo.sizes) + one.server.service.num_waiting == 50, "all requests have arrived")
            echo.gate.set()
            assert [outputs(response) for response in answers.result(60)] == [[text] for text in texts]
        assert sum(echo.sizes) == 50
        assert len(echo.sizes) <= 5, "the first batch, and what came meanwhile"
        assert one.metric("packtrain_batch_inputs_sum") == 50
        assert one.metric('packtrain_http_requests_total{code="200",route="/v1/predict"}') == 50
        assert one.metric('packtrain_processed_total{unit="texts"}') == 50


def test_a_full_queue_answers_429_with_a_time_to_come_back(recipes: Callable[[str], Recipe], echo: EchoText) -> None:
    with (
        serving(recipes("translate"), echo, batch=1, queue=2) as one,
        one.client() as client,
        closed(echo),
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(ask_many, one.url, ["hello"])
        wait_until(lambda: echo.sizes, "the first is computed")
        with ThreadPoolExecutor(1) as others:
            rest = others.submit(ask_many, one.url, ["hello", "good night"])
            wait_until(lambda: one.server.service.num_waiting == 2, "the queue is full")
            refused = client.post("/v1/predict", json={"inputs": ["one more"]})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert error_of(refused) == "the queue is full; try again in 1 s"
            assert one.metric("packtrain_queue_inputs") == 2
            echo.gate.set()
            assert [outputs(one) for one in (*first.result(30), *rest.result(30))] == [
                ["hello"], ["hello"], ["good night"],
            ]  # fmt: skip


def test_no_request_alone_makes_the_queue_full(recipes: Callable[[str], Recipe], echo: EchoText) -> None:
    with serving(recipes("translate"), echo, batch=1, queue=8) as one, one.client() as client:
        assert client.get("/v1/models").json()["data"][0]["packtrain"]["limits"]["max_inputs"] == 4
        assert outputs(client.post("/v1/predict", json={"inputs": ["hello"] * 4})) == ["hello"] * 4
        refused = client.post("/v1/predict", json={"inputs": ["hello"] * 5})
        fault = "5 inputs exceed the limit of 4; send fewer at once"
        assert (refused.status_code, error_of(refused)) == (413, fault)


def test_requests_count_by_the_work_that_they_take(shared: httpx.Client) -> None:
    long_text = "good " * 990
    assert outputs(shared.post("/v1/predict", json={"inputs": [long_text]})) == [long_text.strip()]
    response = shared.post("/v1/predict", json={"inputs": [long_text] * 256})
    fault = "256 inputs, which count as 2,816, exceed the limit of 512; send fewer at once"
    assert (response.status_code, error_of(response)) == (413, fault)


def test_no_text_alone_holds_up_the_others(shared: httpx.Client) -> None:
    long_text = "good " * 990
    assert shared.post("/v1/predict", json={"inputs": ["good " * 150], "beam": 32}).status_code == 200
    response = shared.post("/v1/predict", json={"inputs": ["hello", long_text], "beam": 32})
    fault = "input 2 of 2 is too long for a beam of 32; shorten it, or use at most 6"
    assert (response.status_code, error_of(response)) == (400, fault)
    assert shared.post("/v1/predict", json={"inputs": [long_text], "beam": 6}).status_code == 200
    response = shared.post("/v1/completions", json={"prompt": long_text, "n": 32})
    assert error_of(response) == "the input is too long for a beam of 32; shorten it, or use at most 6"
    sampled = shared.post("/v1/completions", json={"prompt": long_text, "n": 32, "temperature": 1})
    assert sampled.status_code == 200, "samples are as many inputs, which need not be computed together"


def test_a_request_is_abandoned_when_its_time_is_over(recipes: Callable[[str], Recipe], echo: EchoText) -> None:
    with serving(recipes("translate"), echo, batch=2, timeout_seconds=0.5) as one, one.client() as client:
        with closed(echo):
            late = client.post("/v1/predict", json={"inputs": ["good morning"] * 100})
            assert (late.status_code, echo.sizes) == (504, [2])
        assert outputs(client.post("/v1/predict", json={"inputs": ["good night"]})) == ["good night"]
        assert echo.sizes == [2, 1], "what nobody waits for is not computed"


def test_a_large_request_lets_others_be_answered_before_it_ends(
    recipes: Callable[[str], Recipe], echo: EchoText
) -> None:
    with serving(recipes("translate"), echo, batch=4) as one, one.client() as client, ThreadPoolExecutor(2) as pool:
        with closed(echo):
            many = {"inputs": ["good morning"] * 20}
            large = pool.submit(httpx.post, f"{one.url}/v1/predict", json=many, timeout=30)
            wait_until(lambda: echo.sizes, "its first part is computed")
            small = pool.submit(ask_many, one.url, ["hello"])
            wait_until(lambda: one.server.service.num_waiting == 17, "the small one waits behind it")
        assert [outputs(response) for response in (*small.result(30), large.result(30))] == [["hello"], many["inputs"]]
        assert echo.sizes == [4, 4, 4, 4, 4, 1]
        assert outputs(client.post("/v1/predict", json={"inputs": ["good night"]})) == ["good night"]
        wait_until(lambda: len(one.log) == 4, "all are in the log")
        details = {line.rpartition(" ms ")[2] for line in one.log}
        assert details >= {"1 of 4 in the batch", "20 in 6 batches"}


def test_samples_of_a_seed_do_not_depend_on_how_a_request_is_divided(
    recipes: Callable[[str], Recipe], echo: EchoText
) -> None:
    with serving(recipes("translate"), echo, batch=2) as one, one.client() as client:
        asked = {"inputs": ["hello"] * 5, "nucleus": 0.9, "seed": 7}
        assert client.post("/v1/predict", json=asked).status_code == 200
        assert echo.sizes == [2, 2, 1]
        assert echo.numbers[1:] == [0, 1, 2, 3, 4]
        assert {decoding.seed for _, decoding in echo.batches[1:]} == {7}


def test_a_slow_model_gives_504_and_others_are_answered_after_it(
    recipes: Callable[[str], Recipe], echo: EchoText
) -> None:
    with serving(recipes("translate"), echo, batch=1, timeout_seconds=0.3) as one, one.client() as client:
        with closed(echo):
            late = ask_many(one.url, ["hello", "hello", "hello"])
            assert {response.status_code for response in late} == {504}
            assert error_of(late[0]) == "the answer took too long; send less, or try again later"
        wait_until(lambda: one.server.service.num_waiting == 0, "the queue is empty")
        assert outputs(client.post("/v1/predict", json={"inputs": ["good night"]})) == ["good night"]
        assert len(echo.sizes) == 2, "what nobody waits for is not computed"


def test_a_body_that_does_not_arrive_gives_408(recipes: Callable[[str], Recipe], echo: EchoText) -> None:
    with (
        serving(recipes("translate"), echo, timeout_seconds=0.3) as one,
        raw(one, "Content-Length: 100") as connection,
    ):
        connection.sendall(b'{"inp')
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_a_request_with_two_lengths_is_refused(service: RunningService, echo: EchoText) -> None:
    """A proxy in front may believe the other one, and take the rest for a request of someone else."""
    body = b'{"inputs": ["hello"]}'
    with raw(service, "Content-Length: 4", "Transfer-Encoding: chunked", "Connection: close") as connection:
        connection.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        answer = b"".join(iter(lambda: connection.recv(1000), b""))
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1
    assert echo.sizes == []


def test_a_connection_that_sends_no_whole_request_is_closed(service: RunningService) -> None:
    service.server.config.timeout_keep_alive = 0.2  # type: ignore[assignment]
    port = int(service.url.rpartition(":")[2])
    for start in (b"", b"POST /v1/pre", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he"):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(start)
            received = b"".join(iter(lambda: connection.recv(1000), b""))
            assert received.startswith(b"HTTP/1.1 200 ") == start.startswith(b"GET")


@contextmanager
def raw(service: RunningService, *headers: str) -> Iterator[socket.socket]:
    """A connection on which the head of a POST to /v1/predict has been sent."""
    port = int(service.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        head = ["POST /v1/predict HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers, "", ""]
        connection.sendall("\r\n".join(head).encode())
        yield connection


def test_a_client_that_leaves_costs_the_others_nothing(service: RunningService, echo: EchoText) -> None:
    body = b'{"inputs": ["left early"]}'
    with closed(echo), ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask_many, service.url, ["hello"])
        wait_until(lambda: echo.sizes, "the first is computed")
        with raw(service, f"Content-Length: {len(body)}") as connection:
            connection.sendall(body)
            wait_until(lambda: service.server.service.num_waiting == 1, "the second waits")
        wait_until(lambda: any(" 499 " in line for line in service.log), "the server has seen that it left")
        second = pool.submit(ask_many, service.url, ["good night"])
        echo.gate.set()
        assert [outputs(*one.result(30)) for one in (first, second)] == [["hello"], ["good night"]]
    assert echo.sizes == [1, 1], "what nobody waits for is not computed"


def test_a_bad_input_in_a_batch_fails_its_own_request_alone(service: RunningService, echo: EchoText) -> None:
    with closed(echo), ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask_many, service.url, ["hello"])
        wait_until(lambda: echo.sizes, "the first is computed")
        rest = pool.submit(ask_many, service.url, ["good night", "good " * 3000, "good morning"])
        wait_until(lambda: service.server.service.num_waiting == 13, "the others wait; the long one counts as 11")
        echo.gate.set()
        [one], [two, bad, three] = first.result(30), rest.result(30)
    assert [outputs(response) for response in (one, two, three)] == [["hello"], ["good night"], ["good morning"]]
    assert bad.status_code == 400
    assert error_of(bad).startswith("the input has 3,002 tokens")


def test_a_defect_gives_500_without_the_input_in_answer_or_log(
    client: httpx.Client, service: RunningService, echo: EchoText, capfd: pytest.CaptureFixture[str]
) -> None:
    echo.defect = RuntimeError("broken at 'my secret text'")
    response = client.post("/v1/predict", json={"inputs": ["my secret text"]})
    assert (response.status_code, error_of(response)) == (500, "a defect of the service; its log says where")
    written = capfd.readouterr().err
    assert "RuntimeError" in written
    assert "secret" not in written + "".join(service.log)
    echo.defect = None
    assert outputs(client.post("/v1/predict", json={"inputs": ["hello"]})) == ["hello"]


# Who may enter.


def test_without_a_token_only_the_names_of_this_machine_are_accepted(shared: httpx.Client) -> None:
    for host in ("localhost", "localhost:8000", "127.0.0.1", "127.0.0.53:80", "[::1]:8000", "model.localhost"):
        assert shared.get("/v1/models", headers={"Host": host}).status_code == 200, host
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "192.168.0.7", "", "[::1", "::1"):
        response = shared.get("/v1/models", headers={"Host": host})
        assert response.status_code == 403, host
        assert "is not this machine" in error_of(response)


def test_pages_of_other_sites_are_refused(client: httpx.Client, service: RunningService) -> None:
    response = client.post("/v1/predict", json={"inputs": ["a"]}, headers={"Origin": "https://evil.example"})
    assert (response.status_code, error_of(response)) == (403, "requests from pages of other sites are refused")
    assert client.post("/v1/predict", json={"inputs": ["a"]}, headers={"Origin": service.url}).status_code == 200
    asked = client.options("/v1/predict", headers={"Origin": "https://evil.example"})
    assert not [name for name in asked.headers if name.startswith("access-control")]


def test_with_a_token_everything_but_the_page_and_health_needs_it(
    recipes: Callable[[str], Recipe], echo: EchoText
) -> None:
    with serving(recipes("translate"), echo, TOKEN) as one, one.client() as client:
        for path in ("/", "/page.js", "/dom.js", "/style.css", "/base.css", "/icon.svg", "/healthz", "/readyz"):
            assert client.get(path).status_code == 200, path
        for path in ("/v1/models", "/v1/models/greetings-1", "/metrics", "/openapi.json", "/v1/predict", "/nothing"):
            for given in ("", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "Bearer \xe9"):
                response = client.get(path, headers={b"Authorization": given.encode("latin-1")})
                assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer"), path
                assert "the token is missing or wrong" in error_of(response)
        right = {"Authorization": f"Bearer {TOKEN}", "Host": "models.example"}
        assert outputs(client.post("/v1/predict", json={"inputs": ["hello"]}, headers=right)) == ["hello"]
        assert TOKEN not in "".join(one.log)


def test_the_log_has_a_line_for_every_request_without_its_contents(
    client: httpx.Client, service: RunningService
) -> None:
    client.post("/v1/predict?q=secret", json={"inputs": ["secret", "more"]})
    client.get("/secret/path")
    client.get("/v1/models/secret")
    wait_until(lambda: len(service.log) == 4, "four lines")
    assert "ready: greetings-1" in service.log
    entries = [line for line in service.log if not line.startswith("ready")]
    lines = [re.sub(r"[\d.]+ ms", "T ms", line.partition(" ")[2]) for line in entries]
    assert lines == [
        "127.0.0.1 POST /v1/predict 200 T ms 2 of 2 in the batch",
        "127.0.0.1 GET other 404 T ms",
        "127.0.0.1 GET /v1/models/{model} 404 T ms",
    ]


# OpenAI's clients.


def test_a_chat_completion_translates_the_last_message_of_the_user(client: httpx.Client) -> None:
    messages = [
        {"role": "system", "content": "Translate."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hallo"},
        {"role": "user", "content": [{"type": "text", "text": "good "}, {"type": "text", "text": "night"}]},
    ]
    asked = {"model": "greetings-1", "messages": messages, "user": "me", "top_p": 1, "n": 2}
    answer = client.post("/v1/chat/completions", json=asked).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][1] == {
        "index": 1,
        "message": {"role": "assistant", "content": "good night", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    usage = answer["usage"]
    assert usage["completion_tokens"] == 2 * usage["prompt_tokens"] > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_chat_gets_the_whole_conversation(recipes: Callable[[str], Recipe], echo: EchoText) -> None:
    turns = ["hello", "hello you", "good night"]
    with serving(recipes("chat"), echo) as one, one.client() as client:
        own = outputs(client.post("/v1/predict", json={"turns": turns}))
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
        answer = client.post("/v1/chat/completions", json={"messages": messages}).json()
        assert own == [answer["choices"][0]["message"]["content"]]
        assert "night" in own[0]
        assert own[0] != "good night", "the prompt has more than the last turn"


def test_conversations_are_computed_in_batches(recipes: Callable[[str], Recipe], echo: EchoText) -> None:
    with serving(recipes("chat"), echo) as one, closed(echo), ThreadPoolExecutor(9) as pool:

        def ask(text: str) -> list[str]:
            return outputs(httpx.post(f"{one.url}/v1/predict", json={"turns": ["hello", text]}, timeout=30))

        texts = ["good night", "today", "thank you"] * 3
        asked = [pool.submit(ask, text) for text in texts]
        wait_until(lambda: sum(echo.sizes) + one.server.service.num_waiting == 9, "all have arrived")
        echo.gate.set()
        assert all(text in answer.result(30)[0] for text, answer in zip(texts, asked, strict=True))
        assert len(echo.sizes) < 9


def test_a_stream_has_the_answer_as_events(client: httpx.Client) -> None:
    asked = {"messages": [{"role": "user", "content": "good night"}], "stream": True}
    response = client.post("/v1/chat/completions", json={**asked, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert last == "[DONE]"
    first, second, third = map(json.loads, events)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "good night"}
    assert (second["choices"][0]["delta"], second["choices"][0]["finish_reason"]) == ({}, "stop")
    assert (third["choices"], third["usage"]["total_tokens"] > 0) == ([], True)


def test_completions_take_several_prompts_and_sample_several_outputs(client: httpx.Client, echo: EchoText) -> None:
    asked = {"prompt": ["hello", "good night"], "n": 2, "temperature": 0.7, "top_p": 0.9, "seed": -5}
    answer = client.post("/v1/completions", json=asked).json()
    assert [one["text"] for one in answer["choices"]] == ["hello", "hello", "good night", "good night"]
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2, 3]
    assert echo.batches[-1][1] == Decoding(nucleus=0.9, temperature=0.7, seed=-5 % 2**62)


def test_outputs_end_at_the_limit_and_at_a_stop(client: httpx.Client) -> None:
    short = client.post("/v1/completions", json={"prompt": "good night everybody", "max_tokens": 1}).json()
    [choice] = short["choices"]
    assert (choice["finish_reason"], short["usage"]["completion_tokens"]) == ("length", 1)
    assert "good night everybody".startswith(choice["text"])
    stopped = client.post("/v1/completions", json={"prompt": "good night", "stop": ["zzz", " ni"]}).json()
    assert [(one["text"], one["finish_reason"]) for one in stopped["choices"]] == [("good", "stop")]


@pytest.mark.parametrize(
    ("path", "body", "status", "fault"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "model": "gpt"}, 404, "no model 'gpt'"),
        ("chat/completions", {"messages": [{"role": "assistant", "content": "a"}]}, 400, "messages: the last one must"),
        ("chat/completions", {"messages": []}, 400, "messages: must have at least 1"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "a"}]}, 400, "messages.0.role: 'tool' is not"),
        ("completions", {"prompt": [1, 2]}, 400, "prompt.0: must be a string, not an integer"),
        ("completions", {"prompt": []}, 400, "prompt: must have at least 1 entry"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
         "messages.0.content.0.type: 'image_url' is not one of text"),
        ("completions", {"prompt": "a", "temperature": 3}, 400, "temperature: must be at most 2"),
        ("completions", {"prompt": "a", "n": 33}, 400, "n: must be at most 32"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(
    shared: httpx.Client, path: str, body: dict[str, Any], status: int, fault: str
) -> None:
    response = shared.post(f"/v1/{path}", json=body)
    assert (response.status_code, error_of(response)[: len(fault)]) == (status, fault)


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True}, {"top_logprobs": 2}, {"tools": [{}]}, {"tool_choice": "required"}, {"functions": [{}]},
        {"function_call": {"name": "f"}}, {"response_format": {"type": "json_object"}}, {"best_of": 2},
        {"presence_penalty": 1}, {"frequency_penalty": -0.5}, {"logit_bias": {"7": 1}}, {"modalities": ["audio"]},
        {"audio": {"voice": "alloy"}}, {"prediction": {"type": "content"}}, {"web_search_options": {}},
        {"reasoning_effort": "high"}, {"verbosity": "low"},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_fields_of_openai_that_would_change_the_answer_are_refused_by_name(
    shared: httpx.Client, fields: dict[str, Any]
) -> None:
    response = shared.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], **fields})
    [name] = fields
    assert (response.status_code, error_of(response)) == (400, f"{name}: is not supported; remove it")
    assert response.json()["error"]["param"] == name


@pytest.mark.parametrize("name", ["logprobs", "echo", "suffix", "best_of", "response_format", "logit_bias"])
def test_fields_of_completions_that_would_change_the_answer_are_refused_by_name(
    shared: httpx.Client, name: str
) -> None:
    for value in (3, "x", True, {"a": 1}):
        response = shared.post("/v1/completions", json={"prompt": "a", name: value})
        assert (response.status_code, error_of(response)) == (400, f"{name}: is not supported; remove it")


def test_values_of_such_fields_that_change_nothing_are_accepted(shared: httpx.Client) -> None:
    harmless = {
        "logprobs": False, "tools": [], "tool_choice": "auto", "functions": None, "response_format": {"type": "text"},
        "best_of": 1, "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "user": "me", "store": False,
    }  # fmt: skip
    asked = {"messages": [{"role": "user", "content": "hello"}], **harmless}
    assert shared.post("/v1/chat/completions", json=asked).status_code == 200
    described = shared.get("/openapi.json").json()
    check_message(described, "ChatRequest", asked)
    with pytest.raises(jsonschema.ValidationError, match="is not one of"):
        check_message(described, "ChatRequest", {**asked, "logprobs": True})


def check_message(described: dict[str, Any], name: str, message: dict[str, Any]) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": described["components"]}
    jsonschema.Draft202012Validator(schema).validate(message)


def test_only_options_that_the_form_supports_are_listed_and_accepted(
    recipes: Callable[[str], Recipe], echo: EchoText
) -> None:
    model = replace(served(recipes("translate"), echo), form="ctranslate2", can_sample=False)
    with running(model) as one, one.client() as client:
        [entry] = client.get("/v1/models").json()["data"]
        assert entry["packtrain"]["options"] == ["beam", "n_best", "repetition"]
        fault = "temperature: a ctranslate2 model does not sample; export it with --format onnx to do so"
        for path, body in (("predict", {"inputs": ["a"]}), ("completions", {"prompt": "a"})):
            refused = client.post(f"/v1/{path}", json={**body, "temperature": 1})
            assert refused.status_code == 400
            assert error_of(refused) == fault
        refused = client.post("/v1/completions", json={"prompt": "a", "top_p": 0.5})
        assert refused.json()["error"]["param"] == "top_p", "the name that OpenAI's clients know"


# Pictures.


def picture(color: str, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (50, 40), color).save(file, kind)
    return file.getvalue()


def test_pictures_come_as_bodies_in_base64_and_as_data_urls(recipes: Callable[[str], Recipe]) -> None:
    with serving(recipes("classify"), BrightClassifier()) as one, one.client() as client:
        raw_body = client.post("/v1/predict", content=picture("white"), headers={"Content-Type": "image/png"})
        encoded = base64.b64encode(picture("black", "JPEG")).decode()
        several = client.post("/v1/predict", json={"inputs": [encoded, f"data:image/jpeg;base64,{encoded}"]})
        tops = [row["top5"][0]["class"] for row in raw_body.json()["predictions"] + several.json()["predictions"]]
        assert tops == ["elk", "cat", "cat"]
        assert one.metric('packtrain_processed_total{unit="images"}') == 3


def test_pictures_count_by_their_pixels_and_a_large_one_alone_is_answered(recipes: Callable[[str], Recipe]) -> None:
    file = io.BytesIO()
    Image.new("1", (9400, 9400)).save(file, "PNG")
    large = base64.b64encode(file.getvalue()).decode()
    with serving(recipes("classify"), BrightClassifier()) as one, one.client() as client:
        response = client.post("/v1/predict", json={"inputs": [large] * 256})
        fault = "256 inputs, of which the first 6 count as 534, exceed the limit of 512"
        assert (response.status_code, error_of(response)) == (413, f"{fault}; send fewer at once")
        [answer] = client.post("/v1/predict", json={"inputs": [large]}).json()["predictions"]
        assert answer["top5"][0]["class"] == "cat"


def test_what_precedes_the_pixels_of_a_picture_counts_by_the_time_to_read_it(recipes: Callable[[str], Recipe]) -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    jpeg = file.getvalue()
    slow = jpeg[:2] + b"\xff\xfe\0\2" * 80_000 + jpeg[2:]
    with serving(recipes("classify"), BrightClassifier(), queue=6) as one, one.client() as client:
        accepted, refused = (
            client.post("/v1/predict", content=body, headers={"Content-Type": "image/jpeg"}) for body in (jpeg, slow)
        )
        assert (accepted.status_code, refused.status_code) == (200, 413)


def test_hypotheses_of_captions_count(recipes: Callable[[str], Recipe]) -> None:
    recipe = recipes("caption")
    question = Question(picture("red"))
    with serving(recipe, DrawnCaptioner(recipe)) as one:
        service = one.server.service
        sizes = [service.sizes(Manner(Decoding(beam)), [question, question]) for beam in (5, 32)]
    assert sizes == [[1, 1], [4, 4]]


def test_a_request_whose_headers_take_too_long_is_answered_in_time(
    recipes: Callable[[str], Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()

    def slow(_: bytes) -> int:
        assert done.wait(30)
        return 0

    monkeypatch.setattr("packtrain.export.service.pixels_to_decode", slow)
    with serving(recipes("classify"), BrightClassifier(), timeout_seconds=0.2) as one, one.client() as client:
        late = client.post("/v1/predict", json={"inputs": [base64.b64encode(picture("red")).decode()]})
        done.set()
        assert (late.status_code, error_of(late)[:24]) == (504, "the answer took too long")


def test_captions_say_where_they_looked(recipes: Callable[[str], Recipe]) -> None:
    recipe = recipes("caption")
    with serving(recipe, DrawnCaptioner(recipe)) as one, one.client() as client:
        url = "/v1/predict?beam=2&n_best=2"
        response = client.post(url, content=picture("red"), headers={"Content-Type": "image/png"})
        [made] = response.json()["predictions"]
        assert (made["output"], [row["word"] for row in made["words"]]) == ("a red square", ["a", "red", "square"])
        assert made["words"][0]["attention"] == [[0.25, 0.25], [0.25, 0.25]]
        assert len(made["n_best"]) == 2


def test_what_is_no_usable_picture_is_refused(recipes: Callable[[str], Recipe]) -> None:
    bomb = with_size(picture("red", "JPEG"), 65_000, 65_000)
    with serving(recipes("classify"), BrightClassifier()) as one, one.client() as client:
        for data, fault in ((b"", "empty"), (b"hello", "not an image"), (bomb, "too many pixels")):
            response = client.post("/v1/predict", content=data, headers={"Content-Type": "image/png"})
            assert response.status_code == 400
            assert fault in error_of(response)
            assert "/tmp" not in error_of(response)
        response = client.post("/v1/predict", json={"inputs": ["!"]})
        assert (response.status_code, error_of(response)) == (400, "inputs.0: not base64")
        response = client.post("/v1/predict?beam=2", content=picture("red"), headers={"Content-Type": "image/png"})
        assert (response.status_code, error_of(response)) == (400, "beam: classify does not support it")
        response = client.post("/v1/predict?beam=x", content=picture("red"), headers={"Content-Type": "image/png"})
        assert response.status_code == 400
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 404


# The description, health, and the page.


def check_answer(described: dict[str, Any], path: str, method: str, response: httpx.Response) -> None:
    """Check a response against the description of its operation."""
    operation = described["paths"][path][method]
    kind = response.headers["content-type"].partition(";")[0]
    schema = operation["responses"][str(response.status_code)]["content"][kind]["schema"]
    whole = {**schema, "components": described["components"]}
    checker = jsonschema.Draft202012Validator(whole)
    if kind == "text/event-stream":
        events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
        assert events
        for event in events:
            checker.validate(event)
    else:
        checker.validate(response.json() if kind == "application/json" else response.text)


@pytest.mark.parametrize("word", ["translate", "chat", "classify", "caption"])
def test_every_operation_answers_as_it_is_described(
    recipes: Callable[[str], Recipe], echo: EchoText, word: str
) -> None:
    recipe = recipes(word)
    networks: dict[str, Callable[[], Network]] = {
        "classify": BrightClassifier,
        "caption": lambda: DrawnCaptioner(recipe),
    }
    network = networks.get(word, lambda: echo)()
    said = [{"role": "user", "content": "good night"}]
    image = base64.b64encode(picture("red")).decode()
    bodies: dict[str, list[dict[str, Any]]] = {
        "/v1/predict": [{"inputs": [image if recipe.inputs == "images" else "hello"]}, {}],
        "/v1/chat/completions": [{"messages": said}, {"messages": said, "stream": True}, {"messages": 1}],
        "/v1/completions": [{"prompt": "hello"}, {"prompt": ["hello"], "stream": True}, {}],
    }
    if word == "chat":
        bodies["/v1/predict"].append({"turns": ["hello"]})
    with serving(recipe, network) as one, one.client() as client:
        described = client.get("/openapi.json").json()
        validate(described)
        tried = 0
        for path, operations in described["paths"].items():
            for method in operations.keys() - {"parameters"}:
                for body in bodies[path] if method == "post" else [None]:
                    where = path.replace("{model}", "greetings-1")
                    response = client.request(method, where, json=body) if body is not None else client.get(where)
                    assert response.status_code in (200, 400)
                    check_answer(described, path, method, response)
                    tried += 1
        check_answer(described, "/v1/models/{model}", "get", client.get("/v1/models/other"))
        assert tried >= (8 if recipe.inputs == "images" else 14)


def test_a_service_is_ready_only_when_its_model_is_loaded_and_warm(
    recipes: Callable[[str], Recipe], echo: EchoText
) -> None:
    echo.gate.clear()
    with running(served(recipes("translate"), echo), wait=False) as one, one.client() as client:
        wait_until(lambda: echo.batches, "it warms up")
        assert client.get("/healthz").json() == {"status": "ok"}
        readiness = client.get("/readyz")
        assert (readiness.status_code, readiness.json()) == (503, {"status": "loading"})
        refused = client.post("/v1/predict", json={"inputs": ["hello"]})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert error_of(refused) == "the model is being loaded; try again"
        assert client.get("/v1/models").json()["data"] == []
        assert error_of(client.get("/v1/models/greetings-1")) == "no model 'greetings-1'; it is not ready"
        with raw(one, "Content-Length: 2") as connection:
            connection.settimeout(0.3)
            with pytest.raises(TimeoutError):  # a connection that is closed too early takes the answer with it
                connection.recv(1)
            connection.settimeout(30)
            connection.sendall(b"{}")
            assert b"".join(iter(lambda: connection.recv(1000), b"")).endswith(b"}")
        echo.gate.set()
        wait_until(lambda: client.get("/readyz").status_code == 200, "it is ready")
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["greetings-1"]
        assert outputs(client.post("/v1/predict", json={"inputs": ["hello"]})) == ["hello"]


def test_a_model_that_cannot_be_loaded_ends_the_service(recipes: Callable[[str], Recipe]) -> None:
    def fail() -> Network:
        raise Mistake("its weights are damaged")

    model = ServedModel("greetings-1", recipes("translate"), fail, "echo", "fp32", 10, 0.0)
    with running(model) as one:
        wait_until(lambda: one.server.should_exit, "the server ends")
        assert str(one.server.service.failure) == "its weights are damaged"


def test_the_page_loads_nothing_from_elsewhere_and_allows_nothing_else(shared: httpx.Client) -> None:
    page = shared.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for path in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        assert path.startswith("/"), path
        assert shared.get(path).status_code == 200, path
    scripts = ("page.js", "attention.js", "dom.js", "fetch.js", "format.js")
    texts = [page.text, *(shared.get(f"/{name}").text for name in (*scripts, "base.css", "style.css"))]
    text = "".join(texts).replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?://|//cdn|innerHTML|insertAdjacentHTML|document\.write", text)
    assert set(re.findall(r'from "./([^"]+)"', text)) < set(scripts)
    assert " style=" not in page.text, "the policy forbids it"
    assert "<script>" not in page.text


@contextmanager
def opened(browser: Browser, service: RunningService, bears: str = "no error") -> Iterator[Page]:
    """Open the page of a service; it may write no error but those that the test is about, and ask nobody else."""
    faults: list[str] = []
    context = browser.new_context()
    page = context.new_page()
    page.on("request", lambda request: faults.append(request.url) if service.url not in request.url else None)

    def said(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and bears not in message.text:
            faults.append(message.text)

    page.on("console", said)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(service.url)
    yield page
    context.close()
    assert faults == []


@pytest.fixture(scope="module")
def browser(needs_chromium: None) -> Iterator[Browser]:
    with browser_at(CHROMIUM) as browser:
        yield browser


def test_the_page_translates_each_line_by_itself_once_the_token_is_given(
    browser: Browser, recipes: Callable[[str], Recipe], echo: EchoText
) -> None:
    with serving(recipes("translate"), echo, TOKEN) as one, opened(browser, one, bears="401") as page:
        page.get_by_label("Token").fill("wrong")
        page.get_by_role("button", name="Continue").click()
        expect(page.get_by_role("alert")).to_have_text("That token is not accepted.")
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Continue").click()
        expect(page.locator("#facts")).to_have_text("translate · echo fp32 · step 10")
        page.get_by_label("Source").fill("good morning\n\nhello")
        page.get_by_text("Options").click()
        page.get_by_label("Outputs to show").fill("2")
        page.get_by_role("button", name="Translate").click()
        expect(page.locator("#output .text")).to_have_text("good morning\n\nhello")
        expect(page.locator("#output .others li").first).to_have_text("good morning-0.500")
        expect(page.locator("#took")).to_have_text(re.compile(r"^\d[\d.]* m?s$"))


def test_the_page_talks_and_gives_a_refused_message_back(
    browser: Browser, recipes: Callable[[str], Recipe], echo: EchoText
) -> None:
    with serving(recipes("chat"), echo) as one, opened(browser, one, bears="500") as page:
        page.get_by_label("Message").fill("hello")
        page.keyboard.press("Enter")
        expect(page.locator(".turn.model")).to_have_text(re.compile("hello"))
        echo.defect = RuntimeError("a secret")
        page.get_by_label("Message").fill("good night")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("a defect of the service; its log says where")
        expect(page.get_by_label("Message")).to_have_value("good night")


@pytest.mark.parametrize("word", ["classify", "caption"])
def test_the_page_shows_what_a_picture_is(browser: Browser, recipes: Callable[[str], Recipe], word: str) -> None:
    recipe = recipes(word)
    network = BrightClassifier() if word == "classify" else DrawnCaptioner(recipe)
    with serving(recipe, network) as one, opened(browser, one) as page:
        page.locator("#file").set_input_files({"name": "dark.png", "mimeType": "image/png", "buffer": picture("black")})
        if word == "classify":
            expect(page.locator(".bars li").first).to_have_text(re.compile(r"cat\s*100%"))
            expect(page.locator(".bars li").last).to_contain_text("< 1%")
        else:
            expect(page.locator("#output .text")).to_have_text("a red square")
            page.get_by_role("button", name="red").hover()
            expect(page.locator("#stage")).to_have_class(re.compile("looking"))


# The end of the process.

PROGRAM = """
import socket, sys
from pathlib import Path
from packtrain.data.pack import Pack
from packtrain.export.serve import serve
from packtrain.export.service import ServedModel, ServiceSettings
from packtrain.recipes import recipe_class
from packtrain.recipes.pairs import TextNetwork
from packtrain.recipes.recipe import Hypothesis
from packtrain.run.run import open_run
from packtrain.store import open_store

class Slow(TextNetwork):
    search_tokens = 1000
    is_warm = False

    def search(self, source, limits, decoding, numbers):
        if self.is_warm:
            print("computing", flush=True)
            sys.stdin.readline()
        self.is_warm = True
        return [[Hypothesis([token for token in row if token > 3], 0.0)] for row in source.tolist()]

    def losses(self, source, target):
        return source

run = open_run(open_store(sys.argv[1]), None)
recipe = recipe_class(run.job.recipe)(run.job, Pack(run.store, run.pack_name(), Path(sys.argv[2])))
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
model = ServedModel("greetings-1", recipe, Slow, "slow", "fp32", 10, 0.0)
serve(model, ServiceSettings(), listener, None, lambda line: print(line, flush=True))
print("ended", flush=True)
"""


@contextmanager
def slow_service(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a service that computes until it gets a line on its standard input."""
    packed_run(tmp_path, job_of(tmp_path))
    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), str(tmp_path / "cache")]
    process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert process.stdout
    try:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        assert process.stdout.readline() == "ready: greetings-1\n"
        yield process, url
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish_and_then_the_process_exits_0(
    tmp_path: Path, number: signal.Signals
) -> None:
    with slow_service(tmp_path) as (process, url):
        assert process.stdin and process.stdout
        with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=url, timeout=30) as client:
            running_request = pool.submit(ask_many, url, ["hello"])
            assert process.stdout.readline() == "computing\n"
            process.send_signal(number)
            wait_until(lambda: client.get("/readyz").json() == {"status": "draining"}, "readiness is gone")
            assert client.get("/healthz").status_code == 200
            refused = client.post("/v1/predict", json={"inputs": ["late"]})
            assert (refused.status_code, error_of(refused)) == (503, "the service is ending; try again")
            process.stdin.write("\n")
            process.stdin.flush()
            assert [outputs(one) for one in running_request.result(30)] == [["hello"]]
        rest = process.stdout.read()
        assert process.wait(30) == 0
        assert rest.endswith("ended\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_process_at_once_while_it_computes(
    tmp_path: Path, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with slow_service(tmp_path) as (process, url), ThreadPoolExecutor(1) as pool:
        assert process.stdout
        running_request = pool.submit(httpx.post, f"{url}/v1/predict", json={"inputs": ["hello"]}, timeout=30)
        assert process.stdout.readline() == "computing\n"
        process.send_signal(number)
        with httpx.Client(base_url=url, timeout=30) as client:
            wait_until(lambda: client.get("/readyz").json() == {"status": "draining"}, "it has seen the first signal")
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        refused = running_request.result(30)
        assert (refused.status_code, error_of(refused)) == (503, "the service is ending; try again")
    assert capfd.readouterr().err == ""


def long_running_service(tmp_path: Path) -> tuple[subprocess.Popen[str], str]:
    """Start a service whose batches take seconds, all of it in CTranslate2: an untrained model never ends a text."""
    run = packed_run(tmp_path, job_of(tmp_path, model={"size": "small"}))
    commit_model(run, tmp_path, 10)
    export_run(run, tmp_path / "model", ExportOptions("last"), lambda _: None)
    sizes = ["--batch", "20", "--queue", "100000", "--threads", "1"]
    arguments = ["serve", str(tmp_path / "model"), "--port", "0", *sizes]
    program = [sys.executable, "-m", "packtrain", *arguments]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout
    return process, process.stdout.readline().split()[3]


def test_a_service_that_still_computes_for_clients_that_left_does_not_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    process, url = long_running_service(tmp_path)
    try:
        with httpx.Client(base_url=url, timeout=30) as client:
            wait_until(lambda: client.get("/readyz").status_code == 200, "it is ready")
            body = json.dumps({"inputs": ["good morning everybody " * 80] * 12, "beam": 6}).encode()
            head = f"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            message = f"{head}Content-Type: application/json\r\n\r\n".encode() + body
            clients = [socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) for _ in range(64)]
            for connection in clients:
                connection.sendall(message)
            waiting = re.compile(r"^packtrain_queue_inputs [1-9]\d\d", re.MULTILINE)
            wait_until(lambda: waiting.search(client.get("/metrics").text), "it computes")
            for connection in clients:
                connection.close()
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


# The command.


def test_the_command_refuses_what_would_be_open_to_all_or_cannot_be_served(tmp_path: Path) -> None:
    short, missing = tmp_path / "token", tmp_path / "none"
    short.write_text("short\n")
    short.chmod(0o600)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"host": "0.0.0.0"}, "--host 0.0.0.0: other machines may reach this address; set $PACKTRAIN_SERVE_TOKEN"),
        ({"host": "no.such.host.invalid"}, "other machines may reach this address"),
        ({"token_file": short}, "a token must have 16 or more ASCII characters without spaces"),
        ({"token_file": missing}, "cannot read: No such file or directory"),
        ({"timeout": "soon"}, "--timeout: 'soon' is not a number with a unit"),
        ({"max_bytes": "20"}, "--max-bytes: '20' is not a number with a unit"),
        ({}, "not an exported model; there is no model.json"),
    ]
    for options, fault in cases:
        with pytest.raises(PacktrainError, match=re.escape(fault)):
            serve_command(tmp_path, **options)


WITHOUT_TORCH = 'import sys; sys.modules["torch"] = None; from packtrain.cli import main; main()'


@pytest.mark.usefixtures("processes")
def test_an_exported_model_is_served_without_torch_until_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PACKTRAIN_SERVE_TOKEN", TOKEN)
    run = packed_run(tmp_path, job_of(tmp_path))
    commit_model(run, tmp_path, 10)
    exported = export_run(run, tmp_path / "model", ExportOptions("last"), lambda _: None)
    texts = ["good morning", "how are you today"]
    expected = exported.recipe.predict(exported.network(1), texts, exported.recipe.decoding)
    arguments = ["serve", str(tmp_path / "model"), "--port", "0", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout
        line = process.stdout.readline()
        assert line.startswith("greetings-1 (ctranslate2 fp32): http://127.0.0.1:")
        url = line.split()[3]
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30) as client:
            wait_until(lambda: client.get("/readyz").status_code == 200, "it is ready")
            assert outputs(client.post("/v1/predict", json={"inputs": texts})) == [one.text for one in expected]
            sampled = client.post("/v1/completions", json={"prompt": "hello", "temperature": 1})
            assert sampled.status_code == 400
            assert "a ctranslate2 model does not sample" in error_of(sampled)
        process.terminate()
        _, log = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "ready: greetings-1" in log
        assert "Traceback" not in log
        assert TOKEN not in log
    finally:
        process.kill()
        process.wait()


def test_a_port_in_use_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    run = packed_run(tmp_path, job_of(tmp_path))
    commit_model(run, tmp_path, 10)
    export_run(run, tmp_path / "model", ExportOptions("last"), lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Mistake, match=rf"^cannot listen on '127.0.0.1', port {port}: Address already in use$"):
            serve_command(tmp_path / "model", port=port)
