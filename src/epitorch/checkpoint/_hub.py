"""The Hugging Face Hub: fetching and publishing checkpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from epitorch.checkpoint import _folder
from epitorch.checkpoint._data import FILES
from epitorch.errors import CheckpointError, HubError, InputError, explain, require

_EXTRA = "hub"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class PushReport:
    """What was published.

    Args:
        repo_id: `OWNER/NAME`.
        url: Of the commit.
        commit: Its hash.
        bytes: Of all files.
    """

    repo_id: str
    url: str
    commit: str
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.repo_id}: {self.bytes:,} bytes in {len(FILES)} files, commit {self.commit}\n{self.url}"


def check_repo_id(repo_id: str) -> str:
    """Refuse what is no name on the Hub.

    Raises:
        InputError: If it is not `OWNER/NAME`.
    """
    if not _NAME.fullmatch(repo_id) or ".." in repo_id or "--" in repo_id or len(repo_id) > 96:
        raise InputError(explain("this is no name on the Hub", expected="OWNER/NAME", got=repr(repo_id)))
    return repo_id


def fetched(repo_id: str, revision: str | None, local_files_only: bool, token: str | None) -> Path:
    """Return the folder in the Hub's cache that holds a model's files, fetched if need be.

    Raises:
        CheckpointError: If it is neither a folder here nor a name on the Hub.
        HubError: If the files can neither be fetched nor found in the cache.
    """
    try:
        check_repo_id(repo_id)
    except InputError as error:
        raise CheckpointError(
            explain("there is no such checkpoint", expected="a folder, or OWNER/NAME on the Hub", got=repr(repo_id))
        ) from error
    hub = require("huggingface_hub", _EXTRA)
    with _explained(f"'{repo_id}' is no folder here and cannot be taken from the Hub"):
        found = hub.snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=list(FILES),
            local_files_only=local_files_only,
            token=token,
            endpoint=_endpoint(),
        )
    return Path(found)


def publish(
    folder: Path, repo_id: str, *, private: bool, revision: str | None, message: str, token: str | None
) -> PushReport:
    """Upload the files of a checkpoint in one commit; the repository is made if missing.

    Raises:
        HubError: If the Hub refuses or cannot be reached.
    """
    hub = require("huggingface_hub", _EXTRA)
    _folder.finish(folder)
    api = hub.HfApi(endpoint=_endpoint(), token=token)
    with _explained(f"'{repo_id}' could not be published"):
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            allow_patterns=list(FILES),
            commit_message=message,
            revision=revision,
        )
    size = sum((folder / name).stat().st_size for name in FILES)
    return PushReport(repo_id, str(done.commit_url), str(done.oid), size)


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Errors of the Hub's client and of the network in the family's words."""
    try:
        yield
    except Exception as error:  # what is raised depends on the HTTP library that the client's version uses
        raise HubError(
            explain(
                what,
                expected="an answer from the Hub, or files in its cache",
                got=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
                fix="check the name, the network and the login (`hf auth login`); offline, fetch it once before",
            )
        ) from error
