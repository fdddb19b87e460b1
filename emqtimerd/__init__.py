"""The clock of an EMQ node: sends EMQ.PROMOTE and EMQ.STALLED.CHECK to every queue in time."""

__version__ = "0.1.0"
