"""Workers in another network namespace, seen from a process that was made for it."""

import pytest
from fabric_network import available
from own_process import check


@pytest.mark.skipif(not available(), reason="making network namespaces takes root and /dev/net/tun")
def test_workers_behind_a_bad_wire() -> None:
    check("alone/check_network.py")
