"""What runs on a CPU as kernels of our own: everything of a step that is no matrix product (kernels/cpu/kernels.c),
attention (kernels/cpu/attention.c), and weights' gradients where there are matrix units (kernels/cpu/weight_grad.c).

An eager program makes a pass over memory for each operation; a norm is five of them, its gradient ten. In C each is
one, in float32 inside, whatever is read and written. They are built when they are first needed, by the machine's own C
compiler and for its processor, which takes two seconds once; without a compiler torch's operations do, and a run says
so. They share torch's threads: they are linked with the OpenMP library that torch has loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as functional
from torch import Tensor

from penjing.kernels.cpu import tensor_arena as arena
from penjing.kernels.triton.ops import SWITCH, document_edges

_is_off = f"{SWITCH}=off" if os.environ.get(SWITCH) == "off" else ""
SOURCES = tuple(Path(__file__).with_name(it) for it in ("kernels.c", "attention.c", "weight_grad.c", "types.h"))
FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-ffp-contract=fast"),
)
WIDEST = ("-mprefer-vector-width=512",)  # on x86; compilers take half of it of themselves
BUILD_SECONDS = 120  # after which a compiler is taken to hang
LOTS = 32  # of rows, over which a gain's gradient is summed one by one, whatever the number of threads
SMALL = 1 << 14  # values; what is smaller is not worth a second thread
LEAST_PRODUCT = 1 << 20  # multiplications; fewer are done before their factors are turned and paired
TILE = 64  # positions of queries and keys that are worked on together
TYPES = {torch.float32: 0, torch.bfloat16: 1}
_SIGNATURES = {
    "norm": (c_void_p,) * 4 + (c_long,) * 2 + (c_float,) + (c_int,) * 3,
    "norm_slopes": (c_void_p,) * 7 + (c_long,) * 3 + (c_int,) * 3,
    "add": (c_void_p,) * 3 + (c_long,) + (c_int,) * 2,
    "add_scaled": (c_void_p,) * 2 + (c_float,) * 2 + (c_long,) + (c_int,) * 2,
    "lead": (c_void_p,) * 3 + (c_float, c_long, c_int),
    "gated": (c_void_p,) * 3 + (c_long,) * 3 + (c_int,) * 2,
    "gated_slopes": (c_void_p,) * 8 + (c_long,) * 4 + (c_int,) * 2,
    "turn": (c_void_p,) * 4 + (c_long, c_float) + (c_long,) * 5 + (c_int,) * 5,
    "softmax": (c_void_p,) * 3 + (c_long,) * 4 + (c_int,) * 2,
    "add_tiles": (c_void_p,) * 3 + (c_long,) * 2 + (c_int,) * 2,
    "use_tiles": (c_int,),
    "attention_types": (),
    "weight_slopes": (c_void_p,) * 3 + (c_long,) * 4 + (c_int,) * 2,
    "attention": (c_void_p,) * 6 + (c_long,) * 5 + (c_float,) + (c_int,) * 2,
    "attention_slopes": (c_void_p,) * 10 + (c_long,) * 5 + (c_float,) + (c_int,) * 2,
    "log_probs": (c_void_p,) * 5 + (c_long,) * 2 + (c_int,) * 2,
    "log_prob_slopes": (c_void_p,) * 4 + (c_long,) * 2 + (c_int,) * 2,
    "nats": (c_void_p,) * 4 + (c_long,) * 2 + (c_int,) * 3,
}
OUT_OF_RANGE = 2  # what a kernel returns; 1: no memory
_FAILING = {"attention", "attention_slopes", "weight_slopes", "nats", "log_probs", "log_prob_slopes"}
_ANSWERING = _FAILING | {"use_tiles", "attention_types"}


class _Kernels:
    """The functions of the built library."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        for name, types in _SIGNATURES.items():
            function = getattr(library, f"penjing_{name}")
            function.argtypes, function.restype = types, c_int if name in _ANSWERING else None
            setattr(self, name, function)
        self.has_tiles = bool(self.use_tiles(True))
        self.types = self.attention_types()  # those without matrix units are fewer

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:  # for type checkers
        raise AttributeError(name)


