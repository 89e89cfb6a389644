"""Where processes of a cluster reach one another."""

import fcntl
import socket
import struct
from contextlib import suppress

from klinic.sampler.weight_group import LOOPBACK

SIOCGIFADDR = 0x8915  # of Linux: which address an interface has


def own_host(*, alone: bool) -> str:
    """Return where others reach this process: nowhere but here, or at its node's address."""
    if alone:
        return LOOPBACK
    import ray

    return str(ray.util.get_node_ip_address())


def free_port(host: str) -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as found:
        found.bind((host, 0))
        port: int = found.getsockname()[1]
        return port


def interface_of(host: str) -> str:
    """Return the network interface that has an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, asked)[20:24]
                if socket.inet_ntoa(found) == host:
                    return name
    return "lo"
