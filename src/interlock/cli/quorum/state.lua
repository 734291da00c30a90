-- Writes what an operator states: this server of a quorum has forgotten no lease that may be alive, so it counts from
-- now on (ADR 60).
--
-- Theory. This message may be late. Meanwhile the server may have restarted, or a client may have begun an abstention.
-- So the script writes only where it finds what the operator has seen. Each loss of data changes the replid or removes
-- the record, and a client that meets the server after a loss writes the record anew. Where there was no record, a
-- client may have come and FLUSHALL have removed its record again. Before its first lease, that client waits for its
-- max_ttl: so a look is good for MAX_AGE_MS, and FLUSHALL within that time is covered unless a client has a max_ttl that
-- is shorter still. The record then says that the server has served for the longest max_ttl.
--
-- KEYS   1 voter     string  as voter.lua describes it
-- ARGV   1 replid that the operator has seen
--        2 the record that the operator has seen; "" if there was none
--        3 this server's clock when the operator saw them, ms
--        4 the longest max_ttl, ms
--        5 ttl of the record, ms
-- RETURN {1}, or {0} if the server is a replica, if another replid or record is there, or if the look is too old
local MAX_AGE_MS = 2000
local seen_replid, seen_record, seen_ms, longest_ms, ttl_ms = unpack(ARGV)
local info, stored, time = redis.call('INFO', 'replication'), redis.pcall('GET', KEYS[1]), redis.call('TIME')
local role, replid = string.match(info, 'role:(%a+).-\nmaster_replid:(%x+)')
local now_ms = math.floor(time[1] * 1000 + time[2] / 1000)
local age_ms = now_ms - seen_ms
local is_as_seen = role == 'master' and replid == seen_replid and (stored or '') == seen_record
if not is_as_seen or age_ms < 0 or age_ms > math.min(longest_ms, MAX_AGE_MS) then return {0} end
redis.call('SET', KEYS[1], string.format('1 %s %.0f %.0f', replid, now_ms - longest_ms, longest_ms), 'PX', ttl_ms)
return {1}
