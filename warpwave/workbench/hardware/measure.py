"""Measures this machine's ceilings: bandwidths, matrix products, exponentials and launches. The results are stored.

A data sheet states peak rates at the boost clock. The rates that a card reaches depend on power, temperature and
software. They are measured with `bench.timing`, including its interleaving and L2 rules. Products are timed twice:
cool, each after a pause, and sustained, after two seconds without a pause, when the power cap lowers the clocks.

Under Triton's interpreter only torch's own operations are measured.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpwave.gpu import CPU, Gpu, current_gpu
from warpwave.runtime.triton_or_stub import INTERPRETED, NO_TRITON
from warpwave.workbench.bench.environment_schema import ENVIRONMENT, READING, WORD
from warpwave.workbench.hardware.probes import empty_kernel, exponentials_kernel, read_kernel
from warpwave.workbench.input_files import Unreadable, read_json
from warpwave.workbench.output_files import write_whole
from warpwave.workbench.schema import Integer, MapOf, Mismatch, Number, OneOf, OrNone, Table, check
from warpwave.workbench.terminal import printable

if TYPE_CHECKING:
    import torch

    from warpwave.workbench.bench.timing import Call, Samples

log = logging.getLogger("warpwave")

SHIPPED = Path(__file__).with_name("measured")
SCHEMA = "warpwave ceilings 1"

MIB = 1 << 20
STREAM_BYTES = 1024 * MIB  # per streamed buffer: far above any L2 (and MI300X's 256 MB cache)
CPU_STREAM_BYTES = 256 * MIB  # above the last-level cache of most servers
PRODUCT_SIZE = 8192  # rows, columns and depth of the timed product, the usual size for quoted peaks
PRODUCT_US = 40_000.0  # a product that takes longer is timed at half the size
CPU_PRODUCT_US = 250_000.0
L2_PASSES = 32  # in one launch over a buffer that fits L2, so that filling it and launching are negligible
EXPONENTIALS_EACH = 2048  # per element of the exponentials kernel, in registers
PAUSE_S = 0.5  # before a product, so that the card cools and its clocks recover
SUSTAINED_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The rates that one machine reached; None for a rate that could not be measured.

    A measured product is a reference, not a limit: another kernel may draw less power and run at higher clocks.

    Attributes:
        gpu: the driver's name of the device; on a CPU, its model and the number of threads.
        arch: `"sm_90"`, `"gfx942"`, `"cpu"`.
        date: UTC, ISO 8601.
        copy_gbps: copy bandwidth of device memory, 10^9 bytes a second, bytes read plus bytes written.
        read_gbps: read bandwidth of device memory, 10^9 bytes a second.
        l2_gbps: read bandwidth of L2, 10^9 bytes a second.
        product_tflops: path (`catalog.PATHS`) -> 10^12 operations a second of one large square product; the best of
            several rounds, each path after a pause.
        sustained_tflops: the same after two seconds without a pause; the median.
        exponentials_gops: 10^9 exponentials a second (float32; base 2 on a GPU, base e on a CPU).
        launch_us: device time of an empty kernel in a replayed graph; on a CPU, time of a call that does nothing.
        host_call_us: host time to launch an empty kernel.
        environment: `bench.environment.describe`. Its `snapshots` hold clocks, power and temperature before, during the
            sustained product, and after; its `product_sizes` hold the sizes of the products.
    """

    gpu: str
    arch: str
    date: str
    copy_gbps: float | None = None
    read_gbps: float | None = None
    l2_gbps: float | None = None
    product_tflops: dict[str, float] = field(default_factory=dict)
    sustained_tflops: dict[str, float] = field(default_factory=dict)
    exponentials_gops: float | None = None
    launch_us: float | None = None
    host_call_us: float | None = None
    environment: dict[str, Any] = field(default_factory=dict)


# Measuring ------------------------------------------------------------------------------------------------------------


