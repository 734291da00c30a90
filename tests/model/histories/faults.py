"""The faults: each is a function with a name. It strikes, lasts for a while, undoes what it must, and says what it did.

Of the faults of `SERVERS` (but "clock") only one is at work at a time: a promise that holds for one fault of servers
need not hold for two. Each other fault strikes whenever it is its turn.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import time
from typing import TYPE_CHECKING, Any, Final

import redis

from harness.topology.group import GONE, ask, info, wait
from interlock._protocol.names import tagged
from interlock._quarantine.voter import VoterRecord, voter_key
from interlock.errors import LockError
from model.histories.lines import clock

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from model.histories.history import Controller

LONGEST: Final = 20.0  # seconds that servers may take for a failover
USUAL: Final = 2.0  # seconds: a longer ttl, which some phases need, makes no fault longer


# Worker processes


def kill(run: Controller, random: Random) -> str:
    """SIGKILL of a worker process; another one takes its place."""
    worker = run.some_worker(random)
    if worker is None:
        return ""
    run.kill(worker)
    return worker.name


def stop(run: Controller, random: Random) -> str:
    """SIGSTOP of a worker process for a while: shorter or longer than a ttl."""
    worker = run.some_worker(random)
    if worker is None:
        return ""
    seconds = random.choice((random.uniform(0.05, 0.6), random.uniform(0.5, 2 * run.max_ttl)))
    with run.stopped(worker):
        run.sleep(seconds)
    return f"{worker.name} for {seconds:.2f} s"


def fork(run: Controller, random: Random) -> str:
    """A fork without hooks of a worker process: its child goes on, with the Interlock of the parent."""
    worker = run.some_worker(random)
    if worker is None or worker.version:
        return ""
    return run.fork(worker, inside=random.random() < 0.7)


# What clients meet


def client_kill(run: Controller, random: Random) -> str:
    """CLIENT KILL of all connections, or of those that listen."""
    node, which = _some(run, random), random.choice(("normal", "pubsub"))
    ask(node, "CLIENT", "KILL", "TYPE", which)
    return f"{which} at port {node.port}"


def client_pause(run: Controller, random: Random) -> str:
    """CLIENT PAUSE: requests wait."""
    node, ms, which = _some(run, random), random.randrange(50, 600), random.choice(("WRITE", "ALL"))
    ask(node, "CLIENT", "PAUSE", ms, which)
    time.sleep(ms / 1000)
    return f"{which} for {ms} ms at port {node.port}"


def script_flush(run: Controller, random: Random) -> str:
    """SCRIPT FLUSH: the server knows no script any more."""
    node = _some(run, random)
    ask(node, "SCRIPT", "FLUSH")
    return f"at port {node.port}"


def helpers(run: Controller, random: Random) -> str:
    """DEL of one of the keys beside a lock: its queue, its waiters ..."""
    key = f"lock:{random.choice(sorted(run.settings.names))}"
    head, tail = tagged(key)
    which = random.choice(run.rig.helpers)
    if key == "lock:mine" and which == "gone":  # that an owner was ousted stands there, and nowhere else
        which = "queue"
    node = run.rig.holder_of(key)
    ask(node, "DEL", f"{head}{which}{tail}")
    return f"{which} of {key}"


def revoke(run: Controller, random: Random) -> str:
    """revoke(): the holder learns of it, and the next one waits for the holder."""
    return _revoke(run, random, force=False)


def revoke_force(run: Controller, random: Random) -> str:
    """revoke(force=True): the next one has it at once. The checker does not believe the revoked one from then on."""
    return _revoke(run, random, force=True)


def _revoke(run: Controller, random: Random, *, force: bool) -> str:
    name = random.choice(sorted(run.settings.names))
    since, done = clock(), True
    try:
        done = bool(run.resource(name).revoke("a fault", force=force))
    except LockError as error:
        done = True  # nobody can tell
        return f"{name}: {type(error).__name__}"
    finally:
        run.pen.write("revoked", name=name, force=force, since=since, done=done)
    return f"{name}: {done}"


# Lines: a proxy between the workers and a server


def line_cut(run: Controller, random: Random) -> str:
    """Every connection of a line ends."""
    random.choice(run.rig.lines).cut()
    return ""


def line_held(run: Controller, random: Random) -> str:
    """Nothing goes through a line for a while; then all of it does, late."""
    line, seconds = random.choice(run.rig.lines), _silence(random)
    line.hold = True
    try:
        run.sleep(seconds)
    finally:
        line.hold = False
    return f"for {seconds:.2f} s"


def line_frozen(run: Controller, random: Random) -> str:
    """The open connections of a line are dead, and neither end learns of that, as when a firewall forgets them."""
    random.choice(run.rig.lines).freeze()
    return ""


def silence(run: Controller, random: Random) -> str:
    """As `line_frozen`, of all lines at once: no connection to any server works any more, and new ones do."""
    for line in run.rig.lines:
        line.freeze()
    return ""


def line_refused(run: Controller, random: Random) -> str:
    """All connections of a line end, and new ones end at once, for a while."""
    line, seconds = random.choice(run.rig.lines), random.uniform(0.05, 1.0)
    line.refuse = True
    try:
        line.cut()
        run.sleep(seconds)
    finally:
        line.refuse = False
    return f"for {seconds:.2f} s"


def replies_lost(run: Controller, random: Random) -> str:
    """The server gets everything, and none of its replies arrive, for a moment."""
    line, seconds = random.choice(run.rig.lines), random.uniform(0.02, 0.5)
    line.drop_replies = True
    try:
        run.sleep(seconds)
    finally:
        line.drop_replies = False
        line.cut()  # what comes next on such a connection would be taken for the reply that is lost
    return f"for {seconds:.2f} s"


# One server


def server_stop(run: Controller, random: Random) -> str:
    """SIGSTOP of the server: connections stay, nothing answers."""
    node, seconds = _some(run, random), _silence(random)
    node.pause()
    try:
        time.sleep(seconds)
    finally:
        node.resume()
    return f"for {seconds:.2f} s"


def restart_killed(run: Controller, random: Random) -> str:
    """SIGKILL of the server; it comes up again with its append-only file."""
    (node,) = run.rig.nodes
    node.kill()
    seconds = random.choice((0.0, random.uniform(0.0, 0.5)))
    time.sleep(seconds)
    node.restart()
    return f"after {seconds:.2f} s"


def restart_shut_down(run: Controller, random: Random) -> str:
    """SHUTDOWN of the server; it comes up again with its append-only file."""
    (node,) = run.rig.nodes
    try:
        ask(node, "SHUTDOWN", "NOSAVE")
    except (*GONE, redis.ResponseError):
        pass
    wait(lambda: "the server has not shut down" if node.running else "", LONGEST)
    node.kill()
    seconds = random.choice((0.0, random.uniform(0.0, 0.5)))
    time.sleep(seconds)
    node.restart()
    return f"after {seconds:.2f} s"


def clock_step(run: Controller, random: Random) -> str:
    """The server's clock is set, forward or back. Only fences are promised then."""
    (node,) = run.rig.nodes
    seconds = random.choice((-1, 1)) * random.choice((0.5, 2.0, 30.0, 3600.0))
    node.shift(seconds)
    return f"{seconds:+g} s"


