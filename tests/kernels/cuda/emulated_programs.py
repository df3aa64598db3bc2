"""`Programs` whose kernels run in the emulator, so that the wrappers are tested as they are."""

from functools import lru_cache

from tests.kernels.cuda.emulator import Program


@lru_cache(maxsize=128)
def _program(source, name):
    return Program([source], [name])


class EmulatedPrograms:
    """In the place of `makeway.kernels.cuda.programs.Programs`."""

    def __init__(self, *, reverse=False):
        self.reverse = reverse

    def kernel(self, source, name, parameters):
        return _Launch(_program(source, name), name, reverse=self.reverse)


class _Launch:
    def __init__(self, program, name, *, reverse):
        self._program, self._name, self._reverse = program, name, reverse

    def launch(self, grid, threads, shared_bytes, arguments, *, overlaps_previous=False):
        self._program.run(
            self._name, grid, threads, shared_bytes=shared_bytes, arguments=arguments, reverse=self._reverse
        )
