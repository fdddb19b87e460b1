"""What a fault of a node means to whoever ran a command: the exit code, and what to do about it."""

import re
import ssl

from emqtimerd import wire
from emqtimerd.config import ConfigError, NodeSettings
from emqtimerd.dialling import NoAnswer, UnusableTls
from emqtimerd.node import FenceRefused, NodeFault, Unreachable, first_fault

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
EXIT_UNREACHABLE = 3
EXIT_FENCE = 4

FIXES = {
    "LOADING": "wait until the server has read its data; run does so by itself",
    "MASTERDOWN": "this replica has lost its primary: put the primary's address into node.url",
    "READONLY": "this is a replica: put the primary's address into node.url",
    "MOVED": 'the keys are on another primary of a cluster: write "redis+cluster://…" in node.url',
    "CLUSTERDOWN": "the cluster lacks a primary for some slots: CLUSTER INFO says which state",
    "BUSY": "a script holds the server: SCRIPT KILL or FUNCTION KILL ends one that has not written",
    "NOPERM": "emqtimerd check names what the ACL denies; check --acl prints a rule that is enough",
    "MISCONF": "the server cannot save its data: its log says why (mostly a full disk)",
    "NOREPLICAS": "fewer replicas are in step than min-replicas-to-write wants: bring them back",
    "OOM": "the server is at its maxmemory: raise it, or free memory",
    "WRONGTYPE": "another program uses this key: see what it holds with TYPE, and move it away",
}
"""What to do about a reply, by its code."""

LOAD_FIX = "load the native job core there (loadmodule); emqtimerd devnode starts a node with it"

BRAND_FIX = (
    "if this is to be an EMQ node, its operator sets it: SET {emq}:version " + wire.BRAND.decode()
)

OTHER_BRAND_FIX = (
    "another executor owns this node: emqtimerd works on native nodes only, so name one in node.url"
)

LOGIN_FIX = (
    "set node.username and node.password_file (or name them in node.url) to a user that ACL LIST "
    "shows as on; check --acl prints a rule that makes one"
)


def exit_code(fault: NodeFault) -> int:
    """The exit code of a command that such a fault ends."""
    if isinstance(fault, Unreachable):
        return EXIT_UNREACHABLE
    if isinstance(fault, FenceRefused):
        return EXIT_FENCE
    wrong_url = names_no_database(fault) or names_no_cluster(fault)
    return EXIT_CONFIGURATION if wrong_url else EXIT_FAILED


def names_no_database(fault: NodeFault) -> bool:
    """Whether the server was reached and has no database of the number in node.url."""
    # What servers say to SELECT: beyond their last one, and in cluster mode to any but 0.
    return "DB index" in fault.message or "SELECT is not allowed" in fault.message


def names_no_cluster(fault: NodeFault) -> bool:
    """Whether node.url says +cluster of a server that was reached and is a single one."""
    return "not in cluster mode" in fault.message


def fix(settings: NodeSettings, fault: NodeFault) -> str:
    """What to do about it, in one sentence; empty where the fault's own message says it."""
    fault = first_fault(fault)
    if isinstance(fault.__cause__, UnusableTls):
        return (
            "let node.tls name PEM files that this user can read: certificates in ca_file, and one "
            "with its key, not encrypted, in cert_file and key_file; server_name is a host name"
        )
    if isinstance(fault.__cause__, NoAnswer):
        return "see to the name servers of this machine, or put an address into node.url"
    if error := tls_error(fault):
        return _tls_fix(settings, error)
    if isinstance(fault.__cause__, ConfigError):
        return (
            "write the password into that file and let this user read it, or correct "
            "node.password_file"
        )
    if fault.code in ("NOAUTH", "WRONGPASS"):
        return LOGIN_FIX
    by_kind = _reach_fix if isinstance(fault, Unreachable) else _reply_fix
    return by_kind(settings, fault)


def _fence_fix(fault: FenceRefused) -> str:
    if "brand is" in fault.message:
        return OTHER_BRAND_FIX
    return BRAND_FIX if "has no brand" in fault.message else LOAD_FIX


