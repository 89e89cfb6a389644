"""A second mechanism of every fault, written from the catalogue alone and kept apart."""

from klinic.faults.base import Fault

SECOND: tuple[Fault, ...] = ()
