"""A stand-in for the Hugging Face Hub: what its client asks when it makes, fills and fetches a small repository."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse

TOKEN = "hf_of_the_tests"


class Hub:
    """Repositories in memory, by name and branch."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.requests: list[str] = []
        self.messages: list[str] = []
        self.closed = False
        self.url = ""

    def commit_of(self, name: str, branch: str) -> str:
        files = self.repositories[name][branch]
        return hashlib.sha1(b"".join(key.encode() + files[key] for key in sorted(files))).hexdigest()

    def files(self, name: str, revision: str) -> dict[str, bytes] | None:
        branches = self.repositories.get(name, {})
        named = {self.commit_of(name, branch): files for branch, files in branches.items()} | branches
        return named.get(revision)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, content: Any, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def missing(self) -> None:
        self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlparse(self.path).path
        self.hub.requests.append(f"POST {path}")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, {"error": "Invalid username or password."})
            return
        if path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given['organization']}/{given['name']}" if given.get("organization") else given["name"]
            self.hub.private[name] = bool(given.get("private")) or given.get("visibility") == "private"
            self.hub.repositories.setdefault(name, {"main": {}})
            self.answer(200, {"url": f"{self.hub.url}/{name}"})
            return
        if path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
            return
        _, _, _, owner, repo, action, revision = path.split("/")
        name, revision = f"{owner}/{repo}", unquote(revision)
        if name not in self.hub.repositories:
            self.missing()
        elif action == "branch":
            branches = self.hub.repositories[name]
            branches.setdefault(revision, dict(branches["main"]))
            self.answer(200, {})
        elif action == "preupload":
            files = [{"path": f["path"], "uploadMode": "regular"} for f in json.loads(body)["files"]]
            self.answer(200, {"files": [{**f, "shouldIgnore": False, "oid": None} for f in files]})
        else:
            self._commit(name, revision, body)

    def _commit(self, name: str, revision: str, body: bytes) -> None:
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "header":
                self.hub.messages.append(entry["value"]["summary"])
            else:
                content = base64.b64decode(entry["value"]["content"])
                self.hub.repositories[name][revision][entry["value"]["path"]] = content
        oid = self.hub.commit_of(name, revision)
        self.answer(200, {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}"})

    def do_GET(self) -> None:
        path = urlparse(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts[0] == "api":
            name, revision = "/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main"
            files = self.hub.files(name, revision)
            if files is None:
                self.missing()
            elif "tree" in parts:
                tree = [{"type": "file", "path": key, "size": len(v), "oid": _oid(v)} for key, v in files.items()]
                self.answer(200, tree)
            else:
                sha = revision if len(revision) == 40 else self.hub.commit_of(name, revision)
                siblings = [{"rfilename": key} for key in files]
                self.answer(200, {"id": name, "sha": sha, "siblings": siblings, "private": False, "tags": []})
            return
        name, revision, file = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        files = self.hub.files(name, revision)
        if files is None or file not in files:
            self.missing()
            return
        sha = revision if len(revision) == 40 else self.hub.commit_of(name, revision)
        self.answer(200, files[file], ETag=f'"{_oid(files[file])}"', X_Repo_Commit=sha)

    do_HEAD = do_GET


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve an empty Hub on a free port of this machine."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
