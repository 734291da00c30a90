"""All planted bugs, each with the nets that must catch it.

`FOUND` has the faults that interlock had, each planted again where it was; `KNOWN` has those that a lock over Redis is
known for; `COUNTING` has wrong rules of who counts in a quorum. `Simulator`s and `Histories` say where they look, since
no seed covers all.
"""

from __future__ import annotations

from typing import Final

from plants.nets import Histories, Search, Simulator, Tests, Walk
from plants.plant import Change, Plant

REQUESTS, HOLDING = "_client/retries.py", "_client/holding.py"
FORKS = "_protocol/forks.py"
CORE, BOOK, RENEWAL, GRANT = "_client/acquiring.py", "_client/book.py", "_client/renewal.py", "_client/grant.py"
COHORT, COHORTS, UNDO = "_client/cohort.py", "_client/cohorts.py", "_client/undo.py"
WAITING, HISTORY = "_client/waiting.py", "_quarantine/server_history.py"
LOCK, LOCK_PLAIN_CASES, PERMITS = "primitives/lock.lua", "primitives/lock_plain_cases.lua", "primitives/permits.lua"
EXECUTE, GIVING_UP = "conformance/test_execute.py", "conformance/test_giving_up.py"
MESSAGES: Final = ("conformance/test_raw_messages.py",)
LATE: Final = ("faults/test_network.py",)
VOTER, VOTERS = "primitives/voter.lua", ("faults/test_who_counts.py",)
QUEUE, ENQUEUE, QUARANTINE = "primitives/queue.lua", "primitives/enqueue.lua", "primitives/quarantine.lua"

QUORUM: Final = "_servers/quorum.py"
ABSTENTION: Final = ("model/test_abstention.py",)

PHASE_ALONE: Final = ("--faults", "none", "--older", "none", "--phases")
NO_QUARANTINE: Final = Change(
    QUARANTINE,
    "if IDENTITY == '-' or recorded == IDENTITY and not HAS_RETURNED then return 0 end",
    "if true then return 0 end",
)
HALF_TTL_LEFT: Final = (
    "            and grant.reason_ended(now) is None\n            and hold.deadline - now >= hold.ttl / 2\n"
)

