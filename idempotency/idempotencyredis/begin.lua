-- Claims the key, or tells who has it.
-- KEYS: record, lock. ARGV: token, fingerprint version, fingerprint, lease (ms), now (ms).
local rec = redis.call('HMGET', KEYS[1], 'status', 'fpv', 'fp', 'code', 'token')
for i = 2, 4 do -- what is longer than any of ours is cut, and equals none
  rec[i] = rec[i] and string.sub(rec[i], 1, 128)
end
if rec[1] == 'completed' then
  local fields = rec[4] and {'hdr', 'body'} or {'response'} -- by another system
  for i = 1, #fields do
    if redis.call('HSTRLEN', KEYS[1], fields[i]) > 67108864 then -- 64 MiB: nobody is made to read that
      return {'completed', rec[2], rec[3]}
    end
  end
  if not rec[4] then
    return {rec[1], rec[2], rec[3], false, false, false, redis.call('HGET', KEYS[1], 'response')}
  end
  local kept = redis.call('HMGET', KEYS[1], 'hdr', 'body')
  return {rec[1], rec[2], rec[3], rec[4], kept[1], kept[2]}
end
if rec[1] and rec[1] ~= 'processing' then -- by another system, or a later version: it may mean "done"
  return {'unknown'}
end
if redis.call('SET', KEYS[2], ARGV[1], 'NX', 'PX', ARGV[4]) then
  if rec[1] then -- of a run that has lost the key
    redis.call('DEL', KEYS[1])
  end
  redis.call('HSET', KEYS[1], 'status', 'processing', 'token', ARGV[1], 'fpv', ARGV[2], 'fp', ARGV[3], 'created', ARGV[5])
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
  return 1
end
local holder = redis.call('GET', KEYS[2])
if holder == ARGV[1] then -- asked again
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
  return 1
end
local left = redis.call('PTTL', KEYS[2])
if left < 0 then -- a lock without an end would hold the key for ever
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
  left = ARGV[4]
end
if rec[5] ~= holder then -- the record is an older claim's
  rec[2], rec[3] = false, false
end
return {'processing', rec[2], rec[3], tostring(left)}
