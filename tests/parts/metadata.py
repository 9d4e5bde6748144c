"""EC2's metadata service (IMDSv2) for one machine: `python metadata.py DIRECTORY` serves its files inside the machine.

A file `spot/instance-action` is at /latest/meta-data/spot/instance-action, as soon as it is there. Imports nothing of
the tests: it runs on a host.
"""

from __future__ import annotations

import sys
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ADDRESS = "169.254.169.254"
TOKEN = uuid.uuid4().hex


def metadata_server(root: Path, address: str, port: int) -> ThreadingHTTPServer:
    class Service(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            wanted = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            self._answer(200 if wanted.isdigit() and self.path == "/latest/api/token" else 400, TOKEN.encode())

        def do_GET(self) -> None:
            path = (root / self.path.removeprefix("/latest/meta-data/")).resolve()
            if self.headers.get("X-aws-ec2-metadata-token") != TOKEN:
                self._answer(401, b"")
            elif path.is_dir():
                self._answer(200, "\n".join(sorted(file.name for file in path.iterdir())).encode())
            elif path.is_file():
                self._answer(200, path.read_bytes())
            else:
                self._answer(404, b"")

        def _answer(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return ThreadingHTTPServer((address, port), Service)


if __name__ == "__main__":
    metadata_server(Path(sys.argv[1]), ADDRESS, 80).serve_forever()
