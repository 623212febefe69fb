-- Starts the lease again.
-- KEYS: record, lock. ARGV: token, lease (ms).
if redis.call('GET', KEYS[2]) ~= ARGV[1] then
  return 0
end
if redis.call('HGET', KEYS[1], 'status') == 'processing' then -- another system's answer keeps its expiry
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 1
