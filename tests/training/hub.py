"""A hub of our own, for tests of what is downloaded, and a process that has seen no other."""

import contextlib
import hashlib
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves the files of a folder as the hub does; `broken` serves the first byte and nothing more."""

    folder: Path
    broken = False

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.folder / self.path.split("/resolve/main/")[-1].split("?")[0]
        first_byte = self.headers.get("Range") == "bytes=0-0"
        if not path.is_file() or (self.broken and not first_byte):
            self.send_response(404 if not path.is_file() else 403)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serve_hub(folder: Path, **attributes) -> Iterator[str]:
    """Serve `folder` as the hub does until the block ends; gives the address. `attributes`: of the handler, `Hub`."""
    handler = type("OurHub", (Hub,), {"folder": folder, **attributes})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def in_a_fresh_process(code: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "SCRATCH_DDP"))}
    clean |= {"HF_HOME": str(tmp_path / "cache"), "no_proxy": "127.0.0.1", **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean, timeout=120)
