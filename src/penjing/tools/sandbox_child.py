"""Runs one Python file shut in: tools/sandbox.py starts this as a process of its own, on the standard library alone.

Before the file is run, the process gives up: memory, CPU time, file sizes (limits); the network (a namespace of its
own where the system grants one, and always a filter on system calls); other processes, new programs and new processes
(the same filter); every file but the interpreter's and those of its own folder, in which it can make no further folders
(Landlock, Linux 5.13). What it gave up cannot be taken back. If the filter or Landlock cannot be had, the file is not
run.

Its last words go to a pipe: how far it was shut in, and, once the file ran to its end, a word that it was told through
another pipe. The file can write to the first pipe, as it runs in the same process, but it is not shown the word. Code
that searches the memory of its own process can find it all the same: no interpreter is shut against what it runs.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import json
import os
import platform
import resource
import struct
import sys
import types

CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWNET = 0x08000000, 0x10000000, 0x40000000
CLONE_THREAD = 0x00010000
MAKE_FOLDER = 1 << 7  # a right of Landlock
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
NOBODY = 65534
EPERM, ENOSYS = 1, 38

# System calls by number: (x86-64, AArch64). Those that reach the network, other processes, new programs, mounts, shared
# memory or limits of others; 0 where the machine has none.
DENIED = {
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "sendto": (44, 206),
    "sendmsg": (46, 211), "io_uring_setup": (425, 425),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "fork": (57, 0), "vfork": (58, 0), "execve": (59, 221), "execveat": (322, 281), "setsid": (112, 157),
    "setpgid": (109, 154), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "bpf": (321, 280), "userfaultfd": (323, 282),
    "perf_event_open": (298, 241), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "prlimit64": (302, 261), "setrlimit": (160, 164), "setpriority": (141, 140), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "ioprio_set": (251, 30),
}  # fmt: skip
CLONE, CLONE3 = (56, 220), (435, 435)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def filter_program(machine: str) -> bytes:
    """The filter on system calls, in the kernel's classic BPF. Raises KeyError for another kind of processor."""
    column, audit = ARCHITECTURES[machine]
    load, equal, above, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050000 | EPERM, 0x00050000 | ENOSYS
    program = [
        _instruction(load, 4),  # the architecture
        _instruction(equal, audit, 1, 0),
        _instruction(give, 0x80000000),  # end the process
        _instruction(load, 0),  # the number of the call
    ]
    if machine == "x86_64":  # the 32-bit pointer variant has numbers of its own
        program += [_instruction(above, 0x40000000, 0, 1), _instruction(give, refuse)]
    # Threads may be made, processes not. clone3 hides its flags in memory: without it the C library takes clone.
    program += [_instruction(equal, CLONE3[column], 0, 1), _instruction(give, unknown)]
    program += [
        _instruction(equal, CLONE[column], 0, 4),
        _instruction(load, 16),  # the first argument: flags
        _instruction(any_bit, CLONE_THREAD, 0, 1),
        _instruction(give, allow),
        _instruction(give, refuse),
    ]
    for number in (numbers[column] for numbers in DENIED.values()):
        if number:
            program += [_instruction(equal, number, 0, 1), _instruction(give, refuse)]
    return b"".join([*program, _instruction(give, allow)])


def _filter_calls(libc: ctypes.CDLL) -> bool:
    try:
        code = filter_program(platform.machine())
    except KeyError:
        return False
    buffer = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer)))
    return bool(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0) == 0)


def _shut_files(libc: ctypes.CDLL, folder: str) -> bool:
    """Landlock: the interpreter's files may be read, those of `folder` also written, and no others opened."""
    create, add, restrict = 444, 445, 446
    abi = libc.syscall(create, None, 0, 1)
    if abi < 1:
        return False
    bits = {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)  # rights that this kernel knows
    attributes = struct.pack("Q", (1 << bits) - 1)
    if abi >= 4:
        attributes += struct.pack("Q", 3)  # TCP: neither bind nor connect
    if abi >= 6:
        attributes += struct.pack("Q", 3)  # no abstract sockets and no signals to the outside
    ruleset = libc.syscall(create, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    read_file, read_folder = 1 << 2, 1 << 3
    interpreter = {sys.prefix, sys.base_prefix, *(os.path.realpath(path) for path in sys.path if os.path.isdir(path))}
    libraries = {"/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/usr/share/zoneinfo"}
    rules = [(path, read_file | read_folder) for path in interpreter | libraries]
    rules += [("/dev/null", read_file | 1 << 1), ("/dev/urandom", read_file), ("/dev/zero", read_file)]
    # Thousands of folders inside one another could not be cleared away again.
    rules.append((folder, ((1 << bits) - 1) & ~MAKE_FOLDER))
    for path, rights in rules:
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, opened))
        failed = libc.syscall(add, ruleset, 1, rule, 0)
        os.close(opened)
        if failed and path == folder:
            return False
    return bool(libc.syscall(restrict, ruleset, 0) == 0)


def shut_in(folder: str) -> dict[str, str]:
    """Give up everything; returns by what means the network and the files were shut. Empty: it cannot be done here."""
    libc = ctypes.CDLL(None, use_errno=True)
    network = "filter"
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC) == 0:
        network = "namespace and filter"
    elif os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or not _shut_files(libc, folder) or not _filter_calls(libc):
        return {}
    return {"network": network, "files": "landlock"}


def limit(seconds: int, memory_bytes: int, file_bytes: int) -> None:
    """Limits that the process cannot raise again."""
    for kind, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def take(pipe: int) -> bytes:
    """What lies in a pipe, which is closed behind it."""
    found = os.read(pipe, 4096)
    os.close(pipe)
    return found


def run_as_main(file: str) -> bool:
    """Run a file as the main program: true at its end. Raises whatever it raises.

    Not with runpy, whose `with` blocks the file could teach to swallow its exit.
    """
    module = types.ModuleType("__main__")
    module.__file__ = file
    sys.modules["__main__"] = module
    importlib.machinery.SourceFileLoader("__main__", file).exec_module(module)
    sys.stdout.flush()
    return True


def tell(report: int, word: bytes, through: bool) -> None:
    if through:
        os.write(report, word)


def main() -> None:
    folder, name, *numbers = sys.argv[1:]
    report, secret, seconds, memory_bytes, file_bytes = map(int, numbers)
    limit(seconds, memory_bytes, file_bytes)
    shut = shut_in(folder)
    os.write(report, (json.dumps(shut) + "\n").encode())
    if not shut:
        os._exit(1)
    file = os.path.join(folder, name)
    sys.argv = [file]
    sys.orig_argv[:] = sys.argv
    sys.dont_write_bytecode = True
    # While the file runs, the word lies on the interpreter's own stack alone: no variable of any frame holds it.
    tell(report, take(secret), run_as_main(file))


if __name__ == "__main__":
    main()