FOUND: Final = (
    Plant(
        "a lease passes on while its renewal is under way, and leaves the book of renewals",
        (
            Change(BOOK, "is_due_later = self.bucket_of(hold) is not None", "is_due_later = True"),
            Change(
                COHORTS,
                "            grant.mark_released()\n",
                "            grant.mark_released()\n            self.book.remove(hold)\n",
            ),
        ),
        (
            Tests(("faults/test_cohort_races.py",), "whose_renewal_is_under_way"),
            Simulator("short and long", first=900),
        ),
    ),
    Plant(
        "a writer whose lease survived a failover waits for itself as a reader",
        (Change(PERMITS, "if reads_beside_own then return {QUEUED", "if false then return {QUEUED"),),
        (Simulator("failover", "rwlock"),),
    ),
    Plant(
        "a warning of `interlock run` that can't be printed ends its lease",
        (Change("cli/stderr.py", "    sys.stderr = io.TextIOWrapper(", "    _ = io.TextIOWrapper("),),
        (Tests(("integrations/test_run.py",), "nobody_takes"),),
    ),
    Plant(
        "a lease that came by a handover counts on the handover's ttl only",
        (
            Change(
                CORE,
                "deadline = min(max_hold_until, sent + ttl - margin(ttl, self.server.drift))",
                "deadline = min(max_hold_until, sent + (min(ttl, 3.0) if attempt.is_queued else ttl) "
                "- margin(ttl, self.server.drift))",
            ),
        ),
        (Tests(("faults/test_waiters.py",), "as_long_as_any_other"),),
    ),
    Plant(
        "rlock(owner=) enters the older of two leases",
        (
            Change(
                "_api/lock.py",
                "max(held, key=lambda lease: lease.fence)._reenter() if held",
                "min(held, key=lambda lease: lease.fence)._reenter() if held",
            ),
            Change(
                "_api/lock.py",
                "if other.fence < grant.fence and not other._ended and other._core is core:",
                "if False:",
            ),
        ),
        (Tests(("conformance/test_rlock.py",), "newer_one_counts"),),
    ),
    Plant(
        "a task that leaves in another's stead gets a CancelledError that nobody asked for",
        (
            Change(
                "_api/scopes.py",
                "        if here is not task and (_is_pending(task) or here.cancelling()):\n",
                "        if here is not task:\n",
            ),
        ),
        (Tests(("faults/test_cancellation.py",), "another_task_leaves or on_its_way"),),
    ),
    Plant(
        "a lease that nobody holds is renewed for as long as the process lives",
        (Change("_client/lease_ends.py", "if grant.is_orphan:", "if False:"),),
        (Tests(("faults/test_interrupts.py",), "finalizer or unreachable or leaves_nothing_renewed"),),
    ),
    Plant(
        "a server of a quorum that was emptied counts at once",
        (Change(VOTER, "is_same and tonumber(since) or now_ms", "is_same and tonumber(since) or 0"),),
        (Tests(VOTERS, "restart_empty or spare_takes or set_forward or without_a_voter_record"),),
    ),
    Plant(
        "a server of a quorum does not look whether its data are its own",
        (Change(VOTER, "known_replid == replid and", "known_replid and"),),
        (Tests(VOTERS, "reseeded or longest_max_ttl"),),
    ),
    Plant(
        "a server of a quorum waits for as long as the client that asks could hold a lease",
        (Change(VOTER, "math.max(tonumber(longest or 0), max_ttl)", "max_ttl"),),
        (Tests(VOTERS, "longest_max_ttl or as_each_client_says"),),
    ),
    Plant(
        "a voter record that is ahead of the clock stands",
        (Change(VOTER, " and tonumber(since) <= now_ms", ""),),
        (Tests(VOTERS, "ahead_of_the_clock"),),
    ),
    Plant(
        "a server of a quorum confirms renewals while it abstains",
        (Change(LOCK, "abstains_ms > 0 and {ABSTAINS, ''} or GRANTED", "GRANTED"),),
        (Tests(VOTERS, "restart_with_their_data"),),
    ),
    Plant(
        "a lease that a server of a quorum has lost does not come back",
        (Change("_servers/quorum.py", "if isinstance(requests[0].call, RenewCall):", "if False:"),),
        (Tests(VOTERS, "rolling_restart or gets_it_back"),),
    ),
    Plant(
        "a re-grant puts back a lease that was released meanwhile",
        (Change(LOCK, "if call('ZSCORE', TOMBSTONES, token) or not read_record()", "if not read_record()"),),
        (Tests(VOTERS, "arrives_after_the_release"),),
    ),
    Plant(
        "a re-grant holds for another abstention than that of which it was told",
        (Change(LOCK, "if named_abstention ~= abstention or holder", "if not abstention or holder"),),
        (Tests(VOTERS, "arrives_after_the_release"),),
    ),
    Plant(
        "a server counts under each address that leads to it",
        (
            Change("_servers/quorum.py", "if sent.run_id and (twin", "if False and (twin"),
            Change("_servers/quorum.py", 'node.run_id == other.run_id != ""', "False"),
        ),
        (Tests(VOTERS, "leads_to_another_member"),),
    ),
    Plant(
        "a primary that comes back counts as the one that it was",
        (Change(HISTORY, "        return epoch > stamp.epoch or (", "        return False and ("),),
        (Tests(("topologies/test_sentinel.py",), "comes_back_lacks"),),
    ),
    Plant(
        "a spare counts from its own start",
        (Change(HISTORY, "            stamp.mark_spare()\n", "            pass\n"),),
        (
            Tests(("faults/test_spares.py",), "spare_grants_nothing or holder_relies or set_forward"),
            Simulator("spare"),
        ),
    ),
    Plant(
        "who takes a spare for a restarted server shortens its quarantine",
        (Change(QUARANTINE, "or is_older or tells_less then", "or is_older then"),),
        (Tests(("faults/test_spares.py",), "does_not_shorten"),),
    ),
    Plant(
        "acknowledgements of a retried grant count nothing",
        (
            Change(
                LOCK_PLAIN_CASES,
                "        call('PEXPIRE', LOCK, math.max(pttl, ttl))  -- writes in any case, as the verb does\n",
                "        if pttl < tonumber(ttl) - 5000 then call('PEXPIRE', LOCK, math.max(pttl, ttl)) end\n",
            ),
        ),
        (Tests(("topologies/test_acks.py",), "retry_of_a_grant"),),
    ),
    Plant(
        "a handler waits for ever for the acquire that it has interrupted",
        (Change("_client/self_wait.py", "            if blocks(below):\n", "            if False:\n"),),
        (Tests(("faults/test_handlers.py",), "names_both_lines", hangs=True),),
    ),
    Plant(
        "a renewal never falls back to a connection of the pool",
        (
            Change(
                "_transports/blocking/pool.py",
                "refused = isinstance(error, Disconnected | LockError) and self.runtime.is_background()",
                "refused = False",
            ),
        ),
        (Tests(("faults/test_connections.py",), "takes_no_more or maxclients or no_more or background"),),
    ),
    Plant(
        "an observer that takes a second delays the losses of other leases",
        (Change("_client/reports.py", "        if self.ended:\n", "        if True:\n"),),
        (Tests(("faults/test_slow_reports.py",)),),
    ),
    Plant(
        "a revocation does not end the wait inside of its section",
        (
            Change(
                CORE,
                "                attempt.outer_loss = lost\n                event.set()\n",
                "                pass\n",
            ),
        ),
        (Tests(("conformance/test_revoked_waits.py",), "ends_each_kind_of_wait or two_processes"),),
    ),
    Plant(
        "a planned handover inside a quarantine begins it anew",
        (Change("_quarantine/stamp.py", "if identity == self.predecessor and", "if False and"),),
        (Tests(("topologies/test_sentinel.py",), "inside_a_quarantine_keeps"),),
    ),
    Plant(
        "a search for a proof outlasts the time of its caller",
        (
            Change(
                CORE,
                "min(attempt.until, self.runtime.now() + timeout)\n            )\n            attempt.proven",
                "self.runtime.now() + timeout\n            )\n            attempt.proven",
            ),
        ),
        (Simulator("crowd, ruin", "semaphore"),),
    ),
    Plant(
        "the waiter that asks is passed over as unreachable",
        (Change(QUEUE, "if waiter == token or is_reachable(", "if is_reachable("),),
        (Walk(("model/test_scripts.py",), "head_that_asks_itself"),),
    ),
    Plant(
        "a client asks a node of a cluster for ever that has become a replica again",
        (
            Change(
                "_servers/slot_map.py",
                "counts = move.source_stamp.identity or slot in self._histories.moves",
                "counts = move.source_stamp.identity",
            ),
        ),
        (Tests(("topologies/test_cluster.py",), "comes_back_from_a_node"),),
    ),
    Plant(
        "an uptime that is a second too long hides a restart with old keys",
        (Change("_quarantine/identity.py", "return max(0.0, self.uptime - 1)", "return max(0.0, self.uptime)"),),
        (Tests(("faults/test_quarantine.py",), "second_too_long"),),
    ),
    Plant(
        "a release that a moving slot ends midway is reported as a loss",
        (
            Change(
                REQUESTS,
                "has_acks or may_have_written(str(error))",
                "has_acks",
            ),
        ),
        (Tests(("topologies/test_cluster.py",), "ends_midway"),),
    ),
    Plant(
        "`interlock run` takes more names than one message holds",
        (Change("cli/run/command.py", "if len(self.names) > MAX_NAMES:", "if False:"),),
        (Tests(("integrations/test_run.py",), "more_names_are_refused"),),
    ),
    Plant(
        "`pkill -f` of the command meets the supervisor, too",
        (
            Change(
                "cli/run/supervision.py",
                "str(PROGRAM), str(theirs.fileno()), str(told)]",
                "str(PROGRAM), str(theirs.fileno()), str(told), *argv]",
            ),
            Change("cli/run/supervisor.py", "for descriptor in sys.argv[1:])", "for descriptor in sys.argv[1:3])"),
        ),
        (Tests(("integrations/test_run.py",), "name_of_its_own"),),
    ),
)