# Sentinel


def failover(run: Controller, random: Random) -> str:
    """SENTINEL FAILOVER, or CLUSTER FAILOVER FORCE: a replica is promoted, and the last writes may be lost."""
    group: Any = run.rig.group
    if run.settings.topology == "cluster":
        replica = _some_replica(run, random)
        group.failover(replica, force=True, timeout=LONGEST)
        return f"to port {replica.port}"
    return f"to port {group.failover(timeout=LONGEST).port}"


def handover(run: Controller, random: Random) -> str:
    """FAILOVER, or CLUSTER FAILOVER: a replica takes over with all writes."""
    group: Any = run.rig.group
    if run.settings.topology == "cluster":
        replica = _some_replica(run, random)
        group.failover(replica, timeout=LONGEST)
        return f"to port {replica.port}"
    return f"to port {group.handover(timeout=LONGEST).port}"


def primary_killed(run: Controller, random: Random) -> str:
    """SIGKILL of a primary; a replica is promoted, and the old one comes back as its replica."""
    return _without_primary(run, random, lambda old: old.kill(), lambda old: old.restart())


def primary_stopped(run: Controller, random: Random) -> str:
    """SIGSTOP of a primary until a replica is promoted, and longer; then it goes on as if nothing had happened."""
    return _without_primary(run, random, lambda old: old.pause(), lambda old: old.resume())


