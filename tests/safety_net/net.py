"""The safety net of a redesign: every recipe, trained for a few steps, comes out bit for bit as it did before.

python tests/safety_net/net.py                   # this checkout beside the recorded values, a line for each case
python tests/safety_net/net.py --record          # write the values of this checkout for this machine
python tests/safety_net/net.py --record --source CHECKOUT   # ... of another checkout
python tests/safety_net/net.py --against CHECKOUT           # this checkout beside another one, both run now
python tests/safety_net/net.py sft dpo           # these cases, and those that they start from

Of each case it keeps: the hashes of the newest checkpoint's weights and optimizer state, metrics.jsonl without times,
what plan.json counts, the whole plan for a graphics card (traced peak bytes among it), and the exported files' hashes.
Weights depend on the machine's kernels: values are kept by machine, and on another one there is nothing to compare.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORD = HERE / "expected.json"

# ---- What is run
SHAPE = (
    "model.preset=tiny model.vocab_size=400 model.hidden_size=32 model.num_hidden_layers=2 model.num_attention_heads=2"
    " model.num_key_value_heads=1 model.head_dim=16 model.intermediate_size=48"
)
WIDE = "model.hidden_size=64 model.intermediate_size=128 model.head_dim=32"  # int8 is for tensors from 4096 elements on
EVERY = "seed=5 compute.device=cpu compute.threads=1 sample.every=0 log.every=1 checkpoint.every=100"
RUN = f"{EVERY} compute.dtype=float32 max_steps=4 batch.size=8 eval.every=2 eval.sequences=8"
TEXTS = "data.train=data/pretrain.jsonl data.seq_len=64"
CHATS = "init_from=runs/pretrain data.train=data/sft.jsonl data.seq_len=128"
JUDGED = "init_from=runs/sft data.train=data/dpo.jsonl data.seq_len=256"
PAIRS = f"{JUDGED} objective.own_answers=4 objective.own_answer_tokens=6"
PROMPTS = (
    "init_from=runs/sft data.train=data/rl.jsonl data.seq_len=256 batch.size=4 eval.sequences=4"
    " objective.rollout.num_generations=4 objective.rollout.max_new_tokens=6"
    " objective.rewards=model objective.reward.model=runs/reward"
)
TAUGHT = "objective.teacher=runs/pretrain"
# case: (recipe, settings); `max_steps` and the others may be said again, the last one counts
TRAININGS = {
    "pretrain": ("pretrain", f"{SHAPE} {RUN} {TEXTS}"),  # dense, Muon, warm-up stable decay
    "pretrain_tiny_bfloat16": ("pretrain", f"model=tiny model.num_attention_heads=1 model.intermediate_size=352 {RUN}"
                               f" {TEXTS} compute.dtype=bfloat16"),
    "pretrain_adamw_cosine": ("pretrain", f"{SHAPE} {RUN} {TEXTS} optimizer.name=adamw optimizer.learning_rate=0.003"
                              " schedule.name=cosine"),
    "pretrain_accumulated": ("pretrain", f"{SHAPE} {RUN} {TEXTS} batch.micro_size=2"),
    "pretrain_recomputed": ("pretrain", f"{SHAPE} {RUN} {TEXTS} compute.activation_checkpointing=block"),
    "pretrain_int8_state": ("pretrain", f"{SHAPE} {RUN} {TEXTS} {WIDE}"
                            " optimizer.name=adamw optimizer.state_dtype=int8"),
    "pretrain_muon_int8_state": ("pretrain", f"{SHAPE} {RUN} {TEXTS} {WIDE} optimizer.state_dtype=int8"),
    "pretrain_stream": ("pretrain", f"{SHAPE} {RUN} {TEXTS} data.packing=concat data.order=as_given data.prefetch=0"),
    "pretrain_bfloat16": ("pretrain", f"{SHAPE} {RUN} {TEXTS} compute.dtype=bfloat16 schedule.name=constant"),
    "mixture": ("pretrain", f"{SHAPE} {RUN} {TEXTS} model.preset=tiny-moe model.num_experts=4"
                " model.moe_intermediate_size=16 model.shared_expert_intermediate_size=16"),
    "sft": ("sft", f"{RUN} {CHATS}"),
    "lora": ("lora", f"{RUN} {CHATS} lora.rank=2 lora.dropout=0.3"),
    "dora": ("lora", f"{RUN} {CHATS} lora.rank=2 lora.use_dora=true"),
    "dpo": ("dpo", f"{RUN} {PAIRS} batch.micro_size=2"),
    "dpo_lora": ("dpo", f"{RUN} {PAIRS} lora.rank=2"),
    "dpo_precomputed": ("dpo", f"{RUN} {PAIRS} objective.reference=precomputed"),
    "kto": ("dpo", f"{RUN} {PAIRS} objective.loss=kto objective.desirable_weight=1.2 objective.kl_groups=4"
            " optimizer.learning_rate=5e-5"),
    "simpo": ("dpo", f"{RUN} {PAIRS} objective.loss=simpo objective.simpo_gamma=0.6"),
    "orpo": ("dpo", f"{RUN} {PAIRS} objective.loss=orpo"),
    "reward": ("reward", f"{RUN} {JUDGED}"),
    "distill": ("distill", f"{SHAPE} {RUN} {TEXTS} {TAUGHT}"),
    "distill_top_k": ("distill", f"{SHAPE} {RUN} {TEXTS} {TAUGHT} objective.mode=top_k objective.top_k=4"),
    "distill_on_policy": ("distill", f"{RUN} {CHATS} data.format=chats objective.teacher=runs/sft batch.size=4"
                          " objective.mode=on_policy objective.ce_weight=0 objective.max_new_tokens=6"),
    "grpo": ("grpo", f"{RUN} {PROMPTS} objective.rollout.steps_per_rollout=2"),
    "grpo_kl": ("grpo", f"{RUN} {PROMPTS} objective.loss=dapo objective.kl_coef=0.1"),
    "ppo": ("ppo", f"{RUN} {PROMPTS} objective.value.gamma=0.99"),
}  # fmt: skip
STARTS = re.compile(r"(?:init_from|objective\.teacher|objective\.reward\.model)=runs/(\S+)")
GENERATE = (
    "data toyworld --out data --documents 300 --conversations 120 --preferences 40 --prompts 40 --questions 1 --seed 3"
)
EXPORTS = {  # case: (command, what it writes)
    "pretrain": [("export hf runs/pretrain exported/hf", "hf"),
                 ("export gguf runs/pretrain exported/f16.gguf --dtype f16", "f16.gguf")],
    "mixture": [("export hf runs/mixture exported/mixture-hf", "mixture-hf")],
    "lora": [("export hf runs/lora exported/lora-hf", "lora-hf"),
             ("adapter export runs/lora exported/adapter", "adapter")],
}  # fmt: skip
CARD = ["--gpu", "RTX 3090", "--json"]  # its plan depends on no machine
QUICK = ("pretrain",)  # run in `make test`

TIMES = re.compile(
    r"second|wait|mfu|time|memory|resident|probe|startup|speed|version|python|machine|host|threads|cpu_cores|gpu_"
)

# ---- Running


def settings_for(words: str) -> list[str]:
    """The settings; where one is said twice the last counts."""
    return [f"{key}={value}" for key, value in dict(word.split("=", 1) for word in words.split()).items()]


def needed(cases: list[str]) -> list[str]:
    """These cases and those that they start from, in the table's order."""
    wanted, more = set(), list(cases)
    while more:
        case = more.pop()
        wanted.add(case)
        more += [start for start in STARTS.findall(TRAININGS[case][1]) if start not in wanted]
    return [case for case in TRAININGS if case in wanted]


