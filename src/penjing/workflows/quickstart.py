"""penjing quickstart: from raw text to a model that answers.

Every stage writes its result to the folder and is not repeated: a killed quickstart continues, a finished one shows its
results.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.text import Text

from penjing.base import formatting as units
from penjing.base.config import Layer, convert, parse_overrides
from penjing.base.errors import UserError
from penjing.base.files import sha256_text, write_json
from penjing.base.lock import locked
from penjing.base.process_info import own_command
from penjing.data import dataset_stats as survey
from penjing.data import formats as records
from penjing.data import synthetic as toyworld
from penjing.data.catalog import registry as catalogue
from penjing.data.corpus import Corpus
from penjing.data.formats.files import content_of, is_data_name
from penjing.data.token_shards import TokenShards
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.eval import scorer
from penjing.eval.questions import Questions
from penjing.eval.text import score_texts, zstd_bits_per_byte
from penjing.export.hf import export
from penjing.export.model_card import model_card
from penjing.recipes.quickstart_configs import SFT_STEPS
from penjing.report.terminal import print_summary
from penjing.track.run_dir import RunDir
from penjing.track.run_record import RunRecord
from penjing.train.config import Run
from penjing.train.load_model import load_trained, set_threads
from penjing.train.resolve import decide, with_settings
from penjing.workflows.launch import LaunchOptions, train_in
from penjing.workflows.little_data import compare_choice, fit_to_text
from penjing.workflows.report import write_page
from penjing.workflows.stage_log import START_ANEW, StageLog, open_log
from penjing.workflows.stage_steps import MIN_SFT_STEPS, pretrain_steps, sft_steps
from penjing.workflows.train import resolve_run

TOYWORLD = "toyworld"
STORY_PROMPTS = ("One sunny day, Mia", "一天早上，小明")
CHAT_PROMPTS = (
    "Tell a story about Tom and a kite.",
    "讲一个小红和风筝的故事。",
    "What is 3 + 4?",
    "用英文说：红色的苹果",
)
ADDRESS = "http://127.0.0.1:8000"  # of `penjing serve`
HELD_OUT_OF_REAL_TEXT = 0.05  # fraction; larger because real corpora here are small
EXAMPLES_SHOWN = 24
# What the data of a training are called.
NEEDS = {"pretrain": "texts", "sft": "conversations", "dpo": "pairs of answers", "grpo": "prompts with answers"}


@dataclass(frozen=True, kw_only=True)
class QuickstartOptions:
    data: str = TOYWORLD  # toyworld, a name of `penjing data list`, or files and folders separated by commas
    out: Path = Path("runs/quickstart")
    fresh: bool = False  # delete the folder's content
    short: bool = False  # a hundredth of the training: a check that everything works
    settings: Sequence[str] = ()  # further a.b=c for the pretraining, or sft.a.b=c for the SFT stage
    minutes: float = 5.75  # for all training, so that installation and the rest fit in 8
    launch: LaunchOptions = field(default_factory=LaunchOptions)  # the processes that train
    uses: ClassVar[tuple[str, ...]] = ("documents", "chats")  # kinds of records
    prefixes: ClassVar[tuple[str, ...]] = ("sft",)  # stages whose settings begin with their name

    def request(self) -> dict[str, Any]:
        """The options that decide what the stages make."""
        longer = {} if self.minutes == QuickstartOptions.minutes else {"minutes": self.minutes}
        return {"data": self.data, "short": self.short, "settings": list(self.settings), **longer}

    @property
    def seconds(self) -> float:
        """Of all training."""
        return 60 * self.minutes * (0.01 if self.short else 1.0)

    def toyworld_sizes(self) -> dict[str, int]:
        """How much of the toy world is made: arguments of toyworld.write."""
        sizes = {name: size // 50 if self.short else size for name, size in TOYWORLD_SIZES.items()}
        return {**sizes, "questions_per_kind": QUESTIONS_PER_KIND}


@dataclass
class DataFiles:
    """Training files. Without chats there is no SFT, without questions no accuracy."""

    documents: list[str]
    chats: list[str]
    preferences: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    questions: Path | None = None
    unused: list[str] = field(default_factory=list)  # files of other kinds, each with its kind
    unused_names: list[str] = field(default_factory=list)  # of data without any other files


Trainings = Mapping[str, Callable[[DataFiles], Run | None]]  # by name, in their order; None: no data for it


def quickstart(options: QuickstartOptions, console: Console) -> None:
    """Data, tokenizer, pretraining, SFT, evaluation, export and report under `options.out`."""
    set_threads(0, 1)
    source_of(options)  # find errors in the options before creating a folder
    resolve_run("tiny", parse_overrides(_overrides(options, "pretrain")))
    command = f"penjing quickstart --data {options.data}"
    log = open_log(options.out, command, options.request(), console, fresh=options.fresh)
    trainings: Trainings = {
        "pretrain": lambda files: _pretraining(options, files, log),
        "sft": lambda files: _finetuning(options, files),
    }
    with locked(options.out):
        run_stages(options, log, trainings)


def run_stages(options: QuickstartOptions, log: StageLog, trainings: Trainings) -> None:
    """The data, each training, evaluation, export and report. Each training begins where the one before it ended."""
    out, runs = options.out, dict[str, Run]()
    _check_unchanged(options, log)
    log.stage("data", lambda: make_data(options, log))
    files = data_files(options)
    for name, settings in trainings.items():
        run = settings(files)
        skipped = f"skipped: this data has no {NEEDS[name]} to learn from"
        log.stage(name, partial(_train, options, run, log.console) if run else partial(str, skipped))
        if run:
            runs[name] = run
        if name == "pretrain":
            _record_tokens(log, runs[name])
    log.stage("evaluate", lambda: _evaluate(out, files, runs))
    log.stage("export", lambda: _export(out, out / [*runs][-1], log))
    log.record(next=f"{own_command()} serve {shlex.quote(str(out))}")
    record, page = write_page([out])
    log.console.print(Text(f"report: {page}"))
    print_summary(record, log.console)
    talk = f"or talk here: {own_command()} chat {shlex.quote(str(out))}"
    log.console.print(Text(f"      then open {ADDRESS} in a browser; {talk}"))


def _check_unchanged(options: QuickstartOptions, log: StageLog) -> None:
    """Raises UserError if the user's files are not those of the data stage: size and time were chosen for these."""
    if log.facts.get("own_files", content := _own_files(options)) == content:
        return
    raise UserError("the data have changed since this folder was begun", where=options.data, next_step=START_ANEW)


