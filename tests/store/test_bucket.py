"""Stores in a bucket: keys and endpoints, and a server that fails in every way."""

from __future__ import annotations

import itertools
import json
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from packtrain.backoff import SLOW_ANSWERS, Backoff
from packtrain.errors import EXIT_MISTAKE, Mistake
from packtrain.run.run import Run
from packtrain.store import Store, StoreError, open_store
from packtrain.store.aws_keys import AwsKeys
from packtrain.store.uploads import UploadClient
from parts.loopback import free_port
from parts.proxy import BUSY, CUT, DROP, HANG, LOSE_ANSWER, PASS, REFUSE, Proxy
from parts.s3 import BUCKET, S3Server, fresh_location
from parts.stores import MEGABYTE, keys, noise, output_of, python


def patient(location: str, *, outage_seconds: float = 60.0, answer_seconds: float = 1.0) -> Store:
    return open_store(location, outage_seconds=outage_seconds, answer_seconds=answer_seconds)


@pytest.mark.parametrize("endpoint", ["http://u:canary@127.0.0.1", "127.0.0.1:9000", "ftp://host", "http://h:x"])
@pytest.mark.usefixtures("s3_environment")
def test_an_invalid_endpoint_is_refused_without_repeating_it(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    with pytest.raises(Mistake, match="AWS_ENDPOINT_URL_S3: invalid URL") as caught:
        open_store("s3://bucket")
    assert "canary" not in str(caught.value)


def test_the_endpoint_for_s3_overrides_the_general_one(
    s3_location: str, s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_environment.endpoint)
    open_store(s3_location).put("a", b"1")
    assert open_store(s3_location).get("a") == b"1"


@pytest.mark.usefixtures("no_aws")
def test_missing_keys_are_reported_after_one_short_look_at_the_metadata_service(
    metadata_looks: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Mistake, match=r"no keys for the store; set AWS_PROFILE, or AWS_ACCESS.* --profile NAME"):
        open_store("s3://bucket")
    assert metadata_looks == []
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(Mistake, match="no keys for the store"):
        open_store("s3://bucket")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(Mistake, match="no keys for the store"):
        open_store("s3://bucket")
    assert metadata_looks == [1.0, 1.0]


@pytest.mark.usefixtures("no_aws")
def test_a_machine_with_a_role_needs_no_keys(moto_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", moto_server.endpoint)
    assert open_store("s3://bucket").url == "s3://bucket"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # named: it holds for another server, too
    assert open_store("s3://bucket").url == "s3://bucket"


@pytest.mark.usefixtures("no_aws")
def test_an_access_key_without_its_secret_is_refused_and_vice_versa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    with pytest.raises(Mistake, match="also set AWS_ACCESS_KEY_ID") as caught:
        open_store("s3://bucket")
    assert "canary" not in str(caught.value)


@pytest.fixture
def no_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "none"))


