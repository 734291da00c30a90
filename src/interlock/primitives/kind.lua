-- The kind: which kind of synchronizer uses a name, if any. For people, who know the name alone. It writes nothing.
--
-- Theory. Each kind has its record under the same key, and the second word of the record is the kind. A name without a
-- record may have the note of a `once`, which outlives the record, or the plain key of another library.
--
-- KEYS   1 name         string  or any other type, as the kind has it
--        2 record       string  "1 <kind> ...", as each kind has it
--        3 done         string  the note of a run, as in once.lua
--        4 plain-record string  "1 plain <attempt> ... !<value>", as in plain_key.lua
--        ... and last, in a quorum: voter, which this script leaves aside, see message.lua
-- ARGV   1 verb, then the verb's arguments; RETURN: the reply
--   kind  what              RETURN {record | "", value | "", the name has another type than string, or no text 0|1,
--                                   note | "", record of plain_key.lua | "", the server's time in µs}
--                             what: "-", for words of a later version

--include message

if verb == 'kind' then
  local texts, is_other_type, failure = {}, 0, nil
  for i = 1, 4 do
    local text = redis.pcall('GET', KEYS[i])
    if type(text) ~= 'table' then
      texts[i] = text or ''
      if i == 1 and text == '' then is_other_type = 1 end
    elseif string.find(text.err, 'WRONGTYPE', 1, true) then
      texts[i] = ''
      if i == 1 then is_other_type = 1 end
    else
      failure = text
    end
  end
  local time, value, record, note, plain_record = call('TIME'), unpack(texts)
  return failure or {record, value, is_other_type, note, plain_record, time[1] .. string.sub('00000' .. time[2], -6)}
end
return redis.error_reply('ERR interlock: unknown verb ' .. tostring(verb))
