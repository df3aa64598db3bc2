"""CUDA C++ to machine code, with NVRTC: one program of several files and many instantiations, kept on disk.

Owns `Module`: the machine code, what each kernel needs (registers, memory), and its loaded form; never imports a CUDA
package before something is compiled. Hazard: a module belongs to the GPU that was current when it was loaded.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from makeway.errors import EngineFailed, UserError
from makeway.kernels.cuda import cache
from makeway.kernels.cuda.launch import Kernel

HERE = Path(__file__).parent
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
INSTALL = "The CUDA kernels need NVIDIA's compiler: install it with `pip install makeway[gpu]`"


@dataclass(frozen=True)
class Resources:
    """What a thread or block of a kernel needs, as ptxas reports it; dynamic shared memory is not in it."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int  # stores and loads


@dataclass(frozen=True)
class Binary:
    """Machine code (a cubin), and by C++ name the name in it and what the kernel needs."""

    code: bytes
    symbols: dict[str, str]
    resources: dict[str, Resources]

    def to_bytes(self) -> bytes:
        about = {"symbols": self.symbols, "resources": {name: asdict(r) for name, r in self.resources.items()}}
        return json.dumps(about).encode() + b"\n" + self.code

    @classmethod
    def from_bytes(cls, entry: bytes) -> "Binary":
        about, _, code = entry.partition(b"\n")
        fields = json.loads(about)
        return cls(code, fields["symbols"], {name: Resources(**r) for name, r in fields["resources"].items()})


class Module:
    """Compiled kernels; `kernel` loads them into the context of the current GPU at its first call."""

    def __init__(self, binary: Binary) -> None:
        self.resources = binary.resources
        self._binary = binary
        self._loaded: Any = None

    @classmethod
    def compile(
        cls,
        source_files: Sequence[Path],
        names: Sequence[str],
        arch: str,
        *,
        defines: Mapping[str, int] | None = None,
        fast_math: bool = False,
        cache_folder: Path | None = None,
    ) -> "Module":
        """Machine code for `arch` ("sm_90") of the kernels with these C++ names, such as "linear_kernel<4, 2>".

        Needs no GPU. Included files are looked up beside the file that includes them, then beside lanes.cuh.
        `cache_folder`: the user's when None.
        Raises UserError when NVRTC is not installed, EngineFailed with its log when it rejects the program.
        """
        files = read_sources(source_files)
        version = nvrtc_version()
        options = [f"--gpu-architecture={arch}", "-std=c++17", "-lineinfo", "--ptxas-options=-v"]
        options += ["--device-as-default-execution-space"]  # there is no host code
        options += ["--no-cache"] if version >= (13, 0) else []  # its cache tells no resources, and we keep our own
        options += [f"-D{name}={value}" for name, value in sorted((defines or {}).items())]
        options += ["--use_fast_math"] if fast_math else []
        first = [path.name for path in source_files]
        what = json.dumps([version, options, first, list(names), sorted(files.items())])
        key = hashlib.sha256(what.encode()).hexdigest()
        folder = cache_folder or cache.default_folder()
        entry = cache.read(folder, key)
        if entry is not None:
            return cls(Binary.from_bytes(entry))
        program = "".join(f'#include "{name}"\n' for name in first)
        binary = _compile(program, files, names, options=options)
        cache.write(folder, key, binary.to_bytes())
        return cls(binary)

    def kernel(self, name: str, parameters: str) -> Kernel:
        """The kernel of this C++ name; `parameters` as in `Kernel`, checked against what was compiled.

        The first call loads the module: not while a graph is captured.
        """
        from cuda.bindings import driver

        if self._loaded is None:
            _use_torchs_context()
            status, self._loaded = driver.cuModuleLoadData(self._binary.code)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise EngineFailed(f"The GPU's driver does not load the kernels compiled for it: {status.name}")
        status, function = driver.cuModuleGetFunction(self._loaded, self._binary.symbols[name].encode())
        if status != driver.CUresult.CUDA_SUCCESS:
            raise EngineFailed(f"The kernel {name} is not in its module: {status.name}")
        return Kernel(name, function, parameters=parameters)