def _own_files(options: QuickstartOptions) -> list[list[Any]]:
    """Size and hash of each file of the user's own."""
    own = [Path(name) for name in data_names(options) if name not in (TOYWORLD, *catalogue.CATALOGUE)]
    return [content_of(file) for file in (records.list_files(own) if own else ())]


def source_of(options: QuickstartOptions, without: Sequence[str] = ()) -> str:
    """A description of `--data`. Does not read or download anything, but a missing file is an error."""
    if options.data == TOYWORLD:
        return "the toy world, made here"
    sources = []
    for name in data_names(options):
        if name in without:
            continue
        if name in catalogue.CATALOGUE:
            sources.append(catalogue.CATALOGUE[name].title)
        elif is_data_name(Path(name)):
            sources.append(Path(name).name)
        else:
            wanted = "a file, a folder, toyworld alone, or one of " + ", ".join(catalogue.CATALOGUE)
            raise UserError("no such file, and no such name in the catalogue", where=name, wanted=wanted)
    return ", ".join(sources)


def data_names(options: QuickstartOptions) -> tuple[str, ...]:
    """The names in `--data`. Raises UserError if there are none."""
    names: tuple[str, ...] = convert(tuple[str, ...], options.data, "--data")
    if not names:
        wanted = "toyworld, files, folders or names"
        raise UserError("no data given", where="--data", got=repr(options.data), wanted=wanted)
    return names


TOYWORLD_SIZES = {"documents": 16_000, "conversations": 19_000, "preferences": 1_000, "prompts": 20_000}
TOYWORLD_FILES = ("pretrain", "sft", "dpo", "rl")
TOYWORLD_SEED = 1
QUESTIONS_PER_KIND = 20


