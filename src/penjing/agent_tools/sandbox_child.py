"""Run one Python file contained: agent_tools/sandbox.py starts this as a process of its own, on the standard library
alone.

Before the file runs, the process gives up, for good:
- memory, CPU time, file sizes, open files, threads (limits), and every capability that root has;
- files: it may read the interpreter's libraries, and read and write files in its own folder (Landlock, Linux 5.13);
- system calls: only those of a list are allowed, some with their arguments checked (seccomp). There is no call on the
  list that changes modes, owners, times or extended attributes, makes links, folders, sockets or processes, starts a
  program, or signals another process. The 32-bit calls and the x32 calls of x86-64 end the process. No file can be
  mapped: a mapping keeps the space of a deleted file, and no limit counts it. So the libraries of the standard
  library's modules are loaded before.
If the filter or Landlock cannot be had, the file is not run.

Landlock alone is not enough: it has no rights for modes, times, owners and attributes, and before ABI 3 (Linux 6.2)
none for emptying a file. The filter alone is not enough either: it cannot see a path.

It writes to one pipe what is missing here (an empty line: nothing), waits for a word from a second pipe, runs the file,
and writes that word to the first pipe if the file ran to its end. The file can write to the first pipe, as it runs in
the same process, but it is not shown the word. Code that searches the memory of its own process can find it all the
same: an interpreter cannot be protected from what it runs.
"""

import contextlib
import ctypes
import importlib.machinery
import os
import resource
import struct
import sys
import types

PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 4, 38, 22, 2
NOBODY = 65534
EPERM, ENOSYS, EOPNOTSUPP = 1, 38, 95
MOST_TASKS = 16384  # threads and processes of the user: a bound on the threads it can make before its caller looks
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the tables, AUDIT_ARCH_*

# System calls by number: (x86-64, AArch64); -1 where the machine has none.
ALLOWED = {
    # memory, threads, signals to itself
    "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216), "madvise": (28, 233),
    "msync": (26, 227), "brk": (12, 214), "membarrier": (324, 283), "futex": (202, 98), "set_robust_list": (273, 99),
    "rseq": (334, 293), "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "exit": (60, 93),
    "exit_group": (231, 94), "restart_syscall": (219, 128), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132), "pause": (34, -1), "alarm": (37, -1), "getitimer": (36, 102), "setitimer": (38, 103),
    # time, and facts about itself
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "time": (201, -1), "times": (100, 153), "getrusage": (98, 165), "getrlimit": (97, 163),
    "sysinfo": (99, 179), "uname": (63, 160), "getrandom": (318, 278), "getpid": (39, 172), "gettid": (186, 178),
    "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158), "getpriority": (140, 141),
    # open files
    "read": (0, 63), "readv": (19, 65), "pread64": (17, 67), "write": (1, 64), "writev": (20, 66),
    "pwrite64": (18, 68), "sendfile": (40, 71), "copy_file_range": (326, 285), "lseek": (8, 62), "close": (3, 57),
    "dup": (32, 23), "dup2": (33, -1), "dup3": (292, 24), "pipe": (22, -1), "pipe2": (293, 59), "fsync": (74, 82),
    "fdatasync": (75, 83), "ftruncate": (77, 46), "poll": (7, -1), "ppoll": (271, 73), "select": (23, -1),
    "pselect6": (270, 72), "fstat": (5, 80),
    # names: what may be opened, made, renamed and removed is Landlock's
    "stat": (4, -1), "lstat": (6, -1), "newfstatat": (262, 79), "statx": (332, 291), "access": (21, -1),
    "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, -1), "readlinkat": (267, 78),
    "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "rename": (82, -1),
    "renameat": (264, 38), "renameat2": (316, 276), "unlink": (87, -1), "unlinkat": (263, 35),
    "umask": (95, 166),
}  # fmt: skip
# Allowed with certain arguments.
CHECKED = {
    "open": (2, -1), "openat": (257, 56), "ioctl": (16, 29), "fcntl": (72, 25), "kill": (62, 129),
    "tgkill": (234, 131), "prlimit64": (302, 261), "prctl": (157, 167), "clone": (56, 220), "mmap": (9, 222),
}  # fmt: skip
CAPSET = (126, 91)
# From here on numbers are the same everywhere, and the C library tries a call before it takes an older one. It is told
# that they do not exist: clone3 hides its flags in memory, openat2 too, where a filter cannot see them.
FIRST_NEW_CALL = 424
X32 = 0x40000000