def read_sources(source_files: Sequence[Path]) -> dict[str, str]:
    """Name -> text of these files and of what they include with quotes, from beside them or from here."""
    texts: dict[str, str] = {}
    waiting = list(source_files)
    while waiting:
        path = waiting.pop()
        if path.name not in texts:
            texts[path.name] = path.read_text(encoding="utf-8")
            for name in INCLUDE.findall(texts[path.name]):
                beside = path.parent / name
                waiting.append(beside if beside.exists() else HERE / name)
    return texts


def nvrtc_version() -> tuple[int, int]:
    """Such as (13, 0); raises UserError when NVRTC is not installed."""
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:  # no bindings, or no library for them
        raise UserError(f"{INSTALL} ({error})") from error
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, status
    return major, minor


def current_arch() -> str:
    """The architecture of torch's current GPU, such as "sm_90"."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _compile(program: str, files: Mapping[str, str], names: Sequence[str], *, options: Sequence[str]) -> Binary:
    from cuda.bindings import nvrtc

    def call(function: Any, *arguments: Any) -> Any:
        status, *values = function(*arguments)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise EngineFailed(f"{function.__name__} failed: {status.name}")
        return values[0] if values else None

    def log() -> str:
        n_bytes = call(nvrtc.nvrtcGetProgramLogSize, handle)
        return filled(nvrtc.nvrtcGetProgramLog, n_bytes).rstrip(b"\0").decode(errors="replace")

    def filled(function: Any, n_bytes: int) -> bytes:
        buffer = bytes(max(2, n_bytes))  # written in place, so not one of the single bytes that Python shares
        call(function, handle, buffer)
        return buffer[:n_bytes]

    headers = sorted(files)
    texts = [files[name].encode() for name in headers]
    encoded = [name.encode() for name in headers]
    handle = call(nvrtc.nvrtcCreateProgram, program.encode(), b"makeway.cu", len(headers), texts, encoded)
    try:
        for name in names:
            call(nvrtc.nvrtcAddNameExpression, handle, name.encode())
        (status,) = nvrtc.nvrtcCompileProgram(handle, len(options), [option.encode() for option in options])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise EngineFailed(f"The kernels {', '.join(names)} do not compile ({status.name}, {options}):\n{log()}")
        symbols = {name: call(nvrtc.nvrtcGetLoweredName, handle, name.encode()).decode() for name in names}
        code = filled(nvrtc.nvrtcGetCUBIN, call(nvrtc.nvrtcGetCUBINSize, handle))
        found = parse_resources(log())
    finally:
        nvrtc.nvrtcDestroyProgram(handle)
    return Binary(code, symbols, {name: found[symbol] for name, symbol in symbols.items()})


def parse_resources(log: str) -> dict[str, Resources]:
    """By symbol, what `ptxas -v` prints; a function that was not inlined counts to the kernel before it."""
    found: dict[str, Resources] = {}
    for part in log.split("Compiling entry function '")[1:]:
        symbol = part.partition("'")[0]

        def total(pattern: str, text: str = part) -> int:
            return sum(int(number) for number in re.findall(pattern, text))

        found[symbol] = Resources(
            registers=total(r"Used (\d+) registers"),
            shared_bytes=total(r"(\d+) bytes smem"),
            stack_bytes=total(r"(\d+) bytes stack frame"),
            spill_bytes=total(r"(\d+) bytes spill"),
        )
    return found


def _use_torchs_context() -> None:
    """Makes sure that the thread has a CUDA context: the primary one of torch's current GPU, which torch uses."""
    import torch
    from cuda.bindings import driver

    torch.cuda.init()  # type: ignore[no-untyped-call]
    status, context = driver.cuCtxGetCurrent()
    if not int(context):
        torch.cuda.synchronize()  # torch makes its context at its first use
        status, context = driver.cuCtxGetCurrent()
    if status != driver.CUresult.CUDA_SUCCESS or not int(context):
        raise EngineFailed(f"There is no CUDA context on GPU {torch.cuda.current_device()}: {status.name}")
