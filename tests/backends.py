"""The kernels on NumPy arrays, wherever they run: a test is written once and takes a backend.

`Host` hands everything through. `Device` converts at the edge and holds every result against the host twin's, bit for
bit, before a test sees it. Records come back with NumPy arrays and can be passed on: the device's own go with them.
"""

import dataclasses
from contextlib import nullcontext
from unittest import mock

import numpy as np

import gpu

DRAWN_FIELDS = ("index", "maximum", "cutoff", "scale", "share")
SUPPORT_FIELDS = ("status", "maximum", "cutoff", "total", "count", "argmax", "greedy")


class Host:
    """NumPy arrays to the njit twins."""

    name = "host"
    select_support = staticmethod(gpu.select_support)
    verify_chain = staticmethod(gpu.verify_chain)
    capture_masks = staticmethod(gpu.capture_masks)
    run_round = staticmethod(gpu.run_round)
    draw_drafts = staticmethod(lambda *arguments, **options: draw_all(lambda array: array, *arguments, **options))
    support_log_softmax = staticmethod(gpu.support_log_softmax)
    support_log_softmax_backward = staticmethod(gpu.support_log_softmax_backward)
    row_sums = staticmethod(gpu.row_sums)


class Device:
    """NumPy arrays to CuPy's and back, and the host twin beside it: with each hint, which mustn't change a bit."""

    name = "device"
    hints = (False, True)
    """Of whole_rows."""

    @staticmethod
    def scans_apart(apart):
        """Entered: whether the scan is a kernel of its own, as it is for many rows. They mustn't differ in a bit."""
        from gpu.support import device

        return mock.patch.object(device, "resident_blocks", return_value=1) if apart else nullcontext()

    def up(self, array):
        """The array on the device, with the strides that it has here, and as far from a granule's boundary as it is
        from one in the array that it is a view of."""
        import cupy

        offset, memory = offset_of(array) % 16, memory_of(array)
        buffer = cupy.zeros(-(-(offset + memory.size) // 32) * 32, array.dtype)  # whole granules, as allocators give
        flat = buffer[offset : offset + memory.size]
        if memory.size:
            flat.set(memory)
        if array.flags.c_contiguous:
            return flat.reshape(array.shape)
        return cupy.ndarray(array.shape, array.dtype, flat.data, array.strides)

    def down(self, array):
        """A device array as NumPy's."""
        return array.get()

    def entries(self, array, counts):
        """The first counts[row] of each row, zeros behind them."""
        array = self.down(array)
        return np.where(np.arange(array.shape[1]) < counts[:, None], array, 0).astype(array.dtype)

    def select_support(self, *arguments, **options):
        for i, whole_rows in enumerate(self.hints):
            with self.scans_apart(i % 2 == arguments[0].shape[0] % 2):
                result = self._call(gpu.select_support, arguments, options | {"whole_rows": whole_rows})
        return result

    def verify_chain(self, *arguments, **options):
        return self._call(gpu.verify_chain, arguments, options)

    def capture_masks(self, *arguments, **options):
        return self._call(gpu.capture_masks, arguments, options)

    def run_round(self, *arguments, **options):
        """Into the same memory again and again: what blocks tell each other must be gone after a call."""
        names = {name: self.to_device(value) for name, value in options.items()}
        own = results = None
        for i, whole_rows in enumerate((*self.hints, *self.hints)):
            with self.scans_apart(i % 3 == 0):  # both ways with each hint
                own = gpu.run_round(*map(self.to_device, arguments), **names, whole_rows=whole_rows, out=own)
            before, results = results, tuple(self.to_host(record) for record in own)
            for got, want in zip(results, before or results, strict=True):
                assert_same(got, want)
            assert not self.down(own[0].walk.ratios).any()
        return results

    def draw_drafts(self, *arguments, **options):
        """See `draw_all`; with each hint into the same memory again."""
        want, own = draw_all(lambda array: array, *arguments, **options), None
        for i, whole_rows in enumerate((*self.hints, *self.hints)):
            with self.scans_apart(i % 3 == 0):
                own = draw_all(self.up, *arguments, **options, whole_rows=whole_rows, out=own)
            for name in DRAWN_FIELDS:
                got, expected = self.down(getattr(own, name)), getattr(want, name)
                assert (got.dtype, got.shape) == (expected.dtype, expected.shape), name
                assert same_bits(got, expected).all(), name
        return want

    def support_log_softmax(self, *arguments):
        return self._call_for_array(gpu.support_log_softmax, arguments)

    def row_sums(self, *arguments):
        return self._call_for_array(gpu.row_sums, arguments)

    def support_log_softmax_backward(self, *arguments):
        """As the function: into its last argument."""
        *others, grad = arguments
        want, own = grad.copy(), self.up(grad)
        gpu.support_log_softmax_backward(*map(self.to_device, others), own)
        gpu.support_log_softmax_backward(*others, want)
        grad[...] = self.down(own)
        assert same_bits(grad, want).all()

    def _call_for_array(self, function, arguments):
        """Into new memory, then into the same again."""
        on_device, want = [self.to_device(argument) for argument in arguments], function(*arguments)
        own = function(*on_device)
        for out in (own, None):
            got = self.down(own)
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            same = same_bits(got, want)
            assert same.all(), f"at {np.argwhere(~same)[:5].tolist()}: {got[~same][:5]}, expected {want[~same][:5]}"
            if out is not None:
                out[...] = np.nan
                assert function(*on_device, out=out) is out
        return got

    def _call(self, function, arguments, options):
        names = {name: self.to_device(value) for name, value in options.items()}
        own = function(*map(self.to_device, arguments), **names)
        result = self.to_host(own)
        assert_same(result, function(*arguments, **options))
        object.__setattr__(result, "on_device", own)
        return result

    def to_device(self, value):
        """An argument of a public function: arrays, records that `to_host` made, or anything else."""
        if isinstance(value, np.ndarray):
            return self.up(value)
        if isinstance(value, gpu.LogitsLaw):
            fields = {name: self.to_device(getattr(value, name)) for name in value.parts()}
            return dataclasses.replace(value, logits=self.up(value.logits), **fields)
        return getattr(value, "on_device", value)

    def to_host(self, record):
        """A Support, Verdict or Capture of device arrays with NumPy's, as the host twin would return it."""
        if isinstance(record, gpu.Support):
            fields = {name: self.down(getattr(record, name)) for name in (*SUPPORT_FIELDS, "temperature")}
            stored = np.where(fields["count"] <= record.capacity, fields["count"], 0)
            entries = {name: self.entries(getattr(record, name), stored) for name in ("token_ids", "weights")}
            return gpu.Support(**fields, **entries)
        if isinstance(record, gpu.Verdict):
            values = {field.name: getattr(record, field.name) for field in _fields(record)}
            return gpu.Verdict(**{name: None if own is None else self.down(own) for name, own in values.items()})
        fields = {name: self.down(getattr(record, name)) for name in ("status", "failed_row", "counts", "row_start")}
        offsets = self.down(record.offsets)
        num_rows, total = fields["row_start"][-1], offsets[-1]
        assert offsets.size == fields["counts"].size + 1
        assert (offsets[num_rows:] == total).all()
        entries = {name: self.down(getattr(record, name)[:total]) for name in ("token_ids", "logprobs")}
        return gpu.Capture(**fields, offsets=offsets[: num_rows + 1], **entries)


HOST, DEVICE = Host(), Device()


def draw_all(up, logits, parameters, uniforms, in_turn=False, out=None, **options):
    """What `gpu.draw_drafts` makes of logits [B, D, n], policies of B * D rows and uniforms [B, D], all at once or a
    draft of each request at a time."""
    batch, num_drafts, _ = logits.shape
    logits, coins = up(logits), up(uniforms)
    index = up(np.full((batch, num_drafts), -7)) if out is None else out.index
    width = 1 if in_turn else num_drafts
    for k in range(0, num_drafts, width):
        own = [up(np.ascontiguousarray(x.reshape(batch, num_drafts)[:, k : k + width].reshape(-1))) for x in parameters]
        out = gpu.draw_drafts(logits[:, k : k + width], *own, coins, index, k, **options, out=out)
    return out


def memory_of(array):
    """What lies between the first and the last element of a view, flat."""
    steps = [step for step, length in zip(array.strides, array.shape, strict=True) if length > 1]
    lengths = [length for length in array.shape if length > 1]
    span = sum(step * (length - 1) for step, length in zip(steps, lengths, strict=True)) // array.itemsize + 1
    return np.lib.stride_tricks.as_strided(array, (span if array.size else 0,), (array.itemsize,))


def offset_of(view):
    """Elements from the start of the array that owns the memory to the start of the view."""
    owner = view if view.base is None or not isinstance(view.base, np.ndarray) else view.base
    return (view.ctypes.data - owner.ctypes.data) // view.itemsize


def same_bits(a, b):
    """Elementwise: the same bits, or NaN both."""
    if a.dtype.kind != "f":
        return a == b
    return (a.view(f"i{a.itemsize}") == b.view(f"i{b.itemsize}")) | (np.isnan(a) & np.isnan(b))


def _fields(record):
    return [field for field in dataclasses.fields(record) if field.name != "progress"]


def assert_same(got, want):
    """Two records are the same, bit for bit; of a support the entries of rows that fit."""
    assert type(got) is type(want)
    support = isinstance(want, gpu.Support)
    for name in SUPPORT_FIELDS if support else [field.name for field in _fields(want)]:
        a, b = getattr(got, name), getattr(want, name)
        if a is b is None:  # bounds of drafts that weren't a block
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        same = same_bits(a, b)
        assert same.all(), f"{name} at {np.argwhere(~same)[:5].tolist()}: {a[~same][:5]}, expected {b[~same][:5]}"
    if not support:
        return
    assert got.capacity == want.capacity
    for row in np.flatnonzero(want.count <= want.capacity):
        for name in ("token_ids", "weights"):
            a, b = (getattr(record, name)[row, : want.count[row]] for record in (got, want))
            assert np.array_equal(a, b), f"{name} of row {row}"
