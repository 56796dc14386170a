"""Files from strangers: nothing in them is run, and none takes more time or memory than it is worth."""

import ast
import io
import json
import os
import pickle
import struct
import tarfile
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import penjing
from penjing.base.errors import UserError
from penjing.base.process_info import peak_resident_bytes
from penjing.checkpoint.load import newest, read_tensors
from penjing.checkpoint.manifest import MANIFEST, manifest_text
from penjing.checkpoint.save import save
from penjing.convert.minimind import read_tensors as read_pth
from penjing.data.chat.external_templates import run_template
from penjing.data.chat.template_sandbox import SECONDS
from penjing.data.formats import Message
from penjing.data.preference_shards import PreferenceShards
from penjing.data.token_shards import TokenShards, manifest_entries
from penjing.data.tokenizer import regex_dos_check as tokenizer_check
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.rl.rollout_buffer import RolloutBuffer
from penjing.train.load_model import load_trained

SOURCES = Path(penjing.__file__).parent


# --- no code from files: in the sources ------------------------------------------------------------------------------


UNPICKLERS = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib")


def unpickles(source):
    """Lines of Python that could run what a file holds."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        for name in names:
            if name.split(".")[0] in UNPICKLERS:
                found.append((node.lineno, f"import {name}"))
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        options = {option.arg: ast.unparse(option.value) for option in node.keywords}
        if called.endswith("torch.load") and options.get("weights_only") != "True":
            found.append((node.lineno, "torch.load without weights_only=True"))
        if options.get("weights_only") == "False" or ("allow_pickle" in options and options["allow_pickle"] != "False"):
            found.append((node.lineno, f"{called} that unpickles"))
        if called in ("torch.save", "eval", "exec", "compile", "yaml.load", "np.save") and (
            called != "np.save" or options.get("allow_pickle") == "True"
        ):
            found.append((node.lineno, called))
        if called.endswith(("read_pickle", "pickle.load", "pickle.loads", "Unpickler")):
            found.append((node.lineno, called))
    return found


def test_no_file_of_ours_unpickles(count):
    files = sorted(SOURCES.rglob("*.py"))
    bad = {}
    for path in files:
        source = path.read_text(encoding="utf-8")
        # `eval` and `exec` of torch's own kind are methods; a bare one would be found.
        bad |= {f"{path.relative_to(SOURCES)}:{line}": what for line, what in unpickles(source)}
    assert not bad
    count("source files without a way to unpickle", len(files))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import torch\ntorch.load(path, weights_only=flag)",
        "import torch\ntorch.save(x, path)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import dill.source",
        "exec(text)",
        "import yaml\nyaml.load(text)",
    ],
)
def test_the_search_for_unpickling_bites(source):
    assert unpickles(source)


# --- no code from files: payloads ------------------------------------------------------------------------------------


class Payload:
    """Pickles to a call."""

    def __init__(self, function, *given):
        self.call = (function, given)

    def __reduce__(self):
        return self.call


def touch(canary):
    return f"touch {canary}"


def pickles(canary):
    """Ways in which a pickle makes a file, by name."""
    script = f"open({str(canary)!r}, 'w')"
    return {
        "os.system": Payload(os.system, touch(canary)),
        "exec": Payload(exec, script),
        "eval": Payload(eval, script),
        "open": Payload(open, str(canary), "w"),
        "os.mkdir": Payload(os.mkdir, str(canary)),
        "popen": Payload(os.popen, touch(canary)),
        "getattr": Payload(getattr, Payload(__import__, "os"), "system"),
        "nested in a state dict": {"model.embed_tokens.weight": torch.zeros(2), "x": Payload(os.system, touch(canary))},
        "in a list": [1, [2, Payload(os.system, touch(canary))]],
        "a key": {Payload(os.getcwd): 1},
    }


def containers(name, value, folder):
    """The same pickle in the forms in which weights travel: (label, file)."""
    plain = pickle.dumps(value, protocol=2)
    path = folder / f"{name}.pth"
    path.write_bytes(plain)
    yield "plain pickle", path
    buffer = io.BytesIO()
    torch.save(value, buffer)
    path = folder / f"{name}-zip.pth"
    path.write_bytes(buffer.getvalue())
    yield "torch zip", path
    path = folder / f"{name}-old.pth"
    torch.save(value, path, _use_new_zipfile_serialization=False)
    yield "torch's old form", path


def test_payloads_in_weights_are_refused(tmp_path, count):
    canary = tmp_path / "canary"
    refused = 0
    for name, value in pickles(canary).items():
        for label, path in containers(name.replace(" ", "-").replace(".", "-"), value, tmp_path):
            with pytest.raises(UserError) as caught:
                read_pth(path)
            assert str(path) in str(caught.value), (name, label)
            with pytest.raises(UserError):
                load_trained(path)
            assert not canary.exists(), (name, label)
            refused += 1
    assert refused == 30
    count("malicious weights refused", refused)


def a_checkpoint(folder):
    save(folder, 3, weights={"w": torch.ones(4)}, optimizers=[], state={}, texts={"run.toml": "seed = 1\n"}, keep=1)
    return folder / "step-00000003"


def forge(place, name, content):
    """Replace a file and mend the manifest, as somebody would who made the checkpoint."""
    (place / name).write_bytes(content)
    from penjing.base.files import sha256_file

    names = [path for path in place.iterdir() if path.name != MANIFEST and path.is_file()]
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in names}
    (place / MANIFEST).write_text(manifest_text({"step": 3}, files))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "run.toml", MANIFEST])
def test_payloads_in_a_checkpoint_with_a_true_manifest(tmp_path, name):
    canary = tmp_path / "canary"
    for number, value in enumerate(pickles(canary).values()):
        place = a_checkpoint(tmp_path / f"{number}")
        if name == MANIFEST:
            (place / name).write_bytes(pickle.dumps(value))
            with pytest.raises(UserError):
                newest(place.parent)
            continue
        forge(place, name, pickle.dumps(value))
        checkpoint = newest(place.parent)
        if name == "run.toml":
            from penjing.train.load_model import read_settings

            (place.parent / "run.toml").write_bytes((place / name).read_bytes())
            with pytest.raises(UserError):
                read_settings(place.parent)
        else:
            with pytest.raises(UserError):
                {"model.safetensors": checkpoint.weights, "state.json": checkpoint.state}.get(
                    name, checkpoint.optimizers
                )()
    assert not canary.exists()


def test_pickled_arrays_are_refused(tmp_path):
    """Shards, groups and rollouts are numpy files: those that hold objects would be unpickled."""
    canary = tmp_path / "canary"
    objects = np.array([Payload(os.system, touch(canary))], dtype=object)
    folder = tmp_path / "shards"
    folder.mkdir()
    np.save(folder / "ends.npy", objects, allow_pickle=True)
    np.save(folder / "bytes.npy", np.zeros(1, np.int32))
    (folder / "tokens.bin").write_bytes(b"")
    files = manifest_entries(folder, ["ends.npy", "bytes.npy", "tokens.bin"])
    meta = {"format": 1, "kind": "documents", "dtype": "uint16", "tokens": 0, "files": files}
    (folder / "shards.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match=r"ends\.npy: the file is damaged: .*pickle"):
        TokenShards(folder)
    np.save(folder / "prompts.npy", objects, allow_pickle=True)
    files = manifest_entries(folder, ["prompts.npy"])
    meta = {"format": 1, "dtype": "uint16", "tokens": 0, "files": files}
    (folder / "groups.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match=r"prompts\.npy: the file is damaged: .*pickle"):
        PreferenceShards(folder)
    import base64

    stream = io.BytesIO()
    np.savez(stream, prompt_P=objects)
    with pytest.raises(ValueError, match="allow_pickle"):
        RolloutBuffer.from_text(base64.b64encode(stream.getvalue()).decode())
    assert not canary.exists()


def test_a_pickle_under_another_name_is_refused(tmp_path):
    canary = tmp_path / "canary"
    payload = pickle.dumps(Payload(os.system, touch(canary)))
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes(payload)
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", ".metadata", "rng_state.pth"):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).write_bytes(payload)
        (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
        with pytest.raises(UserError):
            load_trained(folder)
    with pytest.raises(UserError):
        load_trained(tmp_path)
    with pytest.raises(UserError):
        Tokenizer.load(tmp_path)
    archive = tmp_path / "model.pt"
    with tarfile.open(archive, "w") as tar:
        info = tarfile.TarInfo("../canary")
        tar.addfile(info, io.BytesIO(b""))
    with pytest.raises(UserError):
        read_pth(archive)
    bomb = tmp_path / "bomb.pt"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("archive/data.pkl", bytes(50_000_000))
    with pytest.raises(UserError):
        read_pth(bomb)
    assert not canary.exists()


# --- headers ---------------------------------------------------------------------------------------------------------


def safetensors_file(header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS = {
    "length of 2^63": safetensors_file({"w": TENSOR}, bytes(8), 1 << 63),
    "length of 2^64-1": safetensors_file({"w": TENSOR}, bytes(8), (1 << 64) - 1),
    "length beyond the file": safetensors_file({"w": TENSOR}, bytes(8), 10_000),
    "length 0": struct.pack("<Q", 0),
    "nothing": b"",
    "seven bytes": b"1234567",
    "overlap": safetensors_file({"a": TENSOR, "b": {**TENSOR, "data_offsets": [4, 12]}}, bytes(12)),
    "hole": safetensors_file({"a": TENSOR, "b": {**TENSOR, "data_offsets": [16, 24]}}, bytes(24)),
    "beyond the end": safetensors_file({"w": {**TENSOR, "data_offsets": [0, 800]}}, bytes(8)),
    "backwards": safetensors_file({"w": {**TENSOR, "data_offsets": [8, 0]}}, bytes(8)),
    "negative": safetensors_file({"w": {**TENSOR, "data_offsets": [-8, 0]}}, bytes(8)),
    "shape too large": safetensors_file({"w": {**TENSOR, "shape": [1 << 40]}}, bytes(8)),
    "shape that wraps around": safetensors_file({"w": {**TENSOR, "shape": [1 << 62, 1 << 62]}}, bytes(8)),
    "shape NaN": safetensors_file(b'{"w": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}', bytes(8)),
    "negative shape": safetensors_file({"w": {**TENSOR, "shape": [-2]}}, bytes(8)),
    "unknown dtype": safetensors_file({"w": {**TENSOR, "dtype": "F99"}}, bytes(8)),
    "dtype that lies": safetensors_file({"w": {**TENSOR, "dtype": "F64"}}, bytes(8)),
    "no JSON": safetensors_file(b"{" * 64, bytes(8)),
    "a list": safetensors_file([TENSOR], bytes(8)),
    "deep": safetensors_file(b'{"a":' * 100_000, bytes(8)),
    "more data than said": safetensors_file({"w": TENSOR}, bytes(100)),
    "a zip behind": safetensors_file({"w": TENSOR}, bytes(8) + b"PK\x03\x04" + bytes(60)),
    "a number": safetensors_file(b"7", bytes(8)),
    "a large header": safetensors_file(b" " * 101_000_000),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_lie_are_refused_at_once(tmp_path, name, count):
    path = tmp_path / "model.safetensors"
    path.write_bytes(HEADERS[name])
    began = time.process_time()
    with pytest.raises(UserError) as caught:
        read_tensors(path)
    assert str(path) in str(caught.value)
    assert time.process_time() - began < 5  # of this process's own time, which a busy machine does not stretch
    count("safetensors headers refused", 1)


# --- configurations --------------------------------------------------------------------------------------------------

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip
WILD = {
    "vocab of 10^12": {"vocab_size": 10**12},
    "10^9 layers": {"num_hidden_layers": 10**9},
    "width of 10^9": {"hidden_size": 10**9, "num_attention_heads": 10**6, "num_key_value_heads": 1},
    "negative heads": {"num_attention_heads": -2},
    "no heads": {"num_attention_heads": 0},
    "negative width": {"hidden_size": -16},
    "a text for a number": {"hidden_size": "16; import os"},
    "NaN": {"rms_norm_eps": float("nan")},
    "10^400 layers": {"num_hidden_layers": 10**400},
    "code of its own": {"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}, "architectures": ["Evil"]},
    "null": {"vocab_size": None},
    "a list": {"num_hidden_layers": [1, 2]},
}


@pytest.mark.parametrize("name", WILD)
def test_configurations_are_refused_before_memory_is_taken(tmp_path, name):
    from penjing.checkpoint.tensors import write_tensors

    write_tensors(tmp_path / "model.safetensors", {"model.embed_tokens.weight": torch.zeros(64, 16)})
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **WILD[name]}))
    before = peak_resident_bytes()
    with pytest.raises(UserError):
        load_trained(tmp_path)
    assert peak_resident_bytes() - before < 200 << 20


# --- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "([a-z]+)*x",
        "(a|aa)+b",
        "(.*)*",
        "(?:a|a)*$",
        "((ab)*c?)*",
        r"(\w+\s?)*$",
        "(a{1,})+",
        r"(a)\1+",
        "(a?a?)*b",
        "(?:a{1,2})+b",
    ],
)
def test_patterns_without_an_end_are_refused(tmp_path, toy_tokenizer, pattern):
    table = json.loads((toy_tokenizer / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    table["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(UserError, match="could take for ever"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}]*[\p{Ll}\p{Lm}]+(?i:'s|'t|'re)?|\p{N}{1,3}",
        r" ?[^(\s|[.,!?…。，、।۔،])]+",
        r"(?<!\d)\d{1,3}(?=(?:\d{3})*\b)",
    ],
)
def test_patterns_in_use_are_taken(pattern):
    assert tokenizer_check.risk(pattern) is None


def test_tokenizers_too_large_or_broken(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_check, "LARGEST_FILE_BYTES", 1000)
    path = tmp_path / "tokenizer.json"
    for content in (b" " * 1001, b"[]", b"{", b"\xff\xfe", b"[" * 900, b"9" * 900, b'{"model": 3}', b"{}"):
        path.write_bytes(content)
        with pytest.raises(UserError):
            Tokenizer.load(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError):
        Tokenizer.load(tmp_path)


@pytest.fixture(scope="module")
def toy_tokenizer(tmp_path_factory):
    from penjing.data.tokenizer.train import train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["some text to learn from"] * 3, 300).save(folder)
    return folder


# --- chat templates --------------------------------------------------------------------------------------------------

ATTACKS = {
    "endless loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "a long range": "{% for a in range(10**9) %}{% endfor %}",
    "a long text": "{{ 'a' * 10**9 }}",
    "doubling": "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "adding": "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "lists": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "many texts": "{% set n = namespace(l=[]) %}{% for i in range(99999) %}{% set n.l = n.l + ['a' * 900000] %}"
    "{% endfor %}",
    "a wide field": "{{ '%999999999d' % 1 }}",
    "a wide format": "{{ '{:999999999}'.format(1) }}",
    "a wide filter": "{{ '%0999999999d'|format(1) }}",
    "a wide centre": "{{ 'a'.center(10**9) }}",
    "a wide centre filter": "{{ 'a'|center(999999999) }}",
    "an indent": "{{ [1, [2]]|tojson(indent=99999999) }}",
    "replacing": "{{ ('a' * 900000).replace('a', 'b' * 900000) }}",
    "joining": "{{ ('a' * 900000).join('b' * 900000) }}",
    "a tower": "{{ 9 ** 9 ** 9 ** 9 }}",
    "matmuls": "{% set n = namespace(x=2) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "two macros": "{% macro f(n) %}{{ g(n) }}{{ g(n) }}{% endmacro %}{% macro g(n) %}{% if n %}{{ f(n - 1) }}"
    "{% endif %}{% endmacro %}{{ f(60) }}",
    "output": "{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "a date": "{{ strftime_now('%999999999Y') }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "self": "{{ self.__init__.__globals__ }}",
    "format maps": "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "attr": "{{ ''|attr('__class__')|attr('__mro__') }}",
    "map attr": "{{ [cycler]|map(attribute='__init__.__globals__')|list }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "changing messages": "{% set _ = messages.clear() %}",
    "changing a message": "{% set _ = messages[0].update({'role': 'system'}) %}",
    "raising": "{{ raise_exception('no') }}",
    "a syntax error": "{% for %}",
    "very long": "a" * 300_000,
    "very deep": "{{ " + "(" * 50_000,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_templates_from_strangers(tmp_path, monkeypatch, name, count):
    monkeypatch.chdir(tmp_path)
    before = peak_resident_bytes()
    began = time.process_time()
    source = ATTACKS[name].replace("CANARY", str(tmp_path / "canary"))
    try:
        said = run_template(source, [Message(role="user", content="hi")], [], {}, ask=True, thinking=False)
    except UserError:
        said = ""
    assert said.strip() in ("", "[]", "[Undefined]")  # what only reaches an undefined value writes nothing
    assert time.process_time() - began < SECONDS + 4
    assert peak_resident_bytes() - before < 400 << 20
    assert list(tmp_path.iterdir()) == []
    count("templates refused", 1)


def test_a_long_conversation_is_no_attack():
    source = "{% for message in messages %}<{{ message.role }}>{{ message.content|trim }}\n{% endfor %}"
    messages = [Message(role="user", content="some words " * 2000) for _ in range(100)]
    said = run_template(source, messages, [], {}, ask=True, thinking=False)
    assert len(said) > 2_000_000


# --- out of its folder -----------------------------------------------------------------------------------------------


def test_a_save_never_follows_a_planted_link(tmp_path):
    target = tmp_path / "precious"
    target.write_text("mine")
    folder = tmp_path / "checkpoints"
    (folder / ".step-00000003.partial").mkdir(parents=True)
    (folder / ".step-00000003.partial" / "model.safetensors").symlink_to(target)
    a_checkpoint(folder)
    assert target.read_text() == "mine"
    assert newest(folder).step == 3
    from penjing.base.files import NewFile

    (tmp_path / "link").symlink_to(target)
    with pytest.raises(OSError), NewFile(tmp_path / "link"):
        pass
    assert target.read_text() == "mine"


def test_a_manifest_cannot_name_files_elsewhere(tmp_path):
    place = a_checkpoint(tmp_path / "checkpoints")
    (tmp_path / "elsewhere").write_text("x")
    manifest = json.loads((place / MANIFEST).read_text())
    for name in ("../../elsewhere", "/etc/passwd", "a/b"):
        files = {**manifest["files"], name: {"bytes": 1, "sha256": ""}}
        (place / MANIFEST).write_text(manifest_text({"step": 3}, files))
        with pytest.raises(UserError, match="outside the folder"):
            newest(place.parent)
