"""Launch configurations: conditions, cards and defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.backends.gpu import tuning


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tuning, "_FOLDER", tmp_path)
    clear_caches()
    yield tmp_path
    clear_caches()


def clear_caches() -> None:
    tuning._table.cache_clear()
    tuning.config_of_card.cache_clear()


def entry(block: int, **when: object) -> dict[str, object]:
    return {"when": when, "meta": {"BLOCK": block}, "num_warps": 4, "num_stages": 2}


def block_of(card: str | None, **key: int | str) -> int:
    return tuning.config_of_card(card, "matmul", **key).meta["BLOCK"]


def test_the_first_entry_whose_conditions_hold_is_taken(tables: Path) -> None:
    default = [entry(1, m=[1, 1]), entry(2, m=[2, 16], dtype="bf16"), entry(3)]
    (tables / "default.json").write_text(json.dumps({"matmul": default}))
    assert block_of(None, m=1, dtype="bf16") == 1
    assert block_of(None, m=16, dtype="bf16") == 2
    assert block_of(None, m=16, dtype="fp16") == 3
    assert block_of(None, m=17, dtype="bf16") == 3
    assert block_of(None) == 3


def test_a_card_overrides_only_what_its_table_has(tables: Path) -> None:
    (tables / "default.json").write_text(json.dumps({"matmul": [entry(1)]}))
    (tables / "nvidia_x1.json").write_text(json.dumps({"matmul": [entry(2, m=[1, 1])]}))
    assert tuning.known_cards() == ["nvidia_x1"]
    assert block_of("nvidia_x1", m=1) == 2
    assert block_of("nvidia_x1", m=2) == 1
    assert block_of("nvidia_x2", m=1) == 1


def test_an_entry_may_be_for_some_capabilities(tables: Path) -> None:
    entries = [entry(1, capability=[90, 99]), entry(2)]
    (tables / "default.json").write_text(json.dumps({"matmul": entries}))
    with tuning.compiling_for(90):
        assert tuning.launch_config("matmul").meta["BLOCK"] == 1
    with tuning.compiling_for(80):
        assert tuning.launch_config("matmul").meta["BLOCK"] == 2
    assert block_of(None) == 2
    (tables / "nvidia_x1.json").write_text(json.dumps({"matmul": [entry(3)]}))
    with tuning.compiling_for(90, "nvidia_x1"):
        assert tuning.launch_config("matmul").meta["BLOCK"] == 3


def test_an_unknown_kernel_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="no launch configuration of unknown"):
        tuning.launch_config("unknown")


def test_device_names_become_file_names() -> None:
    assert tuning.table_name("NVIDIA H100 80GB HBM3") == "nvidia_h100_80gb_hbm3"


def test_every_kernel_has_a_default_without_conditions() -> None:
    for kernel, entries in tuning._table("default").items():
        assert not entries[-1].when, kernel


def test_tables_of_cards_name_known_kernels_and_can_be_built() -> None:
    for card in tuning.known_cards():
        assert card in tuning.CARD_CAPABILITIES
        assert set(tuning._table(card)) <= set(tuning._table("default"))
