"""The doctor: what stands between this configuration and working sweeps, one finding a check.

examination    what is asked, of whom, in which order       findings    what a check found
configuration  what the configuration alone tells           printing    for people, and as JSON
reach          the way to the node: address, TLS, login
server         what a server says of itself
permissions    what its ACL allows, whether it takes sweeps
queues         what the queues hold, and what blocks them

A check gets answers and returns findings; asking and judging are apart.
"""

from emqtimerd.check.examination import examine
from emqtimerd.check.findings import CHECKS, Finding, Report
from emqtimerd.check.printing import document, lines

__all__ = ["CHECKS", "Finding", "Report", "document", "examine", "lines"]
