"""Numba's CUDA simulator (`NUMBA_ENABLE_CUDASIM=1`), made to run warp-level kernels and to tell their mistakes.

`install()` before the kernels' modules are imported. It gives kernels

- `syncwarp`, `shfl_sync`, `shfl_up_sync`, `shfl_down_sync`, `shfl_xor_sync`, `ballot_sync`, `any_sync`, `all_sync`,
  `match_any_sync`, `activemask` and `lanemask_lt`, for full warps only: the mask names all 32 lanes and a block is a
  multiple of 32 threads. Operands and results have the types of the hardware: a shuffle takes 32- and 64-bit signed
  integers and floats and keeps the type; a ballot is an int32, negative where lane 31 votes;
- bit counts by the operand's width and sign, and a float32 `fma` that rounds once;
- shared arrays that start as garbage in every block, one for each call (also for two calls on a line);
- integer arithmetic that wraps without a warning;
- blocks whose threads wait without polling. Threads that can never meet (a lane that has returned, a warp primitive
  against a block barrier, two different primitives) raise `Deadlock` instead of hanging, and an error in one thread
  ends the others and surfaces itself;
- `cuda.jit` with the options that only a device has a use for.

What still differs from a device:

- A kernel must refer to the module as `cuda`, and device functions must be `cuda.jit(device=True)` functions.
- A plain `njit` function runs compiled for the CPU and returns Python numbers: wrap its result in a NumPy type, or
  it neither wraps around nor keeps its width (`np.int32(key_of(x))`). Python numbers count as int64 and float64.
- An `@intrinsic` can't be called from a simulated kernel, only from an `njit` function that compiles for the CPU;
  `libdevice` functions return None.
- NumPy keeps `float32 * 0.5` in float32; Numba makes it float64. The PTX tests look for that.
"""

import math
import sys
import threading

import numpy as np

LANES = 32
_POISON = 0xCB
_SHUFFLED = (np.int32, np.int64, np.float32, np.float64)
_DEVICE_OPTIONS = ("launch_bounds", "lineinfo", "max_registers", "lto", "forceinline", "extensions")


class Deadlock(RuntimeError):
    """The threads of a block wait for each other at points where they can't meet."""


class _Ended(BaseException):
    """Another thread of the block has failed: end without a word."""


class _Gathering:
    """The threads that wait at one point, and what each of them brings."""

    def __init__(self):
        self.brought = {}
        self.complete = threading.Event()


