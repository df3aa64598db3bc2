"""Devices for tests: one that keeps its own tally, one that fails on demand, one that is as late as it may be."""

from makeway.device import CpuDevice


class RecordingDevice(CpuDevice):
    """Tallies every copy on its own: source address -> times copied, and all bytes."""

    def __init__(self, vram_bytes=None):
        super().__init__(vram_bytes)
        self.sources = {}
        self.tally = 0

    def copy(self, target, source):
        key = source.data_ptr()
        self.sources[key] = self.sources.get(key, 0) + 1
        self.tally += source.nbytes
        super().copy(target, source)


class FlakyDevice(CpuDevice):
    """Call number `fail_at` (from 1) of alloc, host_alloc, copy, record and wait raises RuntimeError, once."""

    def __init__(self, vram_bytes=None, *, fail_at=None):
        super().__init__(vram_bytes)
        self.fail_at = fail_at
        self.n_calls = 0

    def _tick(self, what):
        self.n_calls += 1
        if self.n_calls == self.fail_at:
            raise RuntimeError(f"flaky device: call {self.n_calls} ({what}) fails")

    def alloc(self, n_bytes):
        self._tick("alloc")
        return super().alloc(n_bytes)

    def host_alloc(self, n_bytes):
        self._tick("host_alloc")
        return super().host_alloc(n_bytes)

    def copy(self, target, source):
        self._tick("copy")
        super().copy(target, source)

    def record_copies(self):
        self._tick("record copies")
        return _FlakyEvent(self)

    def record_compute(self):
        self._tick("record compute")
        return _FlakyEvent(self)

    def compute_waits(self, event):
        self._tick("compute waits")

    def copies_wait(self, event):
        self._tick("copies wait")

    def synchronize(self):
        self._tick("synchronize")


class _FlakyEvent:
    def __init__(self, device):
        self.device = device

    def is_done(self):
        self.device._tick("is_done")
        return True

    def wait(self):
        self.device._tick("wait")


class LazyDevice(RecordingDevice):
    """Copies happen only when somebody waits for their event or asks for it a second time.

    So a slot that is read without waiting holds old bytes, and an event that is polled once is not done yet.
    """

    def __init__(self, vram_bytes=None):
        super().__init__(vram_bytes)
        self._open = []  # copies asked for and not done: (number, target, source)

    def copy(self, target, source):
        key = source.data_ptr()
        self.sources[key] = self.sources.get(key, 0) + 1
        self.tally += source.nbytes
        self._count(target, source)
        self._open.append((self.n_copies, target, source))

    def record_copies(self):
        return _LazyEvent(self, self.n_copies)

    def synchronize(self):
        self.catch_up(self.n_copies)

    def catch_up(self, number):
        """Do all copies up to `number`, in order."""
        while self._open and self._open[0][0] <= number:
            _, target, source = self._open.pop(0)
            target.copy_(source)

    def is_open(self, number):
        """Whether a copy up to `number` is not done."""
        return bool(self._open) and self._open[0][0] <= number


class _LazyEvent:
    def __init__(self, device, number):
        self.device = device
        self.number = number
        self.was_asked = False

    def is_done(self):
        if self.was_asked:
            self.wait()
        self.was_asked = True
        return not self.device.is_open(self.number)

    def wait(self):
        self.device.catch_up(self.number)
