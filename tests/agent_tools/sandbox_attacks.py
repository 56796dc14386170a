"""Attacks on the sandbox: pieces of Python that raise an error where they are refused.

tests/agent_tools/sandbox_driver.py runs each of them in the sandbox, with these names:

F      a file outside, "42", with an extended attribute where the file system has them; D the folder it lies in
PARENT the process that started the sandbox
call   a system call by its numbers on x86-64 and AArch64; raises OSError where the kernel gives an error
"""

from __future__ import annotations

PREAMBLE = r"""
import ctypes, fcntl, os, resource, signal, socket, stat, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
PARENT = os.getppid()
HERE, AT_CWD = b".", -100
COLUMN = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
def call(x86, arm, *arguments):
    number = (x86, arm)[COLUMN]
    if number < 0:
        raise LookupError("no such call on this machine")
    ctypes.set_errno(0)
    result = libc.syscall(number, *arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def posix(name, *arguments):
    ctypes.set_errno(0)
    result = getattr(libc, name)(*arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def own_file():
    open("mine", "w").close()
    return "mine"
def any_error(results):
    for result in results:
        return result
    raise LookupError("none")
"""

ATTACKS = {
    # modes, owners, times, attributes
    "chmod": "os.chmod(F, 0o777)",
    "chmod of a folder": "os.chmod(D, 0)",
    "chmod at a folder": "os.chmod('file', 0o777, dir_fd=os.open(D, os.O_PATH))",
    "chmod raw": "call(90, -1, F.encode(), 0)",
    "fchmodat raw": "call(268, 53, AT_CWD, F.encode(), 0o777)",
    "fchmodat2": "call(452, 452, AT_CWD, F.encode(), 0o777, 0)",
    "fchmodat2 by an open path": "call(452, 452, os.open(F, os.O_PATH), b'', 0o777, 0x1000)",
    "chmod through /proc": "os.chmod(f'/proc/self/fd/{os.open(F, os.O_PATH)}', 0o777)",
    "fchmod of its output": "os.fchmod(1, 0)",
    "chmod of its output": "os.chmod('../stdout', 0)",
    "chmod of its folder": "os.chmod('.', 0)",
    "chmod of the folder above": "os.chmod('..', 0o777)",
    "chown": "os.chown(F, os.getuid(), os.getgid())",
    "lchown": "os.lchown(F, os.getuid(), os.getgid())",
    "fchownat raw": "call(260, 54, AT_CWD, F.encode(), os.getuid(), os.getgid(), 0)",
    "utime": "os.utime(F, (1, 1))",
    "utimensat raw": "call(280, 88, AT_CWD, F.encode(), None, 0)",
    "utimes raw": "call(235, -1, F.encode(), None)",
    "utime raw": "call(132, -1, F.encode(), None)",
    "setxattr": "os.setxattr(F, 'user.more', b'1')",
    "removexattr": "os.removexattr(F, 'user.mark')",
    "lsetxattr raw": "call(189, 6, F.encode(), b'user.more', b'1', 1, 0)",
    "setxattrat": "call(463, 463, AT_CWD, F.encode(), 0, b'user.more', None, 0)",
    "fsetxattr of its output": "os.setxattr(1, 'user.more', b'1')",
    "flags of its output": "fcntl.ioctl(1, 0x40086602, bytes(8))",
    # content
    "truncate": "os.truncate(F, 0)",
    "truncate raw": "call(76, 45, F.encode(), 0)",
    "open to empty": "os.open(F, os.O_WRONLY | os.O_TRUNC)",
    "open to read, and empty": "os.open(F, os.O_RDONLY | os.O_TRUNC)",
    "open for neither, and empty": "os.open(F, 3 | os.O_TRUNC)",
    "openat raw for neither, and empty": "call(257, 56, AT_CWD, F.encode(), 3 | os.O_TRUNC, 0)",
    "open raw for neither, and empty": "call(2, -1, F.encode(), 3 | os.O_TRUNC, 0)",
    "open for neither": "os.open(F, 3)",
    "openat2": "call(437, 437, AT_CWD, F.encode(), (3 | os.O_TRUNC).to_bytes(8, 'little') + bytes(16), 24)",
    "creat raw": "call(85, -1, F.encode(), 0o777)",
    "open to write": "open(F, 'w')",
    "open to append": "open(F, 'a')",
    "open to read and write": "open(F, 'r+')",
    "a file handle": "call(304, 265, AT_CWD, bytes(64), 0)",
    "a file that was left open": r"""
def regular():
    for f in range(3, 64):
        try:
            if stat.S_ISREG(os.fstat(f).st_mode): yield os.pwrite(f, b"owned", 0)
        except OSError: pass
any_error(regular())""",
    # names
    "a new file": "open(D + '/new', 'x')",
    "a file without a name": "os.open(D, os.O_TMPFILE | os.O_RDWR)",
    "a new folder": "os.mkdir(D + '/new')",
    "a new folder of its own": "os.mkdir('new')",
    "a pipe with a name": "os.mkfifo(D + '/new')",
    "a pipe of its own with a name": "os.mkfifo('new')",
    "a device": "os.mknod('new', stat.S_IFCHR | 0o666, os.makedev(1, 1))",
    "unlink": "os.unlink(F)",
    "unlinkat": "os.unlink('file', dir_fd=os.open(D, os.O_PATH))",
    "rmdir": "os.rmdir(D + '/empty')",
    "rename inside": "os.rename(F, D + '/other')",
    "rename to its folder": "os.rename(F, 'stolen')",
    "rename of a folder": "os.rename(D, D + '2')",
    "rename from its folder": "os.rename(own_file(), D + '/new')",
    "rename over": "os.replace(own_file(), F)",
    "exchange": "own_file(); call(316, 276, AT_CWD, b'mine', AT_CWD, F.encode(), 2)",
    "link to its folder": "os.link(F, 'linked')",
    "link from its folder": "os.link(own_file(), D + '/new')",
    "link of an open path": "os.link(f'/proc/self/fd/{os.open(F, os.O_PATH)}', 'linked', follow_symlinks=True)",
    "linkat raw": "call(265, 37, AT_CWD, F.encode(), AT_CWD, b'linked', 0)",
    "a symbolic link": "os.symlink(F, D + '/new')",
    "a symbolic link of its own": "os.symlink(F, 'pointer')",
    "through a symbolic link": "os.symlink(D, 'pointer'); open('pointer/file').read()",
    "removing its folder": "os.rmdir('../own')",
    "moving its folder": "os.rename('../own', '../other')",
    "a file beside its folder": "open('../new', 'x')",
    # reading
    "a secret": "open(F).read()",
    "a secret at a folder": "os.open('file', os.O_RDONLY, dir_fd=os.open(D, os.O_PATH))",
    "a secret through /proc": "open(f'/proc/self/fd/{os.open(F, os.O_PATH)}').read()",
    "a list of a folder": "os.listdir(D)",
    "the root": "os.listdir('/')",
    "passwords": "open('/etc/passwd')",
    "the environment": "os.environ['SANDBOX_TEST_TOKEN']",
    "the environment of its parent": "open(f'/proc/{PARENT}/environ', 'rb')",
    "its own environment": "open('/proc/self/environ', 'rb')",
    "memory of its parent": "open(f'/proc/{PARENT}/mem', 'r+b')",
    "its own memory": "open('/proc/self/mem', 'r+b')",
    "its own standing with the killer": "open('/proc/self/oom_score_adj', 'w')",
    "the terminal": "open('/dev/tty')",
    # other processes
    "a signal to its parent": "os.kill(PARENT, 0)",
    "a signal to all": "os.kill(-1, 0)",
    "a signal to a group": "os.killpg(0, 0)",
    "tgkill": "call(234, 131, PARENT, PARENT, 0)",
    "tkill": "call(200, 130, PARENT, 0)",
    "rt_sigqueueinfo": "call(129, 138, PARENT, 0, bytes(128))",
    "pidfd_open": "call(434, 434, PARENT, 0)",
    "a signal through a pipe": r"""
r, w = os.pipe()
posix("fcntl", r, 8, PARENT)  # F_SETOWN
posix("fcntl", r, 10, 9)  # F_SETSIG: SIGKILL
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
os.write(w, b"x")""",
    "F_SETOWN_EX": "fcntl.fcntl(0, 15, bytes(4) + PARENT.to_bytes(4, 'little'))",
    "FIOSETOWN": "fcntl.ioctl(os.pipe()[0], 0x8901, PARENT.to_bytes(4, 'little'))",
    "F_NOTIFY": "fcntl.fcntl(os.open('.', os.O_RDONLY), 1026, 2)",
    "TIOCSTI": "fcntl.ioctl(0, 0x5412, b'x')",
    "ptrace": "call(101, 117, 0x4206, PARENT, 0, 0)",
    "process_vm_readv": "call(310, 270, PARENT, bytes(16), 1, bytes(16), 1, 0)",
    "process_vm_writev": "call(311, 271, PARENT, bytes(16), 1, bytes(16), 1, 0)",
    "limits of its parent": "resource.prlimit(PARENT, resource.RLIMIT_NOFILE, (8, 8))",
    "its own limits raw": "call(302, 261, 0, 9, (1 << 40).to_bytes(8, 'little') * 2, None)",
    "priority of its parent": "os.setpriority(os.PRIO_PROCESS, PARENT, 19)",
    "processors of its parent": "os.sched_setaffinity(PARENT, {0})",
    "leaving its group": "os.setsid()",
    "the user root": "os.setuid(0)",
    # new processes and programs
    "fork": "os.fork() or os._exit(0)",
    "clone raw": "call(56, 220, 17, 0, 0, 0, 0) or os._exit(0)",
    "clone with a namespace": "call(56, 220, 0x10000000 | 17, 0, 0, 0, 0) or os._exit(0)",
    "a thread with a namespace": "call(56, 220, 0x00010F00 | 0x40000000, 0, 0, 0, 0) or os._exit(0)",
    "clone3": "call(435, 435, bytes(64), 64) or os._exit(0)",
    "a program": "os.execv('/bin/sh', ['sh', '-c', 'exit 0'])",
    "execveat": "call(322, 281, AT_CWD, b'/bin/sh', None, None, 0)",
    "a child": "subprocess.run(['/bin/true'], check=True)",
    "posix_spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "a file in memory": "os.memfd_create('x')",
    # namespaces and mounts
    "unshare": "call(272, 97, 0x10000000)",
    "setns": "call(308, 268, 0, 0)",
    "mount": "call(165, 40, b'none', HERE, b'tmpfs', 0, None)",
    "umount": "call(166, 39, HERE, 2)",
    "chroot": "call(161, 51, HERE)",
    "pivot_root": "call(155, 41, HERE, HERE)",
    # the network and other doors of the kernel
    "a socket": "socket.socket()",
    "a local socket": "socket.socket(socket.AF_UNIX)",
    "a pair of sockets": "socket.socketpair()",
    "a netlink socket": "socket.socket(16, socket.SOCK_RAW)",
    "a connection": "socket.create_connection(('127.0.0.1', 1), timeout=1)",
    "io_uring": "call(425, 425, 8, bytes(120))",
    "bpf": "call(321, 280, 0, bytes(128), 128)",
    "keyctl": "call(250, 219, 0, -3, 1)",
    "add_key": "call(248, 217, b'user', b'x', b'y', 1, -3)",
    "userfaultfd": "call(323, 282, 1)",
    "perf_event_open": "call(298, 241, (128).to_bytes(8, 'little') * 16, 0, -1, -1, 0)",
    "shared memory": "call(29, 194, 0, 4096, 0o1600)",
    "a semaphore": "call(64, 190, 0, 1, 0o1600)",
    "a message queue": "call(68, 186, 0, 0o1600)",
    "a named message queue": "call(240, 180, b'penjing', 0o102, 0o600, None)",
    "inotify": "call(294, 26, 0)",
    "fanotify": "call(300, 262, 0, 0)",
    "personality": "call(135, 92, 0x0040000)",
    "a second filter": "call(317, 277, 1, 0, bytes(16))",
    "being dumped": "posix('prctl', 4, 1, 0, 0, 0)",
    "capabilities": "call(126, 91, bytes.fromhex('22050820') + bytes(4), b'\\xff' * 24)",
}

