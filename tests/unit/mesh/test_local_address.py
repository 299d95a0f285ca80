"""The address that leads to the registry."""

import pytest

from mesh.errors import ConfigError
from mesh.local_address import address_towards


@pytest.mark.parametrize("url", ["redis://127.0.0.1:6379/0", "redis://:secret@localhost/0"])
def test_a_registry_on_this_machine_is_reached_from_loopback(url: str) -> None:
    assert address_towards(url) == "127.0.0.1"


@pytest.mark.parametrize(
    "url", ["unix:///run/redis.sock", "redis://no-such-host.invalid:6379/0", "redis:///0"]
)
def test_without_a_route_it_must_be_given(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^advertise_host: ") as caught:
        address_towards(url)
    assert "secret" not in str(caught.value)