def _reply_fix(settings: NodeSettings, fault: NodeFault) -> str:
    if isinstance(fault, FenceRefused):
        return _fence_fix(fault)
    if names_no_database(fault):
        return (
            f"this server has no database {settings.url.db}: correct the number at the end of "
            "node.url (a cluster has only 0), or raise `databases` in the server's configuration"
        )
    if names_no_cluster(fault):
        scheme = settings.url.scheme.replace("+cluster", "")
        return f'write "{scheme}://…" in node.url, or the address of a cluster'
    if denies_select(fault):
        user = settings.username or settings.url.username or "default"
        return f"as its operator: ACL SETUSER {user} +select"
    return FIXES.get(fault.code, "")


def denies_select(fault: NodeFault) -> bool:
    """Whether the ACL keeps us from the database in node.url."""
    # Between login and fence nothing else is sent.
    return fault.code == "NOPERM" and fault.message.startswith("the handshake was refused")


def tls_error(fault: BaseException) -> ssl.SSLError | None:
    """What OpenSSL said, if that is what the fault came from."""
    error: BaseException | None = fault
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error


def not_tls(settings: NodeSettings) -> str:
    """What to do about a port that does not speak TLS."""
    plain = settings.url.plain_scheme
    return f'this port does not speak TLS: use its TLS port, or "{plain}://" without TLS'


_CERTIFICATE_FIX = (
    "if the server wants a client certificate, set node.tls.cert_file and key_file to one that its "
    "CA has signed"
)


def _tls_fix(settings: NodeSettings, error: ssl.SSLError) -> str:
    if "WRONG_VERSION_NUMBER" in str(error) or "RECORD_LAYER_FAILURE" in str(error):
        return not_tls(settings)
    if not isinstance(error, ssl.SSLCertVerificationError):
        return _CERTIFICATE_FIX
    # OpenSSL: 62 and 64 are the names and addresses that do not match, 10 is an expired one.
    if error.verify_code in (62, 64):
        return "set node.tls.server_name to a name in the certificate, or node.url to that name"
    if error.verify_code == 10:
        return "the server's certificate has expired: renew it there"
    return "set node.tls.ca_file to the certificate of the CA that signed the server's"


def _reach_fix(settings: NodeSettings, fault: NodeFault) -> str:
    url = settings.url
    if url.topology == "sentinel" and (words := _sentinel_fix(fault)):
        return words
    if fault.code == "timeout":
        # A server without TLS takes the greeting for half a command, and waits for the rest of it.
        plain = f'if this port does not speak TLS, write "{url.plain_scheme}://"; else: '
        return (
            f"{plain if url.tls else ''}nothing came back: is this the address (node.url), does a "
            "firewall drop the packets, does the server hang?"
        )
    # A server that speaks TLS hangs up on whoever does not, in the midst of login or fence.
    hung_up = re.search("during the handshake|reset by peer|[Cc]onnection closed", fault.message)
    if hung_up and url.tls:
        # What it says of a certificate that it misses is lost where we had begun to speak.
        return f"{_CERTIFICATE_FIX}; else look into the server's log"
    if hung_up and not url.socket:
        secure = f'if this port speaks TLS, write "{url.tls_scheme}://"'
        return f"{secure}; else look into the server's log"
    if url.socket:
        return "does the server run with this unixsocket, and may this user open it?"
    return "is this the address (node.url), and does the server run and listen there (bind, port)?"


def _sentinel_fix(fault: NodeFault) -> str:
    """What to do about sentinels that are there and name nobody; empty for other faults."""
    if "unknown command 'SENTINEL'" in fault.message:
        return (
            "node.url has to name sentinels (port 26379 unless they were given another), and this "
            "is none: name them, or name the server itself without +sentinel"
        )
    if "knows no primary called" in fault.message:
        return "correct the name of the primary in node.url: SENTINEL MASTERS lists those they know"
    return ""