def machine_stopped(run: Controller, random: Random) -> str:
    """SIGSTOP of a primary and a worker process together, as of one machine; sometimes of a replica, too.

    They go on when a replica has been promoted, and maybe when the quarantine there is over. The replica that is
    stopped keeps its connection, so that the old primary takes it for a good one.
    """
    old = _primary(run, random)
    replicas = [node for node in run.rig.nodes if node is not old and node.running and info(node)["role"] == "slave"]
    also = random.choice(replicas) if run.settings.topology == "sentinel" and random.random() < 0.5 else None
    worker = run.some_worker(random)

    def away(old: Any) -> None:
        old.pause()
        if also is not None:
            also.pause()

    def back(old: Any) -> None:
        old.resume()
        if also is not None:
            time.sleep(random.uniform(0.0, 3.0))
            also.resume()

    seconds = random.uniform(0.0, 2 * min(run.max_ttl, USUAL) + run.rig.grace)
    with run.stopped(worker) if worker is not None else contextlib.nullcontext():
        said = _without(run, old, away, back, seconds)
    return f"{said}; with {worker.name if worker else 'nobody'}" + (f" and port {also.port}" if also else "")


def partition(run: Controller, random: Random) -> str:
    """A primary is cut off from the other servers, and clients reach both sides."""
    group: Any = run.rig.group
    return _without_primary(run, random, group.isolate, lambda _old: group.heal())


def lag(run: Controller, random: Random) -> str:
    """The replicas get no more writes; then the primary is killed, and one of them is promoted."""
    group: Any = run.rig.group
    replicas = list(group.replicas)
    group.lag(*replicas)
    time.sleep(random.uniform(0.0, 0.8))

    def back(old: Any) -> None:
        old.restart()
        group.heal()

    return _without_primary(run, random, lambda old: old.kill(), back)


def _without_primary(run: Controller, random: Random, away: Any, back: Any) -> str:
    old = _primary(run, random)
    return _without(run, old, away, back, random.choice((0.0, random.uniform(0.0, min(run.max_ttl, USUAL) + 2))))


def _without(run: Controller, old: Any, away: Any, back: Any, seconds: float) -> str:
    """What happens while a primary is away, and for so long after another one was promoted."""
    group: Any = run.rig.group
    sharded = run.settings.topology == "cluster"
    names = run.settings.names
    served = [f"lock:{name}" for name in names if not sharded or group.primary_of(f"lock:{name}") is old]
    away(old)
    try:
        new = run.rig.await_primary(old, served[0], LONGEST)
        run.sleep(seconds)
    finally:
        back(old)
    group.wait_ok(timeout=LONGEST)
    return f"port {old.port}, now {new.port}; back after {seconds:.2f} s"


def _primary(run: Controller, random: Random) -> Any:
    """A primary of a name that workers use."""
    group: Any = run.rig.group
    if run.settings.topology == "cluster":
        return group.primary_of(f"lock:{random.choice(sorted(run.settings.names))}")
    return group.primary


# A cluster


