"""`python -m chaos soak` and `python -m chaos storm`: what `make soak` and `make chaos` run."""

import argparse
import random
import signal
import sys


def main() -> int:
    """Run what was asked for, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    soak = commands.add_parser("soak", help="many jobs, and a server that is killed three times")
    soak.add_argument("--jobs", type=int, default=200_000, help="how many (default: %(default)s)")
    storm = commands.add_parser("storm", help="two daemons and a random hand that breaks things")
    storm.add_argument(
        "--seconds",
        type=float,
        default=180.0,
        help="how long things are broken (default: %(default)g)",
    )
    storm.add_argument(
        "--servers",
        choices=("alone", "sentinel", "cluster"),
        default="alone",
        help="what the daemons work on (default: %(default)s)",
    )
    storm.add_argument(
        "--only",
        nargs="*",
        default=(),
        metavar="KIND",
        help="faults of these kinds alone, which docs/chaos.md lists (default: all)",
    )
    for each in (soak, storm):
        each.add_argument(
            "--seed",
            type=int,
            default=random.SystemRandom().randrange(10**6),
            help="repeats a run's schedule; it is printed at the start (default: a random one)",
        )
    options = parser.parse_args()
    # An order to end is an end like any other: nothing that was started stays behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    from chaos.plan import kinds_of
    from chaos.soak import Wrong
    from chaos.soak import soak as run_soak
    from chaos.storm import storm as run_storm

    if options.command == "storm" and (odd := set(options.only) - set(kinds_of(options.servers))):
        kinds = " ".join(kinds_of(options.servers))
        parser.error(f"--only: {' '.join(sorted(odd))} is none of {kinds}")
    try:
        if options.command == "soak":
            run_soak(options.jobs, options.seed)
        else:
            run_storm(options.seconds, options.seed, options.servers, options.only)
    except Wrong:
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
