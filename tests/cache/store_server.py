# SPDX-License-Identifier: Apache-2.0
"""An S3 server in a process of its own (moto), behind a layer that makes faults on the way.

`python -m tests.cache.store_server` prints its port. `POST /_faults` takes a list of rules and forgets earlier ones;
`GET /_faults` gives the requests since then. A rule strikes requests whose method, path and Range header match its
regular expressions, after `skip` of them, `times` times. Requests that change something are served one by one: moto
checks a condition and acts on it in two steps, a real store in one.
"""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BUCKET = "bucket"


class Faults:
    """WSGI application around another."""

    def __init__(self, inner):
        self.inner, self.rules, self.log = inner, [], []
        self.lock, self.changes = threading.Lock(), threading.Lock()

    def __call__(self, environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if path == "/_faults":
            return self.control(environ, start_response)
        given = environ.get("HTTP_RANGE", "")
        rule = self.strike(method, path, given)
        action = rule.get("action")
        if action == "delay":
            time.sleep(rule["seconds"])
        if action == "kill":
            os.kill(rule["pid"], signal.SIGKILL)
        if action == "ignore condition":
            environ.pop("HTTP_IF_MATCH", None), environ.pop("HTTP_IF_NONE_MATCH", None)
        status, headers, body = (
            (f"{rule['status']} Fault", [], b"") if action == "status" else self.serve(method, environ)
        )
        with self.lock:
            self.log.append([method, path, given, int(status.split()[0])])
        if action == "lose answer":
            status, headers, body = "503 Fault", [], b""
        if action == "flip" and body:
            body = bytearray(body)
            body[len(body) * 2 // 3] ^= 16
        if action == "shift" and body:
            body = body[1:] + body[:1]
        if method != "HEAD":  # whose length is that of the object
            headers = [header for header in headers if header[0].lower() != "content-length"]
            headers.append(("Content-Length", str(len(body))))
        start_response(status, headers)
        return [bytes(body[: len(body) // 2] if action == "short" else body)]

    def serve(self, method, environ):
        answer: list[Any] = []

        def start(status, headers, exc_info=None):
            answer.extend((status, headers))

        if method in ("PUT", "POST", "DELETE"):
            with self.changes:
                body = b"".join(self.inner(environ, start))
        else:
            body = b"".join(self.inner(environ, start))
        return *answer, body

    def strike(self, method: str, path: str, given: str) -> dict[str, Any]:
        with self.lock:
            for rule in self.rules:
                if not (
                    re.fullmatch(rule.get("method", ".*"), method)
                    and re.search(rule.get("path", ""), path)
                    and re.search(rule.get("range", ""), given)
                ):
                    continue
                rule["skip"] = rule.get("skip", 0) - 1
                if rule["skip"] < 0 and rule.get("times", 1 << 30) > 0:
                    rule["times"] = rule.get("times", 1 << 30) - 1
                    return rule
        return {}

    def control(self, environ, start_response):
        with self.lock:
            if environ["REQUEST_METHOD"] == "POST":
                self.rules = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
                self.log = []
            body = json.dumps(self.log).encode()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]


class Server:
    """What a test says to the server, and what it does past megatron_kd's back."""

    def __init__(self, port: int):
        import boto3

        self.url = f"http://127.0.0.1:{port}"
        keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
        self.s3 = boto3.client("s3", endpoint_url=self.url, **keys)
        self.s3.create_bucket(Bucket=BUCKET)

    def place(self) -> str:
        """The URL of a place where nothing is."""
        return f"msc://lab/{uuid.uuid4().hex[:8]}/cache"

    def names(self, place: str, below: str = "") -> list[str]:
        """Names of what is at a place."""
        root = place.removeprefix("msc://lab/") + "/"
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=root + below)
        return [item["Key"].removeprefix(root) for page in pages for item in page.get("Contents", [])]

    def objects(self, place: str) -> dict[str, bytes]:
        """Everything at a place, by name."""
        return {name: self.get(place, name) for name in self.names(place)}

    def get(self, place: str, name: str) -> bytes:
        """Content of an object."""
        key = f"{place.removeprefix('msc://lab/')}/{name}"
        return self.s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def put(self, place: str, name: str, data: bytes) -> None:
        """Make or replace an object."""
        self.s3.put_object(Bucket=BUCKET, Key=f"{place.removeprefix('msc://lab/')}/{name}", Body=data)

    def delete(self, place: str, name: str) -> None:
        """Delete an object."""
        self.s3.delete_object(Bucket=BUCKET, Key=f"{place.removeprefix('msc://lab/')}/{name}")

    def faults(self, *rules: dict[str, Any]) -> None:
        """From now on these rules, and an empty log."""
        data = json.dumps(rules).encode()
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/_faults", data, method="POST")).read()

    def log(self) -> list[list]:
        """Requests since then: [method, path, Range header, status]."""
        return json.load(urllib.request.urlopen(f"{self.url}/_faults"))


@pytest.fixture(scope="session")
def store_server(tmp_path_factory) -> Iterator[Server]:
    """The server, and a configuration of multi-storage-client with its bucket as profile `lab`, and one it lacks."""
    command = [sys.executable, "-m", "tests.cache.store_server"]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    server = Server(int(process.stdout.readline()))
    options = {"base_path": BUCKET, "endpoint_url": server.url, "region_name": "us-east-1", "read_timeout": 1}
    options["retries"] = {"total_max_attempts": 1}  # boto3's own repetitions would hide faults, and take seconds
    profile = {
        "storage_provider": {"type": "s3", "options": options},
        "credentials_provider": {"type": "S3Credentials", "options": {"access_key": "a", "secret_key": "b"}},
    }
    config = tmp_path_factory.mktemp("msc") / "config.json"
    lost = profile | {"storage_provider": {"type": "s3", "options": options | {"base_path": "no-such-bucket"}}}
    config.write_text(json.dumps({"profiles": {"lab": profile, "lost": lost}}))
    before = os.environ.get("MSC_CONFIG")
    os.environ["MSC_CONFIG"] = str(config)
    yield server
    os.environ.pop("MSC_CONFIG") if before is None else os.environ.update(MSC_CONFIG=before)
    process.stdin.close()
    process.wait(10)


@pytest.fixture
def server(store_server) -> Iterator[Server]:
    """The server without faults."""
    store_server.faults()
    yield store_server
    store_server.faults()


def main() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from moto.server import MotoRequestHandler
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = Faults(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    print(server.port, flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()  # ends with who started it
    server.serve_forever()


if __name__ == "__main__":
    main()