ACCESS_MODE, TRUNCATE = 0o3, 0o1000  # bits of the flags of open
IOCTLS = (0x5401, 0x5421, 0x5450, 0x5451)  # TCGETS, FIONBIO, FIONCLEX, FIOCLEX
# Duplicate, read and set flags, lock. Not F_SETOWN and F_SETSIG, by which the kernel signals any process of the user.
FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 1030)
PRCTLS = (15, 16)  # the name of a thread
# CLONE_VM, _FS, _FILES, _SIGHAND, _THREAD, _SYSVSEM, _SETTLS, _PARENT_SETTID, _CHILD_CLEARTID, _DETACHED
CLONE_THREAD, CLONE_FILES, CLONE_FLAGS = 0x00010000, 0x00000400, 0x007D0F00
MAP_ANONYMOUS = 0x20

# Instructions of the kernel's classic BPF.
LOAD, AND, EQUAL, AT_LEAST, ANY_BIT, GIVE = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
Program = list[tuple[int, int, int, int]]  # code, steps if true, steps if false, value


def _argument(index: int) -> int:
    return 16 + 8 * index  # its lower half


def _one_of(index: int, values: tuple[int, ...]) -> Program:
    """Allow a call if the lower half of an argument is one of `values`."""
    program: Program = [(LOAD, 0, 0, _argument(index))]
    for value in values:
        program += [(EQUAL, 0, 1, value), (GIVE, 0, 0, ALLOW)]
    return [*program, (GIVE, 0, 0, ERROR | EPERM)]


def _opening(index: int) -> Program:
    """Allow open if the flags do not empty a file that they do not open for writing.

    Before ABI 3 Landlock looks only at whether a file is opened to read or to write. O_RDONLY | O_TRUNC empties a file
    that may only be read, and access mode 3, which opens for neither, empties any.
    """
    program: Program = [(LOAD, 0, 0, _argument(index)), (AND, 0, 0, ACCESS_MODE | TRUNCATE)]
    for flags in (TRUNCATE, 3, TRUNCATE | 3):
        program += [(EQUAL, 0, 1, flags), (GIVE, 0, 0, ERROR | EPERM)]
    return [*program, (GIVE, 0, 0, ALLOW)]


def _checks(pid: int) -> dict[str, Program]:
    refuse = (GIVE, 0, 0, ERROR | EPERM)
    return {
        "open": _opening(1),
        "openat": _opening(2),
        "ioctl": _one_of(1, IOCTLS),
        "fcntl": _one_of(1, FCNTLS),
        "prctl": _one_of(0, PRCTLS),
        "kill": _one_of(0, (pid,)),
        "tgkill": _one_of(0, (pid,)),
        # Its own limits may be read: pid 0, and no new limits (a pointer of 64 bits).
        "prlimit64": [
            (LOAD, 0, 0, _argument(0)), (EQUAL, 1, 0, 0), refuse,
            (LOAD, 0, 0, _argument(2)), (EQUAL, 1, 0, 0), refuse,
            (LOAD, 0, 0, _argument(2) + 4), (EQUAL, 1, 0, 0), refuse,
            (GIVE, 0, 0, ALLOW),
        ],
        # Memory, and no file.
        "mmap": [(LOAD, 0, 0, _argument(3)), (ANY_BIT, 1, 0, MAP_ANONYMOUS), refuse, (GIVE, 0, 0, ALLOW)],
        # A thread, and no process or namespace. Open files are limited by table: threads share that of the process.
        "clone": [
            (LOAD, 0, 0, _argument(0)), (ANY_BIT, 1, 0, CLONE_THREAD), refuse, (ANY_BIT, 1, 0, CLONE_FILES), refuse,
            (AND, 0, 0, ~CLONE_FLAGS & 0xFFFFFFFF), (EQUAL, 1, 0, 0), refuse,
            (GIVE, 0, 0, ALLOW),
        ],
    }  # fmt: skip


