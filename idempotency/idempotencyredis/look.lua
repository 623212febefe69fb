-- Returns the state of the key, and changes nothing: the reply of begin.lua for a key that is not free, the time
-- of its claim (ms), and the time that is left (ms).
-- KEYS: record, lock.
local rec = redis.call('HMGET', KEYS[1], 'status', 'fpv', 'fp', 'created', 'token', 'code')
for _, i in ipairs({2, 3, 4, 6}) do -- longer values are cut; they then equal none of ours
  rec[i] = rec[i] and string.sub(rec[i], 1, 128)
end
if rec[1] == 'completed' then
  local ends = redis.call('PTTL', KEYS[1])
  local fields = rec[6] and {'hdr', 'body'} or {'response'} -- a record of another system
  for i = 1, #fields do
    if redis.call('HSTRLEN', KEYS[1], fields[i]) > 67108864 then -- 64 MiB: too large to read
      return {rec[1], rec[2], rec[3], false, false, false, false, rec[4], ends}
    end
  end
  if not rec[6] then
    return {rec[1], rec[2], rec[3], false, false, false, redis.call('HGET', KEYS[1], 'response'), rec[4], ends}
  end
  local kept = redis.call('HMGET', KEYS[1], 'hdr', 'body')
  return {rec[1], rec[2], rec[3], rec[6], kept[1], kept[2], false, rec[4], ends}
end
if rec[1] and rec[1] ~= 'processing' then -- a record of another system or a later version: it may mean "done"
  return {'unknown'}
end
local holder = redis.call('GET', KEYS[2])
if not holder then
  return {'free'}
end
if rec[5] ~= holder then -- the record belongs to an older claim
  rec[2], rec[3], rec[4] = false, false, false
end
local ends = redis.call('PTTL', KEYS[2])
return {'processing', rec[2], rec[3], tostring(ends), false, false, false, rec[4], ends}