def serves(*tensors: Tensor, wide: Sequence[Tensor] = ()) -> bool:
    """Whether kernels take these: on a CPU, in float32 or bfloat16, one value after another. wide: in float32 only."""
    for x in (*tensors, *wide):
        if x.device.type != "cpu" or x.dtype not in TYPES or not x.is_contiguous():
            return False
        if type(x) not in (Tensor, torch.nn.Parameter):
            return False
    if any(x.dtype != torch.float32 for x in wide):
        return False
    return not torch.compiler.is_compiling() and kernels() is not None


@cache
def kernels() -> _Kernels | None:
    """The built library; None where there is none, see `why_not`."""
    found = _is_off or _build()
    return found if isinstance(found, _Kernels) else None


def why_not() -> str:
    """Why torch's operations do on this CPU; empty where kernels are there."""
    found = _is_off or _build()
    return found if isinstance(found, str) else ""


def switch_off() -> None:
    """From here on torch's own operations, in this process."""
    global _is_off
    _is_off = "they were switched off"
    kernels.cache_clear()


@cache
def _build() -> _Kernels | str:
    """The kernels, or why there are none."""
    if sys.platform != "linux":
        return f"they are built on Linux only, not on {sys.platform}"
    compilers = list(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang"))))
    openmp, said = _openmp(), "there is no C compiler (cc, gcc or clang)"
    if openmp is None:
        return "torch has loaded no OpenMP library whose threads they could share"
    folder, is_kept = _folder()
    try:
        for compiler in dict.fromkeys(compilers):
            try:
                return _loaded(compiler, openmp, folder)
            except (OSError, subprocess.SubprocessError, AttributeError) as error:
                said = f"{compiler} could not build them: {_last_line(error)}"
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)  # what is loaded stays
    return said


def _loaded(compiler: str, openmp: str, folder: Path) -> _Kernels:
    """From the folder, or built there first. Raises OSError, SubprocessError and AttributeError."""
    path = folder / f"cpu_kernels-{_key(compiler, openmp)}.so"
    if path.exists():
        try:
            return _Kernels(path)
        except OSError:
            pass  # cut short by a crash: once more
    _compile(compiler, openmp, path)
    return _Kernels(path)


def _openmp() -> str | None:
    """The file of torch's OpenMP library in this process. A second one would have threads of its own beside torch's."""
    try:
        loaded = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    files = {line.split(maxsplit=5)[-1] for line in loaded.splitlines() if "/" in line}
    found = sorted(file for file in files if Path(file).name.startswith(("libgomp", "libiomp", "libomp")))
    return next((file for file in found if "torch" in file), found[0] if found else None)


def _folder() -> tuple[Path, bool]:
    """Where built kernels are kept, and True; a folder for this process alone where nothing can be, and False."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penjing"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder, True
    except (OSError, RuntimeError):  # no room, no right, or nobody's home
        pass
    return Path(tempfile.mkdtemp(prefix="penjing-")), False


def _key(compiler: str, openmp: str) -> str:
    """Tells builds apart: by source, flags, compiler, processor and OpenMP library, as machines may share a home."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=BUILD_SECONDS).stdout
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    processor = [line for line in lines if line.split(":")[0].strip() in ("flags", "Features", "model name")][:2]
    about = repr((FLAGS, WIDEST, openmp, platform.machine(), processor)).encode()
    known = [*(source.read_bytes() for source in SOURCES), about, version]
    return hashlib.sha256(b"\0".join(known)).hexdigest()[:20]


def _compile(compiler: str, openmp: str, path: Path) -> None:
    """Build to `path`, which other processes may be doing too. Raises OSError and SubprocessError."""
    handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    widest = WIDEST if platform.machine() in ("x86_64", "AMD64") else ()
    try:
        for more in dict.fromkeys((widest, ())):
            done = subprocess.run(
                [compiler, *FLAGS, *more, "-o", draft, *map(str, SOURCES[:-1]), openmp, "-lm"],
                capture_output=True,
                text=True,
                timeout=BUILD_SECONDS,
            )
            if done.returncode == 0:
                os.replace(draft, path)
                return
        raise OSError(done.stderr.strip() or f"exit status {done.returncode}")
    finally:
        Path(draft).unlink(missing_ok=True)


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def _threads(values: int) -> int:
    return 1 if values < SMALL else torch.get_num_threads()


