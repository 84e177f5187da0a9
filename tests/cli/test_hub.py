# SPDX-License-Identifier: Apache-2.0
"""A model named by its place on the hub is looked for in seconds, in the words of whoever named it."""

import http.server
import socket
import threading

import pytest
from huggingface_hub import constants

from megatron_kd.cli import main
from megatron_kd.errors import ConfigError
from megatron_kd.hub import check_on_hub
from tests.cli.hub_cache import put_model

RECIPE = "smollm2_135m_pretrain_3cpu_fp32_kd_config"
COMMANDS = {
    "train --dry-run": ("student", ["train", "--dry-run", "--recipe", RECIPE, "--student"]),
    "train hf:": ("recipe hf:", ["train", "--cpu", "--recipe"]),
    "plan": ("--teacher", ["plan", "--recipe", RECIPE, "--teacher"]),
    "compare": ("--teacher", ["compare", "--cpu-ranks", "3", "--recipe", RECIPE, "--teacher"]),
    "cache build": ("--teacher", ["cache", "build", "--corpus", "/no", "--out", "/no/cache", "--teacher"]),
    "evaluate": ("healed:", ["evaluate"]),
}


PLAN = COMMANDS["plan"][1]


class Hub(http.server.BaseHTTPRequestHandler):
    """Knows one model, keeps one for those who have been let in, and no other."""

    def do_GET(self):  # noqa: N802
        known = self.path.startswith("/api/models/org/here")
        gated = self.path.startswith("/api/models/org/gated")
        self.send_response(200 if known else 403 if gated else 404)
        if not known:
            self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        body = b'{"id": "org/here", "siblings": []}' if known else b"{}"
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def call(hub, tmp_path, monkeypatch, capsys):
    """The error text of a command that asks this hub, or another, with an empty cache of it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def error(*argv: str, endpoint: str = hub) -> str:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        assert main([*argv]) == 2
        found = capsys.readouterr()
        assert "Loading Megatron" not in found.out
        return found.err

    return error


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_that_the_hub_does_not_have(call, command):
    what, argv = COMMANDS[command]
    name = {"train hf:": "hf:org/none", "evaluate": "healed=org/none"}.get(command, "org/none")
    assert f"megatron-kd: {what} org/none: no such folder here, and the hub has no such model" in call(*argv, name)


def test_a_model_that_asks_for_leave(call):
    found = call(*PLAN, "org/gated")
    assert "its access is restricted" in found and "HF_TOKEN" in found


def test_a_name_that_is_none(call):
    assert "which would be OWNER/NAME" in call(*PLAN, "a/b/c")


def test_without_network(call, tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    found = call(*PLAN, "org/here", endpoint=endpoint)
    assert f"{endpoint} cannot be reached from here" in found and "HF_HOME" in found and str(tmp_path) in found
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids asking the hub" in call(*PLAN, "org/here")


def test_what_the_hub_or_its_cache_has_is_let_through(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    check_on_hub("student", "org/here")
    put_model(tmp_path, "org/cached")
    check_on_hub("student", "org/cached")
    with pytest.raises(ConfigError):
        check_on_hub("student", "org/none")
