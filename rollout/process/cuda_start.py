"""The CUDA driver, started beside the imports of a worker.

A process opens its GPUs and makes a context at its first use of CUDA, which takes seconds. So do its imports, which
hold the interpreter's lock; a call through ctypes does not hold it.
"""

import ctypes
import os
import threading

_LIBRARY = "libcuda.so.1"


def start_cuda(device: str) -> None:
    """Begin to open the visible GPUs, and to make the context of the one that `device` names, as `model.device` does.

    No-op for a CPU, and without a driver. Nothing is reported: torch meets the same errors, and says what they are.
    """
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cuda"):
        return
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError:
        return
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # torch's default; the driver reads it once
    index = int(number) if number.isdecimal() else 0
    threading.Thread(target=_start, args=(driver, index), name="cuda-start", daemon=True).start()


def _start(driver: ctypes.CDLL, index: int) -> None:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