def test_a_server_without_tls_needs_no_ca_certificates(s3_location: str, no_certificates: None, tmp_path: Path) -> None:
    store = open_store(s3_location)
    assert store.put_if_absent("a", b"small")
    (tmp_path / "large").write_bytes(bytes(9 << 20))
    store.put_file("b", tmp_path / "large")
    store.get_file("b", tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_size == 9 << 20
    store.remove_unfinished("")
    assert [entry.key for entry in store.list()] == ["a", "b"]


@pytest.mark.parametrize(
    "setting",
    [
        {"AWS_ENDPOINT_URL": "https://127.0.0.1:9"},
        # The keys come from another server, over TLS.
        {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_WEB_IDENTITY_TOKEN_FILE": "/token"},
    ],
)
def test_a_machine_without_ca_certificates_is_told_what_to_install(
    setting: dict[str, str], s3_location: str, no_certificates: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Mistake, match="this machine has no CA certificates; install the package ca-certificates"):
        open_store(s3_location)


def test_a_node_works_without_ca_certificates_if_its_store_has_no_tls(
    processes: None, s3_location: str, no_certificates: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train.py").write_text("print('worked')\n")
    (tmp_path / "job.yaml").write_text(f"{{name: job, program: [train.py], store: '{s3_location}'}}")
    command = [sys.executable, "-m", "packtrain", "run", "job.yaml", "--foreground"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    result = Run(open_store(s3_location), "job-1").result()
    assert result is not None
    assert result.status == "finished"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://127.0.0.1:9")
    command = [sys.executable, "-m", "packtrain", "node", "job-1", "--store", s3_location]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (EXIT_MISTAKE, "")
    assert re.fullmatch("packtrain: .*has no CA certificates; install .*\n", done.stderr)


@pytest.mark.parametrize(
    "server",
    [
        pytest.param("moto_server", marks=pytest.mark.local),
        pytest.param("ceph_server", marks=pytest.mark.system),
    ],
)
def test_unfinished_uploads_of_dead_writers_are_aborted_and_no_others(
    server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3: S3Server = request.getfixturevalue(server)
    s3.enter(monkeypatch)
    location = fresh_location()
    store = open_store(location)
    for key in ("runs/a-1/1/x", "runs/a-1/2/y z&<ü>+%20", "runs/a-10/1/x", "packs/p/x"):
        s3.begin_upload(location, key)
    store.put("runs/a-1/1/done", b"1")
    store.remove_unfinished("runs/a-1", lambda key: key.startswith("runs/a-1/2/"))
    assert s3.uploads(location) == ["packs/p/x", "runs/a-1/1/x", "runs/a-10/1/x"]
    store.remove_unfinished("runs/a-1/")
    assert s3.uploads(location) == ["packs/p/x", "runs/a-10/1/x"]
    store.remove_unfinished("")
    assert s3.uploads(location) == []
    assert keys(store) == ["runs/a-1/1/done"]


def test_unfinished_uploads_are_listed_page_by_page(ceph_server: S3Server) -> None:
    location = fresh_location()
    for number in range(5):
        ceph_server.begin_upload(location, f"many/{number}")
    keys = AwsKeys(ceph_server.access_key, ceph_server.secret_key)
    client = UploadClient(f"{ceph_server.endpoint}/{BUCKET}", "us-east-1", lambda: keys, 10.0, uploads_per_page=2)
    prefix = location.removeprefix(f"s3://{BUCKET}/")
    assert [upload.key for upload in client.list(prefix)] == [f"{prefix}/many/{number}" for number in range(5)]


def test_wrong_keys_and_failures_are_told_when_uploads_are_aborted(
    s3_proxy: Proxy, s3_location: str, ceph_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_proxy.first(BUSY)
    patient(s3_location).remove_unfinished("")
    s3_proxy.fault = lambda *_: REFUSE
    with pytest.raises(StoreError, match="try again later") as caught:
        patient(s3_location, outage_seconds=0.2).remove_unfinished("")
    assert caught.value.temporary
    ceph_server.enter(monkeypatch)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    with pytest.raises(StoreError, match="wrong secret key") as caught:
        open_store(s3_location).remove_unfinished("")
    assert "canary" not in str(caught.value)


def test_an_upload_that_is_taken_for_dead_starts_over(
    s3_environment: S3Server, s3_location: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(noise(80 * MEGABYTE))
    store = open_store(s3_location)
    uploading = threading.Thread(target=store.put_file, args=("big", source))
    uploading.start()
    while not s3_environment.uploads(s3_location):
        assert uploading.is_alive()
    store.remove_unfinished("")
    uploading.join()
    store.get_file("big", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == source.read_bytes()
    assert s3_environment.uploads(s3_location) == []


@pytest.mark.parametrize(
    "server",
    [
        pytest.param("moto_server", marks=pytest.mark.local),
        pytest.param("ceph_server", marks=pytest.mark.system),
    ],
)
def test_the_lifecycle_rule_in_the_docs_is_accepted(server: str, request: pytest.FixtureRequest) -> None:
    s3: S3Server = request.getfixturevalue(server)
    page = (Path(__file__).parents[2] / "docs/fleets.md").read_text()
    rule = json.loads(page.partition("```json\n")[2].partition("```")[0])
    s3.client().put_bucket_lifecycle_configuration(Bucket=BUCKET, LifecycleConfiguration=rule)
    [kept] = s3.client().get_bucket_lifecycle_configuration(Bucket=BUCKET)["Rules"]
    assert kept["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 3}


@pytest.mark.parametrize("fault", [REFUSE, BUSY, LOSE_ANSWER, DROP, HANG, CUT])
def test_every_call_survives_one_failure(fault: str, s3_proxy: Proxy, s3_location: str, tmp_path: Path) -> None:
    store = patient(s3_location)
    s3_proxy.hang_seconds = 0.6

    def after_fault(action: Callable[[], object]) -> object:
        s3_proxy.first(fault)
        return action()

    after_fault(lambda: store.put("a/b", b"data"))
    assert after_fault(lambda: store.get("a/b")) == b"data"
    assert after_fault(lambda: store.exists("a/b")) is True
    assert after_fault(lambda: keys(store)) == ["a/b"]
    assert after_fault(lambda: store.folders("")) == ["a"]
    assert after_fault(lambda: store.put_if_absent("new", b"1")) is True
    assert after_fault(lambda: store.put_if_absent("new", b"1")) is False
    after_fault(lambda: store.get_file("a/b", tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == b"data"
    after_fault(lambda: store.delete("a/b"))
    assert keys(store) == ["new"]


@pytest.mark.parametrize("fault", [REFUSE, LOSE_ANSWER, DROP, CUT])
@pytest.mark.parametrize("request_of_upload", ["uploads=", "partNumber=2", "uploadId="])
def test_an_upload_in_parts_survives_a_failure_of_any_of_its_requests(
    fault: str, request_of_upload: str, s3_proxy: Proxy, s3_location: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(noise(9 * MEGABYTE))
    left = [fault]

    def once(method: str, path: str) -> str:
        query = path.partition("?")[2]
        hit = query.startswith(request_of_upload) and (method == "POST" or "partNumber" in query)
        return left.pop() if hit and left else PASS

    s3_proxy.fault = once
    store = patient(s3_location, answer_seconds=5)
    store.put_file("big", source)
    assert left == []
    assert store.get("big") == source.read_bytes()


def test_every_call_succeeds_though_a_fifth_of_all_requests_fail(s3_proxy: Proxy, s3_location: str) -> None:
    dice = random.Random(3)  # noqa: S311
    faults = [REFUSE, BUSY, LOSE_ANSWER, DROP, CUT]
    s3_proxy.fault = lambda *_: dice.choice(faults) if dice.random() < 0.2 else PASS
    store = patient(s3_location)
    for number in range(12):
        key = f"{number:03d}"
        assert store.put_if_absent(key, key.encode())
        assert not store.put_if_absent(key, b"other")
        assert store.get(key) == key.encode()
    assert keys(store) == [f"{number:03d}" for number in range(12)]
    assert sum(fault != PASS for _, _, fault in s3_proxy.requests) > 5


def test_a_large_file_is_transferred_though_every_third_request_fails(
    s3_proxy: Proxy, s3_location: str, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(noise(40 * MEGABYTE))
    count = itertools.count(1)
    s3_proxy.fault = lambda *_: REFUSE if next(count) % 3 == 0 else PASS
    store = patient(s3_location)
    store.put_file("big", source)
    store.get_file("big", target)
    assert target.read_bytes() == source.read_bytes()


def test_put_if_absent_recognizes_its_own_object_after_a_lost_answer(s3_proxy: Proxy, s3_location: str) -> None:
    store, other = patient(s3_location), patient(s3_location)
    s3_proxy.first(LOSE_ANSWER, DROP, LOSE_ANSWER)
    assert store.put_if_absent("generation", b"same bytes")
    assert not other.put_if_absent("generation", b"same bytes")


def test_put_if_absent_does_not_claim_the_same_bytes_of_another_writer(
    s3_proxy: Proxy, s3_location: str, s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = patient(s3_location)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_environment.endpoint)
    other = patient(s3_location)

    def overtaken(method: str, path: str) -> str:
        s3_proxy.first()
        assert other.put_if_absent("generation", b"same bytes")
        return REFUSE

    s3_proxy.fault = overtaken
    assert not store.put_if_absent("generation", b"same bytes")


@pytest.mark.parametrize("fault", [REFUSE, BUSY, DROP, HANG])
def test_an_outage_ends_in_a_temporary_error_in_time(
    fault: str, s3_proxy: Proxy, s3_location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which only the pauses between two tries take time."""
    pauses: list[float] = []
    timing: dict[str, Any] = {"clock": lambda: sum(pauses), "sleep": pauses.append, "random": lambda: 0.0}
    monkeypatch.setattr("packtrain.store.bucket.Backoff", partial(Backoff, **timing))
    s3_proxy.fault = lambda *_: fault
    s3_proxy.hang_seconds = 60
    store = patient(s3_location, outage_seconds=0.5, answer_seconds=0.2)
    for use in (
        lambda: store.put("a", b""),
        lambda: store.put_if_absent("a", b""),
        lambda: store.get("a"),
    ):
        pauses.clear()
        with pytest.raises(StoreError, match="try again later") as caught:
            use()
        assert caught.value.temporary
        assert pauses == pytest.approx([0.1, 0.2, 0.2])


def test_ctrl_c_interrupts_the_wait_for_a_failing_server(s3_proxy: Proxy, s3_location: str) -> None:
    s3_proxy.fault = lambda *_: REFUSE
    code = "import sys; from packtrain.store import open_store; open_store(sys.argv[1], outage_seconds=1e6).get('a')"
    waiting = python(code, s3_location)
    try:
        while not s3_proxy.requests:
            assert waiting.poll() is None
        waiting.send_signal(signal.SIGINT)
        _, errors = waiting.communicate(timeout=120)
    finally:
        waiting.kill()
    assert "KeyboardInterrupt" in errors


@pytest.mark.parametrize("fault", [REFUSE, HANG])
def test_a_person_is_told_once_that_the_server_does_not_answer_and_when_it_does(
    fault: str, s3_proxy: Proxy, s3_location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("packtrain.backoff._SLOW_SECONDS", 0.1)
    monkeypatch.setattr(SLOW_ANSWERS, "tell", told.append)
    store = patient(s3_location, outage_seconds=20, answer_seconds=1)
    s3_proxy.hang_seconds = 1.5
    s3_proxy.fault = lambda *_: PASS if told else fault
    store.put("a", b"1")
    assert told == [f"{store.url} does not answer; trying again for up to 20 s", f"{store.url} answers again"]
    monkeypatch.setattr("packtrain.backoff._SLOW_SECONDS", 600)
    assert store.get("a") == b"1"
    assert len(told) == 2


def test_a_client_tells_and_a_node_does_not(s3_proxy: Proxy, s3_location: str) -> None:
    """A line for a person, who may wait for a minute; hundreds of nodes only keep trying."""
    s3_proxy.fault = lambda *_: REFUSE
    code = (
        "import sys, packtrain.backoff as b; b._SLOW_SECONDS = 0.1; from packtrain.cli import main;"
        "sys.argv = ['packtrain', *sys.argv[1:]]; main()"
    )
    client = python(code, "ls", "--store", s3_location)
    node = python(code, "node", "run-1", "--store", s3_location)
    assert client.stderr is not None
    line = client.stderr.readline()
    client.kill()
    client.communicate()
    assert line == f"packtrain: {s3_location} does not answer; trying again for up to 60 s\n"
    while len(s3_proxy.requests) < 8:
        assert node.poll() is None
    node.kill()
    assert "does not answer; trying" not in node.communicate()[1]


def test_the_error_says_that_the_server_cannot_be_reached(s3_location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(StoreError, match="cannot connect to the server; check AWS_ENDPOINT_URL") as caught:
        patient(s3_location, outage_seconds=0.3).get("a")
    assert caught.value.temporary


def test_a_server_that_ignores_put_if_absent_is_detected(
    rclone_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    rclone_server.enter(monkeypatch)
    store = open_store(fresh_location())
    assert not store.supports_put_if_absent()
    assert keys(store) == []
    store.put("a", b"1")
    assert store.get("a") == b"1"


def test_transfers_of_large_files_use_little_memory(s3_location: str, tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from packtrain.store import open_store
def peak(): return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024
source, target = Path(sys.argv[2]), Path(sys.argv[3])
for location in sys.argv[1].split(","):
    store = open_store(location, create=True)
    store.put("small", b"1"), store.get("small")
    before = peak()
    store.put_file("big", source)
    store.get_file("big", target)
    print(peak() - before)
"""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(noise(MEGABYTE) * 80)
    output = output_of(python(code, f"{tmp_path}/store,{s3_location}", source, target))
    megabytes = [int(line) for line in output.splitlines()]
    assert target.read_bytes() == source.read_bytes()
    assert max(megabytes) < 64, megabytes


def test_a_forked_process_gets_an_error_instead_of_hanging(s3_location: str) -> None:
    code = """
import os, sys
from packtrain.store import StoreError, open_store
store = open_store(sys.argv[1])
store.put("a", b"1")
if os.fork() == 0:
    try:
        store.get("a")
    except StoreError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""
    assert "start workers with spawn or forkserver" in output_of(python(code, s3_location))
