"""Try grammars under limits of time and memory, each in a process of its own. A script: it imports nothing of penjing.

No limit of llguidance itself holds: `multipleOf: 1000003` compiled for 5 s, and six anyOf of four for 1.3 s.
First line of stdin: [tokenizer, vocab_size, stop ids]. Each further line is a grammar; the answer is a line with what
is wrong with it, as JSON.
"""

import contextlib
import json
import os
import resource
import signal
import sys

import llguidance

CPU_SECONDS = 0.5
SECONDS = 5.0  # beside other programs
MEBIBYTES = 64
LEXER_STATES = 20_000  # while an answer is written; a state takes 2 kB


def build(tokenizer: llguidance.LLTokenizer, grammar: str) -> tuple[llguidance.LLMatcher, str]:
    """The matcher, and what is wrong with it."""
    limits = llguidance.LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        return matcher, f"not supported: {(matcher.get_error().splitlines() or [''])[0][:200]}"
    if matcher.is_accepting() or matcher.is_stopped():
        return matcher, "no JSON text fits it"
    matcher.compute_bitmask()
    return matcher, "too large" if matcher.is_error() else ""


def _problem(tokenizer: llguidance.LLTokenizer, grammar: str) -> str:
    """What is wrong with a grammar, tried in a fork."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process, as SIGALRM does
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        with contextlib.suppress(OSError, ValueError):  # no /proc, or no such limit
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[0])
            limit = pages * os.sysconf("SC_PAGE_SIZE") + (MEBIBYTES << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        os.write(writer, json.dumps(build(tokenizer, grammar)[1]).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        reply = file.read()
    os.waitpid(child, 0)
    if not reply:
        return f"too large: its grammar takes over {CPU_SECONDS:g} s or {MEBIBYTES} MiB to compile"
    return str(json.loads(reply))


def main() -> None:
    definition, vocab_size, stop = json.loads(sys.stdin.readline())
    tokenizer = llguidance.LLTokenizer(definition, n_vocab=vocab_size, eos_token=stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the server's group
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what an aborted fork says
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        print(json.dumps(_problem(tokenizer, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
