"""On which addresses a process and its children accept connections."""

import ipaddress
from pathlib import Path

LISTEN = "0A"


def listening(pid: int) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the addresses of every listening socket in a tree of processes."""
    inodes = {inode for one in _tree(pid) for inode in _sockets(one)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == LISTEN and parts[9] in inodes:
                found.append(_address(parts[1].partition(":")[0]))
    return found


def _tree(pid: int) -> list[int]:
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").glob("*")
        for child in (task / "children").read_text().split()
    ]
    return [pid, *(below for child in children for below in _tree(child))]


def _sockets(pid: int) -> set[str]:
    found = set()
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    # the kernel writes words of four bytes, each in the machine's order
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address