def migrate(run: Controller, random: Random) -> str:
    """A slot with its keys moves to another shard, step by step."""
    group: Any = run.rig.group
    key = f"lock:{random.choice(sorted(run.settings.names))}"
    slot, old = group.slot(key), group.primary_of(key)
    new = random.choice([node for node in run.rig.primaries() if node is not old])
    for _ in group.migrating(slot, to=new):
        time.sleep(random.uniform(0.0, 0.3))
    return f"{key} from port {old.port} to {new.port}"


# A quorum


def member_killed(run: Controller, random: Random) -> str:
    """SIGKILL of one server; it comes up again, empty. No other server is harmed before its leases have run out."""
    node = random.choice(run.rig.nodes)
    node.kill()
    seconds = random.choice((0.0, random.uniform(0.0, 0.5)))
    time.sleep(seconds)
    node.restart()
    run.sleep(run.max_ttl * 1.5)
    return f"port {node.port}, after {seconds:.2f} s"


def reseeded(run: Controller, random: Random) -> str:
    """One server gets all data of another one, as by REPLICAOF and REPLICAOF NO ONE. No connection of a client ends."""
    node, source = random.sample(run.rig.nodes, 2)
    reseed(run, node, source)
    return f"port {node.port} from port {source.port}"


def reseeded_old(run: Controller, random: Random) -> str:
    """One server gets the data back that a replica of its own had some time ago."""
    node, replica = random.choice(run.rig.nodes), run.rig.spare
    copy(run, node, replica)
    seconds = _await_keeper(run, random)
    reseed(run, node, replica)
    ask(replica, "FLUSHALL")
    return f"port {node.port}, what it had {seconds:.2f} s ago"


def flushed(run: Controller, random: Random) -> str:
    """FLUSHALL of one server."""
    node = _some(run, random)
    ask(node, "FLUSHALL")
    return f"port {node.port}"


def all_flushed(run: Controller, random: Random) -> str:
    """FLUSHALL of all servers."""
    for node in run.rig.nodes:
        ask(node, "FLUSHALL")
    return ""


def all_emptied(run: Controller, random: Random) -> str:
    """SIGKILL of all servers at once; they come up again, empty."""
    for node in run.rig.nodes:
        node.kill()
    for node in run.rig.nodes:
        node.restart()
    return ""


def set_back(run: Controller, random: Random) -> str:
    """SIGKILL of one or two servers; they come up again with the data that they had some time ago."""
    nodes = random.sample(run.rig.nodes, random.choice((1, 1, 2)))
    for node in nodes:
        keep_copy(run, node)
    seconds = _await_keeper(run, random)
    for node in nodes:
        restart_from_copy(node)
    return f"{_ports(nodes)} to {seconds:.2f} s before"


def spare(run: Controller, random: Random) -> str:
    """The address of a server leads to another one, which has run for long: empty, or as a copy of the former one."""
    number, copied = random.randrange(len(run.rig.nodes)), random.random() < 0.4
    if copied:
        copy(run, run.rig.nodes[number], run.rig.spare)
        _await_keeper(run, random)
    old = run.rig.take_over(number)
    if random.random() < 0.5:
        old.kill()
        old.restart()
    ask(old, "FLUSHALL")  # the next time it is a spare
    return f"port {old.port}, now {run.rig.nodes[number].port}" + ", a copy" * copied


def address_moved(run: Controller, random: Random) -> str:
    """The address of one server leads to another one of the quorum for a while; open connections go on, or end."""
    numbers = range(len(run.rig.nodes))
    (number, other), seconds = random.sample(numbers, 2), random.uniform(0.2, 2 * run.max_ttl)
    with run.misled():
        run.rig.lead(number, run.rig.nodes[other])
        try:
            for cuts in (random.random() < 0.7, random.random() < 0.7):
                if cuts:
                    run.rig.lines[number].cut()
                run.sleep(seconds / 2)
        finally:
            run.rig.lead(number, run.rig.nodes[number])
            run.rig.lines[number].cut()
    return f"{number} to {other} for {seconds:.2f} s"


