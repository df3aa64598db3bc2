"""Devices for tests: they keep a tally, fail on demand, are as late as they may be, or know what may run when."""

from dataclasses import replace

from makeway.device import CpuDevice


class RecordingDevice(CpuDevice):
    """Tallies on its own: source address -> times copied, all bytes copied, and every allocation of either memory."""

    def __init__(self, vram_bytes=None):
        super().__init__(vram_bytes)
        self.sources = {}
        self.tally = 0
        self.allocated, self.host_memories = [], []

    def alloc(self, n_bytes):
        self.allocated.append(n_bytes)
        return super().alloc(n_bytes)

    def host_alloc(self, n_bytes):
        self.host_memories.append(super().host_alloc(n_bytes))
        return self.host_memories[-1]

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


class OrderedDevice(CpuDevice):
    """Knows, as streams do, what runs only after what. Raises AssertionError when bytes are read that may still be on
    their way, or when a copy may overtake the computation that still reads its target."""

    def __init__(self, vram_bytes=None):
        super().__init__(vram_bytes)
        self._copies, self._reads = [], []  # (start, end) of every copy's target and of every read, in order
        self._n_copies_awaited = self._n_reads_awaited = 0  # by the computation, by the copies

    def watched(self, ops):
        """The same operations; the expert FFN says which bytes it reads."""

        def expert_ffn(x, *weights):
            for weight in weights:
                self._read(weight.raw)
            return ops.expert_ffn(x, *weights)

        return replace(ops, expert_ffn=expert_ffn)

    def copy(self, target, source):
        span = _span(target)
        assert not any(_overlap(span, read) for read in self._reads[self._n_reads_awaited :]), "a copy overtakes a read"
        self._copies.append(span)
        super().copy(target, source)

    def _read(self, raw):
        span = _span(raw)
        assert not any(_overlap(span, copy) for copy in self._copies[self._n_copies_awaited :]), "bytes read too early"
        self._reads.append(span)

    def synchronize(self):
        self._n_copies_awaited, self._n_reads_awaited = len(self._copies), len(self._reads)

    def record_copies(self):
        return _OrderedEvent(self, len(self._copies), 0)

    def record_compute(self):
        return _OrderedEvent(self, 0, len(self._reads))

    def compute_waits(self, event):
        self._n_copies_awaited = max(self._n_copies_awaited, event.n_copies)

    def copies_wait(self, event):
        self._n_reads_awaited = max(self._n_reads_awaited, event.n_reads)


class _OrderedEvent:
    def __init__(self, device, n_copies, n_reads):
        self.device, self.n_copies, self.n_reads = device, n_copies, n_reads

    def is_done(self):
        self.wait()
        return True

    def wait(self):
        self.device.compute_waits(self)
        self.device.copies_wait(self)


def _span(tensor):
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _overlap(a, b):
    return a[0] < b[1] and b[0] < a[1]
