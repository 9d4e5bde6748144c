"""Remote data: on an HTTP server, in a bucket, in the job's own store."""

from __future__ import annotations

import gzip
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pack.pictures import photo
from pack.rawsets import tar
from packtrain.launch.check import pack_data
from packtrain.launch.load import load
from packtrain.pack.build import PlainProgress
from packtrain.pack.manifest import Manifest
from packtrain.pack.workers import InProcess
from packtrain.store import open_store

PAIRS = "".join(f"number {number}\tZahl {number}\n" for number in range(40))

pytestmark = pytest.mark.usefixtures("processes")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("file", "member"), [("pairs.tsv", ""), ("training.tgz", "#training/pairs.tsv")])
def test_a_pack_is_the_same_wherever_its_data_is(
    tmp_path: Path, s3_location: str, monkeypatch: pytest.MonkeyPatch, file: str, member: str
) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    data = gzip.compress(tar([("training/pairs.tsv", PAIRS.encode())])) if member else PAIRS.encode()
    (tmp_path / file).write_bytes(data)
    open_store(s3_location).put(f"raw/{file}", data)
    open_store(str(tmp_path / "store"), create=True).put(f"raw/{file}", data)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    places = [
        f"{file}{member}",
        f"http://127.0.0.1:{server.server_port}/{file}{member}",
        f"{s3_location}/raw/{file}{member}",
        f"store:raw/{file}{member}",
    ]
    names = []
    try:
        for place in places:
            (tmp_path / "job.yaml").write_text(
                f"name: numbers\nstore: {tmp_path / 'store'}\n"
                f"data: {{train: [{{bitext: '{place}'}}], vocabulary: 300}}\n"
            )
            loaded = load(tmp_path / "job.yaml")
            manifest = pack_data(
                loaded, open_store(loaded.job.store, create=True), PlainProgress(lambda _: None), InProcess()
            )
            assert manifest is not None
            assert manifest.splits["train"].samples == 40
            names.append(manifest.name)
    finally:
        server.shutdown()
        server.server_close()
    assert len(set(names)) == 1


def test_json_lines_on_a_server_are_packed_with_their_images_and_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    web = tmp_path / "web" / "set"
    (web / "images").mkdir(parents=True)
    for number in range(4):
        photo(40, 30, number).save(web / "images" / f"{number}.jpg")
    lines = (f'{{"image": "images/{number}.jpg", "label": "{number % 2}"}}\n' for number in range(4))
    (web / "samples.jsonl").write_text("".join(lines))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "web")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "job.yaml").write_text(
        f"name: numbers\nstore: {tmp_path / 'store'}\n"
        f"data: {{train: [{{folder: 'http://127.0.0.1:{server.server_port}/set/samples.jsonl'}}]}}\n"
    )

    def packed() -> Manifest:
        loaded = load(tmp_path / "job.yaml")
        store = open_store(loaded.job.store, create=True)
        manifest = pack_data(loaded, store, PlainProgress(lambda _: None), InProcess())
        assert manifest is not None
        return manifest

    try:
        first, again = packed(), packed()
        photo(50, 30, 9).save(web / "images" / "2.jpg")
        changed = packed()
    finally:
        server.shutdown()
        server.server_close()
    assert first.splits["train"].samples == 4
    assert again == first
    assert changed.name != first.name
    assert changed.splits["train"].shards[0].sha256 != first.splits["train"].shards[0].sha256
