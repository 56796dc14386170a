"""Data sets of the Hugging Face hub, through `huggingface_hub`: resumable downloads, checked against a SHA-256.

`huggingface_hub` is the optional extra `hub`. It reads HF_ENDPOINT (a mirror), HF_TOKEN and proxy settings. Files
are not converted: our readers accept `.txt`, `.jsonl`, `.json` and `.parquet`.
"""

import shutil
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar

from penjing.base.errors import UserError, import_extra
from penjing.base.files import sha256_file
from penjing.base.formatting import megabytes
from penjing.data.catalog.sources import Report


@dataclass(frozen=True, kw_only=True, slots=True)
class HubSource:
    """One file of a data set at one revision, or those that `path` matches as a pattern with `*`. Without a hash here,
    the hub's hash is looked up at run time."""

    resumes: ClassVar = True

    repository: str
    revision: str  # a checked commit, or "main"
    path: str  # inside the repository
    num_bytes: int
    sha256: str | None = None

    @property
    def _at(self) -> dict[str, Any]:
        return {"repo_id": self.repository, "repo_type": "dataset", "revision": self.revision}

    def identity(self) -> dict[str, Any]:
        return {"hub": self.repository, "revision": self.revision, "files_sha256": {self.path: self.sha256}}

    def fetch(self, folder: Path, report: Report) -> dict[str, Any]:
        """Download the file, or all that `path` matches, into `folder` and check each. Raises `UserError`."""
        hub = import_extra("huggingface_hub", "hub", self.repository)
        report(f"{self.repository}: {self.path}" + (f" ({megabytes(self.num_bytes)})" if self.sha256 else ""))
        downloaded = {path: self._fetch_file(hub, path, folder) for path in self._paths(hub)}
        shutil.rmtree(folder / ".cache", ignore_errors=True)  # huggingface_hub's state for resuming
        return {**self.identity(), "downloaded": downloaded}

    def _paths(self, hub: Any) -> list[str]:
        """The file, or those of the repository that match."""
        if "*" not in self.path:
            return [self.path]
        try:
            names = hub.HfApi().list_repo_files(**self._at)
        except (OSError, RuntimeError) as error:
            raise _hub_error(error, self.repository) from None
        if not (found := [name for name in names if fnmatch(name, self.path)]):
            raise UserError("the hub no longer has such files", where=self.repository, wanted=self.path)
        return found

    def _fetch_file(self, hub: Any, name: str, folder: Path) -> dict[str, str]:
        where = f"{self.repository}/{name}"
        try:
            path = Path(hub.hf_hub_download(filename=name, local_dir=folder, **self._at))
        except (OSError, RuntimeError) as error:
            raise _hub_error(error, where) from None
        expected, checked_against = (self.sha256, "penjing") if self.sha256 else (self._hash_at_hub(hub, name), "hub")
        actual = sha256_file(path)
        if expected is not None and actual != expected:
            path.unlink()  # otherwise the next try would take it for complete
            what = "the downloaded file is not the one that was checked"
            hint = "Try again; if it stays, the mirror or the data set has changed: do not use it."
            raise UserError(what, where=where, got=f"sha256 {actual}", wanted=expected, next_step=hint)
        return {"sha256": actual, "checked_against": checked_against if expected else "nothing: no hash is known"}

    def _hash_at_hub(self, hub: Any, name: str) -> str | None:
        """The SHA-256 that the hub reports (for files in Git LFS); None if it reports none."""
        try:
            infos = hub.HfApi().get_paths_info(paths=[name], **self._at)
        except (OSError, RuntimeError):
            return None  # some mirrors serve files but no hashes; the manifest then says "nothing"
        lfs = getattr(infos[0], "lfs", None) if infos else None
        return lfs.sha256 if lfs is not None else None


def _hub_error(error: Exception, where: str) -> UserError:
    """One line for each kind of download error, recognized by the class names of the exception and its bases."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in names:
        step = "Accept its terms on the hub's page, then  hf auth login."
        return UserError("the data set asks for consent", where=where, next_step=step)
    if names & {"RepositoryNotFoundError", "RevisionNotFoundError", "RemoteEntryNotFoundError"}:
        what, hint = "the hub no longer has this file", "Please report this."
        return UserError(what, where=where, got=type(error).__name__, next_step=hint)
    if "PermissionError" in names or getattr(error, "errno", None) in (28, 30, 122):  # disk full, read-only, quota
        return UserError(f"cannot write: {getattr(error, 'strerror', None) or error}", where=where)
    hint = "Check the network, or set HF_ENDPOINT to a mirror; what is there already is kept and resumed."
    return UserError("the hub cannot be reached", where=where, got=type(error).__name__, next_step=hint)