def run(source: Path, folder: Path, cases: list[str]) -> dict[str, dict[str, Any]]:
    """The values of each case, run from the package in `source` (a src folder) within `folder`."""
    jobs = [("data", GENERATE.split())]
    for case in needed(cases):
        recipe, words = TRAININGS[case]
        settings = [*settings_for(words), f"out=runs/{case}"]
        jobs.append((case, ["train", recipe, *settings]))
        jobs.append((f"{case}.plan", ["plan", "run", recipe, *settings, *CARD]))
        for words, _ in EXPORTS.get(case, ()):
            if "gguf" not in words or importlib.util.find_spec("gguf"):
                jobs.append((f"{case}.export", words.split()))
    environment = {
        **os.environ,
        "PYTHONPATH": str(source),
        "PENJING_HOME": str(folder / "home"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "offline",
    }
    worker = subprocess.run(
        [sys.executable, __file__, "--worker"],
        input=json.dumps(jobs), text=True, cwd=folder, env=environment, capture_output=True,
    )  # fmt: skip
    if worker.returncode:
        raise RuntimeError(f"{worker.stdout[-3000:]}\n{worker.stderr[-3000:]}")
    if (folder / "said" / "data.failed").exists():
        raise RuntimeError((folder / "said" / "data.failed").read_text())
    values = {"data": {path.name: _sha(path.read_bytes()) for path in sorted((folder / "data").glob("*.jsonl"))}}
    return {**values, **{case: values_of(folder, case) for case in needed(cases)}}


def work() -> None:
    """In a process that has imported torch: each command in a forked child, one after the other."""
    import torch
    import torch._dynamo  # the first optimizer of a process imports it, which takes a second

    torch.set_num_threads(1)
    importlib.import_module("penjing.cli")
    Path("said").mkdir()
    known: set[str] = set()
    for name, words in json.load(sys.stdin):
        if "train" in words and name not in known:  # what the trainings before it have imported
            for module in Path("modules").read_text().split() if Path("modules").exists() else ():
                if module not in sys.modules:
                    importlib.import_module(module)
            _quick_probe()
        pid = os.fork()
        if not pid:
            _child(name, words)
        if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            case, lines = name.partition(".")[0], [f"exit code {code} of penjing {' '.join(words)}"]
            lines += [Path("said", f"{name}.{end}").read_text()[-2000:] for end in ("out", "err")]
            with open(f"said/{case}.failed", "a", encoding="utf-8") as stream:
                stream.write("\n".join(lines))


def _quick_probe() -> None:
    """The plan before step 1 is made from as few timed steps as can be."""
    for name, module in list(sys.modules.items()):
        if name.startswith("penjing.train"):
            for figure, value in (
                ("LEAST_STEPS", 2),
                ("ALWAYS_ALLOWED", 2),
                ("PROBE_SECONDS", 0.0),
                ("MOST_SECONDS", 0.0),
            ):
                if hasattr(module, figure):
                    setattr(module, figure, value)


def _child(name: str, words: list[str]) -> None:
    from penjing.cli import main

    for stream, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"said/{name}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.argv = ["penjing", *words]
    code: Any = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    if "train" in words:
        ours = [module for module in sys.modules if module.startswith("penjing.") and module != "penjing.__main__"]
        Path("modules").write_text("\n".join(ours))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


# ---- What is kept of a case


def values_of(folder: Path, case: str) -> dict[str, Any]:
    failed = folder / "said" / f"{case}.failed"
    if failed.exists():
        return {"failed": failed.read_text()}
    run_folder = folder / "runs" / case
    newest = sorted((run_folder / "checkpoints").glob("step-*"))[-1]
    kept: dict[str, Any] = {"step": newest.name}
    for path in sorted(newest.glob("*.safetensors")):
        kept[path.stem] = bag_of_tensors(path)
    kept["metrics"] = metrics(run_folder / "metrics.jsonl")
    kept["plan"] = figures(json.loads((run_folder / "plan.json").read_text()))
    kept["card"] = figures(json.loads((folder / "said" / f"{case}.plan.out").read_text()), all_of_it=True)
    for _, made in EXPORTS.get(case, ()):
        if (folder / "exported" / made).exists():
            kept[f"exported {made}"] = exported(folder / "exported" / made)
    return kept


def _sha(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:20]


def tensors(path: Path) -> dict[str, str]:
    """By name: hash of dtype, shape and bytes of each tensor in a safetensors file."""
    stored = path.read_bytes()
    size = int.from_bytes(stored[:8], "little")
    header = json.loads(stored[8 : 8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, about in header.items():
        begin, end = (8 + size + place for place in about["data_offsets"])
        found[name] = _sha(f"{about['dtype']} {about['shape']} ".encode(), stored[begin:end])
    return found


def bag_of_tensors(path: Path) -> str:
    """The same for the same tensors, whatever their names and their order in the file."""
    hashes = (digest for name, digest in tensors(path).items() if not name.startswith("rng"))  # drawn for each process
    return _sha("\n".join(sorted(hashes)).encode())


def metrics(path: Path) -> dict[str, list[Any]]:
    """name: the values that were logged, in order."""
    kept: dict[str, list[Any]] = {}
    for line in path.read_text().splitlines():
        for name, value in flat(json.loads(line)).items():
            if not TIMES.search(name):
                kept.setdefault(name, []).append(value)
    return dict(sorted(kept.items()))


def figures(plan: Any, *, all_of_it: bool = False) -> dict[str, Any]:
    """The numbers of a plan, by name; without what was timed or measured, unless it is of a card that is not here."""
    leave_out = re.compile("version|python|host|startup|decisions") if all_of_it else TIMES
    return {
        name: value
        for name, value in sorted(flat(plan).items())
        if isinstance(value, int | float) and not leave_out.search(name)
    }


def flat(tree: Any, name: str = "") -> dict[str, Any]:
    """The leaves of a tree by their dotted names."""
    if not isinstance(tree, dict | list):
        return {name: tree}
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {key: value for at, each in pairs for key, value in flat(each, f"{name}.{at}".strip(".")).items()}


def exported(path: Path) -> dict[str, Any]:
    if path.suffix == ".gguf":
        from gguf import GGUFReader

        reader = GGUFReader(path)
        stored = {each.name: _sha(str(each.tensor_type).encode(), each.data.tobytes()) for each in reader.tensors}
        about = {
            name: _sha(*(field.parts[at].tobytes() for at in field.data))
            for name, field in reader.fields.items()
            if name not in ("general.description", "penjing.version")  # they name our version
        }
        return {"tensors": _sha(json.dumps(stored, sort_keys=True).encode()), **about}
    kept, here = {}, str(path.resolve().parents[1])
    for each in sorted(path.iterdir()):
        if each.suffix == ".safetensors":
            kept[each.name] = _sha(json.dumps(tensors(each), sort_keys=True).encode())
        elif each.suffix == ".json":
            facts = {name: value for name, value in flat(json.loads(each.read_text())).items() if "version" not in name}
            facts = {name: str(value).replace(here, "") for name, value in facts.items()}
            kept[each.name] = _sha(json.dumps(facts, sort_keys=True).encode())
        elif each.suffix != ".md":
            kept[each.name] = _sha(each.read_bytes())
    return kept


# ---- Comparing


def machine() -> str:
    """What the bits depend on: the processor, what it can, torch, and the compiler of our kernels."""
    about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else platform.processor()
    facts = dict(re.findall(r"^(vendor_id|cpu family|model|flags)\s*: (.*)$", about, re.MULTILINE))
    wide = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
    flags = [flag for flag in wide if flag in facts.get("flags", "").split()]
    compiler = subprocess.run(["cc", "--version"], capture_output=True, text=True).stdout.partition("\n")[0]
    from importlib.metadata import version

    processor = f"{facts.get('vendor_id')} {facts.get('cpu family')}.{facts.get('model')} {' '.join(flags)}"
    return f"{platform.machine()} {processor}; torch {version('torch')}; {compiler}"


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What of a case is not the same, one line for each value."""
    old, new = flat(old), flat(new)
    names = [*old, *(name for name in new if name not in old)]
    return [
        f"{name}: {old.get(name, 'not there')} -> {new.get(name, 'not there')}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def renamed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Metrics and figures that are not there any more, beside new ones of the same values."""
    found = []
    for part in ("metrics", "plan", "card"):
        before, after = (each.get(part, {}) for each in (old, new))
        gone, come = (
            {name: each[name] for name in each if name not in other}
            for each, other in ((before, after), (after, before))
        )
        found += [f"{name} -> {other}" for name, value in gone.items() for other in come if come[other] == value]
    return found


def recorded() -> dict[str, Any] | None:
    """The values recorded on a machine as this one, or None."""
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return known.get(machine())


def _a_line_a_case(known: dict[str, Any]) -> str:
    blocks = []
    for name, cases in known.items():
        lines = [f"  {json.dumps(case)}: {json.dumps(values)}" for case, values in cases.items()]
        blocks.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def run_fresh(source: Path, cases: list[str]) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="safety-net-") as folder:
        return run(source, Path(folder), cases)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="empty: all")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--source", type=Path, default=ROOT)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work()
        return 0
    cases = asked.cases or list(TRAININGS)
    new = run_fresh(asked.source.resolve() / "src", cases)
    if asked.record:
        known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        known[machine()] = {**known.get(machine(), {}), **new}
        RECORD.write_text(_a_line_a_case(known))
        print(f"{RECORD}: {len(new)} cases for {machine()}")
        return 0
    old = run_fresh(asked.against.resolve() / "src", cases) if asked.against else recorded()
    if old is None:
        print(f"nothing is recorded for {machine()}; --against CHECKOUT runs another checkout here")
        return 2
    different = 0
    for case, values in new.items():
        lines = [values["failed"]] if "failed" in values else differences(old.get(case, {}), values)
        different += bool(lines)
        print(f"{case:<28} {f'{len(lines)} different' if lines else 'equal'}")
        for line in lines[:12]:
            print(f"    {line}")
        for line in renamed(old.get(case, {}), values):
            print(f"    renamed? {line}")
    print(f"{len(new) - different} of {len(new)} equal")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