def measure(device: torch.device | str, say: Callable[[str], None] = lambda line: None) -> Ceilings:
    """Measures this machine, in under 30 s on a GPU and about 10 s on two CPU cores.

    Args:
        device: `"cpu"` or a CUDA device; HIP devices have that name too.
        say: called with the name of each measurement before it starts.

    Raises:
        torch.OutOfMemoryError: the buffers do not fit, because another process holds the memory.
    """
    import torch

    from warpwave.workbench.bench import environment

    device = torch.device(device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    known = environment.describe(device)
    snapshots = {"before": environment.snapshot(device)}
    figures = _measure_gpu(device, say, snapshots) if device.type == "cuda" else _measure_cpu(say)
    snapshots["after"] = environment.snapshot(device)
    gpu = current_gpu(device) if device.type == "cuda" else CPU
    sizes = figures.pop("product_sizes")
    return Ceilings(
        gpu=_device_name(gpu),
        arch=gpu.arch,
        date=known["date"],
        environment={**known, "snapshots": snapshots, "product_sizes": sizes},
        **figures,
    )


def _measure_gpu(device: torch.device, say: Callable[[str], None], snapshots: dict[str, Any]) -> dict[str, Any]:
    import torch

    from warpwave.workbench.bench import environment

    gpu = current_gpu(device)
    figures: dict[str, Any] = {"product_tflops": {}, "sustained_tflops": {}, "product_sizes": {}}
    with torch.cuda.device(device):
        for path, dtype in _product_paths(gpu).items():
            say(f"product, {path}")
            n = _product_size(device, dtype, path, PRODUCT_SIZE, PRODUCT_US)
            time.sleep(PAUSE_S)
            with _products_in(path):
                timed = _time(_product(device, dtype, n), device, rounds=3, warmup_s=0.02, sample_s=0.01)
            figures["product_tflops"][path] = 2 * n**3 / min(timed.samples_us) * 1e-6
            figures["product_sizes"][path] = n
        figures |= _bandwidths(device, say)
        if _triton_runs():
            figures |= _triton_figures(device, gpu, say)
        path = "bfloat16" if "bfloat16" in figures["product_tflops"] else "float16"
        if path in figures["product_tflops"]:
            say(f"product, {path}, sustained")
            n = figures["product_sizes"][path]
            seen: list[Any] = []
            timed = _time(
                _product(device, getattr(torch, path), n),
                device,
                rounds=3,
                warmup_s=SUSTAINED_S,
                sample_s=0.1,
                flush_l2=False,
                on_round=lambda _: seen.append(environment.snapshot(device)),
            )
            figures["sustained_tflops"][path] = 2 * n**3 / timed.median_us * 1e-6
            snapshots["sustained"] = seen[-1]
    torch.cuda.empty_cache()
    return figures


def _product_paths(gpu: Gpu) -> dict[str, torch.dtype]:
    """Returns the products to time, each with the dtype of its operands."""
    import torch

    paths = {"float16": torch.float16, "bfloat16": torch.bfloat16, "tf32": torch.float32, "float32": torch.float32}
    if gpu.vendor == "nvidia" and gpu.capability < 80:
        del paths["bfloat16"], paths["tf32"]
    if gpu.vendor == "amd":
        del paths["tf32"]
        if gpu.arch.startswith("gfx9"):  # CDNA's libraries use its matrix instructions for float32
            paths["float32_matrix"] = paths.pop("float32")
    return paths


def _product(device: torch.device, dtype: torch.dtype, n: int) -> Call:
    import torch

    # Random data: zeros draw less power, and would run at clocks that real data never reaches.
    a, b = (torch.randn(n, n, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    out = torch.empty(n, n, device=device, dtype=dtype)
    return lambda: torch.mm(a, b, out=out)


def _product_size(device: torch.device, dtype: torch.dtype, path: str, largest: int, most_us: float) -> int:
    """Returns the largest power of two whose product takes at most `most_us`, extrapolated from a small product."""
    trial = min(largest, 1024 if device.type == "cuda" else 512)
    with _products_in(path):
        trial_us = min(_time(_product(device, dtype, trial), device, rounds=3, warmup_s=0.0, sample_s=0.0).samples_us)
    n = largest
    while n > trial and trial_us * (n / trial) ** 3 > most_us:
        n //= 2
    return n


@contextlib.contextmanager
def _products_in(path: str) -> Iterator[None]:
    """Sets float32 products to tf32 for the path "tf32" and to float32 otherwise; restores the setting afterwards."""
    import torch

    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if path == "tf32" else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _bandwidths(device: torch.device, say: Callable[[str], None]) -> dict[str, Any]:
    import torch

    size = STREAM_BYTES
    while size > 64 * MIB and 3 * size > torch.cuda.mem_get_info(device)[0]:
        size //= 2
    source, target = torch.ones(size // 4, device=device), torch.empty(size // 4, device=device)
    say("copy")
    copied = _time(lambda: target.copy_(source), device)
    say("read")
    summed, count = _reader(device, source, passes=1) if _triton_runs() else (lambda: source.sum(), size)
    seen = _time(summed, device)
    return {"copy_gbps": 2 * size / min(copied.samples_us) * 1e-3, "read_gbps": count / min(seen.samples_us) * 1e-3}


def _reader(
    device: torch.device, x: torch.Tensor, passes: int, block: int = 4096, each_sm: int = 8
) -> tuple[Call, int]:
    """Returns a call that reads x (float32) `passes` times, and the number of bytes it reads. It reads only the part
    of x that divides evenly among all programs, so that all SMs finish together.

    Args:
        block: elements that a program reads at once, at least 1024: 16 bytes per thread and load.
        each_sm: programs per SM. Eight programs of eight warps keep enough loads in flight to hide memory latency.
    """
    import torch

    programs = each_sm * torch.cuda.get_device_properties(device).multi_processor_count
    programs = min(programs, x.numel() // block)
    n = x.numel() // (programs * block) * programs * block
    out = torch.empty(programs, device=device)

    def read() -> None:
        read_kernel[(programs,)](x, out, n, passes, BLOCK=block, num_warps=8)

    return read, 4 * n * passes


def _l2_reader(device: torch.device) -> tuple[Call, int] | None:
    """Returns a reader whose data stays in L2. It uses a third of L2, because large chips keep two copies of data that
    both halves read. Returns None if the size of L2 is unknown, or too small for a share per SM."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    room = (getattr(properties, "L2_cache_size", 0) or 0) // 3
    for each_sm in (8, 4, 2, 1):
        for block in (4096, 2048, 1024):
            size = 4 * block * each_sm * properties.multi_processor_count
            if size <= room:
                inside = torch.ones(size // 4 * (room // size), device=device)
                return _reader(device, inside, L2_PASSES, block, each_sm)
    return None


def _triton_figures(device: torch.device, gpu: Gpu, say: Callable[[str], None]) -> dict[str, Any]:
    import torch

    from warpwave.runtime import launch
    from warpwave.workbench.bench.timing import host_time_us

    figures: dict[str, Any] = {}
    say("L2")
    l2_reader = _l2_reader(device)
    if l2_reader is not None:
        read, count = l2_reader
        figures["l2_gbps"] = count / min(_time(read, device, flush_l2=False).samples_us) * 1e-3
    say("exponentials")
    block, programs = 2048, 4 * gpu.num_sms
    out = torch.empty(block * programs, device=device)

    def exponentials() -> None:
        exponentials_kernel[(programs,)](out, EXPONENTIALS_EACH, BLOCK=block, num_warps=8)

    timed = _time(exponentials, device)
    figures["exponentials_gops"] = block * programs * EXPONENTIALS_EACH / min(timed.samples_us) * 1e-3
    say("launch")
    spec = launch.Launch(empty_kernel, 1, (out,), (), {}, {"num_warps": 4})
    launcher = launch.bind(spec)
    figures["launch_us"] = _time(lambda: launcher(out), device).median_us
    figures["host_call_us"] = host_time_us(lambda: launcher(out), device=device)
    return figures


def _measure_cpu(say: Callable[[str], None]) -> dict[str, Any]:
    import torch

    device = torch.device("cpu")
    figures: dict[str, Any] = {"product_tflops": {}, "product_sizes": {}}
    for path in ("float32", "bfloat16", "float16"):
        say(f"product, {path}")
        dtype = getattr(torch, path)
        n = _product_size(device, dtype, path, 2048, CPU_PRODUCT_US)
        timed = _time(_product(device, dtype, n), device, rounds=3)
        figures["product_tflops"][path] = 2 * n**3 / min(timed.samples_us) * 1e-6
        figures["product_sizes"][path] = n
    say("copy")
    source = torch.ones(CPU_STREAM_BYTES // 4)
    target = torch.empty_like(source)
    timed = _time(lambda: target.copy_(source), device)
    figures["copy_gbps"] = 2 * CPU_STREAM_BYTES / min(timed.samples_us) * 1e-3
    say("read")
    figures["read_gbps"] = CPU_STREAM_BYTES / min(_time(lambda: source.sum(), device).samples_us) * 1e-3
    say("exponentials")
    x = torch.linspace(-10, 0, 1 << 18)  # 1 MB, which stays in cache
    out = torch.empty_like(x)
    figures["exponentials_gops"] = x.numel() / min(_time(lambda: torch.exp(x, out=out), device).samples_us) * 1e-3
    say("call")
    one = torch.zeros(1)
    figures["launch_us"] = _time(lambda: one.add_(1), device).median_us
    return figures


def _time(
    call: Call,
    device: torch.device,
    *,
    rounds: int = 5,
    warmup_s: float = 0.05,
    sample_s: float = 0.02,
    flush_l2: bool = True,
    on_round: Callable[[int], None] | None = None,
) -> Samples:
    from warpwave.workbench.bench.timing import time_interleaved

    return time_interleaved(
        {"call": call},
        device=device,
        rounds=rounds,
        warmup_s=warmup_s,
        sample_s=sample_s,
        flush_l2=flush_l2,
        on_round=on_round,
    )["call"]


def _triton_runs() -> bool:
    return NO_TRITON is None and not INTERPRETED


# Storage --------------------------------------------------------------------------------------------------------------


def store(ceilings: Ceilings) -> Path:
    """Stores ceilings in the user's cache (`$XDG_CACHE_HOME` or `~/.cache`), replacing older ones of the same device.

    Raises:
        OSError: the cache cannot be written.
    """
    path = cache_file(ceilings.gpu, ceilings.arch)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text(ceilings))
    return path


def text(ceilings: Ceilings) -> str:
    """Returns the ceilings as JSON, which `read` reads."""
    return json.dumps({"schema": SCHEMA, **asdict(ceilings)}, indent=2) + "\n"


RATE, RATES = OrNone(Number(1e-9, 1e12)), MapOf(Number(1e-9, 1e12))
_SNAPSHOTS = Table(optional=dict.fromkeys(("before", "sustained", "after"), OrNone(READING)))
_ENVIRONMENT = replace(
    ENVIRONMENT,
    optional={**ENVIRONMENT.optional, "snapshots": _SNAPSHOTS, "product_sizes": MapOf(Integer(1, 1 << 20))},
)
_CEILINGS = Table(
    required={"schema": OneOf((SCHEMA,)), "gpu": WORD, "arch": WORD, "date": WORD, "environment": _ENVIRONMENT},
    optional={
        **dict.fromkeys(("copy_gbps", "read_gbps", "l2_gbps", "exponentials_gops", "launch_us", "host_call_us"), RATE),
        **dict.fromkeys(("product_tflops", "sustained_tflops"), RATES),
    },
)


def read(path: Path) -> Ceilings:
    """Reads ceilings from a file that holds the result of `text`.

    Raises:
        Unreadable: the file cannot be read or does not hold ceilings; the message names the file and the reason.
    """
    data = read_json(path)
    try:
        check(_CEILINGS, data)
    except Mismatch as error:
        raise Unreadable(f"{path} is no file of ceilings: {error}") from None
    return Ceilings(**{name: value for name, value in data.items() if name != "schema"})


def load(gpu: Gpu) -> Ceilings | None:
    """Returns the stored ceilings of a device, or None. A damaged file is reported and ignored."""
    name = _device_name(gpu)
    try:
        path = cache_file(name, gpu.arch)
        if not path.exists():
            return None
        ceilings = read(path)
    except (OSError, Unreadable) as error:
        log.warning("stored ceilings are ignored: %s; `warpwave roof` measures them again", printable(str(error)))
        return None
    if (ceilings.gpu, ceilings.arch) != (name, gpu.arch):
        log.warning("%s is ignored: it belongs to %s and not to %s", path, ceilings.gpu, name)
        return None
    return ceilings


def shipped(gpu: Gpu) -> Ceilings | None:
    """Returns the ceilings that ship with the package, measured on another card of the same name, or None."""
    for path in sorted(SHIPPED.glob("*.json")):
        try:
            ceilings = read(path)
        except Unreadable as error:
            log.warning("%s; the installation of warpwave is damaged", printable(str(error)))
            continue
        if (ceilings.gpu, ceilings.arch) == (gpu.name, gpu.arch):
            return ceilings
    return None


def cache_file(name: str, arch: str) -> Path:
    """Returns the path at which the ceilings of a device are stored.

    Raises:
        OSError: the user has no home directory, and XDG_CACHE_HOME is not set.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    slug = re.sub(r"[^a-z0-9]+", "-", f"{arch} {name}".lower()).strip("-")
    try:
        return Path(base).expanduser() / "warpwave" / "ceilings" / f"{slug}.json"
    except RuntimeError as error:  # a user id without an entry in the user database, as in some containers
        raise OSError(f"{error}; XDG_CACHE_HOME names another place") from None


def _device_name(gpu: Gpu) -> str:
    """Returns the device's name. CPUs are told apart by model and threads: machines may share a home directory."""
    if not gpu.is_cpu:
        return gpu.name
    import torch

    from warpwave.workbench.bench.environment import cpu_model

    return f"{cpu_model() or 'CPU'}, {torch.get_num_threads()} threads"
