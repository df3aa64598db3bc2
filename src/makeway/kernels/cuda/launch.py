"""One compiled kernel and its launch on torch's current stream.

Owns the packed parameters; never keeps a tensor, checks a shape, or waits for the GPU.
Hazard: one thread at a time launches a kernel (its packed parameters are shared), one in which torch has used the GPU.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

from makeway.errors import EngineFailed

FORMATS = {"p": "P", "i": "i", "l": "q", "f": "f"}  # of `struct`, with the machine's own sizes and alignment
CONFIG = struct.Struct("@7IPPI")  # CUlaunchConfig: grid, block, shared bytes, stream, attributes and their number
ATTRIBUTE = struct.Struct("@I4xi60x")  # CUlaunchAttribute: id, a union of 64 bytes
DEFAULT_SHARED_BYTES = 48 << 10  # more must be asked for (CUDA C++ programming guide, "Shared Memory")


class Kernel:
    """A kernel of a loaded module.

    `parameters`: one letter each: p a pointer (a torch tensor or an address), i an i32, l an i64, f an f32.
    """

    def __init__(self, name: str, function: Any, *, parameters: str) -> None:
        import torch
        from cuda.bindings import driver

        self.name = name
        self._driver = driver
        self._function = function
        self._address = int(function)
        self._shared_bytes = DEFAULT_SHARED_BYTES
        self._format = struct.Struct("@" + "".join(FORMATS[letter] for letter in parameters))
        self._values = ctypes.create_string_buffer(max(1, self._format.size))
        self._pointers = self._places(parameters)
        self._attributes = ctypes.create_string_buffer(ATTRIBUTE.size)
        overlaps = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        ATTRIBUTE.pack_into(self._attributes, 0, int(overlaps), 1)
        self._config = ctypes.create_string_buffer(CONFIG.size)
        self._can_overlap = torch.cuda.get_device_capability() >= (9, 0)
        self._device = torch.cuda.current_device()
        self._stream_of = torch._C._cuda_getCurrentRawStream  # as Triton does; torch.cuda.current_stream is slower
        # Through ctypes, because the bindings take several times as long as the driver itself.
        self._launch = _library().cuLaunchKernelEx
        self._packed = ctypes.addressof(self._config), self._address, ctypes.addressof(self._pointers), None
        self._launch.argtypes = [ctypes.c_void_p] * 4

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        arguments: Sequence[Any],
        *,
        overlaps_previous: bool = False,
    ) -> None:
        """Launches on torch's current stream of the kernel's GPU; may be captured into a graph.

        `overlaps_previous`: the kernel may start while the one before it still runs, and calls wait_for_previous()
        before it touches what that one uses; before sm_90 this changes nothing.
        Raises EngineFailed when the arguments are not the kernel's, or the driver refuses.
        """
        values = [a if isinstance(a, int | float) else a.data_ptr() for a in arguments]
        try:
            self._format.pack_into(self._values, 0, *values)
        except struct.error as error:
            raise EngineFailed(f"The arguments {values} are not those of {self.name}: {error}") from error
        if shared_bytes > self._shared_bytes:
            self._allow_shared(shared_bytes)
        stream = self._stream_of(self._device)
        attributes = ctypes.addressof(self._attributes), int(overlaps_previous and self._can_overlap)
        CONFIG.pack_into(self._config, 0, *grid, threads, 1, 1, shared_bytes, stream, *attributes)
        status = self._launch(*self._packed)
        if status:
            raise EngineFailed(
                f"The GPU's driver refuses to launch {self.name}, grid {grid}, {threads} threads, "
                f"{shared_bytes} bytes of shared memory: {self._driver.CUresult(status).name}"
            )

    def _places(self, parameters: str) -> Any:
        """Pointers to the values; checks their sizes against what was compiled (the driver tells no types)."""
        success = self._driver.CUresult.CUDA_SUCCESS
        places = (ctypes.c_void_p * max(1, len(parameters)))()
        for index, letter in enumerate(parameters):
            n_bytes = struct.calcsize(FORMATS[letter])
            status, _, compiled_bytes = self._driver.cuFuncGetParamInfo(self._function, index)
            if status != success or n_bytes != compiled_bytes:
                raise EngineFailed(f"Parameter {index} of {self.name} is not {letter!r}")
            end = struct.calcsize(self._format.format[: index + 2])  # the first letter is the @
            places[index] = ctypes.addressof(self._values) + end - n_bytes
        status, *_ = self._driver.cuFuncGetParamInfo(self._function, len(parameters))
        if status == success:
            raise EngineFailed(f"{self.name} has more parameters than {parameters!r}")
        return places

    def _allow_shared(self, shared_bytes: int) -> None:
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = self._driver.cuFuncSetAttribute(self._function, attribute, shared_bytes)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise EngineFailed(f"{shared_bytes} bytes of shared memory for {self.name}: {status.name}")
        self._shared_bytes = shared_bytes


def _library() -> Any:
    """The driver, which is loaded already."""
    return ctypes.CDLL("libcuda.so.1")
