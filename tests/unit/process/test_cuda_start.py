"""The CUDA driver is started beside imports: which calls it gets, and that torch goes on with its context."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

#: A library that writes down its calls. The second GPU does not exist.
DRIVER = """
#include <stdio.h>
#include <stdlib.h>
static int note(const char *name, int number, int status) {
    FILE *file = fopen(getenv("CALLS"), "a");
    fprintf(file, "%s %d %s\\n", name, number, getenv("CUDA_MODULE_LOADING"));
    fclose(file);
    return status;
}
int cuInit(unsigned flags) { return note("init", flags, 0); }
int cuDeviceGet(int *device, int index) { *device = index + 10; return note("get", index, index == 1 ? 101 : 0); }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = 0; return note("retain", device, 0); }
"""
START = """
import sys, threading
from rollout.process.cuda_start import start_cuda
start_cuda(sys.argv[1])
for thread in threading.enumerate():
    if thread.name == "cuda-start":
        thread.join()
"""
ON_GPU = """
import ctypes, torch
driver, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int()
driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active))
assert active.value == 1 and not torch.cuda.is_initialized()
assert torch.ones(3, device="cuda").sum().item() == 3
"""


def run(script: str, device: str, **environment: str) -> None:
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, device]
    ran = subprocess.run(
        command, env={**os.environ, **path, **environment}, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0 and not ran.stderr, ran.stderr


@pytest.mark.parametrize(
    ("device", "calls"),
    [
        ("cpu", []),
        ("auto", ["init 0", "get 0", "retain 10"]),
        ("cuda", ["init 0", "get 0", "retain 10"]),
        ("cuda:3", ["init 0", "get 3", "retain 13"]),
        ("cuda:1", ["init 0", "get 1"]),
        ("tpu:0", []),
    ],
)
def test_the_context_of_the_named_gpu_is_made(device: str, calls: list[str], tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, file = tmp_path / "driver.c", tmp_path / "calls"
    source.write_text(DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    run(START, device, LD_LIBRARY_PATH=str(tmp_path), CALLS=str(file))
    assert (file.read_text().splitlines() if file.exists() else []) == [f"{call} LAZY" for call in calls]


@pytest.mark.gpu
def test_torch_goes_on_with_the_context() -> None:
    run(START + ON_GPU, "cuda")