def filter_program(machine: str, pid: int) -> Program:
    """The filter for the process `pid`. Raises KeyError for another kind of processor."""
    column, architecture = ARCHITECTURES[machine]
    program: Program = [
        (LOAD, 0, 0, 4),  # the architecture
        (EQUAL, 1, 0, architecture),
        (GIVE, 0, 0, KILL),
        (LOAD, 0, 0, 0),  # the number of the call
        (AT_LEAST, 0, 1, X32),  # no machine has such numbers but x86-64, for its calls with pointers of 32 bits
        (GIVE, 0, 0, KILL),
    ]
    for name, check in _checks(pid).items():
        if CHECKED[name][column] >= 0:
            program += [(EQUAL, 0, len(check), CHECKED[name][column]), *check]
    for numbers in ALLOWED.values():
        if numbers[column] >= 0:
            program += [(EQUAL, 0, 1, numbers[column]), (GIVE, 0, 0, ALLOW)]
    return [*program, (AT_LEAST, 0, 1, FIRST_NEW_CALL), (GIVE, 0, 0, ERROR | ENOSYS), (GIVE, 0, 0, ERROR | EPERM)]


def _filter_calls(libc: ctypes.CDLL) -> str:
    program = filter_program(os.uname().machine, os.getpid())
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    pointer = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer)))
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, pointer, 0, 0) == 0:
        return ""
    return f"seccomp filters ({os.strerror(ctypes.get_errno())})"


CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
# Rights of Landlock. Without a right to make folders, thousands inside one another cannot come about, which could not
# be cleared away again.
WRITE_FILE, READ_FILE, READ_FOLDER, REMOVE_FILE, MAKE_FILE, TRUNCATE_FILE = (1 << bit for bit in (1, 2, 3, 5, 8, 14))
OWN = WRITE_FILE | READ_FILE | READ_FOLDER | REMOVE_FILE | MAKE_FILE | TRUNCATE_FILE
RIGHTS_OF_ABI = {1: 13, 2: 14, 3: 15, 4: 15}  # the number of rights; 16 from ABI 5 on


def _readable() -> set[str]:
    """Folders of the interpreter's library and of the shared libraries that it loads."""
    libraries = {"/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/usr/share/zoneinfo"}
    libraries |= {os.path.join(sys.base_prefix, name) for name in ("lib", "lib64")}
    return libraries | {os.path.realpath(path) for path in sys.path if os.path.isdir(path)}


def _ruleset(libc: ctypes.CDLL, folder: str, newest_abi: int) -> tuple[int, str]:
    """The rules of Landlock, as an open file, and what is missing."""
    abi = libc.syscall(CREATE_RULESET, None, 0, 1)
    if newest_abi < 1:
        abi, error = -1, EOPNOTSUPP
    else:
        error = ctypes.get_errno()
    if abi < 1:
        why = {
            ENOSYS: "not in this kernel: it is older than 5.13, or was built without it",
            EOPNOTSUPP: 'switched off when the kernel started: add "landlock" to lsm= on its command line',
        }.get(error, f"{os.strerror(error)}: a container's own filter may forbid it")
        return -1, f"Landlock ({why})"
    abi = min(abi, newest_abi)
    rights = (1 << RIGHTS_OF_ABI.get(abi, 16)) - 1
    attributes = struct.pack("Q", rights)
    if abi >= 4:
        attributes += struct.pack("Q", 3)  # TCP: neither bind nor connect
    if abi >= 6:
        attributes += struct.pack("Q", 3)  # no abstract sockets and no signals to the outside
    ruleset = libc.syscall(CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return -1, f"Landlock ({os.strerror(ctypes.get_errno())})"
    rules = [(path, READ_FILE | READ_FOLDER) for path in _readable()]
    rules += [("/dev/null", READ_FILE | WRITE_FILE), ("/dev/urandom", READ_FILE), (folder, OWN & rights)]
    for path, allowed in rules:
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, opened))
        failed = libc.syscall(ADD_RULE, ruleset, 1, rule, 0)
        os.close(opened)
        if failed and path == folder:
            return -1, f"Landlock (no rule can be made for {folder})"
    return ruleset, ""


