"""What the configuration alone tells: what people may have meant otherwise."""

from collections.abc import Iterator, Sequence

from emqtimerd.check.findings import Finding, failed, passed, warned
from emqtimerd.config import Settings
from emqtimerd.verdict import EXIT_CONFIGURATION

LONG_STALL_INTERVAL_SECONDS = 300.0
"""Ten times EchoMQ's own 30 s: from here on it is worth a line how late a lost job comes back."""

NAMED = 3
"""How many queues a finding names; how many more there are stands behind them."""


def configuration(settings: Settings, source: str | None) -> Iterator[Finding]:
    """What would be swept, and how; the configuration came from the file `source`."""
    queues, discovery = settings.queues, settings.discovery.enabled
    if not queues and not discovery:
        # As `run` and `config validate` refuse it. What else there is to know is told all the same.
        yield failed(
            "config",
            f"{source or 'no configuration file'}: there is nothing to sweep: no queue is listed, "
            "and discovery is off",
            'list some, such as queues = ["orders"], name one with --queue, or set '
            "discovery.enabled",
            EXIT_CONFIGURATION,
        )
        return
    yield passed("config", f"{source or 'no configuration file'}: {settings.extent()}")
    swept = {queue: settings.for_queue(queue).stalled_check for queue in queues}
    if discovery:
        swept["queues found later"] = settings.stalled_check
    if burying := [queue for queue, own in swept.items() if own.max_stalled == 1]:
        yield warned(
            "config",
            f"max_stalled is 1 for {names(burying, len(swept))}: the first counted stall "
            "dead-letters the job (an expiry that crossed a server restart is not counted)",
            "if a job should survive the loss of a worker, set stalled_check.max_stalled to 2 or "
            "more; 1 is EchoMQ's own default",
        )
    late = {
        queue: own.interval_seconds
        for queue, own in swept.items()
        if own.interval_seconds > LONG_STALL_INTERVAL_SECONDS and not own.at_expiry
    }
    if late:
        yield warned(
            "config",
            f"the lost jobs of {names([*late], len(swept))} wait up to "
            f"{max(late.values()) / 60:g} minutes for the next stall check",
            "shorten stalled_check.interval (EchoMQ's own is 30s), or set stalled_check.at_expiry",
        )


def names(queues: Sequence[str], of: int = 0) -> str:
    """The first names of a list; `of` is how many there are in all."""
    if len(queues) == of and of > 1:
        return "all queues"
    more = f" and {len(queues) - NAMED} more" if len(queues) > NAMED else ""
    return ", ".join(queues[:NAMED]) + more
