"""Goal: slots in GPU memory of another process take the same bytes as slots in host memory, and its death harms nothing.

Method: a child process exports memory as the daemon does; caches of all forms are copied there and back on the GPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here: run make test-vllm")

from kvtierd.cuda import HANDLE_BYTES, CudaError, DeviceMapping  # noqa: E402
from tests.connectors import kv_forms as forms  # noqa: E402
from tests.connectors.kv_forms import FORMS  # noqa: E402
from tests.connectors.test_gpu_copying import made, never  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
SIZE = 8 << 20
EXPORTER = f"""
import sys
from kvtierd.cuda import Device
device = Device(0)
print(device.export(device.allocate({SIZE})).hex(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def exporter() -> Iterator[tuple[subprocess.Popen[str], bytes]]:
    """A process that exports memory, and the name of that."""
    with subprocess.Popen([sys.executable, "-c", EXPORTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield process, bytes.fromhex(process.stdout.readline())
        process.kill()


@pytest.mark.parametrize("form", FORMS)
def test_bytes_go_there_and_back(form: str, exporter: tuple[subprocess.Popen[str], bytes]) -> None:
    cache, layout, copier = made(form)
    closed: list[int] = []
    assert copier.device is not None
    mapping: DeviceMapping = copier.device.import_memory(exporter[1], SIZE, lambda: closed.append(1))
    for group, seen in enumerate(layout.groups):
        own = forms.all_places(form, cache, group)
        size = 2 * seen.block_bytes
        slots = [mapping.view[:size], mapping.view[size : 2 * size]]
        copier.save(group, list(zip(slots, [[5, 0], [1, 6]], strict=True)), copier.fence())
        kept = [forms.read_places(cache, own[b]) for b in (5, 0, 1, 6)]
        assert copier.device.read(mapping.view.address, 2 * size) == b"".join(kept)
        assert copier.load(group, list(zip(slots, [[2, 3], [4, -1]], strict=True)), copier.fence(), never) == 2
        assert [forms.read_places(cache, own[b]) for b in (2, 3, 4)] == kept[:3]
        del slots
    mapping.release()
    assert closed == [1]
    copier.close()


def test_a_name_of_nothing_is_an_error_of_the_call_alone() -> None:
    """Goal: what cannot be opened leaves the engine's context as it was."""
    _, _, copier = made("packed")
    assert copier.device is not None
    with pytest.raises(CudaError):
        copier.device.import_memory(bytes(HANDLE_BYTES), SIZE, lambda: None)
    assert torch.arange(4, device="cuda").sum().item() == 6
    copier.close()


def test_the_exporter_is_killed_while_its_memory_is_used(exporter: tuple[subprocess.Popen[str], bytes]) -> None:
    """Goal: copies that go on when the daemon dies do not fail, and the engine computes on."""
    _, layout, copier = made("packed")
    assert copier.device is not None
    mapping: DeviceMapping = copier.device.import_memory(exporter[1], SIZE, lambda: None)
    chunks = [(mapping.view[: layout.groups[0].block_bytes], [3])]
    for n in range(400):
        if n == 100:
            exporter[0].kill()
        copier.save(0, chunks, copier.fence())
        assert copier.load(0, chunks, copier.fence(), never) == 1
    assert exporter[0].wait(10)
    chunks.clear()
    mapping.release()
    assert torch.arange(4, device="cuda").sum().item() == 6
    copier.close()
