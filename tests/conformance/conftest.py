"""Every test of this folder that takes ``cluster`` runs over each transport."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.conformance.cluster import Cluster, Node

HAS_NIXL = any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13", "nixl"))
UCX = pytest.param("ucx", marks=pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed"))


@pytest.fixture(params=["inproc", "shm", "tcp", UCX])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = Cluster(request.param)
    yield cluster
    cluster.close()


@pytest.fixture
def p(cluster: Cluster) -> Node:
    return cluster.add_sender("p")


@pytest.fixture
def d(cluster: Cluster) -> Node:
    return cluster.add_receiver("d")
