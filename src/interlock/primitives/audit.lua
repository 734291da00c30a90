-- The audit: who revoked what, when, why and with what result. For people: no decision reads it.
--
-- Theory. A revocation has an entry for each step: "asked" before the server changes anything, and one with the result.
-- So a process that dies in between leaves the trace that it asked. A request that was sent twice leaves two equal
-- entries; whoever reads folds all entries of one operation into one. The time of an entry is its id, by this server's
-- clock. The stream has a bounded length and a TTL.
--
-- KEYS   1 audit    stream  operation, step, and the fields that audit.py names
-- ARGV   1 verb, then the verb's arguments; RETURN: the reply
--   note     operation  step  (field  value)...   RETURN {1}
--   noted    before  most                         RETURN {{id, field, value, ...}, ...}
--                             the newest entries first; before: "+", or "(<id>" of the oldest entry that was read

local AUDIT, verb = KEYS[1], ARGV[1]
ARGV[#ARGV] = nil  -- the identity stamp of the sender, which does not matter here
local MAX_ENTRIES, TTL_MS = '2000', '7776000000'  -- 90 days

if verb == 'note' then
  redis.call('XADD', AUDIT, 'MAXLEN', '~', MAX_ENTRIES, '*', 'operation', ARGV[2], 'step', unpack(ARGV, 3))
  redis.call('PEXPIRE', AUDIT, TTL_MS)
  return {1}

elseif verb == 'noted' then
  local before, most = ARGV[2], ARGV[3]
  local found = {}
  for _, entry in ipairs(redis.call('XREVRANGE', AUDIT, before, '-', 'COUNT', most)) do
    table.insert(entry[2], 1, entry[1])
    found[#found + 1] = entry[2]
  end
  return found
end
return redis.error_reply('ERR interlock: unknown verb ' .. tostring(verb))
