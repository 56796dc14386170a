"""The command line: the list of verbs, and the printing of errors. `commands/` defines the verbs."""

import errno
import os
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from penjing import __version__
from penjing.base.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError
from penjing.base.files import disk_error
from penjing.base.markup import Terminal, escape_markup, open_streams
from penjing.base.process_info import run_once_per_launch
from penjing.commands import datasets, exporting, inference, inspection, launching, pipeline, planning

# In the order of `penjing --help`. These modules import torch only when a verb runs.
VERBS: dict[str, typer.Typer | Callable[..., None]] = {
    "quickstart": pipeline.quickstart,
    "evening": pipeline.evening,
    "plan": planning.app,
    "train": pipeline.train,
    "launch": launching.app,
    "chat": inference.chat,
    "serve": inference.serve,
    "ui": inspection.ui,
    "eval": inference.evaluate,
    "generate": inference.generate,
    "export": exporting.export_app,
    "adapter": exporting.adapter_app,
    "average": exporting.average,
    "data": datasets.data_app,
    "tokenizer": datasets.tokenizer_app,
    "watch": inspection.watch,
    "report": inspection.report,
    "show": inspection.show,
    "doctor": inspection.doctor,
}


class _Verbs(typer.core.TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Make a small language model from scratch, on hardware you own. 盆景\n\n"
    "Begin with [bold]penjing quickstart[/]: a model that answers, in a few minutes, on a CPU.",
)
for _name, _verb in VERBS.items():
    if isinstance(_verb, typer.Typer):
        app.add_typer(_verb, name=_name)
    else:
        app.command(_name)(_verb)


@app.command("bench", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def _moved(name: Annotated[str, typer.Argument()] = "") -> None:
    script = f"`python benchmarks/{name or 'NAME'}.py` of penjing's source"
    command = "`penjing plan profile`" if name == "matmul" else script
    raise UserError("moved", where=f"bench {name}".strip(), next_step=f"Run {command}.")


def main(program: typer.Typer = app) -> None:
    """Run a command line. An error that the user can correct is one line and exit code 2, never a traceback."""
    if os.environ.get("PYTHONUTF8") == "0" and sys.getfilesystemencoding() == "ascii":  # Chinese names would be refused
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    open_streams()
    if "--version" in sys.argv[1:2]:
        print(f"penjing {__version__}")
        return
    # The launcher of DeepSpeed adds it to the command; it also sets LOCAL_RANK.
    sys.argv[1:] = [word for word in sys.argv[1:] if not word.startswith(("--local_rank=", "--local-rank="))]
    warnings.showwarning = lambda message, *place: _show_warning(" ".join(str(message).split()))
    # Before torch is there. Else each lost connection of a rank is a page of frames, and DDP warns of its settings.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if sys.platform == "win32":
        _fail("penjing: needs Linux or macOS; on Windows run it in WSL 2", EXIT_USER_ERROR)
    try:
        code = program(standalone_mode=False)
        if code == EXIT_INTERRUPTED:  # newer versions of typer return it, older ones raise
            raise KeyboardInterrupt
        if Terminal.lost:
            raise disk_error(Terminal.lost, Path("standard output"))
        sys.exit(code)
    except UserError as error:
        _fail(f"penjing: {error.line()}", EXIT_USER_ERROR)
    except KeyboardInterrupt:
        _fail("penjing: interrupted", EXIT_INTERRUPTED)
    except PermissionError as error:
        hint = "choose another, or change its permissions"
        _fail(f"penjing: {error.filename}: {error.strerror}; {hint}", EXIT_USER_ERROR)
    except Exception as error:
        from penjing.train.signals import Ended

        if isinstance(error, Ended):
            _fail(f"penjing: {error}", error.exit_code)
        _fail_on_usage(error)
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            _fail(f"penjing: {str(error.filename)[:80]}...: {error.strerror}", EXIT_USER_ERROR)
        raise


@cache
def _show_warning(text: str) -> None:
    """Print a warning on stderr: one line, once, on rank 0, without the line of code that it comes from."""
    if os.environ.get("RANK", "0") == "0":
        Terminal(stderr=True).print(escape_markup("warning", text), highlight=False, soft_wrap=True)


def _fail(line: str, code: int) -> NoReturn:
    """Print one line on stderr, from only one of the processes launched together, and exit."""
    console = Terminal(stderr=True)
    run_once_per_launch(lambda: console.print(line, style="red", highlight=False, soft_wrap=True, markup=False))
    sys.exit(code)


def _setting_of(option: str) -> str:
    """The setting that an unknown option stands for: `--learning_rate` is optimizer.learning_rate; or empty."""
    from penjing.base import config
    from penjing.train.config import Run

    return next(iter(config.settings_named(Run, option.lstrip("-"))), "") if option else ""


def _fail_on_usage(error: Exception) -> None:
    """An unknown, missing or wrong option or argument: one line that names the help page.

    Recognised by its attributes: newer versions of typer carry their own copy of click's classes.
    """
    if not hasattr(error, "format_message") or not hasattr(error, "ctx"):
        if type(error).__name__ == "Abort":
            _fail("penjing: interrupted", EXIT_INTERRUPTED)
        return
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())
        sys.exit(EXIT_USER_ERROR)
    where = error.ctx.command_path if error.ctx else "penjing"
    message = error.format_message().replace("\n", " ").rstrip(".")
    if (setting := _setting_of(str(getattr(error, "option_name", "")))) and where.endswith((" train", " plan run")):
        message += f". Settings have no dashes: {setting}=VALUE"
    _fail(f"{where}: {message}{'' if message.endswith('?') else '.'} See `{where} --help`.", EXIT_USER_ERROR)
