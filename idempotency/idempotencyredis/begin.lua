-- Claims the key, or returns the state of its holder.
-- KEYS: record, lock. ARGV: token, fingerprint version, fingerprint, lease (ms), now (ms).
local rec = redis.call('HMGET', KEYS[1], 'status', 'fpv', 'fp', 'code', 'token')
for i = 2, 4 do -- longer values are cut; they then equal none of ours
  rec[i] = rec[i] and string.sub(rec[i], 1, 128)
end
if rec[1] == 'completed' then
  local fields = rec[4] and {'hdr', 'body'} or {'response'} -- a record of another system
  for i = 1, #fields do
    if redis.call('HSTRLEN', KEYS[1], fields[i]) > 67108864 then -- 64 MiB: too large to read
      return {'completed', rec[2], rec[3]}
    end
  end
  if not rec[4] then
    return {rec[1], rec[2], rec[3], false, false, false, redis.call('HGET', KEYS[1], 'response')}
  end
  local kept = redis.call('HMGET', KEYS[1], 'hdr', 'body')
  return {rec[1], rec[2], rec[3], rec[4], kept[1], kept[2]}
end
if rec[1] and rec[1] ~= 'processing' then -- a record of another system or a later version: it may mean "done"
  return {'unknown'}
end
if redis.call('SET', KEYS[2], ARGV[1], 'NX', 'PX', ARGV[4]) then
  if rec[1] then -- the record of a run that has lost the key
    redis.call('DEL', KEYS[1])
  end
  redis.call('HSET', KEYS[1], 'status', 'processing', 'token', ARGV[1], 'fpv', ARGV[2], 'fp', ARGV[3], 'created', ARGV[5])
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
  return 1
end
local holder = redis.call('GET', KEYS[2])
if holder == ARGV[1] then -- a repeated Begin
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
  return 1
end
local left = redis.call('PTTL', KEYS[2])
if left < 0 then -- a lock without an expiry would hold the key forever
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
  left = ARGV[4]
end
if rec[5] ~= holder then -- the record belongs to an older claim
  rec[2], rec[3] = false, false
end
return {'processing', rec[2], rec[3], tostring(left)}
