"""A hub on this machine that serves one model over HTTP, as far as a snapshot is fetched from it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

REVISION = 40 * "a"


@contextmanager
def served(folder: Path, cache: Path) -> Iterator[str]:
    """Serve the files of a folder as a model on the hub, with an empty cache, and yield the id of the model."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    entries = [
        {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        for name, data in files.items()
    ]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            name = path.partition(f"/resolve/{REVISION}/")[2]
            if name:
                self.reply(files.get(name))
            elif "/tree/" in path:
                self.reply(json.dumps(entries).encode())
            else:
                siblings = [{"rfilename": name} for name in files]
                self.reply(json.dumps({"id": "owner/model", "sha": REVISION, "siblings": siblings}).encode())

        do_HEAD = do_GET  # noqa: N815

        def reply(self, data: bytes | None) -> None:
            """Send the contents of a file, or that there is none."""
            self.send_response(404 if data is None else 200)
            self.send_header("Content-Length", str(len(data or b"")))
            self.send_header("X-Repo-Commit", REVISION)
            self.send_header("ETag", hashlib.sha1(data or b"").hexdigest())
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data or b"")

        def log_message(self, *words: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        address = f"http://127.0.0.1:{server.server_port}"
        patch.setattr(constants, "ENDPOINT", address)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield "owner/model"
    server.shutdown()