def replica_attached(run: Controller, random: Random) -> str:
    """A replica reads all data of one server, and leaves, as a backup does (redis-cli --rdb)."""
    node, seconds = _some(run, random), random.uniform(0.0, 0.5)
    with socket.socket(socket.AF_UNIX) as replica:
        replica.settimeout(LONGEST)
        replica.connect(str(node.socket))
        replica.sendall(b"SYNC\r\n")
        replica.recv(65536)
        run.sleep(seconds)
    return f"port {node.port}"


def rolling_restart(run: Controller, random: Random) -> str:
    """All servers restart, each longer than the longest ttl after the one before; with their data, or empty."""
    keep_data = bool(run.settings.shorter) or random.random() < 0.5
    nodes = random.sample(run.rig.nodes, len(run.rig.nodes))
    for node in nodes:
        if run.over.is_set():
            break
        node.restart(keep_data=keep_data)
        run.sleep(run.max_ttl + random.uniform(0.5, 1.5))
    return f"{_ports(nodes)}, {'with their data' if keep_data else 'empty'}"


def _seen_by_few(fault: Callable[[Controller, Random], str]) -> Callable[[Controller, Random], str]:
    """The fault, while those who could know of it, or of the leases at stake, know as little as possible.

    In most calls each of three processes reaches two of the servers only, another two each, from some time before the
    fault until some time after it. So leases rest on a bare majority, and a vote too many gives another one. In half of
    the calls a new process takes the place of another one: it has seen nothing of what was before.
    """

    @functools.wraps(fault)
    def strikes(run: Controller, random: Random) -> str:
        workers = run.running()
        lines = run.rig.lines if random.random() < 0.75 and len(workers) >= len(run.rig.lines) else []
        for line, worker in zip(lines, random.sample(workers, len(lines)), strict=True):
            line.mute(worker.pid)
        try:
            if lines:
                _await_keeper(run, random)
            if random.random() < 0.5 and (worker := run.some_worker(random)) is not None:
                run.kill(worker)
            about = fault(run, random)
            run.sleep(random.uniform(0.3, 1.0) * run.max_ttl if lines else 0.0)
        finally:
            for line in lines:
                line.let_go()
        return about + ", three processes reach two servers each" * bool(lines)

    return strikes


def _await_keeper(run: Controller, random: Random) -> float:
    """Wait, mostly until a keeper has just got its lock, whose lease a loss is then to end. Returns the seconds."""
    since = clock()
    if random.random() < 0.8:
        run.await_keeper(1.2 * run.max_ttl)
        run.sleep(random.uniform(0.0, 0.3 * run.max_ttl))
    else:
        run.sleep(random.uniform(0.0, run.max_ttl))
    return clock() - since


def copy(run: Controller, node: Any, to: Any) -> None:
    """Give a spare all data of this server."""
    _know_longest(run, node)
    reseed(run, to, node)


def reseed(run: Controller, node: Any, source: Any) -> None:
    """Let the server follow the other one until it has all data of that one, and then alone again."""
    with run.misled():
        ask(node, "REPLICAOF", "127.0.0.1", source.port)
        try:
            wait(lambda: "" if info(node)["master_link_status"] == "up" else "the replica does not follow", LONGEST)
        finally:
            ask(node, "REPLICAOF", "NO", "ONE")
    (node.socket.parent / "dump.rdb").unlink(missing_ok=True)  # what a later process must not find


def _know_longest(run: Controller, node: Any) -> None:
    """Wait until a copy of this server knows the longest ttl of all clients."""
    if run.settings.shorter:
        wait(lambda: "" if _longest(node) >= run.max_ttl else "the server has not met the longest ttl", LONGEST)


def _longest(node: Any) -> float:
    """The longest ttl of which the server knows, in seconds."""
    record = VoterRecord.parse(ask(node, "GET", voter_key("lock:")) or "")
    return record.longest_ms / 1000 if record else 0.0


