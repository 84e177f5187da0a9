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
import sys
import threading
import time
import urllib.request
from typing import Any


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
        if action == "kill before":
            os.kill(rule["pid"], signal.SIGKILL)
        if action == "ignore condition":
            environ.pop("HTTP_IF_MATCH", None), environ.pop("HTTP_IF_NONE_MATCH", None)
        status, headers, body = (
            (f"{rule['status']} Fault", [], b"") if action == "status" else self.serve(method, environ)
        )
        if action == "kill after":
            os.kill(rule["pid"], signal.SIGKILL)
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
    """What a test says to the server."""

    def __init__(self, port: int):
        self.url = f"http://127.0.0.1:{port}"

    def faults(self, *rules: dict[str, Any]) -> None:
        """From now on these rules, and an empty log."""
        data = json.dumps(rules).encode()
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/_faults", data, method="POST")).read()

    def log(self) -> list[list]:
        """Requests since then: [method, path, Range header, status]."""
        return json.load(urllib.request.urlopen(f"{self.url}/_faults"))


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
