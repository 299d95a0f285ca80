"""The transfer benchmark moves real blocks between real processes, and would notice wrong ones."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks import transfer
from mesh.errors import PdmeshError


@pytest.mark.timeout(120)
def test_every_method_moves_every_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "times.json"
    flags = ["--blocks", "1,3", "--block-bytes", "5000", "--repeat", "2", "--json", str(out)]
    assert transfer.main(flags) == 0
    times = json.loads(out.read_text())["s"]
    assert set(times) == {"1", "3"}
    for of_count in times.values():
        assert {method: len(seconds) for method, seconds in of_count.items()} == dict.fromkeys(
            ("memcpy", "raw TCP", "NIXL", "shm", "ucx", "tcp"), 2
        )
        assert min(min(seconds) for seconds in of_count.values()) > 0
    assert "ucx / NIXL" in capsys.readouterr().out


def test_a_changed_byte_is_noticed() -> None:
    with closing(transfer.Memcpy("memcpy", 4, 1000)) as receiver:
        receiver.transfer([1, 3], [0, 2])
        receiver.check([1, 3], [0, 2])
        receiver.memory.block(2)[999] ^= 1
        with pytest.raises(PdmeshError, match="block 3 arrived changed"):
            receiver.check([1, 3], [0, 2])