class _Block:
    """The running threads of a block, and where they wait."""

    def __init__(self, num_threads):
        self.num_threads = num_threads
        self.shared = {}
        self._lock = threading.Lock()
        self._live = num_threads
        self._num_waiting = 0
        self._barrier = _Gathering()
        self._warps = [_Gathering() for _ in range(-(-num_threads // LANES))]
        self._failed = False

    def barrier(self, thread):
        """Wait for every thread of the block that hasn't returned."""
        self._wait(thread, None, None)

    def exchange(self, thread, primitive, value):
        """Wait for the 32 lanes of the thread's warp; their values in the order of lanes."""
        if self.num_threads % LANES:
            raise ValueError(f"block size={self.num_threads}, expected a multiple of {LANES} for warp primitives")
        brought = self._wait(thread, thread.thread_id // LANES, (primitive, value))
        primitives = {name for name, _ in brought.values()}
        if len(primitives) > 1:
            raise Deadlock(f"the lanes of a warp meet in different primitives: {', '.join(sorted(primitives))}")
        return [brought[lane][1] for lane in range(LANES)]

    def leave(self):
        """The thread has returned."""
        with self._lock:
            self._live -= 1
            if self._failed:
                return
            if self._live and len(self._barrier.brought) == self._live:
                self._barrier = self._release(self._barrier, self._live)
            self._check_progress("a thread returned while the others wait for it")

    def fail(self):
        """The thread has raised: no other can go on."""
        with self._lock:
            self._fail()

    def _wait(self, thread, warp, value):
        with self._lock:
            if self._failed:
                raise _Ended
            gathering = self._barrier if warp is None else self._warps[warp]
            gathering.brought[thread.thread_id if warp is None else thread.thread_id % LANES] = value
            self._num_waiting += 1
            expected = self._live if warp is None else LANES
            if len(gathering.brought) == expected:
                successor = self._release(gathering, expected)
                if warp is None:
                    self._barrier = successor
                else:
                    self._warps[warp] = successor
            self._check_progress("all threads wait, at points where they can't meet")
        gathering.complete.wait()
        if self._failed:
            raise _Ended
        return gathering.brought

    def _release(self, gathering, num_threads):
        self._num_waiting -= num_threads
        gathering.complete.set()
        return _Gathering()

    def _check_progress(self, reason):
        if self._live and self._num_waiting == self._live:
            at_barrier = len(self._barrier.brought)
            in_warps = {
                index: sorted({name for name, _ in warp.brought.values()})
                for index, warp in enumerate(self._warps)
                if warp.brought
            }
            self._fail()
            raise Deadlock(f"{reason}: {at_barrier} at a block barrier, warps (number: primitives) {in_warps}")

    def _fail(self):
        self._failed = True
        for gathering in (self._barrier, *self._warps):
            gathering.complete.set()


def _run_block(manager, grid_point, *args):
    """`BlockManager.run` without polling."""
    from numba.cuda.simulator.kernel import BlockThread

    block = _Block(math.prod(manager._block_dim))

    def target():
        with np.errstate(over="ignore"):
            try:
                manager._f(*args)
                block.leave()
            except _Ended:
                pass
            except BaseException:
                block.fail()
                raise

    threads = [
        BlockThread(target, manager, grid_point, point, manager._debug) for point in np.ndindex(*manager._block_dim)
    ]
    manager._simulated = block
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for thread in threads:
        if thread.exception:
            error, traceback = thread.exception
            raise error.with_traceback(traceback)


def _this():
    thread = threading.current_thread()
    return thread, thread._manager._simulated


def _exchange(primitive, mask, value):
    if int(mask) not in (0xFFFFFFFF, -1):
        raise ValueError(f"mask={mask:#x}, expected 0xffffffff: only full warps are simulated")
    thread, block = _this()
    return thread.thread_id % LANES, block.exchange(thread, primitive, value)


def _signed(bits):
    return np.uint32(bits).view(np.int32)


def _mask_of(votes):
    return _signed(sum(1 << lane for lane, vote in enumerate(votes) if vote))


def _typed(value):
    """The value as a NumPy scalar; Python numbers are what Numba takes them for."""
    if isinstance(value, np.generic):
        return value
    return np.int64(value) if isinstance(value, int) else np.float64(value)


def _shuffle(primitive, mask, value, source):
    value = _typed(value)
    if type(value) not in _SHUFFLED:
        expected = ", ".join(kind.__name__ for kind in _SHUFFLED)
        raise TypeError(f"{primitive} of {type(value).__name__}, expected one of {expected}")
    lane, values = _exchange(primitive, mask, value)
    if len({type(other) for other in values}) > 1:
        raise TypeError(f"{primitive} of different types in a warp")
    source = source(lane)
    return values[source] if 0 <= source < LANES else value


def _distance(primitive, value):
    if not 0 <= value < LANES:
        raise ValueError(f"{primitive} by {value}, expected 0 to {LANES - 1}")
    return int(value)


def _unsigned(value):
    value = _typed(value)
    bits = value.dtype.itemsize * 8
    return int(value) & ((1 << bits) - 1), bits


def _fma(a, b, c):
    """a*b + c rounded once: exact product, sum rounded to odd in float64, then to float32."""
    if {type(a), type(b), type(c)} != {np.float32}:
        raise TypeError("fma of float32 only")
    product, addend = float(a) * float(b), float(c)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    if error and math.isfinite(error) and not int(np.float64(total).view(np.int64)) & 1:
        total = math.nextafter(total, math.copysign(math.inf, error))
    return np.float32(total)


class _Primitives:
    """What kernels get as attributes of `cuda`, beside what the simulator gives them or in its stead."""

    def syncwarp(self, mask=0xFFFFFFFF):
        _exchange("syncwarp", mask, None)

    def shfl_sync(self, mask, value, lane):
        return _shuffle("shfl_sync", mask, value, lambda own: int(lane) % LANES)

    def shfl_up_sync(self, mask, value, delta):
        delta = _distance("shfl_up_sync", delta)
        return _shuffle("shfl_up_sync", mask, value, lambda own: own - delta)

    def shfl_down_sync(self, mask, value, delta):
        delta = _distance("shfl_down_sync", delta)
        return _shuffle("shfl_down_sync", mask, value, lambda own: own + delta)

    def shfl_xor_sync(self, mask, value, lane_mask):
        lane_mask = _distance("shfl_xor_sync", lane_mask)
        return _shuffle("shfl_xor_sync", mask, value, lambda own: own ^ lane_mask)

    def ballot_sync(self, mask, predicate):
        return _mask_of(_exchange("ballot_sync", mask, bool(predicate))[1])

    def any_sync(self, mask, predicate):
        return any(_exchange("any_sync", mask, bool(predicate))[1])

    def all_sync(self, mask, predicate):
        return all(_exchange("all_sync", mask, bool(predicate))[1])

    def match_any_sync(self, mask, value):
        bits = _typed(value).tobytes()
        return _mask_of(other == bits for other in _exchange("match_any_sync", mask, bits)[1])

    def activemask(self):
        return np.uint32(0xFFFFFFFF)

    def lanemask_lt(self):
        return np.uint32((1 << (_this()[0].thread_id % LANES)) - 1)

    def popc(self, value):
        return type(_typed(value))(_unsigned(value)[0].bit_count())

    def clz(self, value):
        unsigned, bits = _unsigned(value)
        return type(_typed(value))(bits - unsigned.bit_length())

    def ffs(self, value):
        value, _ = _unsigned(value)
        return np.uint32((value & -value).bit_length())

    def brev(self, value):
        kind = type(_typed(value))
        value, bits = _unsigned(value)
        return np.array(int(f"{value:0{bits}b}"[::-1], 2), f"u{bits // 8}").view(kind)[()]

    def fma(self, a, b, c):
        return _fma(a, b, c)


def _garbage(shape, dtype):
    from numba.cuda import types
    from numba.cuda.np import numpy_support

    dtype = np.dtype(numpy_support.as_dtype(dtype) if isinstance(dtype, types.Type) else dtype)
    return np.full(math.prod(np.atleast_1d(shape)) * dtype.itemsize, _POISON, np.uint8).view(dtype).reshape(shape)


def _shared_array(simulated, shape, dtype, alignment=None):
    if shape == 0:  # dynamic: one buffer for all
        return simulated._specmask_dynamic_array(shape, dtype)
    frame = sys._getframe(1)
    return _this()[1].shared.setdefault((frame.f_code, frame.f_lasti), _garbage(shape, dtype))


def install():
    """Patch the simulator, once a process. Raises RuntimeError where it isn't enabled."""
    from numba import cuda
    from numba.cuda.core import config

    if not config.ENABLE_CUDASIM:
        raise RuntimeError("NUMBA_ENABLE_CUDASIM=0, expected 1, set before numba is imported")
    from numba.cuda.simulator import kernel, kernelapi

    if kernel.BlockManager.run is _run_block:
        return
    kernel.BlockManager.run = _run_block
    kernel.BlockThread.syncthreads = lambda thread: thread._manager._simulated.barrier(thread)
    for name, method in vars(_Primitives).items():
        if not name.startswith("__"):
            setattr(kernelapi.FakeCUDAModule, name, method)
    kernelapi.FakeCUDAShared._specmask_dynamic_array = kernelapi.FakeCUDAShared.array
    kernelapi.FakeCUDAShared.array = _shared_array
    kernelapi.FakeCUDALocal.array = lambda simulated, shape, dtype, alignment=None: _garbage(shape, dtype)

    simulated_jit = cuda.jit

    def jit(*args, **options):
        return simulated_jit(*args, **{name: v for name, v in options.items() if name not in _DEVICE_OPTIONS})

    cuda.jit = jit