def make_data(options: QuickstartOptions, log: StageLog) -> str:
    folder = options.out / "data"
    if options.data == TOYWORLD:
        make_toyworld(options)
    else:
        for name in data_names(options):
            if name in catalogue.CATALOGUE:
                catalogue.get(name, folder / name)
    files = data_files(options)
    if not files.documents:
        got = units.listing([f"{name} (chats)" for name in files.chats] + files.unused)
        step = "Add a text: --data TEXT.txt,CHATS.jsonl"
        raise UserError("there is no text to pretrain on", where=options.data, got=got, next_step=step)
    layer = {"data": {"train": files.documents, "clean": cleaning(options), "val_fraction": HELD_OUT_OF_REAL_TEXT}}
    corpus = Corpus(resolve_run("tiny", layer, parse_overrides(_overrides(options, "pretrain"))).data)
    bad_records = corpus.counts()
    facts = survey.DocumentStats(bad_records).count(corpus.records(bad_records))
    source = source_of(options, files.unused_names)
    log.record(
        own_files=_own_files(options),
        data={
            "source": source,
            "documents": facts.num_records,
            "bytes": facts.num_bytes,
            "han_fraction": facts.scripts["Han"],
            "warnings": facts.warnings,
            **bad_records.summary(),
            "files_sha256": {path.name: content_of(path)[1] for path in corpus.files[:20]},
        },
    )
    note = f"{facts.num_records:,} texts, {units.megabytes(facts.num_bytes)}, from {source}"
    if cleaned := bad_records.note():
        note += f"; {cleaned}"
    if 2 * bad_records.left_out > bad_records.records:
        note += "; to keep them, add data.clean="
    return note + (f"; not used: {units.listing(files.unused)}" if files.unused else "")


def make_toyworld(options: QuickstartOptions) -> None:
    toyworld.write(options.out / "data", seed=TOYWORLD_SEED, **options.toyworld_sizes())


def data_files(options: QuickstartOptions) -> DataFiles:
    """The training files, sorted into texts, conversations and unused ones."""
    folder, files = options.out / "data", DataFiles([], [])
    if options.data == TOYWORLD:
        documents, chats, preferences, prompts = ([str(folder / f"{name}.jsonl")] for name in TOYWORLD_FILES)
        return DataFiles(documents, chats, preferences, prompts, folder / "eval.jsonl")
    for name in data_names(options):
        path = folder / name if name in catalogue.CATALOGUE else Path(name)
        found, before = records.list_files([path]), len(files.unused)
        for file in found:
            named = convert(str, str(file), "--data")
            try:
                kind: str = records.sniff(file)
            except UserError as error:
                if not path.is_dir():
                    raise
                kind = error.what  # such as the facts beside saved pages
            if kind in options.uses:
                getattr(files, kind).append(named)
            else:
                files.unused.append(f"{named} ({kind})")
        if len(files.unused) == before + len(found):
            files.unused_names.append(name)
    return files


SHORT_STEPS = {"pretrain": 12, "sft": 8}
PRETRAIN_SHARE = 0.4  # of the time, for data of one's own with conversations


def settings_for(stage: str, settings: Sequence[str], prefixes: Sequence[str]) -> list[str]:
    """Settings of one stage from the command line: `sft.a.b=c` is for SFT, those without a prefix for pretraining."""
    if stage in prefixes:
        return [item.removeprefix(f"{stage}.") for item in settings if item.startswith(f"{stage}.")]
    return [item for item in settings if not item.startswith(tuple(f"{prefix}." for prefix in prefixes))]


def _overrides(options: QuickstartOptions, stage: str) -> list[str]:
    overrides = settings_for(stage, options.settings, options.prefixes)
    if options.short:
        intervals = [f"{name}.every=4" for name in ("eval", "sample", "checkpoint", "log")]
        overrides = [f"max_steps={SHORT_STEPS[stage]}", *intervals, *overrides]
    return overrides