def _run(name: str, tensors: Sequence[Tensor | None], *given: float) -> None:
    """Call a kernel with where the tensors are, and numbers. Raises MemoryError where it found no room, and IndexError
    where a target is none of the logits."""
    if arena.is_set_aside():
        return  # stand-ins without memory
    found = kernels()
    assert found is not None, "ask serves first"
    failed = getattr(found, name)(*(None if x is None else x.data_ptr() for x in tensors), *given)
    if failed:
        raise IndexError("a target is out of range") if failed == OUT_OF_RANGE else MemoryError(f"no room for {name}")


def _wide(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def norm(x_ND: Tensor, gain: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The RMSNorm of x in `dtype`, and 1 / its root mean square, scale_N1, in float32."""
    rows, width = x_ND.shape
    out_ND, scale_N1 = arena.empty(x_ND, x_ND.shape, dtype), _wide(x_ND, rows, 1)
    types = TYPES[x_ND.dtype], TYPES[dtype]
    _run("norm", (x_ND, gain, out_ND, scale_N1), rows, width, epsilon, *types, _threads(x_ND.numel()))
    return out_ND, scale_N1


def norm_slopes(
    x_ND: Tensor, scale_N1: Tensor, gain: Tensor, above_ND: Tensor, beside_ND: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of x, in its dtype and with `beside` added, which is of that dtype too, and of the gain."""
    rows, width = x_ND.shape
    grad_ND, sums_LD = arena.empty_like(x_ND), _wide(x_ND, LOTS, width).zero_()
    given, types = (x_ND, scale_N1, gain, above_ND, beside_ND, grad_ND, sums_LD), (x_ND.dtype, above_ND.dtype)
    _run("norm_slopes", given, LOTS, rows, width, *map(TYPES.__getitem__, types), _threads(x_ND.numel()))
    return grad_ND, sums_LD.sum(dim=0)


def add(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """out = x + y, of x and out in float32; out may be x."""
    _run("add", (x, y, out), x.numel(), TYPES[y.dtype], _threads(x.numel()))
    return out


def add_scaled(x: Tensor, y: Tensor, keep: float, scale: float) -> None:
    """x <- keep x + scale y, of x in float32."""
    _run("add_scaled", (x, y), keep, scale, x.numel(), TYPES[y.dtype], _threads(x.numel()))


def takes_weights(dtype: torch.dtype) -> bool:
    """Whether there is a `weight_slopes` for products in `dtype`: in bfloat16, on a processor with matrix units."""
    found = kernels()
    return dtype == torch.bfloat16 and found is not None and found.has_tiles


def serves_weights(above_BO: Tensor, x_BN: Tensor) -> bool:
    """Whether `weight_slopes` takes these. above_BO may be some columns of a wider matrix."""
    if above_BO.dtype != x_BN.dtype or above_BO.stride(1) != 1 or not serves(above_BO[:1], x_BN):
        return False
    return takes_weights(x_BN.dtype) and above_BO.numel() * x_BN.shape[1] >= LEAST_PRODUCT


def weight_slopes(above_BO: Tensor, x_BN: Tensor, out_ON: Tensor | None = None, *, adds: bool = False) -> Tensor:
    """above^T x, the gradient of a weight, in float32; added to what `out` holds if asked for."""
    (tokens, outputs), inputs = above_BO.shape, x_BN.shape[1]
    out_ON = arena.empty(x_BN, (outputs, inputs), torch.float32) if out_ON is None else out_ON
    given = tokens, outputs, inputs, above_BO.stride(0), adds, torch.get_num_threads()
    _run("weight_slopes", (above_BO, x_BN, out_ON), *given)
    return out_ON


def lead(gradient: Tensor, mean: Tensor, out: Tensor, momentum: float) -> None:
    """mean <- mean + (1 - momentum) (gradient - mean), and Nesterov's out = gradient + momentum (mean - gradient), all
    in float32."""
    _run("lead", (gradient, mean, out), momentum, gradient.numel(), _threads(gradient.numel()))


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. Both may be columns of one wider matrix, whose rows are equally far apart."""
    inner = arena.empty_like(gate)
    shape = gate.numel() // gate.shape[-1], gate.shape[-1], _row_step(gate)
    _run("gated", (gate, up, inner), *shape, TYPES[gate.dtype], _threads(gate.numel()))
    return inner


def gated_slopes(
    above: Tensor, gate: Tensor, up: Tensor, *, remade: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of gate and up. remade: silu(gate) * up once more too; up's gradient then takes the place of
    `above`."""
    grad_gate, inner = arena.empty_like(gate), arena.empty_like(gate) if remade else None
    grad_up = above if remade else arena.empty_like(up)
    given = (above, gate, up, inner, grad_gate, grad_up, None, None)
    width = gate.shape[-1]
    shape = gate.numel() // width, width, width, width
    _run("gated_slopes", given, *shape, TYPES[gate.dtype], _threads(gate.numel()))
    return grad_gate, grad_up, inner


def weighted_gated_slopes(
    slope_RF: Tensor, both_RG: Tensor, weight_R: Tensor, grad_weight_R: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up side by side, as they stand in both_RG, and weight * silu(gate) * up, where each row
    counts as its weight says and `slope` is what its gradient would be were that 1. Writes the weights' gradient."""
    (rows, width), grad_both_RG = slope_RF.shape, arena.empty_like(both_RG)
    (gate, up), (grad_gate, grad_up) = both_RG.chunk(2, dim=-1), grad_both_RG.chunk(2, dim=-1)
    inner_RF = arena.empty_like(slope_RF)
    given = (slope_RF, gate, up, inner_RF, grad_gate, grad_up, weight_R, grad_weight_R)
    _run("gated_slopes", given, rows, width, 2 * width, 2 * width, TYPES[gate.dtype], _threads(slope_RF.numel()))
    return grad_both_RG, inner_RF


def _row_step(x: Tensor) -> int:
    return x.shape[-1] if x.is_contiguous() else x.stride(-2)


def tiles_of(x_BTHK: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """[tiles of all rows, H, tile, K]: heads turned by `rotary` (rope.py) and cut into tiles, which are filled up with
    zeros."""
    rows, num_tokens, num_heads, size = x_BTHK.shape
    out = arena.empty(x_BTHK, (rows * -(-num_tokens // TILE), num_heads, TILE, size), x_BTHK.dtype)
    _turn(x_BTHK, out, rotary, 1.0, (rows, num_tokens, num_heads, size), (0, 1))
    return out


def rows_of(x_NHTK: Tensor, num_tokens: int, dtype: torch.dtype, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """The way back of `tiles_of`, and so its gradient: x_BTHK in `dtype`, turned back."""
    num_tiles, num_heads, _, size = x_NHTK.shape
    rows = num_tiles // -(-num_tokens // TILE)
    out_BTHK = arena.empty(x_NHTK, (rows, num_tokens, num_heads, size), dtype)
    _turn(x_NHTK, out_BTHK, rotary, -1.0, out_BTHK.shape, (1, 0))
    return out_BTHK


def _turn(
    x: Tensor,
    out: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    sign: float,
    shape: Sequence[int],
    tiled: tuple[int, int],
) -> None:
    cosine, sine = rotary or (None, None)
    pairs = 0 if cosine is None else cosine.shape[-1]
    table_step = 0 if cosine is None or len(cosine) == 1 else cosine[0].numel()
    types = TYPES[x.dtype], TYPES[out.dtype]
    _run("turn", (x, out, cosine, sine), table_step, sign, pairs, *shape, *tiled, *types, _threads(x.numel()))


def serves_attention(dtype: torch.dtype, head_size: int, num_units: int) -> bool:
    """Whether `attention` takes queries of this kind: heads of 16, 32, ... dimensions, in float32 or, where the
    processor has products for it, bfloat16. num_units: key heads of all rows; each is one thread's in the backward
    pass, where at most half of the threads may be without one."""
    found = None if torch.compiler.is_compiling() else kernels()
    if found is None or dtype not in TYPES or head_size % 16 or 2 * num_units < torch.get_num_threads():
        return False
    return bool(found.types & 1 << TYPES[dtype])


def first_keys(document_BT: Tensor, window: int) -> Tensor:
    """first_BT, int32: the first key that each position may look at, as `gpu.document_edges` has it; rows are filled up
    to whole tiles with positions that look at themselves."""
    num_tokens = document_BT.shape[1]
    first_BT, _ = document_edges(functional.pad(document_BT, (0, -num_tokens % TILE)), window)
    place_T = torch.arange(first_BT.shape[1], dtype=torch.int32)
    return torch.where(place_T < num_tokens, first_BT, place_T)


def attention(q_NHTK: Tensor, k_NGTK: Tensor, v_NGTK: Tensor, first_BT: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(K)) v of tiles, and norm_NHT, the logarithm of each softmax's sum, in float32."""
    mixed_NHTK, norm_NHT = arena.empty_like(q_NHTK), _wide(q_NHTK, *q_NHTK.shape[:3])
    given = (q_NHTK, k_NGTK, v_NGTK, first_BT, mixed_NHTK, norm_NHT)
    _run("attention", given, *_attended(q_NHTK, k_NGTK, first_BT))
    return mixed_NHTK, norm_NHT


def attention_slopes(
    above_NHTK: Tensor,
    q_NHTK: Tensor,
    k_NGTK: Tensor,
    v_NGTK: Tensor,
    mixed_NHTK: Tensor,
    norm_NHT: Tensor,
    first_BT: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, and in float32 of k and v."""
    grad_q_NHTK = arena.empty_like(q_NHTK)
    grad_k_NGTK, grad_v_NGTK = (arena.empty(k_NGTK, k_NGTK.shape, torch.float32) for _ in range(2))
    given = (above_NHTK, q_NHTK, k_NGTK, v_NGTK, mixed_NHTK, norm_NHT, first_BT, grad_q_NHTK, grad_k_NGTK, grad_v_NGTK)
    _run("attention_slopes", given, *_attended(q_NHTK, k_NGTK, first_BT))
    return grad_q_NHTK, grad_k_NGTK, grad_v_NGTK


def _attended(q_NHTK: Tensor, k_NGTK: Tensor, first_BT: Tensor) -> tuple[float, ...]:
    (num_tiles, num_heads, _, size), rows = q_NHTK.shape, len(first_BT)
    shape = (rows, num_tiles // rows, num_heads, k_NGTK.shape[1], size)
    return (*shape, size**-0.5, TYPES[q_NHTK.dtype], _threads(q_NHTK.numel()))


def softmax(scores_NQS: Tensor, bias_LTS: Tensor, out_NQS: Tensor) -> Tensor:
    """softmax(scores + bias) over the last dimension. Each tile's bias serves N / L key heads, and of each the query
    heads that share it, Q / T."""
    count, queries, width = scores_NQS.shape
    shape = len(bias_LTS), count // len(bias_LTS), queries, width
    _run("softmax", (scores_NQS, bias_LTS, out_NQS), *shape, TYPES[scores_NQS.dtype], _threads(scores_NQS.numel()))
    return out_NQS


def add_tiles(into_ME: Tensor, place_N: Tensor, value_NE: Tensor) -> None:
    """into[place] += value, in the order of N. into in float32; E values are a tile."""
    shape = len(place_N), into_ME[0].numel()
    _run("add_tiles", (into_ME, place_N, value_NE), *shape, TYPES[value_NE.dtype], _threads(value_NE.numel()))


def nats_in_place(logits_CV: Tensor, target_C: Tensor, weight_C: Tensor, slope: bool) -> Tensor:
    """weight * -log softmax(logits)[target] of each position, in float32. With `slope` its gradient for the logits,
    (softmax - one_hot) * weight, takes their place."""
    rows, width = logits_CV.shape
    nats_C, target_C, weight_C = _wide(logits_CV, rows), target_C.contiguous(), weight_C.contiguous()
    given = logits_CV, target_C, weight_C, nats_C
    _run("nats", given, rows, width, slope, TYPES[logits_CV.dtype], _threads(logits_CV.numel()))
    return nats_C


def log_probs(logits_CV: Tensor, target_C: Tensor, logp_C: Tensor, entropy_C: Tensor, norm_C: Tensor) -> None:
    """Write, in float32, log softmax(logits)[target], the entropy in nats and the logarithm of the softmax's sum."""
    given = (logits_CV, target_C.contiguous(), logp_C, entropy_C, norm_C)
    _run("log_probs", given, *logits_CV.shape, TYPES[logits_CV.dtype], _threads(logits_CV.numel()))


def log_prob_slopes(logits_CV: Tensor, target_C: Tensor, norm_C: Tensor, slope_C: Tensor) -> Tensor:
    """(one_hot - softmax(logits)) * slope, in the logits' place. norm_C: of `log_probs`."""
    given = (logits_CV, target_C.contiguous(), norm_C, slope_C.contiguous())
    _run("log_prob_slopes", given, *logits_CV.shape, TYPES[logits_CV.dtype], _threads(logits_CV.numel()))
    return logits_CV
