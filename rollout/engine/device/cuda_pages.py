"""GPU memory that can be given back while its addresses stay, through the driver's virtual memory management.

    reserve    cuMemAddressReserve                                        addresses
    back       cuMemCreate -> cuMemMap -> cuMemSetAccess                  memory at these addresses
    give_back  cuMemUnmap -> cuMemRelease                                 the driver has the memory again
    end        cuMemUnmap -> cuMemRelease -> cuMemAddressFree             when the last tensor there is gone

The driver's library is the one that torch has loaded, and the context is torch's own. These calls are not ordered with
streams: wait for the device before memory is unmapped.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Protocol

import torch

from rollout.engine.device.releasable import MemoryShortError

_GIB = 2**30
_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3  # CUmemAllocationType, CUmemLocationType, CUmemAccess_flags
_GRANULARITY_RECOMMENDED = 1
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    """The last part of CUmemAllocationProp."""

    _fields_ = (
        ("compression_type", ctypes.c_ubyte),
        ("rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""

    def __init__(self, name: str, status: int, text: str) -> None:
        super().__init__(f"{name} failed: {text} ({status})")
        self.status = status


class _Driver:
    """Calls of libcuda, with the device's context current."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        self._device = device
        self._library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver. Raises DriverError with the driver's message."""
        with torch.cuda.device(self._device):
            status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise DriverError(name, status, (text.value or b"an unknown error").decode())

    def wait(self) -> None:
        """Return when nothing runs on the device."""
        torch.cuda.synchronize(self._device)


class _AddressRange:
    """Reserved addresses, and the handle of the memory there, if there is any."""

    def __init__(self, driver: Driver, address: int, nbytes: int) -> None:
        self.driver, self.address, self.nbytes = driver, address, nbytes
        self.handle: int | None = None

    def unmap(self) -> None:
        """Give the memory back to the driver."""
        handle, self.handle = self.handle, None
        if handle is not None:
            self.driver.call("cuMemUnmap", ctypes.c_uint64(self.address), ctypes.c_size_t(self.nbytes))
            self.driver.call("cuMemRelease", ctypes.c_uint64(handle))

    def __del__(self) -> None:
        """The last tensor here is gone. At the end of the process the driver frees everything by itself."""
        if sys is None or sys.is_finalizing():
            return
        if self.handle is not None:
            self.driver.wait()
        self.unmap()
        self.driver.call("cuMemAddressFree", ctypes.c_uint64(self.address), ctypes.c_size_t(self.nbytes))


class _Array:
    """An array interface for torch; it keeps the addresses alive as long as the tensor lives."""

    def __init__(self, addresses: _AddressRange, start: int, nbytes: int) -> None:
        self._addresses = addresses
        pointer = (addresses.address + start, False)
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": pointer, "version": 3}


class Driver(Protocol):
    """Calls of libcuda."""

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver. Raises DriverError."""

    def wait(self) -> None:
        """Return when nothing runs on the device."""


class CudaPages:
    """Memory of one GPU, `cuda:N`."""

    lazy = False

    def __init__(self, device: torch.device, driver: Driver | None = None) -> None:
        self._device = device
        self._index = device.index
        self._driver = driver or _Driver(device)
        self._properties = _Properties(type=_PINNED, location=_Location(_DEVICE, self._index))
        granularity = ctypes.c_size_t()
        self._driver.call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(granularity),
            ctypes.byref(self._properties),
            ctypes.c_int(_GRANULARITY_RECOMMENDED),
        )
        self._granularity = granularity.value

    def reserve(self, nbytes: int) -> _AddressRange:
        """Reserve addresses for `nbytes`, rounded up to the driver's granularity."""
        rounded = -(-nbytes // self._granularity) * self._granularity
        address, zero = ctypes.c_uint64(), ctypes.c_uint64(0)
        self._driver.call(
            "cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(rounded), ctypes.c_size_t(0), zero, zero
        )
        return _AddressRange(self._driver, address.value, rounded)

    def back(self, addresses: _AddressRange) -> None:
        """Put memory of this GPU there, readable and writable. After an error (MemoryShortError) it has no memory."""
        assert addresses.handle is None
        handle, nbytes, zero = ctypes.c_uint64(), ctypes.c_size_t(addresses.nbytes), ctypes.c_uint64(0)
        try:
            self._driver.call("cuMemCreate", ctypes.byref(handle), nbytes, ctypes.byref(self._properties), zero)
        except DriverError as error:
            if error.status != _OUT_OF_MEMORY:
                raise
            raise MemoryShortError(
                f"{addresses.nbytes / _GIB:.2f} GiB more are needed and {self.free_bytes() / _GIB:.2f} GiB are free: "
                "free some memory of this GPU, then try again"
            ) from error
        address, access = ctypes.c_uint64(addresses.address), _Access(_Location(_DEVICE, self._index), _READ_WRITE)
        try:
            self._driver.call("cuMemMap", address, nbytes, ctypes.c_size_t(0), handle, zero)
        except DriverError:
            self._driver.call("cuMemRelease", handle)
            raise
        addresses.handle = handle.value
        try:
            self._driver.call("cuMemSetAccess", address, nbytes, ctypes.byref(access), ctypes.c_size_t(1))
        except DriverError:
            addresses.unmap()
            raise

    def give_back(self, addresses: _AddressRange) -> None:
        """Give the memory back; the device is idle."""
        addresses.unmap()

    def tensor(self, addresses: _AddressRange, start: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] at byte `start`."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        tensor = torch.as_tensor(_Array(addresses, start, nbytes), device=self._device)
        assert tensor.data_ptr() == addresses.address + start, "torch made a copy"
        return tensor

    def free_bytes(self) -> int:
        """Free memory as the driver reports it, bytes."""
        return torch.cuda.mem_get_info(self._device)[0]

    def trim(self) -> int:
        """Give back memory that torch's allocator keeps unused; returns its bytes."""
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.empty_cache()
        return before - torch.cuda.memory_reserved(self._device)