KNOWN: Final = (
    Plant(
        "the deadline counts from the reply",
        (
            Change(
                REQUESTS,
                "                    return reply, sent\n",
                "                    return reply, self.runtime.now()\n",
            ),
        ),
        (
            Simulator("loss", first=400),
            Simulator("slow link"),
            Histories("single", (*PHASE_ALONE, "late-reply")),
            Tests(LATE, "however_late and acquire"),
        ),
    ),
    Plant(
        "the deadline counts from between the request and its reply",
        (
            Change(
                REQUESTS,
                "                    return reply, sent\n",
                "                    return reply, (sent + self.runtime.now()) / 2\n",
            ),
        ),
        (Simulator("loss"), Tests(LATE, "however_late and acquire")),
    ),
    Plant(
        "extend() counts from its reply",
        (
            Change(
                HOLDING,
                "        hold.extend_deadline(sent, ttl, self.server.drift)\n        self.book.reschedule(hold)\n",
                "        hold.extend_deadline(self.runtime.now(), ttl, self.server.drift)\n"
                "        self.book.reschedule(hold)\n",
            ),
        ),
        (Simulator("slow link"), Tests(LATE, "however_late and extend")),
    ),
    Plant(
        "a renewal counts from its reply",
        (Change(RENEWAL, "hold.extend_deadline(sent, _ttl_ms(", "hold.extend_deadline(now, _ttl_ms("),),
        (Simulator("slow link"), Tests(LATE, "however_late and renewal")),
    ),
    Plant(
        "nobody looks at the deadline",
        (Change(GRANT, "        if now < hold.deadline:\n", "        if True:\n"),),
        (
            Simulator("pause"),
            Histories("single", (*PHASE_ALONE, "stopped-holder")),
            Tests(("faults/test_processes.py",), "stopped_for_longer"),
        ),
    ),
    Plant(
        "ensure() does not look at the deadline",
        (
            Change(
                "_api/lease.py",
                "if why := self._grant.reason_ended(self._made_by.runtime.now()):\n            raise self._grant.error",
                "if why := self._grant.end_reason:\n            raise self._grant.error",
            ),
        ),
        (
            Tests(("faults/test_processes.py",), "stopped_for_longer"),
            Histories("single", (*PHASE_ALONE, "stopped-holder")),
        ),
    ),
    Plant(
        "no undo on a cancel",
        (
            Change(
                CORE,
                "undone = self.undo.add(attempt) if may_have_left or not isinstance(error, LockError) else None",
                "undone = self.undo.add(attempt) if may_have_left and isinstance(error, LockError) else None",
            ),
        ),
        (Simulator("cancel"), Tests((GIVING_UP,), "is_cancelled")),
    ),
    Plant(
        "the client's clock says when a lease ends (PXAT)",
        (
            Change(
                CORE,
                "attempt.token, options.ttl_ms, options.handover_ttl_ms, subscribed, channel, max_waiters, own\n",
                "attempt.token, str(max(1, int(options.ttl_ms) - int(self.runtime.now() * 977) % 500)), "
                "options.handover_ttl_ms, subscribed, channel, max_waiters, own\n",
            ),
        ),
        (Simulator("no faults"),),
    ),
    Plant(
        "a push counts as a grant, without a second look",
        (
            Change(
                WAITING,
                "            self.pushes += 1\n",
                "            self.pushes += 1\n            PUSHED.add(token)\n",
            ),
            Change(WAITING, "class LocalQueue:\n", "PUSHED: set[str] = set()\n\n\nclass LocalQueue:\n"),
            Change(
                CORE,
                "            while True:\n"
                "                subscribed, channel = server.subscription_of(resource.keys[0])\n",
                "            while True:\n"
                "                from interlock._client.waiting import PUSHED\n"
                "                if attempt.token in PUSHED and attempt.make_lease is not None:\n"
                "                    sent = self.runtime.now()\n"
                "                    if (lease := self.lease_from_grant(attempt, int(sent * 1e6), sent)) is not None:\n"
                "                        return lease\n"
                "                subscribed, channel = server.subscription_of(resource.keys[0])\n",
            ),
        ),
        (Simulator("pause"), Tests(("conformance/test_lock.py",), "push_that_arrives")),
    ),
    Plant(
        "a renewal creates the lease again",
        (
            Change(
                LOCK,
                "        states[#states + 1] = abstains_ms > 0 and is_gone and {ABSTAINS, abstention} or NOT_FOUND\n",
                "        if not holder then call('SET', lock, lease_token, 'PX', ttl) end\n"
                "        states[#states + 1] = holder and NOT_FOUND or GRANTED\n",
            ),
        ),
        (Simulator("pause"), Tests(MESSAGES, "creates_no_lease")),
    ),
    Plant(
        "a renewal shortens a lease",
        (
            Change(
                LOCK, "if call('PTTL', lock) < ttl then call('PEXPIRE', lock, ttl) end", "call('PEXPIRE', lock, ttl)"
            ),
        ),
        (Simulator("cancel", first=100), Tests(MESSAGES, "shorten")),
    ),
    Plant(
        "a release deletes whoever holds the lock",
        (
            Change(LOCK_PLAIN_CASES, "elseif stored_fence and call('GET', LOCK) == token then", "elseif false then"),
            Change(LOCK, "  if not holder or holder == token or holder == '!' .. token then\n", "  if true then\n"),
        ),
        (
            Simulator("cancel"),
            Histories("single", (*PHASE_ALONE, "stopped-holder")),
            Tests(MESSAGES, "anybody_else"),
        ),
    ),
    Plant(
        "no tombstone",
        (Change(LOCK, "if call('ZSCORE', TOMBSTONES, token) then return {NOT_FOUND} end", ""),),
        (Simulator("lossy cancel"), Tests(MESSAGES, "spent")),
    ),
    Plant(
        "no tombstone of a permit",
        (
            Change(
                PERMITS, "  if call('ZSCORE', TOMBSTONES, token) then return {NOT_FOUND} end\n  limit =", "  limit ="
            ),
        ),
        (Tests(MESSAGES, "spent"),),
    ),
    Plant(
        "a release leaves no tombstone",
        (
            Change(LOCK, "  add_tombstone(token, tombstone_ttl)\n", ""),
            Change(LOCK_PLAIN_CASES, "      if ARGV[3] ~= '0' then\n", "      if false then\n"),
            Change(PERMITS, "  add_tombstone(token, tombstone_ttl)\n", ""),
        ),
        (Tests(MESSAGES, "spent"),),
    ),
    Plant(
        "a client asks for no tombstone, whatever is in doubt",
        (Change(GRANT, '    return str(int(TOMBSTONE_TTL * 1000)) if attempt.in_doubt else "0"', '    return "0"'),),
        (Tests(LATE, "late_copy"),),
    ),
    Plant(
        "a renewal of a permit creates the lease again",
        (
            Change(
                PERMITS,
                "        granted_by = '-'\n        pcall(apply_quarantine)\n      end\n",
                "        granted_by = '-'\n        pcall(apply_quarantine)\n      end\n"
                "      call('ZADD', HOLDERS, string.format('%.0f', get_time_ms() + ttl), lease_token)\n"
                "      extend_keys(get_time_ms() + ttl)\n",
            ),
        ),
        (Tests(MESSAGES, "creates_no_lease"),),
    ),
    Plant(
        "a renewal shortens a permit",
        (
            Change(
                PERMITS,
                "if tonumber(lease_end) < get_time_ms() + ttl then\n          -- First",
                "if true then\n          -- First",
            ),
        ),
        (Tests(MESSAGES, "shorten"),),
    ),
    Plant(
        "a fence that another step stores",
        (
            Change(
                LOCK_PLAIN_CASES,
                "      local first_words = '1 lock ' .. string.format('%.0f', fence) .. ' ' ",
                "      local first_words = '1 lock ' .. string.format('%.0f', stored_fence) .. ' ' ",
            ),
        ),
        (Walk(("model/test_plain_cases.py",)),),
    ),
    Plant(
        "fences of whole seconds",
        (Change(QUARANTINE, "or math.max(fence + 1, now_us)", "or now_us - now_us % 1000000"),),
        (Simulator("no faults"), Walk(("model/test_permits.py",))),
    ),
    Plant(
        "a fence reserved twice",
        (Change(LOCK, "  fence = first_fence + number - 1\n", "  fence = first_fence\n"),),
        (Simulator("crowd, no faults"), Tests(MESSAGES, "nobody_elses")),
    ),
    Plant(
        "a cohort gives one fence to two sections",
        (Change(COHORT, "self._left, self._next = self._left - 1, fence + 1", "self._left = self._left - 1"),),
        (Simulator("crowd, no faults"), Tests(("conformance/test_cohorts.py",), "fence_of_its_own")),
    ),
    Plant(
        "the client's clock orders the queue",
        (
            Change(
                CORE,
                '/{name}/{os.urandom(16).hex()}",',
                '/{name}/{int(self.runtime.now() * 1000):016x}{os.urandom(8).hex()}",',
            ),
            Change(
                ENQUEUE,
                "string.format('%.0f', (newest or 0) + 1)",
                "string.format('%.0f', tonumber(string.sub(waiter, -32, -17), 16) or 0)",
            ),
        ),
        (Simulator("slow"),),
    ),
    Plant(
        "the newest waiter is the first",
        (Change(QUEUE, "call('ZRANGE', QUEUE, position, position + batch_size - 1)", "call('ZRANGE', QUEUE, -1, -1)"),),
        (Simulator("no faults"), Tests(MESSAGES, "oldest")),
    ),
    Plant(
        "nobody is woken",
        (Change(QUEUE, "  publish(channel, 'granted ' .. waiter)\nend", "end"),),
        (Simulator("no faults"), Tests(MESSAGES, "wakes")),
    ),
    Plant(
        "dead waiters keep their turn",
        (Change(QUEUE, "tonumber(alive_until) > now_ms", "true"),),
        (Simulator("crash"), Walk(("model/test_permits.py",))),
    ),
    Plant(
        "no quarantine",
        (NO_QUARANTINE,),
        (
            Simulator("snapshot"),
            Search("restarts"),
            Histories("sentinel", (*PHASE_ALONE, "lost-grant")),
        ),
    ),
    Plant(
        "half a quarantine",
        (Change(QUARANTINE, "since + wait + grace", "since + wait / 2"),),
        (Simulator("empty", "rwlock"), Histories("sentinel", (*PHASE_ALONE, "lost-grant"))),
    ),
    Plant(
        "a quarantine that each client begins anew",
        (
            Change(
                QUARANTINE,
                "    since = is_known and math.min(since, known_since) or known_since\n",
                "    since = math.max(since, known_since)\n",
            ),
        ),
        (Tests(("faults/test_quarantine.py",), "later_clients_do_not_lengthen"),),
    ),
    Plant(
        "a quarantine without an end",
        (Change(QUARANTINE, "since + wait + grace - get_time_us() / 1000", "30000"),),
        (Simulator("snapshot"), Search("restarts")),
    ),
    Plant(
        "a waiter gets the lock in a quarantine",
        (Change(LOCK, "if apply_quarantine() then return nil, 0 end", ""),),
        (Simulator("snapshot"),),
    ),
    Plant(
        "an old primary that is cut off is not waited for",
        (
            Change(
                HISTORY,
                "previous, max(isolation_grace, self.latest.isolation_grace)",
                "previous, 0.0",
            ),
        ),
        (Simulator("isolated"),),
    ),
    Plant(
        "a client that connects again remembers no server",
        (
            Change(
                HISTORY,
                "        previous = before.identity or lost_before\n",
                '        previous = "-"\n',
            ),
        ),
        (Simulator("empty"),),
    ),
    Plant(
        "a cohort passes a lease on after its deadline",
        (Change(COHORT, HALF_TTL_LEFT, ""),),
        (
            Walk(("model/test_cohort.py",)),
            Simulator("short and long"),
            Search("cohort"),
            # The caller that gets the lease never believes in it, and yet its release says that all went well.
            Histories("single", (*PHASE_ALONE, "stopped-holder"), ("false release",)),
        ),
    ),
    Plant(
        "a cohort passes on a lease with less than half of its ttl left",
        (Change(COHORT, "            and hold.deadline - now >= hold.ttl / 2\n", ""),),
        # No history can see it. The fences of a section are at most 0.1 s old, or its caller asks the server for more
        # before it begins, and the answer lengthens the lease to its ttl, or says that it has ended.
        (Tests(("conformance/test_cohorts.py",), "half_of_its_ttl"), Walk(("model/test_cohort.py",))),
    ),
    Plant(
        "a cohort passes on over its budget",
        (
            Change(
                COHORT,
                "return self._passes_until == FOREVER or (now < self._passes_until and self._left > 0)",
                "return True",
            ),
        ),
        (Walk(("model/test_cohort.py",)),),
    ),
    Plant(
        "a cohort passes a lease on while a request of its user is unanswered",
        (Change(COHORT, "            and hold.unanswered == 0\n", ""),),
        (Walk(("model/test_cohort.py",)), Search("cohort")),
    ),
    Plant(
        "a cohort takes more fences than it has reserved",
        (Change(COHORT, "if self._left == 0 or now", "if self._next == 0 or now"),),
        (Walk(("model/test_cohort.py",)),),
    ),
    Plant(
        "nobody follows a driver that gives up",
        (
            Change(
                COHORT,
                "        driver = self.promote(now)\n        if self.driver is attempt:",
                "        driver = None\n        if self.driver is attempt:",
            ),
        ),
        (Simulator("crowd, cancel"), Walk(("model/test_cohort.py",))),
    ),
    Plant(
        "a revocation that comes before the reply is forgotten",
        (Change(BOOK, "            self.early_revocations[token] = why\n", "            pass\n"),),
        (Simulator("revoked early"),),
    ),
    Plant(
        "nobody asks about a lease that was granted without a subscription",
        (Change(BOOK, "asks = self.pushed_since(hold) >= sent", "asks = False"),),
        (Simulator("revoked", "semaphore"),),
    ),
    Plant(
        "two leases of one token in two copies of a process",
        (
            Change(
                CORE,
                '/{name}/{os.urandom(16).hex()}",',
                '/{name}/{self.made:032x}",',
            ),
            Change(
                CORE,
                "        name, caller = self.caller(resource)\n",
                "        name, caller = self.caller(resource)\n        self.made = getattr(self, 'made', 0) + 1\n",
            ),
        ),
        (Simulator("restored twice"),),
    ),
    Plant(
        "a child uses the leases of its parent after a fork",
        (
            Change(FORKS, "        count += 1\n", "        count += 0\n"),
            Change("_session/session.py", "            grant.end_reason = Grant.FORKED\n", "            pass\n"),
        ),
        (Tests(("faults/test_processes.py",), "fork"),),
    ),
    Plant(
        "a child does not notice a fork that Python's hooks do not see",
        (
            Change(
                FORKS,
                "    if _accepts(page, NO_ADVICE) or not _accepts(page, MADV_WIPEONFORK):\n",
                "    if _accepts(page, NO_ADVICE):\n",
            ),
            Change(FORKS, "        if KNOWN[0]:\n            return\n        count", "        count"),
        ),
        (Tests(("faults/test_forks.py",), "finds_out_by_itself"),),
    ),
    Plant(
        "a call of the parent goes on in a child that a signal handler forks",
        (
            Change("_client/retries.py", "            if self.closed or not KNOWN[0]:\n", "            if False:\n"),
            Change(
                CORE,
                "undoes the attempt.\n            if self.requests.closed or not KNOWN[0]:\n",
                "undoes the attempt.\n            if False:\n",
            ),
        ),
        (Tests(("faults/test_forks.py",), "handler"),),
    ),
    Plant(
        "a caller reads the reply to another caller's message",
        (
            Change(
                "_transports/blocking/connection.py",
                "        self.close()\n"
                "        if isinstance(error, Disconnected) and (error.stale or error.timed_out):\n",
                "        self.checkin()\n"
                "        return\n"
                "        if isinstance(error, Disconnected) and (error.stale or error.timed_out):\n",
            ),
        ),
        (
            Tests(("faults/test_interrupts.py", "faults/test_network.py"), "reply or replies"),
            Histories("single"),
        ),
    ),
    Plant(
        "an execute without the lease",
        (Change(QUEUE, "if not is_holder then return {NOT_FOUND} end", ""),),
        (Simulator("cancel"), Tests((EXECUTE,))),
    ),
    Plant(
        "an execute while anybody holds the lock",
        (Change(LOCK, "execute_command(call('GET', LOCK) == token)", "execute_command(call('EXISTS', LOCK) == 1)"),),
        (Tests((EXECUTE,), "another and not semaphore"),),
    ),
    Plant(
        "an execute while anybody has a permit",
        (
            Change(
                PERMITS,
                "execute_command(permits and is_holder(token) and not reason)",
                "execute_command(call('EXISTS', HOLDERS) == 1)",
            ),
        ),
        (Tests((EXECUTE,), "semaphore or reader or writer"),),
    ),
    Plant(
        "an execute under a permit that is revoked",
        (Change(PERMITS, "is_holder(token) and not reason)", "is_holder(token))"),),
        (Tests((EXECUTE,), "revoked"),),
    ),
    Plant(
        "a record for ever",
        (
            Change(
                LOCK,
                "call('SET', RECORD, value, 'PX', string.format('%.0f', record_ttl))",
                "call('SET', RECORD, value)",
            ),
        ),
        (Simulator("no faults"),),
    ),
    Plant(
        "a confirmation does not lengthen the lease",
        tuple(
            Change(file, "call('PEXPIRE', LOCK, math.max(pttl, ttl))", "local _ = nil")
            for file in (LOCK, LOCK_PLAIN_CASES)
        ),
        (Simulator("pause"), Tests(MESSAGES, "oldest")),
    ),
    Plant(
        "a quorum renews with one vote less than a majority",
        (
            Change(
                "_servers/quorum_votes.py", "    if held >= votes.majority:\n", "    if held >= votes.majority - 1:\n"
            ),
        ),
        (Tests(("topologies/test_quorum.py",), "majority_is_reported"),),
    ),
    Plant(
        "a waiter of a lock stays in the queue when its caller has left",
        (Change(LOCK, "  if has_queue_or_tombstones then dequeue(token) end\n  if holder", "  if holder"),),
        (Tests((GIVING_UP,), "lock and not rwlock or election"),),
    ),
    Plant(
        "a waiter for a permit stays in the queue when its caller has left",
        (
            Change(
                PERMITS,
                "  dequeue(token)\n  local _, _, _, reason = read_share(token)\n",
                "  local _, _, _, reason = read_share(token)\n",
            ),
        ),
        (Tests((GIVING_UP,), "semaphore or reader or writer"),),
    ),
    Plant(
        "nobody undoes what a caller that leaves has queued",
        (
            Change(
                CORE,
                "undone = self.undo.add(attempt) if may_have_left or not isinstance(error, LockError) else None",
                "undone = None",
            ),
        ),
        (Tests((GIVING_UP,)),),
    ),
    Plant(
        "a majority of half the servers",
        (Change("_servers/quorum.py", "self.majority = len(servers) // 2 + 1", "self.majority = len(servers) // 2"),),
        (Simulator("q loss"),),
    ),
    Plant(
        "expired permits stay in the sum",
        (
            Change(
                PERMITS,
                "for _, holder in ipairs(expired) do remove_holder(holder) end",
                "for _, holder in ipairs(expired) do call('ZREM', HOLDERS, holder) call('HDEL', SHARES, holder) end",
            ),
        ),
        (Walk(("model/test_permits.py",)), Simulator("crash", "semaphore")),
    ),
    Plant(
        "a reader overtakes a writer that waits",
        (Change(PERMITS, "(not blocker or blocker == token)", "true"),),
        (Walk(("model/test_permits.py",)), Simulator("no faults", "rwlock")),
    ),
    Plant(
        "a release that comes twice gives two permits back",
        (
            Change(
                PERMITS,
                "  local is_ours = is_holder(token) or last_released == token\n",
                "  local is_ours = is_holder(token) or last_released == token\n"
                "  if last_released == token and read_sum() > 0 then call('HINCRBY', SHARES, 'sum', -1) end\n",
            ),
        ),
        (Walk(("model/test_permits.py",)),),
    ),
    Plant(
        "a retried arrival at a barrier counts twice",
        (Change("primitives/barrier.lua", "  if arrival then", "  if arrival and arrival <= passed then"),),
        (Walk(("model/test_scripts.py",), "barrier"), Simulator("loss", "barrier")),
    ),
    Plant(
        "an open latch tells nobody",
        (
            Change(
                "primitives/latch.lua",
                "    add_tombstone(token, tostring(OPERATION_TTL_MS))\n    wake_some()\n",
                "    add_tombstone(token, tostring(OPERATION_TTL_MS))\n",
            ),
        ),
        (Walk(("model/test_scripts.py",), "latch"),),
    ),
    Plant(
        "a run whose note nobody reads",
        (Change("primitives/once.lua", "  if note then\n", "  if false then\n"),),
        (Walk(("model/test_scripts.py",), "once"), Simulator("no faults", "once")),
    ),
    Plant(
        "several locks keep what they had when one is busy",
        (Change("primitives/multi.lua", "earlier[1](earlier[2], {'release', earlier[3], '0', STAMP})", ""),),
        (Walk(("model/test_scripts.py",), "multi"),),
    ),
    Plant(
        "a lost lease is released while its caller may still work",
        (Change("_client/lease_ends.py", "if grant.lease is None:  # its turn", "if True:  # its turn"),),
        (Simulator("loss"),),
    ),
    Plant(
        "a transition that the table of claims lacks",
        (Change("_client/claim.py", "        E.RELEASES: S.RETURNING,\n", ""),),
        (Simulator("no faults"),),
    ),
)

