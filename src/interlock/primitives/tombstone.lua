-- Statements, for a place where `member`, `ttl` and `now_ms` are set: they add a tombstone for `ttl` ms, and drop those
-- whose time is over. A new tombstone never shortens the life of another.
local key_ttl = string.format('%.0f', math.max(ttl, call('PTTL', TOMBSTONES)))
call('PEXPIRE', TOMBSTONES, key_ttl)
call('ZREMRANGEBYSCORE', TOMBSTONES, '-inf', string.format('%.0f', now_ms))
-- pcall: without memory there is no tombstone, but the verb must still do its work.
redis.pcall('ZADD', TOMBSTONES, string.format('%.0f', now_ms + ttl), member)
call('PEXPIRE', TOMBSTONES, key_ttl)
