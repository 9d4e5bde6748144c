"""Remote data: on an HTTP server, in a bucket, in the job's own store."""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from packtrain.pack.build import PlainProgress
from packtrain.pack.workers import InProcess
from packtrain.start import load, pack_data
from packtrain.store import open_store

PAIRS = "".join(f"number {number}\tZahl {number}\n" for number in range(40))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_a_pack_is_the_same_wherever_its_data_is(
    tmp_path: Path, s3_location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "pairs.tsv").write_text(PAIRS)
    open_store(s3_location).put("raw/pairs.tsv", PAIRS.encode())
    open_store(str(tmp_path / "store"), create=True).put("raw/pairs.tsv", PAIRS.encode())
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    places = [
        "pairs.tsv",
        f"http://127.0.0.1:{server.server_port}/pairs.tsv",
        f"{s3_location}/raw/pairs.tsv",
        "store:raw/pairs.tsv",
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
            names.append(manifest.name)
    finally:
        server.shutdown()
        server.server_close()
    assert len(set(names)) == 1