def _become_nobody(folder: str, file: str) -> None:
    """As root: become the user nobody, if it can reach the interpreter and the folder, which becomes its own. If not (a
    Python in /root), or without the right to: the process stays root, without capabilities."""
    try:
        os.setgroups([])
        os.chown(folder, NOBODY, NOBODY)
        os.chown(file, NOBODY, NOBODY)
        os.chmod(os.path.dirname(folder), 0o711)
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
        for needed in (os.__file__, file):
            open(needed, "rb").close()
        os.seteuid(0)
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError:
        with contextlib.suppress(OSError):
            os.seteuid(0)
            os.setegid(0)
            os.chown(folder, 0, 0)
            os.chown(file, 0, 0)


def shut_in(folder: str, file: str, newest_abi: int) -> str:
    """Give up everything; what is missing to do so, in words, or nothing."""
    if os.uname().machine not in ARCHITECTURES:
        return "a filter for the system calls of this processor"
    libc = ctypes.CDLL(None, use_errno=True)
    ruleset, missing = _ruleset(libc, folder, newest_abi)
    if missing:
        return missing
    if os.geteuid() == 0:
        _become_nobody(folder, file)
    nothing = struct.pack("6I", 0, 0, 0, 0, 0, 0)
    column = ARCHITECTURES[os.uname().machine][0]
    if libc.syscall(CAPSET[column], struct.pack("Ii", 0x20080522, 0), nothing) != 0:
        return f"capset ({os.strerror(ctypes.get_errno())})"
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # programs that crash start no handler of core dumps
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return f"no_new_privs ({os.strerror(ctypes.get_errno())})"
    if libc.syscall(RESTRICT_SELF, ruleset, 0) != 0:
        return f"Landlock ({os.strerror(ctypes.get_errno())})"
    os.close(ruleset)
    return _filter_calls(libc)


def limit(seconds: int, memory_bytes: int, file_bytes: int) -> None:
    """Limits that the process cannot raise again. If memory runs out, it goes before the process that trains."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    for kind, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, MOST_TASKS),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def load_libraries() -> None:
    """Load what the modules of the standard library are made of, as no file can be mapped later.

    A later import finds the library that is loaded. Not of use here: Tk, and what Python tests itself with.
    libgcc_s: the C library loads it when a thread leaves by pthread_exit.
    """
    found = ["libgcc_s.so.1"]
    for folder in filter(os.path.isdir, sys.path):
        for name in os.listdir(folder):
            if name.endswith(".so") and not name.startswith(("_tkinter", "_test", "_xx", "xx")):
                found.append(os.path.join(folder, name))
    for library in found:
        with contextlib.suppress(OSError):
            ctypes.CDLL(library)


def take(pipe: int) -> bytes:
    """What comes through a pipe, which is closed behind it."""
    found = os.read(pipe, 4096)
    os.close(pipe)
    return found


def run_as_main(file: str) -> bool:
    """Run a file as the main program: true at its end. Raises whatever it raises. Not with runpy, whose `with` blocks
    the file could teach to swallow its exit."""
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
    report, secret, newest_abi, seconds, memory_bytes, file_bytes = map(int, numbers)
    file = os.path.join(folder, name)
    limit(seconds, memory_bytes, file_bytes)
    load_libraries()
    missing = shut_in(folder, file, newest_abi)
    os.write(report, f"{missing}\n".encode())
    if missing:
        os._exit(1)
    sys.argv = [file]
    sys.orig_argv[:] = sys.argv
    sys.dont_write_bytecode = True
    # The caller sends the word once it has read what is missing, so that the file cannot answer in this one's place.
    # While the file runs, the word lies on the interpreter's own stack alone: no variable of any frame holds it.
    tell(report, take(secret), run_as_main(file))


if __name__ == "__main__":
    main()
