"""Data sets of the Hugging Face hub, through `huggingface_hub`: resumed when broken off, checked against a SHA-256.

`huggingface_hub` is the optional extra `hub`. It reads HF_ENDPOINT (a mirror), HF_TOKEN and proxies by itself. Files
are kept as they came: our readers take `.txt`, `.jsonl`, `.json` and `.parquet`.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.base.files import sha256_file
from penjing.base.formatting import megabytes
from penjing.data.catalog.sources import Fetched, Say


@dataclass(frozen=True, kw_only=True, slots=True)
class HubFile:
    """One file of a data set. Without a hash of ours the hub's own is looked up at run time."""

    path: str  # inside the repository
    num_bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HubSource:
    """Files of one data set at one revision."""

    repository: str
    revision: str  # a commit where we know a good one, else "main"
    files: tuple[HubFile, ...]

    @property
    def resumes(self) -> bool:
        return True

    def identity(self) -> dict[str, Any]:
        files = {file.path: file.sha256 for file in self.files}
        return {"hub": self.repository, "revision": self.revision, "files_sha256": files}

    def fetch(self, folder: Path, say: Say) -> Fetched:
        """Download every file into `folder` and check it. Raises `UserError`."""
        hub = _hub(self.repository)
        found: dict[str, Any] = {}
        for file in self.files:
            say(f"{self.repository}: {file.path}" + (f" ({megabytes(file.num_bytes)})" if file.num_bytes else ""))
            path = self._download(hub, file, folder)
            wanted, by = (file.sha256, "penjing") if file.sha256 else (self._hash_at_hub(hub, file), "hub")
            got = sha256_file(path)
            if wanted is not None and got != wanted:
                path.unlink()  # else the next try would take it for finished
                raise UserError(
                    "the downloaded file is not the one that was checked",
                    where=f"{self.repository}/{file.path}",
                    got=f"sha256 {got}",
                    wanted=wanted,
                    next_step="Try again; if it stays, the mirror or the data set has changed: do not use it.",
                )
            found[file.path] = {"sha256": got, "checked_against": by if wanted else "nothing: no hash is known"}
        shutil.rmtree(folder / ".cache", ignore_errors=True)  # huggingface_hub's notes for resuming
        return Fetched(provenance={**self.identity(), "downloaded": found})

    def _download(self, hub: Any, file: HubFile, folder: Path) -> Path:
        try:
            path = hub.hf_hub_download(
                repo_id=self.repository,
                filename=file.path,
                repo_type="dataset",
                revision=self.revision,
                local_dir=folder,
            )
        except (OSError, RuntimeError) as error:
            raise _hub_error(error, f"{self.repository}/{file.path}") from None
        return Path(path)

    def _hash_at_hub(self, hub: Any, file: HubFile) -> str | None:
        """The SHA-256 that the hub itself states (for files in large-file storage); None when it states none."""
        try:
            infos = hub.HfApi().get_paths_info(
                self.repository, [file.path], repo_type="dataset", revision=self.revision
            )
        except (OSError, RuntimeError):
            return None  # some mirrors hand out files but not this; the manifest then says "nothing"
        stored = getattr(infos[0], "lfs", None) if infos else None
        return stored.sha256 if stored is not None else None


def _hub(repository: str) -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            "this text comes from the Hugging Face hub, which needs huggingface_hub",
            where=repository,
            next_step='pip install "penjing[hub]"',
        ) from None
    return huggingface_hub


def _hub_error(error: Exception, where: str) -> UserError:
    """One line for each way a download fails, told apart by the exception's own and its parents' names."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in names:
        step = "Accept its terms on the hub's page, then  hf auth login."
        return UserError("the data set asks for consent", where=where, next_step=step)
    if names & {"RepositoryNotFoundError", "RevisionNotFoundError", "RemoteEntryNotFoundError"}:
        return UserError(
            "the hub no longer has this file", where=where, got=type(error).__name__, next_step="Please report this."
        )
    if "PermissionError" in names or getattr(error, "errno", None) in (28, 30, 122):  # disk full, read-only, quota
        return UserError(f"cannot write: {getattr(error, 'strerror', None) or error}", where=where)
    return UserError(
        "the hub cannot be reached",
        where=where,
        got=type(error).__name__,
        next_step="Check the network, or set HF_ENDPOINT to a mirror; what is there already is kept and resumed.",
    )