def _pretraining(options: QuickstartOptions, files: DataFiles, log: StageLog) -> Run:
    toy = options.data == TOYWORLD
    val_fraction = 0.01 if toy else HELD_OUT_OF_REAL_TEXT
    layer: dict[str, Any] = {
        "out": str(options.out / "pretrain"),
        "data": {"train": files.documents, "clean": cleaning(options), "val_fraction": val_fraction},
        "eval": {"sequences": 128 if toy else 1024},
    }
    requested = parse_overrides(_overrides(options, "pretrain"))
    run = resolve_run("tiny", layer, requested)
    if not toy:
        share = PRETRAIN_SHARE if files.chats else 1.0
        run = fit_to_text(run, requested, share * options.seconds, log, has_chats=bool(files.chats))
    elif not requested.keys() & {"max_steps", "epochs"}:
        why = f"this machine is slow or busy; for all of them: max_steps={run.max_steps}"
        run = decide(run, "max_steps", pretrain_steps(run, log), why)
    return with_prompts(_in_one_pass(run, requested, options), toy)


def _in_one_pass(run: Run, requested: Layer, options: QuickstartOptions) -> Run:
    """On a CPU a step is two passes otherwise, so that two processes learn the same bits."""
    if "batch" in requested or options.launch != LaunchOptions():
        return run
    return decide(run, "batch.micro_size", run.batch.size, "one process trains: a step is quicker in one pass")


def _finetuning(options: QuickstartOptions, files: DataFiles) -> Run | None:
    if not files.chats:
        return None
    layer: dict[str, Any] = {
        "out": str(options.out / "sft"),
        "init_from": str(options.out / "pretrain"),
        "data": {"train": files.chats, "clean": cleaning(options), "val_fraction": 0.01},
        "eval": {"questions": str(files.questions or "")},
    }
    requested = parse_overrides(_overrides(options, "sft"))
    toy = options.data == TOYWORLD
    run = with_prompts(_in_one_pass(resolve_run("tiny_sft", layer, requested), requested, options), toy)
    if requested.keys() & {"max_steps", "epochs"}:
        return run
    why = f"this machine is slow or busy; for all of them: sft.max_steps={SFT_STEPS}"
    least = MIN_SFT_STEPS if toy else 100
    return decide(run, "max_steps", sft_steps(options.out / "pretrain", options.seconds, least), why)


def cleaning(options: QuickstartOptions) -> tuple[str, ...]:
    """Rules for the user's own data. What is made or downloaded here is clean."""
    return () if set(data_names(options)) <= {TOYWORLD, *catalogue.CATALOGUE} else ("default",)


def with_prompts(run: Run, toy: bool) -> Run:
    """The run with prompts for its samples: those of its settings, else the toy world's, or some of its own data."""
    prompts: tuple[str, ...] = STORY_PROMPTS if run.data.format == "documents" else CHAT_PROMPTS
    if not toy:
        prompts = Corpus(run.data).prompts(len(prompts))
    return with_settings(run, {"sample.prompts": run.sample.prompts or prompts})


def _train(options: QuickstartOptions, run: Run, console: Console) -> str:
    outcome = train_in(options.launch, run, console)
    text = f"{units.count(outcome['tokens'])} tokens at {units.count(outcome['tokens_per_second'])}/s"
    if "val_bits_per_byte" in outcome:
        return f"{text}, held-out {outcome['val_bits_per_byte']:.3f} bits per byte"
    if "val_reward_accuracy" in outcome:
        return f"{text}, {outcome['val_reward_accuracy']:.0%} of held-out pairs in their order"
    if "val_reward" in outcome:
        return f"{text}, mean reward of held-out prompts {outcome['val_reward']:.3f}"
    return f"{text}, held-out loss {outcome['val_loss']:.3f} nats per token"


def _record_tokens(log: StageLog, run: Run) -> None:
    """Record statistics of the tokenizer and the shards, for the report."""
    folder = RunDir(Path(run.out))
    if "choice" in log.facts:
        compare_choice(log, RunRecord(folder.path))
    train, validation = TokenShards(folder.shards / "train"), TokenShards(folder.shards / "validation")
    tokenizer = Tokenizer.load(folder.tokenizer)
    tokens = train.num_tokens + validation.num_tokens
    num_bytes = train.num_bytes + validation.num_bytes
    counts = {"tokens": train.num_tokens, "validation_tokens": validation.num_tokens}
    log.record(
        data={**log.facts["data"], **counts, "bytes_per_token": num_bytes / tokens},
        tokenizer={"vocabulary": tokenizer.size, "sha256": sha256_text(tokenizer.fingerprint)},
    )


