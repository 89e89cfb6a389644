"""Host addresses, free ports and network interfaces."""

import fcntl
import socket
import struct
from contextlib import suppress

from klinic.sampler.weight_group import LOOPBACK

SIOCGIFADDR = 0x8915  # Linux ioctl: the address of an interface


def own_host(*, alone: bool) -> str:
    """Return this process's address: loopback for a single machine, else its node's IP."""
    if alone:
        return LOOPBACK
    import ray

    return str(ray.util.get_node_ip_address())


def free_port(host: str) -> int:
    """Return a free port."""
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