# Programs that are a run of their own. All of them must be failed programs.
BOMBS = {
    "threads": """
import threading, time
threading.stack_size(32768)
while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()""",
    "memory": "bytearray(2 << 30)",
    "memory, in pieces": "x = []\nwhile True: x.append(bytearray(16 << 20))",
    "endless output": "while True: print('x' * 10000)",
    "endless output, in spite of errors": """
while True:
    try: print('x' * 10000)
    except OSError: pass""",
    "endless errors": "import os\nwhile True: os.write(2, b'x' * 65536)",
    "deleted files that stay mapped": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
for n in range(300):
    fd = os.open('a', os.O_RDWR | os.O_CREAT)
    os.write(fd, bytes(1 << 20))
    if libc.mmap(None, ctypes.c_size_t(4096), 1, 2, fd, ctypes.c_size_t(0)) == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), 'no mapping')
    os.close(fd)
    os.unlink('a')""",
    "a large file": "open('x', 'wb').write(bytes(8 << 20))",
    "an endless loop": "while True: pass",
    "stopping itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "killing itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "closing all": "import os\nos.closerange(0, 64)",
    "an answer in its caller's place": """
import os
for fd in range(3, 64):
    try: os.read(os.open(f'/proc/self/fd/{fd}', os.O_RDONLY | os.O_NONBLOCK), 4096)
    except OSError: pass
    try: os.write(fd, b'{}\\nLandlock\\n')
    except OSError: pass
os._exit(1)""",
    "a call with pointers of 32 bits": "import ctypes\nctypes.CDLL(None).syscall(0x40000000 | 39)",
    "a call past all": "import ctypes\nctypes.CDLL(None).syscall(-1 & 0x7fffffff)",
    "a call of 32 bits": """
import ctypes, mmap, os
assert os.uname().machine == 'x86_64'
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex('b814000000cd80c3'))  # getpid by int 0x80
ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()""",
}
