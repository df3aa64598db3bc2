"""One compiled kernel and its launch on torch's current stream.

Owns the packed parameters; never keeps a tensor, checks a shape, or waits for the GPU.
Hazard: one thread at a time launches a kernel (its packed parameters are shared), one in which torch has used the GPU.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

from makeway.errors import EngineFailed

PARAMETERS: dict[str, Any] = {"p": ctypes.c_void_p, "i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float}
DEFAULT_SHARED_BYTES = 48 << 10  # more must be asked for (CUDA C++ programming guide, "Shared Memory")


class Kernel:
    """A kernel of a loaded module.

    `parameters`: one letter each: p a pointer (a torch tensor or an address), i an i32, l an i64, f an f32.
    """

    def __init__(self, name: str, function: Any, *, parameters: str) -> None:
        from cuda.bindings import driver

        self.name = name
        self._driver = driver
        self._success = driver.CUresult.CUDA_SUCCESS
        self._function = function
        self._shared_bytes = DEFAULT_SHARED_BYTES
        self._parameters = parameters
        self._values = [PARAMETERS[letter]() for letter in parameters]
        self._pointers = (ctypes.c_void_p * max(1, len(parameters)))(*[ctypes.addressof(v) for v in self._values])
        self._packed = ctypes.addressof(self._pointers)
        self._overlapping = self._config_that_overlaps()
        self._check_parameters()

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        arguments: Sequence[Any],
        *,
        overlaps_previous: bool = False,
    ) -> None:
        """Launches on torch's current stream (of its current GPU); may be captured into a graph.

        `overlaps_previous`: the kernel may start while the one before it still runs, and calls wait_for_previous()
        before it touches what that one uses; before sm_90 this changes nothing.
        Raises EngineFailed when the driver refuses.
        """
        import torch

        self._pack(arguments)
        if shared_bytes > self._shared_bytes:
            self._allow_shared(shared_bytes)
        stream = torch.cuda.current_stream().cuda_stream
        if overlaps_previous and self._overlapping is not None:
            config = self._overlapping
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.blockDimX = threads
            config.sharedMemBytes = shared_bytes
            config.hStream = stream
            (status,) = self._driver.cuLaunchKernelEx(config, self._function, self._packed, 0)
        else:
            (status,) = self._driver.cuLaunchKernel(
                self._function, *grid, threads, 1, 1, shared_bytes, stream, self._packed, 0
            )
        if status != self._success:
            raise EngineFailed(
                f"The GPU's driver refuses to launch {self.name}, grid {grid}, {threads} threads, "
                f"{shared_bytes} bytes of shared memory: {status.name}"
            )

    def _pack(self, arguments: Sequence[Any]) -> None:
        for letter, value, argument in zip(self._parameters, self._values, arguments, strict=True):
            if letter == "p" and not isinstance(argument, int):
                value.value = argument.data_ptr()
            else:
                value.value = argument
                assert letter != "i" or value.value == argument, f"{argument} is not an i32 ({self.name})"

    def _allow_shared(self, shared_bytes: int) -> None:
        driver = self._driver
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuFuncSetAttribute(self._function, attribute, shared_bytes)
        if status != self._success:
            raise EngineFailed(f"{shared_bytes} bytes of shared memory for {self.name}: {status.name}")
        self._shared_bytes = shared_bytes

    def _config_that_overlaps(self) -> Any:
        """A launch with programmatic stream serialisation; None where the GPU has none."""
        import torch

        if torch.cuda.get_device_capability() < (9, 0):
            return None
        driver = self._driver
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.blockDimY = config.blockDimZ = 1
        config.attrs = [attribute]
        config.numAttrs = 1
        return config

    def _check_parameters(self) -> None:
        """The sizes of the parameters are those that were compiled (the driver tells only sizes)."""
        driver = self._driver
        for index, value in enumerate(self._values):
            status, _, n_bytes = driver.cuFuncGetParamInfo(self._function, index)
            if status != self._success or n_bytes != ctypes.sizeof(value):
                raise EngineFailed(f"Parameter {index} of {self.name} is not {self._parameters[index]!r}")
        status, *_ = driver.cuFuncGetParamInfo(self._function, len(self._values))
        if status == self._success:
            raise EngineFailed(f"{self.name} has more parameters than {self._parameters!r}")
