"""Prometheus and Grafana are asked only for what the processes export."""

from __future__ import annotations

import itertools
import json
from typing import Any

import yaml

from tests.deploy.metric_names import ROOT, in_query, in_source

_GRAFANA = ROOT / "deploy/grafana"


def _compose() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "compose.yaml").read_text()))


def _board() -> dict[str, Any]:
    return dict(json.loads((_GRAFANA / "boards/pdmesh.json").read_text()))


def _charts() -> list[dict[str, Any]]:
    return [panel for panel in _board()["panels"] if panel["type"] != "row"]


def test_every_query_of_the_board_names_metrics_that_exist() -> None:
    exported = in_source()
    assert len(exported) > 20
    for chart in _charts():
        for target in chart["targets"]:
            asked = in_query(target["expr"])
            assert asked or "up{" in target["expr"], target["expr"]
            assert asked <= exported, f"{chart['title']}: {asked - exported}"


def test_no_two_panels_of_the_board_overlap() -> None:
    panels = _board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        rows = range(place["y"], place["y"] + place["h"])
        assert columns.stop <= 24
        covered = set(itertools.product(columns, rows))
        assert not covered & cells, panel["title"]
        cells |= covered


def test_every_chart_explains_itself_and_asks_the_provisioned_source() -> None:
    (source,) = yaml.safe_load((_GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    for chart in _charts():
        assert chart["description"].endswith("."), chart["title"]
        assert chart["datasource"] == {"type": source["type"], "uid": source["uid"]}


def test_prometheus_finds_every_role_where_compose_has_it() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    services = _compose()["services"]
    looked_for = {
        name: found["port"]
        for job in config["scrape_configs"]
        for found in job["dns_sd_configs"]
        for name in found["names"]
    }
    assert looked_for.keys() == {"gateway", "prefill", "decode"}
    for name, port in looked_for.items():
        assert f"port={port}" in services[name]["command"]


def test_what_compose_mounts_is_there() -> None:
    for service in _compose()["services"].values():
        for volume in service.get("volumes", ()):
            if volume.startswith("./"):
                assert (ROOT / volume.split(":")[0]).exists(), volume
    # Where the mounts put the board, the provisioning looks for it.
    (provider,) = yaml.safe_load((_GRAFANA / "provisioning/dashboards/boards.yaml").read_text())[
        "providers"
    ]
    mounts = _compose()["services"]["grafana"]["volumes"]
    assert f"./deploy/grafana/boards:{provider['options']['path']}:ro" in mounts
