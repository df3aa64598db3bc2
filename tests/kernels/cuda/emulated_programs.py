"""`Programs` whose kernels run in the emulator, so that the wrappers are tested as they are."""

from functools import lru_cache

from tests.kernels.cuda.emulator import Program


@lru_cache(maxsize=128)
def _program(source, name):
    return Program([source], [name])


class EmulatedPrograms:
    """In the place of `makeway.kernels.cuda.programs.Programs`; the parameters' types are checked too."""

    def __init__(self, *, reverse=False):
        self.reverse = reverse

    def kernel(self, source, name, parameters):
        return _program(source, name).kernel(name, parameters, reverse=self.reverse)