def _evaluate(out: Path, files: DataFiles, runs: Mapping[str, Run]) -> str:
    """Accuracy on questions if the data have some (the toy world), else bits per byte compared with zstd."""
    if files.questions is None:
        return _compare_with_zstd(out, runs["pretrain"])
    return _ask(out, files.questions, list(runs))


def _ask(out: Path, path: Path, stages: Sequence[str]) -> str:
    """Ask the models of the stages the held-out questions; writes evaluation.json, with examples of the first and the
    last one."""
    questions, first, last = Questions(path), stages[0], stages[-1]
    rows: list[dict[str, Any]] = []
    answers: dict[str, list[scorer.Graded]] = {}
    for stage in stages:
        trained = load_trained(out / stage)
        answers[stage] = scorer.grade(questions, questions.requests(), trained.model, trained.tokenizer)
        rows += scorer.score_rows(stage, answers[stage])
    stories = [graded for graded in answers[last] if not graded.request.is_counted]
    examples = [
        {
            "kind": after.request.kind,
            "language": after.request.language,
            "question": after.request.text,
            "answer": after.request.answer,
            first: before.text,
            last: after.text,
            f"{first}_right": before.is_correct,
            f"{last}_right": after.is_correct,
        }
        for before, after in zip(answers[first], answers[last], strict=True)
        if after.request.is_counted
    ]
    write_json(
        out / "evaluation.json",
        {
            "questions": len(examples),
            "rows": rows,
            "stories": {
                "asked": len(stories),
                "with_required_words": sum(graded.is_correct for graded in stories),
                "examples": [
                    {"prompt": graded.request.text, "text": graded.text, "language": graded.request.language}
                    for graded in stories[:: max(1, len(stories) // 6)]
                ],
            },
            "examples": examples[:: max(1, len(examples) // EXAMPLES_SHOWN)],
        },
    )
    by_language = ", ".join(
        f"{name} {scorer.accuracy(answers['sft'], code):.0%}" for name, code in (("English", "en"), ("Chinese", "zh"))
    )
    chance = sum(row["chance"] * row["asked"] for row in rows if row["stage"] == "sft")
    total = sum(row["asked"] for row in rows if row["stage"] == "sft")
    return (
        f"{scorer.accuracy(answers['sft']):.0%} of {total} held-out questions right ({by_language}; "
        f"chance {chance / total:.0%}; before SFT {scorer.accuracy(answers['pretrain']):.0%})"
        + "".join(f"; after {stage} {scorer.accuracy(answers[stage]):.0%}" for stage in stages[2:])
    )


def _compare_with_zstd(out: Path, run: Run) -> str:
    """Compare bits per byte of the held-out text, model and `zstd -19`; writes compression.json."""
    trained = load_trained(out / "pretrain")
    texts = list(Corpus(run.data).texts(held_out=True))
    if not texts:
        return "no held-out text to compress (data.validation=none)"
    model_bits, num_bytes, *_ = score_texts(trained.model, trained.tokenizer, texts, seq_len=run.data.seq_len)
    zstd_bits = zstd_bits_per_byte("\n".join(texts))
    verdict = "below" if model_bits < zstd_bits else "above"
    note = (
        f"{model_bits:.3f} bits per byte on {units.megabytes(num_bytes)} of held-out text, "
        f"{abs(model_bits - zstd_bits):.3f} {verdict} zstd -19 ({zstd_bits:.3f})"
    )
    bits = {"zstd_19_bits_per_byte": zstd_bits, "model_bits_per_byte": model_bits}
    write_json(out / "compression.json", {"validation_bytes": num_bytes, **bits, "note": note})
    return note


def _export(out: Path, last: Path, log: StageLog) -> str:
    trained = load_trained(last)
    exported = export(trained.model, trained.tokenizer, out / "export", card=model_card(trained, out))
    diff = exported.largest_difference
    facts = {"verified": diff is not None, "largest_logit_difference": diff, "note": exported.note}
    log.record(export={"path": str(exported.path), **facts})
    return f"{exported.path}: {exported.note}"