COUNTING: Final = (
    Plant(
        "the voter record is written after the vote",
        (Change(VOTER, "  abstains_ms = math.max(", "  abstains_ms = not is_same and 0 or math.max("),),
        (Search("quorum", "without data, re-grants"),),
    ),
    Plant(
        "no replid is compared",
        (Change(VOTER, "known_replid == replid and", "known_replid and"),),
        (Simulator("q re-seeded"), Search("quorum", "without the last write")),
    ),
    Plant(
        "the replid of the stamp is compared and written",
        (Change(VOTER, "  local now_ms, max_ttl", "  replid = string.sub(STAMP, 14, 25)\n  local now_ms, max_ttl"),),
        (Simulator("q re-seeded"), Tests(ABSTENTION)),
    ),
    Plant(
        "a server with a record of another replid does not wait",
        (Change(VOTER, "or now_ms, is_same", "or known_replid and 0 or now_ms, is_same"),),
        (Simulator("q re-seeded"), Search("quorum", "without the last write")),
    ),
    Plant(
        "a longer max_ttl of another client is forgotten",
        (Change(VOTER, "math.max(tonumber(longest or 0), max_ttl)", "max_ttl"),),
        (Simulator("q two ttls"), Tests(ABSTENTION, "longest_max_ttl")),
    ),
    Plant(
        "the voter record says when the abstention ends",
        (
            Change(
                VOTER,
                "  longest = math.max(tonumber(longest or 0), max_ttl)\n",
                "  longest = is_same and tonumber(longest) or math.max(tonumber(longest or 0), max_ttl)\n",
            ),
        ),
        (Tests(ABSTENTION, "longest_max_ttl"),),
    ),
    Plant(
        "a server that two addresses lead to votes twice",
        (
            Change(
                QUORUM, "(twin := self._run_ids.setdefault(sent.run_id, node)) is not node", "(twin := node) is None"
            ),
        ),
        (Simulator("q moved"),),
    ),
    Plant(
        "an acquire that finds its own token is not judged",
        (Change(LOCK, "(IN_QUORUM or holder ~= token) and apply", "holder ~= token and apply"),),
        (Search("quorum", "asks again"), Tests(ABSTENTION, "copy_has_brought")),
    ),
    Plant(
        "a renewal counts at a server that abstains",
        (Change(LOCK, "abstains_ms > 0 and {ABSTAINS, ''} or GRANTED", "GRANTED"),),
        (Tests(ABSTENTION, "confirms_no_renewal"),),
    ),
    Plant(
        "a fence counts that a server has stored while it abstained",
        (Change(LOCK, "if abstains_ms > 0 or call('GET', LOCK) ~= token", "if call('GET', LOCK) ~= token"),),
        (Tests(ABSTENTION, "accepts_no_fence"),),
    ),
    Plant(
        "a server hands over while it abstains",
        (
            Change(
                LOCK,
                "  if apply_quarantine() then return nil, 0 end\n",
                "  if not IN_QUORUM and apply_quarantine() then return nil, 0 end\n",
            ),
        ),
        (Tests(ABSTENTION, "hands_over"),),
    ),
    Plant(
        "a lease is granted again without a look at its tombstone",
        (Change(LOCK, "if call('ZSCORE', TOMBSTONES, token) or not read_record() or", "if not read_record() or"),),
        (Search("quorum", "comes late"), Tests(ABSTENTION, "after_the_release")),
    ),
    Plant(
        "any abstention accepts a re-grant",
        (Change(LOCK, "if named_abstention ~= abstention or holder", "if abstains_ms == 0 or holder"),),
        (Search("quorum", "comes late"), Tests(ABSTENTION, "that_a_regrant_names")),
    ),
    Plant(
        "a lease is granted again with a lower fence",
        (Change(LOCK, "math.max(fence, agreed_fence), '-', ttl", "fence, '-', ttl"),),
        (Tests(ABSTENTION, "keeps_the_fence"),),
    ),
    Plant(
        "a server takes a re-grant for a grant of its own",
        (Change(LOCK, "math.max(fence, agreed_fence), '-', ttl", "math.max(fence, agreed_fence), IDENTITY, ttl"),),
        (Tests(ABSTENTION, "its_own_grant"),),
    ),
)

PLANTS: Final = {plant.name: plant for plant in (*FOUND, *KNOWN, *COUNTING)}