def keep_copy(run: Controller, node: Any) -> None:
    """Keep a copy of all that the server has now."""
    _know_longest(run, node)
    ask(node, "SAVE")
    home = node.socket.parent
    (home / "dump.rdb").rename(home / "kept.rdb")  # where no restart finds it


def restart_from_copy(node: Any) -> None:
    """Kill the server, and start it again with what it had at `keep_copy()`."""
    node.kill()
    home = node.socket.parent
    (home / "kept.rdb").rename(home / "dump.rdb")
    node.restart()


def _ports(nodes: list[Any]) -> str:
    return "ports " + ", ".join(str(node.port) for node in nodes)


def majority_stopped(run: Controller, random: Random) -> str:
    """SIGSTOP of two of three servers: nobody gets anything."""
    nodes, seconds = random.sample(run.rig.nodes, 2), _silence(random)
    for node in nodes:
        node.pause()
    try:
        time.sleep(seconds)
    finally:
        for node in nodes:
            node.resume()
    return f"for {seconds:.2f} s"


def _silence(random: Random) -> float:
    """Seconds: mostly shorter than a ttl, seldom longer than a client waits before it raises Unavailable."""
    (most,) = random.choices((0.4, 1.2, 6.0), (12, 6, 1))
    return random.uniform(most / 8, most)


def _some(run: Controller, random: Random) -> Any:
    return random.choice([node for node in run.rig.nodes if node.running])


def _some_replica(run: Controller, random: Random) -> Any:
    return random.choice([node for node in run.rig.nodes if node.running and info(node)["role"] == "slave"])


WORKERS: Final = {"kill": kill, "stop": stop}
FORKS: Final = {"fork": fork}  # only in a history with `forks`
CLIENTS: Final = {
    "client-kill": client_kill, "client-pause": client_pause, "script-flush": script_flush, "helpers": helpers,
    "revoke": revoke, "revoke-force": revoke_force,
}  # fmt: skip
LINED: Final = {
    "line-cut": line_cut, "line-held": line_held, "line-frozen": line_frozen, "line-refused": line_refused,
    "replies-lost": replies_lost,
}  # fmt: skip
SILENCE: Final = {"silence": silence}  # on any topology that has lines
SERVERS: Final = {
    "single": {
        "server-stop": server_stop, "restart-killed": restart_killed, "restart-shut-down": restart_shut_down,
        "clock": clock_step,
    },
    "sentinel": {
        "failover": failover, "handover": handover, "primary-killed": primary_killed,
        "primary-stopped": primary_stopped, "machine-stopped": machine_stopped, "partition": partition, "lag": lag,
    },
    "cluster": {
        "failover": failover, "handover": handover, "primary-killed": primary_killed,
        "primary-stopped": primary_stopped, "machine-stopped": machine_stopped, "partition": partition,
        "migrate": migrate,
    },
    "quorum": {
        "server-stop": server_stop, "member-killed": member_killed, "majority-stopped": majority_stopped,
        "re-seeded": _seen_by_few(reseeded), "re-seeded-old": _seen_by_few(reseeded_old),
        "flushed": _seen_by_few(flushed), "all-flushed": _seen_by_few(all_flushed),
        "all-emptied": _seen_by_few(all_emptied), "set-back": _seen_by_few(set_back), "spare": _seen_by_few(spare),
        "address-moved": _seen_by_few(address_moved), "replica-attached": _seen_by_few(replica_attached),
        "rolling-restart": rolling_restart,
    },
}  # fmt: skip
NAMES: Final = tuple(
    dict.fromkeys([*WORKERS, *CLIENTS, *LINED, *SILENCE, *(name for each in SERVERS.values() for name in each)])
)


def of(topology: str, *, forks: bool = False) -> dict[str, Any]:
    """The faults that this topology has, by name."""
    lined = LINED | SILENCE if topology in {"single", "quorum"} else SILENCE
    return {**WORKERS, **(FORKS if forks else {}), **CLIENTS, **SERVERS[topology], **lined}
